"""File systems that all nodes see: what is refused, and the units that mount the others."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from jinja2 import Environment, FileSystemLoader

from farandole.inventory import cluster
from farandole.inventory import mounts as storage
from farandole.preflight import inventory

from .loading import ROOT, load
from .test_playbooks import ansible_playbook

mount_units = load("modules", "mount_units")
ORDER = ("Mount the file systems on first use", "Write the exports")


def mount(where: str = "/data", **changes: Any) -> dict[str, Any]:
    usual = {"what": "nas:/export", "type": "nfs4", "options": "", "timeout": 10, "hides": False}
    return {"where": where, **usual, **changes}


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ([mount("data")], "not an absolute path"),
        ([mount("/data/../etc")], "not an absolute path"),
        ([mount("/my data")], "not an absolute path"),
        ([mount("/")], "not an absolute path"),
        ([mount("/etc")], "belongs to the system"),
        ([mount("/etc/data")], "lies in or above /etc"),
        ([mount("/opt")], "lies in or above /opt/farandole"),
        ([mount("/home")], "homes of administrators"),
        ([mount(), mount("/data/more")], "lies in or above /data, which is mounted"),
        ([mount(), mount()], "lies in or above /data, which is mounted"),
        ([mount(what="nas:/x\nExecStart=/x")], "what of /data contains"),
        ([mount(options="ro\\")], "options of /data contains"),
        ([mount(what="")], "what of /data is empty"),
        ([mount(type="a b")], "not a file system type"),
        ([mount(timeout=0)], "at least 1"),
    ],
)
def test_mounts_that_hide_something_or_are_no_units_are_refused(mounts: list[dict[str, Any]], message: str) -> None:
    (fault,) = storage.faults(mounts)
    assert message in fault
    findings = inventory.judge_mounts({"a": {"storage_mounts": mounts}, "b": {}})
    assert [(finding.host, finding.code) for finding in findings] == [("a", "mount-wrong")]
    assert fault in findings[0].cause


@pytest.mark.parametrize(
    "changes",
    [
        {"options": "password=s3cret"},
        {"options": "ro,pass=s3cret,vers=3.0"},
        {"options": "PASSWORD=s3cret"},
        {"options": "password2=s3cret"},
        {"options": "username=alice%s3cret"},
        {"options": "user=lab/alice%s3cret,ro"},
        {"options": "user=alice:s3cret"},
        {"options": "name=admin,secret=s3cret"},
        {"what": "//alice:s3cret@nas/data"},
        {"what": "https://alice:s3cret@nas/data"},
        {"what": "alice:s3cret@nas:/data"},
    ],
    ids=str,
)
def test_a_password_is_refused_and_never_shown(changes: dict[str, Any]) -> None:
    (finding,) = inventory.judge_mounts({"a": {"storage_mounts": [mount(type="cifs", **changes)]}, "b": {}})
    assert (finding.host, finding.code) == ("a", "mount-password")
    assert "s3cret" not in finding.cause + finding.cure
    assert "credentials=/" in finding.cure


def test_a_file_of_credentials_and_ordinary_mounts_are_accepted() -> None:
    texts = ["credentials=/etc/nas.credentials,username=alice", "user=alice", "secretfile=/etc/x", "passwd_file=/etc/x"]
    mounts = [mount(f"/data/{number}", options=options) for number, options in enumerate(texts)]
    mounts += [mount("/a", what="alice@nas:/data"), mount("/b", what="//nas/data"), mount("/c", what="[fd00::1]:/data")]
    mounts += [mount("/d", what="10.0.0.1:6789,10.0.0.2:6789:/"), mount("/e", what="nas:/x@y")]
    mounts += [mount("/f", what="fs@a.b=/"), mount("/srv/set_1.x", type="fuse.sshfs"), mount("/home/alice")]
    mounts += [mount("/opt/data"), mount("/mnt")]
    assert inventory.judge_mounts({"a": {"storage_mounts": mounts}}) == []


def test_a_home_is_not_mounted_twice() -> None:
    own = {"storage_home": "sshfs", "storage_mounts": [mount("/home/trainer")]}
    (finding,) = inventory.judge_mounts({"a": own})
    assert "lies in or above /home/trainer" in finding.cause
    assert inventory.judge_mounts({"a": {**own, "storage_home": "none"}}) == []


@pytest.mark.parametrize("where", ["/data", "/data/my-set", "/srv/a.b_c", "/x/.hidden", "/a:b"])
def test_units_have_the_names_that_systemd_requires(where: str) -> None:
    escaped = subprocess.run(["systemd-escape", "--path", where], capture_output=True, text=True, check=True)
    assert mount_units.unit_name(where) == escaped.stdout.strip()


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_systemd_accepts_the_units(tmp_path: Path, kind: str) -> None:
    texts = mount_units.texts(mount("/data/my-set", type=kind, what="nas:/100%", options="ro"))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(tmp_path / name for name in texts)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in verified.stderr.splitlines() if "my" in line] == []
    assert {mount_units.place(text) for text in texts.values()} == {"/data/my-set"}


def test_what_cannot_be_mounted_on_a_node_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    kinds = {"full": "contains files, such as notes", "file": "is not a folder", "link": "is not a folder"}
    for name, message in kinds.items():
        (why,) = mount_units.refusals([mount(str(tmp_path / name), type="tmpfs")], [])
        assert message in why
    assert mount_units.refusals([mount(str(tmp_path / "full"), type="tmpfs", hides=True)], []) == []
    assert mount_units.refusals([mount(str(tmp_path / "new"), type="tmpfs")], []) == []
    (why,) = mount_units.refusals([mount("/proc", type="tmpfs")], [])
    assert "/proc is already mounted by somebody else, as proc" in why
    (why,) = mount_units.refusals([mount(str(tmp_path / "new"), type="none-such")], [])
    assert "no /sbin/mount.none-such" in why
    assert mount_units.refusals([mount(str(tmp_path / "new"), type="none-such")], ["none-such"]) == []


def test_who_uses_a_file_system_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        assert mount_units.users(str(tmp_path)) == [f"sleep (process {process.pid})"]
        process.kill()
    assert ["base_end_jobs=true" in mount_units.cure(where) for where in ("/home/alice", "/data")] == [True, False]


def test_why_nothing_was_unmounted_is_read_in_english_whatever_the_node_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PLACE", "/data")
    command = ["sh", "-c", 'echo "$LC_ALL $PLACE" >&2; exit 32']
    assert mount_units.bounded(command) == (32, "C /data")


def test_homes_are_mounted_one_by_one() -> None:
    people = [{"name": "alice", "uid": 2001}, {"name": "bob", "uid": 2002, "admin": True}]
    users = storage.shared_homes(people, "trainer")
    options = {"nfs": {"type": "nfs4", "options": "x"}, "sshfs": {"type": "fuse.sshfs", "options": "y"}}
    assert [(row["what"], row["where"], row["type"]) for row in storage.homes("sshfs", users, "node-1", options)] == [
        ("trainer@node-1:/home/trainer", "/home/trainer", "fuse.sshfs"),
        ("alice@node-1:/home/alice", "/home/alice", "fuse.sshfs"),
    ]
    assert [mount["what"] for mount in storage.homes("nfs", users[:1], "node-1", options)] == ["node-1:/home/trainer"]
    assert storage.homes("none", users, "node-1", options) == []


def test_an_admin_that_is_a_string_is_one_only_if_it_says_so() -> None:
    people: list[dict[str, Any]]
    people = [{"name": "alice", "admin": "false"}, {"name": "bob", "admin": "true"}, {"name": "carol", "admin": None}]
    assert storage.shared_homes(people, "trainer") == ["trainer", "alice", "carol"]
    loader = DataLoader()
    role = loader.load_from_file(str(ROOT / "roles/base/vars/main.yml"), trusted_as_template=True)
    assert Templar(loader, {**role, "cluster_users": people}).template(role["__base_admins"]) == ["bob"]


def test_nfs_exports_each_home_to_the_other_nodes_alone() -> None:
    folder = ROOT / "roles/storage/templates"
    environment = Environment(loader=FileSystemLoader(folder), trim_blocks=True, autoescape=False)  # noqa: S701
    environment.filters |= {
        "farandole.cluster.accounts": cluster.accounts,
        "farandole.cluster.node_address": cluster.node_address,
    }
    trusted = ["node-1", "node-2", "node-3"]
    values = {
        "cluster_facts": {"head": "node-1", "trusted": trusted, "job_user": "trainer", "job_user_id": 2000},
        "hostvars": {f"node-{number}": {"ansible_host": f"192.0.2.{number}"} for number in range(1, 5)},
        "inventory_hostname": "node-1",
        "cluster_users": [{"name": "alice", "uid": 2001}],
        "__storage_users": ["trainer", "alice"],
    }
    options = "rw,sync,sec=sys,root_squash,no_subtree_check"
    assert environment.get_template("exports.j2").render(values).splitlines()[1:] == [
        f"/home/{name} 192.0.2.2({options},fsid={uid}) 192.0.2.3({options},fsid={uid})"
        for name, uid in (("trainer", 2000), ("alice", 2001))
    ]
    settings = environment.get_template("nfs.conf.j2").render(values).split()
    assert {"host=192.0.2.1", "vers3=n", "vers4.0=n", "vers4.1=n", "vers4.2=y"} <= set(settings)


def test_a_head_withdraws_homes_after_the_mounts_and_a_former_one_too(tmp_path: Path) -> None:
    """In check mode: nodes that use a home refuse before it is no longer exported."""
    hosts = {f"node-{number}": {"ansible_connection": "local"} for number in (1, 2, 3)}
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"cluster": {"hosts": hosts}, "head": {"hosts": {"node-1": None}}})
    )
    # Node 2 was the head.
    (tmp_path / "node-2").touch()
    settings = {"base_state_dir": f"{tmp_path}/state", "storage_home": "sshfs", "rolespec_validate": False}
    settings["__storage_serving"] = [f"{tmp_path}/{{{{ inventory_hostname }}}}"]
    role = {"ansible.builtin.import_role": {"name": "farandole.cluster.storage"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "cluster", "gather_facts": False, "tasks": [role]}]))
    options = ("--check", "-i", tmp_path / "hosts.yml", "-e", json.dumps(settings))
    done = ansible_playbook(ROOT, *options, tmp_path / "play.yml")
    assert done.returncode == 0, done.stdout
    mounted, shared = (done.stdout.index(f"TASK [farandole.cluster.storage : {task}]") for task in ORDER)
    assert mounted < shared
    answered = re.findall(r"^(?:ok|changed): \[(.*)\]$", done.stdout[shared:], re.MULTILINE)
    assert set(answered) == {"node-1", "node-2"}
