"""Steps are replayed as graphs of their shape; where a graph cannot be made, the loop goes on without."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.fixed_decoding import FixedLoop, Grain
from actor.engines.fixed_rows import FixedBuffers
from actor.engines.hf_engine import HFEngine
from actor.engines.replay import MOST, Replay, Step, StepShape
from actor.engines.token_step.layers import Layers
from protocol.messages import GroupOrder, Sampling
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.fakes import shake, tiny_policy, tiny_prompter, unheard

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(temperature=1.0, max_new_tokens=24)


class Recorder:
    """Graphs without a card: each repeats its step over the rows and columns that were in use when it was recorded."""

    def __init__(self, buffers: Callable[[], FixedBuffers | None]) -> None:
        self.buffers = buffers
        self.warmed, self.recorded, self.replayed = 0, 0, 0

    def warm(self, step: Step) -> None:
        """Runs it."""
        self.warmed += 1
        step()

    def graph(self, step: Step) -> Step:
        """Does not run it."""
        self.recorded += 1
        buffers = self.buffers()
        assert buffers is not None
        rows = buffers.cache.rows
        then = rows.prompts, rows.columns

        def again() -> None:
            self.replayed += 1
            now = rows.prompts, rows.columns
            rows.prompts, rows.columns = then
            step()
            rows.prompts, rows.columns = now

        return again


class Refusing(Recorder):
    """A card on which nothing can be captured."""

    error: RuntimeError = RuntimeError("operation not permitted when stream is capturing\nmore lines")

    def graph(self, step: Step) -> Step:
        """Raises."""
        self.recorded += 1
        raise self.error


class FailingInside(Refusing):
    """The same, found out after some layers. Nothing was computed, and what was allocated holds anything."""

    def graph(self, step: Step) -> Step:
        """Raises."""
        buffers = self.buffers()
        assert buffers is not None
        layers = buffers.cache.layers
        kept = [*buffers.state.all(), *(one for layer in layers for one in (layer.keys, layer.values))]
        before = [one.clone() for one in kept]
        last = layers.pop()
        with pytest.raises(ValueError, match="shorter"):
            step()
        layers.append(last)
        for one, values in zip(kept, before, strict=True):
            one.copy_(values)
        for bias in buffers.cache.rows.biases.values():
            bias.fill_(float("nan"))
        return super().graph(step)


class Full(Recorder):
    """A card without memory for a graph, at first."""

    def graph(self, step: Step) -> Step:
        """Raises once."""
        if not self.recorded:
            self.recorded += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().graph(step)


class FullAtTheEnd(Recorder):
    """The same, and then the capture cannot be ended either."""

    def graph(self, step: Step) -> Step:
        """Raises once."""
        if not self.recorded:
            self.recorded += 1
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("capture was invalidated")
        return super().graph(step)


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def engine_with(policy: Policy, capture: type[Recorder] | None) -> tuple[HFEngine, list[Recorder]]:
    """Its graphs are made by this."""
    engine, made = HFEngine(policy, tiny_prompter(*range(6))), list[Recorder]()
    assert isinstance(engine.layers, Layers)

    def begin() -> Recorder:
        assert capture is not None and engine.fixed is not None
        loop = engine.fixed
        # The same one again, so that it counts over all buffers.
        made.append(made[0] if made else capture(lambda: loop.buffers))
        return made[0]

    engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, Grain(), begin if capture else None)
    return engine, made


def orders(count: int, size: int) -> tuple[GroupOrder, ...]:
    rng = np.random.default_rng(count)
    return tuple(
        GroupOrder(
            group_id=str(index),
            prompt_ids=rng.integers(6, 97, 3 + index % 5).astype(np.int32),
            columns={},
            seeds=tuple(range(10 * index, 10 * index + size)),
        )
        for index in range(count)
    )


def bits(groups: Sequence[Sequence[Completion]]) -> list[tuple[bytes, bytes]]:
    return [(one.ids.tobytes(), one.logprobs.tobytes()) for group in groups for one in group]


@pytest.mark.parametrize("asked", [orders(3, 4), orders(9, 1)], ids=["groups", "single samples"])
def test_graphs_give_the_bits_of_the_steps_that_they_repeat(policy: Policy, asked: tuple[GroupOrder, ...]) -> None:
    """Over several shapes: columns grow and rows close up. The second order replays all of its steps."""
    plain, _ = engine_with(policy, None)
    expected = bits(plain.generate(asked, SAMPLING, unheard))
    replayed, made = engine_with(policy, Recorder)
    assert bits(replayed.generate(asked, SAMPLING, unheard)) == expected
    (recorder,) = made
    assert recorder.warmed >= recorder.recorded > 1
    before = (recorder.warmed, recorder.recorded)
    assert bits(replayed.generate(asked, SAMPLING, unheard)) == expected
    assert recorder.warmed == before[0] and recorder.recorded <= recorder.warmed
    assert bits(replayed.generate(asked, SAMPLING, unheard)) == expected
    assert recorder.recorded == recorder.warmed, "the graphs of earlier orders are used again"


def test_a_graph_computes_with_the_adapter_that_is_installed(policy: Policy) -> None:
    replayed, _ = engine_with(policy, Recorder)
    shake(policy, 1)
    replayed.install(1, adapter_bytes(policy.adapter))
    first = bits(replayed.generate(orders(2, 2), SAMPLING, unheard))
    shake(policy, 2)
    replayed.install(2, adapter_bytes(policy.adapter))
    second = bits(replayed.generate(orders(2, 2), SAMPLING, unheard))
    plain, _ = engine_with(policy, None)
    assert first != second == bits(plain.generate(orders(2, 2), SAMPLING, unheard))


def test_a_turn_that_ends_gives_graphs_back(policy: Policy) -> None:
    replayed, made = engine_with(policy, Recorder)
    replayed.generate(orders(2, 2), SAMPLING, unheard)
    assert replayed.fixed is not None and replayed.fixed.replay.graphs
    replayed.sleep()
    assert not replayed.fixed.replay.graphs and replayed.fixed.replay.maker is None
    recorded = made[0].recorded
    replayed.generate(orders(2, 2), SAMPLING, unheard)
    assert made[0].recorded == 2 * recorded and len(made) == 2


def test_the_check_leaves_no_graph_of_narrow_windows(policy: Policy) -> None:
    replayed, made = engine_with(policy, Recorder)
    replayed.check()
    assert made[0].replayed and replayed.fixed is not None and not replayed.fixed.replay.graphs


@pytest.mark.parametrize("kind", [Refusing, FailingInside])
def test_a_step_that_cannot_be_captured_runs_as_it_is(
    policy: Policy, kind: type[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = engine_with(policy, None)
    refused, made = engine_with(policy, kind)
    found = refused.generate(orders(2, 4), SAMPLING, unheard)
    assert bits(found) == bits(plain.generate(orders(2, 4), SAMPLING, unheard))
    refused.generate(orders(2, 4), SAMPLING, unheard)
    assert made[0].recorded == 1, "it is not tried again"
    assert [line.message for line in caplog.records if "CUDA graphs" in line.message] == [
        "decodes without CUDA graphs: a step cannot be captured"
        " (RuntimeError: operation not permitted when stream is capturing)"
    ]


@pytest.mark.parametrize("kind", [Full, FullAtTheEnd])
def test_a_card_without_memory_for_a_graph_is_out_of_memory(
    policy: Policy, kind: type[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = engine_with(policy, None)
    full, made = engine_with(policy, kind)
    found = full.generate(orders(2, 4), SAMPLING, unheard)
    expected = plain.generate(orders(2, 4), SAMPLING, unheard)
    assert [ids for ids, _ in bits(found)] == [ids for ids, _ in bits(expected)]
    assert "out of memory with 8 completions at once" in caplog.text and made[0].replayed


class Counting:
    """Graphs that are the steps themselves."""

    made = 0

    def warm(self, step: Step) -> None:
        """Runs it."""
        step()

    def graph(self, step: Step) -> Step:
        """Counted."""
        self.made += 1
        return step


def test_there_are_at_most_so_many_graphs() -> None:
    counting, ran = Counting(), list[int]()
    replay = Replay(lambda: counting)
    shapes = [StepShape(rows=rows, width=64, columns=64, temperature=1.0) for rows in range(1, MOST + 3)]
    for shape in shapes:
        for _ in range(3):
            replay(shape, lambda: ran.append(1))
    assert len(ran) == 3 * len(shapes) and len(replay.graphs) == MOST
    replay(shapes[0], lambda: ran.append(1))
    assert counting.made == len(shapes) + 1, "the first one was given up"
