"""vLLM returns what our own engine would: ids, log-probs of the whole distribution, ends; repeatable."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from actor.engines.engine import Completion
from protocol.messages import Finish, GroupOrder, Sampling
from shared.errors import ModelError
from shared.model.canary import canary_ids, sequence_logprobs
from shared.model.policy import Policy
from tests.vllm.bench import Bench

T1 = Sampling(temperature=1.0, max_new_tokens=32)


def silent(*told: object) -> None:
    """Progress that nobody watches."""


def flat(groups: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def bits(groups: Sequence[Sequence[Completion]]) -> list[tuple[bytes, bytes, Finish]]:
    return [(s.ids.tobytes(), s.logprobs.tobytes(), s.finish) for s in flat(groups)]


def forced(policy: Policy, group: GroupOrder, completion: Completion) -> np.ndarray:
    """[T] the learner's log-probs of a completion at temperature 1."""
    return sequence_logprobs(policy, np.concatenate([group.prompt_ids, completion.ids]))[len(group.prompt_ids) - 1 :]


def test_log_probs_are_the_learners(bench: Bench) -> None:
    bench.engine.install(1, bench.adapter(1))
    groups = bench.groups(4, 6)
    completions = bench.engine.generate(groups, T1, silent)
    for group, drawn in zip(groups, completions, strict=True):
        for completion in drawn:
            np.testing.assert_allclose(completion.logprobs, forced(bench.policy, group, completion), atol=1e-4)
            assert completion.entropies is None and completion.logprobs.dtype == np.float32


def test_the_canary_scores_what_the_learner_scores(bench: Bench) -> None:
    bench.engine.install(1, bench.adapter(1))
    ids = canary_ids(0, len(bench.policy.head), 64)
    np.testing.assert_allclose(bench.engine.logprobs(ids), sequence_logprobs(bench.policy, ids), atol=1e-4)


def test_the_same_order_gives_the_same_bits_after_anything(bench: Bench) -> None:
    adapter = bench.adapter(1)
    bench.engine.install(1, adapter)
    first = bits(bench.engine.generate(bench.groups(3, 8), T1, silent))
    bench.engine.generate(bench.groups(7, 3, first_seed=9), T1, silent)
    bench.engine.install(2, bench.adapter(2))
    bench.engine.generate(bench.groups(3, 8), T1, silent)
    bench.engine.install(1, adapter)
    assert bits(bench.engine.generate(bench.groups(3, 8), T1, silent)) == first
    assert len(set(first)) > 12


def test_each_sample_follows_its_own_seed(bench: Bench) -> None:
    bench.engine.install(1, bench.adapter(1))
    (eight,) = bench.engine.generate(bench.groups(1, 8), T1, silent)
    (other,) = bench.engine.generate(bench.groups(1, 8, first_seed=1), T1, silent)
    assert len({completion.ids.tobytes() for completion in eight}) > 4
    assert {s.ids.tobytes() for s in eight} != {s.ids.tobytes() for s in other}


