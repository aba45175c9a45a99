"""`show`: groups of a step, one group, one answer's tokens; for people and as records."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.display.show import show
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.errors import RunDirError, UserError
from shared.run.rollouts import GroupHead, RolloutGroup, RolloutSample, Turn
from shared.run.run_dir import RunDir
from tests.support.rollouts import rollout_group, write_groups

MIXED = rollout_group(3, ["it is 4", "it is \x1b[2J5\nor 6"], rewards=[1.0, 0.0], prompt="What is 2 + 2?")
ALIKE = rollout_group(3, ["no"], slot=1, rewards=[0.0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)
    write_groups(made.rollouts, [rollout_group(1, ["first"]), MIXED, ALIKE])
    return made.path


def shown(run: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    asked: dict[str, Any] = {"step": None, "group": None, "sample": None, "as_json": False, **options}
    assert show(directory=run, **asked) == 0
    return capsys.readouterr().out


def test_the_newest_step_is_shown_as_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(run, capsys).splitlines()
    assert lines[0] == "step 3: 2 groups"
    assert lines[2].split() == ["0", "trained", "0.50", "0.50", "4", "0", "correct", "1", "wrong", "1"]
    assert lines[3].split()[:2] == ["1", "idle"]
    assert shown(run, capsys, step=1).startswith("step 1: 1 groups")


def test_a_group_is_shown_with_its_answers_and_no_escape_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(run, capsys, step=3, group=0)
    assert "prompt | What is 2 + 2?" in text and "gold   | 42" in text
    assert "0: correct, reward 1, advantage +0.50, 3 tokens, stop" in text
    assert "       | it is \\x1b[2J5\n       | or 6" in text and "\x1b" not in text
    assert "no advantage" in shown(run, capsys, step=3, group=1)


def test_an_answer_is_shown_token_by_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(run, capsys, step=3, group=0, sample=0).splitlines()
    assert lines[0].split() == ["token", "logprob", "learner", "ratio", "mismatch", "entropy", "mask"]
    assert lines[1].split() == ["it", "-0.5000", "-0.4990", "1.0010", "1.0e-03", "0.250", "1"]
    assert {len(line) for line in lines} == {len(lines[0])}


def test_a_token_that_was_not_sampled_has_no_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = tuple(Turn(sampled=own, tokens=1, text=word) for own, word in ((True, "call"), (False, "7")))
    group = rollout_group(4, ["call 7"])
    figures: dict[str, Any] = {"logprob": [-0.5, 0.0], "gap": [0.001, None], "mask": [1, 0], "entropy": [0.25, 0.0]}
    sample = msgspec.structs.replace(group.samples[0], turns=turns, **figures)
    write_groups(RunDir(run).rollouts, [msgspec.structs.replace(group, samples=(sample,))])
    lines = shown(run, capsys, step=4, group=0, sample=0).splitlines()
    assert lines[1].split()[1:] == ["-0.5000", "-0.4990", "1.0010", "1.0e-03", "0.250", "1"]
    assert lines[2].split()[1:] == ["-", "-", "-", "-", "-", "0"]


def test_json_is_the_record_of_the_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = msgspec.json.decode(shown(run, capsys, as_json=True), type=list[GroupHead])
    assert [head.group_id for head in heads] == [MIXED.group_id, ALIKE.group_id]
    assert "samples" not in json.loads(shown(run, capsys, as_json=True))[0]
    group = shown(run, capsys, step=3, group=0, as_json=True)
    assert msgspec.json.decode(group, type=RolloutGroup) == MIXED and "\x1b" not in group
    sample = shown(run, capsys, step=3, group=0, sample=1, as_json=True)
    assert msgspec.json.decode(sample, type=RolloutSample) == MIXED.samples[1]


def test_what_looks_like_an_emoji_code_or_markup_is_shown_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_groups(RunDir(run).rollouts, [rollout_group(4, ["2:x:3, :100: [b] [/x]"])])
    assert "| 2:x:3, :100: [b] [/x]" in shown(run, capsys, group=0)
    group = msgspec.json.decode(shown(run, capsys, group=0, as_json=True), type=RolloutGroup)
    assert group.samples[0].text == "2:x:3, :100: [b] [/x]"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"step": 2}, r"--step got 2, but .* some of 2 steps, 1 to 3\."),
        ({"step": 3, "group": 2}, r"--group got 2, but step 3 .* has 2 groups"),
        ({"group": 1, "sample": 1}, r"--sample got 1, but group 1 of step 3 has 1, from 0\."),
        ({"sample": 0}, r"--sample got 0 without a group"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(options: dict[str, int], sentence: str, run: Path) -> None:
    asked: dict[str, Any] = {"step": None, "group": None, "sample": None, "as_json": False}
    asked.update(options)
    with pytest.raises(UserError, match=sentence):
        show(directory=run, **asked)


def test_a_run_without_rollouts_says_so(tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)
    with pytest.raises(
        RunDirError, match=r"no groups in rollouts.jsonl: no step has ended yet, or log.rollouts_per_step"
    ):
        show(directory=made.path, step=None, group=None, sample=None, as_json=True)
