"""One order, filled: the right adapter, the right tokens, the right verdicts, and times that add up."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from actor.rollout import Rollout, fitting, scored_group
from actor.scoring.scores import ScoresTogether
from actor.verifiers.verdict import Context, ScoreJob, Verdict
from protocol.codec import encode
from protocol.messages import Finish, Outcome
from shared.process.lease import Lease
from tests.support.fake_card import GIB, FakeDriver
from tests.support.fakes import ScriptedEngine, ScriptedScorer, spelled, toy_orders, toy_policy, unheard


class NotedScorer(ScriptedScorer):
    """Keeps the jobs; says whether the lease was free meanwhile."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self.lease = lease
        self.jobs: list[ScoreJob] = []

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        self.jobs += jobs
        with self.lease.hold("scorer", meanwhile=taken):
            return super().score(jobs, on_progress)


def taken() -> None:
    """Called where a wait for the lease begins."""
    raise AssertionError("the lease is taken")


def quiet(phase: str) -> None:
    """Progress that nobody watches."""


def test_a_filled_order_holds_what_the_engine_drew_and_the_scorer_said(tmp_path: Path) -> None:
    (order,) = toy_orders()
    engine = ScriptedEngine()
    filled = Rollout(engine, ScriptedScorer(), Lease(tmp_path / "lease"), spelled).fill(order, toy_policy(0), quiet)
    (drawn,) = engine.generate(order.groups, order.sampling, unheard)
    (group,) = filled.groups
    assert (filled.order_id, filled.policy_version) == (order.order_id, 0)
    assert filled.adapter_sha256 == toy_policy(0).sha256
    assert group.completion_ids.tolist() == [token for c in drawn for token in c.ids.tolist()]
    assert group.logprobs.tolist() == [value for c in drawn for value in c.logprobs.tolist()]
    assert group.entropies is not None
    assert group.entropies.tolist() == [value for c in drawn for value in c.entropies.tolist()]  # pyright: ignore
    assert group.lengths == tuple(len(c.ids) for c in drawn)
    assert group.finishes == tuple(c.finish for c in drawn)
    right = tuple(7 in c.ids for c in drawn)
    assert group.outcomes == tuple(Outcome.CORRECT if r else Outcome.WRONG for r in right)
    assert group.scores == tuple(map(float, right))
    assert filled.timings.memory_mb > 1.0


def test_a_filled_order_tells_what_its_turn_took_of_the_card(tmp_path: Path) -> None:
    class LargeEngine(ScriptedEngine):
        def sleep(self) -> None:
            driver.allocate(3 * GIB)
            driver.free(3 * GIB)

    (order,), driver = toy_orders(), FakeDriver()
    rollout = Rollout(LargeEngine(), ScriptedScorer(), Lease(tmp_path / "lease", driver), spelled)
    found = rollout.fill(order, toy_policy(0), quiet).timings
    assert (found.card_allocated_mb, found.card_reserved_mb, found.card_driver_mb) == (3072.0, 3072.0, 3072.0)
    assert driver.card.used == 0, "given back before the completions were scored"


def test_the_time_of_an_order_is_told_apart(tmp_path: Path) -> None:
    class SlowEngine(ScriptedEngine):
        def install(self, version: int, adapter: bytes) -> None:
            time.sleep(0.02)
            super().install(version, adapter)

        def sleep(self) -> None:
            time.sleep(0.03)

    (order,) = toy_orders()
    began = time.monotonic()
    filled = Rollout(SlowEngine(), ScriptedScorer(), Lease(tmp_path / "lease"), spelled).fill(
        order, toy_policy(0), quiet
    )
    whole, found = time.monotonic() - began, filled.timings
    assert found.swap_s >= 0.05
    assert found.swap_s + found.rollout_s + found.verify_s <= whole, "nothing counts twice"


def test_an_engine_that_knows_no_entropies_sends_none(tmp_path: Path) -> None:
    (order,) = toy_orders()
    rollout = Rollout(ScriptedEngine(entropies=False), ScriptedScorer(), Lease(tmp_path / "lease"), spelled)
    assert rollout.fill(order, toy_policy(0), quiet).groups[0].entropies is None


def test_the_adapter_is_installed_when_its_bytes_change(tmp_path: Path) -> None:
    (order,) = toy_orders()
    engine = ScriptedEngine()
    rollout = Rollout(engine, ScriptedScorer(), Lease(tmp_path / "lease"), spelled)
    for policy in (toy_policy(0), toy_policy(0), toy_policy(1), toy_policy(0)):
        rollout.fill(order, policy, quiet)
    assert engine.installed == [0, 1, 0]
    rollout.fill(order, toy_policy(0, b"what a restarted learner made of version 0"), quiet)
    assert engine.installed == [0, 1, 0, 0]
    assert engine.adapter == b"what a restarted learner made of version 0"


