"""How nccl_proof finds other copies of NCCL in the output of other programs."""

import getpass
import os
import pwd
from pathlib import Path

import pytest

from .loading import load

proof = load("modules", "nccl_proof")


@pytest.mark.parametrize(
    ("number", "version"), [(22203, "2.22.3"), (21805, "2.18.5"), (20900, "2.9.0"), (2708, "2.7.8"), (2400, "2.4.0")]
)
def test_the_librarys_version_number_is_read_in_both_schemes(number: int, version: str) -> None:
    assert proof.version_text(number) == version


def test_the_loaders_cache_is_read() -> None:
    cache = (
        "3 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibnccl.so.2 (libc6,x86-64) => /usr/local/lib/libnccl.so.2\n"
        "\tlibnccl.so.2 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnccl.so.2\n"
        "\tlibnccl.so (libc6,x86-64) => /lib/x86_64-linux-gnu/libnccl.so\n"
        "\tlibnccl-net.so.2 (libc6,x86-64) => /lib/libnccl-net.so.2\n"
    )
    paths = [Path("/usr/local/lib/libnccl.so.2"), Path("/lib/x86_64-linux-gnu/libnccl.so.2")]
    assert proof.on_loader_path(cache) == paths


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ("LD_LIBRARY_PATH=/a:/b\n", ["/a", "/b"]),
        ("PATH=/x\nexport LD_LIBRARY_PATH='/a:/b'\n", ["/a", "/b"]),
        ('LD_LIBRARY_PATH="/a:$LD_LIBRARY_PATH"\n', ["/a"]),
        ("# LD_LIBRARY_PATH=/a\nMY_LD_LIBRARY_PATH=/b\n", []),
    ],
)
def test_library_folders_are_read_from_an_environment_file(text: str, folders: list[str]) -> None:
    assert proof.library_paths(text) == [Path(folder) for folder in folders]


def test_the_packages_library_is_the_file_that_its_symlink_names(tmp_path: Path) -> None:
    library, name = tmp_path / "libnccl.so.2.22.3", tmp_path / "libnccl.so.2"
    library.touch()
    name.symlink_to(library.name)
    assert proof.packaged(f"/.\n{tmp_path}\n{library}\n{name}\n") == [library]


def test_a_file_that_is_not_a_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF")
    version, reason = proof.call(tmp_path / "libnccl.so.2", getpass.getuser())
    assert version == ""
    assert "file too short" in reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_library_is_not_loaded_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof.sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(proof, "CALL", "import os, sys; sys.exit(f'{os.getresuid()} {os.getgroups()} {os.getcwd()}')")
    nobody = pwd.getpwnam("nobody").pw_uid
    assert proof.call(Path("/x.so"), "nobody")[1] == f"({nobody}, {nobody}, {nobody}) [] /"


def test_only_another_version_is_reported() -> None:
    assert proof.conflict({"/a/libnccl.so.2": "2.22.3"}, "2.22.3") == ""
    message = proof.conflict({"/a.so": "2.21.5", "/b.so": "2.22.3", "/c.so": ""}, "2.22.3")
    assert message.startswith(
        "a job may load /a.so (NCCL 2.21.5), /c.so (NCCL unknown) instead of the installed NCCL 2.22.3"
    )
