"""What a run must do, decided from a real cache and from nodes' probes."""

from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.stack.cache import Builds, Lock, horovod_key, openmpi_key
from farandole.stack.lock import base_of
from farandole.stack.plan import (
    NONE,
    Stacks,
    choose,
    for_run,
    former,
    free_of,
    plan,
    refuse_elsewhere,
    refuse_part,
    refuse_without_room,
    stacks_of,
    system_of,
    trial,
    unavailable,
)

from .loading import ROOT, act
from .stack import LOCK, changed, layered, pack_changes, pack_stack
from .stack import pack as pack_file

THIS, BEFORE = LOCK["id"], "bbbb00000000"
RUNS: Stacks = {"current": THIS, "former": BEFORE, "installed": [THIS, BEFORE], "left": False}
HAS: Stacks = {"current": BEFORE, "former": "", "installed": [THIS, BEFORE], "left": False}
LEFT: Stacks = {**RUNS, "left": True}
BARE = NONE
HERE = LOCK["platform"]["os"]


@pytest.fixture
def cache(tmp_path: Path) -> Builds:
    return Builds(tmp_path)


def test_a_node_that_was_not_probed_has_nothing() -> None:
    unknown: list[dict[str, Any]] = [{}, {"_preflight_probe": None}, {"_preflight_probe": {"unreachable": True}}]
    for variables in unknown:
        assert (stacks_of(variables), free_of(variables), system_of(variables)) == (NONE, None, "")
    probe = {"stacks": RUNS, "disk_free_mb": 7, "os_id": "debian", "os_version": "12"}
    known = {"_preflight_probe": {"probe": probe}}
    assert (stacks_of(known), free_of(known), system_of(known)) == (RUNS, 7, "debian-12")


def planned(cache: Builds, lock: Lock, *nodes: Stacks, builder: str = "node-1") -> dict[str, Any]:
    return plan(lock, cache, {f"node-{number}": own for number, own in enumerate(nodes, 1)}, builder)


@pytest.mark.parametrize(
    ("cached", "nodes", "lacking", "behind", "pack", "build"),
    [
        # Neither done nor read.
        ("damaged", [RUNS, RUNS], [], [], False, False),
        ("", [RUNS, HAS], [], ["node-2"], False, False),
        ("", [RUNS, LEFT], [], ["node-2"], False, False),
        ("whole", [RUNS, BARE], ["node-2"], ["node-2"], False, False),
        ("whole", [BARE, BARE], ["node-1", "node-2"], ["node-1", "node-2"], False, False),
        ("", [RUNS, BARE], ["node-2"], ["node-2"], True, False),
        ("", [BARE, RUNS], ["node-1"], ["node-1"], True, True),
        ("damaged", [BARE], ["node-1"], ["node-1"], True, True),
        ("without contents", [RUNS, BARE], ["node-2"], ["node-2"], True, False),
    ],
)
def test_only_what_nodes_lack_is_packed_and_only_what_the_builder_lacks_is_built(
    cache: Builds, cached: str, nodes: list[Stacks], lacking: list[str], behind: list[str], pack: bool, build: bool
) -> None:
    built = None
    if cached == "without contents":
        pack_file(cache.stack(LOCK), lock=LOCK, unpacked=1)
    elif cached:
        built = pack_stack(cache, THIS)
        built.path.write_text("damaged" if cached == "damaged" else built.path.read_text())
    made = planned(cache, LOCK, *nodes)
    assert (made["lacking"], made["behind"], made["pack"], made["build"]) == (lacking, behind, pack, build)
    assert (made["work"], bool(made["installs"])) == (pack, bool(lacking))
    assert made["archive"] == (built.describe() if built and cached == "whole" else None)
    if lacking:
        assert made["archive_path"] == str(cache.stack(LOCK))
        assert made["paths"] == {"openmpi": str(cache.openmpi(LOCK)), "horovod": str(cache.horovod(LOCK))}
        assert (made["mpi"], made["parts"]) == (openmpi_key(LOCK), {"openmpi": None, "horovod": None})
    else:
        assert cache.stack(LOCK).exists() is bool(cached)


