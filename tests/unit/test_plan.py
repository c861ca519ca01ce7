"""What a run has to do, told from a real cache and from what nodes said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farandole.errors import FarandoleError
from farandole.stack.cache import Builds, horovod_key, openmpi_key
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
)

from .stack import LOCK, changed, pack, pack_stack

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


def test_where_all_run_it_there_is_nothing_to_do_and_the_cache_is_not_read(cache: Builds) -> None:
    pack_stack(cache, THIS).path.write_text("damaged")
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": RUNS}, "node-1")
    assert made == {"lacking": [], "behind": [], "archive": None, "pack": False, "build": False}
    assert cache.stack(LOCK).exists()


def test_where_all_have_it_they_only_switch(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": HAS}, "node-1")
    assert (made["lacking"], made["behind"], made["pack"], made["build"]) == ([], ["node-2"], False, False)


@pytest.mark.parametrize(
    "nodes", [{"node-1": RUNS, "node-2": BARE}, {"node-1": BARE, "node-2": BARE}], ids=["one", "all"]
)
def test_what_is_packed_is_only_installed(cache: Builds, nodes: dict[str, Stacks]) -> None:
    built = pack_stack(cache, THIS)
    made = plan(LOCK, cache, nodes, "node-1")
    lacking = [name for name, stacks in nodes.items() if stacks is BARE]
    assert (made["lacking"], made["behind"]) == (lacking, lacking)
    assert made["archive"] == built.told()
    assert (made["pack"], made["build"], made["parts"]) == (False, False, {"openmpi": None, "horovod": None})


def test_what_the_builder_has_is_only_packed(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, False)
    assert made["archive_path"] == str(cache.stack(LOCK))


@pytest.mark.parametrize("nodes", [{"node-1": BARE, "node-2": RUNS}, {"node-2": BARE}], ids=["bare", "outside"])
def test_what_the_builder_has_not_is_built(cache: Builds, nodes: dict[str, Stacks]) -> None:
    made = plan(LOCK, cache, nodes, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, True)
    assert made["openmpi"] == {"key": openmpi_key(LOCK), "path": str(cache.openmpi(LOCK))}
    assert made["horovod"] == {"key": horovod_key(LOCK), "path": str(cache.horovod(LOCK))}
    assert made["parts"] == {"openmpi": None, "horovod": None}


def test_a_damaged_archive_is_built_again(cache: Builds) -> None:
    pack_stack(cache, THIS).path.write_text("damaged")
    made = plan(LOCK, cache, {"node-1": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, True)


def test_what_another_cluster_s_builder_made_is_not_used(tmp_path: Path) -> None:
    mine, theirs = Builds(tmp_path / "mine/builds"), Builds(tmp_path / "theirs/builds")
    pack_stack(theirs, THIS)
    pack(theirs.openmpi(LOCK), "poisoned")
    made = plan(LOCK, mine, {"node-1": BARE}, "node-1")
    assert (made["archive"], made["build"], made["parts"]) == (None, True, {"openmpi": None, "horovod": None})
    assert plan(LOCK, theirs, {"node-1": BARE}, "node-1")["archive"]


def test_an_archive_of_the_version_before_is_packed_again(cache: Builds) -> None:
    pack(cache.stack(LOCK), lock=LOCK, unpacked=1)
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE}, "node-1")
    assert (made["archive"], made["pack"], made["build"]) == (None, True, False)


def test_parts_that_were_built_are_used_again(cache: Builds) -> None:
    openmpi = pack(cache.openmpi(LOCK), builder="node-1")
    # Compiled against another torch.
    pack(cache.horovod(changed("wheels", 2, "sha256", to="16")), builder="node-1")
    made = plan(LOCK, cache, {"node-1": BARE}, "node-1")
    assert made["parts"] == {"openmpi": openmpi.told(), "horovod": None}
    horovod = pack(cache.horovod(LOCK), builder="node-1")
    assert plan(LOCK, cache, {"node-1": BARE}, "node-1")["parts"]["horovod"] == horovod.told()


def test_parts_of_another_builder_are_built_anew(cache: Builds) -> None:
    """Root on a builder runs them, and who built them may be revoked by now."""
    for part in (cache.openmpi(LOCK), cache.horovod(LOCK)):
        pack(part, builder="node-1")
    assert plan(LOCK, cache, {"node-2": BARE}, "node-2")["parts"] == {"openmpi": None, "horovod": None}


def test_every_node_without_room_is_named(cache: Builds) -> None:
    pack_stack(cache, THIS, unpacked=1000 << 20)
    made = plan(LOCK, cache, {"node-1": RUNS, "node-2": BARE, "node-3": BARE, "node-4": BARE, "node-5": BARE}, "node-1")
    free = {"node-1": 0, "node-2": 1255, "node-3": 1256, "node-4": None, "node-5": 3}
    with pytest.raises(FarandoleError) as refusal:
        refuse_without_room(made, free, "node-1")
    assert str(refusal.value) == (
        "no room for the stack: node-2 has 1255 MiB free where /opt lies and needs 1256; "
        "node-5 has 3 MiB free where /opt lies and needs 1256: make room there and run again"
    )
    refuse_without_room(made, {**free, "node-2": 1256, "node-5": 1256}, "node-1")


def test_the_builder_needs_more_room_than_the_others(cache: Builds) -> None:
    made = plan(LOCK, cache, {"node-1": BARE, "node-2": BARE}, "node-1")
    refuse_without_room(made, {"node-1": 8000, "node-2": 4000}, "node-1")
    for free, words in (
        ((7999, 4000), "node-1 has 7999 .* needs 8000:"),
        ((8000, 3999), "node-2 has 3999 .* needs 4000:"),
    ):
        with pytest.raises(FarandoleError, match=words):
            refuse_without_room(made, dict(zip(("node-1", "node-2"), free, strict=True)), "node-1")


def test_a_stack_that_is_packed_is_chosen_with_its_whole_lock(cache: Builds) -> None:
    pack_stack(cache, THIS)
    for told in (THIS, THIS[:3]):
        assert choose(told, {"node-1": BARE}, {HERE}, cache) == LOCK


def test_a_stack_that_every_node_has_needs_no_archive(cache: Builds) -> None:
    nodes = {"node-1": RUNS, "node-2": HAS}
    lock = choose(BEFORE, nodes, {HERE}, cache)
    assert lock == {"id": BEFORE}
    assert plan(lock, cache, nodes, "node-1")["behind"] == ["node-1"]


def test_a_stack_that_cannot_be_had_is_refused_with_those_that_can(cache: Builds) -> None:
    pack_stack(cache, "cccc00000000")
    with pytest.raises(FarandoleError) as refusal:
        choose(THIS, {"node-1": RUNS, "node-2": {**BARE, "installed": [BEFORE]}}, {HERE}, cache)
    assert f"no stack {THIS} is on every node or in {cache.stacks}" in str(refusal.value)
    assert f"there are {BEFORE}, cccc00000000: name one with -e stack_id=" in str(refusal.value)


def test_a_stack_of_another_release_is_not_offered(cache: Builds) -> None:
    pack_stack(cache, THIS)
    with pytest.raises(FarandoleError, match="there are none: name one"):
        choose(BEFORE, {"node-1": BARE}, {"debian-13"}, cache)


def test_the_beginning_of_two_stacks_is_refused(cache: Builds) -> None:
    for stack in ("cccc00000000", "cccc11111111"):
        pack_stack(cache, stack)
    with pytest.raises(FarandoleError, match="more than one stack begins with cccc; there are cccc00000000, cccc1"):
        choose("cccc", {"node-1": BARE}, {HERE}, cache)


def test_without_a_name_it_goes_back_to_the_former_one(cache: Builds) -> None:
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
def test_nodes_that_disagree_about_the_former_one_are_named(nodes: dict[str, Any], words: str) -> None:
    with pytest.raises(FarandoleError) as refusal:
        former(nodes)
    assert f"there is no one former stack to go back to {words}; name a stack with -e stack_id=" in str(refusal.value)


def test_a_stack_of_another_release_is_refused_before_it_is_sent() -> None:
    lock = {"id": "aaaa", "platform": {"os": "debian-13"}}
    with pytest.raises(FarandoleError, match="was built for debian-13; node-2 has debian-12: name another"):
        refuse_elsewhere(lock, {"node-1": "debian-13", "node-2": "debian-12", "node-3": ""})
    refuse_elsewhere(lock, {"node-1": "debian-13"})
    refuse_elsewhere({"id": "aaaa"}, {"node-1": "debian-12"})


def test_a_node_is_called_as_locks_call_it() -> None:
    probe = {"os_id": "debian", "os_version": "12"}
    assert system_of({"_preflight_probe": {"probe": probe}}) == "debian-12"
    assert system_of({}) == ""
