"""Our decode loop has the numbers of a teacher-forced pass, and draws from the distribution that it names."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion, EndedCompletion
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.stacks import dense_bytes
from protocol.messages import Finish, GroupOrder, Sampling
from shared.config.processes import FOLDED_BYTES, ActorConfig, is_folded
from shared.errors import ModelError
from shared.model.adapter_file import adapter_bytes, layout_digest
from shared.model.policy import Policy
from shared.model.sampler import BLOCK, block_sums, draw, first_above, inverse_cdf
from shared.seeding import derive, uniforms
from tests import reference
from tests.support.fakes import FAMILIES, Family, hidden_of, shake, tiny_model, tiny_policy, tiny_prompter

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = tuple(range(6))
CAP = 24
PROMPT_LENGTHS = (4, 11, 7)


def order(index: int, group: int = 4, length: int | None = None) -> GroupOrder:
    rng = np.random.default_rng(index)
    ids = rng.integers(6, 97, length or PROMPT_LENGTHS[index % 3]).astype(np.int32)
    seeds = tuple(derive(0, "sample", index, completion) for completion in range(group))
    return GroupOrder(group_id=f"g{index}", prompt_ids=ids, columns={}, seeds=seeds)


def orders(count: int = 3) -> tuple[GroupOrder, ...]:
    return tuple(order(index) for index in range(count))


def sampling(temperature: float = 1.0, cap: int = CAP) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=cap)


def silent(ended: Sequence[EndedCompletion]) -> None:
    """Progress that nobody watches."""


def teacher_forced(policy: Policy, prompt: np.ndarray, ids: np.ndarray, temperature: float) -> Any:
    """Log-probs and entropies of a completion by one pass over the whole sequence, full logits in float64."""
    sequence = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
    with torch.no_grad():
        logits = (hidden_of(policy, sequence[None])[0] @ policy.head.t())[len(prompt) - 1 : -1]
    logprobs, entropies = reference.softmax_stats(logits, torch.from_numpy(ids), temperature)
    return logprobs.numpy(), entropies.numpy()


def assert_same_bits(got: Sequence[Sequence[Completion]], expected: Sequence[Sequence[Completion]]) -> None:
    for ours, theirs in zip(flat(got), flat(expected), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist() and ours.finish == theirs.finish
        assert ours.entropies is not None and theirs.entropies is not None
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert ours.entropies.tobytes() == theirs.entropies.tobytes()


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


@pytest.fixture
def engine(policy: Policy) -> HFEngine:
    shake(policy, 1)
    return HFEngine(policy, tiny_prompter(*ENDS))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_entropies_are_those_of_a_teacher_forced_pass(
    tmp_path: Path, family: Family, temperature: float
) -> None:
    """Prompts of different lengths, so left padding and positions are part of it."""
    policy = tiny_policy(tiny_model(tmp_path, family))
    found = HFEngine(policy, tiny_prompter(*ENDS)).generate(orders(), sampling(temperature), silent)
    lengths = {len(completion.ids) for completion in flat(found)}
    assert len(lengths) > 2, "rows must leave the batch at different times"
    for asked, completions in zip(orders(), found, strict=True):
        for completion in completions:
            logprobs, entropies = teacher_forced(policy, asked.prompt_ids, completion.ids, temperature)
            np.testing.assert_allclose(completion.logprobs, logprobs, rtol=1e-5, atol=1e-5)
            assert completion.entropies is not None
            np.testing.assert_allclose(completion.entropies, entropies, rtol=1e-5, atol=1e-5)


def test_the_same_order_gives_the_same_bits(engine: HFEngine) -> None:
    first = engine.generate(orders(), sampling(), silent)
    engine.generate(orders(1), sampling(0.5), silent)
    assert_same_bits(engine.generate(orders(), sampling(), silent), first)


def test_an_order_leaves_nothing_that_waits_for_the_garbage_collector(engine: HFEngine) -> None:
    """It runs so seldom that the keys and values of dozens of orders would be in memory."""
    engine.generate(orders(), sampling(), silent)
    gc.collect()
    gc.disable()
    try:
        engine.generate(orders(), sampling(), silent)
        engine.logprobs(order(0).prompt_ids)
        left = gc.collect()
    finally:
        gc.enable()
    assert left == 0


def test_a_group_alone_gives_the_ids_it_gives_among_others(engine: HFEngine) -> None:
    together = engine.generate(orders(), sampling(), silent)
    for index, asked in enumerate(orders()):
        (alone,) = engine.generate((asked,), sampling(), silent)
        for ours, theirs in zip(alone, together[index], strict=True):
            assert ours.ids.tolist() == theirs.ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)


def test_samples_of_a_group_differ_and_each_follows_its_own_seed(engine: HFEngine) -> None:
    (group,) = engine.generate((order(1),), sampling(), silent)
    assert len({tuple(completion.ids.tolist()) for completion in group}) == 4
    asked = order(1)
    swapped = GroupOrder(
        group_id="swapped", prompt_ids=asked.prompt_ids, columns={}, seeds=tuple(reversed(asked.seeds))
    )
    (mirrored,) = engine.generate((swapped,), sampling(), silent)
    assert [s.ids.tolist() for s in mirrored] == [s.ids.tolist() for s in reversed(group)]


def test_groups_may_have_different_sizes(engine: HFEngine) -> None:
    asked = (order(0, group=1), order(1, group=5), order(2, group=2))
    found = engine.generate(asked, sampling(), silent)
    assert [len(completions) for completions in found] == [1, 5, 2]
    (alone,) = engine.generate(asked[2:], sampling(), silent)
    assert [s.ids.tolist() for s in alone] == [s.ids.tolist() for s in found[2]]


def test_temperature_zero_takes_the_most_likely_token(engine: HFEngine) -> None:
    for asked, completions in zip(orders(), engine.generate(orders(), sampling(0.0), silent), strict=True):
        assert len({tuple(completion.ids.tolist()) for completion in completions}) == 1
        ids = completions[0].ids
        sequence = torch.from_numpy(np.concatenate([asked.prompt_ids, ids]).astype(np.int64))
        with torch.no_grad():
            logits = (hidden_of(engine.policy, sequence[None])[0] @ engine.policy.head.t())[
                len(asked.prompt_ids) - 1 : -1
            ]
        assert logits.argmax(dim=-1).tolist() == ids.tolist()
        logprobs, _ = teacher_forced(engine.policy, asked.prompt_ids, ids, 1.0)
        np.testing.assert_allclose(completions[0].logprobs, logprobs, rtol=1e-5, atol=1e-5)


def test_an_end_id_ends_a_row_and_the_cap_ends_the_rest(engine: HFEngine) -> None:
    found = flat(engine.generate(tuple(order(i, group=8) for i in range(6)), sampling(), silent))
    finishes = {completion.finish for completion in found}
    assert finishes == {Finish.STOP, Finish.LENGTH}
    for completion in found:
        assert not set(completion.ids[:-1].tolist()) & set(ENDS)
        assert (completion.finish is Finish.STOP) == (completion.ids[-1] in ENDS)
        assert completion.finish is Finish.STOP or len(completion.ids) == CAP
        assert (
            len(completion.ids)
            == len(completion.logprobs)
            == len(completion.entropies if completion.entropies is not None else ())
        )


def test_an_end_id_at_the_cap_is_a_stop(engine: HFEngine) -> None:
    (group,) = engine.generate((order(0),), sampling(cap=1), silent)
    last = {int(completion.ids[0]) for completion in group}
    ending = HFEngine(engine.policy, tiny_prompter(*ENDS, *last))
    (again,) = ending.generate((order(0),), sampling(cap=1), silent)
    assert all(completion.finish is Finish.STOP and len(completion.ids) == 1 for completion in again)


def test_a_sequence_may_fill_the_models_positions_and_no_more(engine: HFEngine) -> None:
    room = engine.policy.config.max_position_embeddings
    (group,) = engine.generate((order(0, group=2, length=room - 3),), sampling(cap=3), silent)
    assert len(group) == 2
    with pytest.raises(ModelError, match=rf"A prompt of {room - 2} tokens .* up to 3 do not fit into the {room} pos"):
        engine.generate((order(0), order(1, length=room - 2)), sampling(cap=3), silent)


def test_every_end_id_counts(engine: HFEngine) -> None:
    (group,) = engine.generate((order(0),), sampling(), silent)
    longest = max(range(4), key=lambda row: len(group[row].ids))
    ids = group[longest].ids.tolist()
    (again,) = HFEngine(engine.policy, tiny_prompter(*ENDS, ids[2])).generate((order(0),), sampling(), silent)
    assert again[longest].finish is Finish.STOP
    assert again[longest].ids.tolist() == ids[: ids.index(ids[2]) + 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_rows_that_are_taken_over_give_what_each_completion_gives_alone(
    tmp_path: Path, family: Family, width: int
) -> None:
    """Seven groups of different sizes, so prompts come into memory and leave it while rows are at different tokens."""
    policy = tiny_policy(tiny_model(tmp_path, family))
    asked = tuple(order(index, group=size) for index, size in enumerate((4, 1, 5, 2, 3, 1, 4)))
    narrow = HFEngine(policy, tiny_prompter(*ENDS), ActorConfig(max_sequences=width))
    found = narrow.generate(asked, sampling(), silent)
    together = HFEngine(policy, tiny_prompter(*ENDS)).generate(asked, sampling(), silent)
    for group, completions, others in zip(asked, found, together, strict=True):
        for completion, other in zip(completions, others, strict=True):
            assert completion.ids.tolist() == other.ids.tolist() and completion.finish is other.finish
            logprobs, entropies = teacher_forced(policy, group.prompt_ids, completion.ids, 1.0)
            np.testing.assert_allclose(completion.logprobs, logprobs, rtol=1e-5, atol=1e-5)
            assert completion.entropies is not None
            np.testing.assert_allclose(completion.entropies, entropies, rtol=1e-5, atol=1e-5)
    assert_same_bits(narrow.generate(asked, sampling(), silent), found)


def test_at_most_the_width_is_decoded_at_once_and_no_row_is_empty_while_one_waits(engine: HFEngine) -> None:
    asked = tuple(order(index, group=4) for index in range(6))
    narrow = HFEngine(engine.policy, tiny_prompter(*ENDS), ActorConfig(max_sequences=5))
    told: list[Sequence[EndedCompletion]] = []
    lengths = [len(one.ids) for one in flat(narrow.generate(asked, sampling(), told.append))]
    # A list schedule: the next completion begins when the first of five rows is free. It draws its first token in
    # the step after the one in which the row was free.
    rows = [0] * 5
    for length in lengths:
        row = rows.index(min(rows))
        rows[row] += length
    assert len(told) == max(rows)


def test_the_width_follows_from_the_order_and_the_model(engine: HFEngine) -> None:
    assert engine.width(orders(), sampling()) == 256
    token = 4 * 2 * 2 * 16 * 2
    cap = 2**29 // 100 // token
    assert 90 <= engine.width(orders(), sampling(cap=cap)) <= 100
    assert engine.width(orders(), sampling(cap=2**29)) == 1


def test_progress_is_shown_once_a_token(engine: HFEngine) -> None:
    told: list[Sequence[EndedCompletion]] = []
    found = engine.generate(orders(), sampling(), told.append)
    assert len(told) == max(len(completion.ids) for completion in flat(found))


def test_a_sample_is_told_with_its_last_token(engine: HFEngine) -> None:
    told: list[Sequence[EndedCompletion]] = []
    found = engine.generate(orders(), sampling(), told.append)
    for time, ended in enumerate(told, start=1):
        for one in ended:
            assert one.completion is found[one.group][one.index] and len(one.completion.ids) == time
    assert sum(map(len, told)) == len(flat(found)) and len([ended for ended in told if ended]) > 1


def test_an_installed_adapter_is_what_is_sampled_from(engine: HFEngine, checkpoint: Path) -> None:
    other = tiny_policy(checkpoint)
    shake(other, 2)
    before = engine.generate(orders(), sampling(), silent)
    # Unfolded: to rounding the same; folded again in an engine of its own: to the bit.
    expected = HFEngine(other, tiny_prompter(*ENDS)).generate(orders(), sampling(), silent)
    engine.install(1, adapter_bytes(other.adapter))
    found = engine.generate(orders(), sampling(), silent)
    for ours, theirs in zip(flat(found), flat(expected), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    other.adapter.fold()
    assert_same_bits(found, HFEngine(other, tiny_prompter(*ENDS)).generate(orders(), sampling(), silent))
    assert [s.ids.tolist() for s in flat(before)] != [s.ids.tolist() for s in flat(expected)]


def linear_bytes(policy: Policy) -> int:
    return sum(4 * layer.lora_B.shape[0] * layer.lora_A.shape[1] for layer in policy.adapter.layers.values())


def test_only_small_linears_are_folded_unless_the_configuration_says_otherwise(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    adapter, size = policy.adapter, linear_bytes(policy)
    assert dense_bytes(adapter) == size
    assert is_folded("auto", FOLDED_BYTES) and not is_folded("auto", FOLDED_BYTES + 1)
    assert is_folded("always", FOLDED_BYTES + 1) and not is_folded("never", 1)
    never = HFEngine(policy, tiny_prompter(*ENDS), ActorConfig(fold="never"))
    never.install(1, adapter_bytes(adapter))
    assert all(layer.folded is None for layer in adapter.layers.values())
    HFEngine(policy, tiny_prompter(*ENDS)).install(1, adapter_bytes(adapter))
    assert all(layer.folded is not None for layer in adapter.layers.values())


def test_identity(engine: HFEngine) -> None:
    assert engine.identity.engine == "hf"
    assert engine.identity.base_digest == engine.policy.base_digest
    assert engine.identity.lora_digest == layout_digest(engine.policy.adapter)


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The statistic over cells of at least five expected draws, the rest pooled, and its 99.9 % quantile."""
    expected = counts.sum() * p
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    # Wilson and Hilferty's approximation; 3.0902 is the normal quantile.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), quantile


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_frequencies_are_the_distribution(engine: HFEngine, temperature: float) -> None:
    asked = order(3, group=4000)
    (group,) = engine.generate((asked,), sampling(temperature, cap=1), silent)
    counts = np.bincount([int(completion.ids[0]) for completion in group], minlength=97)
    sequence = torch.from_numpy(asked.prompt_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = hidden_of(engine.policy, sequence)[0, -1:] @ engine.policy.head.t()
    logprobs, _ = reference.softmax_stats(logits.expand(97, -1), torch.arange(97), temperature)
    statistic, quantile = chi_square(counts, logprobs.exp().numpy())
    assert statistic < quantile
    uniform, quantile = chi_square(counts, np.full(97, 1 / 97))
    assert uniform > quantile, "the test can tell distributions apart"


def inverse(p: torch.Tensor, u: torch.Tensor) -> list[int]:
    """[B, V] weights, [B] -> ids, through the sums of blocks."""
    return inverse_cdf(block_sums(p), u, p.shape[1], lambda columns: p.gather(1, columns)).tolist()


def test_a_draw_is_the_inverse_of_the_distribution_function() -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]] * 6)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse(p, u) == first_above(p, u[:, None]).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7])
def test_the_search_in_blocks_finds_what_a_search_in_the_whole_row_finds(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    p = torch.rand(64, size, generator=generator) ** 8
    p[:, ::3] = 0.0
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2**-53
    upto = p.double().cumsum(dim=-1)
    expected = torch.searchsorted(upto, u[:, None] * upto[:, -1:], right=True).squeeze(1)
    found = torch.tensor(inverse(p, u))
    assert torch.equal(found, expected)
    assert (p.gather(1, found[:, None]) > 0).all(), "a token without a weight is never drawn"


@pytest.mark.parametrize("size", [97, 5000])
def test_log_prob_and_entropy_of_a_draw_are_those_of_the_softmax(size: int) -> None:
    logits = 4 * torch.randn(7, size, generator=torch.Generator().manual_seed(1)) + 30
    drawn = draw(logits.clone(), torch.from_numpy(uniforms(3, 7)))
    logprobs, entropies = reference.softmax_stats(logits, drawn.ids, 1.0)
    np.testing.assert_allclose(drawn.logprobs, logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(drawn.entropies, entropies, rtol=1e-5, atol=1e-5)


def test_at_a_low_temperature_the_entropy_is_still_exact() -> None:
    """Logits in the hundreds, entropies near zero."""
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(2)) / 0.02
    drawn = draw(logits.clone(), torch.from_numpy(uniforms(3, 8)))
    logprobs, entropies = reference.softmax_stats(logits, drawn.ids, 1.0)
    np.testing.assert_allclose(drawn.logprobs, logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(drawn.entropies, entropies, rtol=1e-5, atol=1e-6)


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(0))
    u = torch.from_numpy(uniforms(3, 6))
    together = draw(logits.clone(), u)
    for row in range(6):
        alone = draw(logits[row : row + 1], u[row : row + 1])
        assert alone.ids.tolist() == together.ids[row : row + 1].tolist()
        torch.testing.assert_close(alone.logprobs, together.logprobs[row : row + 1])


def test_the_tail_of_a_large_vocabulary_is_drawn() -> None:
    """In fp32 a running sum near one would not move for hundreds of tokens of 1e-10."""
    p = torch.full((1, 150_001), 1e-10)
    p[0, 0] = 1 - 1.5e-5
    cumulative = np.cumsum(p[0].double().numpy())
    wanted = [20_011, 75_000, 149_998]
    middles = [(cumulative[token] - 0.5e-10) / cumulative[-1] for token in wanted]
    assert inverse(p.expand(3, -1), torch.tensor(middles, dtype=torch.float64)) == wanted


def test_each_small_token_beside_a_large_one_is_drawn() -> None:
    """Their block is summed in fp32, which loses some of them; inside it, each still has its share."""
    p = torch.full((1, 2 * BLOCK), 1e-10)
    p[0, 0] = 1.0
    edges = np.concatenate([[0.0], np.cumsum(p[0, :BLOCK].double().numpy())])
    middles = torch.from_numpy((edges[1:] + edges[:-1]) / 2 / edges[-1])
    of_block = p[:, :BLOCK].sum(dtype=torch.float32).double() / block_sums(p).sum()
    assert inverse(p.expand(BLOCK, -1), middles * of_block) == list(range(BLOCK))
