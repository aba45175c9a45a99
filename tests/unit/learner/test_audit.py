"""What the learner checks of an actor's claims: which groups, by whose numbers, and what happens to a liar."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.durable.journal import Journal
from learner.durable.recorder import Index, JournalRecorder, RecordedOrders
from learner.orders.audit import FIRST_GROUPS, Audit, Chosen, Claim, Draws, Lie, LogprobCheck
from learner.orders.audited import AuditedOrders
from learner.orders.second_scores import ScoreCheck, SecondScores, can_score_again
from learner.update.mismatch import BF16, FP32, Gap, Gate
from protocol.messages import AnyMessage, FilledOrder, Group, Order, Outcome, Policy, Refused
from protocol.transport import Inbound
from shared.config.tree import Config
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy as Model
from shared.process.lease import NoLease
from tests.support.dispatch_bench import POLICY, Bench, ids, inbox, orders_in, with_group
from tests.support.fakes import (
    filled,
    hello_of,
    scripted_identity,
    shake,
    tiny_group,
    tiny_policy,
    toy_orders,
    toy_policy,
)
from tests.support.steps import forward_pass_of
from tests.support.wire_examples import plain, timings

pytestmark = pytest.mark.usefixtures("one_thread")
SHARE = 0.1
BLOCK = math.ceil(1 / SHARE)


@pytest.mark.parametrize("seed", range(20))
def test_one_group_of_each_block_is_checked_after_the_first_ones(seed: int) -> None:
    draws = Draws(lambda actor_id: SHARE, random.Random(seed))
    taken = [draws.takes("guest0") for _ in range(FIRST_GROUPS + 50 * BLOCK)]
    assert all(taken[:FIRST_GROUPS])
    blocks = [taken[start : start + BLOCK] for start in range(FIRST_GROUPS, len(taken), BLOCK)]
    assert {sum(block) for block in blocks} == {1}
    assert len({block.index(True) for block in blocks}) > BLOCK / 2, "at places that cannot be foreseen"
    windows = [taken[start : start + 2 * BLOCK - 1] for start in range(len(taken) - 2 * BLOCK + 2)]
    assert all(map(any, windows)), "a lie in every group is found within 2 / share - 1 groups"


def test_shares_are_those_of_each_actor_and_a_liar_has_the_whole() -> None:
    draws = Draws(lambda actor_id: {"actor0": 0.0, "guest0": 1.0, "guest1": 0.5}[actor_id], random.Random(1))
    assert not any(draws.takes("actor0") for _ in range(100))
    assert all(draws.takes("guest0") for _ in range(100))
    assert sum(draws.takes("guest1") for _ in range(FIRST_GROUPS + 100)) == FIRST_GROUPS + 50
    draws.liars.add("actor0")
    assert all(draws.takes("actor0") for _ in range(10))


# --- log-probs, by a real policy


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return tiny_policy(checkpoint)


def published(model: Model, version: int) -> Policy:
    data = np.frombuffer(adapter_bytes(model.adapter), np.uint8)
    return msgspec.structs.replace(toy_policy(version), adapter=data)


def true_group(model: Model) -> Group:
    """Random tokens with the log-probs that the policy has for them now."""
    group = tiny_group([1.0, 0.0], [9, 6])
    check = check_of(model, newest=0)
    chosen = chosen_of(group, published(model, 0))
    group.logprobs[:] = check.forward_pass.recomputed(check.samples(chosen), 1.0)
    return group


def chosen_of(group: Group, policy: Policy, temperature: float = 1.0, actor_id: str = "guest0") -> Chosen:
    order = toy_orders(version=policy.version)[0]
    sampling = msgspec.structs.replace(order.sampling, temperature=temperature)
    answer = FilledOrder(
        order_id=order.order_id,
        policy_version=policy.version,
        adapter_sha256=policy.sha256,
        groups=(group,),
        timings=timings(),
    )
    order = msgspec.structs.replace(order, sampling=sampling)
    return Chosen(claim=Claim(actor_id=actor_id, order=order, filled=answer, policy=policy), place=0)


def check_of(model: Model, newest: int, *, together: bool = False) -> LogprobCheck:
    forward_pass, newest_one = forward_pass_of(model, Config()), lambda: newest
    return LogprobCheck(forward_pass, lambda: Gate(0.0, FP32), NoLease(), None, newest_one, together=together)


def changed(group: Group, change: Callable[[np.ndarray], np.ndarray]) -> Group:
    return msgspec.structs.replace(group, logprobs=change(group.logprobs).astype(np.float32))


def test_true_log_probs_pass_and_false_ones_are_evidence(model: Model) -> None:
    shake(model, 1)
    check, policy, group = check_of(model, newest=0), published(model, 0), true_group(model)
    rounded = changed(group, lambda logprobs: logprobs + 1e-4 * np.where(np.arange(len(logprobs)) % 2, 1, -1))
    assert check.lies([chosen_of(group, policy), chosen_of(rounded, policy)]) == []
    one_token = changed(group, lambda logprobs: np.where(np.arange(len(logprobs)) == 3, logprobs - 1.0, logprobs))
    for false in (
        changed(group, lambda logprobs: logprobs - 0.01),
        changed(group, np.zeros_like),
        changed(group, lambda logprobs: logprobs[::-1]),
        one_token,
    ):
        (lie,) = check.lies([chosen_of(false, policy)])
        assert lie.actor_id == "guest0" and f"the log-probs of group {group.group_id} differ from those" in lie.evidence
        assert "allowed: 0.01 at the 99th percentile and 0.001 on average" in lie.evidence
    assert check.lies([chosen_of(changed(group, np.zeros_like), policy, temperature=0.0)]) == [], "greedy has none"


def test_in_a_refused_step_a_smaller_lie_is_found(model: Model) -> None:
    """One and a half times what is allowed: too little for one group, but the gate has refused the step."""
    shake(model, 1)
    policy, group = published(model, 0), true_group(model)
    off = changed(group, lambda logprobs: logprobs + 0.0015)
    chosen = [chosen_of(off, policy), chosen_of(group, policy, actor_id="guest1"), chosen_of(off, policy)]
    assert check_of(model, newest=0).lies(chosen) == []
    (lie,) = check_of(model, newest=0, together=True).lies(chosen)
    assert lie.actor_id == "guest0" and "and 1 more differ from those of policy 0 by 0.0015" in lie.evidence
    assert "99th percentile, and these are allowed" in lie.evidence


def test_both_figures_of_a_group_have_slack(model: Model) -> None:
    """One token that is off is above the percentile that is allowed, and all of them above the mean."""
    shake(model, 1)
    policy, group = published(model, 0), true_group(model)
    one_token = changed(group, lambda logprobs: logprobs - 0.018 * (np.arange(len(logprobs)) == 3))
    for off in (one_token, changed(group, lambda logprobs: logprobs + 0.0015)):
        assert check_of(model, newest=0).lies([chosen_of(off, policy)]) == []


def test_a_refused_step_has_checks_of_its_own() -> None:
    audit = Audit(Draws(lambda actor_id: 1.0), [FalseOnes()], [FalseOnes("guest0")])
    claim = chosen_of(tiny_group([1.0, 0.0], [2, 2]), toy_policy(0)).claim
    assert audit.lies([claim]) == []
    assert [lie.actor_id for lie in audit.all_lies([claim])] == ["guest0"]


def test_what_the_steps_of_a_run_allow_by_now_is_allowed_here_too(model: Model) -> None:
    shake(model, 1)
    policy, group = published(model, 0), true_group(model)
    steps, forward_pass = Gate(0.0, BF16), forward_pass_of(model, Config())
    check = LogprobCheck(forward_pass, steps.copy, NoLease(), None, newest=lambda: 0)
    one_token = changed(group, lambda logprobs: np.where(np.arange(len(logprobs)) == 3, logprobs - 0.9, logprobs))
    assert len(check.lies([chosen_of(one_token, policy)])) == 1
    assert steps.limits == BF16, "what is measured for one group raises nothing for the run"
    steps.limits = steps.limits.at_least(Gap(mean=0.05, p95=0.2, p99=0.5, largest=2.0))
    assert check.lies([chosen_of(one_token, policy)]) == []


def test_the_ordered_version_counts_and_the_trained_policy_stays(model: Model) -> None:
    shake(model, 1)
    before, honest = published(model, 4), true_group(model)
    shake(model, 2)
    now, current = published(model, 5), adapter_bytes(model.adapter)
    check = check_of(model, newest=5)
    assert check.lies([chosen_of(honest, before), chosen_of(true_group(model), now)]) == []
    (lie,) = check.lies([chosen_of(honest, now)])
    assert "differ from those of policy 5" in lie.evidence
    (lie,) = check.lies([chosen_of(true_group(model), before)])
    assert "differ from those of policy 4" in lie.evidence
    assert adapter_bytes(model.adapter) == current


# --- scores


def rescored(**changes: Any) -> ScoreCheck:
    return ScoreCheck(
        lambda order, answer: msgspec.structs.replace(
            answer, groups=(msgspec.structs.replace(answer.groups[0], **changes),)
        )
    )


def test_other_scores_than_the_learner_finds_are_evidence() -> None:
    chosen = chosen_of(tiny_group([1.0, 0.0], [2, 2]), toy_policy(0))
    assert rescored().lies([chosen]) == []
    (lie,) = rescored(outcomes=(Outcome.WRONG, Outcome.WRONG), scores=(0.0, 0.0)).lies([chosen])
    assert "completion 0 of group train/000000/000 came as 'correct' with a score of 1, and" in lie.evidence
    assert "finds 'wrong' and 0" in lie.evidence
    (lie,) = rescored(outcomes=(Outcome.CORRECT, Outcome.UNPARSABLE)).lies([chosen])
    assert "completion 1" in lie.evidence


@pytest.mark.parametrize("unsure", [Outcome.TIMEOUT, Outcome.ERROR, Outcome.ABSTAIN])
def test_a_verifier_that_was_cut_short_proves_nothing(unsure: Outcome) -> None:
    chosen = chosen_of(tiny_group([1.0, 0.0], [2, 2]), toy_policy(0))
    assert rescored(outcomes=(unsure, Outcome.WRONG), scores=(0.0, 0.0)).lies([chosen]) == []
    tired = tiny_group([0.0, 0.0], [2, 2], outcomes=(unsure, Outcome.WRONG))
    again = rescored(outcomes=(Outcome.CORRECT, Outcome.WRONG), scores=(1.0, 0.0))
    assert again.lies([chosen_of(tired, toy_policy(0))]) == []
    assert ScoreCheck(lambda order, answer: None).lies([chosen]) == []


def test_a_process_that_cannot_start_leaves_a_group_unchecked_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = SecondScores(tmp_path, meanwhile=lambda: None)
    scores.words = [str(tmp_path / "no_program")]
    assert ScoreCheck(scores).lies([chosen_of(tiny_group([1.0, 0.0], [2, 2]), toy_policy(0))]) == []
    assert "scores are not checked this time" in caplog.text


def test_whose_answers_are_the_same_each_time() -> None:
    assert [can_score_again(kind, in_environment=False) for kind in ("gsm8k", "exact", "math")] == [True] * 3
    assert not can_score_again("callable", in_environment=False)
    assert not can_score_again("gsm8k", in_environment=True)


# --- what happens to a liar


class FalseOnes:
    """A check that knows who lies."""

    def __init__(self, *liars: str) -> None:
        self.liars = liars
        self.checked: list[str] = []

    def lies(self, chosen: Sequence[Chosen]) -> list[Lie]:
        self.checked += [one.group.group_id for one in chosen]
        return [Lie(actor_id=one.actor_id, evidence="it said so") for one in chosen if one.actor_id in self.liars]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    yield journal
    journal.close()


class Trial:
    """A dispatcher over a journal, an audit of everything, and who was revoked."""

    def __init__(self, journal: Journal, *liars: str) -> None:
        self.bench = Bench()
        self.recorder = JournalRecorder(journal, 0, lambda group: None)
        self.bench.dispatcher.recorder = self.recorder
        self.revoked: list[tuple[str, str]] = []
        self.check = FalseOnes(*liars)
        self.audited = AuditedOrders(
            self.bench.dispatcher, self.recorder.void, lambda actor_id, reason: self.revoked.append((actor_id, reason))
        )
        self.audited.audit = Audit(Draws(lambda actor_id: 1.0), [self.check])
        self.audited.publish(POLICY, oldest_needed=0)


def other_numbers(order: Order) -> FilledOrder:
    answer = filled(order, POLICY)
    return with_group(answer, logprobs=answer.groups[0].logprobs - 1)


def test_a_liar_is_expelled_and_its_orders_of_the_step_are_filled_by_others(journal: Journal) -> None:
    trial, orders = Trial(journal, "liar"), toy_orders(count=3)
    bench, audited = trial.bench, trial.audited
    liar = bench.actor("liar")
    audited.submit(orders)
    given = orders_in(liar)
    bench.deliver(liar, *(other_numbers(order) for order in orders if order.order_id in given))
    more = orders_in(liar)
    bench.deliver(liar, *(other_numbers(order) for order in orders if order.order_id in more))
    assert len(given) + len(more) == 3 and trial.recorder.durable == set(ids(orders))
    inbox(liar)
    bench.dispatcher.port = port = AnsweringPort(trial, orders)
    assert [plain(one) for one in audited.collect(ids(orders))] == [plain(filled(order, POLICY)) for order in orders]
    assert port.given == ids(orders), "every one of them was ordered again, from another actor"
    refusals = [message for message in inbox(liar) if isinstance(message, Refused)]
    assert [one.reason for one in refusals] == ["Actor liar lied and is expelled: it said so."]
    assert trial.revoked == [("liar", "it said so")]
    assert {peer.actor_id for peer in bench.dispatcher.peers.by_address.values()} == {"honest"}
    liar.send(hello_of(scripted_identity(), "liar"))
    bench.dispatcher.pump()
    assert [type(message) for message in inbox(liar)] == [Refused], "its key may be accepted for another second"
    check_journal(journal, orders)


class AnsweringPort:
    """A learner's port. Before the learner receives, an honest actor reads what has come and fills it."""

    def __init__(self, trial: Trial, orders: list[Order]) -> None:
        self.port = trial.bench.dispatcher.port
        self.orders = {order.order_id: order for order in orders}
        self.honest = trial.bench.hub.actor_port("honest")
        self.honest.send(hello_of(scripted_identity(), "honest", 8))
        self.given: list[str] = []

    def send(self, peer: bytes, message: AnyMessage) -> None:
        self.port.send(peer, message)

    def receive(self, timeout_s: float) -> Inbound | None:
        for order_id in orders_in(self.honest):
            self.given.append(order_id)
            self.honest.send(filled(self.orders[order_id], POLICY))
        return self.port.receive(0.0)

    def close(self) -> None:
        self.port.close()


