"""The token step in C gives the numbers of transformers' layers, for every kind of processor that this one can play."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.library import SOURCE, Library, load
from actor.engines.token_step.compiled.step import CompiledDraw, CompiledLayers, has_covered_sizes
from protocol.messages import Sampling
from shared.config.processes import ActorConfig
from shared.errors import ModelError
from shared.model.policy import Policy
from tests.support.fakes import shake, tiny_prompter, unheard
from tests.support.processor_kinds import BF16, FP32, KINDS, Kind, library_file, needs_compiler
from tests.unit.actor.test_layers import ADAPTED, OURS, decoded, groups, policy_of

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
made: dict[Kind, Library] = {}


def library_of(kind: Kind, folder: Path) -> Library:
    """Compiled once for all tests of this process."""
    if kind not in made:
        made[kind] = load(library_file(SOURCE, kind, folder))
    return made[kind]


def engine_of(policy: Policy, library: Library, **config: Any) -> HFEngine:
    return HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(**config), compiled=library)


def by_modules(policy: Policy, **config: Any) -> list[Completion]:
    engine = HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(**config))
    engine.layers = None
    return decoded(engine)


kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@kinds
@pytest.mark.parametrize("targets", ADAPTED, ids=["some linears", "all linears"])
@pytest.mark.parametrize("name", OURS)
def test_numbers_are_those_of_the_modules(tmp_path: Path, name: str, targets: tuple[str, ...], kind: Kind) -> None:
    policy = policy_of(tmp_path, name, kind.dtype, targets)
    engine = engine_of(policy, library_of(kind, tmp_path), fold="never", max_sequences=4)
    assert has_covered_sizes(policy) and isinstance(engine.layers, CompiledLayers)
    atol = 2e-5 if kind.dtype == FP32 else 0.02
    for mine, theirs in zip(decoded(engine), by_modules(policy, fold="never", max_sequences=4), strict=True):
        same = common(mine.ids, theirs.ids)
        assert same == len(theirs.ids) or kind.dtype == BF16, "rounding alone turns a token"
        np.testing.assert_allclose(mine.logprobs[:same], theirs.logprobs[:same], rtol=0, atol=atol)
        assert mine.entropies is not None and theirs.entropies is not None
        np.testing.assert_allclose(mine.entropies[:same], theirs.entropies[:same], rtol=0, atol=atol)


def common(some: np.ndarray, others: np.ndarray) -> int:
    """Tokens before the first difference."""
    differs = np.flatnonzero(some[: len(others)] != others[: len(some)])
    return int(differs[0]) if len(differs) else min(len(some), len(others))


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.name)
def test_in_bf16_it_is_as_close_to_fp32_as_the_modules_are(tmp_path: Path, kind: Kind) -> None:
    """On the tokens of the modules, fed to both."""
    exact = policy_of(tmp_path, "Qwen2", FP32, ADAPTED[1])
    rounded = policy_of(tmp_path, "Qwen2", BF16, ADAPTED[1])
    theirs = by_modules(rounded, max_sequences=8)
    mine = decoded(engine_of(rounded, library_of(kind, tmp_path), max_sequences=8))
    errors = {"mine": [], "theirs": []}
    for name, completions in (("mine", mine), ("theirs", theirs)):
        prompts = [group.prompt_ids for group in groups() for _ in group.seeds]
        for prompt, one in zip(prompts, completions, strict=True):
            ids = np.concatenate([prompt, one.ids])
            known = HFEngine(exact, tiny_prompter(*range(6))).logprobs(ids)[-len(one.ids) :]
            # The engine divides logits by the temperature, the canary does not.
            errors[name] += [float(np.mean(np.abs(one.logprobs - known)))]
    assert np.mean(errors["mine"]) < 1.2 * np.mean(errors["theirs"]) + 1e-3


@kinds
def test_folded_weights_take_no_adapter(tmp_path: Path, kind: Kind) -> None:
    if kind.dtype == BF16:
        pytest.skip("only fp32 weights are folded")
    policy = policy_of(tmp_path, "Llama", FP32, ADAPTED[1])
    engine = engine_of(policy, library_of(kind, tmp_path), fold="always")
    assert isinstance(engine.layers, CompiledLayers) and not engine.layers.factors
    for mine, theirs in zip(decoded(engine), by_modules(policy, fold="always"), strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=2e-5)


@kinds
def test_a_new_adapter_is_used(tmp_path: Path, kind: Kind) -> None:
    policy = policy_of(tmp_path, "Qwen2", kind.dtype, ADAPTED[1])
    engine = engine_of(policy, library_of(kind, tmp_path))
    before = decoded(engine)
    shake(policy, 11)
    engine.prepare()
    after, fresh = decoded(engine), decoded(engine_of(policy, library_of(kind, tmp_path)))
    assert logprobs_of(after) == logprobs_of(fresh) != logprobs_of(before)


def logprobs_of(completions: Sequence[Completion]) -> list[bytes]:
    return [one.logprobs.tobytes() for one in completions]


@kinds
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(tmp_path: Path, kind: Kind) -> None:
    policy = policy_of(tmp_path, "Qwen3", kind.dtype, ADAPTED[0])
    library = library_of(kind, tmp_path)
    found: list[list[bytes]] = []
    for rows, threads in ((1, 1), (9, 1), (9, 2), (9, 3), (2, 2)):
        engine = engine_of(policy, library, max_sequences=rows)
        assert isinstance(engine.layers, CompiledLayers)
        engine.layers.step.threads = threads
        found.append(logprobs_of(decoded(engine)))
    assert found[1] == found[2] == found[3]
    # With few rows, columns are in another order, and prompts have less padding.
    atol = 2e-5 if kind.dtype == FP32 else 0.02
    for few, many in zip(found[0], found[1], strict=True):
        np.testing.assert_allclose(np.frombuffer(few, "f4"), np.frombuffer(many, "f4"), rtol=0, atol=atol)


@kinds
@pytest.mark.parametrize("rows", [7, 8, 16, 17, 63, 65, 130])
def test_any_number_of_rows(tmp_path: Path, rows: int, kind: Kind) -> None:
    """Each row of many is what it is alone, but for the head in fp32, which MKL computes."""
    policy = policy_of(tmp_path, "Llama", kind.dtype, ADAPTED[1])
    engine = engine_of(policy, library_of(kind, tmp_path), max_sequences=200)
    (group,) = groups()[:1]
    many = type(group)(group_id="many", prompt_ids=group.prompt_ids, columns={}, seeds=tuple(range(rows)))
    sampling = Sampling(temperature=1.0, max_new_tokens=6)
    (together,) = engine.generate((many,), sampling, unheard)
    for seed in {0, rows // 2, rows - 1}:
        one = type(group)(group_id="one", prompt_ids=group.prompt_ids, columns={}, seeds=(seed,))
        ((alone,),) = engine.generate((one,), sampling, unheard)
        assert alone.ids.tolist() == together[seed].ids.tolist()
        atol = 1e-5 if kind.dtype == FP32 else 0.0
        np.testing.assert_allclose(alone.logprobs, together[seed].logprobs, rtol=0, atol=atol)


@kinds
def test_turns_of_a_conversation_go_on_from_what_is_kept(tmp_path: Path, kind: Kind) -> None:
    policy = policy_of(tmp_path, "Qwen2", kind.dtype, ADAPTED[1])

    def two_turns(engine: HFEngine) -> list[Completion]:
        first = groups()[:1]
        sampling = Sampling(temperature=1.0, max_new_tokens=5)
        (begun,) = engine.take_turn(first, sampling, unheard)
        longer = tuple(
            type(first[0])(
                group_id=first[0].group_id,
                prompt_ids=np.concatenate([first[0].prompt_ids, one.ids, np.array([7, 8], np.int32)]),
                columns={},
                seeds=(seed,),
            )
            for one, seed in zip(begun, first[0].seeds, strict=True)
        )
        return [one for group in engine.take_turn(longer, sampling, unheard) for one in group]

    modules = HFEngine(policy, tiny_prompter(*range(6)), ActorConfig(fold="never"))
    modules.layers = None
    mine = two_turns(engine_of(policy, library_of(kind, tmp_path), fold="never"))
    for one, other in zip(mine, two_turns(modules), strict=True):
        same = common(one.ids, other.ids)
        assert same == len(other.ids) or kind.dtype == BF16
        np.testing.assert_allclose(one.logprobs[:same], other.logprobs[:same], rtol=0, atol=0.02)


def test_a_library_with_other_structures_is_refused(tmp_path: Path) -> None:
    library = library_of(KINDS[0], tmp_path)
    other = Library(**{**vars(library), "structure_bytes": (8, 8)})
    with pytest.raises(ModelError, match=r"other structures than step\.py; set actor\.token_step to 'torch'"):
        engine_of(policy_of(tmp_path, "Llama", FP32, ADAPTED[0]), other)


def exact_draw(logits: np.ndarray, uniform: float | None) -> tuple[int, float, float]:
    """In float64, as the formulas of shared/model/sampler.py say."""
    shifted = logits.astype(np.float64) - logits.max()
    weights = np.exp(shifted)
    total = weights.sum()
    if uniform is None:
        token = int(np.argmax(logits))
    else:
        token = int(np.searchsorted(np.cumsum(weights), uniform * total, side="right"))
    share = weights[weights > 0] / total
    return token, float(shifted[token] - np.log(total)), float(-(share * np.log(share)).sum())


@kinds
@pytest.mark.parametrize("size", [1, 5, 97, 1024, 1025, 5003])
def test_draws_are_those_of_the_formulas(tmp_path: Path, size: int, kind: Kind) -> None:
    draw = CompiledDraw(library_of(kind, tmp_path))
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(64, size, generator=generator)
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    uniforms[0] = 0.0
    drawn, greedy = draw(logits, uniforms), draw(logits, None)
    for row in range(64):
        token, logprob, entropy = exact_draw(logits[row].numpy(), float(uniforms[row]))
        # A running sum in fp32 weights may differ at the border between two tokens.
        assert abs(int(drawn.ids[row]) - token) <= 1
        assert int(drawn.ids[row]) == token or row > 0
        if int(drawn.ids[row]) == token:
            assert float(drawn.logprobs[row]) == pytest.approx(logprob, abs=2e-5)
        assert float(drawn.entropies[row]) == pytest.approx(entropy, abs=2e-5)
        assert int(greedy.ids[row]) == exact_draw(logits[row].numpy(), None)[0]
    same = sum(int(drawn.ids[row]) == exact_draw(logits[row].numpy(), float(uniforms[row]))[0] for row in range(64))
    assert same >= 63


@kinds
def test_a_draw_just_below_one_is_the_last_likely_token(tmp_path: Path, kind: Kind) -> None:
    draw = CompiledDraw(library_of(kind, tmp_path))
    logits = torch.full((4, 3000), -float("inf"))
    logits[2:] = -2000.0
    logits[:, 1500], logits[:, 1501] = 1.0, 2.0
    drawn = draw(logits, torch.tensor([np.nextafter(1.0, 0.0), 0.0] * 2, dtype=torch.float64))
    assert drawn.ids.tolist() == [1501, 1500] * 2, "what has no probability is never drawn"
    assert torch.isfinite(drawn.entropies).all() and torch.isfinite(drawn.logprobs).all()


@kinds
def test_a_draw_of_zero_is_the_first_token_of_any_probability(tmp_path: Path, kind: Kind) -> None:
    """Also in a block far below the row's maximum, where tokens of no probability stand at both ends."""
    draw = CompiledDraw(library_of(kind, tmp_path))
    logits = torch.full((2, 3000), -100.0)
    logits[:, 1500] = 2.0
    logits[1, :7] = logits[1, 1000:1024] = -float("inf")
    uniforms = torch.zeros(2, dtype=torch.float64)
    drawn = draw(logits, uniforms)
    assert drawn.ids.tolist() == [0, 7]
    for row in range(2):
        token, logprob, entropy = exact_draw(logits[row].numpy(), 0.0)
        assert token == int(drawn.ids[row])
        assert float(drawn.logprobs[row]) == pytest.approx(logprob, abs=2e-5)
        assert float(drawn.entropies[row]) == pytest.approx(entropy, abs=2e-5)


