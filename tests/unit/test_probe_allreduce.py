"""How the allreduce probe judges its ranks; playbooks/validate.yml runs the probe for real."""

import json
import socket
from typing import Any, Self

import pytest

from farandole.core.causes import causes

from .loading import load_probe

allreduce = load_probe("allreduce")
HERE = socket.gethostname()


class Scalar:
    """Like a scalar of numpy."""

    def __init__(self, value: int) -> None:
        self.value = value

    def item(self) -> int:
        return self.value


class Numbers(list[int]):
    """The parts of a numpy array that the probe uses."""

    def cpu(self) -> Self:
        return self

    def numpy(self) -> Self:
        return self

    def min(self) -> Scalar:
        return Scalar(min(self))

    def max(self) -> Scalar:
        return Scalar(max(self))

    def __getitem__(self, which: Any) -> Any:
        return Numbers(super().__getitem__(which)) if isinstance(which, slice) else super().__getitem__(which)


class Horovod:
    """The second of three ranks. The others' arrays are made up; one element of them may be wrong."""

    Sum = "sum"

    def __init__(self, spoiled: str = "", element: int = 0) -> None:
        self.spoiled, self.element = spoiled, element

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def spoil(self, values: Numbers, name: str) -> Numbers:
        if name == self.spoiled:
            values[self.element] = 0
        return values

    def allreduce(self, own: Numbers, op: str, name: str) -> Numbers:
        assert op == "sum" and own == [2] * len(own)
        return self.spoil(Numbers([6] * len(own)), name)

    def allgather(self, own: Numbers, name: str) -> Numbers:
        size = int(name.split(".")[2])
        parts = allreduce.lengths(size, 3)
        assert own == [2] * parts[1]
        return self.spoil(Numbers(number for number in (1, 2, 3) for _ in range(parts[number - 1])), name)

    def broadcast(self, own: Numbers, root: int, name: str) -> Numbers:
        assert own == [0] * len(own), "this rank is not the root and must not fill in values"
        return self.spoil(Numbers([root + 1] * len(own)), name)


HOSTS = list("abc")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use sizes that are small enough for Python lists."""
    monkeypatch.setattr(allreduce, "SIZES", (1, 1000))


def tensor(size: int, value: int, kind: str) -> Numbers:
    assert kind in (*allreduce.TYPES, *allreduce.MOVED)
    return Numbers([value] * size)


def errors(horovod: Horovod) -> list[tuple[str, str]]:
    results = [*allreduce.sums(horovod, tensor), *allreduce.moves(horovod, tensor, HOSTS)]
    assert {error["code"] for error in results} <= {"wrong-values"} <= {*causes()}
    return [(error["host"], error["seen"]) for error in results]


@pytest.mark.usefixtures("few")
def test_correct_results_are_accepted() -> None:
    assert errors(Horovod()) == []


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("spoiled", "element", "host", "message"),
    [
        ("int64.1000", 5, HERE, "the sum of 1000 int64 is 0 to 6, not 6"),
        ("gather.int32.1", 5, "c", "of 6 int32 gathered, the 3 from rank 2 on c are 0 to 3, not 3"),
        ("gather.uint8.1000", 332, "a", "of 1002 uint8 gathered, the 333 from rank 0 on a are 0 to 1, not 1"),
        ("gather.uint8.1000", 333, "b", "of 1002 uint8 gathered, the 334 from rank 1 on b are 0 to 2, not 2"),
        ("broadcast.float64.1.0", 0, "a", "of 1 float64 broadcast, the 1 from rank 0 on a are 0 to 0, not 1"),
        ("broadcast.int64.1000.2", 999, "c", "of 1000 int64 broadcast, the 1000 from rank 2 on c are 0 to 3, not 3"),
    ],
)
def test_one_wrong_element_is_reported_with_its_rank(spoiled: str, element: int, host: str, message: str) -> None:
    assert errors(Horovod(spoiled, element)) == [(host, message)]


def test_missing_elements_are_reported() -> None:
    assert allreduce.lengths(1, 3) == [1, 2, 3]
    for parts, lost, seen in (
        ({0: 1, 1: 2, 2: 3}, [1, 2, 2, 3, 3], "5 int32 gathered from a and b and c arrived, not 6"),
        ({0: 1, 1: 2, 2: 3}, [], "0 int32 gathered from a and b and c arrived, not 6"),
        ({2: 2}, [3], "1 int32 gathered from c arrived, not 2"),
    ):
        assert list(allreduce.misplaced(Numbers(lost), parts, "int32 gathered", HOSTS)) == [
            {"code": "wrong-values", "host": HERE, "seen": seen}
        ]


def test_a_rank_sends_a_nonzero_byte() -> None:
    assert [allreduce.number(rank) for rank in (0, 1, 249, 250)] == [1, 2, 250, 1]


class Place:
    """The parts of Horovod that a rank uses to find its GPU."""

    def __init__(self, local: int, *, nccl: bool = True) -> None:
        self.local_rank, self.rank, self.nccl_built = (lambda: local), (lambda: 8 + local), (lambda: nccl)


def test_each_rank_gets_its_own_gpu_or_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert [allreduce.own_gpu(Place(local), ["a", "b"]) for local in (0, 1)] == ["a", "b"]
    for place, code in ((Place(1), "gpus-missing"), (Place(0, nccl=False), "nccl-missing")):
        with pytest.raises(SystemExit) as ended:
            allreduce.own_gpu(place, ["a"])
        printed = json.loads(capfd.readouterr().out)
        assert (ended.value.code, printed["code"], printed["host"]) == (1, code, HERE)
        assert causes()[code].seen == "probe"
