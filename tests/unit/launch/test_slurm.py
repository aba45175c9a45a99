"""launch/slurm: the batch scripts, run by bash with stand-ins for Python, scontrol and squeue.

benchmarks/slurm_requeue.py submits them to a real Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from launch.presets.load import load_config
from shared.config.load import apply_override, config_to_json, resolve

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "launch" / "slurm"
SCRIPTS = ("one_node.sbatch", "learner.sbatch", "actors.sbatch")
SECRET = "s3cr3t-of-the-key"
WAIT_S = 20.0

PYTHON = """\
#!/usr/bin/env bash
[[ $1 != -c ]] || exec {real} "$@"
echo "python $*" >>"$CALLS"
env >>"$CALLS.env"
if [[ $3 == key ]]; then
    (umask 077 && echo '{{"secret": "{secret}"}}' >"$4/keys/$5.json")
    exit
fi
trap 'echo TERM >>"$CALLS"; exit 0' TERM
touch "$CALLS.started"
until [[ -e $CALLS.code ]]; do sleep 0.02; done
exit "$(cat "$CALLS.code")"
"""
"""Notes how it was called and each TERM. Ends with the code that it is given, or 0 after TERM."""
SCONTROL = '#!/bin/sh\necho "scontrol $*" >>"$CALLS"\n'
SQUEUE = '#!/bin/sh\ncat "$CALLS.state"\n'
ANY_CLUSTER = "ClusterName=any\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=any Nodes=ALL\n"
"""Without one, sbatch has not even a help."""


class Job:
    """A batch script in a session of its own, as slurmd starts it."""

    def __init__(self, folder: Path, script: str, *words: str) -> None:
        programs = folder / "programs"
        programs.mkdir(exist_ok=True)
        fake = PYTHON.format(real=sys.executable, secret=SECRET)
        for name, text in {"python": fake, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.calls_file = folder / "calls"
        self.process = subprocess.Popen(
            ["bash", str(SLURM / script), *words],
            cwd=ROOT,
            env=os.environ
            | {
                "PATH": f"{programs}:{os.environ['PATH']}",
                "TANDEM_PYTHON": str(programs / "python"),
                "CALLS": str(self.calls_file),
                "SLURM_JOB_ID": "12345",
                "SLURM_ARRAY_TASK_ID": "3",
                "TANDEM_LOOK_EVERY_S": "0.05",
            },
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def let_end(self, code: int) -> None:
        """Its Python, with this code."""
        (self.calls_file.with_name("calls.code")).write_text(str(code))

    def wait_until_it_trains(self) -> None:
        wait_until(lambda: self.calls_file.with_name("calls.started").exists())

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, output


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a script; what is left of it is killed."""
    jobs: list[Job] = []

    def begin(script: str, *words: str) -> Job:
        jobs.append(Job(tmp_path, script, *words))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)


def made(folder: Path, status: str = "running", bind: str = "tcp://0.0.0.0:20001") -> Path:
    """The files of a run that the scripts read."""
    (folder / "run" / "keys").mkdir(parents=True)
    (folder / "run" / "config.json").write_text(json.dumps({"link": {"bind": bind}}))
    (folder / "run" / "summary.json").write_text(f'{{\n  "status": "{status}",\n  "steps": 3\n}}')
    return folder / "run"


def test_a_first_start_runs_and_passes_the_exit_code(tmp_path: Path, start: Callable[..., Job]) -> None:
    job = start("one_node.sbatch", str(tmp_path / "run"), "embedded", "--set", "loss.kind=two words")
    job.let_end(7)
    assert job.end()[0] == 7
    assert job.calls == [f"python -m launch run embedded --set loss.kind=two words --out {tmp_path}/run"]


def test_a_later_start_resumes(tmp_path: Path, start: Callable[..., Job]) -> None:
    job = start("one_node.sbatch", str(made(tmp_path)), "embedded", "--seed", "1")
    job.let_end(0)
    assert job.end()[0] == 0
    assert job.calls == [f"python -m launch resume {tmp_path}/run"]