def check_journal(journal: Journal, orders: list[Order]) -> None:
    """What counts is the honest numbers: for a resumed run, and for a replay."""
    index = Index(journal.reading().segments).found
    again = JournalRecorder(journal, 0, lambda group: None)
    assert again.found == index and again.durable == set(ids(orders)) == set(index)
    replay = RecordedOrders(journal.reading().segments)
    replay.submit(orders)
    assert [plain(one) for one in replay.collect(ids(orders))] == [plain(filled(order, POLICY)) for order in orders]


def test_greedy_groups_of_an_evaluation_use_up_no_check_of_sampled_ones() -> None:
    """Their log-probs are 0 whatever the policy, so false ones could follow unseen."""
    check = FalseOnes()
    audit = Audit(Draws(lambda actor_id: SHARE, random.Random(1)), [check])
    greedy, sampled = (chosen_of(tiny_group([1.0], [2]), toy_policy(0), at).claim for at in (0.0, 1.0))
    assert audit.lies([greedy] * (FIRST_GROUPS + BLOCK)) == []
    assert len(check.checked) == FIRST_GROUPS + 1, "these have scores, which are checked too"
    check.liars = ("guest0",)
    assert len(audit.lies([sampled])) == 1, "with the first one"


def test_an_honest_actor_is_left_alone_and_the_journals_orders_are_not_checked_again(journal: Journal) -> None:
    orders = toy_orders(count=2)
    first = JournalRecorder(journal, 0, lambda group: None)
    first.record([filled(orders[0], POLICY)])
    trial = Trial(journal)
    actor = trial.bench.actor()
    trial.audited.submit(orders)
    assert orders_in(actor) == ids(orders[1:])
    trial.bench.deliver(actor, filled(orders[1], POLICY))
    assert len(trial.audited.collect(ids(orders))) == 2
    assert trial.check.checked == [orders[1].groups[0].group_id] and not trial.revoked


