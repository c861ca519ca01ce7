"""Hardware, disks, limits, links and shells of nodes, and the findings about each."""

import grp
import json
import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from farandole.preflight import hardware as form
from farandole.preflight import machines as judge
from farandole.preflight.nodes import about

from .loading import ROOT, load
from .machines import machine, place, probe, shell

probing = load("module_utils", "machine")
FREE = {"current": "", "installed": []}


def found(*machines: dict[str, Any], former: Any = None, own: Any = None, **changes: Any) -> list[tuple[str, str]]:
    """The hosts and codes of what is found on these nodes."""
    plain = {"arch": "x86_64", "hostname": "", "nvidia_driver": "", "stacks": FREE, "accounts": {}} | changes
    probes = {f"node-{place}": plain | {"machine": machine} for place, machine in enumerate(machines, 1)}
    interfaces = dict.fromkeys(probes, "eth0")
    former = former or {"hosts": {}, "ago": 0}
    every = judge.judge_machines(probes, dict.fromkeys(probes, own or {}), interfaces, "trainer", True, former)
    return [(finding.host, finding.code) for finding in every]


def test_a_queue_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "slurm/slurm.conf"
    assert probing.own_queue(tmp_path) == ""
    file.parent.mkdir()
    file.write_text("# Managed by Farandole, role slurm.\nClusterName=farandole\n")
    assert probing.own_queue(tmp_path) == ""
    file.write_text("ClusterName=physics\n")
    assert probing.own_queue(tmp_path) == str(file)
    probes = {name: {"machine": machine(own_queue="/etc/slurm/slurm.conf")} for name in ("node-1", "node-2")}
    assert [(item.host, item.code) for item in judge.judge_queues(probes, ["node-2"])] == [("node-2", "queue-foreign")]


def port(card: str = "eth0", *, active: bool = True) -> dict[str, Any]:
    return {"active": active, "card": card}


def at(name: str, **changes: Any) -> dict[str, Any]:
    return machine(places=machine()["places"] | {name: place(**{"mount": "/x", **changes})})


def link(**changes: Any) -> dict[str, Any]:
    return machine(links={"eth0": {"mtu": 1500, "speed": 10_000, "duplex": "full"} | changes})


def sshd(**lists: list[str]) -> dict[str, Any]:
    return machine(sshd={"own": ["farandole-jobs", "trainer"], **{key: [] for key in probing.ADMITTING}, **lists})


def test_a_sound_node_has_no_finding() -> None:
    assert found(machine(), machine()) == []


@pytest.mark.parametrize(
    "lists",
    [
        {},
        {"AllowUsers": ["root", "tr?iner"], "AllowGroups": ["staff", "farandole-*"]},
        {"AllowUsers": ["trainer@10.0.0.*"], "DenyUsers": ["eve", "trainer@192.0.2.1"]},
    ],
)
def test_a_job_user_whom_sshd_lets_in_is_no_finding(lists: dict[str, list[str]]) -> None:
    assert found(sshd(**lists)) == []


# The part of sshd -T that matters, for settings with each list.
ADMITS = """port 22
authorizedkeysfile .ssh/authorized_keys
allowusers alice
allowusers bob@10.0.0.*
allowusers c d
denyusers eve
allowgroups sshusers
permituserenvironment no
"""


