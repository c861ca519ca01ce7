"""Role ssh_trust: the head logs in without a prompt, and nobody else can."""

import pytest

FOLDER = "/etc/farandole/ssh"


def as_job(host, target, command="hostname", *options, user="trainer"):
    """Use ssh as a job does; status 255 becomes 1, because testinfra reads 255 as a failure of its own ssh."""
    ssh = ["runuser", "-u", user, "--", "ssh", "-o", "BatchMode=yes", *options, target, command]
    return host.run(" ".join(["%s"] * len(ssh)) + " || exit 1", *ssh)


@pytest.mark.parametrize("name", ["node-1", "node-2"])
def test_the_head_logs_in_by_name_and_by_address_without_a_prompt(head, addresses, name):
    for target in (name, addresses[name]):
        result = as_job(head, target)
        assert (result.stdout.strip(), result.stderr, result.rc) == (name, "", 0)


@pytest.mark.parametrize("name", ["alice", "bob"])
def test_people_reach_every_node_as_themselves(head, name):
    assert as_job(head, "node-2", "id -un", user=name).stdout == f"{name}\n"


def test_a_worker_has_no_job_key(worker):
    assert worker.check_output("find %s -path '*/id_job*' -type f", FOLDER) == ""
    assert "Permission denied" in as_job(worker, "node-1").stderr


def test_one_line_covers_all_host_keys(host):
    lines = host.file("/etc/ssh/ssh_known_hosts").content_string.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("@cert-authority * ssh-ed25519 ")


def test_issued_certificates_are_recorded_by_node(host, inventory_path):
    ledger = inventory_path.parents[1] / ".farandole" / inventory_path.name / "ca" / "signed_keys"
    name = host.check_output("hostname")
    key = " ".join(host.file("/etc/ssh/ssh_host_ed25519_key.pub").content_string.split()[:2])
    assert f"{key} {name} host" in ledger.read_text().splitlines()


def test_only_the_job_user_can_read_the_job_key(head):
    key = head.file(f"{FOLDER}/id_job")
    assert (key.user, key.mode) == ("trainer", 0o600)


def test_the_ca_keys_stay_on_the_control_machine(host, inventory_path):
    folder = inventory_path.parents[1] / ".farandole" / inventory_path.name / "ca"
    for kind in ("host_ca", "user_ca"):
        assert (folder / kind).stat().st_mode & 0o777 == 0o600
        secret = (folder / kind).read_text().splitlines()[4]  # the lines before hold the public half
        assert host.run("grep --recursive --files-with-matches --fixed-strings -e %s /etc /root /home", secret).rc == 1


def test_sshd_accepts_the_simultaneous_logins_of_a_launch(head, worker):
    assert "maxstartups 100:30:200" in worker.check_output("sshd -T").lower()
    logins = 'for i in $(seq 40); do ssh -o BatchMode=yes node-2 true & all="$all $!"; done'
    burst = logins + "; for login in $all; do wait $login || exit 1; done"
    assert head.run("runuser -u trainer -- sh -c %s", burst).rc == 0
