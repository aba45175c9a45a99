"""Samples are scored while others are still being decoded, and nobody can tell by the verdicts."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from actor.scoring.job_queue import CALL_JOBS
from actor.scoring.pool import ScorePool, StreamedScores
from actor.verifiers.verdict import ScoreJob
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig


def job(text: str, answer: str = "18") -> ScoreJob:
    return ScoreJob(prompt="", completion=text, completion_ids=[1], truncated=False, columns={"answer": answer})


def nothing() -> None:
    pass


@contextlib.contextmanager
def open_pool(config: VerifierConfig) -> Iterator[ScorePool]:
    with contextlib.closing(ScorePool(config)) as pool:
        yield pool


def decode_until_scored(scores: StreamedScores, seconds: float = 20.0) -> None:
    """What an engine does that draws tokens and ends no completion."""
    end = time.monotonic() + seconds
    while not scores.queue.is_done():
        assert time.monotonic() < end, "nothing was scored while tokens were drawn"
        scores.add({})
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["gsm8k", "math"])
def test_verdicts_are_in_the_order_of_the_groups_whichever_ended_first(kind: str) -> None:
    jobs = {place: job(f"#### {place}", str(place - place % 2)) for place in range(3 * CALL_JOBS + 5)}
    with open_pool(VerifierConfig(kind=kind, strict=False)) as pool:  # pyright: ignore[reportArgumentType]
        scores = pool.begin()
        for places in (range(50, 90), range(20), range(90, len(jobs))):
            for place in places:
                scores.add({place: jobs.pop(place)})
            scores.add({})
        scores.add(dict(reversed(jobs.items())))
        verdicts = scores.verdicts(nothing)
    assert [verdict.final_answer for verdict in verdicts] == [str(place) for place in range(3 * CALL_JOBS + 5)]
    right = [Outcome.WRONG if place % 2 else Outcome.CORRECT for place in range(len(verdicts))]
    assert [verdict.outcome for verdict in verdicts] == right


def test_mathematics_is_scored_at_once_and_what_hangs_is_stopped_meanwhile() -> None:
    hanging = job("the answer is \\boxed{" + "9^" * 20 + "9}", "\\frac{1}{7}")
    with open_pool(VerifierConfig(kind="math", limit_s=0.5)) as pool:
        scores = cast(StreamedScores, pool.begin())
        scores.add({2: hanging})
        scores.add({0: job("#### 18")})
        decode_until_scored(scores)
        scores.add({1: job("#### 17")})
        outcomes = [verdict.outcome for verdict in scores.verdicts(nothing)]
    assert outcomes[:2] == [Outcome.CORRECT, Outcome.WRONG] and outcomes[2] is not Outcome.CORRECT


def test_what_costs_little_is_scored_in_calls_worth_their_while() -> None:
    with open_pool(VerifierConfig()) as pool:
        scores = cast(StreamedScores, pool.begin())
        for place in range(CALL_JOBS - 1):
            scores.add({place: job("#### 18")})
        assert scores.queue.jobs == []
        scores.add({CALL_JOBS: job("#### 18")})
        assert len(scores.queue.jobs) == CALL_JOBS
        decode_until_scored(scores)
        assert [verdict.outcome for verdict in scores.verdicts(nothing)] == [Outcome.CORRECT] * CALL_JOBS


def test_a_worker_killed_while_tokens_are_drawn_costs_nothing() -> None:
    with open_pool(VerifierConfig(kind="math", workers=1)) as pool:
        scores = cast(StreamedScores, pool.begin())
        (worker,) = psutil.Process(pool.fork_server.pid).children()
        worker.kill()
        scores.add({0: job("#### 18"), 1: job("#### 17")})
        decode_until_scored(scores)
        assert [verdict.outcome for verdict in scores.verdicts(nothing)] == [Outcome.CORRECT, Outcome.WRONG]


def test_a_function_sees_the_whole_order_at_once(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(completions, **_):\n    return [len(completions) + i / 10 for i in range(4)]\n")
    with open_pool(VerifierConfig(kind="callable", function=f"{file}:reward", workers=1)) as pool:
        scores = pool.begin()
        for place in (3, 0, 2, 1):
            scores.add({place: job(str(place))})
        assert [verdict.score for verdict in scores.verdicts(nothing)] == [4.0, 4.1, 4.2, 4.3]
