"""The file of a backup: a tar whose first member names all others with their sha256, encrypted if asked."""

import errno
import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from farandole.core.errors import FarandoleError
from farandole.core.files import sha256, sync_folder
from farandole.core.project import version
from farandole.core.schema import UnfitError, fields, load, many, text, whole, words
from farandole.core.text import one_line
from farandole.inventory import state

FORMAT = 1
MANIFEST = "manifest.json"
LONGEST = 64 << 20
# Every file of a backup has a name like this, so none lands elsewhere.
NAME = words(r"(?:state|head)(?:/(?!\.)[^/\x00-\x1f]+)+")
# The sha256 of a file, or the name beside it to which a link leads.
CONTENT = words(r"[0-9a-f]{64}|-> (?!\.)[^/\x00-\x1f]+")
# How a message begins that gpg has encrypted with a password.
ENCRYPTED = b"\x8c"


def _files(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UnfitError("has no list of files")
    return {NAME(name): CONTENT(content) for name, content in value.items()}


CHECK = fields(
    {
        "format": whole(1 << 16, 1), "version": text(40), "state_format": whole(1 << 16), "cluster": text(100),
        "made": words(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "authorities": many(text(200)),
        "files": _files,
    }
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """Of which cluster a backup is, and when it was made."""

    cluster: str
    made: str
    # The public keys of every CA that the cluster has had, by which it is recognized.
    authorities: list[str]


def refuse_existing(target: Path) -> None:
    """Refuse to replace a file."""
    if os.path.lexists(target):
        raise FarandoleError(f"{target} exists already; choose another name, or remove it")


def pack(target: Path, beside: Path, folder: Path, about: About, password: str) -> None:
    """Write the files of a private folder as a backup, readable by its owner only, as a whole or not at all.

    Until then it is in another one, beside the target.
    """
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    names = sorted(str(path.relative_to(folder)) for path in paths)
    manifest = {
        "format": FORMAT, "version": version(), "state_format": state.FORMAT, **asdict(about),
        "files": {NAME(name): CONTENT(content(folder / name)) for name in names},
    }  # fmt: skip
    first = json.dumps(manifest, indent=1).encode()
    handle, draft = tempfile.mkstemp(dir=beside)
    with os.fdopen(handle, "wb") as file:
        with _encrypting(file, password) as output, tarfile.open(fileobj=output, mode="w|") as tar:
            head = tarfile.TarInfo(MANIFEST)
            head.size, head.mode = len(first), 0o600
            tar.addfile(head, BytesIO(first))
            for name in names:
                tar.add(folder / name, name)
        os.fsync(file.fileno())
    # It may have come meanwhile: what a head has takes its time.
    refuse_existing(target)
    Path(draft).replace(target)
    sync_folder(target.parent)


def unpack(file: Path, folder: Path, password: str) -> About:
    """Put the files of a backup into an empty private folder; refuse one that is not whole, or of a newer version."""
    try:
        with _opened(file, password) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            about, pending = _manifest(tar, file)
            while member := tar.next():
                expected, target = pending.pop(member.name, ""), folder / member.name
                if expected:
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if expected == f"-> {member.linkname}" and member.issym():
                    target.symlink_to(member.linkname)
                elif not (expected and member.isfile() and _keep(tar, member, target) == expected):
                    raise tarfile.ReadError(f"{one_line(member.name, 60)} is not as it was saved")
            if pending:
                raise tarfile.ReadError(f"{next(iter(pending))} is missing")
    except (tarfile.TarError, EOFError) as error:
        raise FarandoleError(
            f"{file} is cut short or damaged ({one_line(error, 100)}); nothing was restored: use another copy or backup"
        ) from None
    return about


def _manifest(tar: tarfile.TarFile, file: Path) -> tuple[About, dict[str, str]]:
    member = tar.next()
    source = tar.extractfile(member) if member and member.name == MANIFEST and member.size <= LONGEST else None
    if not source:
        raise tarfile.ReadError(f"it does not begin with {MANIFEST}")
    try:
        content = load(source.read().decode(errors="replace"), LONGEST)
        # A later format may have other fields.
        if whole(1 << 16)(content.get("format")) > FORMAT or whole(1 << 16)(content.get("state_format")) > state.FORMAT:
            raise FarandoleError(state.newer(file, str(content.get("version"))))
        known = CHECK(content)
    except UnfitError as error:
        raise tarfile.ReadError(f"{MANIFEST} {error}") from None
    return About(known["cluster"], known["made"], known["authorities"]), known["files"]


def content(path: Path) -> str:
    """What the manifest says of a file or a link."""
    return f"-> {path.readlink()}" if path.is_symlink() else sha256(path)


def _keep(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write a file, and return the sha256 of what was written."""
    source, digest = cast(IO[bytes], tar.extractfile(member)), hashlib.sha256()
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
        while block := source.read(1 << 20):
            digest.update(block)
            output.write(block)
    return digest.hexdigest()


def is_encrypted(file: Path) -> bool:
    """Whether a backup needs a password."""
    with file.open("rb") as stream:
        return stream.read(1) == ENCRYPTED


@contextmanager
def _opened(file: Path, password: str) -> Iterator[IO[bytes]]:
    with file.open("rb") as stream:
        if not is_encrypted(file):
            yield stream
            return
        with _gpg(password, ["--decrypt"], stdin=stream, stdout=subprocess.PIPE) as process:
            yield cast(IO[bytes], process.stdout)


@contextmanager
def _encrypting(file: IO[bytes], password: str) -> Iterator[IO[bytes]]:
    if not password:
        yield file
        return
    options = ["--symmetric", "--cipher-algo", "AES256", "--compress-algo", "none", "--s2k-count", "65011712"]
    with _gpg(password, options, stdin=subprocess.PIPE, stdout=file) as process:
        yield cast(IO[bytes], process.stdin)


@contextmanager
def _gpg(password: str, options: list[str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run gpg with a password and a home of its own; refuse what it did not finish."""
    reader, writer = os.pipe()
    os.write(writer, password.encode() + b"\n")
    os.close(writer)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as errors:
        command = ["gpg", "--homedir", home, "--batch", "--quiet", "--no-symkey-cache", "--pinentry-mode", "loopback"]
        command += ["--passphrase-fd", str(reader), *options]
        try:
            environment = {**os.environ, "LC_ALL": "C"}
            process = subprocess.Popen(command, stderr=errors, pass_fds=[reader], env=environment, **streams)
        except FileNotFoundError:
            raise FarandoleError("this machine has no gpg: apt-get install gpg gpg-agent") from None
        finally:
            os.close(reader)
        try:
            yield process
        except (BrokenPipeError, tarfile.TarError):
            if not _failed(process):
                raise
        except BaseException:
            process.kill()
            raise
        finally:
            failed = _failed(process)
            subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], capture_output=True, check=False)
        if failed:
            errors.seek(0)
            raise _why(errors.read().decode(errors="replace"), reading=process.stdin is None)


def _failed(process: subprocess.Popen[bytes]) -> bool:
    """Let gpg come to its end; whether it failed. It says only there whether all is as it was encrypted."""
    with suppress(OSError, ValueError):
        if process.stdin:
            process.stdin.close()
        while process.stdout and process.stdout.read(1 << 20):
            pass
    return process.wait() != 0


def _why(said: str, *, reading: bool) -> Exception:
    last = one_line((said.splitlines() or ["it was killed"])[-1].removeprefix("gpg: "), 100)
    if "Bad session key" in said:
        return FarandoleError("the backup cannot be decrypted with this password; nothing was restored")
    if os.strerror(errno.ENOSPC) in said and not reading:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return tarfile.ReadError(f"gpg: {last}") if reading else FarandoleError(f"gpg failed on this machine: {last}")


def lines(path: Path) -> Mapping[str, None]:
    """The lines of a file in order, none if it does not exist."""
    return dict.fromkeys(path.read_text().splitlines() if path.exists() else [])
