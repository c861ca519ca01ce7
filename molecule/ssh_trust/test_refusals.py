"""Attacks on ssh trust. Each is tried twice: it must fail with the role's protection, and succeed without it, which
shows that this protection is the reason."""

import os
import subprocess
from contextlib import contextmanager

import pytest
from test_trust import FOLDER, as_job

# Of most settings, sshd takes the first one.
WEAK = "/etc/ssh/sshd_config.d/00-weakened.conf"
LAST = "/etc/ssh/sshd_config.d/zz-weakened.conf"


def reload(host):
    """Reload sshd and wait, because it briefly closes its port."""
    host.check_output("systemctl reload ssh && sleep 0.5")


@contextmanager
def weakened(host, settings, path=WEAK):
    """Run sshd with weakened settings for a while."""
    host.check_output("printf -- %s >%s", settings, path)
    reload(host)
    try:
        yield
    finally:
        host.check_output("rm %s", path)
        reload(host)


@pytest.fixture(scope="session")
def ca(inventory_path):
    return inventory_path.parents[1] / ".farandole" / inventory_path.name / "ca" / "user_ca"


@pytest.fixture
def signed(head, ca, tmp_path):
    """Sign the head's job key by hand, into a certificate that only the test uses."""

    def sign(*options):
        key = tmp_path / "job.pub"
        key.write_text(head.file(f"{FOLDER}/id_job.pub").content_string)
        subprocess.run(["ssh-keygen", "-q", "-s", ca, "-I", "test", *options, key], check=True)
        certificate = (tmp_path / "job-cert.pub").read_text()
        head.check_output("printf -- %s >/run/test-cert.pub", certificate)
        return [
            "-F",
            "none",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            f"IdentityFile={FOLDER}/id_job",
            "-o",
            "CertificateFile=/run/test-cert.pub",
        ]

    return sign


def refused(result):
    return result.rc == 1 and "Permission denied" in result.stderr


def test_the_job_certificate_gives_no_root_login(head, worker):
    assert refused(as_job(head, "root@node-2"))
    worker.check_output("printf 'trainer\n' >/etc/ssh/test-principals")
    hole = f"TrustedUserCAKeys {FOLDER}/user_ca.pub\nAuthorizedPrincipalsFile /etc/ssh/test-principals\n"
    with weakened(worker, hole):
        assert as_job(head, "root@node-2").rc == 0


def test_even_a_certificate_for_root_gives_no_root_login(head, worker, signed):
    options = signed("-n", "root,trainer")
    assert as_job(head, "node-2", "true", *options).rc == 0
    assert refused(as_job(head, "root@node-2", "true", *options))
    with weakened(worker, f"TrustedUserCAKeys {FOLDER}/user_ca.pub\n"):
        assert as_job(head, "root@node-2", "true", *options).rc == 0


def test_a_key_left_in_the_home_is_refused(head, worker):
    """A formerly trusted node could have left such a key."""
    head.check_output("runuser -u trainer -- sh -c %s", "rm -f ~/left*; ssh-keygen -q -t ed25519 -N '' -f ~/left")
    key = head.check_output("cat /home/trainer/left.pub")
    leave = "umask 077; mkdir -p ~/.ssh; echo $0 >~/.ssh/authorized_keys"
    worker.check_output("runuser -u trainer -- sh -c %s %s", leave, key)
    options = ["-F", "none", "-o", "IdentitiesOnly=yes", "-i", "/home/trainer/left"]
    assert refused(as_job(head, "node-2", "true", *options))
    with weakened(worker, "Match User trainer\n  AuthorizedKeysFile .ssh/authorized_keys\n"):
        assert as_job(head, "node-2", "true", *options).rc == 0
    # Nor does it count if the site looks keys up by a program.
    look = "AuthorizedKeysCommand /usr/bin/cat /home/trainer/.ssh/authorized_keys\nAuthorizedKeysCommandUser trainer\n"
    with weakened(worker, look):
        assert refused(as_job(head, "node-2", "true", *options))
    with weakened(worker, f"Match User trainer\n{look}"):
        assert as_job(head, "node-2", "true", *options).rc == 0
    # The role writes the keys of allowed people here.
    keys = f"{FOLDER}/login_keys"
    worker.check_output("echo %s >%s", key, keys)
    try:
        assert as_job(head, "node-2", "true", *options).rc == 0
    finally:
        worker.check_output("truncate --size 0 %s", keys)


SILENT = """
import socket, time
time.sleep(3)
held = [socket.create_connection(("node-2", 22)) for _ in range(1000)]
time.sleep(60)
"""


