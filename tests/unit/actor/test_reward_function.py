"""A user's reward function: how it is found, what it is given, and what its return values mean."""

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from actor.verifiers.reward_arguments import RewardLog, arguments
from actor.verifiers.reward_function import CallFailed, RewardCalls, RewardFunction, load_reward_function, verdict
from actor.verifiers.verdict import MAX_NOTE, Context, ScoreJob, Verdict
from actor.verifiers.verifier import Scoring
from protocol.limits import MAX_SCORE
from protocol.messages import Outcome
from shared.config.data import VerifierConfig
from shared.errors import RewardError


@pytest.fixture(autouse=True)
def import_state() -> Iterator[None]:
    """Importing a reward file registers it; the next test shall not see it."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("user_reward_function")]:
        del sys.modules[name]


def job(completion: str, *, truncated: bool = False, **columns: str) -> ScoreJob:
    return ScoreJob(
        prompt=f"prompt of {completion}",
        completion=completion,
        completion_ids=[len(completion)],
        truncated=truncated,
        columns=columns,
    )


KEY = "verifier.function"
JOBS = [job("a", answer="1", level="x"), job("bb", answer="2"), job("ccc", answer="3", level="z")]


def write(folder: Path, text: str, name: str = "reward.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def score_with(function: RewardFunction, jobs: Sequence[ScoreJob]) -> list[Verdict]:
    with contextlib.closing(RewardCalls()) as calls:
        calls.log.start(len(jobs))
        (values,) = calls.values([function], jobs)
    return [verdict(value, job.truncated) for value, job in zip(values, jobs, strict=True)]


def returning(values: object):
    return lambda **_: values


# Loading


def test_a_function_is_found(tmp_path: Path) -> None:
    file = write(tmp_path, "def reward(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert [verdict.score for verdict in score_with(load_reward_function(f"{file}:reward", KEY), JOBS)] == [1.0] * 3


def test_the_files_beside_it_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 0.25\n", "reward_helper_beside.py")
    file = write(
        tmp_path, "import reward_helper_beside as h\ndef reward(prompts, **_):\n    return [h.VALUE] * len(prompts)\n"
    )
    assert score_with(load_reward_function(f"{file}:reward", KEY), JOBS)[0].score == 0.25


def test_dataclasses_with_postponed_annotations_work(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Point:\n    kinds: ClassVar[int] = 1\n    x: float = 1.0\n"
        "def reward(prompts, **_):\n    return [Point().x] * len(prompts)\n"
    )
    assert score_with(load_reward_function(f"{write(tmp_path, text)}:reward", KEY), JOBS)[0].score == 1.0


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", "path/to/file.py:name"),
        ("reward.py", "path/to/file.py:name"),
        ("reward.py:", "path/to/file.py:name"),
        (":reward", "path/to/file.py:name"),
        ("nowhere/reward.py:reward", "no such file"),
        ("~nobody-of-this-name/reward.py:reward", "no such file"),
        ("{folder}:reward", "no such file"),
        ("{folder}/reward.py:other", "defines no such name"),
        ("{folder}/reward.py:NUMBER", "of type int"),
        ("{folder}/notes.txt:reward", "must end in .py"),
        ("{folder}/raises.py:reward", "ValueError: two lines"),
        ("{folder}/broken.py:reward", "SyntaxError"),
        ("{folder}/leaves.py:reward", "SystemExit: 3"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(tmp_path: Path, spec: str, expected: str) -> None:
    write(tmp_path, "NUMBER = 1\ndef reward(**_):\n    return []\n")
    write(tmp_path, "reward\n", "notes.txt")
    write(tmp_path, "raise ValueError('two\\nlines')\n", "raises.py")
    write(tmp_path, "def reward(:\n", "broken.py")
    write(tmp_path, "raise SystemExit(3)\n", "leaves.py")
    with pytest.raises(RewardError, match=expected) as caught:
        load_reward_function(spec.format(folder=tmp_path), KEY)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "verifier",
    [
        VerifierConfig(kind="callable", function="none.py:reward"),
        VerifierConfig(kind="math", rewards={"none.py:reward": 1.0}),
    ],
)
def test_an_error_names_the_key(verifier: VerifierConfig) -> None:
    key = "verifier.function" if verifier.function else "verifier.rewards"
    with pytest.raises(RewardError, match=rf"^{key} names none.py, but there is no such file"):
        Scoring(verifier)


# Arguments


def test_arguments_are_those_of_trl() -> None:
    seen: dict[str, object] = {}

    def reward(**kwargs: object) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 3

    score_with(reward, JOBS)
    assert all(callable(seen.pop(name)) for name in ("log_extra", "log_metric"))
    assert seen.pop("trainer_state")
    assert seen == {
        "prompts": ["prompt of a", "prompt of bb", "prompt of ccc"],
        "completions": ["a", "bb", "ccc"],
        "completion_ids": [[1], [2], [3]],
        "answer": ["1", "2", "3"],
        "gold_answer": ["1", "2", "3"],
        "level": ["x", None, "z"],
    }


def test_prompts_are_the_messages_of_the_data() -> None:
    """A system message of its own wins over that of the run, and is no column."""
    told = job("a", question="1?", system_message="Be brief.")
    jobs = [structs.replace(one, context=Context(chat=True, system_prompt="Be kind.")) for one in (told, JOBS[0])]
    given = arguments(jobs, "auto", RewardLog())
    assert given["prompts"] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "prompt of a"}],
    ]
    assert "system_message" not in given


def test_half_a_character_in_a_log_becomes_a_question_mark() -> None:
    log = RewardLog()
    log.start(2)
    log.extra("judge \ud83d", ["\ud83d", "b"])
    assert log.extras == {"judge ?": ["?", "b"]}


def test_a_function_gets_only_what_it_names() -> None:
    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(text) == int(gold)) for text, gold in zip(completions, answer, strict=True)]

    assert [verdict.outcome for verdict in score_with(reward, JOBS)] == [Outcome.CORRECT] * 3


def test_a_default_is_kept_where_the_data_has_no_such_column() -> None:
    def reward(completions: list[str], difficulty: object = None) -> list[float]:
        return [float(difficulty is None)] * len(completions)

    assert score_with(reward, JOBS)[0].score == 1.0


def test_a_column_that_is_null_in_all_rows_of_a_call_is_passed() -> None:
    """A function for one kind of tasks gets the rows of the others, and returns None for them."""

    def math(completions: list[str], answer: list[str | None], **_: object) -> list[float | None]:
        return [None if gold is None else float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    others = [job(text, tests="...", unconverted='{"answer": null}') for text in "ab"]
    assert [one.outcome for one in score_with(math, others)] == [Outcome.ABSTAIN] * 2


def test_a_column_cannot_replace_an_argument() -> None:
    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(text == "a") for text in completions]

    assert score_with(reward, [job("a", completions="forged")])[0].score == 1.0


def test_partial_functions_and_callable_objects_work() -> None:
    class Reward:
        def __call__(self, completions: list[str]) -> list[float]:
            return [0.75 for _ in completions]

    def scaled(completions: list[str], factor: float) -> list[float]:
        return [factor for _ in completions]

    assert score_with(Reward(), JOBS)[0].score == 0.75
    assert score_with(functools.partial(scaled, factor=0.5), JOBS)[0].score == 0.5


def test_an_async_function_is_awaited() -> None:
    async def reward(completions: list[str], **_: object) -> list[float]:
        import asyncio

        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    assert [verdict.outcome for verdict in score_with(reward, JOBS)] == [Outcome.CORRECT] * 3


MEETING = """
import asyncio
here = {"first": asyncio.Event(), "second": asyncio.Event()}

