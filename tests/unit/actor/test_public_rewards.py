"""Rewards written for TRL's GRPOTrainer run unchanged: the scores are those of a call by hand."""

import contextlib
import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import TrainerState

from actor.environments.contract import Environment
from actor.scoring.pool import ScorePool
from actor.verifiers.reward_arguments import RewardLog, arguments
from actor.verifiers.verdict import Context, ScoreJob, Verdict
from learner.tasks.sources import canonical
from protocol.messages import Outcome
from shared.config.data import EARLIER, VerifierConfig
from shared.config.environment import EnvironmentConfig
from tests.support import public_rewards

FILE = Path(public_rewards.__file__)
NAMES = {"question": "question", "answer": "answer", "level": "level", "subject": "subject"}
SYSTEM = "Answer in tags."
CONTEXT = Context(chat=True, system_prompt=SYSTEM, global_step=3, max_steps=12)
TEN = (
    "correctness_reward_func",
    "int_reward_func",
    "strict_format_reward_func",
    "xmlcount_reward_func",
    "check_numbers",
    "equation_reward_func",
    "accuracy_reward",
    "async_reward_func",
    "scheduled_brevity",
    "repetition_penalty_reward",
)
ROWS: list[dict[str, Any]] = [
    {"question": "Tom has 6 coins and finds 4", "answer": "10", "target": 10, "nums": [6, 4]},
    {"question": "Make 24 of 2 and 12", "answer": "24", "target": 24, "nums": [2, 12]},
    {"question": "What is zero", "answer": "0", "target": 5, "nums": [1]},
]
SOLUTIONS = ("6 + 4 = 10 #### 10", "#### 24", "no mark")
TEXTS = (
    "<reasoning>\n6 + 4\n</reasoning>\n<answer>\n10\n</answer>\n",
    "Tom has 6 coins and 6 coins and 6 coins <answer>6+4</answer> and more",
    "<answer>12*2</answer>",
    "<answer> 23 </answer>",
    "<answer>1</answer>",
    "",
)


def row(place: int) -> dict[str, Any]:
    """Two completions of each row."""
    return ROWS[place // 2] | {"solution": SOLUTIONS[place // 2]}


def jobs(context: Context = CONTEXT) -> list[ScoreJob]:
    return [
        ScoreJob(
            prompt="the rendered prompt",
            completion=text,
            completion_ids=list(range(len(text))),
            truncated=False,
            columns=canonical(row(place), NAMES),
            context=context,
        )
        for place, text in enumerate(TEXTS)
    ]


def scored(jobs: list[ScoreJob], **verifier: Any) -> list[Verdict]:
    with contextlib.closing(ScorePool(VerifierConfig(kind="callable", **verifier))) as pool:
        return pool.score(jobs, lambda: None)


def by_hand(name: str, **logging: Any) -> list[float | None]:
    """As GRPOTrainer calls it, with messages that are written here."""
    rows = [row(place) for place in range(len(TEXTS))]
    function = getattr(importlib.reload(public_rewards), name)
    result = function(
        prompts=[[{"role": "system", "content": SYSTEM}, {"role": "user", "content": one["question"]}] for one in rows],
        completions=[[{"role": "assistant", "content": text}] for text in TEXTS],
        completion_ids=[list(range(len(text))) for text in TEXTS],
        **{column: [one[column] for one in rows] for column in rows[0]},
        trainer_state=TrainerState(global_step=3, max_steps=12),
        **{"log_extra": lambda column, values: None, "log_metric": lambda name, value: None} | logging,
    )
    if inspect.isawaitable(result):
        import asyncio

        return asyncio.run(_awaited(result))
    return result


async def _awaited(result: Any) -> Any:
    return await result


@pytest.mark.parametrize("name", TEN)
def test_the_scores_are_those_of_a_call_by_hand(name: str) -> None:
    expected = by_hand(name)
    found = scored(jobs(), function=f"{FILE}:{name}")
    assert [None if one.outcome is Outcome.ABSTAIN else one.score for one in found] == expected
    assert len(set(expected)) > 1, "a function that says the same of all shows nothing"


def test_a_function_gets_all_turns_of_a_question() -> None:
    earlier = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "One."}]
    chat = [*earlier, {"role": "user", "content": "And 2?"}]
    job = msgspec.structs.replace(jobs()[0], columns=canonical({"prompt": chat}, NAMES | {"question": "prompt"}))
    given = arguments([job], "messages", RewardLog())
    assert given["prompts"] == [[{"role": "system", "content": SYSTEM}, *chat]]
    assert EARLIER not in given