HAS_FORMER: Stacks = {"current": BEFORE, "former": "", "installed": [BEFORE], "left": False}


@pytest.mark.parametrize(
    ("nodes", "contents", "cached", "less"),
    [
        ([HAS_FORMER, HAS_FORMER], "07", True, True),
        ([HAS_FORMER, RUNS], "07", True, True),
        ([HAS_FORMER, BARE], "07", True, False),
        ([HAS_FORMER, HAS_FORMER], "08", True, False),
        ([HAS_FORMER, HAS_FORMER], "07", False, False),
    ],
    ids=["all have it", "all that lack", "one is new", "another build", "the whole is gone"],
)
def test_only_what_has_changed_is_sent_to_nodes_that_have_the_stack_before(
    cache: Builds, nodes: list[Stacks], contents: str, cached: bool, less: bool
) -> None:
    whole, changes = pack_stack(cache, THIS), pack_changes(cache, THIS, BEFORE, contents)
    if not cached:
        whole.path.unlink()
    (part,) = planned(cache, LOCK, *nodes)["installs"]
    assert part["archive"] == (changes.describe() if less else whole.describe() if cached else None)
    assert part["whole"] == (whole.describe() if less else None)


def test_a_builder_outside_the_run_builds(cache: Builds) -> None:
    assert plan(LOCK, cache, {"node-2": BARE}, "node-1")["build"]


def patched(**patches: dict[str, str]) -> Lock:
    """The lock with these patches and their checksums, and for both parts those of today beside them."""
    lock = changed("farandole", to="0.9.0")
    for name, folder in (("openmpi", "openmpi-4"), ("horovod", "horovod-0.28.1")):
        here = {path.name: sha256(path) for path in (ROOT / "files/patches" / folder).glob("*.patch")}
        files = {**here, **patches.get(name, {})}
        lock[name]["patches"] = [{"file": file, "sha256": digest} for file, digest in sorted(files.items())]
    return lock


def test_a_lock_with_other_patches_is_refused_where_they_are_needed(cache: Builds, tmp_path: Path) -> None:
    def refused(lock: Lock, stacks: Stacks = BARE, *absent: str) -> str:
        node = {"_preflight_probe": {"probe": {"stacks": stacks, "disk_free_mb": 99_999}}, "inventory_dir": tmp_path}
        asked = {"lock": lock, "builds": str(cache.root), "nodes": ["node-1"], "builder": "node-1"}
        asked["cluster"] = {"head": "node-1", "members": ["node-1", *absent]}
        return str(act("stack_plan", asked, {**node, "hostvars": {"node-1": node}}).get("msg", ""))

    assert refused(patched()) == ""
    # Fewer are no others: a lock says which of them are used.
    fewer = patched()
    del fewer["openmpi"]["patches"], fewer["horovod"]["patches"][3:]
    assert refused(fewer) == ""
    ours = ROOT / "files/patches/openmpi-4/01-process-group-race.patch"
    other = patched(openmpi={ours.name: "ab" * 32}, horovod={"99-gone.patch": "cd" * 32})
    message = refused(other)
    assert message.startswith(f"stack {THIS} of {tmp_path}/stack.lock.yml has to be compiled, with patches that")
    assert f"{ours.name} has sha256 {sha256(ours)[:12]}… here, abababababab… in the lock; horovod: 99-gone" in message
    assert f"Make a new lock, which keeps the versions: farandole lock -i {tmp_path}; or" in message
    assert message.endswith("the version that wrote the lock (0.9.0)")
    every = {file["file"]: "ab" * 32 for file in other["horovod"]["patches"]}
    assert f"; and {len(every) - 3} more. Make a new lock" in refused(patched(horovod=every))
    # What is compiled is used, and so is a stack that is packed or installed.
    pack_file(cache.openmpi(other), builder="node-1")
    assert "openmpi" not in refused(other)
    assert refused(other, RUNS) == ""
    pack_file(cache.horovod(other), builder="node-1")
    assert refused(other) == ""
    # With the head, each new job would switch; what others lack, it did not know.
    assert refused(other, HAS) == refused(other, RUNS, "node-2") == refused(other, BARE, "node-2") == ""
    message = refused(other, HAS, "node-2", "node-3")
    assert message.startswith(f"jobs would run with stack {THIS} from then on, and node-2, node-3 may not have it")
    assert "put the former stack.lock.yml back" in message
    with pytest.raises(FarandoleError, match=r"leave out --limit$"):
        refuse_part(other, HAS, ["node-2"], back=True)


