"""Every option of PBS is translated, refused with a sentence, or named in a note."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.node import mounts
from farandole.node.qsub import main, options, qdel, submit, translate
from farandole.node.qsub.options import RefusedError, Submission

from .prefix import program

QSUB = "from farandole.node.qsub.main import main; raise SystemExit(main())"
ENVIRONMENT = {"HOME": "/home/ana", "PATH": "/opt/bin:/usr/bin", "SET": "here", "LANG": "C.UTF-8"}
GUIDE = b"""#!/bin/sh
#PBS -N test
#PBS -V
#PBS -l select=4:ncpus=68:mpiprocs=1:ompthreads=68
#PBS -q normal
#PBS -l walltime=04:00:00
#PBS -A caffe

cd $PBS_O_WORKDIR
"""


def job_of(*arguments: str, script: bytes = b"#!/bin/bash\ntrue\n", name: str = "job.sh", **more: str) -> Submission:
    given, rest = options.options_of([*arguments], options.COMMAND_LINE)
    return main.prepare(Submission(script, name, "/work dir", {**ENVIRONMENT, **more}, rest), given)


def refusal(*arguments: str, script: bytes = b"#!/bin/bash\ntrue\n") -> str:
    with pytest.raises(RefusedError) as caught:
        job_of(*arguments, script=script)
    return str(caught.value)


def test_the_guides_script_is_translated_as_it_stands() -> None:
    job = job_of(script=GUIDE)
    command = submit.command_of(job)
    assert command[:4] == ["/usr/bin/sbatch", "--parsable", "--ignore-pbs", "--export=ALL"]
    assert command[-1] == "/dev/stdin"
    assert {*command[4:-1]} == {
        "--job-name=test", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--cpus-per-task=68", "--time=04:00:00",
        "--output=/work dir/test.o%j", "--error=/work dir/test.e%j", "--partition=normal", "--account=caffe",
    }  # fmt: skip
    environment = submit.environment_of(job)
    assert environment["SET"] == "here"
    assert environment["PBS_O_WORKDIR"] == "/work dir"
    assert (environment["OMP_NUM_THREADS"], environment["NCPUS"]) == ("68", "68")
    assert json.loads(environment["FARANDOLE_PBS"])["interpreter"] == ["/bin/bash", "--posix"]
    # Only the first line differs.
    assert submit.submitted(job.script).splitlines()[1:] == GUIDE.splitlines()[1:]
    assert [note for note in job.notes if "POSIX" in note]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["-l", "select=2:ncpus=1:mpiprocs=1:ompthreads=1"], {"nodes": 2, "ntasks": 2, "cpus-per-task": 1}),
        (["-l", "select=2:ncpus=8:mpiprocs=4"], {"nodes": 2, "ntasks": 8, "ntasks-per-node": 4, "cpus-per-task": 2}),
        (["-l", "select=3"], {"nodes": 3, "ntasks": 3, "ntasks-per-node": 1, "cpus-per-task": 1}),
        (["-l", "walltime=100:00:00"], {"nodes": 1, "ntasks": 1, "time": "100:00:00"}),
        (["-A", "caffe"], {"account": "caffe"}),
        (["-q", "normal"], {"partition": "normal"}),
        (["-o", "out"], {"output": "/work dir/out", "error": "/work dir/job.sh.e%j"}),
        (["-o", "/logs/100%"], {"output": "/logs/100%%"}),
        (["-o", "/100%/x"], {"output": "/100%%/x"}),
        (["-o", "logs/"], {"output": "/work dir/logs/job.sh.o%j"}),
        (["-o", "/usr"], {"output": "/usr/job.sh.o%j"}),
        (["-N", "a.b-c_d+1"], {"job-name": "a.b-c_d+1", "output": "/work dir/a.b-c_d+1.o%j"}),
        (["-N", "9lives"], {"job-name": "9lives"}),
        (["-j", "oe"], {"output": "/work dir/job.sh.o%j", "error": None}),
        (["-j", "eo"], {"output": "/work dir/job.sh.e%j", "error": None}),
    ],
)
def test_options(arguments: list[str], wanted: dict[str, object]) -> None:
    job = job_of(*arguments)
    assert {name: job.options.get(name) for name in wanted} == wanted
    assert not job.notes


def test_a_file_that_joined_output_leaves_empty_is_named() -> None:
    assert job_of("-j", "oe", "-e", "x").notes == ["command line: -e x: has no effect with command line: -j oe"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-l", "select=1:ncpus=2+1:ncpus=4"], "Slurm gives all nodes of a job the same"),
        (["-l", "select=2:ncpus=1:bigmem=true"], "Slurm gives all nodes of a job the same"),
        (["-l", "select=1:ncpus"], "Slurm gives all nodes of a job the same"),
        (["-l", "select=0"], "write select=N"),
        (["-l", "select=1:ncpus=1:mpiprocs=4"], "write ncpus=4"),
        (["-l", "select=1:ncpus=7:mpiprocs=2"], "write ncpus=8"),
        (["-l", "select=1", "-l", "mem=1gb"], "-l mem=1gb: cannot be translated to Slurm: add  #SBATCH --mem=8G"),
        (["-l", "select=1:ngpus=2"], "#SBATCH --mem=8G, --gpus-per-node=G, --nodelist=NODE"),
        (["-l", "nodes=2:ppn=4"], "write -l select=N:ncpus=P:mpiprocs=P"),
        (["-l", "select=$(reboot)"], "write select=N"),
        (["-l", "walltime=90"], "write HH:MM:SS"),
        (["-l", "walltime=4h"], "write HH:MM:SS"),
        (["-l", "walltime=0"], "leave it out for the queue's limit"),
        (["-l", "fluent=2"], "add  #SBATCH OPTION"),
        (["-l", "N=x"], "add  #SBATCH OPTION"),
        (["-l", "place=pack"], "each chunk gets a node of its own"),
        (["-A", "a b"], "not an account name"),
        (["-q", "--help"], "not a queue name"),
        (["-q", "normal@head"], "without @SERVER"),
        (["-j", "both"], "write oe or eo"),
        (["-o", "a\nb"], "write the path in full"),
        (["-o", "a\\b"], "write the path in full"),
        (["-o", "$HOME/x"], "write the path in full"),
        (["-o", "~/x"], "write the path in full"),
        (["-e", "host:/e"], "write the path in full"),
        (["-Z"], "-Z not recognized; qsub --help"),
    ],
)
def test_refusals(arguments: list[str], why: str) -> None:
    assert why in refusal(*arguments)


@pytest.mark.parametrize("letter", sorted({*options.LETTERS} - {":", "l"}))
def test_every_option_is_in_the_help_or_refused_by_name_with_what_to_use_instead(letter: str) -> None:
    value = ["1"] if f"{letter}:" in options.LETTERS else []
    if letter in translate.FORMS:
        assert re.search(rf"(^|[ ,])-{letter}\b", str(main.__doc__), re.MULTILINE)
    else:
        cure = translate.INSTEAD.get(letter, translate.OTHER)
        refused = f"-{' '.join([letter, *value])}: cannot be translated to Slurm: {cure}"
        assert refusal(f"-{letter}", *value) == f"command line: {refused}"


@pytest.mark.parametrize(
    "name", ["a b", "a;b", "$(reboot)", "`id`", "a\nb", "../x", "a/b", "-x", ".x", "", "n" * 231, "ü", "a%j", "a\\b"]
)
def test_hostile_names_are_refused(name: str) -> None:
    assert "write 1 to 230 letters" in refusal("-N", name)


def test_a_scripts_hostile_file_name_becomes_a_safe_one() -> None:
    assert job_of(name="--x; $(id)\n.sh").options["job-name"] == "x____id__.sh"
    assert job_of(name="-").options["job-name"] == "STDIN"


def test_options_are_found_however_long_the_script_is() -> None:
    comments = b"# words\n" * 200
    script = b"#!/bin/bash\n" + comments + b"#PBS -N late\n" + b"true\n" * 200 + b"#PBS -N later\n"
    job = job_of(script=script)
    assert job.name == "late"
    assert job.notes == ["line 403: #PBS after the first command has no effect; move it up"]


def test_the_command_line_beats_the_script_and_there_the_last_one_counts() -> None:
    script = b"#!/bin/bash\n#PBS -N one -l walltime=1:00:00\n#PBS -l select=1:ncpus=2 -A one\n"
    job = job_of("-N", "two", "-l", "walltime=0:30", "-A", "two", script=script)
    assert job.name == "two"
    assert {"time": "0:30", "cpus-per-task": 2, "account": "two"}.items() <= job.options.items()
    assert job.notes == []
    job = job_of(script=b"#PBS -N one\n#PBS -N two\n")
    assert (job.name, job.notes) == ("two", ["line 2: -N two: replaces line 1: -N one"])


def test_lines_that_only_look_like_options_are_named() -> None:
    job = job_of(
        script=b"#!/bin/bash\n# PBS -N a\n#pbs -N b\n#SBATCH -n 4\n##PBS -N c\n#PBSPRO\n: \n\n#PBS -N d # e\ntrue\n"
    )
    assert job.name == "d"
    assert [note.partition(":")[0] for note in job.notes] == ["line 2", "line 3"]


def test_everything_that_is_refused_is_said_at_once_with_its_line() -> None:
    text = refusal("-p", "5000", script=b"#!/bin/bash\n#PBS -N a b\n#PBS -l walltime=x\n#PBS -N 'a b'\n#PBS -I\n")
    for line in (" 2: qsub cannot read 'b'", " 3: -l walltime=x", " 4: -N 'a b'", " 5: -I", ": -p"):
        assert f"line{line}" in text
    assert "empty" in refusal(script=b" \n")
    assert "quote" in refusal(script=b"#PBS -N 'x\n")


def test_variables_are_those_of_a_login_unless_all_are_asked_for() -> None:
    environment = submit.environment_of(job_of(BASH_ENV="/x"))
    assert environment["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert environment["PBS_O_PATH"] == "/opt/bin:/usr/bin"
    assert not {"BASH_ENV", "SET"} & environment.keys()
    # Nothing of these passes through the command line.
    words = {*submit.command_of(job_of("-V"))} - {"--export=ALL"}
    assert not [text for text in words if "export" in text or "here" in text]


def test_variables_of_slurm_and_of_another_job_do_not_pass() -> None:
    job = job_of("-V", SLURM_JOB_ID="7", SBATCH_PARTITION="x", PBS_JOBID="7", SLURM_CONF="/c")
    environment = submit.environment_of(job)
    assert not environment.keys() & {"SLURM_JOB_ID", "SBATCH_PARTITION", "PBS_JOBID"}
    assert (environment["SLURM_CONF"], environment["SET"]) == ("/c", "here")
    assert json.loads(environment["FARANDOLE_PBS"])["keep"] == "all"


def test_threads_of_the_shell_count_unless_the_job_says_otherwise() -> None:
    assert submit.environment_of(job_of("-V", OMP_NUM_THREADS="3"))["OMP_NUM_THREADS"] == "3"
    assert submit.environment_of(job_of("-l", "select=1:ncpus=4", OMP_NUM_THREADS="3"))["OMP_NUM_THREADS"] == "4"
    chosen = job_of("-V", "-l", "select=1:ncpus=4:ompthreads=2", OMP_NUM_THREADS="3")
    assert submit.environment_of(chosen)["OMP_NUM_THREADS"] == "2"


def test_it_submits_once_and_prints_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    does = 'for last; do :; done; echo "$PBS_O_WORKDIR, $last"; cat /dev/stdin; echo $FAIL >&2; exit ${FAIL:-0}'
    monkeypatch.setattr(submit, "SBATCH", program(tmp_path / "sbatch", does))
    assert submit.submit(job_of("--", "a b", script=b"#!/bin/bash\necho word\n")) == 0
    assert capfd.readouterr().out == f"/work dir, a b\n#!{submit.PBS_JOB}\necho word\n"
    assert submit.submit(job_of("-V", "-q", "x", FAIL="3")) == 3
    assert capfd.readouterr().err == "3\n"


@pytest.mark.parametrize(
    ("kinds", "here"), [("ext4", True), ("nfs4", False), ("autofs\\nnfs4", False), ("fuse.sshfs", False), ("", True)]
)
def test_it_knows_which_folders_are_on_this_machine_alone(
    kinds: str, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "findmnt", f"printf '{kinds}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert submit.only_here("/srv/x") is here
    monkeypatch.undo()
    assert submit.only_here("/usr/bin/gone/x")
    assert not submit.only_here("/dev/null")


@pytest.mark.parametrize(("shared", "noted"), [("", True), ("bob\nana\n", False), ("bob\n", True)])
def test_a_home_that_all_nodes_mount_from_the_head_is_not_on_its_own_disk_alone(
    shared: str, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "SHARED", tmp_path / "home")
    if shared:
        (tmp_path / "home").write_text(shared)
    job = job_of("-o", "/home/ana/x", "-j", "oe", script=b"true\n")
    submit.warn_of_own_disk(job)
    assert any("is on this machine's own disk" in note for note in job.notes) is noted


def test_the_program_shows_a_refusal_without_control_characters(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_bytes(b"#PBS -N \x1b[2J -l \x1b[2J=1\ntrue\n")
    done = subprocess.run([sys.executable, "-c", QSUB, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "\x1b" not in done.stderr
    assert done.stderr.startswith("qsub: line 1: -N ")
    script.write_bytes(GUIDE)
    done = subprocess.run(
        [sys.executable, "-c", QSUB, "--show", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "/usr/bin/sbatch --parsable --ignore-pbs --export=ALL --job-name=test " in done.stdout
    assert "# OMP_NUM_THREADS=68\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("42", "42"), ("42.node-1", "42"), ("42[]", "42"), ("42[3]", "42_3"), ("42[3].node-1.example.org", "42_3"),
        ("42_3", "42_3"), ("42[0-8:2]", "42_[0-8:2]"),
    ],
)  # fmt: skip
def test_a_job_of_an_array_is_not_the_array(text: str, wanted: str) -> None:
    assert qdel.job_of(text) == wanted


@pytest.mark.parametrize("text", ["all", "42[x]", "42 43", "$(id)", "--me", "name", "42_", "42.3", ""])
def test_what_is_no_job_cancels_nothing(text: str) -> None:
    with pytest.raises(SystemExit, match="is not a job number"):
        qdel.job_of(text)


def test_a_job_that_the_queue_does_not_know_is_named_and_others_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = program(tmp_path / "scontrol", '[ "$3" != 7 ] || { echo gone >&2; exit 1; }')
    monkeypatch.setattr(qdel, "SCONTROL", asked)
    monkeypatch.setattr(qdel, "SCANCEL", program(tmp_path / "scancel", 'echo "cancelled $*"'))
    monkeypatch.setattr(sys, "argv", ["qdel", "7", "42[3].head"])
    assert qdel.main() == 1
    assert capfd.readouterr() == ("cancelled 42_3\n", "qdel: 7: gone\n")
