"""An actor that runs out of memory decodes fewer completions at once, and they are the same."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actor.engines.engine import Completion, EndedCompletion
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.hf_engine import CALM_ORDERS, HFEngine
from actor.engines.token_step.layers import Layers
from protocol.messages import GroupOrder, Sampling
from shared.errors import ModelError
from shared.model.policy import Policy
from shared.seeding import derive
from tests.support.fakes import VOCAB, tiny_policy, tiny_prompter, unheard

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)
Asks = Callable[[str, Any, Any], bool]
"""Name of an operation, its arguments, its result -> whether it is of the kind that fails."""


def prompt_pass(name: str, args: Any, found: Any) -> bool:
    return name == "aten::embedding" and args[1].shape[1:].numel() > 1


def cache(name: str, args: Any, found: Any) -> bool:
    return name in ("aten::zeros", "aten::new_zeros") and found.dim() == 4


def product(name: str, args: Any, found: Any) -> bool:
    return name in ("aten::addmm_", "aten::addmm", "aten::bmm")


def head(name: str, args: Any, found: Any) -> bool:
    return name in ("aten::mm", "aten::matmul", "aten::linear") and found.shape[-1] == VOCAB


def sampler(name: str, args: Any, found: Any) -> bool:
    return name == "aten::cumsum"


class Cramped(TorchDispatchMode):
    """A card whose memory does not suffice for certain operations: for calls `failing` of those, counted from 1."""

    def __init__(self, asks: Asks, *failing: int) -> None:
        super().__init__()
        self.asks, self.failing, self.calls = asks, failing, 0
        self.caches: list[weakref.ref[torch.Tensor]] = []
        self.left: list[weakref.ref[torch.Tensor]] = []
        """The caches that there were when it failed."""
        self.kept = 0
        """How many of them were still there when prompts ran again."""
        self.rows: list[int] = []
        """Of each product with the head."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, or the error of a card."""
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if prompt_pass(name, args, found):
            self.kept += sum(kept() is not None for kept in self.left)
        if cache(name, args, found):
            self.caches.append(weakref.ref(found))
        if head(name, args, found):
            self.rows.append(len(found))
        self.calls += self.asks(name, args, found)
        if self.asks(name, args, found) and self.calls in self.failing:
            self.left, self.caches = self.caches, []
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has ...")
        return found


class Small(TorchDispatchMode):
    """A card without room for products of more than so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, or the error of a card."""
        found = func(*args, **(kwargs or {}))
        if head(func._schema.name, args, found) and len(found) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def engine_of(policy: Policy, *, fixed: bool) -> HFEngine:
    engine = HFEngine(policy, tiny_prompter(*range(6)))
    assert isinstance(engine.layers, Layers)
    if fixed:
        engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, Grain())
    return engine


def orders(*sizes: int) -> tuple[GroupOrder, ...]:
    rng = np.random.default_rng(len(sizes))
    return tuple(
        GroupOrder(
            group_id=f"g{index}",
            prompt_ids=rng.integers(6, VOCAB, 3 + 2 * index).astype(np.int32),
            columns={},
            seeds=tuple(derive(0, index, completion) for completion in range(size)),
        )
        for index, size in enumerate(sizes)
    )


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [one for group in groups for one in group]


def ids_of(groups: Sequence[Sequence[Completion]]) -> list[list[int]]:
    return [one.ids.tolist() for one in flat(groups)]


FAILURES = {
    "prompts": (prompt_pass, (1,)),
    "cache": (cache, (3,)),
    "a product": (product, (40,)),
    "head": (head, (9,)),
    "sampler": (sampler, (14,)),
    "three times": (sampler, (5, 9, 20)),
}


