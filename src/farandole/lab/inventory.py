"""The inventory and ssh settings of a lab: inventory/<lab>/."""

import os
import pwd
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import yaml

from farandole.core.errors import FarandoleError
from farandole.core.project import INSTALLED, ROOT
from farandole.inventory.state import beside, owner
from farandole.lab.shell import run
from farandole.stack.cache import lab_builds

_MARK = "# Written by `farandole lab up`; changes are lost.\n"
# The files that `write` and the playbooks create; the marked one is removed last.
_OURS = (".gitignore", ".ssh", "stack.lock.yml", "hosts.yml")
_CAP_SYS_RESOURCE = 24
Hosts = dict[str, tuple[str, Path]]


def project() -> Path:
    """The folder for inventories and states: the checkout around the working directory, else that of this package.

    An installed package has none; it takes the working directory.
    """
    if INSTALLED:
        return Path.cwd()
    # In /tmp another user could plant a checkout whose ssh settings run that user's programs.
    mine = {0, os.geteuid(), int(os.environ.get("SUDO_UID", 0))}
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "site.yml").is_file() and (folder / "roles").is_dir() and folder.stat().st_uid in mine:
            return folder
    return ROOT


def folder(lab: str) -> Path:
    return project() / "inventory" / lab


def check(lab: str) -> None:
    """Refuse a name that belongs to a user's own inventory, or to a cluster whose state is in this checkout."""
    _refuse_foreign(lab)
    target, state = folder(lab), _state(lab)
    whose = owner(state)
    if _filled(state) and (not _filled(target) or whose not in (None, target.resolve())):
        raise FarandoleError(
            f"{state} is the state of {whose or 'a cluster'}, not of this lab: choose another --name, "
            f"or remove it if that cluster is gone: rm -r {shlex.quote(str(state))}"
        )


def _refuse_foreign(lab: str) -> None:
    target = folder(lab)
    if _filled(target) and not _marked(target):
        raise FarandoleError(f"{target} was not written by the lab: choose another --name")


def _filled(target: Path) -> bool:
    return target.is_dir() and any(target.iterdir())


def _marked(target: Path) -> bool:
    hosts = target / "hosts.yml"
    return hosts.exists() and hosts.read_text().startswith(_MARK)


def write(lab: str, hosts: Hosts, *, limited: bool = True) -> Path:
    """Write the inventory of a running lab, and authorise this checkout's key on its nodes.

    Nodes that share this machine's kernel are limited by what it allows the lab.
    """
    target = folder(lab)
    target.mkdir(parents=True, exist_ok=True)
    if not _marked(target):  # first, so that after an interruption the folder is recognised as the lab's
        (target / "hosts.yml").write_text(_MARK)
    (target / ".gitignore").write_text("*\n")
    ssh = target / ".ssh"
    ssh.mkdir(exist_ok=True)
    key = _key(lab)
    if not key.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"farandole lab {lab}", "-f", str(key))
    for _, root in hosts.values():
        _authorize(root, key.with_suffix(".pub").read_text())
    (ssh / "known_hosts").write_text("".join(_host_keys(name, *where) for name, where in hosts.items()))
    (ssh / "config").write_text(_ssh_config(lab, hosts))
    text = yaml.safe_dump(_inventory(lab, hosts, limited=limited), sort_keys=False, explicit_start=True)
    (target / "hosts.yml").write_text(_MARK + text)
    _give_to_caller(target)
    return target


def remove(lab: str) -> list[str]:
    """Remove a lab's inventory and its state on this machine. Returns what was kept, and why."""
    _refuse_foreign(lab)
    target, state = folder(lab), _state(lab)
    kept, going = [], state.with_name(f".{lab}.removed")
    _discard(going)
    if _filled(target) and owner(state) == target.resolve():
        state.rename(going)
        _discard(going)
    elif _filled(state):
        kept.append(f"{state}, the state of {owner(state) or 'a cluster that it does not name'}")
    if not _filled(target):
        return kept
    others = sorted(path.name for path in target.iterdir() if path.name not in _OURS)
    for name in _OURS[:-1] if others else _OURS:
        _discard(target / name)
    if others:
        (target / "hosts.yml").write_text(_MARK)
        return [*kept, f"{target}, as the lab did not write {', '.join(others)} in it"]
    target.rmdir()
    return kept


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _key(lab: str) -> Path:
    return folder(lab) / ".ssh" / "id_ed25519"


