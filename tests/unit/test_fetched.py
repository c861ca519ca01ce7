"""What is fetched of a run: nothing that its jobs wrote is followed, obeyed or put elsewhere."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from farandole.node.head.folders import deepest, is_git, leads_out, place, staging


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a run, with results."""
    (tmp_path / "job/out").mkdir(parents=True)
    (tmp_path / "job/out/model.pt").write_text("weights")
    return tmp_path / "job"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The folder into which they are fetched."""
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def fetch(job: Path, mine: Path, path: str = "out") -> list[str]:
    """Fetch results as farandole does, but without ssh; returns what is refused."""
    with staging(deepest(mine, path), mine) as (staged, options):
        assert staged.stat().st_mode & 0o777 == 0o700
        subprocess.run(["rsync", "--archive", *options, f"{job}/./{path}", f"{staged}/"], check=True)
        refused = [*place(staged, mine, Path(path))]
    assert not staged.exists()
    return refused


def names(refused: list[str]) -> list[str]:
    """What was refused."""
    return [message.partition(" is refused: ")[0] for message in refused]


def here(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def fetch_unprotected(job: Path, mine: Path, path: str = "out") -> None:
    """Fetch results as rsync by itself would."""
    plain = ["--relative", "--safe-links", "--exclude=.git", "--no-perms"]
    subprocess.run(["rsync", "--archive", *plain, f"{job}/./{path}", f"{mine}/"], check=True)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def repository(folder: Path, proof: Path, config: Path) -> None:
    """Make a folder a repository whose settings run a command."""
    write(folder, HEAD="ref: refs/heads/main\n")
    for part in ("objects", "refs"):
        (config.parent / part).mkdir(parents=True)
    command = f'fsmonitor = "id >{proof}; false"'
    config.write_text(f"[core]\nrepositoryformatversion = 0\nbare = false\nworktree = {folder}\n{command}\n")


def git_runs(folder: Path, proof: Path) -> bool:
    """Whether git runs in a folder what a job wrote."""
    subprocess.run(["git", "status"], cwd=folder, capture_output=True, check=False)
    ran = proof.exists()
    proof.unlink(missing_ok=True)
    return ran


@pytest.mark.parametrize("where", ["out", "out/a/b"])
def test_a_folder_that_git_would_obey_is_refused(job: Path, mine: Path, tmp_path: Path, where: str) -> None:
    repository(job / where, tmp_path / "ran", job / where / "config")
    (mine / where).mkdir(parents=True)
    config = (job / where / "config").read_text().replace(str(job), str(mine))
    (job / where / "config").write_text(config)
    assert names(fetch(job, mine)) == [where]
    assert not git_runs(mine / where, tmp_path / "ran")
    assert (mine / "out/model.pt").exists() == (where != "out")
    fetch_unprotected(job, mine)
    assert git_runs(mine / where, tmp_path / "ran")


def test_a_repository_that_lies_apart_is_refused(job: Path, mine: Path, tmp_path: Path) -> None:
    repository(mine / "out", tmp_path / "ran", mine / "out/x/config")
    settings = (mine / "out/x/config").read_text()
    extended = settings.replace("version = 0", "version = 1\n[extensions]\nworktreeConfig\n[core]")
    write(mine / "out/x", config=extended)
    write(mine / "out", **{"commondir": "x", "config.worktree": f"[core]\nbare = false\nworktree = {mine / 'out'}\n"})
    assert git_runs(mine / "out", tmp_path / "ran")
    (mine / "out").rename(tmp_path / "there")
    (job / "out").rename(tmp_path / "before")
    (tmp_path / "there").rename(job / "out")
    assert len(fetch(job, mine)) == 1
    assert not (mine / "out").exists()


@pytest.mark.parametrize("parts", ["HEAD refs objects", "head Refs OBJECTS", "HEAD x commondir"])
@pytest.mark.parametrize("where", [".", "out"])
def test_a_repository_does_not_arrive_in_parts(job: Path, mine: Path, where: str, parts: str) -> None:
    for name in parts.split():
        (job / where / name).touch()
    refused = [len(fetch(job, mine, str(Path(where, name)))) for name in parts.split()]
    assert refused == [0, 0, 1]
    assert {path.name for path in (mine / where).iterdir()} == {*parts.split()[:2]}


@pytest.mark.parametrize("name", [".git", ".GIT", ".giT", ".g\u200cit", "GIT~1", ".git. ", ".git::$INDEX_ALLOCATION"])
def test_nothing_that_is_called_as_a_repository_arrives(job: Path, mine: Path, name: str) -> None:
    write(job / "out" / name, config="[core]")
    (job / "out/sub").mkdir()
    (job / "out/sub" / name).write_text("gitdir: /tmp/x")
    assert len(fetch(job, mine)) == 2
    assert here(mine) == {"out", "out/model.pt", "out/sub"}


@pytest.mark.parametrize("name", [".gitignore", ".farandoleignore", ".gitattributes", ".gitmodules", ".GitIgnore"])
def test_nothing_that_says_what_is_sent_or_kept_arrives(job: Path, mine: Path, name: str) -> None:
    write(job / "out/sub", **{name: "!*.secret\n"})
    assert len(fetch(job, mine)) == 1
    assert here(mine) == {"out", "out/model.pt", "out/sub"}
    # An own one that came back unchanged is no reason to refuse.
    subprocess.run(["cp", "--archive", job / f"out/sub/{name}", mine / "out/sub"], check=True)
    assert fetch(job, mine) == []


def test_what_a_killed_program_left_is_removed_and_what_another_one_fetches_is_not(job: Path, mine: Path) -> None:
    write(mine / ".farandole-fetch-old/out", HEAD="ref: refs/heads/main\n")
    with staging(mine, mine) as (at_work, _):
        (at_work / "out").mkdir()
        assert fetch(job, mine) == []
        assert [path for path in mine.iterdir() if path.name.startswith(".farandole")] == [at_work]


def test_other_names_are_no_repository() -> None:
    assert not [name for name in ("git", ".gitignore", ".github", "HEAD", "git~") if is_git(name)]


def test_links_that_lead_out() -> None:
    within = [("model.pt", 0), ("a/b", 0), ("../a", 1), (".", 0)]
    # In the third but last, the folder `a` can be a link, too.
    without = [("../.git/config", 0), ("../a", 0), ("../../a", 1), ("/etc/passwd", 9)]
    without += [("a/../b", 1), ("a/.GIT/config", 0), ("../a/../../b", 1)]
    assert [link for link in [*within, *without] if leads_out(*link)] == without


def test_links_arrive_only_if_they_stay_in_what_is_fetched(job: Path, mine: Path) -> None:
    write(mine / ".git", config="mine")
    (mine / "beside").write_text("mine")
    (job / "out/sub").mkdir()
    for name, text in {
        "latest.pt": "model.pt", "sub/up": "../model.pt", "config": "../.git/config", "away": "/etc/passwd",
        "here": ".", "round": "here/../beside",
    }.items():  # fmt: skip
        (job / "out" / name).symlink_to(text)
    assert names(fetch(job, mine)) == ["out/away", "out/config", "out/round"]
    assert not (mine / "out/away").is_symlink()
    assert (mine / "out/latest.pt").read_text() == (mine / "out/sub/up").read_text() == "weights"
    fetch_unprotected(job, mine)
    assert (mine / "out/config").read_text() == "mine"


def test_nothing_is_written_through_a_link(job: Path, mine: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", **{"model.pt": "old"})
    (mine / "out").symlink_to(tmp_path / "elsewhere")
    (refused,) = fetch(job, mine)
    assert refused.startswith("out is refused: here, a link")
    assert (tmp_path / "elsewhere/model.pt").read_text() == "old"
    # A file that is a link is replaced.
    (mine / "out").unlink()
    (mine / "out").mkdir()
    (mine / "out/model.pt").symlink_to(tmp_path / "elsewhere/model.pt")
    assert fetch(job, mine) == []
    assert (mine / "out/model.pt").read_text() == "weights"
    assert (tmp_path / "elsewhere/model.pt").read_text() == "old"


def test_what_a_folder_becomes_that_was_a_link(job: Path, mine: Path, tmp_path: Path) -> None:
    (job / "out").rename(job / "real")
    (job / "out").symlink_to(tmp_path)
    assert len(fetch(job, mine)) == 1
    (job / "out").unlink()
    (job / "real").rename(job / "out")
    assert fetch(job, mine) == []
    assert [path.name for path in (mine / "out").iterdir()] == ["model.pt"]


def test_neither_modes_nor_special_files_arrive(job: Path, mine: Path) -> None:
    (job / "out/model.pt").chmod(0o4777)
    (job / "out/locked").mkdir(mode=0o500)
    os.mkfifo(job / "out/pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(job / "out/socket"))
        assert names(fetch(job, mine)) == ["out/pipe", "out/socket"]
    umask = os.umask(0)
    os.umask(umask)
    assert (mine / "out/model.pt").stat().st_mode & 0o7777 == 0o666 & ~umask
    assert (mine / "out/locked").stat().st_mode & 0o7777 == 0o777 & ~umask


def test_files_in_the_way_are_named_and_the_rest_arrives(job: Path, mine: Path) -> None:
    write(job / "out/logs", a="a")
    write(mine / "out", logs="a file")
    write(mine / "out/model.pt", x="a folder")
    assert names(fetch(job, mine)) == ["out/logs", "out/model.pt"]
    write(job / "out", more="1")
    fetch(job, mine)
    assert (mine / "out/more").read_text() == "1"


def test_what_nobody_asked_for_stays_away(mine: Path) -> None:
    with staging(mine, mine) as (staged, _):
        write(staged, **{"train.py": "evil"})
        write(staged / "out/a", b="b", c="c")
        refused = [*place(staged, mine, Path("out/a/b"))]
    assert names(refused) == ["train.py", "out/a/c"]
    assert [path.name for path in mine.rglob("*") if path.is_file()] == ["b"]


def test_names_cannot_control_a_terminal(job: Path, mine: Path) -> None:
    (job / "out/\x1b[2J").symlink_to("/\x1b[2J")
    (refused,) = fetch(job, mine)
    assert refused.isprintable()


def test_a_second_fetch_brings_only_what_has_changed_as_private_as_it_was(job: Path, mine: Path) -> None:
    write(mine / "out", **{"model.pt": "old"})
    (mine / "out/model.pt").chmod(0o600)
    assert fetch(job, mine) == []
    about = (mine / "out/model.pt").stat()
    assert ((mine / "out/model.pt").read_text(), about.st_mode & 0o777) == ("weights", 0o600)
    write(job / "out", more="1")
    assert fetch(job, mine) == []
    assert (mine / "out/model.pt").stat().st_ino == about.st_ino
    assert (mine / "out/more").read_text() == "1"


def test_an_interrupted_fetch_leaves_nothing(mine: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging(mine, mine) as (staged, _):
        write(staged / "out", a="a")
        raise KeyboardInterrupt
    assert [*mine.iterdir()] == []