def test_silent_connections_of_one_node_do_not_lock_others_out(head, worker):
    def asked_for_a_key():
        head.check_output("systemd-run --quiet --collect --unit silent python3 -c %s", SILENT)
        try:
            # Only whether sshd answers counts: nobody is let in, and nothing is sent.
            login = "ssh -F none -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null 127.0.0.1"
            # The connection of this command is there before the silent ones.
            return "Permission denied" in worker.run(f"sleep 8; {login} true || exit 1").stderr
        finally:
            head.check_output("systemctl stop silent")

    assert asked_for_a_key()
    with weakened(worker, "PerSourceMaxStartups none\n", LAST):
        assert not asked_for_a_key()


def test_a_person_s_certificate_gives_no_login_as_another(head, worker):
    worker.check_output("printf 'alice\n' >/etc/ssh/test-principals")
    for other in ("bob", "trainer"):
        assert refused(as_job(head, f"{other}@node-2", user="alice"))
        with weakened(worker, f"Match User {other}\n  AuthorizedPrincipalsFile /etc/ssh/test-principals\n"):
            assert as_job(head, f"{other}@node-2", user="alice").stdout == "node-2\n"


@contextmanager
def opened(host, *paths):
    """Let everybody read files for a while."""
    modes = [host.check_output("stat -c %%a %s", path) for path in paths]
    for path in paths:
        host.check_output("chmod o+rx %s", path)
    try:
        yield
    finally:
        for path, mode in zip(paths, modes, strict=True):
            host.check_output("chmod %s %s", mode, path)


@pytest.mark.parametrize(
    ("path", "protected"),
    [(f"{FOLDER}/id_jobs/bob", f"{FOLDER}/id_jobs/bob"), ("/home/bob/notes", "/home/bob")],
    ids=["job key", "home"],
)
def test_people_cannot_read_each_other_s_keys_and_homes(head, path, protected):
    head.check_output("runuser -u bob -- touch /home/bob/notes")
    attack = ("runuser -u alice -- cat %s", path)
    assert head.run(*attack).rc == 1
    with opened(head, protected):
        assert head.run(*attack).rc == 0


def test_people_cannot_end_each_other_s_processes(head):
    attack = (
        "runuser -u bob -- sleep 600 >/dev/null 2>&1 & sleep 0.2; runuser -u %s -- kill -9 $(pgrep -u bob -x sleep)"
    )
    assert head.run(attack, "alice").rc == 1
    assert head.check_output("pgrep -c -u bob -x sleep") == "1"
    assert head.run(attack, "bob").rc == 0


def test_people_log_in_on_the_head_only(head, worker):
    """A person's own key, which is not on any node."""
    head.check_output("runuser -u bob -- sh -c %s", "rm -f ~/own*; ssh-keygen -q -t ed25519 -N '' -f ~/own")
    key = head.check_output("cat /home/bob/own.pub")
    options = ["-F", "none", "-o", "IdentitiesOnly=yes", "-i", "/home/bob/own"]
    keys = f"{FOLDER}/login_keys.d/bob"
    head.check_output("echo %s >%s", key, keys)
    assert as_job(head, "node-1", "id -un", *options, user="bob").stdout == "bob\n"
    assert refused(as_job(head, "alice@node-1", "id -un", *options, user="bob"))
    head.check_output("cp %s %s && truncate --size 0 %s", keys, f"{FOLDER}/login_keys.d/alice", keys)
    assert as_job(head, "alice@node-1", "id -un", *options, user="bob").stdout == "alice\n"
    head.check_output("truncate --size 0 %s", f"{FOLDER}/login_keys.d/alice")
    assert refused(as_job(head, "node-2", "id -un", *options, user="bob"))
    worker.check_output("mkdir -p %s && echo %s >%s", f"{FOLDER}/login_keys.d", key, keys)
    assert as_job(head, "node-2", "id -un", *options, user="bob").stdout == "bob\n"
    worker.check_output("rm -r %s", f"{FOLDER}/login_keys.d")


def test_people_have_no_sudo(head):
    head.check_output("apt-get -qq install sudo")
    assert head.run("runuser -u alice -- sudo -n id -u").rc == 1
    head.check_output("echo 'alice ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/test")
    assert head.check_output("runuser -u alice -- sudo -n id -u") == "0"
    head.check_output("rm /etc/sudoers.d/test")


def test_password_login_as_the_job_user_is_refused(head, worker):
    worker.check_output("echo trainer:known | chpasswd")
    head.check_output("printf '#!/bin/sh\necho known\n' >/run/askpass && chmod 755 /run/askpass")
    attack = (
        "runuser -u trainer -- env SSH_ASKPASS=/run/askpass SSH_ASKPASS_REQUIRE=force "
        "ssh -o PubkeyAuthentication=no -o NumberOfPasswordPrompts=1 node-2 hostname || exit 1"
    )
    try:
        assert refused(head.run(attack))
        with weakened(worker, "Match User trainer\n  AuthenticationMethods any\n  PasswordAuthentication yes\n"):
            assert head.run(attack).stdout.strip() == "node-2"
    finally:
        worker.check_output("usermod --password '*' trainer")