def test_nodes_that_cannot_get_the_stack_are_named(cache: Builds) -> None:
    nodes = {"node-1": RUNS, "node-2": BARE, "node-3": BARE}
    made = plan(LOCK, cache, nodes, "node-1")
    refusal = unavailable(made, "/builds", "node-1")
    assert refusal.startswith(f"node-2, node-3 have no stack {THIS}, and no archive of it is in /builds; node-1")
    assert unavailable(planned(cache, LOCK, RUNS), "/builds", "node-1") == ""
    pack_stack(cache, THIS)
    assert unavailable(plan(LOCK, cache, nodes, "node-1"), "/builds", "node-1") == ""


def test_builds_of_another_cluster_are_not_used(tmp_path: Path) -> None:
    mine, theirs = Builds(tmp_path / "mine/builds"), Builds(tmp_path / "theirs/builds")
    pack_stack(theirs, THIS)
    pack_file(theirs.openmpi(LOCK), "poisoned")
    made = plan(LOCK, mine, {"node-1": BARE}, "node-1")
    assert (made["archive"], made["build"], made["parts"]) == (None, True, {"openmpi": None, "horovod": None})
    assert plan(LOCK, theirs, {"node-1": BARE}, "node-1")["archive"]


def test_parts_that_this_builder_has_built_before_are_reused(cache: Builds) -> None:
    openmpi = pack_file(cache.openmpi(LOCK), builder="node-1")
    # Compiled against another torch.
    pack_file(cache.horovod(changed("wheels", 2, "sha256", to="16")), builder="node-1")
    made = planned(cache, LOCK, BARE)
    assert made["parts"] == {"openmpi": openmpi.describe(), "horovod": None}
    horovod = pack_file(cache.horovod(LOCK), builder="node-1")
    assert planned(cache, LOCK, BARE)["parts"]["horovod"] == horovod.describe()
    # Root on another one would run them, and this one may have been revoked.
    assert planned(cache, LOCK, BARE, builder="node-2")["parts"] == {"openmpi": None, "horovod": None}


def test_every_node_without_space_is_named(cache: Builds) -> None:
    pack_stack(cache, THIS, unpacked=1000 << 20)
    made = planned(cache, LOCK, RUNS, BARE, BARE, BARE, BARE)
    free = {"node-1": 0, "node-2": 1255, "node-3": 1256, "node-4": None, "node-5": 3}
    with pytest.raises(FarandoleError) as refusal:
        refuse_without_room(LOCK, made, free, "node-1")
    assert str(refusal.value) == (
        "not enough space for the stack: node-2 has 1255 MiB free for /opt and needs 1256; "
        "node-5 has 3 MiB free for /opt and needs 1256: free some and run again"
    )
    refuse_without_room(LOCK, made, {**free, "node-2": 1256, "node-5": 1256}, "node-1")


def test_the_builder_needs_more_space(cache: Builds) -> None:
    made = planned(cache, LOCK, BARE, BARE)
    refuse_without_room(LOCK, made, {"node-1": 8000, "node-2": 4000}, "node-1")
    for free, message in (
        ((7999, 4000), "node-1 has 7999 .* needs 8000:"),
        ((8000, 3999), "node-2 has 3999 .* needs 4000:"),
    ):
        with pytest.raises(FarandoleError, match=message):
            refuse_without_room(LOCK, made, dict(zip(("node-1", "node-2"), free, strict=True)), "node-1")