class EagerScores(ScoresTogether):
    """Says where decoding was when jobs came."""

    def __init__(self, phases: list[str], scorer: ScriptedScorer) -> None:
        super().__init__(scorer.score)
        self.phases = phases

    def add(self, jobs: Mapping[int, ScoreJob]) -> None:
        self.phases.append(f"took {sorted(jobs)}")
        super().add(jobs)


class EagerScorer(ScriptedScorer):
    """Takes jobs as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def begin(self) -> EagerScores:
        return EagerScores(self.phases, self)


def test_a_sample_is_handed_over_when_it_ends(tmp_path: Path) -> None:
    (order,) = toy_orders()
    second = msgspec.structs.replace(order.groups[0], group_id="another", seeds=(7, 8, 9))
    order = msgspec.structs.replace(order, groups=(order.groups[0], second))
    scorer, num = EagerScorer(), len(order.groups[0].seeds)
    rollout = Rollout(ScriptedEngine(), scorer, Lease(tmp_path / "lease"), spelled)
    groups = rollout.fill(order, toy_policy(0), scorer.phases.append).groups
    assert scorer.phases == ["decoding", f"took {list(range(num + 3))}", "scoring"]
    for group in groups:
        cuts = np.split(group.completion_ids, np.cumsum(group.lengths)[:-1])
        assert group.scores == tuple(float(7 in ids) for ids in cuts)


def test_scoring_sees_the_whole_order_and_runs_without_the_lease(tmp_path: Path) -> None:
    (order,) = toy_orders()
    lease = Lease(tmp_path / "lease")
    scorer = NotedScorer(lease)
    phases: list[str] = []
    (group,) = Rollout(ScriptedEngine(), scorer, lease, spelled).fill(order, toy_policy(0), phases.append).groups
    assert phases == ["decoding", "scoring"]
    assert len(scorer.jobs) == len(order.groups[0].seeds)
    cuts = np.split(group.completion_ids, np.cumsum(group.lengths)[:-1])
    for job, ids, finish in zip(scorer.jobs, cuts, group.finishes, strict=True):
        assert job.completion_ids == ids.tolist() and job.completion == spelled(ids.tolist())
        assert job.prompt == spelled(order.groups[0].prompt_ids.tolist())
        assert job.columns == order.groups[0].columns
        assert job.truncated == (finish is Finish.LENGTH)
        assert job.context == Context(global_step=0)


class TalkativeScorer(ScriptedScorer):
    """Logs much about each completion."""

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        extras = {f"long {number}": "\u8a9e" * 300 for number in range(5)} | {"short": "\u8a9e" * 100}
        return [msgspec.structs.replace(verdict, extras=extras) for verdict in super().score(jobs, on_progress)]


def test_long_texts_of_functions_are_cut_to_what_a_message_takes(tmp_path: Path) -> None:
    (order,) = toy_orders()
    large = [
        msgspec.structs.replace(order.groups[0], group_id=f"group {n}", seeds=tuple(range(128))) for n in range(16)
    ]
    order = msgspec.structs.replace(order, groups=tuple(large))
    rollout = Rollout(ScriptedEngine(), TalkativeScorer(), Lease(tmp_path / "lease"), spelled)
    filled, again = (rollout.fill(order, toy_policy(0), quiet) for _ in range(2))
    assert encode(filled)
    kept = {f"long {number}": ("\u8a9e" * 200,) * 128 for number in range(5)} | {"short": ("\u8a9e" * 100,) * 128}
    for one, other in zip(filled.groups, again.groups, strict=True):
        assert one.extras == other.extras == kept


def test_texts_that_fit_are_not_cut() -> None:
    (order,) = toy_orders()
    said = [verdict_with("\u8a9e" * 300), verdict_with("")]
    group = scored_group(order.groups[0], ScriptedEngine().generate(order.groups, order.sampling, unheard)[0], said)
    assert fitting((group,)) == (group,)


def verdict_with(text: str) -> Verdict:
    return Verdict(outcome=Outcome.WRONG, score=0.0, final_answer=None, note="", extras={"read": text})


def test_what_functions_log_goes_along_with_the_group() -> None:
    (order,) = toy_orders()
    three = msgspec.structs.replace(order.groups[0], seeds=(7, 8, 9))
    found = [Verdict(outcome=Outcome.WRONG, score=0.0, final_answer=None, note="")] * 3
    found[1] = msgspec.structs.replace(found[1], metrics={"seen": 1.0}, extras={"read": "18"})
    found[2] = msgspec.structs.replace(found[2], metrics={"seen": 4.0, "late": 2.0}, extras={"read": "7", "why": "x"})
    completions = ScriptedEngine().generate((three,), order.sampling, lambda ended: None)
    group = scored_group(three, completions[0], found)
    assert group.metrics == {"seen": 2.5, "late": 2.0}
    assert group.extras == {"read": ("", "18", "7"), "why": ("", "", "x")}