def test_the_job_key_is_refused_from_outside_the_cluster(head, addresses, signed, tmp_path, inventory_path):
    """The control machine plays an outsider with the head's stolen key and certificate."""

    def attack(certificate):
        stolen = tmp_path / "stolen"
        stolen.write_text(head.file(f"{FOLDER}/id_job").content_string)
        stolen.chmod(0o600)
        (tmp_path / "stolen-cert.pub").write_text(head.file(certificate).content_string)
        return subprocess.run(
            [
                "ssh",
                "-F",
                "none",
                "-i",
                stolen,
                "-o",
                "IdentitiesOnly=yes",
                "-o",
                "BatchMode=yes",
                "-o",
                f"UserKnownHostsFile={inventory_path}/.ssh/known_hosts",
                f"trainer@{addresses['node-2']}",
                "hostname",
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "SSH_AUTH_SOCK": ""},
        )

    thief = attack(f"{FOLDER}/id_job-cert.pub")
    assert thief.returncode == 255
    assert "Permission denied" in thief.stderr
    signed("-n", "trainer")
    assert attack("/run/test-cert.pub").stdout.strip() == "node-2"


def test_the_heads_key_is_refused_from_another_node(head, worker, signed):
    def attack(certificate):
        for name, source in (("id", f"{FOLDER}/id_job"), ("id-cert.pub", certificate)):
            worker.check_output("printf -- %s >/run/%s", head.file(source).content_string, name)
        worker.check_output("chown trainer /run/id && chmod 600 /run/id")
        return as_job(worker, "node-1", "hostname", "-i", "/run/id")

    assert refused(attack(f"{FOLDER}/id_job-cert.pub"))
    signed("-n", "trainer")
    assert attack("/run/test-cert.pub").stdout.strip() == "node-1"


def test_an_expired_certificate_is_refused(head, signed):
    assert refused(as_job(head, "node-2", "true", *signed("-n", "trainer", "-V", "-2d:-1d")))
    assert as_job(head, "node-2", "true", *signed("-n", "trainer", "-V", "-2d:+1d")).rc == 0


def test_a_certificate_of_an_unknown_ca_is_refused(head, worker, tmp_path):
    unknown = tmp_path / "unknown_ca"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", unknown], check=True)
    key = tmp_path / "job.pub"
    key.write_text(head.file(f"{FOLDER}/id_job.pub").content_string)
    subprocess.run(["ssh-keygen", "-q", "-s", unknown, "-I", "test", "-n", "trainer", key], check=True)
    head.check_output("printf -- %s >/run/test-cert.pub", (tmp_path / "job-cert.pub").read_text())
    options = [
        "-F",
        "none",
        "-o",
        f"IdentityFile={FOLDER}/id_job",
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "CertificateFile=/run/test-cert.pub",
    ]
    assert refused(as_job(head, "node-2", "true", *options))
    worker.check_output("printf -- %s >/etc/ssh/unknown_ca.pub", unknown.with_suffix(".pub").read_text())
    with weakened(worker, "Match User trainer\n  TrustedUserCAKeys /etc/ssh/unknown_ca.pub\n"):
        assert as_job(head, "node-2", "true", *options).rc == 0


@contextmanager
def answering(host, key):
    """Run a second sshd on port 2222 with this host key."""
    settings = (
        f"Port 2222\nPidFile /run/second.pid\nUsePAM yes\nTrustedUserCAKeys {FOLDER}/user_ca.pub\nHostKey {key}\n"
    )
    certificate = f"HostCertificate {key}-cert.pub\n" if host.file(f"{key}-cert.pub").exists else ""
    host.check_output("printf -- %s >/run/second.conf && /usr/sbin/sshd -f /run/second.conf", settings + certificate)
    try:
        yield
    finally:
        host.check_output("kill $(cat /run/second.pid)")


def test_a_node_with_a_changed_host_key_is_refused(head, worker):
    with answering(worker, "/etc/ssh/ssh_host_ed25519_key"):
        assert as_job(head, "node-2", "hostname", "-p", "2222").stdout.strip() == "node-2"
    worker.check_output("test -e /run/changed || ssh-keygen -q -t ed25519 -N '' -f /run/changed")
    with answering(worker, "/run/changed"):
        result = as_job(head, "node-2", "hostname", "-p", "2222")
        assert result.rc == 1
        assert "Host key verification failed" in result.stderr
        # Without the protection:
        trusting = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        assert as_job(head, "node-2", "hostname", "-p", "2222", *trusting).stdout.strip() == "node-2"