def test_what_a_function_logs_comes_along() -> None:
    extras: dict[str, list[str]] = {}
    metrics: dict[str, float] = {}
    by_hand("accuracy_reward", log_extra=extras.__setitem__, log_metric=metrics.__setitem__)
    found = scored(jobs(), function=f"{FILE}:accuracy_reward")
    assert [one.metrics for one in found] == [metrics] * len(found)
    assert {name: [one.extras[name] for one in found] for name in extras} == extras
    assert metrics["accuracy"] == 0.25 and extras["gold_parsed"][-1] == "[failed]"


def test_several_functions_with_weights_add_up_as_in_trl() -> None:
    """The sum of those that are not None, each with its weight; the parts stay apart."""
    chosen = {"accuracy_reward": 2.0, "int_reward_func": 0.5, "check_numbers": -0.25}
    parts = {name: by_hand(name) for name in chosen}
    expected = [
        math.fsum(weight * value for name, weight in chosen.items() if (value := parts[name][place]) is not None)
        for place in range(len(TEXTS))
    ]
    found = scored(jobs(), rewards={f"{FILE}:{name}": weight for name, weight in chosen.items()})
    assert [one.score for one in found] == pytest.approx(expected)
    assert [one.outcome for one in found] == [Outcome.CORRECT if one >= 0.5 else Outcome.WRONG for one in expected]
    assert {name: [one.rewards[name] for one in found] for name in chosen} == {
        name: [value or 0.0 for value in values] for name, values in parts.items()
    }


SEVERAL = {f"{FILE}:accuracy_reward": 0.25, f"{FILE}:check_numbers": 0.0, f"{FILE}:int_reward_func": 2.0}


@pytest.mark.parametrize("correct", ["accuracy_reward", "check_numbers", f"{FILE}:accuracy_reward"])
def test_one_of_several_functions_says_what_is_correct_and_the_sum_stays(correct: str) -> None:
    """Its own value decides, without the weight; None of it is wrong, and a truncated completion stays truncated."""
    given = [*jobs()[:-1], msgspec.structs.replace(jobs()[-1], truncated=True)]
    summed, found = scored(given, rewards=SEVERAL), scored(given, rewards=SEVERAL, correct=correct)
    values = by_hand(correct.rpartition(":")[2])[:-1]
    expected = [Outcome.CORRECT if (value or 0.0) >= 0.5 else Outcome.WRONG for value in values]
    assert [one.outcome for one in found] == [*expected, Outcome.TRUNCATED]
    assert [(one.score, one.rewards) for one in found] == [(one.score, one.rewards) for one in summed]
    assert values[4] is None and summed[4].outcome is Outcome.CORRECT
    assert {*expected} == {Outcome.CORRECT, Outcome.WRONG}


def test_it_abstains_where_no_function_applies() -> None:
    found = scored(jobs(), rewards={f"{FILE}:accuracy_reward": 1.0})
    assert [one.outcome for one in found[4:]] == [Outcome.ABSTAIN] * 2


def test_texts_where_texts_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("def starts(completions, **_):\n    return [float(t.startswith('<')) for t in completions]\n")
    expected = [float(text.startswith("<")) for text in TEXTS]
    assert [one.score for one in scored(jobs(), function=f"{file}:starts", form="text")] == expected
    assert [one.score for one in scored(jobs(Context()), function=f"{file}:starts")] == expected, "no chat template"


def test_a_class_is_made_once_in_each_worker(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "class Scorer:\n    made = 0\n"
        "    def __init__(self):\n        Scorer.made += 1\n        self.calls = 0\n"
        "    def __call__(self, completions, **_):\n"
        "        self.calls += 1\n        return [self.calls + 100.0 * Scorer.made] * len(completions)\n"
    )
    verifier = VerifierConfig(kind="callable", function=f"{file}:Scorer", workers=1)
    with contextlib.closing(ScorePool(verifier)) as pool:
        assert [pool.score(jobs()[:1], lambda: None)[0].score for _ in range(3)] == [101.0, 102.0, 103.0]


