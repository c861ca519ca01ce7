"""How packages are waited for that another program has locked, with Debian's own dpkg."""

import os
import re
import subprocess
import sys
import threading
from email.utils import formatdate
from pathlib import Path

import pytest

from farandole.core.causes import causes
from farandole.core.files import sha256

from .loading import load

apt, upgrade = load("module_utils", "apt"), load("modules", "system_upgrade")
# Has them locked until its input ends.
OTHER = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, 2); print(flush=True); sys.stdin.read()"


class Module:
    """What runs a module's commands."""

    def run_command(self, command: list[str], environ_update: dict[str, str]) -> tuple[int, str, str]:
        done = subprocess.run(
            command, env={**os.environ, **environ_update}, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("patience", "code"), [(60, 0), (0.3, 2)])
def test_what_another_program_has_locked_is_waited_for_but_not_for_ever(
    patience: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("updates", "info"):
        (tmp_path / name).mkdir()
    (tmp_path / "status").touch()
    monkeypatch.setattr(apt, "PATIENCE_S", patience)
    monkeypatch.setattr(apt, "PAUSE_S", 0.1)
    command = [sys.executable, "-c", OTHER, str(tmp_path / "lock-frontend")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        if not code:
            threading.Timer(1, other.stdin.close).start()
        done = apt.Apt(Module()).run("dpkg", f"--admindir={tmp_path}", "--configure", "--pending")
        other.stdin.close()
    assert (done[0], bool(re.search(causes()["apt-locked"].pattern, done[2]))) == (code, bool(code))


def test_what_stays_locked_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "PATIENCE_S", 1)
    monkeypatch.setattr(apt, "PAUSE_S", 0.5)
    ran = list[str]()

    class Busy:
        def run_command(self, command: list[str], **_: object) -> tuple[int, str, str]:
            ran.append(command[0])
            return 2, "", "dpkg: error: dpkg frontend lock was locked by another process with pid 9"

    busy = apt.Apt(Busy())
    assert [busy.run("dpkg")[0], busy.run("apt-get")[0]] == [2, 2] and ran == ["dpkg", "dpkg", "dpkg", "apt-get"]


class Root(Module):
    """The packages of a folder instead of those of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("debs", "etc", "lists/partial", "cache/archives/partial", "root/var/lib/dpkg/updates"):
            (root / name).mkdir(parents=True)
        (root / "root/var/lib/dpkg/info").mkdir()
        (root / "root/var/lib/dpkg/status").touch()
        (root / "sources").write_text(f"deb [signed-by={root}/key.gpg] file:{root}/debs ./\n")
        dpkg = (f"--root={root}/root", "--force-not-root", "--force-bad-path", "--log=/dev/null")
        settings = {
            "Dir::State::status": root / "root/var/lib/dpkg/status", "Dir::State::lists": root / "lists",
            "Dir::State::extended_states": root / "extended", "Dir::Cache": root / "cache", "Dir::Etc": root / "etc",
            "Dir::Etc::sourcelist": root / "sources", "APT::Sandbox::User": "root", "APT::Architecture": "amd64",
        }  # fmt: skip
        lines = [f'{name} "{value}";' for name, value in settings.items()]
        (root / "conf").write_text("\n".join([*lines, *(f'DPkg::Options:: "{option}";' for option in dpkg), ""]))
        self.dpkg = dpkg

    def run_command(self, command: list[str], environ_update: dict[str, str]) -> tuple[int, str, str]:
        own = {"dpkg": self.dpkg, "dpkg-query": (f"--admindir={self.root}/root/var/lib/dpkg",)}
        return super().run_command(
            [command[0], *own.get(command[0], ()), *command[1:]],
            {**environ_update, "APT_CONFIG": str(self.root / "conf")},
        )

    def make(self, name: str, version: str, depends: str = "") -> None:
        """A package in the source."""
        folder = self.root / f"{name}_{version}"
        (folder / "DEBIAN").mkdir(parents=True)
        fields = {"Package": name, "Version": version, "Architecture": "all", "Maintainer": "x", "Description": "x"}
        words = "".join(
            f"{key}: {value}\n" for key, value in {**fields, **({"Depends": depends} if depends else {})}.items()
        )
        (folder / "DEBIAN/control").write_text(words)
        (folder / name).write_text(version)
        file = self.root / f"debs/{name}_{version}.deb"
        subprocess.run(["dpkg-deb", "--build", folder, file], check=True, capture_output=True)
        entry = f"{words}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256(file)}\n\n"
        with (self.root / "debs/Packages").open("a") as packages:
            packages.write(entry)

    def sign(self) -> None:
        """Let apt trust the source."""
        packages, gpg = self.root / "debs/Packages", ("gpg", "--homedir", str(self.root / "gpg"), "--batch", "--quiet")
        (self.root / "gpg").mkdir(mode=0o700)
        release = f"Date: {formatdate()}\nSHA256:\n {sha256(packages)} {packages.stat().st_size} Packages\n"
        for command, given in (
            (("--passphrase", "", "--quick-generate-key", "thing", "ed25519"), ""),
            (("--output", str(self.root / "key.gpg"), "--export"), ""),
            (("--output", str(self.root / "debs/InRelease"), "--clearsign"), release),
        ):
            subprocess.run([*gpg, *command], check=True, input=given, text=True, capture_output=True)
        subprocess.run(["gpgconf", "--homedir", self.root / "gpg", "--kill", "all"], check=True)

    def dpkg_does(self, *arguments: str) -> None:
        code, out, err = self.run_command(["dpkg", *arguments], {})
        assert code == 0, out + err

    def states(self) -> str:
        form = "--showformat=${Package} ${Version} ${db:Status-Abbrev}\n"
        return self.run_command(["dpkg-query", "--show", form], {})[1]

    def fail_json(self, msg: str) -> None:
        raise AssertionError(msg)


def test_a_power_cut_before_a_dependency_was_unpacked_is_mended(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for version in ("1", "2"):
        root.make("libthing", version)
        root.make("thing", version, f"libthing (= {version})")
    root.sign()
    root.dpkg_does("--install", *(f"{tmp_path}/debs/{name}_1.deb" for name in ("libthing", "thing")))
    root.dpkg_does("--unpack", f"{tmp_path}/debs/thing_2.deb")
    assert root.states() == "libthing 1 ii \nthing 2 iU \n"
    tool = apt.Apt(root)
    # What an upgrade asks first.
    root.run_command(["apt-get", "--quiet", "update"], {})
    code, out, err = tool.run(*upgrade.UPGRADE, "--simulate")
    assert code == 0, out + err
    tool.finish()
    assert root.states() == "libthing 2 ii \nthing 2 ii \n"
