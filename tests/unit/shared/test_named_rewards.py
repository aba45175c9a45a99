"""Named rewards in the workers: for form, and functions of the user's beside any verifier."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from actor.scoring.job_queue import Call, call_limit_s, is_one_by_one, runs_functions
from actor.scoring.pool import ScorePool
from actor.scoring.votes import as_job
from actor.scoring.worker_process import check
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.verifiers.verifier import answer_tags, think_tags
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig
from shared.config.named_rewards import form_in_words, rewards_in_words
from shared.errors import RewardError

FUNCTIONS = """
import math, time

def brevity(completions, **kwargs):
    return [1.0 / (1 + len(text)) for text in completions]

def batch_size(completions, **kwargs):
    return [float(len(completions))] * len(completions)

def group_size(prompts, completions, **kwargs):
    if any("slow" in text for text in completions):
        time.sleep(1000)
    return [float(prompts.count(prompt)) for prompt in prompts]

def odd(completions, **kwargs):
    return [{"none": None, "nan": math.nan, "word": "x"}.get(text.split()[-1], 2.5) for text in completions]

def hangs(completions, **kwargs):
    if any("hang" in text for text in completions):
        time.sleep(1000)
    return [0.5] * len(completions)

def raises(completions, **kwargs):
    if any("raise" in text for text in completions):
        raise ValueError("no")
    return [0.5] * len(completions)