@pytest.mark.parametrize("fixed", [False, True], ids=["shapes follow the tokens", "fixed shapes"])
@pytest.mark.parametrize("failure", FAILURES)
def test_the_completions_are_those_of_a_card_with_room(
    policy: Policy, failure: str, fixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asks, failing = FAILURES[failure]
    asked = orders(4, 3, 5)
    expected = engine_of(policy, fixed=fixed).generate(asked, SAMPLING, unheard)
    engine, told, mode = engine_of(policy, fixed=fixed), list[Sequence[EndedCompletion]](), Cramped(asks, *failing)
    with mode:
        found = engine.generate(asked, SAMPLING, told.append)
    assert ids_of(found) == ids_of(expected)
    for mine, theirs in zip(flat(found), flat(expected), strict=True):
        assert mine.finish is theirs.finish
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
    ended = [(one.group, one.index) for report in told for one in report]
    assert sorted(ended) == [(group, index) for group, order in enumerate(asked) for index in range(len(order.seeds))]
    for report in told:
        for one in report:
            assert one.completion is found[one.group][one.index]
    assert (mode.left or failure == "prompts") and not mode.kept, "one cache is gone before the next is made"
    lines = [line.message for line in caplog.records]
    assert len(lines) == len(failing)
    assert lines[0] == (
        "out of memory with 12 completions at once (OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB);"
        " those that have not ended begin again, 6 at once. actor.max_sequences sets the number"
    )


@pytest.mark.parametrize("fixed", [False, True])
def test_what_has_ended_is_not_decoded_again(policy: Policy, fixed: bool) -> None:
    """Late in the order, when most completions are there."""
    engine, asked = engine_of(policy, fixed=fixed), orders(12)
    lengths = [len(ids) for ids in ids_of(engine.generate(asked, SAMPLING, unheard))]
    failing = max(lengths) - 2
    looked_at = (failing - 1) // 8 * 8 if fixed else failing - 1
    unfinished = sum(length > looked_at for length in lengths)
    mode = Cramped(head, failing)
    with mode:
        engine.generate(asked, SAMPLING, unheard)
    assert unfinished < 12 and mode.rows[failing] == min(6, unfinished)


@pytest.mark.parametrize("fixed", [False, True])
def test_as_few_at_once_as_it_takes(policy: Policy, fixed: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked, engine = orders(8, 8), engine_of(policy, fixed=fixed)
    expected = ids_of(engine.generate(asked, SAMPLING, unheard))
    with Small(2):
        assert ids_of(engine.generate(asked, SAMPLING, unheard)) == expected
        assert len(caplog.records) == 3, "16, 8, 4"
        assert ids_of(engine.generate(asked, SAMPLING, unheard)) == expected
    assert len(caplog.records) == 3, "the next order begins with what has fitted"


def test_more_are_tried_again_after_a_while(policy: Policy) -> None:
    engine, asked = engine_of(policy, fixed=False), orders(8)
    with Small(2):
        engine.generate(asked, SAMPLING, unheard)
    widths = [engine.fitting.of(8)]
    for _ in range(2 * CALM_ORDERS):
        engine.generate(asked, SAMPLING, unheard)
        widths.append(engine.fitting.limit)
    assert widths[0] == 2 and sorted(widths) == widths and {2, 4, 8} <= set(widths)
    with Small(2):
        engine.generate(asked, SAMPLING, unheard)
    assert engine.fitting.limit == 2


@pytest.mark.parametrize("fixed", [False, True])
def test_a_card_that_has_no_room_for_one_is_told_what_to_lower(policy: Policy, fixed: bool) -> None:
    sentence = r"^One completion of up to 24 tokens .* rollout\.max_new_tokens.*actor\.max_sequences"
    with Small(0), pytest.raises(ModelError, match=sentence):
        engine_of(policy, fixed=fixed).generate(orders(4, 4), SAMPLING, unheard)


def test_other_errors_are_not_taken_for_it(policy: Policy) -> None:
    class Broken(Small):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Another error."""
            raise RuntimeError("an illegal memory access was encountered")

    with Broken(0), pytest.raises(RuntimeError, match="illegal memory access"):
        engine_of(policy, fixed=True).generate(orders(4), SAMPLING, unheard)