def test_greedy_takes_what_our_own_engine_takes(bench: Bench) -> None:
    adapter = bench.zero_adapter()
    bench.engine.install(0, adapter)
    ours = bench.hf()
    ours.install(0, adapter)
    greedy = Sampling(temperature=0.0, max_new_tokens=24)
    found = flat(bench.engine.generate(bench.groups(4, 1), greedy, silent))
    expected = flat(ours.generate(bench.groups(4, 1), greedy, silent))
    for got, wanted in zip(found, expected, strict=True):
        assert got.ids.tolist() == wanted.ids.tolist() and got.finish == wanted.finish
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_whole_distribution_is_drawn_from(bench: Bench, temperature: float) -> None:
    """First tokens of many completions against the learner's probabilities: chi-square in six sigma, all counted."""
    bench.engine.install(0, bench.zero_adapter())
    (order,) = bench.groups(1, 2000)
    sampling = Sampling(temperature=temperature, max_new_tokens=1)
    (drawn,) = bench.engine.generate((order,), sampling, silent)
    p = first_token_probabilities(bench, order, temperature)
    for completion in drawn[:50]:
        assert completion.logprobs[0] == pytest.approx(math.log(p[completion.ids[0]]), abs=1e-4)
    counts = np.bincount([int(completion.ids[0]) for completion in drawn], minlength=len(p))
    expected = p * len(drawn)
    often = expected > 5
    rest = np.array([counts[~often].sum()]), np.array([expected[~often].sum()])
    seen, wanted = np.append(counts[often], rest[0]), np.append(expected[often], rest[1])
    chi_square, freedom = float(((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()), len(seen) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 6


def first_token_probabilities(bench: Bench, order: GroupOrder, temperature: float) -> np.ndarray:
    """[V] by the learner's policy."""
    vocab = len(bench.policy.head)
    logp = np.array([sequence_logprobs(bench.policy, np.append(order.prompt_ids, token))[-1] for token in range(vocab)])
    scaled = np.exp((logp - logp.max()) / temperature)
    return scaled / scaled.sum()


def test_an_end_id_ends_a_sample_and_the_cap_ends_the_rest(bench: Bench) -> None:
    bench.engine.install(0, bench.zero_adapter())
    ends = bench.prompter.end_ids
    drawn = flat(bench.engine.generate(bench.groups(4, 8), Sampling(temperature=1.0, max_new_tokens=22), silent))
    for completion in drawn:
        stopped = completion.finish is Finish.STOP
        assert stopped == (completion.ids[-1] in ends) and not set(completion.ids[:-1].tolist()) & set(ends)
        assert stopped or len(completion.ids) == 22
    assert {completion.finish for completion in drawn} == {Finish.STOP, Finish.LENGTH}


def test_what_does_not_fit_is_refused_and_not_cut(bench: Bench) -> None:
    with pytest.raises(ModelError, match=r"do not fit the \d+ that vLLM was started for"):
        bench.engine.generate(bench.groups(1, 1), Sampling(temperature=1.0, max_new_tokens=400), silent)


def test_a_prompt_is_computed_once_a_group(bench: Bench) -> None:
    """All whole blocks of the prompt, by the requests that follow the first one of their group."""
    bench.engine.install(0, bench.zero_adapter())
    vllm, order = bench.engine.vllm, bench.group(2, 5)
    vllm.forget_prefixes()
    for column, seed in enumerate(order.seeds):
        vllm.submit(f"0/{column}", order.prompt_ids.tolist(), bench.engine.draw(seed, T1))
    cached = {output.request: output.cached_tokens for output in vllm.run()}
    block = bench.engine.options.block
    whole = (len(order.prompt_ids) - 1) // block * block
    assert whole > 0 and cached == {"0/0": 0} | {f"0/{column}": whole for column in range(1, 5)}


def test_after_an_order_nothing_keeps_vllm_from_giving_keys_and_values_back(bench: Bench) -> None:
    """On a CPU it can free none, and says that only after it has found nothing left to do."""
    bench.engine.install(0, bench.zero_adapter())
    before = bits(bench.engine.generate(bench.groups(2, 2), T1, silent))
    with pytest.raises(Exception, match="not supported on CPU"):
        bench.engine.vllm.give_back("kv")
    bench.engine.vllm.take_again("kv")
    bench.engine.logprobs(canary_ids(0, len(bench.policy.head), 8))
    with pytest.raises(Exception, match="not supported on CPU"):
        bench.engine.vllm.give_back("kv")
    bench.engine.vllm.take_again("kv")
    assert bits(bench.engine.generate(bench.groups(2, 2), T1, silent)) == before


def test_progress_is_shown_while_it_decodes(bench: Bench) -> None:
    seen: list[int] = []
    bench.engine.generate(bench.groups(1, 1), Sampling(temperature=1.0, max_new_tokens=8), lambda ended: seen.append(1))
    assert len(seen) >= 4
