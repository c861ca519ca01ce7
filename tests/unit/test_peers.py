"""Nodes that pass an archive on: who fetches from whom, from which sources, and who is served."""

import hashlib
import os
import pwd
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farandole.core import fetching
from farandole.stack import peers as decision

from .loading import load
from .prefix import archive, request
from .stack import Endless, Quiet, Truncates, dead_url, run_module, served

peers = load("module_utils", "peers")
serving, depot = peers.serving, sys.modules[peers.ask.__module__]
PIECE = 1000
CONTENT = random.Random(1).randbytes(3 * PIECE + 1)  # noqa: S311
PIECES = [hashlib.sha256(CONTENT[start : start + PIECE]).hexdigest() for start in range(0, len(CONTENT), PIECE)]
NAME = "a.tar.zst"

# Who fetches from whom


def hosts(count: int) -> dict[str, str]:
    return {f"node-{number}": f"10.0.{number // 250}.{number % 250 + 1}" for number in range(count)}


@pytest.mark.parametrize(("count", "forks"), [(4, 32), (16, 32), (1000, 1000), (1000, 32), (1000, 5), (9, 1)])
def test_each_node_has_an_earlier_parent_and_few_children(count: int, forks: int) -> None:
    addresses = hosts(count)
    nodes, names = decision.tree(addresses, forks, 8480), list(addresses)
    assert [name for name in names if not nodes[name]["sources"]] == names[: min(2, forks)]
    for place, node in enumerate(nodes.values()):
        asked = [source["name"] for source in node["sources"]]
        assert len(asked) <= 2 and all(names.index(source) < place for source in asked)
        assert all(source["address"] == addresses[source["name"]] for source in node["sources"])
        # Exactly those who ask it are answered.
        for kind, number in (("children", 0), ("grandchildren", 1)):
            below = [other for other in nodes.values() if [node["address"]] == [
                source["address"] for source in other["sources"][number : number + 1]]]  # fmt: skip
            assert node[kind] == [other["address"] for other in below]
        assert len(node["children"]) <= 3 and len(node["grandchildren"]) <= 7
        # Who is next to a fault moves before those behind it, as far as they may be fetching at the same time.
        if asked and place < forks:
            assert node["patience"] > nodes[asked[0]]["patience"]
        assert node["patience"] <= 60


def test_the_depot_and_each_node_have_two_children() -> None:
    nodes = decision.tree({name: f"10.0.0.{name}" for name in "123456789"}, 8, 8480)
    above = {name: "".join(source["name"] for source in node["sources"]) for name, node in nodes.items()}
    # The last one has to wait for its turn.
    assert above == {"1": "", "2": "", "3": "1", "4": "1", "5": "2", "6": "2", "7": "31", "8": "31", "9": "1"}
    assert [node["patience"] for node in nodes.values()] == [10, 10, 15, 15, 15, 15, 20, 20, 15]


def install(lacking: Mapping[str, str], archive: Path | None) -> dict[str, Any]:
    return {"id": "aaaa", "lacking": list(lacking), "archive": archive and {"path": str(archive)}}


def test_the_head_and_a_few_nodes_have_no_peers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    addresses = hosts(6)
    variables = {name: {"ansible_host": address} for name, address in addresses.items()}

    def shared(part: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
        return decision.peers([part], names or list(addresses), {**variables, **changes}, "node-0", 32, 8480)

    part = install(addresses, tmp_path / "file")
    chosen = shared(part)["aaaa"]
    assert chosen["pieces"] == [hashlib.sha256(CONTENT).hexdigest()]
    assert list(chosen["nodes"]) == ["node-1", "node-2", "node-3", "node-4", "node-5"]
    # Not those that another play sets up, have the archive, or have a name for an address; and then they are too few.
    assert shared(part, "node-0", "node-1", "node-2", "node-3") == {}
    assert shared(install(dict.fromkeys(list(addresses)[:4], ""), tmp_path / "file")) == {}
    assert list(shared(part, **{"node-3": {"ansible_host": "c.example"}})["aaaa"]["nodes"]) == [
        "node-1", "node-2", "node-4", "node-5"
    ]  # fmt: skip
    assert shared(part, **{"node-3": {"ansible_host": "c"}, "node-4": {"ansible_host": "d"}}) == {}
    assert shared(install(addresses, None)) == {}
    # Two archives at the same time.
    both = decision.peers([part, {**part, "id": "bbbb"}], list(addresses), variables, "node-0", 32, 8480)
    assert {stack: node["nodes"]["node-1"]["port"] for stack, node in both.items()} == {"aaaa": 8480, "bbbb": 8481}


def test_an_archive_is_divided_as_nodes_divide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    monkeypatch.setattr(decision, "PIECE", PIECE)
    assert decision.pieces(tmp_path / "file") == PIECES
    assert fetching.PIECE == load("module_utils", "fetching").PIECE


# Fetching


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peers, serving):
        monkeypatch.setattr(module, "PIECE", PIECE)