# Packages of the user's own

LAYER = layered("pandas")
BASE = base_of(LAYER)["id"]
WITH_BASE: Stacks = {"current": BASE, "former": "", "installed": [BASE], "left": False}
WITH_BOTH: Stacks = {"current": LAYER["id"], "former": BASE, "installed": [LAYER["id"], BASE], "left": False}


def packed(cache: Builds, lock: Lock) -> None:
    pack_file(cache.stack(lock), lock=lock, unpacked=100 << 20, contents={f"stacks/{lock['id']}": "07"})


def test_a_base_is_the_stack_without_the_users_packages() -> None:
    base = base_of(LAYER)
    assert [wheel["name"] for wheel in base["wheels"]] == ["numpy", "tensorflow-cpu", "torch"]
    assert base["wanted"]["packages"] == base["wanted"]["pins"] == base["own"] == []
    assert "pandas" not in {**base["versions"], **base["index"]["files"], **base["why"]}
    assert base_of(layered("polars"))["id"] == base["id"] != LAYER["id"]
    assert (horovod_key(base), openmpi_key(base)) == (horovod_key(LAYER), openmpi_key(LAYER))
    assert base_of(LOCK) == LOCK


def test_adding_a_package_builds_and_installs_only_that(cache: Builds) -> None:
    made = planned(cache, LAYER, WITH_BASE, WITH_BASE)
    assert (made["lacking"], made["pack"], made["build"], made["work"]) == ([], False, False, True)
    assert (made["layer"]["pack"], made["layer"]["build"]) == (True, True)
    assert made["base"] == base_of(LAYER)
    refusal = unavailable(plan(LAYER, cache, {"node-2": WITH_BASE}, "node-1"), "/builds", "node-1")
    assert refusal.startswith(f"node-2 have no stack {LAYER['id']}, and no archive")
    packed(cache, LAYER)
    made = planned(cache, LAYER, WITH_BOTH, WITH_BASE)
    assert not made["work"]
    assert [(part["id"], part["base"], part["lacking"]) for part in made["installs"]] == [
        (LAYER["id"], BASE, ["node-2"])
    ]
    # The base was installed with the layer, and may not be packed any more.
    made = planned(cache, LAYER, WITH_BOTH, {**WITH_BOTH, "installed": [LAYER["id"]]})
    assert (made["lacking"], made["behind"], made["installs"], made["work"]) == ([], [], [], False)


def test_only_another_stack_is_tried_before_a_switch_and_no_former_one(cache: Builds) -> None:
    packed(cache, base_of(LAYER))
    packed(cache, LAYER)
    assert planned(cache, LAYER, BARE, WITH_BASE, WITH_BOTH)["replacing"] == []
    assert planned(cache, base_of(LAYER), WITH_BOTH, LEFT)["replacing"] == ["node-2"]
    pack_stack(cache, THIS)
    assert planned(cache, LOCK, HAS, RUNS, LEFT, BARE)["replacing"] == ["node-1"]
    # The head starts the jobs, also if it was installed anew; if it has switched, they have run.
    bare, switched, behind = (planned(cache, LOCK, own, HAS, HAS) for own in (BARE, RUNS, HAS))
    assert trial(bare, "node-1") == trial(behind, "node-1") == ["node-1", "node-2"]
    assert trial(behind, "node-2") == ["node-2", "node-1"]
    assert trial(switched, "node-1") == trial(behind, "node-4") == trial(planned(cache, LOCK, BARE), "node-1") == []
    known = {"node-1": {"_preflight_probe": {"probe": {"stacks": RUNS, "disk_free_mb": 9000}}}}
    _, back = for_run({}, "", cache, known, "node-1", Path("stack.lock.yml"))
    assert (back["behind"], back["replacing"]) == (["node-1"], [])


