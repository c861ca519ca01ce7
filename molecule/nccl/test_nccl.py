"""Role nccl: one exact version from each source, held and working, and its refusals."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEBS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "debs"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
NEW, OLD = "2.22.3-1+cuda12.5", "2.21.5-1+cuda12.4"
GPU = {"nvidia_driver": "570.86.10"}
CALL = """
import ctypes
library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
print(library.ncclGetVersion(ctypes.byref(number)), number.value)
print(library.ncclGetUniqueId(ctypes.create_string_buffer(128)))
"""


@pytest.fixture
def role(inventory_path):
    """Run the role again on one node, with other variables."""

    def run(node, **variables):
        arguments = json.dumps({"nccl_install": True, **variables})
        done = subprocess.run(
            ["ansible-playbook", "-i", inventory_path, "-l", node, "-e", arguments, "molecule/nccl/converge.yml"],
            cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "NCCL_DEBS": str(DEBS),
                 "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"},
        )  # fmt: skip
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def state(host):
    """State and version of libnccl-dev and libnccl2 in dpkg."""
    form = "--showformat=${db:Status-Abbrev}${Version}\n"
    return host.run("dpkg-query --show %s libnccl2 libnccl-dev", form).stdout.split("\n")[:2]


def is_at(host, version):
    return state(host) == [f"hi {version}"] * 2 and host.check_output("python3 -c %s", CALL).split("\n")[1] == "0"


def test_both_packages_are_held_at_the_requested_version(host):
    release = host.check_output(". /etc/os-release && echo $VERSION_ID")
    assert state(host) == [f"hi {'2.22.3-1-1' if release == '13' else NEW}"] * 2


def test_the_library_reports_its_version(host):
    assert host.check_output("python3 -c %s", CALL) == "0 22203\n0"


def test_programs_compile_against_it(host):
    assert "#define NCCL_VERSION_CODE 22203" in host.file("/usr/include/nccl.h").content_string
    assert host.file(f"{LIBRARIES}/libnccl.so").is_symlink


def test_an_older_version_is_held_against_upgrades(role, nodes):
    head = nodes["node-1"]
    code, output = role("node-1", nccl_version=OLD)
    assert code == 0, output
    assert is_at(head, OLD)
    assert "kept back: libnccl-dev libnccl2" in " ".join(head.check_output("apt-get --simulate upgrade").split())
    head.check_output("apt-mark unhold libnccl2 libnccl-dev")
    assert f"Inst libnccl2 [{OLD}] ({NEW}" in head.check_output("apt-get --simulate upgrade")
    code, output = role("node-1")
    assert code == 0, output
    assert is_at(head, NEW)


def test_a_key_with_another_fingerprint_is_refused(role, nodes):
    head = nodes["node-1"]
    before = head.check_output("sha256sum /etc/apt/keyrings/* /etc/apt/sources.list.d/*")
    code, output = role("node-1", nccl_version=OLD, fingerprint="0123456789" * 4)
    assert code != 0
    assert "key.pub is refused, nothing was installed" in output
    assert "expected 0123456789012345678901234567890123456789" in output
    assert head.check_output("sha256sum /etc/apt/keyrings/* /etc/apt/sources.list.d/*") == before
    assert is_at(head, NEW)


RESIGN = """
set -eu
rm -rf /srv/farandole/other
mkdir /srv/farandole/other
cd /srv/farandole/other
ln ../debs/*.deb ../debs/Packages ../debs/Release .
GNUPGHOME=$(mktemp -d)
export GNUPGHOME
gpg --batch --quiet --passphrase '' --quick-generate-key other rsa3072 sign never
gpg --batch --quiet --clear-sign --output InRelease Release
{ cat ../debs/key.pub; gpg --armor --export other; } >key.pub
gpg --with-colons --list-keys | awk -F: '$1 == "fpr" {print $10; exit}'
rm -rf "$GNUPGHOME"
"""


def test_a_repository_signed_by_another_key_or_by_none_is_refused(role, nodes, addresses):
    head, other = nodes["node-1"], f"http://{addresses['node-1']}:8480/other"
    signer = head.check_output("sh -c %s", RESIGN).split()[-1]
    wanted = yaml.safe_load((DEBS / "made.yml").read_text())["fingerprint"]
    listed = "sha256sum /etc/apt/keyrings/* /etc/apt/sources.list.d/*"
    before = head.check_output(listed)

    def from_other(key_url, fingerprint):
        repository = {"uri": other, "key_url": key_url, "key_fingerprint": fingerprint}
        return role("node-1", nccl_version=OLD, nccl_repository=repository)

    # The second file also contains the key that signed.
    for key_url in (f"http://{addresses['node-1']}:8480/debs/key.pub", f"{other}/key.pub"):
        code, output = from_other(key_url, wanted)
        assert code != 0
        assert f"{other} with the key {key_url} is refused, nothing was installed: " in output
        assert "is not signed" in output
        assert head.check_output(listed) == before
    head.check_output("mv /srv/farandole/other/InRelease /srv/farandole/other/kept")
    code, output = from_other(f"{other}/key.pub", signer)
    assert code != 0
    assert "is not signed" in output
    assert head.check_output(listed) == before
    assert is_at(head, NEW)
    head.check_output("mv /srv/farandole/other/kept /srv/farandole/other/InRelease")
    code, output = from_other(f"{other}/key.pub", signer)
    assert code == 0, output
    assert is_at(head, OLD)
    head.check_output("rm -r /srv/farandole/other")
    code, output = role("node-1")
    assert code == 0, output
    assert is_at(head, NEW)


def test_a_key_file_that_is_too_long_is_refused(role, nodes, addresses):
    head, url = nodes["node-1"], f"http://{addresses['node-1']}:8480/debs"
    head.check_output(
        "{ cat %s; head -c 70000 /dev/zero; } >%s", "/srv/farandole/debs/key.pub", "/srv/farandole/debs/long"
    )
    head.check_output("rm /etc/apt/keyrings/farandole-nccl.*")
    wanted = yaml.safe_load((DEBS / "made.yml").read_text())["fingerprint"]
    repository = {"uri": url, "key_url": f"{url}/long", "key_fingerprint": wanted}
    code, output = role("node-1", nccl_version=OLD, nccl_repository=repository)
    assert code != 0
    assert "more than 65536 bytes were sent; nothing was installed" in output
    assert not head.file("/etc/apt/keyrings/farandole-nccl.asc").exists
    assert is_at(head, NEW)


@pytest.mark.parametrize(("node", "available"), [("node-1", f"{NEW}, {OLD}"), ("node-4", "2.22.3-1-1")])
def test_a_missing_version_is_refused_with_the_available_ones(role, node, available):
    code, output = role(node, nccl_version="2.99.1-1+cuda12.9")
    assert code != 0
    assert f"libnccl2 2.99.1-1+cuda12.9 is not available (available: {available});" in output


def test_a_file_with_another_sha256_is_refused(role, nodes):
    code, output = role(
        "node-2", nccl_version=OLD, nccl_files=[plain("libnccl2", OLD), plain("libnccl-dev", OLD, "0" * 64)]
    )
    assert code != 0
    assert "expected " + "0" * 64 in output
    assert is_at(nodes["node-2"], NEW)


def test_a_damaged_deb_changes_nothing(role, nodes, tmp_path):
    damaged = tmp_path / "damaged.deb"
    with Path(plain("libnccl2", OLD)["path"]).open("rb") as whole:
        damaged.write_bytes(whole.read(20 * 2**20))
    checksum = hashlib.sha256(damaged.read_bytes()).hexdigest()
    files = [{"path": str(damaged), "sha256": checksum}, plain("libnccl-dev", OLD)]
    code, output = role("node-2", nccl_version=OLD, nccl_files=files)
    assert code != 0
    assert "damaged.deb" in output.partition("apt-get failed:")[2]
    assert "2.22.3" in " ".join(state(nodes["node-2"]))
    code, output = role("node-2")
    assert code == 0, output
    assert is_at(nodes["node-2"], NEW)


def test_the_next_run_repairs_a_killed_installation(role, nodes, addresses):
    worker = nodes["node-2"]
    deb = f"http://{addresses['node-1']}:8480/debs/libnccl2_{OLD}_amd64.deb"
    worker.check_output("/usr/lib/apt/apt-helper download-file %s /var/tmp/old.deb", deb)
    worker.check_output(
        "dpkg --unpack /var/tmp/old.deb & pid=$!; "
        "until grep -qs half-installed /var/lib/dpkg/updates/0*; do :; done; kill -9 $pid; wait $pid || :"
    )
    assert state(worker)[1].startswith("iHR")
    assert "dpkg was interrupted" in worker.run("apt-get --yes install libnccl2").stderr
    code, output = role("node-2")
    assert code == 0, output
    assert is_at(worker, NEW)


@pytest.mark.parametrize(
    ("node", "variables", "message"),
    [
        ("node-1", {"node_facts": {"nvidia_driver": "470.57.02"}}, "[nccl-driver-old]"),
        (
            "node-1",
            {"nccl_repository": {"uri": "x", "key_url": "x", "key_fingerprint": ""}},
            "[nccl-repository-missing]",
        ),
        ("node-1", {"nccl_version": "2.21.5"}, "[nccl-version-inexact]"),
        ("node-1", {"nccl_source": "somewhere"}, "must be one of: repository, files, distribution"),
        ("node-2", {"nccl_files": []}, "[nccl-files-missing]"),
    ],
    ids=["an old driver", "no fingerprint", "an incomplete version", "an unknown source", "no files"],
)
def test_impossible_requests_are_refused_before_anything_changes(role, nodes, node, variables, message):
    code, output = role(node, **{"nccl_version": OLD, **variables})
    assert code != 0
    assert message in output
    assert "changed=0" in output
    assert is_at(nodes[node], NEW)


def test_a_missing_driver_is_a_warning(role):
    code, output = role("node-2")
    assert code == 0, output
    assert "[nccl-driver-missing]" in output
    code, output = role("node-2", node_facts=GPU)
    assert code == 0, output
    assert "nccl-driver-missing" not in output


def test_another_nccl_that_jobs_would_load_is_reported(role, nodes):
    head, other = nodes["node-1"], "/opt/other/libnccl.so.2"
    pip = "/opt/farandole/current/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
    deb = f"/srv/farandole/debs/libnccl2_{OLD}_amd64.deb"
    head.check_output("mkdir -p $(dirname %s) $(dirname %s)", pip, other)
    head.check_output("dpkg-deb --fsys-tarfile %s | tar -xO .%s/libnccl.so.2.21.5 >%s", deb, LIBRARIES, pip)
    head.check_output("ln %s %s && echo LD_LIBRARY_PATH=/opt/other >/etc/environment", pip, other)
    conflict = f"a job may load {pip} (NCCL 2.21.5), {other} (NCCL 2.21.5) instead of the installed NCCL 2.22.3"
    try:
        code, output = role("node-1")
        assert code == 0
        assert f"[WARNING]: {conflict}" in output
        code, output = role("node-1", node_facts=GPU)
        assert code != 0
        assert conflict in output
    finally:
        head.check_output("rm -r /opt/farandole /opt/other; : >/etc/environment")
    code, output = role("node-1", node_facts=GPU)
    assert code == 0, output
    assert "a job may load" not in output


def test_a_broken_library_is_reported(role, nodes):
    library = f"{LIBRARIES}/libnccl.so.2.22.3"
    worker = nodes["node-3"]
    worker.check_output("mv %s /var/tmp/whole && head -c 1000000 /var/tmp/whole >%s", library, library)
    try:
        code, output = role("node-3")
    finally:
        worker.check_output("mv /var/tmp/whole %s", library)
    assert code != 0
    assert f"{library} does not work" in output


def plain(name, version, checksum=None):
    """An entry of nccl_files for a deb."""
    deb = f"{name}_{version}_amd64.deb"
    sums = yaml.safe_load((DEBS / "made.yml").read_text())["sums"]
    return {"path": str(DEBS / deb), "sha256": checksum or sums[deb]}
