"""What `farandole explain` says about logs, stored ones and such as nobody would write."""

import io
import os
import re
import time
import tracemalloc
from pathlib import Path

import explain as scoring
import pytest
from typer.testing import CliRunner, Result

from farandole.cli.app import app
from farandole.cli.explain import described
from farandole.core import findings
from farandole.core.causes import READ, causes
from farandole.core.errors import FarandoleError
from farandole.core.findings import finding
from farandole.explain.diagnosis import Line, Verdict, explain, needles, read
from farandole.explain.logs import PIECE, lines
from farandole.explain.told import report

from .loading import ROOT

FULL = "[1]<stderr>:OSError: [Errno 28] No space left on device\n"
KILLED = "mpirun noticed that process rank 1 with PID 1805 on node node-2 exited on signal 9 (Killed).\n"


def told(raw: bytes) -> Verdict:
    return explain(Line("log", number, text) for number, text in lines(io.BytesIO(raw), "log"))


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], input=stdin)


@pytest.mark.parametrize("path", scoring.stored(), ids=lambda path: str(path.name))
def test_no_stored_log_gets_a_wrong_answer(path: Path) -> None:
    answer = scoring.answer(path)
    assert answer.kind != "wrong", (answer.wanted, answer.got)


@pytest.mark.parametrize("code", causes())
def test_every_cause_is_described(code: str) -> None:
    text = " ".join(described(causes()[code]))
    assert text.startswith(f"{code}: a ")
    assert "cure: " in text
    assert "{" not in re.split("looks like:|alerts on:", text)[0]


def test_a_code_is_explained_unless_there_is_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("disk-full").output.startswith("disk-full: a root cause, seen in the output of a job\n  what: ")
    (tmp_path / "log").touch()
    assert isinstance(run("disk-full", "log").exception, FarandoleError)
    assert "farandole explain --list" in str(run("no-such-cause").exception)
    (tmp_path / "disk-full").write_text("ModuleNotFoundError: No module named 'horovod'\n")
    assert "root cause [horovod-missing]" in run("disk-full").output


def test_causes_are_found_by_words() -> None:
    every = run("--list").output.splitlines()
    assert [line.split(":")[0] for line in every] == [*causes()]
    assert 0 < len(run("--list", "Firewall", "port").output.splitlines()) < len(every)
    assert isinstance(run("--list", "frobnicator").exception, FarandoleError)


def test_the_page_names_only_causes_that_exist() -> None:
    page = (ROOT / "docs/causes.md").read_text()
    named = re.findall(r"^\| `([a-z0-9-]+)`", page.split("## The most frequent")[1], re.MULTILINE)
    assert len(named) >= 20
    assert {*named} <= {*causes()}
    assert len(page.splitlines()) < 80


def test_the_quick_search_misses_nothing() -> None:
    paths = [path for folder in scoring.EVIDENCE for path in folder.iterdir()]
    texts = [line for path in paths for line in path.read_text().splitlines()]
    for cause in causes().values():
        if cause.seen in READ:
            known = needles(cause.pattern)
            assert all(len(word) > 3 for word in known), cause.code
            fits = [text for text in texts if re.search(cause.pattern, text)]
            assert all(any(word in text for word in known) for text in fits), cause.code


def test_the_root_cause_is_printed_last() -> None:
    text = report(told((KILLED + FULL + KILLED).encode()))
    assert text.index("[worker-killed]") < text.index("[disk-full]")
    assert "rank 1, line 2" in text


def test_a_rank_that_was_killed_is_the_cause_of_what_the_others_say() -> None:
    lost = "[0] gloo/transport/tcp/pair.cc:589] Read error [192.0.2.2]:44421: Connection reset by peer\n"
    gloo = f"{lost}[1] Killed\nProcess 1 exit with status code 137.\nProcess name: 1\nExit code: 137\n"
    text = report(told(gloo.encode()))
    assert told(gloo.encode()).codes == ["rank-killed"]
    # One of the launcher's threads may end in the middle of telling why.
    thread = (
        'Exception in thread Thread-1 (fn):\nTraceback (most recent call last):\n  File "threading.py", line 1038\n'
    )
    assert (lead := told((thread + gloo).encode()).lead) and lead.cause.code == "rank-killed"
    assert told(f"{lost}[1] Killed\n".encode()).codes == ["process-killed"]
    last = text.split("\n\n")[-1]
    assert last.startswith("root cause [rank-killed]") and "rank 1" in last
    # That is no proof that memory was full, and an exception says more.
    assert "memory was full" not in last.split("cure:")[0]
    raised = told(f"[0] ValueError: negative\n{gloo}".encode())
    assert raised.lead is None and "ValueError" in report(raised)