def test_whom_sshd_lets_in_is_read_unless_it_depends_on_where_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "sshd_config"
    drop_in = tmp_path / "sshd_config.d/50-site.conf"
    drop_in.parent.mkdir()
    monkeypatch.setattr(probing, "SSHD_CONFIG", settings)
    settings.write_text("Match User trainer\n  AllowUsers *\n")
    facts = machine(sshd=probing.admission(ADMITS, probing.groups("trainer", None)))
    assert form.MACHINE(facts)["sshd"] == {
        "own": ["farandole-jobs", "trainer"], "AllowUsers": ["alice", "bob@10.0.0.*", "c d"], "DenyUsers": ["eve"],
        "AllowGroups": ["sshusers"], "DenyGroups": [],
    }  # fmt: skip
    assert probing.admission("Missing privilege separation directory", []) is None
    drop_in.write_text("PermitRootLogin no\n  match user trainer Address 10.0.0.0/8\n")
    assert probing.admission(ADMITS, []) is None
    root = pwd.getpwnam("root")
    assert probing.groups("root", root)[:2] == ["farandole-jobs", grp.getgrgid(root.pw_gid).gr_name]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (at("/opt", free_mb=10), "node-disk-full"),
        (at("/var", free_inodes=3), "node-disk-full"),
        (at("/opt", free_mb=3_000), "disk-small"),
        (at("/opt", free_inodes=50_000), "disk-small"),
        (at("home", free_mb=400, free_inodes=None), "disk-small"),
        (at("/opt", read_only=True), "disk-read-only"),
        (at("/opt", noexec=True), "stack-noexec"),
        (at("/tmp", noexec=True), "mount-noexec"),  # noqa: S108
        (at("home", noexec=True, free_mb=None, free_inodes=None), "mount-noexec"),
        (at("shm", free_mb=64), "shm-small"),
        (machine(memory_mb=1_000), "memory-small"),
        (machine(cpu=["f16c"]), "cpu-lacks"),
        (machine(ceiling={"nofile": 20_000, "memlock": None}), "limit-refused"),
        (machine(ceiling={"nofile": None, "memlock": 8_192}), "limit-refused"),
        (machine(gpus={"found": 2, "library": "", "ecc": {}, "xids": []}), "gpu-driverless"),
        (machine(gpus={"found": 0, "library": "", "ecc": {"0000:41:00.0": 3}, "xids": []}), "gpu-ecc"),
        (machine(gpus={"found": 0, "library": "", "ecc": {}, "xids": [("0000:41:00", 79)]}), "gpu-xid"),
        (machine(rdma={"mlx5_0/1": port(active=False)}), "rdma-down"),
        (machine(rdma={"mlx5_0/1": port("eth1")}), "rdma-aside"),
        (machine(shells={"ssh": None}), "shell-silent"),
        (machine(shells={"ssh": shell(commands={"mpirun": "/c/bin/mpirun"})}), "command-shadowed"),
        (machine(shells={"login": shell(libraries=["/c/lib/libmpi.so.40"])}), "library-shadowed"),
        (machine(shells={"login": shell(variables=["PYTHONHOME"])}), "variable-harmful"),
        (machine(shells={"login": shell(nofile=256)}), "limit-low"),
        (sshd(AllowUsers=["root", "ad?in@10.0.0.*"]), "sshd-keeps-out"),
        (sshd(DenyUsers=["train*"]), "sshd-keeps-out"),
        (sshd(AllowGroups=["staff"]), "sshd-keeps-out"),
        (sshd(DenyGroups=["*-jobs"]), "sshd-keeps-out"),
        (link(duplex="half"), "link-half-duplex"),
        (link(speed=100), "link-slow"),
    ],
)
def test_a_fault_is_found(facts: dict[str, Any], code: str) -> None:
    assert found(facts) == [("node-1", code)]


@pytest.mark.parametrize(
    "printed",
    ["{}", "[1]", "7", "[" * 30_000, '{"commands": ' + '{"a": ' * 500 + "1" + "}" * 501, '{"nofile": 1e999}', "", "x"],
)
def test_what_a_user_prints_in_the_shells_place_is_only_silence(printed: str) -> None:
    said = probing.shell_answer(f"hello{probing.MARK}{printed}{probing.MARK}")
    answer = form.MACHINE(json.loads(json.dumps(machine(shells={"ssh": said}))))
    assert found(answer) == [("node-1", "shell-silent")]


def test_what_is_not_needed_or_not_known_is_no_fault() -> None:
    assert found(at("/opt", free_mb=3_000) | {"loopback_names": []}, stacks={"current": "a", "installed": ["a"]}) == []
    assert found(machine(cpu=None)) == found(machine(cpu=[]), arch="aarch64") == []
    assert found(link(speed=None, duplex="")) == []
    assert (
        found(machine(ceiling={"nofile": 20_000, "memlock": 8}), own={"base_nofile": "20000", "base_memlock": 8}) == []
    )
    assert found(machine(gpus={"found": 0, "library": "", "ecc": {}, "xids": [("0000:41:00", 31)]})) == []
    assert found(machine(gpus={"found": 1, "library": "580.1", "ecc": {}, "xids": []}), nvidia_driver="580.1") == []


def test_nodes_that_differ_in_rdma_are_found() -> None:
    has, down = (
        machine(rdma={"mlx5_0/1": port(), "mlx5_1/1": port("eth1")}),
        machine(rdma={"mlx5_0/1": port(active=False)}),
    )
    infiniband = machine(rdma={"mlx5_0/1": port("")})
    assert found(has, machine(), down) == [("node-2", "rdma-differs"), ("node-3", "rdma-down")]
    assert found(has, has) == found(infiniband, infiniband) == found(machine(), machine()) == []


