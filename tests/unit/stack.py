"""Helpers for the tests of the stack: a lock, HTTP servers, and modules run as on a node."""

import base64
import copy
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from farandole.core.files import sha256
from farandole.stack.cache import Builds, Built, Lock, record
from farandole.stack.lock import identity

from .loading import PLUGINS

LOCK: Lock = {
    "format": 1,
    "id": "aaaa00000000",
    "platform": {"os": "debian-12", "arch": "x86_64", "python": "3.11"},
    "wanted": {"frameworks": ["tensorflow", "pytorch"], "pins": [], "accelerator": "cpu"},
    "versions": {"openmpi": "4.1.4", "horovod": "0.28.1", "gxx": "12", "cuda": "none", "nccl": "none"},
    "openmpi": {
        "version": "4.1.4",
        "sources": [
            {"url": "https://example.org/openmpi-4.1.4.tar.bz2", "file": "openmpi-4.1.4.tar.bz2", "sha256": "01"}
        ],
        "patches": [{"file": "01-two.patch", "sha256": "08"}],
        "configure": ["--enable-orterun-prefix-by-default", "--disable-mpi-fortran"],
    },
    "horovod": {
        "version": "0.28.1",
        "file": "horovod-0.28.1.tar.gz",
        "sha256": "02",
        "patches": [{"file": "01-one.patch", "sha256": "03"}],
        "environment": {"HOROVOD_WITH_PYTORCH": "1"},
    },
    "nccl": None,
    "wheels": [
        {"name": "numpy", "version": "2.4.6", "file": "numpy-2.4.6.whl", "sha256": "04"},
        {"name": "tensorflow-cpu", "version": "2.21.0", "file": "tensorflow_cpu-2.21.0.whl", "sha256": "05"},
        {"name": "torch", "version": "2.13.0", "file": "torch-2.13.0.whl", "sha256": "06"},
    ],
    "why": {"openmpi": "the newest that was proven"},
}


def _ansible_on_a_node() -> dict[str, ModuleType]:
    """What modules import of Ansible, which takes itself for a control machine once its plugins are loaded."""
    assert "ansible" not in sys.modules
    importlib.import_module("ansible.module_utils.basic")
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "ansible"}


# Before each module it would take longer than the module.
ANSIBLE_ON_A_NODE = _ansible_on_a_node()


def changed(*path: str | int, to: Any) -> Lock:
    """The lock with one value changed."""
    lock = copy.deepcopy(LOCK)
    place: Any = lock
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return lock


def layered(package: str) -> Lock:
    """The lock with a package of the user's own."""
    lock = copy.deepcopy(LOCK)
    lock["wheels"].append({"name": package, "version": "3.0", "file": f"{package}-3.0.whl", "sha256": "09"})
    lock["wanted"] |= {"packages": [package], "pins": [f"{package}==3.0"]}
    lock["versions"] |= {package: "3.0"}
    lock["why"] |= {package: "stack_packages"}
    files = {wheel["file"]: {"from": "https://example.org", "size": 1} for wheel in lock["wheels"]}
    lock |= {"format": 2, "own": [package], "index": {"until": "2026-01-01T00:00:00Z", "files": files}}
    return {**lock, "id": identity(lock)}


def pack(path: Path, content: str = "packed", **about: Any) -> Built:
    """Write a file with its record, as in the cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    built = Built(path, sha256(path), about)
    record(built)
    return built


def pack_stack(builds: Builds, stack: str, unpacked: int = 100 << 20) -> Built:
    """Write a packed stack, as on the control machine."""
    lock = changed("id", to=stack)
    return pack(builds.stack(lock), lock=lock, unpacked=unpacked, contents={f"stacks/{stack}": "07"})


def pack_changes(builds: Builds, stack: str, former: str, contents: str = "07") -> Built:
    """Write what a packed stack has that a former one lacks."""
    path, listed = builds.changed(changed("id", to=stack)), {f"stacks/{stack}": contents}
    return pack(path, "little", unpacked=100 << 20, contents=listed, former=former)


def run_module(name: str, arguments: dict[str, Any], *, check_mode: bool = False, **environ: str) -> dict[str, Any]:
    """Run a module as a node does, and return its answer. Forks, as starting Ansible takes half a second."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as complained:
        given.write(json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check_mode}}).encode())
        given.seek(0)
        child = os.fork()
        if not child:
            _become_module(PLUGINS / "modules" / f"{name}.py", (given, told, complained), environ)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (told, complained):
            file.seek(0)
        said, errors = told.read().decode(), complained.read().decode()
    assert "Traceback" not in errors, errors
    answer: dict[str, Any] = json.loads(said)
    assert code == int(answer.get("failed", False))
    return answer