def test_who_filled_an_order_is_forgotten_with_its_version(journal: Journal) -> None:
    trial, orders = Trial(journal), toy_orders(count=2)
    actor = trial.bench.actor()
    trial.audited.submit(orders)
    trial.bench.deliver(actor, *(filled(order, POLICY) for order in orders))
    trial.audited.collect(ids(orders[:1]))
    trial.audited.publish(toy_policy(1), oldest_needed=0)
    assert trial.bench.dispatcher.filled_by == {orders[1].order_id: "actor0"}, "this one is not collected yet"
    trial.audited.collect(ids(orders[1:]))
    trial.audited.publish(toy_policy(2), oldest_needed=2)
    assert not trial.bench.dispatcher.filled_by and not trial.audited.orders


def test_a_void_of_an_order_is_durable_and_leaves_the_others(journal: Journal) -> None:
    orders = toy_orders(count=2)
    recorder = JournalRecorder(journal, 0, lambda group: None)
    recorder.record([filled(order, POLICY) for order in orders])
    recorder.void([orders[0].order_id, "eval-final-greedy/000000/u0000"])
    assert not recorder.is_durable(orders[0].order_id) and recorder.is_durable(orders[1].order_id)
    again = JournalRecorder(journal, 0, lambda group: None)
    assert again.find(orders[0]) is None and again.find(orders[1]) is not None
    assert journal.next_record == 2, "both orders are one record, and an evaluation is not in the journal"


def test_the_orders_of_a_step_are_void_at_once_and_before_anybody_is_expelled(journal: Journal) -> None:
    """A kill between two of them would leave a round of the step that no longer fits the round before it."""
    trial, orders = Trial(journal, "liar"), toy_orders(count=3)
    liar = trial.bench.actor("liar", num_credits=3)
    trial.audited.submit(orders)
    for order in orders:
        trial.bench.deliver(liar, filled(order, POLICY))
    found = trial.bench.dispatcher.collect(ids(orders))
    before, voided_first = journal.next_record, list[bool]()
    assert before == 3
    trial.audited.revoke = lambda actor_id, reason: voided_first.append(journal.next_record == before + 1)
    assert trial.audited.recheck(found) and voided_first == [True]
    assert journal.next_record == before + 1 and not trial.bench.dispatcher.filled_by
    assert Index(journal.reading().segments).found == JournalRecorder(journal, 0, lambda group: None).found == {}