def test_nodes_with_gpus_that_differ_in_rdma_are_worse_as_nccl_hangs_between_them() -> None:
    gpus = {"gpus": {"found": 2, "library": "", "ecc": {}, "xids": []}}
    ways = {"has": {"ib0/1": port("")}, "none": {}, "down": {"ib0/1": port("", active=False)}}

    def told(*names: str, **more: Any) -> list[tuple[str, str]]:
        probes = {name: {"machine": machine(rdma=ways[name], **more)} for name in names}
        return [(item.code, item.severity) for item in judge.judge_rdma(probes, {})]

    assert told("has", "none", "down", **gpus) == [("rdma-differs", "warn"), ("rdma-down", "warn")]
    assert told("has", "none", "down") == [("rdma-differs", "note"), ("rdma-down", "note")]
    assert told("none", "down", **gpus) == [("rdma-down", "note")]


def test_ports_are_read_with_their_state_and_interface(tmp_path: Path) -> None:
    for device, state, layer, card in (
        ("rxe0", "4: ACTIVE", "Ethernet", "eth0"),
        ("ib0", "1: DOWN", "InfiniBand", "x"),
    ):
        folder = tmp_path / device / "ports/1"
        (folder / "gid_attrs/ndevs").mkdir(parents=True)
        for name, content in (("state", state), ("link_layer", layer), ("gid_attrs/ndevs/0", card)):
            (folder / name).write_text(f"{content}\n")
    assert probing.rdma_ports(tmp_path) == {"rxe0/1": port(), "ib0/1": port("", active=False)}


def test_what_all_nodes_have_for_rdma_is_shown() -> None:
    ways = [
        {"mlx5_0/1": port(), "mlx5_1/1": port("eth1")},
        {"mlx5_0/1": port(), "mlx5_1/1": port("eth1", active=False)},
    ]
    probes = {f"node-{at}": probe(machine=machine(rdma=ports)) for at, ports in enumerate(ways)}
    assert about(probes) == "2 nodes, Debian 12, RDMA by mlx5_0/1 of eth0"
    assert about({**probes, "node-3": probe()}) == "3 nodes, Debian 12"


def test_a_library_of_another_driver_is_found() -> None:
    facts = machine(gpus={"found": 1, "library": "580.2", "ecc": {}, "xids": []})
    assert found(facts, nvidia_driver="580.1") == [("node-1", "driver-differs")]


def test_a_name_on_loopback_is_found_after_the_first_run() -> None:
    facts = machine(loopback_names=["node-1"])
    assert found(facts) == []
    assert found(facts, stacks={"current": "a", "installed": ["a"]}) == [("node-1", "name-loopback")]


def test_the_odd_link_is_named_and_of_two_both() -> None:
    assert found(link(), link(mtu=9000), link()) == [("node-2", "link-differs")]
    assert found(link(), link(mtu=9000)) == [("node-1", "link-differs"), ("node-2", "link-differs")]
    assert found(link(), link(), link(speed=1000)) == [("node-3", "link-differs")]


def test_a_reboot_and_an_upgrade_since_the_last_run_are_notes(tmp_path: Path) -> None:
    former = {"hosts": {"node-1": {"machine": machine(packages={"libc6": "2.36-8"})}}, "ago": 4_000}
    assert found(machine(), former=former) == [("node-1", "packages-changed")]
    assert found(machine(packages={}, up_s=60), former=former) == [("node-1", "rebooted")]
    path = tmp_path / "preflight.json"
    for text in ("", "[]", "{}", '{"hosts": []}', '{"hosts": {"a": {}}}', "\x00"):
        path.write_text(text)
        assert judge.former_record(path, time.time())["hosts"] == {}


def test_the_defaults_are_those_of_role_base() -> None:
    defaults = yaml.safe_load((ROOT / "roles/base/defaults/main/main.yml").read_text())
    assert (defaults["base_nofile"], defaults["base_memlock"]) == (judge.BASE_NOFILE, "unlimited")


def test_this_machine_gives_a_valid_answer() -> None:
    facts = probing.machine("", root=False)
    assert form.MACHINE(facts)["places"]["/opt"]["free_mb"] > 0


def test_mounts_are_read() -> None:
    table = probing.mount_table(
        "1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /tmp rw,noexec - tmpfs t rw\n3 1 0:3 / /a\\040b ro - nfs4 s rw\n"
    )
    assert probing.mount_of("/a b/c", table) == "/a b"
    assert probing.mount_of("/tmpx", table) == "/"  # noqa: S108
    assert probing.place("/a b/c", table) == place(mount="/a b", read_only=True, free_mb=None, free_inodes=None)
    assert probing.place("/tmp/x", table)["noexec"]  # noqa: S108


def test_a_command_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "COMMAND_S", 0.5)
    begun = time.monotonic()
    outputs = probing.outputs({"a": (["sh", "-c", "echo $$; sleep 60 & sleep 60"], {}), "b": (["echo", "b"], {})})
    assert time.monotonic() - begun < 10
    assert outputs["b"] == "b\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(outputs["a"]), 0)