async def meet(own, other):
    here[own].set()
    await asyncio.wait_for(here[other].wait(), 30)

async def first(completions, **_):
    await meet("first", "second")
    return [1.0] * len(completions)

async def second(completions, log_metric, **_):
    await meet("second", "first")
    log_metric("met", 1.0)
    return [0.5] * len(completions)

async def patient(**_):
    try:
        await asyncio.sleep(3600)
    finally:
        print("was ended")

async def impatient(**_):
    raise ValueError("at once")
"""


def scoring(file: Path, *names: str) -> Scoring:
    return Scoring(VerifierConfig(kind="callable", rewards={f"{file}:{name}": 1.0 for name in names}))


def test_async_functions_wait_together(tmp_path: Path) -> None:
    """Each waits until the other has been called, and they know each other: their file runs once."""
    both = scoring(write(tmp_path, MEETING), "first", "second")
    with contextlib.closing(both.calls):
        found = both.score(JOBS)
    assert [one.rewards for one in found] == [{"first": 1.0, "second": 0.5}] * 3
    assert [(one.score, one.metrics) for one in found] == [(1.5, {"met": 1.0})] * 3


def test_an_async_function_that_raises_ends_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = scoring(write(tmp_path, MEETING), "patient", "impatient")
    with contextlib.closing(both.calls), pytest.raises(CallFailed, match="ValueError: at once"):
        both.score(JOBS)
    assert "was ended" in capsys.readouterr().out


# What the return values mean


@pytest.mark.parametrize(
    ("value", "outcome", "score"),
    [
        (1.0, Outcome.CORRECT, 1.0),
        (0.5, Outcome.CORRECT, 0.5),
        (0.499, Outcome.WRONG, 0.499),
        (0.0, Outcome.WRONG, 0.0),
        (-7.5, Outcome.WRONG, -7.5),
        (3, Outcome.CORRECT, 3.0),
        (True, Outcome.CORRECT, 1.0),
        (False, Outcome.WRONG, 0.0),
        (np.float32(0.75), Outcome.CORRECT, 0.75),
        (Fraction(1, 4), Outcome.WRONG, 0.25),
        (None, Outcome.ABSTAIN, 0.0),
        (math.nan, Outcome.ERROR, 0.0),
        (math.inf, Outcome.ERROR, 0.0),
        (-math.inf, Outcome.ERROR, 0.0),
        (10**400, Outcome.ERROR, 0.0),
        (MAX_SCORE, Outcome.CORRECT, MAX_SCORE),
        (-2 * MAX_SCORE, Outcome.ERROR, 0.0),
        ("1.0", Outcome.ERROR, 0.0),
        ([1.0], Outcome.ERROR, 0.0),
        (1 + 0j, Outcome.ERROR, 0.0),
        (torch.tensor(0.75), Outcome.CORRECT, 0.75),
        (np.array(-1.5), Outcome.WRONG, -1.5),
        (np.array([1.0]), Outcome.CORRECT, 1.0),
        (torch.tensor([[0.25]]), Outcome.WRONG, 0.25),
        (np.array([1.0, 1.0]), Outcome.ERROR, 0.0),
        (np.array(["1.0"]), Outcome.ERROR, 0.0),
        (Decimal("0.75"), Outcome.CORRECT, 0.75),
    ],
)
def test_a_value_is_judged_alone(value: object, outcome: Outcome, score: float) -> None:
    verdicts = score_with(returning([1.0, value, 0.0]), JOBS)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.CORRECT, outcome, Outcome.WRONG]
    assert verdicts[1].score == score
    assert bool(verdicts[1].note) == (outcome in (Outcome.ERROR, Outcome.ABSTAIN))


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ([], "0 values for 3 completions"),
        ([1.0, 1.0], "2 values for 3 completions"),
        ([1.0] * 4, "4 values for 3 completions"),
        (1.0, "returned a float"),
        (None, "returned a NoneType"),
        ({"a": 1.0}, "returned a dict"),
        ("111", "returned a str"),
        ({1.0, 2.0, 3.0}, "returned a set"),
        (torch.tensor(1.0), "returned a float"),
        (np.zeros(2), "2 values for 3 completions"),
    ],
)
def test_another_shape_fails_the_whole_call(values: object, note: str) -> None:
    with pytest.raises(CallFailed, match=note):
        score_with(returning(values), JOBS)


@pytest.mark.parametrize(
    "values", [torch.tensor([1.0, 0.25, -2.0]), np.array([1.0, 0.25, -2.0]), iter([1.0, 0.25, -2.0])]
)
def test_what_trl_takes_for_a_list_is_one_here(values: object) -> None:
    assert [one.score for one in score_with(returning(values), JOBS)] == [1.0, 0.25, -2.0]


@pytest.mark.parametrize("error", [ValueError("no\nluck"), SystemExit(3), RecursionError("deep"), MemoryError()])
def test_an_exception_fails_the_whole_call(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def reward(**_: object) -> list[float]:
        raise error

    with pytest.raises(CallFailed, match=type(error).__name__) as caught:
        score_with(reward, JOBS)
    assert "\n" not in str(caught.value)
    assert caught.value.out_of_memory == isinstance(error, MemoryError)
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_argument_fails_the_whole_call() -> None:
    def reward(completions: list[str], difficulty: list[str]) -> list[float]:
        return [1.0 for _ in zip(completions, difficulty, strict=True)]

    with pytest.raises(CallFailed, match="'difficulty'"):
        score_with(reward, JOBS)


def test_a_note_has_bounded_length() -> None:
    def reward(**_: object) -> list[float]:
        raise ValueError("x" * 100_000)

    with pytest.raises(CallFailed) as caught:
        score_with(reward, JOBS)
    assert len(str(caught.value)) == MAX_NOTE


def test_half_a_character_in_a_note_becomes_a_question_mark() -> None:
    assert str(CallFailed("half \ud83d")) == "half ?"


def test_a_truncated_completion_keeps_the_functions_score() -> None:
    jobs = [job("a", truncated=True), job("b", truncated=True), job("c")]
    verdicts = score_with(returning([-3.0, None, -5.0]), jobs)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.TRUNCATED, Outcome.ABSTAIN, Outcome.WRONG]
    assert verdicts[0].score == -3.0