def test_a_bare_node_gets_the_base_and_then_the_layer(cache: Builds) -> None:
    packed(cache, base_of(LAYER))
    # So does a builder, before it adds to it.
    made = planned(cache, LAYER, BARE, BARE)
    assert (made["pack"], made["build"], made["layer"]["build"]) == (False, False, True)
    assert made["installs"][0]["archive"]
    packed(cache, LAYER)
    made = planned(cache, LAYER, WITH_BOTH, WITH_BASE, BARE)
    assert not made["work"]
    assert [(part["id"], part["base"], part["lacking"]) for part in made["installs"]] == [
        (BASE, "", ["node-3"]),
        (LAYER["id"], BASE, ["node-2", "node-3"]),
    ]
    refuse_without_room(LAYER, made, {"node-1": 0, "node-2": 100, "node-3": 456}, "node-1")
    with pytest.raises(FarandoleError, match=r"node-2 has 99 .* needs 100; node-3 has 455 .* needs 456"):
        refuse_without_room(LAYER, made, {"node-1": 0, "node-2": 99, "node-3": 455}, "node-1")


# Rollback


def test_a_stack_is_chosen_that_is_packed_or_on_every_node(cache: Builds) -> None:
    pack_stack(cache, THIS)
    for prefix in (THIS, THIS[:3]):
        assert choose(prefix, {"node-1": BARE}, {HERE}, cache) == LOCK
    nodes = {"node-1": RUNS, "node-2": HAS}
    assert choose(BEFORE, nodes, {HERE}, cache) == {"id": BEFORE}
    assert plan({"id": BEFORE}, cache, nodes, "node-1")["behind"] == ["node-1"]
    # By default the former one.
    assert choose("", {"node-1": RUNS, "node-2": {**HAS, "former": BEFORE}}, {HERE}, cache) == {"id": BEFORE}


def test_an_unavailable_stack_is_refused_with_the_available_ones(cache: Builds) -> None:
    pack_stack(cache, "cccc00000000")
    with pytest.raises(FarandoleError) as refusal:
        choose(THIS, {"node-1": RUNS, "node-2": {**BARE, "installed": [BEFORE]}}, {HERE}, cache)
    assert f"no stack {THIS} is on every node or in {cache.stacks}" in str(refusal.value)
    assert f"available: {BEFORE}, cccc00000000: choose one with -e stack_id=" in str(refusal.value)
    # Nor is one of another release available.
    with pytest.raises(FarandoleError, match="available: none: choose one"):
        choose(BEFORE, {"node-1": BARE}, {"debian-13"}, cache)
    pack_stack(cache, "cccc11111111")
    with pytest.raises(FarandoleError, match="more than one stack begins with cccc; available: cccc00000000, cccc1"):
        choose("cccc", {"node-1": BARE}, {HERE}, cache)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"node-1": RUNS, "node-2": HAS}, f"(node-1: {BEFORE}, node-2: none)"),
        ({"node-1": RUNS, "node-2": {**RUNS, "former": "cccc00000000"}}, f"(node-1: {BEFORE}, node-2: cccc00000000)"),
        ({"node-1": BARE, "node-2": BARE}, "(node-1: none, node-2: none)"),
    ],
    ids=["one has none", "they differ", "none has one"],
)
def test_nodes_with_different_former_stacks_are_named(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(FarandoleError) as refusal:
        former(nodes)
    assert f"the nodes do not share one former stack to go back to {message}; choose a stack with" in str(refusal.value)


def test_a_stack_of_another_release_is_refused() -> None:
    lock = {"id": "aaaa", "platform": {"os": "debian-13"}}
    with pytest.raises(FarandoleError, match="was built for debian-13; node-2 has debian-12: choose another"):
        refuse_elsewhere(lock, {"node-1": "debian-13", "node-2": "debian-12", "node-3": ""})
    refuse_elsewhere(lock, {"node-1": "debian-13"})
    refuse_elsewhere({"id": "aaaa"}, {"node-1": "debian-12"})
