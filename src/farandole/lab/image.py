"""What nodes start from: a Debian system as after installation, built once per suite and kind of kernel."""

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from farandole.core.errors import FarandoleError
from farandole.lab import host
from farandole.lab.host import Kernel
from farandole.lab.machine import DISK_GB, DISKS, ROOTS
from farandole.lab.podman import images, podman
from farandole.lab.shell import run


class Suite(StrEnum):
    """The Debian releases available for nodes."""

    bookworm = "bookworm"
    trixie = "trixie"


# As locks call them.
SYSTEMS = {Suite.bookworm: "debian-12", Suite.trixie: "debian-13"}

_REPOSITORY = "localhost/farandole-node"
_PACKAGES = (
    "apt-utils", "ca-certificates", "dbus", "iproute2", "iputils-ping", "libpam-systemd", "openssh-server", "procps",
    "python3", "python3-apt", "systemd-sysv",
)  # fmt: skip
# What Debian's installer adds on a machine with a kernel of its own.
_MORE = {
    Kernel.shared: (),
    Kernel.own: ("ifupdown", "kmod", "nftables", "systemd-timesyncd", "udev"),
    Kernel.stock: ("ifupdown", "initramfs-tools", "kmod", "linux-image-amd64", "nftables", "systemd-timesyncd", "udev"),
}
# Debian's packages let these names lead to the kernel that was installed last, and to the one before.
_BOOT = f"""
search --label root --set root
linux /vmlinuz root={ROOTS[Kernel.stock]} rw console=ttyS0 net.ifnames=0
initrd /initrd.img
boot
"""
_GRUB = ("biosdisk", "boot", "ext2", "linux", "search", "search_label")
_MODULES = Path("/usr/lib/uml/modules")
# Units that only take time here; and those that cannot or must not run in a container: sysctl.service would change the
# real machine's settings.
_NEEDLESS = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "e2scrub_all.timer", "e2scrub_reap.service", "getty.target",
)  # fmt: skip
_OF_MACHINES = (
    "console-getty.service", "dev-hugepages.mount", "proc-sys-fs-binfmt_misc.automount",
    "sys-fs-fuse-connections.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "systemd-binfmt.service",
    "systemd-modules-load.service", "systemd-networkd.service", "systemd-remount-fs.service",
    "systemd-resolved.service", "systemd-sysctl.service", "systemd-udevd.service",
)  # fmt: skip
# The nodes reach their mirror in the same way as this machine.
_APT_SETTINGS = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIP")


def ensure(suite: Suite, packages: Sequence[str] = (), stack: Path | None = None) -> str:
    """Return the name of the image that nodes of a suite start from; build it if it does not exist."""
    digest = _digest(suite, Kernel.shared, _more(packages, stack))
    # One with more in it and one without do not replace each other.
    kind = f"{_REPOSITORY}:{suite}{'-more' if packages or stack else ''}-"
    if (name := kind + digest) not in images():
        root = _root(suite, Kernel.shared, packages, stack)
        packed = root.with_suffix(".tar")
        options = ("--xattrs", "--xattrs-include=*", "--numeric-owner", "--file", str(packed), "--directory", str(root))
        run("tar", "--create", *options, ".")
        _forget(root)
        podman("import", "--quiet", str(packed), name)
        packed.unlink()
        _remove_unused(kind, name)
    return name


def disk(suite: Suite, kernel: Kernel, packages: Sequence[str] = (), stack: Path | None = None) -> Path:
    """Return the disk that nodes with this kind of kernel start from; build it if it does not exist."""
    start = DISKS / f"{suite}-{kernel}-{_digest(suite, kernel, _more(packages, stack))}"
    if not start.exists():
        part, root = start.with_suffix(".part"), _root(suite, kernel, packages, stack)
        # Read by the user who runs the kernels, whatever this shell's umask is.
        DISKS.mkdir(exist_ok=True)
        DISKS.chmod(0o755)
        if kernel is Kernel.stock:
            _write_loader(Path(f"{start}.loader"))
        run("mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", str(root), str(part), f"{DISK_GB}G")
        _forget(root)
        part.chmod(0o644)
        part.rename(start)
        _remove_unused_disks(suite, kernel, start)
    return start


def _more(packages: Sequence[str], stack: Path | None) -> list[str]:
    return [*packages, *([stack.name] if stack else [])]


def _root(suite: Suite, kernel: Kernel, packages: Sequence[str], stack: Path | None) -> Path:
    """Build the system of a node, with a stack if there is one, as a folder."""
    root = host.STORE / "build" / "root"
    _build(suite, kernel, root, packages)
    if stack:
        folder = root / "opt/farandole"
        folder.mkdir()
        run("tar", "--extract", "--zstd", "--no-same-owner", "--file", str(stack), "--directory", str(folder))
        # As where it is installed, nothing was changed later than this; otherwise it would all be read in each run. In
        # a container, where folders are written last, the first boot sees to it.
        for manifest in root.glob("opt/farandole/stacks/*/manifest.json"):
            if manifest.resolve().is_relative_to(root.resolve()):  # built on a node, which may have made it a link
                manifest.chmod(0o644)
    return root


def _forget(root: Path) -> None:
    run("rm", "--recursive", "--one-file-system", str(root))