"""


def job(completion: str, answer: str = "18", *, prompt: str = "", truncated: bool = False) -> ScoreJob:
    columns = {"answer": answer}
    return ScoreJob(prompt=prompt, completion=completion, completion_ids=[], truncated=truncated, columns=columns)


@pytest.fixture
def rewards(tmp_path: Path) -> Iterator[Any]:
    """Scores with these rewards, functions by their name alone."""
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)

    def scored(names: dict[str, float], texts: Sequence[str | ScoreJob], **verifier: Any) -> list[Verdict]:
        specs = {name if name.endswith("_tags") else f"{file}:{name}": weight for name, weight in names.items()}
        config = VerifierConfig(**{"kind": "math", "workers": 1, "rewards": specs, **verifier})
        with contextlib.closing(ScorePool(config)) as pool:
            jobs = [job(text) if isinstance(text, str) else text for text in texts]
            return pool.score(jobs, lambda: None)

    yield scored


@pytest.mark.parametrize(
    ("text", "think", "answer"),
    [
        ("<think>a</think>18", 1.0, 0.0),
        ("<think>a</think><answer>18</answer>", 1.0, 1.0),
        ("  <think>\na\n</think>\n<answer> 18 </answer>\n", 1.0, 1.0),
        ("<answer>18</answer>", 0.0, 1.0),
        ("<think>a</think><answer>18</answer><|im_end|> more", 1.0, 1.0),
        ("<think>a</think><answer>18</answer> more", 1.0, 0.0),
        ("<think>a</think><answer></answer>", 1.0, 0.0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 1.0, 0.0),
        ("<think></think>18", 0.0, 0.0),
        ("<think> </think>18", 0.0, 0.0),
        ("<think>a</think>", 0.0, 0.0),
        ("<think>a</think> \n", 0.0, 0.0),
        ("<think>a", 0.0, 0.0),
        ("a</think>18", 0.0, 0.0),
        ("x<think>a</think>18", 0.0, 0.0),
        ("<think>a</think>18<think>b</think>", 0.0, 0.0),
        ("<think>a<think>b</think></think>18", 0.0, 0.0),
        ("</think>18<think>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_form(text: str, think: float, answer: float) -> None:
    assert (think_tags(job(text)), answer_tags(job(text))) == (think, answer)


def test_a_template_may_open_the_thinking_in_the_prompt() -> None:
    assert think_tags(job("a</think>18", prompt="user: ?\nassistant: <think>\n")) == 1.0
    assert think_tags(job("<think>a</think>18", prompt="assistant: <think>")) == 0.0


def test_named_rewards_stand_beside_the_verdict_and_do_not_touch_it(rewards: Any) -> None:
    texts = ["<think>a</think>\\boxed{18}", "\\boxed{19}", "none"]
    found = rewards({"think_tags": 0.5, "brevity": -3.0}, texts)
    assert [verdict.outcome for verdict in found] == ["correct", "wrong", "unparsable"]
    assert [verdict.score for verdict in found] == [1.0, 0.0, 0.0]
    wanted = [{"think_tags": float(n == 0), "brevity": 1 / (1 + len(text))} for n, text in enumerate(texts)]
    assert [verdict.rewards for verdict in found] == wanted


@pytest.mark.parametrize("kind", ["gsm8k", "exact", "math"])
def test_a_function_sees_many_completions_at_once_beside_every_verifier(rewards: Any, kind: str) -> None:
    found = rewards({"batch_size": 1.0}, ["#### 18"] * 20, kind=kind)
    assert {verdict.rewards["batch_size"] for verdict in found} == {20.0}


def groups(size: int, *texts: str) -> list[ScoreJob]:
    return [job(text, prompt=f"Question {number}") for number, text in enumerate(texts) for _ in range(size)]


@pytest.mark.parametrize("kind", ["gsm8k", "math"])
@pytest.mark.parametrize(("workers", "largest"), [(1, 45.0), (3, 18.0), (8, 9.0)])
def test_no_group_is_split_between_calls_of_a_function(rewards: Any, kind: str, workers: int, largest: float) -> None:
    jobs = groups(9, *["#### 18"] * 5)
    found = rewards({"group_size": 1.0, "batch_size": 1.0}, jobs, kind=kind, workers=workers)
    assert {verdict.rewards["group_size"] for verdict in found} == {9.0}
    assert max(verdict.rewards["batch_size"] for verdict in found) == largest


def test_tasks_with_the_same_prompt_are_groups_of_their_own(rewards: Any) -> None:
    """As games are, and what an agent writes."""
    jobs = [
        structs.replace(job, prompt="?", columns=job.columns | {"game": str(place // 4)})
        for place, job in enumerate(groups(4, *["#### 18"] * 4))
    ]
    found = rewards({"batch_size": 1.0}, jobs, workers=2)
    assert {verdict.rewards["batch_size"] for verdict in found} == {8.0}


def test_what_hangs_in_one_group_leaves_the_other_groups_whole(rewards: Any) -> None:
    found = rewards({"group_size": 1.0}, groups(2, "#### 18", "#### 18 slow", "#### 18"), limit_s=1.0)
    assert [verdict.outcome for verdict in found] == ["correct"] * 2 + ["timeout"] * 2 + ["correct"] * 2
    assert [verdict.rewards["group_size"] for verdict in found] == [2.0, 2.0, 0.0, 0.0, 2.0, 2.0]


def test_a_call_of_a_function_beside_mathematics_has_more_time_the_more_completions_it_has() -> None:
    beside, alone = VerifierConfig(kind="math", rewards={"a.py:x": 1.0}), VerifierConfig(kind="callable")
    assert [call_limit_s(beside, jobs) for jobs in (1, 32, 33, 320)] == [10.0, 10.0, 20.0, 100.0]
    assert [call_limit_s(config, 320) for config in (alone, VerifierConfig(kind="math"))] == [10.0, 10.0]


def test_comparisons_of_answers_stay_in_small_calls_beside_a_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    jobs = [as_job(f"{number}/7", f"{number}/14") for number in range(100)]
    config = VerifierConfig(kind="math", rewards={f"{tmp_path}/mine.py:raises": 1.0})
    with contextlib.closing(ScorePool(config)) as pool:
        assert pool.num_calls(jobs) == 4
        assert [verdict.outcome for verdict in pool.score(jobs, lambda: None)] == ["correct"] + ["wrong"] * 99


def test_none_counts_nothing_and_what_is_no_number_is_an_error_that_names_the_reward(rewards: Any) -> None:
    found = rewards({"odd": 1.0}, ["18 none", "#### 18", "18 nan", "18 word"], kind="gsm8k")
    assert [verdict.rewards["odd"] for verdict in found] == [0.0, 2.5, 0.0, 0.0]
    assert [verdict.outcome for verdict in found] == ["correct", "correct", "error", "error"]
    assert all(verdict.note.startswith("odd: The reward function returned") for verdict in found[2:])


def test_a_completion_that_makes_a_reward_raise_or_hang_costs_only_its_own_verdict(rewards: Any) -> None:
    texts = ["\\boxed{18} raise", "\\boxed{18}", "\\boxed{19} hang", "\\boxed{19}"]
    found = rewards({"raises": 1.0, "hangs": 1.0}, texts, limit_s=2.0)
    assert [verdict.outcome for verdict in found] == ["error", "correct", "timeout", "wrong"]
    assert [verdict.rewards["hangs"] for verdict in found] == [0.0, 0.5, 0.0, 0.5]
    assert all(verdict.rewards.keys() == {"raises", "hangs"} for verdict in found)


def test_a_reward_that_is_not_there_is_said_at_the_start(rewards: Any) -> None:
    with pytest.raises(RewardError, match="absent"):
        rewards({"absent": 1.0}, [])


def test_who_is_asked_job_by_job() -> None:
    plain, formed = VerifierConfig(kind="math"), VerifierConfig(kind="math", rewards={"think_tags": 1.0})
    mine = VerifierConfig(kind="math", rewards={"a.py:x": 1.0})
    assert [is_one_by_one(config) for config in (plain, formed, mine, VerifierConfig())] == [True, True, False, False]
    assert [runs_functions(config) for config in (plain, formed, mine)] == [False, False, True]


@pytest.mark.parametrize("rewards", [{}, {"x": 0.0, "y": 0.0}, {"x": float("nan")}, {"x": 1e10}])
def test_a_worker_that_reports_other_rewards_is_not_believed(rewards: dict[str, float]) -> None:
    verdict = Verdict(outcome=Outcome.WRONG, score=0.0, final_answer=None, note="", rewards=rewards)
    with pytest.raises(msgspec.ValidationError):
        check([verdict], Call(jobs=range(1)), {"x"})


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("text", "as texts (verifier.form = 'text')"),
        ("messages", "as lists of messages (verifier.form = 'messages')"),
        ("auto", "as lists of messages (verifier.form = 'auto': the model has a chat template)"),
    ],
)
def test_the_form_that_functions_are_given_is_said(form: Any, said: str) -> None:
    assert form_in_words(VerifierConfig(form=form)) == f"reward functions get prompts and completions {said}"


@pytest.mark.parametrize(
    ("verifier", "asked"),
    [
        ({"rewards": {"a.py:right": 2.0, "think_tags": 0.5}}, "(right, think_tags)"),
        ({"rewards": {"a.py:right": 2.0}}, "(right)"),
        ({"rewards": {"a.py:right": 2.0, "think_tags": 0.5}, "correct": "right"}, ""),
        ({"rewards": {"a.py:right": 1.0}}, ""),
        ({"rewards": {"think_tags": 0.5}, "function": "a.py:right"}, ""),
    ],
)
def test_where_a_sum_decides_what_is_correct_the_start_says_so(verifier: Any, asked: str) -> None:
    form, *others = rewards_in_words(VerifierConfig(kind="callable", **verifier))
    assert form.startswith("reward functions get")
    said = "a completion counts as correct if the weighted sum of its rewards is at least 0.5; if one reward decides,"
    assert others == ([f"{said} name it with verifier.correct {asked}"] if asked else [])
    assert rewards_in_words(VerifierConfig(kind="math", rewards={"think_tags": 0.5, "answer_tags": 1.0})) == []
