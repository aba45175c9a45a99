"""Well-formed messages of an actor that has joined and means harm: refused in words, never recorded."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.durable.journal import Journal
from learner.durable.recorder import JournalRecorder
from learner.orders.order_check import FAULTS
from protocol.messages import Ack, FilledOrder, Outcome
from tests.support.dispatch_bench import POLICY, Bench, ids, inbox, refused_and_ordered_again, with_group
from tests.support.fakes import CHECK, VOCAB, filled, toy_orders


def cut_to(filled_order: FilledOrder, lengths: tuple[int, ...]) -> FilledOrder:
    """The same message with samples of other lengths."""
    total = sum(lengths)
    return with_group(
        filled_order,
        lengths=lengths,
        completion_ids=np.ones(total, np.int32),
        logprobs=np.full(total, -1.0, np.float32),
    )


def beyond_the_vocabulary(filled_order: FilledOrder) -> FilledOrder:
    ids = filled_order.groups[0].completion_ids.copy()
    ids[-1] = VOCAB
    return with_group(filled_order, completion_ids=ids)


def a_huge_id(filled_order: FilledOrder) -> FilledOrder:
    ids = filled_order.groups[0].completion_ids.copy()
    ids[0] = 2**31 - 1
    return with_group(filled_order, completion_ids=ids)


def an_empty_completion(filled_order: FilledOrder) -> FilledOrder:
    return cut_to(filled_order, (0, 2))


def nothing_at_all(filled_order: FilledOrder) -> FilledOrder:
    return cut_to(filled_order, (0, 0))


def an_endless_completion(filled_order: FilledOrder) -> FilledOrder:
    return cut_to(filled_order, (2, 5000))


def absurd_logprobs(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, logprobs=np.full_like(filled_order.groups[0].logprobs, -3e38))


def absurd_entropies(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, entropies=np.full_like(filled_order.groups[0].logprobs, 3e38))


def negative_entropies(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, entropies=np.full_like(filled_order.groups[0].logprobs, -1.0))


def a_score_for_a_fault(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, outcomes=(Outcome.TIMEOUT, Outcome.WRONG), scores=(1.0, 0.0))


def other_rewards(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, rewards={"bribe": (1.0, 1.0)})


def other_rewards_to_read(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, rewards={"\x1b[2J\nerror: all is lost": (1.0,)})


def a_metric_that_clears_the_screen(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, metrics={"\x1b[2J": 1.0})


def a_text_with_a_line_break(filled_order: FilledOrder) -> FilledOrder:
    return with_group(filled_order, extras={"all is\nlost": ("a", "b")})


NONSENSE = {
    a_metric_that_clears_the_screen: r"the names .*x1b\[2J.* printable characters",
    a_text_with_a_line_break: r"the names .*all is.*lost.* printable characters",
    beyond_the_vocabulary: rf"completion 1 has a token id that is not below {VOCAB}",
    a_huge_id: "completion 0 has a token id that is not below",
    an_empty_completion: "completion 0 has no token",
    nothing_at_all: "completion 0 has no token",
    an_endless_completion: "completion 1 has 5000 tokens and 4 were ordered at most",
    absurd_logprobs: "completion 0 has a log-prob below -1000",
    absurd_entropies: "completion 0 has an entropy above 22",
    negative_entropies: "completion 0 has a negative entropy",
    a_score_for_a_fault: "completion 0 has the outcome 'timeout' and a score of 1, which",
    other_rewards: r"came with the rewards \['bribe'\] and the run asks for \[\]",
    other_rewards_to_read: r"\\x1b\[2J\\nerror: all is lost",
}


@pytest.mark.parametrize(("change", "words"), [pytest.param(*case, id=case[0].__name__) for case in NONSENSE.items()])
def test_nonsense_is_refused_in_words_and_an_honest_actor_is_given_the_order(
    change: Callable[[FilledOrder], FilledOrder], words: str
) -> None:
    reason = refused_and_ordered_again(change)
    assert re.search(words, reason), reason
    assert reason.isprintable()


def test_a_reward_function_may_give_any_score_but_none_for_a_fault() -> None:
    check, (order,) = replace(CHECK, built_in=False), toy_orders(count=1)

    def said(outcome: Outcome, score: float) -> str:
        changed = with_group(filled(order, POLICY), outcomes=(outcome, Outcome.WRONG), scores=(score, 0.0))
        return check.fault(order, POLICY, changed)

    assert said(Outcome.CORRECT, 2.5) == said(Outcome.WRONG, -1.0) == ""
    for fault in FAULTS:
        assert said(fault, 0.0) == ""
        assert f"the outcome '{fault}' and a score of 1, which do not go together" in said(fault, 1.0)


def test_every_group_of_an_order_with_a_teacher_comes_with_its_log_probs() -> None:
    one, other = toy_orders(count=2)
    order = msgspec.structs.replace(one, groups=one.groups + other.groups, teacher=True)
    came = filled(order, POLICY)
    told = [msgspec.structs.replace(group, teacher=group.logprobs) for group in came.groups]
    assert CHECK.fault(order, POLICY, msgspec.structs.replace(came, groups=tuple(told))) == ""
    for groups in ((told[0], came.groups[1]), (came.groups[0], told[1]), came.groups):
        reason = CHECK.fault(order, POLICY, msgspec.structs.replace(came, groups=groups))
        assert "came without the log-probs of the teacher" in reason


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal")
    yield journal
    journal.close()


@pytest.mark.parametrize("order_id", ["train", "train/x/y", "train/\xb2/u0000", "nobody's", "train/000009/u0000"])
def test_a_filled_order_that_is_none_of_ours_is_dropped(journal: Journal, order_id: str) -> None:
    bench, orders = Bench(), toy_orders(count=1)
    bench.dispatcher.recorder = JournalRecorder(journal, 0, lambda group: None)
    hostile = bench.actor("hostile")
    bench.deliver(hostile, msgspec.structs.replace(filled(orders[0], POLICY), order_id=order_id))
    # What may fill an order that is still to come stays with the actor; the rest is acknowledged.
    assert inbox(hostile) == ([] if order_id == "train/000009/u0000" else [Ack(order_id=order_id)])
    assert journal.next_record == 0
    bench.dispatcher.submit(orders)
    bench.deliver(hostile, filled(orders[0], POLICY))
    assert len(bench.dispatcher.collect(ids(orders))) == 1
