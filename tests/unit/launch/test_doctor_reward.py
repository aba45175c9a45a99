"""What doctor sees of the reward functions: whether they can be imported, and called with the columns of the data."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from launch.doctor import run_checks
from launch.doctor.libraries import look_at_reward, names_for_functions
from shared.config.data import TasksConfig, VerifierConfig
from tests.support.machines import config, sound


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def right(**columns):\n    return []\n", ""),
        ("def wrong(**columns):\n    return []\n", "defines no such name"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("import os\nos.kill(os.getpid(), 11)\n", "killed by signal 11"),
        ("right = 7\n", "a function is needed"),
    ],
    ids=["right", "name", "import", "crash", "number"],
)
def test_a_reward_function_is_imported_elsewhere(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(text)
    verifier = VerifierConfig(kind="callable", function=f"{tmp_path / 'rewards.py'}:right")
    reward = look_at_reward(verifier, TasksConfig(), 60.0)
    assert (reward.trouble == "") == (said == "")
    assert said in reward.trouble
    finding = run_checks.function(replace(sound(), reward=reward))
    assert finding.level == ("error" if said else "ok")


def test_a_reward_function_is_tried_with_what_a_worker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    (tmp_path / "rewards").mkdir()
    file = tmp_path / "rewards" / "rewards.py"
    (tmp_path / "beside_the_command.py").write_text("")
    for text, environment, said in (
        ("import beside_the_command\n", (), "No module named 'beside_the_command'"),
        ("import os; os.environ['MY_TOKEN']\n", (), "KeyError"),
        ("import os; os.environ['MY_TOKEN']\n", ("MY_TOKEN",), ""),
    ):
        file.write_text(text + "def right(**_): return []\n")
        verifier = VerifierConfig(kind="callable", function=f"{file}:right", environment=environment)
        with contextlib.chdir(tmp_path):
            trouble = look_at_reward(verifier, TasksConfig(), 60.0).trouble
        assert said in trouble and bool(trouble) == bool(said)


def test_a_reward_function_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("import time\ntime.sleep(60)\n")
    reward = look_at_reward(
        VerifierConfig(kind="callable", function=f"{tmp_path / 'rewards.py'}:right"), TasksConfig(), 2.0
    )
    assert reward.trouble == "not finished within 2 s" and reward.timed_out


def test_named_rewards_are_tried_too(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def one(**_): return []\n")
    several = VerifierConfig(kind="callable", rewards={"think_tags": 1.0, f"{file}:one": 1.0, f"{file}:two": 0.5})
    reward = look_at_reward(several, TasksConfig(), 60.0)
    assert reward.function == f"{file}:two" and "defines no such name" in reward.trouble
    verifier = {"kind": "callable", "rewards": several.rewards}
    broken = replace(sound(), config=config(verifier=verifier), reward=reward)
    assert run_checks.function(broken).found.startswith(f"'{file}:two' in [verifier.rewards] cannot be used: ")
    whole = replace(broken, reward=replace(reward, trouble=""))
    assert "(think_tags, one, two)" in run_checks.function(whole).remedy


def test_a_built_in_verifier_needs_no_look() -> None:
    assert look_at_reward(VerifierConfig(), TasksConfig(), 60.0).function == ""


def test_a_function_that_needs_what_nobody_gives_is_found(tmp_path: Path) -> None:
    file, rows = tmp_path / "rewards.py", tmp_path / "rows.jsonl"
    rows.write_text('{"ask": "1?", "gold": 1, "topic": "sums", "prompt": "1?"}\n')
    tasks = TasksConfig(source=str(rows), question="ask", answer="gold")
    given = (
        "prompts, completions, completion_ids, trainer_state, question, ask, answer, gold, gold_answer, solution, topic"
    )
    lacks = "which is no column of the data; there are "
    for text, data, said in (
        (f"def f({given}, log_extra, log_metric, other=1, *args): ...", tasks, ""),
        ("def f(completions, topicc, **columns): ...", tasks, f"it needs the argument 'topicc', {lacks}answer, ask, "),
        ("def f(completions, prompt): ...", tasks, f"it needs the argument 'prompt', {lacks}"),
        ("def f(completions, environments): ...", tasks, "which reward functions are not given here"),
        ("def f(completions, topicc): ...", TasksConfig(source="owner/name"), ""),
        ("def f(completions, topicc): ...", TasksConfig(source="missing.csv"), ""),
        ("def f(completions, answer, level, solution, subject): ...", TasksConfig(), ""),
        ("def f(completions, topicc): ...", TasksConfig(), f"it needs the argument 'topicc', {lacks}"),
        ("class f:\n    def __call__(self, topicc): ...", tasks, ""),
    ):
        file.write_text(text)
        trouble = look_at_reward(VerifierConfig(rewards={f"{file}:f": 1.0}), data, 60.0).trouble
        assert said in trouble and bool(trouble) == bool(said), (text, trouble)


def test_no_names_are_known_of_data_that_are_not_here() -> None:
    assert names_for_functions(TasksConfig(source="owner/name")) == []
    assert names_for_functions(TasksConfig(source="missing.csv")) == []
    assert "gold_answer" in names_for_functions(TasksConfig(source="numbers"))
