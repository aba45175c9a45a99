"""What a page with `--control` may be asked to do: only what it is for, with checked values, and never without it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `ui`")
pytest.importorskip("uvicorn", reason="needs the extra `ui`")

from launch.ui.control import Chat, Control, Evaluate, Train, learner_of
from launch.ui.jobs import MOST_BYTES, MOST_ENDED, MOST_RUNNING, Command, Job, Jobs, Kind
from launch.ui.keys import described
from launch.ui.runs_folder import RunsFolder
from shared.errors import UserError
from shared.run.run_dir import RunDir
from tests.support.config_keys import PINNED
from tests.support.planted_runs import made_up
from tests.support.runs import ROOT, alive, wait_until
from tests.support.window import Window, window

REQUESTS = (
    *("runs/first/evaluate", "runs/first/chat", "runs/first/stop", "runs/first/resume"),
    *("draft", "plan", "train", "jobs/1/say", "jobs/1/end"),
)
NEW = {"source": "embedded", "name": "new"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    made_up(found / "first", steps=3, status="done")
    (found / "mine.toml").write_text("[run]\nsteps = 3\n")
    (found / "wrong.toml").write_text("[run]\nstep = 3\n")
    (found / "--json.toml").write_text("")
    return found


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Window]:
    with window(folder, control=True) as opened:
        yield opened


# --- who may ask, and for what


@pytest.mark.parametrize("path", REQUESTS)
def test_a_page_that_only_looks_has_no_such_thing(folder: Path, path: str) -> None:
    with window(folder) as opened:
        assert opened.ask("control") == {"control": False}
        assert opened.tell(path, {}).status in (404, 405)
        assert {opened.get(f"/api/{name}").status for name in ("form", "jobs", "jobs/1")} == {404}


@pytest.mark.parametrize("path", REQUESTS)
def test_no_other_site_can_ask(page: Window, path: str) -> None:
    assert page.ask("control") == {"control": True}
    foreign: list[dict[str, str]] = [{}, {"Origin": "http://evil.example"}, {"Origin": "null"}]
    for headers in (*foreign, {"Referer": "http://127.0.0.1/"}):
        assert page.send("POST", f"/api/{path}", page.guest | headers, b"{}").status == 403
    stranger = {"Host": f"127.0.0.1:{page.port}", "Origin": f"http://127.0.0.1:{page.port}"}
    assert page.send("POST", f"/api/{path}", stranger, b"{}").status == 403


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("runs/first/evaluate", {"checkpoint": "../../etc"}, "cannot be read"),
        ("runs/first/evaluate", {"checkpoint": "--base"}, "cannot be read"),
        ("runs/first/evaluate", {"checkpoint": "latest\n"}, "cannot be read"),
        ("runs/first/evaluate", {"problems": 0}, "cannot be read"),
        ("runs/first/evaluate", {"problems": "8; reboot"}, "cannot be read"),
        ("runs/first/evaluate", {"unknown": 1}, "cannot be read"),
        ("runs/first/chat", {"temperature": 1e9}, "cannot be read"),
        ("runs/first/stop", {}, "first is not running"),
        ("runs/first/stop", {"pid": 1}, "cannot be read"),
        ("runs/../evaluate", {}, ""),
        ("runs/nothing/resume", {}, "There is no run 'nothing'"),
        ("train", NEW | {"name": "../first"}, "name got '../first'"),
        ("train", NEW | {"name": "first"}, "name got 'first', expected a new one"),
        ("train", NEW | {"name": "--help"}, "name got '--help'"),
        ("train", NEW | {"name": ".hidden"}, "name got '.hidden'"),
        ("train", NEW | {"source": "/etc/passwd"}, "source got '/etc/passwd', expected a preset"),
        ("train", NEW | {"source": "../mine.toml"}, "source got '../mine.toml'"),
        ("plan", NEW | {"source": "--json.toml"}, "source got '--json.toml'"),
        ("plan", {"source": "embedded"}, "cannot be read"),
        ("plan", [], "cannot be read"),
        ("jobs/99/end", {}, "There is no process 99"),
        ("jobs/x/end", {}, "expected a whole number"),
    ],
)
def test_a_wrong_request_is_refused_and_starts_nothing(page: Window, path: str, body: Any, sentence: str) -> None:
    answer = page.tell(path, body)
    assert answer.status in (400, 404)
    assert sentence in (answer.problem if sentence else "")
    assert page.ask("jobs")["jobs"] == []


def test_a_run_that_failed_at_its_start_may_be_replaced(tmp_path: Path) -> None:
    """The command that is started refuses it or not; the page only lets the name through."""
    run = RunDir.create(tmp_path / "failed", b"{}")
    run.summary.write_text('{"status": "failed"}')
    command = Control(RunsFolder(tmp_path), tmp_path).training(Train(source="embedded", name="failed"))
    assert command[:4] == ["run", "embedded", "--out", "failed"]


def test_a_request_without_end_is_cut_off(page: Window) -> None:
    assert page.tell("plan", NEW | {"name": "x" * 200_000}).status == 413


def test_a_page_of_one_run_starts_no_other(folder: Path) -> None:
    with window(folder / "first", control=True) as opened:
        assert "This page shows one run" in opened.tell("train", NEW).problem


# --- commands


def test_a_draft_is_the_command_and_what_is_wrong_with_it(page: Window) -> None:
    sets = {"run.steps": "7", "tasks.system_prompt": "Be brief; $(reboot)"}
    found = page.tell("draft", NEW | {"sets": sets}).json
    assert found["command"].endswith(
        "-m launch run embedded --out new --set=run.steps=7 '--set=tasks.system_prompt=Be brief; $(reboot)'"
    )
    assert found["problem"] == ""
    found = page.tell("draft", NEW | {"sets": {"run.steps": "0"}}).json
    assert found["problem"].startswith("run.steps = 0 is not allowed")
    assert "did you mean 'run.steps'" in page.tell("draft", NEW | {"source": "wrong.toml"}).json["problem"]


def test_options_are_those_of_the_commands() -> None:
    assert Evaluate().options() == ["--checkpoint", "latest"]
    wanted = Evaluate(base=True, test=True, problems=8, samples=2, long_cap=64)
    assert wanted.options() == ["--base", "--test", "--problems", "8", "--samples", "2", "--long-cap", "64"]
    wanted = Chat(checkpoint="12", max_new_tokens=5, temperature=0.7)
    assert wanted.options() == ["--chat", "--checkpoint", "12", "--max-new-tokens", "5", "--temperature", "0.7"]


def test_a_form_has_the_values_of_its_configuration(page: Window) -> None:
    found = page.ask("form?source=mine.toml")
    rows = {row["key"]: row for row in found["keys"]}
    assert (rows["run.steps"]["value"], rows["run.steps"]["default"]) == (3, 40)
    assert "embedded" in found["sources"] and "mine.toml" in found["sources"]
    assert "--json.toml" not in found["sources"]
    assert "did you mean" in page.get("/api/form?source=wrong.toml").problem


def test_every_key_has_its_meaning_range_and_default() -> None:
    found = {row["key"]: row for row in described()}
    assert list(found) == list(PINNED)
    assert {key: row["default"] for key, row in found.items()} == PINNED
    assert [key for key, row in found.items() if len(row["meaning"]) < 10] == []
    group = {name: found["rollout.group"][name] for name in ("default", "form", "range")}
    assert group == {"default": 8, "form": "whole number", "range": {"ge": 1, "le": 4096}}
    assert found["optimizer.lr"]["form"] == "number"
    assert "nf4" in found["model.quantization"]["choices"]
    assert found["tasks.source"]["form"] == found["lora.targets"]["form"] == "text"


def test_only_a_learner_is_stopped(tmp_path: Path) -> None:
    run: RunDir = made_up(tmp_path / "held", steps=3, status="running")
    with run.locked(), window(tmp_path, control=True) as opened:
        assert "held by a process that is not a learner" in opened.tell("runs/held/stop", {}).problem
    run.lock.write_text("../../1")
    with pytest.raises(UserError, match="not a learner"):
        learner_of(run.path)


def test_evaluations_and_checkpoints_of_a_run(folder: Path, page: Window) -> None:
    found = page.ask("runs/first/evaluations")
    assert found["evaluations"] == found["checkpoints"] == []
    assert page.ask(f"runs/first/evaluations?stamp={found['stamp']}") == {"stamp": found["stamp"]}
    (folder / "first" / "checkpoints" / "step-000002").mkdir()
    found = page.ask("runs/first/evaluations")
    assert found["checkpoints"] == [{"step": 2, "best": False}]


# --- processes

SLEEPER = "import time\ntime.sleep(600)\n"
TIED = (
    f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    "from shared.process.parent_death import die_with_parent\n"
    "die_with_parent()\nprint('tied', flush=True)\n" + SLEEPER
)
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-m', 'sleeper'])\n"
    "print(child.pid, flush=True)\nchild.wait()\n"
)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    for name, text in {"sleeper": SLEEPER, "parent": PARENT, "says": "print('one\\n\\u00e9' + input() * 9)\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = Jobs(tmp_path)
    yield found
    for job in found.known.values():
        job.process.kill()
        ended(job)
        job.output.close()


def command(kind: Kind, *module: str, run: str = "first") -> Command:
    return Command(kind=kind, run=run, shown=" ".join(module), module=module)


def ended(job: Job) -> dict[str, Any]:
    wait_until(lambda: job.ended is not None)
    return job.told(0)


def test_a_process_says_what_it_prints_and_how_it_ended(jobs: Jobs) -> None:
    job = jobs.start(command("plan", "json.tool", "/nowhere"))
    told = ended(job)
    assert (told["running"], told["command"]) == (False, "json.tool /nowhere")
    assert told["code"] > 0 and "nowhere" in told["text"]
    assert job.told(told["next"])["text"] == ""
    with pytest.raises(UserError, match="There is no process 7"):
        jobs.find(7)


def test_what_is_said_to_a_process_reaches_it(jobs: Jobs) -> None:
    chat, other = jobs.start(command("chat", "says")), jobs.start(command("eval", "sleeper"))
    chat.say("\u00e4")
    told = ended(chat)
    assert (told["code"], told["text"]) == (0, "one\n\u00e9" + 9 * "\u00e4" + "\n")
    with pytest.raises(UserError, match="has ended; start it again"):
        chat.say("more")
    with pytest.raises(UserError, match="reads no input"):
        other.say("more")


def test_a_long_output_comes_in_pieces_without_a_torn_line(jobs: Jobs) -> None:
    line = "x" * 998 + "\u00e9\n"
    (jobs.here / "long.py").write_text(f"print({line!r} * 600, end='')\n")
    job = jobs.start(command("eval", "long"))
    ended(job)
    text, first, running = "", 0, True
    while running:
        told = job.told(first)
        assert len(told["text"].encode()) <= MOST_BYTES and told["text"].endswith("\n")
        text, first, running = text + told["text"], told["next"], told["running"]
    assert text == line * 600


def test_a_helper_is_killed_with_what_it_has_started(jobs: Jobs) -> None:
    job = jobs.start(command("eval", "parent"))
    wait_until(lambda: bool(job.told(0)["text"]))
    child = int(job.told(0)["text"])
    assert alive(child)
    job.end()
    assert ended(job)["code"] == -9
    wait_until(lambda: not alive(child))


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "memory ran out"), (signal.SIGSEGV, "start it again")])
def test_a_process_that_a_signal_ended_names_it_and_says_what_to_do(jobs: Jobs, number: int, said: str) -> None:
    job = jobs.start(command("chat", "sleeper"))
    os.kill(job.process.pid, number)
    cause = ended(job)["cause"]
    assert signal.Signals(number).name in cause and said in cause
    other = jobs.start(command("chat", "sleeper"))
    other.end()
    assert ended(other)["cause"] == "", "the button did it"


def test_a_run_is_asked_to_stop(jobs: Jobs) -> None:
    job = jobs.start(command("run", "sleeper"))
    with pytest.raises(UserError, match="first has been started already"):
        jobs.start(command("run", "sleeper"))
    job.end()
    assert ended(job)["code"] == -15


def test_a_stopped_run_is_resumed_when_its_launcher_has_ended(jobs: Jobs) -> None:
    (jobs.here / "ends_soon.py").write_text("import time; time.sleep(0.5)")
    first = jobs.start(command("run", "ends_soon"))
    jobs.wait_for_launcher("second")
    assert first.ended is None
    jobs.wait_for_launcher("first")
    assert first.ended is not None
    jobs.start(command("run", "sleeper"))


def test_helpers_end_with_the_page_and_runs_do_not(jobs: Jobs) -> None:
    helper, run = jobs.start(command("eval", "sleeper")), jobs.start(command("run", "sleeper", run="second"))
    assert jobs.end() == ["second"]
    assert ended(helper)["code"] == -9
    assert run.process.poll() is None
    assert sys.executable in run.process.args  # pyright: ignore[reportOperatorIssue]


def test_a_helper_goes_on_when_the_thread_of_its_request_has_ended(jobs: Jobs) -> None:
    (jobs.here / "tied.py").write_text(TIED)

    def answer() -> None:
        job = jobs.start(command("eval", "tied"))
        wait_until(lambda: bool(job.told(0)["text"]))

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert jobs.find(1).told(0)["running"]


def test_there_are_not_too_many_processes(jobs: Jobs) -> None:
    for number in range(MOST_RUNNING):
        jobs.start(command("run", "sleeper", run=str(number)))
    with pytest.raises(UserError, match=f"{MOST_RUNNING} processes of this page are running"):
        jobs.start(command("plan", "sleeper"))


def test_only_the_last_that_ended_are_known(jobs: Jobs) -> None:
    jobs.start(command("run", "sleeper"))
    for _ in range(MOST_ENDED + 3):
        job = jobs.start(command("plan", "nothing_of_this_name"))
        job.process.wait()
        ended(job)
    assert sorted(jobs.known) == [1, *range(4, MOST_ENDED + 5)]