@kinds
@pytest.mark.parametrize("place", [0, 5, 1024, 2047, 2998, 2999], ids=lambda place: f"token {place}")
@pytest.mark.parametrize("others", [0.0, -2000.0, -float("inf")])
def test_what_is_no_number_is_told(tmp_path: Path, place: int, others: float, kind: Kind) -> None:
    """Wherever it stands: in a block far below the maximum, and among the last tokens, which fill no vector."""
    draw = CompiledDraw(library_of(kind, tmp_path))
    logits = torch.full((2, 3000), others)
    logits[:, 1500] = 1.0
    logits[0, place] = float("nan")
    for uniforms in (torch.tensor([0.5, 0.5], dtype=torch.float64), None):
        drawn = draw(logits, uniforms)
        assert torch.isnan(drawn.logprobs).tolist() == torch.isnan(drawn.entropies).tolist() == [True, False]
        assert 0 <= int(drawn.ids[0]) < 3000


@kinds
def test_shares_of_draws_are_the_probabilities(tmp_path: Path, kind: Kind) -> None:
    draw = CompiledDraw(library_of(kind, tmp_path))
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0, 1.0]).expand(20_000, 5).contiguous()
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    counts = torch.bincount(draw(logits, uniforms).ids, minlength=5) / 20_000
    assert torch.allclose(counts, torch.softmax(logits[0], 0), atol=1e-4)


@kinds
@pytest.mark.parametrize("shape", [{}, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}], ids=str)
def test_what_is_no_number_stays_in_its_own_order(tmp_path: Path, shape: dict[str, int], kind: Kind) -> None:
    """Room is used again, by other numbers of rows and by later adapters; with AMX, the second shape uses tiles."""
    policy = policy_of(tmp_path, "Qwen3", kind.dtype, ADAPTED[1], **shape)
    engine = engine_of(policy, library_of(kind, tmp_path), fold="never", max_sequences=200)
    (group,) = groups()[:1]
    wide = type(group)(group_id="wide", prompt_ids=group.prompt_ids, columns={}, seeds=tuple(range(70)))
    before = decoded(engine)
    assert isinstance(engine.layers, CompiledLayers)
    (norm,) = (one for one in engine.layers.kept if one.data_ptr() == engine.layers.layers[0].norm_in)
    kept = norm.clone()
    norm.fill_(float("nan"))
    engine.generate((wide,), Sampling(temperature=1.0, max_new_tokens=3), unheard)
    norm.copy_(kept)
    with torch.inference_mode():
        engine.layers.scores.fill_(float("nan"))
    assert logprobs_of(decoded(engine)) == logprobs_of(before)
