"""The command line: replies at once, says what is wrong in one sentence, touches nothing it was not asked to."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.__main__ import main, output_is_closed
from launch.cli import parse
from launch.commands.resume import refuse_other_lag
from launch.commands.run import default_folder
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from protocol.access.keys import load_actor_key
from shared.config.load import config_from_json
from shared.errors import ConfigError, UserError
from shared.run.run_dir import RunDir
from tests.support.run_files import write_run

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    *("run", "resume", "replay", "eval", "compare", "export", "key", "invite", "generate", "doctor", "data", "verify"),
    *("curriculum", "show", "report", "watch", "ui"),
)
WITH_MODULES = """
import sys
from launch.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(f"code={code} torch={'torch' in sys.modules}", file=sys.stderr)
"""


def launch(*argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, as a person calls it."""
    command = [sys.executable, "-c", WITH_MODULES, *argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Exit 2 and exactly one line on stderr, none on stdout."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").strip()


# --- what a reply needs


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--help",), 0),
        (("run", "--help"), 0),
        (("run", "--dry-run"), 0),
        (("run", "--set", "optimizer.lrr=1"), 2),
        (("run", "no-such-preset"), 2),
        (("resume", "no-such-folder"), 2),
        (("doctor", "--help"), 0),
        (("export", "--help"), 0),
        (("compare", "no-such-folder", "x"), 2),
        (("export", "no-such-folder", "--out", "x"), 2),
        (("doctor", "--set", "optimizer.lrr=1"), 2),
    ],
)
def test_replies_without_torch_whose_import_alone_takes_seconds(argv: tuple[str, ...], code: int) -> None:
    if "--dry-run" in argv:
        launch(*argv)  # The first one measures this machine.
    done = launch(*argv)
    assert f"code={code} torch=False" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse([command, "--help"])
    assert end.value.code == 0
    assert f"launch {command}" in capsys.readouterr().out


# --- bad input


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["run", "--sed", "3"], "--sed"),
        (["run", "no-such-preset"], "no preset and no file named 'no-such-preset'"),
        (["run", "--set", "optimizer.lrr=1"], "did you mean 'optimizer.lr'?"),
        (["run", "--set", "optimizer.lr"], "expected section.key=value"),
        (["run", "--set", "optimizer.lr=fast"], 'optimizer.lr = "fast" is not allowed'),
        (["run", "--steps", "0"], "run.steps = 0 is not allowed"),
        (["run", "--steps", "many"], 'run.steps = "many" is not allowed'),
        (["run", "--seed", "-1"], "run.seed = -1 is not allowed"),
        (["doctor", "no-such-preset"], "no preset and no file named 'no-such-preset'"),
        (["doctor", "--steps", "3"], "--steps"),
        (["resume"], "DIR"),
        (["resume", "no-such-folder"], "no-such-folder is not a run directory"),
        (["resume", "x", "--steps", "0"], "got '0', expected a whole number of at least 1"),
        (["resume", "x", "--on-fault", "ignore"], "'ignore'"),
        (["replay", "no-such-folder"], "no-such-folder is not a run directory"),
        (["replay"], "--batch"),
        (["replay", "x", "--batch", "y"], "not allowed with"),
        (["replay", "--batch", "no-such-file"], "no-such-file cannot be read"),
        (["eval", "no-such-folder"], "no-such-folder is not a run directory"),
        (["eval", "x", "--base", "--checkpoint", "3"], "not allowed with"),
        (["compare", "x"], "required: B"),
        (["compare", "no-such-folder", "y"], "no-such-folder is not a run directory"),
        (["export", "x"], "--out"),
        (["export", "x", "--as", "onnx", "--out", "y"], "'onnx'"),
        (["export", "no-such-folder", "--out", "y"], "no-such-folder is not a run directory"),
        (["eval", "x", "--problems", "-3"], "got '-3', expected a whole number"),
        (["generate", "no-such-folder", "--prompt", "x"], "no-such-folder is not a run directory"),
        (["generate"], "--prompt --in --chat is required"),
        (["generate", "--chat", "--out", "x"], "--out does not go with --chat"),
        (["generate", "--prompt", "x", "--out", "."], "got '.', expected a file in an existing folder"),
        (["verify", "--in", "x", "--out", "no/y"], "got 'no/y', expected a file in an existing folder"),
        (["report", "x", "--out", "no/y"], "got 'no/y', expected a file"),
        (["generate", "x", "--base", "--checkpoint", "3", "--chat"], "not allowed with"),
        (["generate", "--prompt", "x", "--in", "y"], "not allowed with"),
        (["generate", "--prompt", "x", "--temperature", "nan"], "got 'nan', expected a number from 0 to 100"),
        (["generate", "--prompt", "x", "--greedy", "--temperature", "1"], "not allowed with"),
        (["generate", "--in", "no-such-file"], "no-such-file"),
        (["run", "--json"], "--json prints the plan of --dry-run"),
        (["run", "--prepare", "--dry-run"], "give one of them"),
        (["generate", "--checkpoint", "3", "--prompt", "x"], "no run was given"),
        (["report", "x", "--megabytes", "3"], "add --bundle DIR"),
        (["export", "x", "--out", "y", "--dtype", "fp32"], "add --as merged"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(argv, capsys)


def test_a_broken_config_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[run\nsteps = 3\n")
    assert f"{file} is not valid TOML" in refused(["run", str(file)], capsys)


def test_out_that_holds_a_run_or_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--prepare", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    before = (tmp_path / "run" / "config.json").read_bytes()
    assert "a run that has not begun" in refused(["run", "--out", str(tmp_path / "run"), "--steps", "3"], capsys)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert "is not empty" in refused(["run", "--out", str(tmp_path)], capsys)


def test_out_below_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    sentence = refused(["run", "--out", str(out)], capsys)
    assert sentence.startswith(f"{out} cannot be ")
    assert "choose an --out" in sentence


def test_a_python_without_libraries_says_what_to_do() -> None:
    # -S: without site-packages, as before any installation.
    done = subprocess.run([sys.executable, "-S", "-m", "launch", "run"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lacks msgspec and torch; in a clone use .venv/bin/python" in done.stderr and done.stderr.count("\n") == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--version"], "tandem")
    assert end.value.code == 0
    assert re.fullmatch(r"tandem \d+\.\d+\.\d+\n", capsys.readouterr().out)


# --- run


def test_dry_run_prints_the_plan_and_creates_nothing(tmp_path: Path) -> None:
    done = launch("run", "--dry-run", "--out", "here", "--steps", "3", "--seed", "7", cwd=tmp_path)
    assert "run.steps = 3" in done.stdout
    assert "run.seed = 7" in done.stdout
    assert "run directory  here" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["run", "embedded", "--dry-run"], ["doctor", "embedded"]])
