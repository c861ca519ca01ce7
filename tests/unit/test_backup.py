"""A backup's file on real disks: what is refused, what is put back, and what is never forgotten."""

import errno
import fcntl
import gzip
import json
import os
import shlex
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from farandole.backup import file as files
from farandole.backup import head, state
from farandole.cli.app import app
from farandole.core.errors import FarandoleError
from farandole.core.files import sha256
from farandole.inventory import run_lock
from farandole.plays import streaming
from farandole.plays.streaming import SKIP, SilentError, transfer
from farandole.queue import key

from .authority import A, B
from .loading import act

ABOUT = files.About("mine", "2026-11-27T16:00:00Z", ["ssh-ed25519 one"])
PASSWORD = "correct horse"  # noqa: S105


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder, and beside it what a head had."""
    for name, text in {
        "ca/user_ca": "secret", "ca/signed_keys": f"{A} node-1 host\n", "ca/revoked_keys": "", "ca/.draft": "",
        "ca/authorities": "ssh-ed25519 one\n", "reports/2026-01/result.json": "{}", "excluded.yml": "", "run": "{}",
        "inventory": "/elsewhere\n", "builds/stack.tar.zst": "large", "slurm/munge.key": "known", "slurm/h.json": "{}",
    }.items():  # fmt: skip
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "mine/reports/latest").symlink_to("2026-01")
    staged = tmp_path / "staged"
    state.save(tmp_path / "mine", staged)
    (staged / "head").mkdir()
    (staged / "head/accounting.gz").write_bytes(os.urandom(3 << 20))
    return staged


def test_a_folder_of_another_command_may_disappear_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "mine/ca").mkdir(parents=True)
    (tmp_path / "mine/ca/user_ca").touch()
    ended = threading.Event()

    def others() -> None:
        while not ended.is_set():
            for number in range(50):
                (tmp_path / f"mine/.other-{number}").mkdir()
            for number in range(50):
                (tmp_path / f"mine/.other-{number}").rmdir()

    with ThreadPoolExecutor() as pool:
        other = pool.submit(others)
        try:
            for number in range(100):
                state.save(tmp_path / "mine", tmp_path / str(number))
        finally:
            ended.set()
        other.result()
    assert (tmp_path / "99/state/ca/user_ca").exists()


@pytest.fixture(params=["", PASSWORD], ids=["plain", "encrypted"])
def backup(request: pytest.FixtureRequest, tmp_path: Path, folder: Path) -> tuple[Path, str]:
    """A backup, and its password."""
    files.pack(tmp_path / "file", tmp_path, folder, ABOUT, request.param)
    return tmp_path / "file", request.param


def found(place: Path) -> dict[str, str]:
    paths = (path for path in place.rglob("*") if path.is_symlink() or path.is_file())
    return {str(path.relative_to(place)): files.content(path) for path in paths}


def unpacked(tmp_path: Path, file: Path, password: str = "") -> Path:
    target = tmp_path / "unpacked"
    target.mkdir()
    files.unpack(file, target, password)
    return target


def refused(tmp_path: Path, file: Path, password: str = "") -> str:
    with pytest.raises(FarandoleError) as refusal:
        unpacked(tmp_path, file, password)
    (tmp_path / "unpacked").rename(tmp_path / f"refused-{len([*tmp_path.iterdir()])}")
    return str(refusal.value)


def test_what_was_saved_comes_back(tmp_path: Path, folder: Path, backup: tuple[Path, str]) -> None:
    file, password = backup
    assert file.stat().st_mode & 0o777 == 0o600
    assert files.is_encrypted(file) is bool(password)
    assert (b"secret" in file.read_bytes()) is not bool(password)
    there = found(unpacked(tmp_path, file, password))
    assert there == found(folder)
    # Neither what is this machine's own, nor drafts, what can be compiled again, or a key that a revoked node may know.
    assert {name for name in there if name.startswith("state")} == {
        "state/ca/user_ca", "state/ca/signed_keys", "state/ca/revoked_keys", "state/ca/authorities",
        "state/reports/2026-01/result.json", "state/reports/latest", "state/excluded.yml", "state/slurm/h.json",
    }  # fmt: skip
    if not password:
        assert tarfile.open(file).getnames()[0] == "manifest.json"  # noqa: SIM115


@pytest.mark.parametrize("left", [0, 1, 700, 2048, 20_000, 1 << 20, 3 << 20])
def test_a_backup_that_is_cut_short_is_refused(tmp_path: Path, backup: tuple[Path, str], left: int) -> None:
    file, password = backup
    os.truncate(file, left)
    assert "nothing was restored" in refused(tmp_path, file, password)


@pytest.mark.parametrize("at", [700, 1 << 20])
def test_a_changed_byte_is_refused(tmp_path: Path, backup: tuple[Path, str], at: int) -> None:
    file, password = backup
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert "is cut short or damaged" in refused(tmp_path, file, password)


def test_a_wrong_password_is_told_from_a_damaged_file(tmp_path: Path, folder: Path) -> None:
    files.pack(tmp_path / "file", tmp_path, folder, ABOUT, PASSWORD)
    assert "cannot be decrypted with this password" in refused(tmp_path, tmp_path / "file", "wrong")


def test_a_file_that_has_come_meanwhile_is_not_replaced(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("another backup")
    with pytest.raises(FarandoleError, match="exists already"):
        files.pack(tmp_path / "file", tmp_path, folder, ABOUT, "")
    assert (tmp_path / "file").read_text() == "another backup"


def forged(path: Path, *members: tuple[str, bytes], **changes: Any) -> Path:
    """A backup with a manifest that somebody has written."""
    manifest = {"format": 1, "version": "1.0.0", "state_format": 1, **vars(ABOUT), "files": {}, **changes}
    with tarfile.open(path, "w") as tar:
        for name, content in [("manifest.json", json.dumps(manifest).encode()), *members]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    return path


EMPTY = sha256(Path(os.devnull))


@pytest.mark.parametrize(
    ("members", "changes", "why"),
    [
        ([], {"format": 2, "version": "2.0.0"}, "was written by farandole 2.0.0, a newer version"),
        ([], {"state_format": 2, "more": 1}, "was written by farandole 1.0.0, a newer version"),
        ([], {"files": {"state/a": EMPTY}}, "state/a is missing"),
        ([("state/a", b"")], {}, "state/a is not as it was saved"),
        ([("state/a", b"x")], {"files": {"state/a": EMPTY}}, "state/a is not as it was saved"),
        ([("../a", b"")], {"files": {"../a": EMPTY}}, "manifest.json .files is '../a'"),
        ([("state/../../a", b"")], {"files": {"state/../../a": EMPTY}}, "manifest.json .files is"),
        ([("state/a", b"")], {"files": {"state/a": "-> ../../a"}}, "manifest.json .files is"),
        ([("state/a", b"")], {"files": {"state/a": "-> b"}}, "state/a is not as it was saved"),
        ([], {"made": "\x1b[2J"}, "manifest.json .made is"),
        ([], {"format": "1"}, "manifest.json is '1'"),
    ],
)
def test_a_backup_of_a_newer_version_or_with_a_wrong_manifest_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes]], changes: dict[str, Any], why: str
) -> None:
    assert why in refused(tmp_path, forged(tmp_path / "file", *members, **changes))
    assert not (tmp_path / "a").exists()


def test_nothing_else_is_taken_for_a_backup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hosts:\n")
    assert "is cut short or damaged" in refused(tmp_path, tmp_path / "file")
    with tarfile.open(tmp_path / "file", "w") as tar:
        tar.add(tmp_path / "file", "state/a")
    assert "does not begin with manifest.json" in refused(tmp_path, tmp_path / "file")


# The state folder


def test_a_state_that_was_lost_is_put_back(tmp_path: Path, folder: Path) -> None:
    for _ in range(2):
        state.place(folder, tmp_path / "new", ABOUT)
        expected = {name.removeprefix("state/"): of for name, of in found(folder).items() if name.startswith("state/")}
        assert {name: of for name, of in found(tmp_path / "new").items() if name != "ca/restored"} == expected
        assert (tmp_path / "new/ca/restored").read_text() == f"{ABOUT.made}\n"
        assert (tmp_path / "new/ca/user_ca").stat().st_mode & 0o777 == 0o600


def test_a_newer_state_is_replaced_only_if_asked_and_what_is_revoked_stays(tmp_path: Path, folder: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "ca/revoked_keys").write_text(f"{B} node-2\n")
    (mine / "ca/user_ca").write_text("later")
    for name in ("excluded.yml", "excluded.log"):
        (mine / name).write_text("node-3: {}\n")
        (folder / "state" / name).write_text("node-4: {}\n")
    with pytest.raises(FarandoleError, match=r"is newer than .*: ca/revoked_keys \(1 more\); nothing was restored"):
        state.refuse_newer(tmp_path / "file", ABOUT, folder, mine, replace=False)
    state.refuse_newer(tmp_path / "file", ABOUT, folder, mine, replace=True)
    state.place(folder, mine, ABOUT)
    state.refuse_newer(tmp_path / "file", ABOUT, folder, tmp_path / "none", replace=False)
    texts = [(mine / name).read_text() for name in ("ca/revoked_keys", "ca/user_ca", "excluded.yml", "excluded.log")]
    assert texts == [f"{B} node-2\n", "secret", *["node-3: {}\n"] * 2]


def test_a_restored_state_knows_no_key_of_the_queue_and_refuses_revoked_hosts(tmp_path: Path, folder: Path) -> None:
    mine = tmp_path / "mine"
    (folder / "state/ca/known_hosts").write_text("@cert-authority * ca\n")
    (mine / "ca/revoked_keys").write_text(f"{B} node-2\n")
    # Whatever a backup says of an earlier restore.
    (folder / "state/ca/restored").write_text("")
    state.refuse_planted(tmp_path / "file", folder)
    state.place(folder, mine, ABOUT)
    assert (mine / "ca/restored").read_text() == f"{ABOUT.made}\n"
    assert (mine / "ca/known_hosts").read_text() == f"@cert-authority * ca\n@revoked * {B}\n"
    # A new one is for all nodes at once.
    assert {path.name for path in (mine / "slurm").iterdir()} == {"h.json", key.FORMER}


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("slurm/munge.key", ""),
        ("builds/stacks/x.tar.zst", ""),
        ("inventory", ""),
        ("ca/restored", "gone"),
        ("ca/revoked_keys", "none"),
        ("ca/issued", "user_ca"),
    ],
)
def test_what_no_backup_has_is_refused(tmp_path: Path, folder: Path, inventory: Path, name: str, link: str) -> None:
    path = folder / "state" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if link:
        path.symlink_to(link)
    else:
        path.write_text("evil")
    files.pack(tmp_path / "file", tmp_path, folder, ABOUT, "")
    before = found(tmp_path / "mine")
    code, told = farandole("restore", tmp_path / "file", "-i", inventory, "--replace")
    assert (code, f"has {name}, which farandole backup does not write" in told) == (1, True), told
    assert found(tmp_path / "mine") == before


def test_what_is_elsewhere_is_not_silently_left_out(tmp_path: Path, inventory: Path) -> None:
    (tmp_path / "mine/ca").rename(tmp_path / "stick")
    (tmp_path / "mine/ca").symlink_to(tmp_path / "stick")
    command = ("backup", tmp_path / "new", "-i", inventory, "--state-only")
    assert f"mine/ca is a link to {tmp_path}/stick, and what is elsewhere is not saved" in farandole(*command)[1]
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_read_is_not_silently_left_out(
    tmp_path: Path, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Any) -> Any:
        """As for who is not root, after a run with sudo."""
        if str(path).endswith("/ca"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", closed)
    said = farandole("backup", tmp_path / "new", "-i", inventory, "--state-only")[1]
    assert f"{tmp_path}/mine/ca cannot be read (Permission denied); nothing was backed up" in said
    assert not (tmp_path / "new").exists()


def test_a_password_is_not_asked_for_in_vain(tmp_path: Path, folder: Path, inventory: Path) -> None:
    files.pack(tmp_path / "file", tmp_path, folder, ABOUT, "")
    (tmp_path / "password").write_text(PASSWORD)
    again = ("restore", tmp_path / "file", "-i", inventory)
    code, told = farandole(*again, "--password-file", tmp_path / "password")
    assert (code, "is not encrypted, so anybody may have put it there" in told) == (1, True)
    assert "is not encrypted: whoever could change it decides what is restored" in farandole(*again)[1]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("replace", [False, True])
def test_the_backup_of_another_cluster_is_refused(tmp_path: Path, replace: bool) -> None:
    other = files.About("mine", ABOUT.made, ["ssh-ed25519 two"])
    with pytest.raises(FarandoleError, match="is the backup of another cluster"):
        state.refuse_other(tmp_path / "file", other, tmp_path / "mine", replace=replace)
    state.refuse_other(tmp_path / "file", ABOUT, tmp_path / "mine", replace=replace)
    # Without a CA here, only the name can tell.
    state.refuse_other(tmp_path / "file", ABOUT, tmp_path / "none/mine", replace=replace)
    if replace:
        state.refuse_other(tmp_path / "file", ABOUT, tmp_path / "none/yours", replace=True)
    else:
        with pytest.raises(FarandoleError, match="a cluster called mine, and this one is yours"):
            state.refuse_other(tmp_path / "file", ABOUT, tmp_path / "none/yours", replace=False)


# The commands


@pytest.fixture
def inventory(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The inventory of that state folder."""
    assert folder
    monkeypatch.setenv("FARANDOLE_STATE", str(tmp_path))
    (tmp_path / "inventory/mine").mkdir(parents=True)
    hosts = tmp_path / "inventory/mine/hosts.yml"
    hosts.write_text("cluster: {hosts: {node-1: {ansible_host: 192.0.2.1}}}\nhead: {hosts: {node-1: }}\n")
    (tmp_path / "mine/inventory").write_text(f"{hosts.parent}\n")
    return hosts.parent