def test_an_async_function_keeps_what_it_bound_to_its_loop(tmp_path: Path) -> None:
    """As a client does that keeps its connections."""
    file = tmp_path / "client.py"
    file.write_text(
        "import asyncio\nqueue = None\n"
        "async def reward(completions, **_):\n    global queue\n"
        "    if queue is None:\n        queue = asyncio.Queue()\n"
        "        asyncio.get_running_loop().call_later(0.05, queue.put_nowait, 0.75)\n"
        "        return [0.25] * len(completions)\n"
        "    return [await asyncio.wait_for(queue.get(), 5)] * len(completions)\n"
    )
    verifier = VerifierConfig(kind="callable", function=f"{file}:reward", workers=1)
    with contextlib.closing(ScorePool(verifier)) as pool:
        assert [pool.score(jobs()[:1], lambda: None)[0].score for _ in range(2)] == [0.25, 0.75]


def test_an_environment_gets_the_columns_as_the_data_have_them_too(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(
        "class Env:\n    def reset(self, **columns):\n        return repr(columns)\n"
        "    def tool(self):\n        return 1\n"
    )
    environment = Environment(EnvironmentConfig(function=f"{file}:Env"))
    assert environment.reset(canonical(ROWS[0], NAMES)) == repr({"gold_answer": "10"} | ROWS[0])


def test_an_environment_may_name_the_columns_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(
        "class Env:\n    def reset(self, nums, gold_answer):\n        return f'{nums} {gold_answer}'\n"
        "    def tool(self):\n        return 1\n"
    )
    environment = Environment(EnvironmentConfig(function=f"{file}:Env"))
    assert environment.reset(canonical(ROWS[0], NAMES)) == "[6, 4] 10"


# What cannot run


@pytest.mark.parametrize(
    ("body", "form", "expected"),
    [
        (
            "def reward(completions, **_):\n    return [len(c.strip()) for c in completions]",
            "auto",
            "'completions' is a",
        ),
        (
            "def reward(prompts, **_):\n    return [len(p.strip()) for p in prompts]",
            "auto",
            "each entry of 'prompts' is a",
        ),
        (
            "import re\ndef reward(completions, **_):\n    return [bool(re.search('a', c)) for c in completions]",
            "auto",
            "each entry of 'completions' is a list of messages; read its [0]['content'], or set verifier.form = 'text'",
        ),
        (
            "def reward(completions, **_):\n    return [len(c[0]['content']) for c in completions if c]",
            "text",
            "each entry of 'completions' is plain text; set verifier.form = 'messages'",
        ),
        ("def reward(completions, difficulty):\n    return []", "auto", "needs the argument 'difficulty', which is no"),
        ("def reward(completions, environments, **_):\n    return []", "auto", "the argument 'environments', which"),
        ("def reward(completions, /, **_):\n    return []", "auto", "its argument 'completions' takes no name"),
        (
            "def reward(completions, trainer_state, **_):\n    return [trainer_state.epoch] * len(completions)",
            "auto",
            "trainer_state.epoch is not known here; of trainer_state there is global_step, max_steps",
        ),
        (
            "def reward(log_extra, **_):\n    log_extra('x', [1, 2])\n    return [0]",
            "auto",
            "log_extra got 2 values of 'x'",
        ),
        (
            "def reward(log_metric, **_):\n    log_metric('a\\nb', 1)\n    return [0]",
            "auto",
            r"log_metric got the name 'a\nb'; a text of 1 to 128 printable characters is needed",
        ),
    ],
)
def test_the_argument_that_is_the_cause_is_named(tmp_path: Path, body: str, form: str, expected: str) -> None:
    (tmp_path / "reward.py").write_text(body + "\n")
    (found,) = scored(jobs()[:1], function=f"{tmp_path}/reward.py:reward", form=form)
    assert found.outcome is Outcome.ERROR
    assert expected in found.note and "\n" not in found.note and found.note.endswith(".")