def test_who_is_killed_after_slurm_cancelled_a_step_is_no_cause() -> None:
    killed = "srun: error: node-2: task 1: Killed\n"
    cancelled = "slurmstepd-node-2: error: *** STEP 2.1 ON node-2 CANCELLED AT 2026-11-25T03:08:32 ***\n"
    assert told(f"{killed}{cancelled}".encode()).codes == ["task-killed"]
    assert told(f"{cancelled}{killed}".encode()).codes == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("horovodrun: command not found", "command-missing"),
        ("zsh: command not found: horovodrun", "command-missing"),
        ("sudo: horovodrun: command not found", "command-missing"),
        ("sudo: command not found", "sudo-missing"),
        (
            "[rank1]: ConnectionError: Couldn't reach 'ylecun/mnist' on the Hub (OfflineModeIsEnabled)",
            "data-unreachable",
        ),
        (
            "WARNING: Open MPI accepted a TCP connection from what appears to be a another Open MPI process but cannot "
            "find a corresponding process entry for that peer.",
            "mpi-stranger",
        ),
    ],
)
def test_words_of_other_programs_are_known(line: str, code: str) -> None:
    assert told(line.encode()).codes == [code]


@pytest.mark.parametrize(
    "line",
    [
        "node-1:7:7 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or "
        "directory No plugin found (libnccl-net.so), using internal implementation",
        "2023-05-04 10:11:12.3: W tensorflow/tsl/platform/default/dso_loader.cc:64] Could not load dynamic "
        "library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: cannot open shared object file: No such file",
        "[node-1:00017] mca_base_component_repository_open: unable to open mca_mtl_psm2: libpsm2.so.2: cannot open "
        "shared object file: No such file or directory (ignored)",
        '-- Could NOT find Mxnet (missing: Mxnet_LIBRARIES) (Required is at least version "1.4.1")',
        "      -- Could NOT find MPI (missing: MPI_CXX_FOUND)",
        "/v/torch/cuda/__init__.py:129: UserWarning: CUDA initialization: Found no NVIDIA driver on your system.",
        "'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/a/config.json",
        "train.py: error: unrecognized arguments: --epoch 3",
    ],
)
def test_what_programs_say_before_they_go_on_is_no_cause(line: str) -> None:
    verdict = told(f"[1]<stderr>:{line}\n".encode())
    assert verdict.codes == []
    assert not verdict.telling or line.startswith("train.py")
    # Nor does it hide the cause, be it in the same line, as in what Ansible prints of a task.
    assert told(f"{line}\n{FULL}".encode()).codes == ["disk-full"]
    assert told(f'fatal: [a]: FAILED! => {{"stderr": "{line}\\n{FULL.strip()}"}}'.encode()).codes == ["disk-full"]


def test_two_causes_are_both_named() -> None:
    assert told(f"{FULL}ModuleNotFoundError\nsudo: command not found\n".encode()).codes == ["disk-full", "sudo-missing"]


def test_a_finding_of_our_own_is_recognized_by_its_code() -> None:
    item = finding("pair-node-closed", "node-3", other="node-1", seen="no answer", both="", subnet="192.0.2.0/24")
    verdict = told(findings.report([item, finding("exclusion-possible", "node-3", inventory="mine")]).encode())
    assert verdict.codes == ["pair-node-closed"]
    text = report(verdict)
    assert f"root cause [pair-node-closed]: node-3: {item.cause}" in text
    assert "that node" not in text.split("cure:")[0]
    assert told(b"1. node-3: it is odd [no-such-code]\n").codes == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_any_encoding_and_language_is_read(encoding: str) -> None:
    messages = ["Fehler für Gerät"]
    if encoding != "latin-1":
        messages += ["デバイスに空き領域がありません", "磁盘空间不足", "لا توجد مساحة", "Места нет"]
    for text in messages:
        assert told(f"{text}\n{FULL}{text}".encode(encoding)).codes == ["disk-full"]
    assert told("設定ファイルが壊れています".encode("shift-jis")).codes == []