def farandole(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output + str(done.exception or "")


def test_a_state_is_saved_and_taken_over(tmp_path: Path, inventory: Path) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    # What a killed command has left.
    (tmp_path / "mine/.farandole-backup-old/state").mkdir(parents=True)
    command = (
        "backup",
        tmp_path / "out.far",
        "-i",
        inventory,
        "--state-only",
        "--password-file",
        tmp_path / "password",
    )
    assert farandole(*command)[0] == 0
    assert "exists already" in farandole(*command)[1]
    (tmp_path / "mine").rename(tmp_path / "lost")
    again = ("restore", tmp_path / "out.far", "-i", inventory)
    assert "there is no terminal to ask for the password" in farandole(*again)[1]
    code, told = farandole(*again, "--password-file", tmp_path / "password")
    assert (code, "Next, which asks all nodes what was revoked since" in told) == (0, True)
    assert (tmp_path / "mine/ca/user_ca").read_text() == "secret"
    assert (tmp_path / "mine/inventory").read_text() == f"{inventory}\n"
    assert [*tmp_path.rglob(".farandole-backup-*")] == []


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_while_another_operator_changes_the_cluster_nothing_is_done(
    tmp_path: Path, inventory: Path, command: str
) -> None:
    files.pack(tmp_path / "file", tmp_path, tmp_path / "staged", ABOUT, "")
    (tmp_path / "mine/ca/user_ca").write_text("later")
    options = ("--state-only",) if command == "backup" else ()
    with subprocess.Popen(["sleep", "100"]) as other:
        run_lock.take(tmp_path / "mine", run_lock.this_run(other.pid))
        code, told = farandole(command, tmp_path / ("new" if options else "file"), "-i", inventory, *options)
        other.kill()
    assert (code, "this cluster is being changed by" in told) == (1, True)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "mine/ca/user_ca").read_text() == "later"