@pytest.mark.parametrize(("status", "requeued"), [("stopped", ["scontrol requeue 12345"]), ("done", [])])
@pytest.mark.parametrize("script", ["one_node.sbatch", "learner.sbatch"])
def test_a_warning_stops_once_and_queues_again_what_is_not_finished(
    tmp_path: Path, start: Callable[..., Job], script: str, status: str, requeued: list[str]
) -> None:
    job = start(script, str(made(tmp_path, status)), "embedded")
    job.wait_until_it_trains()
    for _ in range(2):
        # To the shell alone, as --signal=B: does.
        os.kill(job.process.pid, signal.SIGUSR1)
    assert job.end()[0] == 0
    assert job.calls[1:] == ["TERM", *requeued]


@pytest.mark.parametrize("evaluated", [False, True])
def test_evaluations_that_are_left_to_the_next_start_queue_the_job_again(
    tmp_path: Path, start: Callable[..., Job], evaluated: bool
) -> None:
    run = made(tmp_path, "done")
    config = load_config("embedded", ["eval.beside=true", "eval.every=1"])
    (run / "config.json").write_bytes(config_to_json(config))
    if evaluated:
        (run / "eval").mkdir()
        (run / "eval" / "final.json").write_text("{}")
    job = start("one_node.sbatch", str(run), "embedded")
    job.wait_until_it_trains()
    os.kill(job.process.pid, signal.SIGUSR1)
    job.end()
    assert job.calls[1:] == (["TERM"] if evaluated else ["TERM", "scontrol requeue 12345"])


