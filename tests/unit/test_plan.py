"""What a run must do, decided from a real cache and from nodes' probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack.cache import Builds, Lock, horovod_key, openmpi_key
from farandole.stack.lock import base_of
from farandole.stack.plan import (
    NONE,
    Stacks,
    choose,
    former,
    free_of,
    plan,
    refuse_elsewhere,
    refuse_without_room,
    stacks_of,
    system_of,
    unavailable,
)

from .stack import LOCK, changed, layered, pack, pack_stack

THIS, BEFORE = LOCK["id"], "bbbb00000000"
RUNS: Stacks = {"current": THIS, "former": BEFORE, "installed": [THIS, BEFORE]}
HAS: Stacks = {"current": BEFORE, "former": "", "installed": [THIS, BEFORE]}
BARE = NONE
HERE = LOCK["platform"]["os"]


@pytest.fixture
def cache(tmp_path: Path) -> Builds:
    return Builds(tmp_path)


def test_a_node_that_was_not_probed_has_nothing() -> None:
    unknown: list[dict[str, Any]] = [{}, {"_preflight_probe": None}, {"_preflight_probe": {"unreachable": True}}]
    assert [(stacks_of(variables), free_of(variables)) for variables in unknown] == [(NONE, None)] * 3
    known = {"_preflight_probe": {"probe": {"stacks": RUNS, "disk_free_mb": 7}}}
    assert (stacks_of(known), free_of(known)) == (RUNS, 7)


def test_nothing_is_done_or_read_if_all_nodes_run_the_stack(cache: Builds) -> None:
    pack_stack(cache, THIS).path.write_text("damaged")
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": RUNS}, "node-1")
    assert (made["lacking"], made["behind"], made["installs"], made["work"]) == ([], [], [], False)
    assert cache.stack(LOCK).exists()


def test_nodes_that_have_the_stack_only_switch(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": HAS}, "node-1")
    assert (made["lacking"], made["behind"], made["pack"], made["build"]) == ([], ["node-2"], False, False)


@pytest.mark.parametrize(
    "nodes", [{"node-1": RUNS, "node-2": BARE}, {"node-1": BARE, "node-2": BARE}], ids=["one", "all"]
)
def test_a_packed_stack_is_only_installed(cache: Builds, nodes: dict[str, Stacks]) -> None:
    built = pack_stack(cache, THIS)
    made = plan(LOCK, cache, nodes, "node-1")
    lacking = [name for name, stacks in nodes.items() if stacks is BARE]
    assert (made["lacking"], made["behind"]) == (lacking, lacking)
    assert made["archive"] == built.describe()
    assert (made["pack"], made["build"], made["parts"]) == (False, False, {"openmpi": None, "horovod": None})


def test_a_stack_on_the_builder_is_only_packed(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, False)
    assert made["archive_path"] == str(cache.stack(LOCK))


@pytest.mark.parametrize("nodes", [{"node-1": BARE, "node-2": RUNS}, {"node-2": BARE}], ids=["bare", "outside"])
def test_a_stack_missing_on_the_builder_is_built(cache: Builds, nodes: dict[str, Stacks]) -> None:
    made = plan(LOCK, cache, nodes, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, True)
    assert made["paths"] == {"openmpi": str(cache.openmpi(LOCK)), "horovod": str(cache.horovod(LOCK))}
    assert made["mpi"] == openmpi_key(LOCK)
    assert made["parts"] == {"openmpi": None, "horovod": None}


def test_a_damaged_archive_is_built_again(cache: Builds) -> None:
    pack_stack(cache, THIS).path.write_text("damaged")
    made = plan(LOCK, cache, {"node-1": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, True)


def test_nodes_that_cannot_get_the_stack_are_named(cache: Builds) -> None:
    nodes = {"node-1": RUNS, "node-2": BARE, "node-3": BARE}
    made = plan(LOCK, cache, nodes, "node-1")
    refusal = unavailable(made, "/builds", "node-1")
    assert refusal.startswith(f"node-2, node-3 have no stack {THIS}, and no archive of it is in /builds; node-1")
    assert unavailable(plan(LOCK, cache, {"node-1": RUNS}, "node-1"), "/builds", "node-1") == ""
    pack_stack(cache, THIS)
    assert unavailable(plan(LOCK, cache, nodes, "node-1"), "/builds", "node-1") == ""


def test_builds_of_another_cluster_are_not_used(tmp_path: Path) -> None:
    mine, theirs = Builds(tmp_path / "mine/builds"), Builds(tmp_path / "theirs/builds")
    pack_stack(theirs, THIS)
    pack(theirs.openmpi(LOCK), "poisoned")
    made = plan(LOCK, mine, {"node-1": BARE}, "node-1")
    assert (made["archive"], made["build"], made["parts"]) == (None, True, {"openmpi": None, "horovod": None})
    assert plan(LOCK, theirs, {"node-1": BARE}, "node-1")["archive"]


def test_an_archive_without_a_contents_list_is_packed_again(cache: Builds) -> None:
    pack(cache.stack(LOCK), lock=LOCK, unpacked=1)
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, False)


def test_parts_built_before_are_reused(cache: Builds) -> None:
    openmpi = pack(cache.openmpi(LOCK), builder="node-1")
    # Compiled against another torch.
    pack(cache.horovod(changed("wheels", 2, "sha256", to="16")), builder="node-1")
    made = plan(LOCK, cache, {"node-1": BARE}, "node-1")
    assert made["parts"] == {"openmpi": openmpi.describe(), "horovod": None}
    horovod = pack(cache.horovod(LOCK), builder="node-1")
    assert plan(LOCK, cache, {"node-1": BARE}, "node-1")["parts"]["horovod"] == horovod.describe()


def test_parts_of_another_builder_are_rebuilt(cache: Builds) -> None:
    """Root on the new builder would run them, and the old builder may have been revoked."""
    for part in (cache.openmpi(LOCK), cache.horovod(LOCK)):
        pack(part, builder="node-1")
    assert plan(LOCK, cache, {"node-2": BARE}, "node-2")["parts"] == {"openmpi": None, "horovod": None}


def test_every_node_without_space_is_named(cache: Builds) -> None:
    pack_stack(cache, THIS, unpacked=1000 << 20)
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE, "node-3": BARE, "node-4": BARE, "node-5": BARE}, "node-1")
    free = {"node-1": 0, "node-2": 1255, "node-3": 1256, "node-4": None, "node-5": 3}
    with pytest.raises(FarandoleError) as refusal:
        refuse_without_room(LOCK, made, free, "node-1")
    assert str(refusal.value) == (
        "not enough space for the stack: node-2 has 1255 MiB free for /opt and needs 1256; "
        "node-5 has 3 MiB free for /opt and needs 1256: free some and run again"
    )
    refuse_without_room(LOCK, made, {**free, "node-2": 1256, "node-5": 1256}, "node-1")


def test_the_builder_needs_more_space(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": BARE, "node-2": BARE}, "node-1")
    refuse_without_room(LOCK, made, {"node-1": 8000, "node-2": 4000}, "node-1")
    for free, words in (
        ((7999, 4000), "node-1 has 7999 .* needs 8000:"),
        ((8000, 3999), "node-2 has 3999 .* needs 4000:"),
    ):
        with pytest.raises(FarandoleError, match=words):
            refuse_without_room(LOCK, made, dict(zip(("node-1", "node-2"), free, strict=True)), "node-1")


# Packages of the user's own

LAYER = layered("pandas")
BASE = base_of(LAYER)["id"]
WITH_BASE: Stacks = {"current": BASE, "former": "", "installed": [BASE]}
WITH_BOTH: Stacks = {"current": LAYER["id"], "former": BASE, "installed": [LAYER["id"], BASE]}


def packed(cache: Builds, lock: Lock) -> None:
    pack(cache.stack(lock), lock=lock, unpacked=100 << 20, contents={f"stacks/{lock['id']}": "07"})


def test_a_base_is_the_stack_without_the_users_packages() -> None:
    base = base_of(LAYER)
    assert [wheel["name"] for wheel in base["wheels"]] == ["numpy", "tensorflow-cpu", "torch"]
    assert base["wanted"]["packages"] == base["wanted"]["pins"] == base["own"] == []
    assert "pandas" not in {**base["versions"], **base["index"]["files"], **base["why"]}
    assert base_of(layered("polars"))["id"] == base["id"] != LAYER["id"]
    assert (horovod_key(base), openmpi_key(base)) == (horovod_key(LAYER), openmpi_key(LAYER))
    assert base_of(LOCK) == LOCK


def test_adding_a_package_builds_and_installs_only_that(cache: Builds) -> None:
    made = plan(LAYER, cache, {"node-1": WITH_BASE, "node-2": WITH_BASE}, "node-1")
    assert (made["lacking"], made["pack"], made["build"], made["work"]) == ([], False, False, True)
    assert (made["layer"]["pack"], made["layer"]["build"]) == (True, True)
    assert made["base"] == base_of(LAYER)
    packed(cache, LAYER)
    made = plan(LAYER, cache, {"node-1": WITH_BOTH, "node-2": WITH_BASE}, "node-1")
    assert not made["work"]
    assert [(part["id"], part["base"], part["lacking"]) for part in made["installs"]] == [
        (LAYER["id"], BASE, ["node-2"])
    ]


def test_a_bare_node_gets_the_base_and_then_the_layer(cache: Builds) -> None:
    for lock in (base_of(LAYER), LAYER):
        packed(cache, lock)
    made = plan(LAYER, cache, {"node-1": WITH_BOTH, "node-2": WITH_BASE, "node-3": BARE}, "node-1")
    assert not made["work"]
    assert [(part["id"], part["base"], part["lacking"]) for part in made["installs"]] == [
        (BASE, "", ["node-3"]),
        (LAYER["id"], BASE, ["node-2", "node-3"]),
    ]
    free = {"node-1": 0, "node-2": 100, "node-3": 456}
    refuse_without_room(LAYER, made, free, "node-1")
    with pytest.raises(FarandoleError, match=r"node-2 has 99 .* needs 100; node-3 has 455 .* needs 456"):
        refuse_without_room(LAYER, made, {"node-1": 0, "node-2": 99, "node-3": 455}, "node-1")


def test_a_builder_gets_a_packed_base_before_it_adds_to_it(cache: Builds) -> None:
    packed(cache, base_of(LAYER))
    made = plan(LAYER, cache, {"node-1": BARE, "node-2": BARE}, "node-1")
    assert (made["pack"], made["build"], made["layer"]["build"]) == (False, False, True)
    assert made["installs"][0]["archive"]


def test_what_has_the_layer_needs_no_base(cache: Builds) -> None:
    """Its base was installed with it, and may not be packed any more."""
    nodes = {"node-1": WITH_BOTH, "node-2": {**WITH_BOTH, "installed": [LAYER["id"]]}}
    made = plan(LAYER, cache, nodes, "node-1")
    assert (made["lacking"], made["behind"], made["installs"], made["work"]) == ([], [], [], False)


def test_nodes_that_cannot_get_a_layer_are_named(cache: Builds) -> None:
    made = plan(LAYER, cache, {"node-2": WITH_BASE}, "node-1")
    assert unavailable(made, "/builds", "node-1").startswith(f"node-2 have no stack {LAYER['id']}, and no archive")


# Rollback


def test_a_packed_stack_is_chosen_with_its_lock(cache: Builds) -> None:
    pack_stack(cache, THIS)
    for prefix in (THIS, THIS[:3]):
        assert choose(prefix, {"node-1": BARE}, {HERE}, cache) == LOCK


def test_a_stack_on_every_node_needs_no_archive(cache: Builds) -> None:
    nodes = {"node-1": RUNS, "node-2": HAS}
    lock = choose(BEFORE, nodes, {HERE}, cache)
    assert lock == {"id": BEFORE}
    assert plan(lock, cache, nodes, "node-1")["behind"] == ["node-1"]


def test_an_unavailable_stack_is_refused_with_the_available_ones(cache: Builds) -> None:
    pack_stack(cache, "cccc00000000")
    with pytest.raises(FarandoleError) as refusal:
        choose(THIS, {"node-1": RUNS, "node-2": {**BARE, "installed": [BEFORE]}}, {HERE}, cache)
    assert f"no stack {THIS} is on every node or in {cache.stacks}" in str(refusal.value)
    assert f"available: {BEFORE}, cccc00000000: choose one with -e stack_id=" in str(refusal.value)


def test_a_stack_of_another_release_is_not_offered(cache: Builds) -> None:
    pack_stack(cache, THIS)
    with pytest.raises(FarandoleError, match="available: none: choose one"):
        choose(BEFORE, {"node-1": BARE}, {"debian-13"}, cache)


def test_an_ambiguous_prefix_is_refused(cache: Builds) -> None:
    for stack in ("cccc00000000", "cccc11111111"):
        pack_stack(cache, stack)
    with pytest.raises(FarandoleError, match="more than one stack begins with cccc; available: cccc00000000, cccc1"):
        choose("cccc", {"node-1": BARE}, {HERE}, cache)


def test_the_default_is_the_former_stack(cache: Builds) -> None:
    assert choose("", {"node-1": RUNS, "node-2": {**HAS, "former": BEFORE}}, {HERE}, cache) == {"id": BEFORE}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ({"node-1": RUNS, "node-2": HAS}, f"(node-1: {BEFORE}, node-2: none)"),
        ({"node-1": RUNS, "node-2": {**RUNS, "former": "cccc00000000"}}, f"(node-1: {BEFORE}, node-2: cccc00000000)"),
        ({"node-1": BARE, "node-2": BARE}, "(node-1: none, node-2: none)"),
    ],
    ids=["one has none", "they differ", "none has one"],
)
def test_nodes_with_different_former_stacks_are_named(nodes: dict[str, Any], words: str) -> None:
    with pytest.raises(FarandoleError) as refusal:
        former(nodes)
    assert f"the nodes do not share one former stack to go back to {words}; choose a stack with" in str(refusal.value)


def test_a_stack_of_another_release_is_refused() -> None:
    lock = {"id": "aaaa", "platform": {"os": "debian-13"}}
    with pytest.raises(FarandoleError, match="was built for debian-13; node-2 has debian-12: choose another"):
        refuse_elsewhere(lock, {"node-1": "debian-13", "node-2": "debian-12", "node-3": ""})
    refuse_elsewhere(lock, {"node-1": "debian-13"})
    refuse_elsewhere({"id": "aaaa"}, {"node-1": "debian-12"})


def test_a_nodes_release_is_written_as_in_locks() -> None:
    probe = {"os_id": "debian", "os_version": "12"}
    assert system_of({"_preflight_probe": {"probe": probe}}) == "debian-12"
    assert system_of({}) == ""