@pytest.mark.parametrize(("call", "place"), [("os.fsync", "to/file"), ("shutil.copyfile", "mine")])
def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, inventory: Path, monkeypatch: pytest.MonkeyPatch, call: str, place: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(call, full)
    (tmp_path / "to").mkdir()
    code, told = farandole("backup", tmp_path / "to/file", "-i", inventory, "--state-only")
    assert f"{tmp_path}/{place} cannot be written on this machine: No space left on device; free some space" in told
    assert code == 1
    assert [*(tmp_path / "to").iterdir()] == []


def test_gpg_says_that_a_disk_is_full() -> None:
    with (
        Path("/dev/full").open("wb") as full,
        pytest.raises(OSError, match="No space left on device"),
        files._encrypting(full, PASSWORD) as output,
    ):
        output.write(bytes(1 << 20))


def test_what_is_not_encrypted_is_only_in_the_state_folder(
    tmp_path: Path, inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, places, sync = list[bytes](), set[Path](), os.fsync

    def look(handle: int) -> None:
        beside.extend(path.read_bytes() for path in (tmp_path / "to").rglob("*") if path.is_file())
        places.update(path.parents[1] for path in tmp_path.rglob(".farandole-backup-*/state"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", look)
    (tmp_path / "password").write_text(PASSWORD)
    secret = ("--password-file", tmp_path / "password")
    assert farandole("backup", tmp_path / "to/file", "-i", inventory, "--state-only", *secret)[0] == 0
    # The draft, and the file.
    assert [content == (tmp_path / "to/file").read_bytes() for content in beside] == [True, True]
    assert places == {tmp_path / "mine"}


def test_there_is_nothing_to_back_up_before_the_first_run(tmp_path: Path, inventory: Path) -> None:
    (tmp_path / "mine/ca").rename(tmp_path / "ca")
    assert "there is nothing to back up in" in farandole("backup", tmp_path / "new", "-i", inventory)[1]


# What the head has


@pytest.mark.parametrize("asks", [True, False], ids=["sudo asks", "sudo does not ask"])
def test_a_password_reaches_no_script(tmp_path: Path, asks: bool) -> None:
    """A sudo that does not ask leaves it in the script's input."""
    (tmp_path / "source").write_bytes(os.urandom(1 << 20))
    sudo = "read -r password; " * asks + f"exec bash -c {shlex.quote(SKIP + 'sha256sum')}"
    begin = b"secret\nfarandole-begin\n"
    expected = f"{sha256(tmp_path / 'source')}  -\n"
    assert transfer(["bash", "-c", sudo], begin, tmp_path / "source", None) == (0, expected, "")
    assert transfer(["bash", "-c", sudo], begin, None, tmp_path / "target") == (0, "", "")
    assert (tmp_path / "target").read_text() == f"{EMPTY}  -\n"


def test_a_script_that_fails_early_says_why(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(os.urandom(1 << 20))
    command = ["bash", "-c", "echo no >&2; exit 3"]
    assert transfer(command, b"begin\n", tmp_path / "source", None) == (3, "", "no\n")


def test_a_home_that_never_answers_does_not_stop_a_backup_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.3)
    with pytest.raises(SilentError):
        transfer(["sh", "-c", "echo begins; exec sleep 60"], b"begin\n", None, tmp_path / "target")
    assert (tmp_path / "target").read_text() == "begins\n"


def test_only_root_can_keep_the_lock_of_a_backup(tmp_path: Path) -> None:
    script = head.ALONE.replace("/run/farandole", str(tmp_path)).replace("--timeout 60", "--timeout 0.1")
    subprocess.run(["bash", "-euc", script], check=True)
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o600
    with (tmp_path / "backup").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run(["bash", "-euc", script], text=True, capture_output=True, check=False)
    assert done.returncode == 1 and "another backup or restore is at work" in done.stderr


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A head that is this machine."""
    # Otherwise it would write below /run.
    monkeypatch.setattr(head, "ALONE", "")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift $(($# - 1)); exec sh -c "$1"\n')
    ssh.chmod(0o755)
    return SimpleNamespace(
        transport="ssh", become=None, host="node-1",
        get_option=lambda _: str(ssh), _build_command=lambda *words: [words[0], *words[2:]],
    )  # fmt: skip


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("homes", [False, True])
def test_a_person_without_an_account_hinders_no_backup(
    tmp_path: Path, connection: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, homes: bool
) -> None:
    kind = "homes" if homes else "runs"
    # Root, who is the job user here, has a home that is this machine's.
    monkeypatch.setitem(head._SAVE, kind, head._ACCOUNT)
    wanted = {"folder": str(tmp_path / "new"), "state_dir": str(tmp_path / "mine"), "queue": False, "homes": homes}
    done = act("backup", {**wanted, "accounts": ["root", "no-such-account"]}, connection=connection)
    assert done["msg"] == f"the {kind} of no-such-account: nothing to save, as there is no account yet"
    assert [*(tmp_path / "new/head" / kind).iterdir()] == []


def test_without_the_account_of_the_job_user_nothing_is_saved(tmp_path: Path, connection: SimpleNamespace) -> None:
    wanted = {"folder": str(tmp_path / "new"), "state_dir": str(tmp_path / "mine"), "queue": False, "homes": False}
    why = act("backup", {**wanted, "accounts": ["no-such-account"]}, connection=connection)["msg"]
    assert why.endswith("the head does not have no-such-account yet; nothing was changed. First run farandole apply")


def test_without_the_accounts_of_its_people_nothing_is_restored(folder: Path, connection: SimpleNamespace) -> None:
    for name in ("root", "new-1", "new-2", "gone"):
        (folder / "head/runs").mkdir(exist_ok=True)
        (folder / f"head/runs/{name}.gz").touch()
    wanted = {"folder": str(folder), "queue": True, "accounts": ["root", "new-1", "new-2"], "replace": False}
    why = act("restore", wanted, connection=connection)["msg"]
    assert why == "the accounts: the head does not have new-1 new-2 yet; nothing was changed. First run farandole apply"


def test_a_home_is_restored_as_a_whole_and_what_is_there_stays(tmp_path: Path) -> None:
    saved, home = tmp_path / "saved", tmp_path / "home"
    for path, text in {"a/one": "1" * 200_000, "a/b/two": "2", "mine": "saved"}.items():
        (saved / path).parent.mkdir(parents=True, exist_ok=True)
        (saved / path).write_text(text)
    (saved / "link").symlink_to("a/one")
    (saved / "a/b").chmod(0o750)
    home.mkdir()
    (home / "mine").write_text("newer")
    pack = ["tar", "--create", "--gzip", "--directory", str(saved), "."]
    content = subprocess.run(pack, check=True, capture_output=True).stdout

    def restored(content: bytes) -> int:
        script = f"set -- root; home={home}; {head._LOAD_HOME}"
        return subprocess.run(["bash", "-euc", script], input=content, capture_output=True, check=False).returncode

    # What is cut off leaves nothing, and the whole is complete.
    assert restored(content[:-100]) and [path.name for path in home.iterdir()] == ["mine"]
    for _ in range(2):
        assert restored(content) == 0
        assert found(home) == {**found(saved), "mine": files.content(home / "mine")}
        assert (home / "mine").read_text() == "newer"
        assert (home / "a/b").stat().st_mode & 0o777 == 0o750


def test_many_waiting_jobs_stay_a_comment(tmp_path: Path) -> None:
    tools = {"squeue": "seq --format=%.0f@2026-11-30T12:00:00 100001 106000", "slurmctld": "echo slurm 22.05.8"}
    for name, does in {**tools, "mariadb-dump": "echo SELECT 1", "sed": "echo x"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    save = head.wanted([], queue=True, homes=False)[0].save
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", save], env=environment, capture_output=True, check=False)
    comment, *rest = gzip.decompress(done.stdout).decode().splitlines()
    assert rest == ["SELECT 1"] and len(comment.split()) == 6002, done.stderr


def test_every_part_that_is_saved_can_be_restored(tmp_path: Path) -> None:
    for homes in (False, True):
        parts = head.wanted(["trainer", "a.b"], queue=True, homes=homes)
        for part in parts:
            (tmp_path / str(homes) / part.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(homes) / part.file).touch()
            for script in (part.save, part.load):
                subprocess.run(["bash", "-n", "-c", script], check=True)
        assert {*head.saved(tmp_path / str(homes))} == {*parts}
    # The accounting comes first, as the queue depends on it, and is stopped until the queue is there.
    kinds = [part.kind for part in head.saved(tmp_path / "True")]
    assert kinds == ["accounting", "queue", "homes", "homes"]
    assert [part.kind for part in head.wanted(["trainer"], queue=False, homes=False)] == ["runs"]