def test_a_signal_to_all_processes_is_not_passed_on(tmp_path: Path, start: Callable[..., Job]) -> None:
    """Slurm queues the job again by itself then, and a second TERM would stop the launcher at once."""
    job = start("one_node.sbatch", str(made(tmp_path, "stopped")), "embedded")
    job.wait_until_it_trains()
    os.killpg(job.process.pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 0, output
    assert job.calls[1:] == ["TERM"]


def test_the_learner_listens_where_others_can_join(tmp_path: Path, start: Callable[..., Job]) -> None:
    job = start("learner.sbatch", str(tmp_path / "run"), "embedded")
    job.let_end(0)
    job.end()
    words = job.calls[0].split()
    tree: dict[str, object] = {}
    for before, word in pairwise(words):
        if before == "--set":
            apply_override(tree, word)
    link = resolve(tree).link
    assert (link.bind, link.endpoint) == ("tcp://0.0.0.0:22345", "tcp://127.0.0.1:22345")


def queue(folder: Path, state: str) -> None:
    """What squeue says of the learner's job."""
    (folder / "calls.state").write_text(state)


def test_an_actor_joins_where_the_learner_is_with_a_key_that_only_a_file_has(
    tmp_path: Path, start: Callable[..., Job]
) -> None:
    run = made(tmp_path)
    queue(tmp_path, "RUNNING node7\n")
    job = start("actors.sbatch", str(run), "99")
    job.wait_until_it_trains()
    key, actor = job.calls
    assert key == f"python -m launch key {run} array3"
    assert re.fullmatch(
        rf"python -m actor --connect tcp://node7:20001 --key {run}/keys/array3.json --config /\S+/config.json", actor
    )
    (run / "summary.json").write_text('{\n  "status": "done"\n}')
    job.let_end(0)
    code, output = job.end()
    assert code == 0
    shown = output + "".join(job.calls) + (tmp_path / "calls.env").read_text()
    assert SECRET not in shown and SECRET in (run / "keys/array3.json").read_text()
    assert not Path(actor.split()[-1]).parent.exists(), "the copy of the configuration is left behind"


def test_an_actor_comes_back_to_a_learner_that_stopped(tmp_path: Path, start: Callable[..., Job]) -> None:
    run = made(tmp_path)
    queue(tmp_path, "RUNNING node7\n")
    job = start("actors.sbatch", str(run), "99")
    job.let_end(0)
    wait_until(lambda: sum("-m actor" in call for call in job.calls) >= 2)
    assert sum("launch key" in call for call in job.calls) == 1, "a key is made once"
    (run / "summary.json").write_text('{\n  "status": "done"\n}')
    assert job.end()[0] == 0


@pytest.mark.parametrize("state", ["PENDING n/a", "SUSPENDED node1", "REQUEUE_HOLD n/a"])
def test_an_actor_gives_its_node_back_while_the_learner_waits(
    tmp_path: Path, start: Callable[..., Job], state: str
) -> None:
    queue(tmp_path, state)
    job = start("actors.sbatch", str(made(tmp_path)), "99")
    assert job.end()[0] == 0
    assert job.calls == ["scontrol requeue 12345"]


@pytest.mark.parametrize("state", ["", "FAILED node1\n"])
def test_an_actor_ends_after_its_learner(tmp_path: Path, start: Callable[..., Job], state: str) -> None:
    queue(tmp_path, state)
    job = start("actors.sbatch", str(made(tmp_path)), "99")
    assert job.end()[0] == 0
    assert job.calls == []


@pytest.mark.parametrize(("code", "tries"), [(2, 1), (1, 5)])
def test_an_actor_that_fails_is_tried_again_unless_it_needs_a_fix(
    tmp_path: Path, start: Callable[..., Job], code: int, tries: int
) -> None:
    queue(tmp_path, "RUNNING node7\n")
    job = start("actors.sbatch", str(made(tmp_path)), "99")
    job.let_end(code)
    assert job.end()[0] == code
    assert sum("-m actor" in call for call in job.calls) == tries


def test_a_learner_that_nobody_can_reach_is_refused(tmp_path: Path, start: Callable[..., Job]) -> None:
    queue(tmp_path, "RUNNING node7\n")
    job = start("actors.sbatch", str(made(tmp_path, bind="")), "99")
    code, output = job.end()
    assert (code, job.calls) == (2, [])
    assert output.startswith("error: the learner of ") and output.count("\n") == 1


def test_a_warned_actor_stops_and_is_queued_again(tmp_path: Path, start: Callable[..., Job]) -> None:
    queue(tmp_path, "RUNNING node7\n")
    job = start("actors.sbatch", str(made(tmp_path)), "99")
    job.wait_until_it_trains()
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.end()[0] == 0
    wait_until(lambda: "TERM" in job.calls)
    assert "scontrol requeue 12345" in job.calls


@pytest.mark.parametrize("script", SCRIPTS)
def test_too_few_arguments_are_one_sentence(script: str, start: Callable[..., Job]) -> None:
    code, output = start(script, "runs/first").end()
    assert code == 2
    assert output.startswith("error: got 1 arguments, expected ") and output.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_another_folder_is_one_sentence(script: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", SLURM / script, "runs/first", "embedded"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.endswith(b"submit from the root of a clone of Tandem.\n") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_options_are_slurms_and_ask_for_a_requeue(script: str, tmp_path: Path) -> None:
    text = (SLURM / script).read_text(encoding="utf-8")
    assert os.access(SLURM / script, os.X_OK) and text.startswith("#!/usr/bin/env bash\n")
    lines = [line.removeprefix("#SBATCH --").split("=", 1) for line in text.splitlines() if "#SBATCH" in line]
    options = {line[0]: line[-1] for line in lines}
    assert {"requeue", "signal", "open-mode", "output"} <= set(options)
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    # Slurm stops reading options at the first command.
    assert text.rindex("#SBATCH") < text.index("\nif ")
    if shutil.which("sbatch"):
        (tmp_path / "slurm.conf").write_text(ANY_CLUSTER)
        environment = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
        shown = subprocess.run(["sbatch", "--help"], env=environment, capture_output=True, text=True, check=True).stdout
        # That help leaves out one option that its manual has.
        assert {option for option in options if f"--{option}" not in shown} <= {"open-mode"}


@pytest.mark.parametrize("script", [*SCRIPTS, "train.sh"])
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; apt-get install shellcheck")
    done = subprocess.run(["shellcheck", "-x", SLURM / script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", [*SCRIPTS, "train.sh"])
def test_no_key_is_read_or_passed(script: str) -> None:
    """Keys are named by their files; nothing prints one, or takes one from the environment."""
    text = (SLURM / script).read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    assert not re.search(r"secret|token|password|\bexport\b|--invitation|cat .*keys", code, re.IGNORECASE)
    assert {line for line in code.splitlines() if "keys/" in line and "--key " not in line} <= {
        '    [[ -e $run/keys/$name.json ]] || "$python" -m launch key "$run" "$name" || return'
    }