def _write_loader(target: Path) -> None:
    """Write what QEMU starts: GRUB, which looks for a kernel on the machine's own disk."""
    settings, core = target.with_suffix(".cfg"), target.with_suffix(".core")
    settings.write_text(_BOOT)
    run("grub-mkimage", "--format=i386-pc", "--prefix=/", f"--config={settings}", f"--output={core}", *_GRUB)
    target.write_bytes(host.GRUB.read_bytes() + core.read_bytes())
    target.chmod(0o644)
    for file in (settings, core):
        file.unlink()


def _digest(suite: Suite, kernel: Kernel, more: Sequence[str] = ()) -> str:
    modules = [path.name for path in _MODULES.glob("*")] if kernel is Kernel.own else []
    boot = [_BOOT, *_GRUB] if kernel is Kernel.stock else []
    what = [*_sources(suite), *_PACKAGES, *_MORE[kernel], *more, *modules, *boot]
    return hashlib.sha256(_overlay(kernel) + "\n".join(what).encode()).hexdigest()[:12]


def _build(suite: Suite, kernel: Kernel, target: Path, packages: Sequence[str] = ()) -> None:
    """Build the system of a node in a folder."""
    work = target.parent
    run("rm", "--recursive", "--force", "--one-file-system", str(work))  # left by an interrupted build
    work.mkdir(parents=True)
    extra, log = work / "overlay.tar", work / f"{suite}.log"
    extra.write_bytes(_overlay(kernel))
    hooks = [
        f"tar-in {extra} /",
        'chroot "$1" update-ca-certificates',
        'chroot "$1" systemctl --quiet enable lab-boot.service',
        'rm --force "$1"/etc/ssh/ssh_host_* "$1"/etc/hosts',
        ': >"$1"/etc/machine-id',
    ]
    if kernel is Kernel.own:
        hooks.append(f'mkdir --parents "$1"/usr/lib/modules && cp --archive {_MODULES}/* "$1"/usr/lib/modules')
    if kernel is not Kernel.shared:
        hooks.append(f"echo '{ROOTS[kernel]} / ext4 errors=remount-ro 0 1' >\"$1\"/etc/fstab")
    include = [*_PACKAGES, *_MORE[kernel], *packages]
    if "chrony" in packages and "systemd-timesyncd" in include:  # there can be only one
        include.remove("systemd-timesyncd")
    command = [
        "mmdebstrap",
        "--variant=minbase",
        "--skip=cleanup/apt/lists",  # an installed machine has package lists
        f"--include={','.join(include)}",
        *(f"--customize-hook={hook}" for hook in hooks),
        suite,
        str(target),
        *_sources(suite),
    ]
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False, env={**os.environ, "TMPDIR": str(work)}
        )
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-5:])
        raise FarandoleError(f"building the {suite} node image failed; {log} ends with:\n{tail}")


def _remove_unused_disks(suite: Suite, kernel: Kernel, start: Path) -> None:
    """Remove older disks of the kind, and what was left beside them, if no node started from them."""
    used = {start.name, *podman("ps", "--all", "--format", '{{index .Labels "farandole.disk"}}').split()}
    for file in DISKS.glob(f"{suite}-{kernel}-*"):
        if file.name.partition(".")[0] not in used:
            file.unlink()


def _remove_unused(kind: str, name: str) -> None:
    """Remove older images of the kind that no node uses any more."""
    used = podman("ps", "--all", "--format", "{{.Image}}").split()
    for image in images():
        if image.rpartition("-")[0] == kind[:-1] and image != name and image not in used:
            podman("image", "rm", image)


def _overlay(kernel: Kernel) -> bytes:
    """Everything on the image besides Debian's packages, as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content, mode in _files(kernel):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
        for unit in (*_NEEDLESS, *(_OF_MACHINES if kernel is Kernel.shared else ())):
            entry = tarfile.TarInfo(f"etc/systemd/system/{unit}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "/dev/null"
            archive.addfile(entry)
    return buffer.getvalue()


def _files(kernel: Kernel) -> Iterator[tuple[str, bytes, int]]:
    own = Path(str(files("farandole.lab"))) / ("node" if kernel is Kernel.shared else "machine")
    for path in sorted(path for path in own.rglob("*") if path.is_file()):
        yield str(path.relative_to(own)), path.read_bytes(), path.stat().st_mode & 0o755
    for certificate in sorted(Path("/usr/local/share/ca-certificates").rglob("*.crt")):
        yield str(certificate).lstrip("/"), certificate.read_bytes(), 0o644
    yield "etc/apt/apt.conf.d/90lab", _apt_settings().encode(), 0o644


def _apt_settings() -> str:
    lines = run("apt-config", "dump").splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith(_APT_SETTINGS))


def _sources(suite: Suite) -> list[str]:
    """sources.list for a suite, with the mirrors that this machine's apt uses."""
    # Others name their releases after Debian's.
    which = ("Created-By: Packages", "Origin: Debian")
    targets = run("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", *which).split("\n")
    sites = {release: site for site, _, release in (target.partition(" ") for target in targets)}
    here = _codename()
    if here not in sites:
        return []  # not a Debian machine: mmdebstrap has a default mirror
    main = sites[here]
    lines = [f"deb {main} {suite} main", f"deb {main} {suite}-updates main"]
    if security := sites.get(f"{here}-security"):
        lines.append(f"deb {security} {suite}-security main")
    return lines


def _codename() -> str:
    release = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    return release.get("VERSION_CODENAME", "") if release.get("ID") == "debian" else ""