@pytest.fixture
def port() -> int:
    """A port that is free at all addresses of loopback, which are the nodes here."""
    return int(dead_url().rpartition(":")[2])


def order(number: int, port: int, *sources: int, children: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    named = [{"name": f"node-{source}", "address": f"127.0.0.{source}"} for source in sources]
    below = [f"127.0.0.{child}" for child in children]
    given = {"address": f"127.0.0.{number}", "port": port, "patience": 1, "sources": named, "children": below}
    return {**given, "grandchildren": [], **more}


@contextmanager
def peer(number: int, port: int, *sent: bytes | float, wait_s: float = 0) -> Iterator[list[bytes]]:
    """A node that sends these bytes, and waits so many seconds, whatever it is asked."""
    listener, asked, over = socket.socket(), list[bytes](), threading.Event()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((f"127.0.0.{number}", port))

    if not wait_s:
        listener.listen()

    def serve() -> None:
        time.sleep(wait_s)
        listener.listen()
        while not over.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(20)
                    asked.append(connection.recv(5000))
                    for part in sent:
                        if isinstance(part, bytes):
                            connection.sendall(part)
                        else:
                            over.wait(part)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def get(folder: Path, url: str, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """Fetch the file as stack_install does; returns from where, and the warnings."""
    warnings = list[str]()
    shared = peers.Shared(PIECES, given, warnings.append)
    got = shared.get(f"{url}/stacks/{NAME}", folder / "archive", len(CONTENT))
    assert got == hashlib.sha256(CONTENT).hexdigest()
    assert (folder / "archive").read_bytes() == CONTENT
    return shared, warnings


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    (tmp_path / "depot/stacks").mkdir(parents=True)
    (tmp_path / "depot/stacks" / NAME).write_bytes(CONTENT)
    return tmp_path / "depot"


def counting(*, ranges: bool) -> tuple[type[Quiet], list[int]]:
    """A depot that counts the bytes of each answer; with ranges, as nginx answers."""
    sent = list[int]()

    class Depot(Quiet, SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if ranges else 0
            content = Path(self.translate_path(self.path)).read_bytes()[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            sent.append(len(content))

    return Depot, sent


HEAD = b"HTTP/1.1 206 Partial Content\r\n\r\n"
LIE = CONTENT[:PIECE] + b"lie" + CONTENT[PIECE + 3 :]
# What a peer sends, how many pieces of it count, and the cause.
BAD: dict[str, tuple[tuple[bytes | float, ...], int, str]] = {
    "lying": ((HEAD, LIE), 1, f"node-2 sent wrong bytes of {NAME}"),
    "lying at the end": ((HEAD, CONTENT[:-1], b"x"), 3, f"node-2 sent wrong bytes of {NAME}"),
    "another file": ((HEAD, b"x" * len(CONTENT)), 0, f"node-2 sent wrong bytes of {NAME}"),
    "short": ((HEAD, CONTENT[: 2 * PIECE + 1]), 2, "node-2 stopped before the end"),
    "silent": ((30.0,), 0, "node-2 sent 0 KiB in 1 s"),
    "silent later": ((HEAD, CONTENT[: 2 * PIECE], 30.0), 2, "node-2 sent 1 KiB in 1 s"),
    "single bytes": ((HEAD, *(b"x", 0.05) * 400), 0, "node-2 sent 0 KiB in 1 s"),
    "a head by single bytes": (tuple((b"H", 0.05) * 400), 0, "node-2 sent 0 KiB in 1 s"),
    "gone": ((), 0, "node-2 gave no valid answer"),
    "endless head": ((b"HTTP/1.1 206 X\r\n" * 1000, 30.0), 0, "node-2 gave no valid answer"),
    "a redirection": ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.9/\r\n\r\n",), 0, "node-2 answered 302"),
    "first this": ((b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,), 0, "node-2 answered 100"),
    "the whole": ((b"HTTP/1.1 200 OK\r\n\r\n", CONTENT), 0, "node-2 answered 200"),
    "no HTTP": ((b"220 mail\r\n\r\n",), 0, "node-2 answered no HTTP"),
    "a message": ((b"\x1b[2J{{ x }}\r\n\r\n",), 0, "node-2 answered no HTTP"),
}


@pytest.mark.parametrize(("sent", "count", "cause"), BAD.values(), ids=BAD)
def test_a_bad_peer_costs_one_retry_and_is_named(
    stacks: Path, port: int, tmp_path: Path, sent: tuple[bytes | float, ...], count: int, cause: str
) -> None:
    handler, by_depot = counting(ranges=True)
    begun = time.monotonic()
    with served(stacks, handler) as url, peer(2, port, *sent) as asked:
        shared, warnings = get(tmp_path, url, order(3, port, 2))
    assert len(asked) == 1 and asked[0].startswith(f"GET /{NAME} HTTP/1.1\r\n".encode())
    assert (shared.source, shared.retries) == ("the depot", 1)
    assert by_depot == [len(CONTENT) - count * PIECE]
    assert [warning.partition(". ")[0] for warning in warnings] == [cause]
    assert f"port {port}" in warnings[0]
    assert time.monotonic() - begun < 6


def test_a_depot_that_sends_no_parts_sends_all_of_it(stacks: Path, port: int, tmp_path: Path) -> None:
    handler, by_depot = counting(ranges=False)
    with served(stacks, handler) as url, peer(2, port, HEAD, LIE):
        assert get(tmp_path, url, order(3, port, 2))[0].source == "the depot"
    assert by_depot == [len(CONTENT)]


def test_the_next_peer_goes_on_and_more_than_the_file_is_not_read(tmp_path: Path, port: int) -> None:
    rest = CONTENT[PIECE:] + bytes(5000)
    with peer(2, port, HEAD, LIE), peer(4, port, HEAD + rest[:700], rest[700:], 30.0) as asked:
        shared, warnings = get(tmp_path, dead_url(), order(3, port, 2, 4))
    assert f"\r\nRange: bytes={PIECE}-\r\n".encode() in asked[0]
    assert (shared.source, shared.retries, len(warnings)) == ("node-4", 1, 1)


def test_a_parent_may_be_late_but_who_comes_after_it_may_not(stacks: Path, tmp_path: Path, port: int) -> None:
    with peer(2, port, HEAD, CONTENT, wait_s=0.5):
        shared, warnings = get(tmp_path, dead_url(), order(3, port, 2))
    assert (shared.source, shared.retries, warnings) == ("node-2", 0, [])
    begun = time.monotonic()
    with served(stacks) as url:
        shared, warnings = get(tmp_path, url, order(3, port, 2, 4))
    assert 1 < time.monotonic() - begun < 2
    assert (shared.source, shared.retries) == ("the depot", 2)
    assert warnings[0].startswith("node-2 cannot be reached: connection refused")


def test_a_parent_that_still_passes_on_another_file_is_asked_again(tmp_path: Path, port: int) -> None:
    (tmp_path / "former").mkdir()
    (tmp_path / "new").mkdir()
    given, child = order(2, port, children=(3,)), {**order(3, port, 2), "patience": 5}
    with serve(tmp_path / "former", given, "other"), ThreadPoolExecutor() as pool:
        asks = pool.submit(get, tmp_path, dead_url(), child)
        time.sleep(0.7)
        assert not asks.done()
        with serve(tmp_path / "new", given) as (have, _):
            have(4)
            shared, warnings = asks.result(20)
    assert (shared.source, shared.retries, warnings) == ("node-2", 0, [])


def test_a_slow_disk_of_this_node_is_not_blamed_on_its_source(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = peers.Checked.add

    def slowly(*values: Any) -> None:
        time.sleep(0.6)
        add(*values)

    monkeypatch.setattr(peers.Checked, "add", slowly)
    monkeypatch.setattr(peers, "BLOCK", PIECE)
    with peer(2, port, HEAD, CONTENT):
        assert get(tmp_path, dead_url(), order(3, port, 2))[0].source == "node-2"


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (Truncates, "cannot be fetched: the transfer stopped"),
        (Endless, f"is damaged: it is longer than {len(CONTENT)} bytes"),
        (None, "cannot be fetched: connection refused"),
        (Quiet, f"is damaged: from byte {PIECE} on, its sha256 is"),
    ],
)
def test_the_depot_is_the_last_source_and_fails_as_without_peers(
    stacks: Path, tmp_path: Path, port: int, handler: type[Quiet] | None, message: str
) -> None:
    if handler is Quiet:
        (stacks / "stacks" / NAME).write_bytes(LIE)

    def fail(msg: str) -> None:
        raise AssertionError(msg)

    shared = peers.Shared(PIECES, order(3, port, 2), lambda _: None)
    file = {"url": f"{dead_url()}/stacks/{NAME}", "sha256": "0" * 64, "size": len(CONTENT)}
    with served(stacks, handler or Quiet) as url, pytest.raises(AssertionError) as failed:
        if handler:
            file["url"] = f"{url}/stacks/{NAME}"
        depot.fetch(SimpleNamespace(fail_json=fail), file, tmp_path / "archive", get=shared.get)
    assert message in str(failed.value)
    assert (tmp_path / "archive").stat().st_size <= len(CONTENT)


# Serving


@contextmanager
def serve(folder: Path, given: dict[str, Any], name: str = NAME) -> Iterator[tuple[Callable[[int], None], int]]:
    """A node that passes the file on; yields how to let it have a piece, and its process."""
    target = folder / "archive"
    target.write_bytes(b"")
    before = children()
    with closing(serving.start(target, f"/{name}", len(CONTENT), given)) as passing, target.open("ab") as file:

        def have(count: int) -> None:
            for _ in range(count):
                file.write(CONTENT[file.tell() :][:PIECE])
                file.flush()
                passing.tell()

        (pid,) = children() - before or {0}
        # Another run knows it by the name that it takes at its beginning.
        for _ in range(500):
            if pid and not ended(pid, 0) and Path(f"/proc/{pid}/comm").read_text().strip() != serving.NAME:
                time.sleep(0.01)
        try:
            yield have, pid
        finally:
            if pid and not ended(pid, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def children() -> set[int]:
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def ended(pid: int, seconds: float) -> bool:
    """Whether a process has ended, or does within some seconds."""
    until = time.monotonic() + seconds
    while pid in children():
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def call(number: int, port: int, text: str = "", to: int = 2) -> socket.socket:
    """A connection from a node, on which this was sent."""
    connection = socket.create_connection((f"127.0.0.{to}", port), 5, (f"127.0.0.{number}", 0))
    connection.sendall(text.encode())
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes."""
    content = b""
    with connection, suppress(ConnectionError):
        while block := connection.recv(65536):
            content += block
    return content


@contextmanager
def groups(*numbers: int) -> Iterator[None]:
    """This process, in these groups for a while."""
    before = os.getgroups()
    os.setgroups(numbers)
    try:
        yield
    finally:
        os.setgroups(before)


def answer(connection: socket.socket) -> tuple[str, bytes]:
    """The status and the content of an answer."""
    head, _, body = received(connection).partition(b"\r\n\r\n")
    return head.decode().partition("\r\n")[0], body


ASK = f"GET /{NAME} HTTP/1.1\r\nHost: x\r\n"


def test_a_node_passes_on_what_it_has_while_it_fetches(tmp_path: Path, port: int) -> None:
    with serve(tmp_path, order(2, port, children=(3,))) as (have, _):
        with call(3, port, f"{ASK}\r\n") as early:
            early.settimeout(0.3)
            assert early.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            with pytest.raises(TimeoutError):
                early.recv(1)
            have(1)
            time.sleep(0.1)
            assert early.recv(65536) == CONTENT[:PIECE]
            have(3)
            (tmp_path / "archive").unlink()
            early.settimeout(5)
            assert received(early) == CONTENT[PIECE:]
        late = call(3, port, f"{ASK}Range: bytes={PIECE + 1}-\r\n\r\n")
        assert answer(late) == ("HTTP/1.1 206 Partial Content", CONTENT[PIECE + 1 :])


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{ASK}Range: bytes={len(CONTENT)}-\r\n\r\n", "416 Range Not Satisfiable"),
        (f"{ASK}Range: bytes={'9' * 15}-\r\n\r\n", "416 Range Not Satisfiable"),
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (f"GET /{NAME}x HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("GET /../../etc/passwd HTTP/1.1\r\n\r\n", "404 Not Found"),
        (f"POST /{NAME} HTTP/1.1\r\n\r\n", "404 Not Found"),
        (f"GET /{NAME}\r\n\r\n", "404 Not Found"),
        ("\x00" * 5000, "404 Not Found"),
        (ASK + "x: y\r\n" * 1000 + "\r\n", "404 Not Found"),
    ],
)
def test_nothing_else_is_served(tmp_path: Path, port: int, text: str, status: str) -> None:
    with serve(tmp_path, order(2, port, children=(3,))) as (have, pid):
        have(4)
        # A request that is too long may end the connection before its answer is read.
        got, body = answer(call(3, port, text))
        assert got in (f"HTTP/1.1 {status}", *([""] if len(text) > 2048 else [])) and body == b""
        assert answer(call(3, port, f"{ASK}\r\n"))[1] == CONTENT
        assert not ended(pid, 0)


def test_only_those_who_are_named_are_served_and_each_a_few_times_at_once(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "REQUEST_S", 0.5)
    given = order(2, port, children=(3,), grandchildren=["127.0.0.4"])
    with serve(tmp_path, given) as (have, _):
        have(4)
        for number in (1, 2, 5):
            assert answer(call(number, port, f"{ASK}\r\n")) == ("", b"")
        for number in (3, 4):
            assert answer(call(number, port, f"{ASK}\r\n"))[1] == CONTENT
        with pytest.raises(ConnectionRefusedError):
            call(3, port, to=6)
        with call(3, port), call(3, port, "G"):
            assert answer(call(3, port, f"{ASK}\r\n")) == ("", b"")
            assert answer(call(4, port, f"{ASK}\r\n"))[1] == CONTENT
            # Whoever does not ask in time makes room.
            time.sleep(0.7)
            assert answer(call(3, port, f"{ASK}\r\n"))[1] == CONTENT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_the_process_that_serves_has_no_rights_and_nothing_of_the_module(tmp_path: Path, port: int) -> None:
    with groups(4), (tmp_path / "lock").open("w"), serve(tmp_path, order(2, port, children=(3,))) as (have, pid):
        have(1)
        # It has given up its rights before it answers anybody.
        with call(3, port, f"{ASK}\r\n") as asked:
            asked.recv(1)
            status = dict(
                line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "\t" in line
            )
            account = pwd.getpwnam("nobody")
            assert status["Name"] == serving.NAME
            assert status["Uid"].split() == [str(account.pw_uid)] * 4
            assert status["Gid"].split() == [str(account.pw_gid)] * 4
            assert status["Groups"].split() == []
            assert {status[name].strip("0") for name in ("CapEff", "CapPrm")} == {""}
            assert os.getsid(pid) == pid and Path(f"/proc/{pid}/cwd").readlink() == Path("/")
            opened = sorted(str(file.readlink()).partition(":")[0] for file in Path(f"/proc/{pid}/fd").iterdir())
            assert opened == sorted([*["/dev/null"] * 3, "pipe", "socket", "socket", str(tmp_path / "archive")])
            (content,) = (file.name for file in Path(f"/proc/{pid}/fd").iterdir() if file.readlink().name == "archive")
            (flags,) = (
                line.split()[1]
                for line in Path(f"/proc/{pid}/fdinfo/{content}").read_text().splitlines()
                if line.startswith("flags")
            )
            assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY


def test_it_ends_with_a_module_that_has_not_everything(tmp_path: Path, port: int) -> None:
    with closing(serving.Passing()):
        (tmp_path / "archive").write_bytes(CONTENT)
        before = children()
        passing = serving.start(tmp_path / "archive", f"/{NAME}", len(CONTENT), order(2, port, children=(3,)))
        (pid,) = children() - before
        passing.tell()
        with call(3, port, f"{ASK}\r\n") as asked:
            assert not ended(pid, 1.5)
            passing.close()
            assert ended(pid, 1)
            assert answer(asked)[1] == CONTENT[:PIECE]


@pytest.mark.parametrize(
    ("asks", "limits", "seconds"),
    [
        (True, {"SERVED_S": 0, "IDLE_S": 60}, 2.5),
        (False, {"SERVED_S": 0, "IDLE_S": 0}, 2.5),
        (False, {"SERVED_S": 60, "IDLE_S": 60, "MOST_S": 1}, 2.5),
        (False, {"SERVED_S": 0, "IDLE_S": 60}, None),
        (True, {"SERVED_S": 60, "IDLE_S": 1}, None),
    ],
    ids=["served", "nobody came", "limit", "not served yet", "grandchildren may come"],
)
def test_it_ends_when_nobody_needs_it(
    tmp_path: Path,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    asks: bool,
    limits: dict[str, int],
    seconds: float | None,
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(serving, name, value)
    with serve(tmp_path, order(2, port, children=(3,))) as (have, pid):
        have(4)
        if asks:
            assert answer(call(3, port, f"{ASK}\r\n"))[1] == CONTENT
        assert ended(pid, seconds or 2.5) == (seconds is not None)


def test_a_node_whose_port_is_taken_installs_without_serving(stacks: Path, tmp_path: Path, port: int) -> None:
    before = children()
    with peer(2, port), served(stacks) as url:
        shared, warnings = get(tmp_path, url, order(2, port, children=(3,)))
    assert (shared.source, warnings, children()) == ("the depot", [], before)


def test_what_another_run_sends_takes_the_place_of_what_was_sent_before(tmp_path: Path, port: int) -> None:
    (tmp_path / "former").mkdir()
    given = order(2, port, children=(3,))
    with serve(tmp_path / "former", given) as (_, former), serve(tmp_path, given) as (have, pid):
        have(4)
        assert pid not in (0, former) and ended(former, 5)
        assert answer(call(3, port, f"{ASK}\r\n"))[1] == CONTENT


def test_a_stack_is_passed_on_from_node_to_node(tmp_path: Path, port: int) -> None:
    (tmp_path / "depot").mkdir()
    packed = archive(tmp_path)
    asked = {"pieces": [hashlib.sha256(packed.read_bytes()).hexdigest()]}
    handler, sent = counting(ranges=True)
    before = children()
    with served(tmp_path / "depot", handler) as url:
        for number, source, above in ((2, "the depot", ()), (3, "node-2", (2,)), (4, "node-3", (3, 2))):
            peers_of = order(number, port, *above, children=(number + 1,))
            done = run_module(
                "stack_install", request(packed, url, tmp_path / f"opt-{number}", peers=peers_of, **asked)
            )
            assert (done.get("source"), done.get("retries"), done["changed"]) == (source, 0, True), done
            # The module's lock is not held by the process that serves.
            assert not run_module("stack_install", request(packed, url, tmp_path / f"opt-{number}", **asked))["changed"]
            assert not (tmp_path / f"opt-{number}/incoming").exists()
    assert len(sent) == 1
    assert children() == before