def test_a_message_is_found_wherever_it_is_cut() -> None:
    for start in range(PIECE - 60, PIECE + 1, 7):
        assert told(b"x" * start + FULL.encode()).codes == ["disk-full"]
    assert told(b"y\n" * (PIECE // 2) + FULL.encode()).roots[0].line.number == PIECE // 2 + 1


def test_terminal_codes_and_progress_bars_hide_nothing() -> None:
    colour = FULL.replace("No space", "\x1b[31mNo \x1b[0mspace")
    assert told(f"10 %\r20 %\r{colour}".encode()).codes == ["disk-full"]


def test_nothing_of_a_log_is_executed_or_rendered() -> None:
    nasty = "[bold red]{{ lookup('pipe', 'id') }}\x1b]0;title\x07\x1b[2J\x9b31m"
    done = run("-", stdin=f"{nasty} $(id) fatal error: No space left on device {nasty}\n".encode())
    assert done.exit_code == 0
    assert "[bold red]{{ lookup" in done.output
    assert "uid=" not in done.output
    assert not {*done.output} & {"\x1b", "\x07"}


@pytest.mark.parametrize("name", ["{host} {0}", "[bold red]x[/]", "{{ lookup('pipe', 'id') }}", "$(id)", "%s"])
def test_what_a_pattern_finds_is_shown_as_it_is(name: str) -> None:
    line = f"python: can't open file {name!r}: [Errno 2] No such file\n"
    if "'" not in name:
        line = line.replace('"', "'")
        assert f"there is no {name} on that node" in report(told(line.encode()))
    assert report(told(f"fatal error in {name}".encode())).endswith(name)


@pytest.mark.parametrize("path", sorted(scoring.LOGS.iterdir()), ids=lambda path: str(path.name))
def test_a_log_that_is_cut_gives_no_other_cause(path: Path) -> None:
    raw, whole = path.read_bytes(), scoring.answer(path).got
    general = {code for code, cause in causes().items() if cause.general or cause.cascade}
    for start, end in ((7, None), (0, -7), (len(raw) // 3, None), (0, len(raw) // 3)):
        cut = told(raw[start:end])
        # What is cut off may have said that it was Ansible that logged in.
        likely = {*whole, *general, *(code.replace("login-", "peer-") for code in whole)}
        assert set(cut.codes) <= likely, (start, end)
        report(cut)


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh9", b"\x28\xb5\x2f\xfd"])
def test_a_compressed_log_is_refused_with_the_command_that_unpacks_it(magic: bytes) -> None:
    error = run(stdin=magic + os.urandom(9999)).exception
    assert isinstance(error, FarandoleError)
    assert "cat on it and pipe that into" in str(error)


def test_a_long_log_needs_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * (1 << 20) + b"\n" + FULL.encode())
    tracemalloc.start()
    try:
        assert explain(read([str(tmp_path / "log")])).codes == ["disk-full"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("raw", [os.urandom(1 << 20), bytes(1 << 20), b"\xff\xfe", b"", b"\xff\xfea"], ids=len)
def test_what_is_no_log_is_read_to_its_end(raw: bytes) -> None:
    assert "disk-full" not in told(raw).codes


@pytest.mark.parametrize(
    "line",
    ["step 12 loss 0.5 of 100", "error: x" * 40, "\\S" * 4000, "a" * 4000, "python: not found " * 300],
    ids=["lines", "errors", "backslashes", "words", "pythons"],
)
def test_a_log_takes_no_longer_than_twenty_times_a_loop_of_ten_million_steps(line: str) -> None:
    begun = time.process_time()
    sum(range(10_000_000))
    limit = 20 * (time.process_time() - begun)
    begun = time.process_time()
    told((line + "\n").encode() * ((1 << 19) // len(line)))
    assert time.process_time() - begun < limit


def test_the_exit_status_says_whether_a_cause_was_found(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(KILLED)
    (tmp_path / "two").write_text(f"\n{FULL}")
    both = run(str(tmp_path / "one"), str(tmp_path / "two"))
    assert both.exit_code == run(stdin=b"all is well\n").exit_code == 0
    assert "line 2 of" in both.output
    assert both.output.index("[worker-killed]") < both.output.index("[disk-full]")
    unknown = run(stdin=b"fatal: the frobnicator failed\n")
    assert unknown.exit_code == 3
    assert "frobnicator" in unknown.output
    for wrong in (tmp_path, tmp_path / "none"):
        assert isinstance(run(str(wrong)).exception, FarandoleError)
