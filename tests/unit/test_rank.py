"""How ranks are started, and how it is known whether they met; tests/lab/test_launchers.py does it with frameworks."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farandole.node.head import launch, reap, runs
from farandole.node.head.launch import Reports, recognized
from farandole.node.head.runs import RefusedError
from farandole.node.rank import main
from farandole.node.rank.place import Place, alone, on_node, on_processors, place, variables

from .loading import install

SLOTS = {"node-1": 2, "node-2": 1}
TWO = {"node-1": 1, "node-2": 1}


# What horovodrun puts beside a rank on another host.
BESIDE = '(exec </dev/null >/dev/null 2>&1; while kill -0 $$; do sleep 0.1; done) & exec "$0"'


def started(folder: Path, *program: str, launcher: str = "horovod", rank: int = 1, **more: str) -> tuple[Any, Any]:
    """What a program prints as a rank, and what is told of it."""
    # A stack in that folder would be damaged, and a GPU is what is in another one.
    places = {
        'STACKS = Path("/opt/farandole")': f"STACKS = Path({str(folder)!r})",
        'DRIVER = Path("/proc/driver/nvidia/gpus")': f"DRIVER = Path({str(folder / 'gpus')!r})",
        'DEVICES = Path("/dev")': f"DEVICES = Path({str(folder / 'dev')!r})",
    }
    install(folder / "node", "farandole.node.rank", places, rank="main")
    run = {"launcher": launcher, "slots": SLOTS, "port": 23456, "mark": "m", "program": program}
    run |= {"numbers": {"node-1": [1, 3], "node-2": [0]}, "hostfile": {"node-1": 4, "node-2": 1}}
    own = {"FARANDOLE_RUN": json.dumps(run), "HOROVOD_RANK": str(rank), "PYTHONDONTWRITEBYTECODE": "1", **more}
    done = subprocess.run(
        ["bash", "-c", BESIDE, folder / "node/rank"], env={**os.environ, **own}, cwd=folder, capture_output=True,
        check=False,
    )  # fmt: skip
    reports = Reports("m", {})
    mark = b"[%d] " % rank
    lines = [reports.take(mark + line).removeprefix(mark) for line in done.stdout.splitlines(keepends=True)]
    printed = b"".join(lines)
    return subprocess.CompletedProcess("", done.returncode, printed.decode(), done.stderr.decode()), reports.said


def test_a_rank_knows_its_place(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT"
    shown = "; ".join(f"echo ${name}" for name in names.split())
    places = [started(tmp_path, "sh", "-c", shown, rank=rank)[0].stdout.split() for rank in range(3)]
    rest = ["node-1", "23456"]
    assert places == [
        ["0", "3", "0", "2", "0", *rest],
        ["1", "3", "1", "2", "0", *rest],
        ["2", "3", "0", "1", "1", *rest],
    ]


def test_tensorflow_learns_of_all_ranks() -> None:
    given = json.loads(variables(place(2, SLOTS), SLOTS, 20000)["TF_CONFIG"])
    assert given["cluster"] == {"worker": ["node-1:20000", "node-1:20001", "node-2:20000"]}
    assert given["task"]["index"] == 2


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (["torchrun", "a.py"], ["torchrun", "OURS", "a.py"]),
        (["env", "A=1", "torchrun", "--tee", "3", "a.py"], ["env", "A=1", "torchrun", "OURS", "--tee", "3", "a.py"]),
        (
            ["python3", "-m", "torch.distributed.run", "a.py"],
            ["python3", "-m", "torch.distributed.run", "OURS", "a.py"],
        ),
    ],
)
def test_torchrun_is_told_where_it_runs(program: list[str], command: list[str]) -> None:
    assert recognized(program, "") == "torchrun"
    ours = ["--nnodes=2", "--nproc-per-node=1", "--node-rank=1", "--master-addr=node-1", "--master-port=2"]
    at = command.index("OURS")
    assert on_node(program, place(2, SLOTS), SLOTS, 2) == [*command[:at], *ours, *command[at + 1 :]]
    assert launch.command("torchrun", SLOTS)[2:6] == ["-np", "2", "-H", "node-1:1,node-2:1"]


def test_accelerate_is_told_where_it_runs() -> None:
    program = ["accelerate", "launch", "--mixed_precision=bf16", "a.py"]
    assert recognized(program, "") == "accelerate"
    command = on_node(program, place(1, TWO), TWO, 2)
    assert command[:5] == ["accelerate", "launch", "--num_machines=2", "--num_processes=2", "--machine_rank=1"]
    assert command[-2:] == program[-2:]
    assert "--multi_gpu" in command
    for other in (["--use_fsdp"], ["--multi-gpu"]):
        assert "--multi_gpu" not in on_node([*program[:2], *other, "a.py"], place(1, TWO), TWO, 2)
    # Its own option for processors allows only one process, and is another one than the program's.
    on_cpus = on_node([*program[:2], "--cpu", "a.py", "--cpu"], place(1, TWO), TWO, 2)
    assert on_cpus[:4] == ["env", "ACCELERATE_USE_CPU=true", "accelerate", "launch"]
    assert on_cpus[-3:] == ["--multi_gpu", "a.py", "--cpu"]
    assert "--multi_gpu" not in on_node(program, place(0, {"node-1": 1}), {"node-1": 1}, 2)
    with pytest.raises(RefusedError, match="as many ranks on each node"):
        launch.command("accelerate", SLOTS)


@pytest.mark.parametrize("device", ["", "nvidiactl", "nvidia0", "kfd", "dri/renderD128"])
def test_accelerate_is_told_to_use_processors_if_there_is_nothing_else(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("farandole.node.rank.place.DEVICES", tmp_path)
    (tmp_path / device).parent.mkdir(exist_ok=True)
    if device:
        (tmp_path / device).touch()
    told = {"ACCELERATE_USE_CPU": "true"} if device in ("", "nvidiactl") else {}
    assert on_processors() == told


@pytest.mark.parametrize(
    ("program", "launcher", "why"),
    [
        ("torchrun --nnodes 2 a.py", "", "--nnodes"),
        ("torchrun --master_port=1 a.py", "", "--master_port"),
        ("torchrun --standalone a.py", "torchrun", "--standalone"),
        ("torchrun -m --nnodes=5 package", "torchrun", "--nnodes"),
        ("accelerate launch --num_machines 2 a.py", "", "--num_machines"),
        ("python a.py", "torchrun", "begins with torchrun"),
    ],
)
def test_what_contradicts_the_run_is_refused(program: str, launcher: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        recognized(program.split(), launcher)


@pytest.mark.parametrize(
    "program", ["python a.py", "env", "env A=1", "torchrun a.py --nnodes 2", "torchrun a.py --standalone"]
)
def test_options_of_the_program_itself_are_its_own(program: str) -> None:
    assert recognized(program.split(), "") == ("torchrun" if program.startswith("torchrun") else "horovod")


def test_independent_programs_have_a_number_and_nothing_of_a_launcher(tmp_path: Path) -> None:
    script = "env | grep -c '^HOROVOD_\\|^RANK=\\|^MASTER'; echo $FARANDOLE_SLOT of $FARANDOLE_SLOTS; exit 7"
    done, said = started(tmp_path, "sh", "-c", script, launcher="each", HOROVOD_GLOO_IFACE="lo")
    assert (done.returncode, done.stdout) == (0, "0\n1 of 3\n")
    assert said == {1: {"told": [], "status": 7}}
    assert Reports("m", said).failed() == {1: 7}


@pytest.mark.parametrize(("script", "status"), [("exit 5", 5), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_a_rank_ends_as_its_program_does(script: str, status: int, tmp_path: Path) -> None:
    assert started(tmp_path, "sh", "-c", script)[0].returncode == status


def test_a_rank_ends_with_its_program_and_with_what_that_has_left(tmp_path: Path) -> None:
    left = "setsid env -i sleep 90 & (setsid sh -c 'sleep 91; :' &); (sleep 1; echo late) & echo soon; exit 5"
    with subprocess.Popen(["sleep", "92"]) as other:
        begun = time.monotonic()
        done, said = started(tmp_path, "sh", "-c", left)
        seconds, others_status = time.monotonic() - begun, other.poll()
        other.kill()
    assert (seconds < 60, others_status) == (True, None)
    assert (done.returncode, done.stdout, said) == (5, "soon\nlate\n", {1: {"told": [], "status": 5}})
    assert sorted(re.findall(r"\b(?:sh|sleep)\b", done.stderr)) == ["sh", "sleep", "sleep"]


def test_processes_that_a_program_no_longer_waits_for_are_gone_when_they_end(tmp_path: Path) -> None:
    gone = '! cat /proc/[0-9]*/stat 2>&1 | grep -q ") Z $PPID "'
    script = f"for _ in 1 2 3; do (true &); done; for _ in $(seq 50); do sleep 0.2; {gone} && exit; done; exit 7"
    assert started(tmp_path, "sh", "-c", script)[0].returncode == 0


UNFIT = f"{socket.gethostname()} is not fit for jobs: the stack is damaged; run site.yml\n"


def test_nothing_is_started_on_a_node_with_a_fault(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("gone")
    done, said = started(tmp_path, "echo", "ran", rank=0)
    assert (done.returncode, done.stdout, done.stderr, said) == (1, "", UNFIT, {0: {"told": [], "status": 1}})
    # Its first rank has looked, which ends the others.
    assert started(tmp_path, "echo", "ran", rank=1)[0].stdout == "ran\n"
    done, said = started(tmp_path, "echo", "ran", launcher="each", rank=1)
    assert (done.returncode, done.stdout, done.stderr, said) == (0, "", UNFIT, {1: {"told": [], "status": 1}})


@pytest.mark.parametrize(("job", "printed"), [({}, ""), ({"SLURM_JOB_ID": "7"}, "ran\n")])
def test_a_job_of_the_queue_need_not_see_all_gpus_of_its_node(
    job: dict[str, str], printed: str, tmp_path: Path
) -> None:
    for name in ("gpus", "dev/nvidia0", "dev/nvidia1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done, _ = started(tmp_path, "echo", "ran", rank=0, **job, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.stdout, "does not see all 2 GPUs" in done.stderr) == (printed, not job)


def test_a_fault_that_a_job_has_left_is_told(tmp_path: Path) -> None:
    done, said = started(tmp_path, "ln", "-s", "gone", "current", rank=0)
    assert (done.returncode, done.stderr, said) == (0, UNFIT, {0: {"told": [], "status": 0}})


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    done, _ = started(tmp_path, "nothing")
    assert (done.returncode, done.stderr == "nothing: command not found\n") == (127, True)


def test_a_signal_reaches_the_program_and_a_killed_rank_leaves_none(tmp_path: Path) -> None:
    install(tmp_path / "node", "farandole.node.rank", rank="main")
    script = "trap 'echo caught; exit 4' TERM; echo $$; while :; do sleep 0.1; done"
    program = ["sh", "-c", script]
    run = {"launcher": "horovod", "slots": TWO, "port": 1, "mark": str(os.getpid()), "program": program}
    for number, status in ((signal.SIGTERM, 4), (signal.SIGKILL, -9)):
        process = subprocess.Popen(
            [tmp_path / "node/rank"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "FARANDOLE_RUN": json.dumps(run), "HOROVOD_RANK": "0"},
        )  # fmt: skip
        with process:
            assert process.stdout
            watched = os.pidfd_open(int(process.stdout.readline()))
            process.send_signal(number)
            assert process.wait() == status
            assert ("caught" in process.stdout.read()) == (number == signal.SIGTERM)
        # Readable when it has ended.
        assert select.select([watched], [], [], 10)[0]
        os.close(watched)


def test_a_rank_ends_with_the_shell_that_has_started_it(tmp_path: Path) -> None:
    install(tmp_path / "node", "farandole.node.rank", rank="main")
    program = ["sh", "-c", "echo $$; exec sleep 60"]
    run = {"launcher": "horovod", "slots": TWO, "port": 1, "mark": str(os.getpid()), "program": program}
    shell = subprocess.Popen(
        ["sh", "-c", f"{tmp_path}/node/rank & wait"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "FARANDOLE_RUN": json.dumps(run), "HOROVOD_RANK": "0"},
    )  # fmt: skip
    with shell:
        assert shell.stdout
        watched = os.pidfd_open(int(shell.stdout.readline()))
        shell.kill()
        assert select.select([watched], [], [], 10)[0]
    os.close(watched)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os; os.environ.get('RANK')", ["reads"]),
        ("import os; os.getenv('HOROVOD_RANK')", ["reads"]),
        ("import os; os.environ['PATH']; os.environ.get('LOCAL_RANK')", []),
        ("import library", []),
        ("import json, torch", ["uses torch"]),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import keras'])", ["uses keras"]),
        ("import os; os._exit(0)", []),
        ("import os; {**os.environ}; os.environ.copy(); dict(os.environ)", []),
        ("import os; 'RANK' in os.environ", ["reads"]),
    ],
)
def test_what_a_program_uses_is_told(program: str, told: list[str], tmp_path: Path) -> None:
    # Modules of these names, since what is told here depends on the name alone.
    for name in ("torch.py", "keras.py", "site-packages/library.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os\nos.environ.get('RANK')\n" if "library" in name else "")
    done, said = started(tmp_path, sys.executable, "-c", program, PYTHONPATH=str(tmp_path / "site-packages"))
    assert (done.returncode, done.stderr, said[1]["told"]) == (0, "", told)


def test_the_hook_hides_no_sitecustomize_and_no_module(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/sitecustomize.py").write_text("print('the other')")
    script = "import sys; print([folder for folder in sys.path if 'rank/hook' in folder])"
    done, _ = started(tmp_path, sys.executable, "-c", script, PYTHONPATH=str(tmp_path / "other"))
    assert (done.stdout, done.stderr) == ("the other\n[]\n", "")


def judged(*told: list[str], size: int = 2, nodes: int = 2) -> tuple[str, str]:
    reports = Reports("m", {number: {"told": words, "status": 0} for number, words in enumerate(told)})
    return reports.verdict(size, size, nodes)


@pytest.mark.parametrize(
    ("told", "part"),
    [
        (["uses torch"], "they use torch"),
        (["uses mpi4py", "met MPI 1"], "MPI knew of one rank"),
        (["uses mpi4py", "uses torch", "met MPI 1"], "they use torch"),
        (["uses torch", "met torch.distributed@node 2"], "torch.distributed at localhost"),
        (["uses torch", "met torch.distributed 1"], "torch.distributed knew of one rank"),
        (["uses torch", "met torch.distributed 1", "reads"], "torch.distributed knew of one rank"),
        (["uses keras", "met Horovod 2", "wraps"], "nothing was averaged"),
        (["uses torch", "met torch.distributed 2", "met Accelerate 1"], "Accelerate found no GPU"),
    ],
)
def test_ranks_that_never_met_were_alone(told: list[str], part: str) -> None:
    why, cure = judged(told, told)
    assert part in why
    assert cure
    assert judged(told, size=1, nodes=1) == ("", "")


@pytest.mark.parametrize(
    "told",
    [
        [],
        ["uses torch", "reads"],
        ["uses mpi4py", "uses torch", "met MPI 1", "reads"],
        ["uses torch", "met Horovod 2"],
        ["uses torch", "met torch.distributed 1", "met Horovod 2"],
        ["uses keras", "met Horovod 2", "wraps", "reduces"],
        ["uses torch", "met torch.distributed 2", "met Accelerate 2"],
        ["uses torch", "met Horovod 2", "met Accelerate 1"],
        ["uses torch", "reads", "met Accelerate 1"],
    ],
)
def test_other_ranks_were_not(told: list[str]) -> None:
    assert judged(told, told) == ("", "")


@pytest.mark.parametrize(
    ("gpus", "given", "visible"),
    [(2, "", ["0", "1"]), (8, "4,7", ["4", "7"]), (1, "", [None, None]), (0, "", [None, None])],
)
def test_each_of_independent_programs_sees_a_gpu_of_its_own(
    gpus: int, given: str, visible: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (tmp_path / name).touch()
    monkeypatch.setattr("farandole.node.rank.place.DEVICES", tmp_path)
    places = [Place(2, 4, 0, 2, 1), Place(3, 4, 1, 2, 1)]
    assert [alone(at, given).get("CUDA_VISIBLE_DEVICES") for at in places] == visible


@pytest.mark.parametrize(
    ("gpus", "launcher", "more", "seen"),
    [
        (4, "horovod", {}, "1,3"),
        (4, "mpi", {}, "1,3"),
        (4, "torchrun", {}, "1,3"),
        (4, "each", {}, "3"),
        (4, "horovod", {"CUDA_VISIBLE_DEVICES": "2"}, "2"),
        # The queue has chosen, or the slots are set by hand.
        (4, "horovod", {"SLURM_JOB_ID": "7"}, ""),
        (8, "horovod", {}, ""),
        (0, "horovod", {}, ""),
    ],
)
def test_ranks_see_the_gpus_of_their_run(
    gpus: int, launcher: str, more: dict[str, str], seen: str, tmp_path: Path
) -> None:
    (tmp_path / "gpus").mkdir()
    for number in range(gpus):
        (tmp_path / f"gpus/0000:0{number}:00.0").touch()
    for name in ("torchrun", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\necho $CUDA_VISIBLE_DEVICES\n")
        (tmp_path / name).chmod(0o755)
    more = {**more, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # That is started once on each node.
    done, _ = started(tmp_path, "torchrun", launcher=launcher, rank=int(launcher != "torchrun"), **more)
    assert done.stdout.strip() == seen


def test_ranks_of_which_one_says_nothing_are_not_called_alone() -> None:
    assert judged(["uses torch"]) == ("", "")


def test_the_largest_group_counts() -> None:
    told = [["met torch.distributed 9", "met torch.distributed 10"]] * 10
    assert judged(*told, size=10) == ("", "")


def test_a_group_that_is_too_small_is_mentioned() -> None:
    told = ["uses torch", "met torch.distributed 2"]
    assert judged(told, told, told, size=3) == ("", "only 2 of 3 ranks met")


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        (b"[0] \x02farandole m {JSON}\n", b""),
        (b"[0] loss 0.5\x02farandole m {JSON}\n", b"[0] loss 0.5\n"),
        (b"[0] \x02farandole other {JSON}\n", b"[0] \x02farandole other {JSON}\n"),
        (b"[0] \x02farandole m {}\n", b"[0] \x02farandole m {}\n"),
        (b"[1] \x02farandole m {JSON}\n", b"[1] \x02farandole m {JSON}\n"),
        (b"[0] \x02farandole m " + b"[" * 99999 + b"\n", b"[0] \x02farandole m " + b"[" * 99999 + b"\n"),
    ],
)
def test_what_a_rank_tells_is_taken_out_of_its_output(line: bytes, rest: bytes) -> None:
    reports = Reports("m", {})
    report = b'{"number": 0, "told": ["uses torch"], "status": 0}'
    assert reports.take(line.replace(b"{JSON}", report)) == rest.replace(b"{JSON}", report)
    assert len(reports.said) == (b"farandole" not in rest)


def test_the_head_learns_of_ranks_that_wait_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(main, "PATIENCE", 0)
    reported: list[Any] = []
    with main.meeting(str(tmp_path / "folder")) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
        sender.connect(listener.getsockname())
        told = main.Told(listener, lambda **said: reported.append(said), None)
        dead = 1 << 30
        own = os.getpid()
        messages = {f"enters X 2 {own}": 1, "uses torch": 1, f"enters Y 1 {dead}": 1, f"leaves X 2 {own}": None}
        for message, again in messages.items():
            sender.send(message.encode())
            told.hear()
            assert told.watch() == again
    assert reported == [{"waits": [[2, "X", 0]], "left": []}, {"waits": [], "left": [(2, "X")]}]
    assert told.words == {"uses torch"}
    assert not (tmp_path / "folder").exists()


def test_a_rank_tells_that_it_goes_to_meet_others(tmp_path: Path) -> None:
    module = tmp_path / "torch/distributed/distributed_c10d.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    module.write_text("def init_process_group(): raise ValueError\ndef get_world_size(): return 2\n")
    script = "from torch.distributed.distributed_c10d import init_process_group as meet; meet()"
    with main.meeting(str(tmp_path / "folder")) as listener:
        own = {"PYTHONPATH": f"{main.HOOK}:{tmp_path}", "FARANDOLE_MEETING": listener.getsockname(), "RANK": "4"}
        assert subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **own}, stderr=subprocess.DEVNULL, check=False
        ).returncode
        heard = [listener.recv(256).decode() for _ in range(3)]
    # Nobody has met if it failed.
    patterns = ("uses torch", r"enters torch\.distributed 4 \d+", r"leaves torch\.distributed 4 \d+")
    assert all(re.fullmatch(*pair) for pair in zip(patterns, heard, strict=True)), heard


def test_a_process_that_cannot_be_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, kill = f"test-{os.getpid()}", os.kill
    monkeypatch.setattr(reap, "LEFT", 0)
    monkeypatch.setattr(reap, "GONE", 0.5)
    processes = [subprocess.Popen(["sleep", "60"], env={**os.environ, reap.MARK: mark}) for _ in range(2)]
    monkeypatch.setattr(os, "kill", lambda number, how: kill(number, how if number == processes[0].pid else 0))
    try:
        assert sorted(reap.kill(mark)) == ["!sleep", "sleep"]
    finally:
        kill(processes[1].pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def test_a_folder_that_a_killed_rank_left_is_removed(tmp_path: Path) -> None:
    mark = f"test-{os.getpid()}"
    own, other = (Path(main.FOLDER.format(mark, name)) for name in "ab")
    own.mkdir()
    (own / "meeting").touch()
    (tmp_path / "meeting").touch()
    other.symlink_to(tmp_path)
    try:
        assert reap.kill(mark) == []
        assert not own.exists()
        assert (tmp_path / "meeting").exists()
    finally:
        other.unlink()


def test_ranks_that_meet_at_once_leave_the_lines_of_the_program_whole(tmp_path: Path) -> None:
    module = tmp_path / "torch/distributed/distributed_c10d.py"
    module.parent.mkdir(parents=True)
    module.write_text("def init_process_group(): pass\ndef get_world_size(): return 3\n")
    script = (
        "import os, sys, time, torch.distributed.distributed_c10d as d; print('a', end='', flush=True); "
        "os.environ.update(MASTER_ADDR=sys.argv[1], MASTER_PORT='5'); "
        "d.init_process_group(); time.sleep(0.3); print('b')"
    )
    ways = {"node-1": {"met torch.distributed 3", "at 5"}, "::1": {"met torch.distributed@node 3"}}
    for address, told in ways.items():
        done, said = started(tmp_path, sys.executable, "-c", script, address)
        assert (done.stdout, done.stderr) == ("ab\n", "")
        assert {*said[1]["told"]} - {"uses torch", "reads"} == told


@pytest.mark.parametrize(
    ("waits", "left", "seconds", "missing"),
    [
        ({0: 30, 1: 9}, [], 20, "rank 2 on node-2 has not met the others through X"),
        ({0: 30}, [], 20, "rank 1 on node-1, rank 2 on node-2 have not met the others through X"),
        ({0: 30}, [[1, "X"]], 20, "rank 2 on node-2 has not met the others through X"),
        ({0: 30}, [[1, "Y"], [2, "X"]], 20, "rank 1 on node-1 has not met the others through X"),
        ({0: 30, 1: 9, 2: 9}, [], 20, "all ranks wait for each other through X"),
        ({0: 30, 1: 9}, [], 60, ""),
        ({}, [[0, "X"]], 0, ""),
    ],
)
def test_a_rank_that_keeps_the_others_waiting_is_named(
    waits: dict[int, int], left: list[Any], seconds: int, missing: str
) -> None:
    reports = Reports("m", {})
    report = {"number": 0, "waits": [[rank, "X", waited] for rank, waited in waits.items()], "left": left}
    assert reports.take(b"[0] \x02farandole m " + json.dumps(report).encode() + b"\n") == b""
    assert not reports.said
    assert reports.missing(SLOTS, seconds) == missing
    # Whoever has ended waits no longer.
    reports.take(b'[0] \x02farandole m {"number": 0, "told": [], "status": 0}\n')
    assert reports.missing(SLOTS, 0) == ""


@pytest.mark.parametrize(
    "waits", ['[[Infinity, "X", 9]]', '[[0, "X\\nY", 9]]', '[[0, "X"]]', "[0]", "1", "[[0, 1, 9]]"]
)
def test_a_report_that_cannot_be_is_output(waits: str) -> None:
    line = b'[0] \x02farandole m {"number": 0, "waits": %s}\n' % waits.encode()
    assert Reports("m", {}).take(line) == line


def test_who_was_late_is_no_cause_of_what_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, now = Reports("m", {}, {0: {(0, "X"): 0.0}}, {(0, "X")}), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert reports.still("rank 1", SLOTS, 20) == "rank 1"
    # They have met. Whoever has given up waiting ends a little later.
    reports.waits.clear()
    now[0] += 19
    assert reports.still("rank 1", SLOTS, 20) == "rank 1"
    now[0] += 2
    assert reports.still("rank 1", SLOTS, 20) == ""


def test_of_many_that_are_missing_some_are_named() -> None:
    reports = Reports("m", {}, {0: {(0, "X"): time.monotonic() - 30}}, {(0, "X")})
    assert "rank 5 on node-1 and 3 more have not" in reports.missing({"node-1": 9}, 20)


def test_a_free_port_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HERE", "here")
    assert launch.free_port("here") in range(*launch.PORTS)


@pytest.mark.parametrize(
    ("ports", "apart"),
    [([["1"], ["2"]], True), ([["1"], ["1"]], False), ([["1", "2"], ["2", "1"]], False), ([["1"], []], False)],
)
def test_groups_that_are_apart_are_not_one_of_all_ranks(ports: list[list[str]], apart: bool) -> None:
    told = [["uses torch", "met torch.distributed 2", *(f"at {port}" for port in each)] for each in ports]
    assert judged(*told)[0].startswith("they met in groups") == apart
    assert judged(*told, nodes=1) == ("", "")
    # A program may have others besides, such as one of each node.
    assert judged(*([*words, "met Horovod 2"] for words in told)) == ("", "")
    # Whoever imports mpi4py has met the others through MPI, and may not know it.
    by_mpi = judged(*([*words, "uses mpi4py", "met MPI 2"] for words in told))
    assert by_mpi[0].startswith("they met in groups") == apart


def test_ranks_that_are_alone_are_no_groups() -> None:
    told = [["uses torch", "met torch.distributed 1", f"at {port}"] for port in (1, 2)]
    assert judged(*told)[0] == "in each of them torch.distributed knew of one rank"


def test_one_program_is_started_that_serves_people() -> None:
    programs = (["jupyter", "lab"], ["env", "A=1", "/usr/bin/tensorboard"], ["env", "A=1"], ["python", "jupyter"])
    assert [*map(launch.only, programs)] == [1, 1, 0, 0]


def test_the_place_of_each_rank() -> None:
    assert [place(rank, SLOTS) for rank in (0, 2)] == [Place(0, 3, 0, 2, 0), Place(2, 3, 0, 1, 1)]


def test_a_rank_keeps_the_paths_that_it_inherits(tmp_path: Path) -> None:
    shown = "echo $PYTHONPATH $LD_LIBRARY_PATH"
    done, _ = started(tmp_path, "sh", "-c", shown, PYTHONPATH="/a:/b", LD_LIBRARY_PATH="/c")
    python, libraries = done.stdout.split()
    assert python.endswith("/rank/hook:/a:/b")
    assert libraries.startswith("/c:")
    # Of the job's stack, unless this node lacks it.
    for stack, used in ((str(tmp_path), tmp_path), (f"{tmp_path}/none", "/opt/farandole/current")):
        done, _ = started(tmp_path, "sh", "-c", shown, FARANDOLE_STACK=stack)
        assert done.stdout.split()[-1].endswith(f"{used}/mpi/lib")
    done, _ = started(tmp_path, "env", "PYTHONPATH=/d", "sh", "-c", shown)
    assert re.match(r"\S+/rank/hook:/d ", done.stdout)
    done, _ = started(tmp_path, "env", "echo", "PYTHONPATH=/d")
    assert done.stdout == "PYTHONPATH=/d\n"