def _state(lab: str) -> Path:
    return beside(folder(lab)) / lab


def _known_hosts(lab: str) -> dict[str, Path]:
    """The host keys read from the nodes' disks, and the CA that signs them once role ssh_trust has run."""
    return {
        "UserKnownHostsFile": folder(lab) / ".ssh" / "known_hosts",
        "GlobalKnownHostsFile": _state(lab) / "ca" / "known_hosts",
    }


def _inventory(lab: str, hosts: Hosts, *, limited: bool) -> dict[str, object]:
    return {
        "cluster": {
            "hosts": {name: {"ansible_host": address} for name, (address, _) in hosts.items()},
            "vars": {
                "ansible_user": "root",
                "ansible_ssh_private_key_file": str(_key(lab)),
                "ansible_ssh_common_args": " ".join(f"-o {key}={path}" for key, path in _known_hosts(lab).items()),
                "stack_builds": str(builds()),
                **(_limits() if limited else {}),
            },
        },
        "head": {"hosts": {"node-1": None}},
    }


def builds() -> Path:
    """All labs are built on this machine, so they share their builds; real clusters do not use them."""
    user = os.environ.get("SUDO_UID")
    return Path(pwd.getpwuid(int(user)).pw_dir) / ".cache/farandole/lab-builds" if user else lab_builds()


def _limits() -> dict[str, object]:
    """This machine's hard limits, where nodes cannot exceed them: without CAP_SYS_RESOURCE, as inside a container."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if capabilities & 1 << _CAP_SYS_RESOURCE:
        return {}
    limits = {"base_nofile": (resource.RLIMIT_NOFILE, 1), "base_memlock": (resource.RLIMIT_MEMLOCK, 1024)}
    hard = {name: (resource.getrlimit(kind)[1], unit) for name, (kind, unit) in limits.items()}
    return {name: str(value // unit) for name, (value, unit) in hard.items() if value != resource.RLIM_INFINITY}


def _ssh_config(lab: str, hosts: Hosts) -> str:
    settings = {
        "User": "root",
        "IdentityFile": _key(lab),
        "IdentitiesOnly": "yes",
        **_known_hosts(lab),
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "LogLevel": "ERROR",
        "ConnectTimeout": 10,
        "ServerAliveInterval": 5,
        "ServerAliveCountMax": 3,
    }
    per_host = "".join(f"Host {name}\n  HostName {address}\n" for name, (address, _) in hosts.items())
    return f"{_MARK}{per_host}Host *\n" + "".join(f"  {key} {value}\n" for key, value in settings.items())


def _host_keys(name: str, address: str, root: Path) -> str:
    """Read the host key from the node's disk, so no key is trusted on first use; only ed25519, the type we sign."""
    with _inside(root, "etc", "ssh") as folder, _open(folder, "ssh_host_ed25519_key.pub", os.O_RDONLY) as file:
        key = file.read(1 << 14)
    return f"{name},{address} {' '.join(key.split()[:2])}\n"


def _authorize(root: Path, key: str) -> None:
    with _inside(root, "root", ".ssh") as folder, _open(folder, "authorized_keys", os.O_RDWR) as file:
        if key not in file.read(1 << 20):
            file.write(key)
            os.fchmod(file.fileno(), 0o600)


@contextmanager
def _inside(root: Path, *folders: str) -> Iterator[int]:
    """Open a folder of a node without following symlinks: the node's root could point one at a file on this machine."""
    with ExitStack() as stack:
        handle = os.open(root, os.O_DIRECTORY)
        stack.callback(os.close, handle)
        try:
            for name in folders:
                handle = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                stack.callback(os.close, handle)
            yield handle
        except OSError as error:
            raise FarandoleError(
                f"/{'/'.join(folders)} of a node is not as the lab made it ({error.strerror}): run lab down, then up"
            ) from None


def _open(folder: int, name: str, flags: int) -> TextIO:
    handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    return os.fdopen(handle, "r+" if flags & os.O_RDWR else "r", errors="replace")


def _give_to_caller(target: Path) -> None:
    """Under sudo, give the files to the calling user."""
    if (user := os.environ.get("SUDO_UID")) and (group := os.environ.get("SUDO_GID")):
        subprocess.run(["chown", "--recursive", f"{user}:{group}", str(target)], check=True)