def test_output_that_nobody_reads_ends_without_a_traceback(words: list[str]) -> None:
    argv = [sys.executable, "-u", "-m", "launch", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_interrupt_while_the_first_modules_load_ends_without_a_traceback(tmp_path: Path) -> None:
    hook = """
import os, signal, sys
class AtFirstImport:
    def find_spec(self, name, *_):
        if name == "launch.cli":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtFirstImport())
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    done = subprocess.run(
        [sys.executable, "-m", "launch", "run"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_while_somebody_reads_a_broken_pipe_is_one_of_our_own() -> None:
    assert not output_is_closed()


def test_steps_and_seed_win_over_set(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(out), "--set", "run.steps=9", "--steps", "5", "--seed", "7"]) == 0
    config = config_from_json((out / "config.json").read_bytes())
    assert (config.run.steps, config.run.seed) == (5, 7)


def test_prepare_makes_config_and_keys_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(out)]) == 0
    assert f"launch resume {out}" in capsys.readouterr().out
    assert json.loads((out / "run.json").read_bytes())["run_id"]
    keys = out / "keys"
    assert {file.name for file in keys.iterdir()} == {"learner.json", "actor0.json", "allowed"}
    assert {file.stat().st_mode & 0o777 for file in keys.rglob("*.json")} == {0o600}
    assert list((out / "logs").iterdir()) == []


def test_a_key_for_one_more_actor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "--prepare", "--out", str(out), "--set", "link.endpoint=tcp://box:5757"]) == 0
    capsys.readouterr()
    assert main(["key", str(out), "gpu-box"]) == 0
    told = capsys.readouterr().out
    assert f"python -m actor --run {out} --id gpu-box" in told
    assert "python -m actor --connect tcp://box:5757 --key gpu-box.json --config config.json" in told
    assert f"keys {out} --revoke gpu-box" in told
    assert load_actor_key(out / "keys" / "gpu-box.json").actor_id == "gpu-box"
    assert "gpu-box.json exists" in refused(["key", str(out), "gpu-box"], capsys)
    assert "is not a name for an actor" in refused(["key", str(out), "a/b"], capsys)


def test_the_default_folder_names_preset_and_time() -> None:
    from datetime import datetime

    assert default_folder("embedded", datetime(2026, 1, 2, 3, 4, 5)) == Path("runs/embedded-20260102-030405")
    assert default_folder("mine/my.toml", datetime(2026, 1, 2)).name.startswith("my-")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
@pytest.mark.parametrize("command", ["eval", "curriculum", "doctor"])
def test_a_reward_function_does_not_see_the_environment_of_the_command_that_runs_it(command: str) -> None:
    code = f"""
import ctypes
from launch.__main__ import main
print(main(["{command}", "no/such/place"]), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 0\n"


# --- resume


def finished_run(path: Path, *keys: str) -> RunDir:
    """A run of 40 steps that is done. keys: for --set."""
    assert main(["run", "--prepare", "--out", str(path), *(word for key in keys for word in ("--set", key))]) == 0
    write_run(RunDir(path), status="done", rewards=[0.5] * 40, evaluated=("base", "final"))
    return RunDir(path)


def test_resuming_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    capsys.readouterr()
    assert main(["resume", str(run.path)]) == 0
    out = capsys.readouterr().out
    assert "is finished: all 40 steps are done" in out
    assert "--steps 80" in out
    assert list(run.logs.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder away")
def test_resume_says_whose_run_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    capsys.readouterr()
    assert main(["resume", str(run.path)]) == 0
    assert capsys.readouterr().err == ""
    os.chown(run.path, 12345, -1)
    assert main(["resume", str(run.path)]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {run.path} belongs to user 12345, and this is user 0: ") and said.count("\n") == 1


def test_resume_never_takes_steps_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    capsys.readouterr()
    before = run.config.read_bytes()
    assert "has done 40 already; give a larger number" in refused(["resume", str(run.path), "--steps", "30"], capsys)
    words = ["resume", str(run.path), "--steps", "80", "--actors", "2", "--resample-step", "999"]
    assert "--resample-step got 999" in refused(words, capsys) and not (run.keys / "actor1.json").exists()
    assert run.config.read_bytes() == before


def test_what_a_run_that_was_killed_has_done_is_in_its_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run")
    write_run(run, status="running", rewards=[], evaluated=())
    CheckpointStore(run.checkpoints, 3).save(Checkpoint(step=30, files={}))
    before = run.config.read_bytes()
    capsys.readouterr()
    for steps in ("20", "30"):
        assert "has done 30 already; give a larger number" in refused(
            ["resume", str(run.path), "--steps", steps], capsys
        )
    assert run.config.read_bytes() == before


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("curriculum.kind=levels", "its stages share 40 steps"),
        ("pipeline.max_lag=2", "has done 40 of 40 steps with pipeline.max_lag = 2"),
    ],
)
def test_resume_refuses_other_steps_where_a_replay_would_go_another_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    run = finished_run(tmp_path / "run", key)
    CheckpointStore(run.checkpoints, 3).save(Checkpoint(step=40, files={}))
    capsys.readouterr()
    before = run.config.read_bytes()
    said = refused(["resume", str(run.path), "--steps", "80"], capsys)
    assert words in said and "begin a new run with run.steps=80" in said
    assert run.config.read_bytes() == before


def test_a_lag_may_go_on_where_the_end_was_not_near() -> None:
    refuse_other_lag(Path("run"), steps=80, planned=40, done=38, max_lag=2)
    refuse_other_lag(Path("run"), steps=80, planned=40, done=40, max_lag=0)
    refuse_other_lag(Path("run"), steps=39, planned=40, done=38, max_lag=9)
    with pytest.raises(ConfigError, match="has done 39 of 40 steps"):
        refuse_other_lag(Path("run"), steps=80, planned=40, done=39, max_lag=2)


def test_a_run_that_was_only_prepared_may_have_other_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    keys = ["optimizer.schedule=cosine", "pipeline.max_lag=2", "curriculum.kind=levels"]
    assert main(["run", "--prepare", "--out", str(out), *(word for key in keys for word in ("--set", key))]) == 0
    capsys.readouterr()
    resume = ["resume", str(out), "--steps", "80", "--actors", "9999"]
    # The steps are looked at first.
    assert "--actors got 9999" in refused(resume, capsys)
    (RunDir(out).journal / "000001.log").touch()
    assert "followed a 'cosine' schedule of 40 steps" in refused(resume, capsys)


def test_resume_of_a_run_in_use_is_refused_before_anything_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run")
    capsys.readouterr()
    before = run.config.read_bytes()
    with run.locked():
        assert f"is in use by process {os.getpid()}" in refused(["resume", str(run.path), "--steps", "80"], capsys)
    assert run.config.read_bytes() == before


def test_a_configuration_that_was_edited_wrongly_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run")
    capsys.readouterr()
    run.config.write_bytes(run.config.read_bytes().replace(b'"steps": 40', b'"steps": 0'))
    assert "run.steps = 0 is not allowed" in refused(["resume", str(run.path)], capsys)


def test_our_own_parser_raises_instead_of_leaving() -> None:
    with pytest.raises(UserError, match="--help"):
        parse(["resume"])
