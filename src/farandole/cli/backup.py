"""`farandole backup` and `farandole restore`."""

import errno
import fcntl
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from farandole.cli.options import WITHOUT_VAULT, Inventory, with_login
from farandole.core.errors import FarandoleError
from farandole.core.text import visible
from farandole.inventory.facts import of_inventory
from farandole.inventory.run_lock import take, this_run
from farandole.inventory.state import claim
from farandole.inventory.variables import folder_of
from farandole.plays.playbook import Login, play

# The folders for what is not complete; what is not encrypted is only in the state folder or beside it.
STAGED = ".farandole-backup-"
PasswordFile = Annotated[
    Path | None,
    typer.Option(metavar="PATH", exists=True, dir_okay=False, help="Take the password of the backup from this file."),
]


@with_login(*WITHOUT_VAULT)
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")],
    inventory: Inventory,
    *,
    homes: Annotated[bool, typer.Option("--homes", help="Also the homes of those who start jobs.")] = False,
    state_only: Annotated[
        bool, typer.Option("--state-only", help="Only what is on this machine: no node is contacted.")
    ] = False,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt it with a password, which is asked for.")] = False,
    password_file: PasswordFile = None,
    login: Login,
) -> None:
    """Save a cluster's state folder, and what only its head has: accounting, queue, runs, homes if wished."""
    # Slow to import.
    from farandole.backup.file import pack, refuse_existing
    from farandole.backup.state import describe, refuse_empty, save

    state, target = of_inventory(inventory).state, file.absolute()
    claim(state, folder_of(inventory), write=False)
    refuse_empty(state)
    refuse_existing(target)
    password = password_of(password_file, confirm=True) if encrypt or password_file else ""
    with space(target), private_folder(target.parent) as beside, space(state), private_folder(state) as folder:
        if state_only:
            take(state, this_run(os.getpid()))
            save(state, folder)
        else:
            choice = json.dumps({"backup_folder": str(folder), "backup_homes": homes})
            if play("playbooks/backup.yml", inventory, login, "--extra-vars", choice):
                raise typer.Exit(1)
        with space(target):
            pack(target, beside, folder, describe(state.name, folder), password)
    how = "encrypted" if password else "not encrypted: whoever can read it can be root on every node"
    typer.echo(f"{file}: {target.stat().st_size / 1e6:.1f} MB, {how}")


@with_login(*WITHOUT_VAULT)
def restore(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="What farandole backup has written.")
    ],
    inventory: Inventory,
    *,
    head: Annotated[
        bool, typer.Option("--head", help="What only the head had, onto the present one, which site.yml has set up.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Even if what is there is newer; what is revoked stays revoked.")
    ] = False,
    password_file: PasswordFile = None,
    login: Login,
) -> None:
    """Put back a cluster's state folder, or with --head what only its head had."""
    from farandole.backup.file import is_encrypted, unpack
    from farandole.backup.state import place, refuse_newer, refuse_other, refuse_planted

    state, again = of_inventory(inventory).state, f"-i {shlex.quote(str(inventory))}"
    claim(state, folder_of(inventory), write=False)
    with space(state), private_folder(state.parent) as folder:
        encrypted = is_encrypted(file)
        if password_file and not encrypted:
            raise FarandoleError(
                f"{file} is not encrypted, so anybody may have put it there; nothing was restored. If it is yours: "
                "without --password-file"
            )
        about = unpack(file, folder, password_of(password_file) if encrypted else "")
        if not encrypted:
            typer.echo(f"{file} is not encrypted: whoever could change it decides what is restored", err=True)
        refuse_planted(file, folder)
        refuse_other(file, about, state, replace=replace)
        if head:
            choice = json.dumps({"restore_folder": str(folder), "restore_replace": replace})
            if play("playbooks/restore.yml", inventory, login, "--extra-vars", choice):
                raise typer.Exit(1)
            typer.echo(f"next, for people who were added or removed since {about.made}: farandole apply {again}")
            return
        claim(state, folder_of(inventory))
        take(state, this_run(os.getpid()))
        refuse_newer(file, about, folder, state, replace=replace)
        place(folder, state, about)
    typer.echo(
        f"{state} is as it was on {about.made} (cluster {visible(about.cluster)}). Next, which asks all nodes what was "
        f"revoked since, and makes a new CA: farandole apply {again}"
    )


def password_of(path: Path | None, *, confirm: bool = False) -> str:
    """The first line of a file, or what a person types."""
    if path:
        password = (path.read_text().splitlines() or [""])[0]
    elif sys.stdin.isatty():
        password = str(typer.prompt("Password of the backup", hide_input=True, confirmation_prompt=confirm))
    else:
        raise FarandoleError("there is no terminal to ask for the password of the backup: --password-file")
    if not password:
        raise FarandoleError(f"the first line of {path} is empty; it has to be the password of the backup")
    return password


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """A folder that its owner alone can enter, on the disk of another; those of killed commands are removed."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{STAGED}*"):
        with suppress(OSError), locked(old):
            # Between its creation and its lock, it is empty.
            if any(old.iterdir()):
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=parent, prefix=STAGED) as folder, locked(Path(folder)):
        yield Path(folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, unless another command has."""
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def space(place: Path) -> Iterator[None]:
    """Say what cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "correct that"
        # Of a copy, the second one is written.
        where = error.filename2 or error.filename or place
        raise FarandoleError(
            f"{where} cannot be written on this machine: {error.strerror}; {cure}, and run the same command again"
        ) from None
