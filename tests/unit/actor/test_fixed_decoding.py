"""The loop of fixed shapes gives the tokens of the loop whose shapes follow the tokens."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion, EndedCompletion
from actor.engines.fixed_decoding import FixedLoop, Grain, shape_of
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.layers import Layers
from protocol.messages import Finish, GroupOrder, Sampling
from shared.config.model import LoraConfig
from shared.config.processes import PIECE_TOKENS, ActorConfig
from shared.model.policy import Policy
from shared.seeding import derive
from tests.support.architectures import VOCAB, architecture_model
from tests.support.fakes import RANK, tiny_policy, tiny_prompter, unheard

pytestmark = pytest.mark.usefixtures("one_thread")

OURS = ["Llama", "Qwen2", "Qwen2 windowed", "Qwen3"]
ENDS = tuple(range(6))
CAP = 24
AS_ON_A_CARD = Grain()
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder, lora = tmp_path_factory.mktemp("models"), LoraConfig(rank=RANK, alpha=2.0 * RANK, targets=LINEARS)
    return {name: tiny_policy(architecture_model(folder, name), lora=lora) for name in OURS}


def orders(*sizes: int, lengths: Sequence[int] = (4, 11, 7, 2, 9)) -> tuple[GroupOrder, ...]:
    """Groups of these sizes, with prompts of different lengths."""
    rng = np.random.default_rng(len(sizes))
    return tuple(
        GroupOrder(
            group_id=f"g{index}",
            prompt_ids=rng.integers(6, VOCAB, lengths[index % len(lengths)]).astype(np.int32),
            columns={},
            seeds=tuple(derive(0, "sample", index, completion) for completion in range(size)),
        )
        for index, size in enumerate(sizes)
    )


def sampling(temperature: float = 1.0, cap: int = CAP) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=cap)


def dynamic(policy: Policy, *ends: int, width: int = 0) -> HFEngine:
    return HFEngine(policy, tiny_prompter(*(ends or ENDS)), ActorConfig(max_sequences=width, fold="never"))


def fixed(policy: Policy, *ends: int, width: int = 0, grain: Grain = AS_ON_A_CARD) -> HFEngine:
    """An engine that decodes in fixed shapes, as on a card."""
    engine = dynamic(policy, *ends, width=width)
    assert isinstance(engine.layers, Layers) and engine.fixed is None, "on a CPU shapes follow the tokens"
    engine.fixed = FixedLoop(policy, engine.layers, engine.end_ids, grain)
    return engine


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def assert_same(got: Sequence[Sequence[Completion]], expected: Sequence[Sequence[Completion]]) -> None:
    for mine, theirs in zip(flat(got), flat(expected), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist() and mine.finish is theirs.finish
        assert mine.ids.dtype == theirs.ids.dtype and mine.logprobs.dtype == theirs.logprobs.dtype
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-5)
        assert mine.entropies is not None and theirs.entropies is not None
        np.testing.assert_allclose(mine.entropies, theirs.entropies, rtol=0, atol=2e-5)


ASKED = {
    "two groups": (4, 4),
    "one group": (8,),
    "one sample of each prompt": (1,) * 11,
    "different sizes": (4, 1, 5, 2, 3, 1, 4),
}


CASES = [("Qwen2", asked, width) for asked in ASKED for width in (0, 1, 3, 8)]
CASES += [(name, *case) for name in OURS if name != "Qwen2" for case in (("two groups", 0), ("different sizes", 3))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "asked", "width"), CASES)
def test_tokens_are_those_of_the_other_loop(policies: dict[str, Policy], name: str, asked: str, width: int) -> None:
    """With fewer rows than completions too, so that rows are taken over and prompts come and go."""
    policy, groups = policies[name], orders(*ASKED[asked])
    expected = dynamic(policy, width=width).generate(groups, sampling(), unheard)
    assert len({len(one.ids) for one in flat(expected)}) > 2, "rows must end at different times"
    engine = fixed(policy, width=width)
    found = engine.generate(groups, sampling(), unheard)
    assert_same(found, expected)
    again = engine.generate(groups, sampling(), unheard)
    for one, other in zip(flat(again), flat(found), strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes(), "memory of an earlier order leaves no trace"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_temperature_is_that_of_the_order(policies: dict[str, Policy], temperature: float) -> None:
    engine, asked = fixed(policies["Qwen2"], width=5), orders(3, 3, 3)
    engine.generate(asked, sampling(), unheard)
    expected = dynamic(policies["Qwen2"]).generate(asked, sampling(temperature), unheard)
    assert_same(engine.generate(asked, sampling(temperature), unheard), expected)


@pytest.mark.parametrize("name", OURS)
def test_in_shapes_of_equal_size_it_is_the_same_to_the_last_bits(policies: dict[str, Policy], name: str) -> None:
    """Only attention to the prompt sums in another order, because on a CPU the other loop copies prompts to the rows.
    Shapes are equal if no row ends early, so that none leaves, and if no column is read that is not used."""
    asked, never = orders(3, 3), VOCAB + 1
    expected = dynamic(policies[name], never).generate(asked, sampling(), unheard)
    grain = Grain(look=1, prompt=1, parts=CAP)
    found = fixed(policies[name], never, grain=grain).generate(asked, sampling(), unheard)
    for mine, theirs in zip(flat(found), flat(expected), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist() and len(mine.ids) == CAP
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-6)
        assert mine.entropies is not None and theirs.entropies is not None
        np.testing.assert_allclose(mine.entropies, theirs.entropies, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grain", [Grain(look=1), Grain(look=5, prompt=1), Grain(look=64, parts=1), Grain(parts=24)])
def test_tokens_do_not_depend_on_the_grain(policies: dict[str, Policy], grain: Grain) -> None:
    asked = orders(2, 2, 2, 2)
    expected = dynamic(policies["Qwen3"]).generate(asked, sampling(), unheard)
    assert_same(fixed(policies["Qwen3"], width=3, grain=grain).generate(asked, sampling(), unheard), expected)


@pytest.mark.parametrize("tokens", [1, 22, 30])
@pytest.mark.parametrize("make", [dynamic, fixed])
def test_tokens_do_not_depend_on_the_pieces_in_which_prompts_run(
    policies: dict[str, Policy], make: Callable[[Policy], HFEngine], tokens: int
) -> None:
    asked = orders(1, 1, 1, 1, 1, 1, 1)
    expected = dynamic(policies["Llama"]).generate(asked, sampling(), unheard)
    engine = make(policies["Llama"])
    engine.piece_tokens = tokens
    if engine.fixed:
        engine.fixed.grain = Grain(piece=tokens, prompt=1)
    with prompts_run(engine) as runs:
        assert_same(engine.generate(asked, sampling(), unheard), expected)
    assert runs == {1: [1] * 7, 22: [2, 2, 2, 1], 30: [2, 2, 2, 1]}[tokens]


@pytest.mark.parametrize("make", [dynamic, fixed])
def test_many_prompts_run_in_pieces(policies: dict[str, Policy], make: Callable[[Policy], HFEngine]) -> None:
    engine = make(policies["Llama"])
    with prompts_run(engine) as runs:
        engine.generate(orders(*[1] * 40, lengths=[64]), sampling(cap=2), unheard)
    assert runs == [PIECE_TOKENS // 64, 40 - PIECE_TOKENS // 64]


@contextmanager
def prompts_run(engine: HFEngine) -> Iterator[list[int]]:
    """How many prompts each pass over prompts has."""
    runs: list[int] = []
    hook = engine.policy.backbone.embed_tokens.register_forward_hook(  # pyright: ignore
        lambda module, inputs, output: runs.append(len(inputs[0])) if inputs[0].dim() == 2 else None
    )
    yield runs
    hook.remove()


def test_an_order_leaves_nothing_that_waits_for_the_garbage_collector(policies: dict[str, Policy]) -> None:
    engine = fixed(policies["Qwen2"], width=3)
    engine.generate(orders(2, 2, 2), sampling(), unheard)
    gc.collect()
    gc.disable()
    try:
        engine.generate(orders(2, 2, 2), sampling(cap=CAP + 1), unheard)
        engine.sleep()
        left = gc.collect()
    finally:
        gc.enable()
    assert left == 0


def test_every_completion_is_told_once_and_soon(policies: dict[str, Policy]) -> None:
    told: list[Sequence[EndedCompletion]] = []
    found = fixed(policies["Qwen2"], width=4).generate(orders(3, 3, 3), sampling(), told.append)
    ended = [(one.group, one.index) for report in told for one in report]
    assert sorted(ended) == [(group, index) for group in range(3) for index in range(3)]
    for report in told:
        for one in report:
            assert one.completion is found[one.group][one.index]
    steps = sum(len(one.ids) for one in flat(found))
    assert steps / 4 / 8 <= len(told) < steps / 4, "a look every eight tokens"


def test_ends_and_the_cap(policies: dict[str, Policy]) -> None:
    found = flat(fixed(policies["Qwen2"]).generate(orders(8, 8), sampling(), unheard))
    assert {one.finish for one in found} == {Finish.STOP, Finish.LENGTH}
    for one in found:
        assert (one.finish is Finish.STOP) == (one.ids[-1] in ENDS)
        assert not set(one.ids[:-1].tolist()) & set(ENDS)
        assert one.finish is Finish.STOP or len(one.ids) == CAP


def test_no_end_id_lets_all_run_to_the_cap(policies: dict[str, Policy]) -> None:
    engine = fixed(policies["Qwen2"])
    assert engine.fixed is not None
    engine.fixed.end_ids = engine.end_ids[:0]
    found = flat(engine.generate(orders(2, 1), sampling(cap=5), unheard))
    assert [len(one.ids) for one in found] == [5, 5, 5]


@pytest.mark.parametrize(
    ("sizes", "width", "slots", "places"),
    [((8, 8), 16, 2, 8), ((8, 8), 15, 15, 1), ((1,) * 9, 16, 9, 1), ((5, 1, 1), 16, 7, 1)],
)
def test_a_prompt_is_in_memory_once_if_all_completions_fit(
    sizes: tuple[int, ...], width: int, slots: int, places: int
) -> None:
    shape = shape_of(orders(*sizes), CAP, width, 8)
    assert (shape.slots, shape.places, shape.rows) == (slots, places, slots * places)
    assert shape.width == (8 if len(sizes) == 1 else 16) and shape.room == CAP


def test_a_prompt_runs_once_while_a_row_has_it(policies: dict[str, Policy]) -> None:
    engine, ran = fixed(policies["Llama"], width=3), list[int]()
    hook = engine.policy.backbone.embed_tokens.register_forward_hook(  # pyright: ignore
        lambda module, inputs, output: ran.append(len(inputs[0])) if inputs[0].dim() == 2 else None
    )
    engine.generate(orders(8, 8), sampling(), unheard)
    hook.remove()
    assert ran == [1, 1], "sixteen completions of two prompts, three at once"


def test_rows_close_up_when_half_have_ended(policies: dict[str, Policy]) -> None:
    """Seen by the shapes of the steps: they become smaller, and a row is never computed after its slot has left."""
    engine, counts = fixed(policies["Qwen2"], grain=Grain(look=1)), list[int]()
    assert engine.fixed is not None
    replay = engine.fixed.replay

    class Counting:
        def __call__(self, shape: object, step: object) -> None:
            counts.append(shape.rows)  # pyright: ignore
            replay(shape, step)  # pyright: ignore

        def forget(self) -> None:
            replay.forget()

    engine.fixed.replay = Counting()  # pyright: ignore[reportAttributeAccessIssue]
    found = flat(engine.generate(orders(*((1,) * 16)), sampling(), unheard))
    lengths = sorted(len(one.ids) for one in found)
    expected, rows = list[int](), 16
    for step in range(lengths[-1]):
        live = sum(length > step for length in lengths)
        while rows > 1 and 2 * live <= rows:
            rows = -(-rows // 2)
        expected.append(rows)
    assert counts == expected and counts[-1] < 16


def test_buffers_stay_where_they_are_until_an_order_of_another_shape(policies: dict[str, Policy]) -> None:
    engine = fixed(policies["Qwen2"])
    assert engine.fixed is not None
    places = list[list[int]]()
    for cap in (CAP, CAP, CAP + 1):
        engine.generate(orders(2, 2), sampling(cap=cap), unheard)
        assert engine.fixed.buffers is not None
        tensors = [*engine.fixed.buffers.state.all(), *engine.fixed.buffers.cache.of_slots()]
        places.append([tensor.data_ptr() for tensor in tensors])
    assert places[0] == places[1] != places[2]
    engine.sleep()
    assert engine.fixed.buffers is None, "a turn that ends gives the memory back"


def test_weights_may_leave_the_card_between_turns(policies: dict[str, Policy]) -> None:
    told = list[str]()

    class Away:
        def sleep(self) -> None:
            """They go."""
            told.append("sleep")

        def wake(self) -> bool:
            """They come back."""
            told.append("wake")
            return True

        def sums(self) -> dict[str, int]:
            return {}

    engine = HFEngine(policies["Qwen2"], tiny_prompter(*ENDS), residency=Away())
    engine.sleep()
    assert engine.wake() and told == ["sleep", "wake"]
    assert not dynamic(policies["Qwen2"]).wake(), "without one they stay"


def test_a_value_that_is_not_finite_does_not_outlive_its_order(policies: dict[str, Policy]) -> None:
    engine, asked = fixed(policies["Qwen2"]), orders(2, 2)
    expected = engine.generate(asked, sampling(), unheard)
    assert engine.fixed is not None and engine.fixed.buffers is not None
    with torch.inference_mode():
        for layer in engine.fixed.buffers.cache.layers:
            for kept in (layer.prompt_keys, layer.prompt_values, layer.keys, layer.values):
                kept.fill_(torch.nan)
    found = engine.generate(asked, sampling(), unheard)
    assert [one.logprobs.tobytes() for one in flat(found)] == [one.logprobs.tobytes() for one in flat(expected)]