def _become_module(path: Path, files: Sequence[IO[bytes]], environ: Mapping[str, str]) -> NoReturn:
    """Run a module in this process, which has these files for its input, output and errors, and end it."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        for loaded in [name for name in sys.modules if name.split(".")[0] in ("ansible", "ansible_collections")]:
            del sys.modules[loaded]
        sys.modules.update(ANSIBLE_ON_A_NODE)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("ansible.")]
        own = [hook for hook in sys.path_hooks if getattr(hook, "__module__", "").startswith("ansible.")]
        sys.path_hooks[:] = [hook for hook in sys.path_hooks if hook not in own]
        sys.argv = [str(path)]
        os.environ.update(environ)
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_action(name: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a task with Ansible on this machine and the collections of a folder, and return its answer."""
    (folder / "ansible.cfg").touch()
    command = [
        str(Path(sys.executable).with_name("ansible")),
        "localhost",
        "-c",
        "local",
        "-m",
        f"farandole.cluster.{name}",
    ]
    done = subprocess.run(
        [*command, "-a", json.dumps(arguments)],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.split(" => ", 1)[1])
    return answer


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Truncates(Quiet):
    """Closes the connection halfway through a file."""

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])


# The same password, quoted for a URL and as the user knows it.
QUOTED, SECRET = "s%40cr%2Fet%3A1", "s@cr/et:1"


class Guarded(Quiet):
    """Requires a password."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode():
            super().do_GET()
        else:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
            self.end_headers()


def answering(*sent: bytes | float, **headers: str) -> type[Quiet]:
    """A server that sends these bytes, and waits so many seconds, in this order; with headers, first those."""

    class Answers(Quiet):
        def do_GET(self) -> None:
            if headers:
                self.send_response(200)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
            with suppress(ConnectionError):
                for part in sent:
                    if isinstance(part, bytes):
                        self.wfile.write(part)
                    else:
                        time.sleep(part)

    return Answers


BINARY = {"Content_Type": "application/octet-stream"}
NotHttp = answering(b"220 mail.example.org ready\r\n")
Login = answering(b"<html><body>Please log in</body></html>", Content_Type="text/html")
Silent = answering(2.0)
Stalls = answering(b"a", 2.0, **BINARY)
# Bounded, so that no test fills a disk.
Endless = answering(*[bytes(1 << 20)] * 256, **BINARY)
# So that no read times out.
Trickles = answering(*(b"a", 0.05) * 40, Content_Length="1000000")


class Forbids(Quiet):
    """A proxy that lets nobody through."""

    def do_GET(self) -> None:
        self.send_error(403, "Not with me")


class Server(ThreadingHTTPServer):
    """Lets a client that opens many connections at once, such as uv, not wait a second for each that finds no place."""

    request_queue_size = 128


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler] = Quiet) -> Iterator[str]:
    """Serve the files of a folder; yields the URL."""
    with Server(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def interrupt(folder: Path, file: str, code: str, *arguments: str) -> None:
    """Press Ctrl-C while a program, which gets the URL of a folder before its arguments, fetches a file from it."""
    asked = threading.Event()

    class Slow(Quiet):
        def do_GET(self) -> None:
            if self.path.endswith(file):
                asked.set()
                time.sleep(5)
            super().do_GET()

    # A shell ignores SIGINT for what it starts in the background.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {code}"
    command = [sys.executable, "-c", code]
    with (
        served(folder, Slow) as url,
        subprocess.Popen([*command, url, *arguments], stderr=subprocess.DEVNULL) as running,
    ):
        assert asked.wait(30)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) != 0


def dead_url() -> str:
    """A URL where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Everything below a folder except its lock, with inodes, which change if a file is rewritten."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    paths = [path for path in paths if path != folder / ".lock"]
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_ino,
            str(path.readlink()) if path.is_symlink() else path.read_bytes().decode(errors="replace"),
        )
        for path in paths
    }
