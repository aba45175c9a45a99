"""Every objective, value and gradient with respect to log-probs, against the papers' sums in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from learner.objective.loss import (
    KlTerms,
    KlTokens,
    LossTerms,
    TokenBatch,
    corrected,
    kl_loss,
    policy_loss,
    token_weights,
)
from shared.config.training import CLIPS_THE_RATIO
from shared.config.tree import LossConfig
from tests import reference
from tests.support.dense_truth import objective_of

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo")
LENGTHS = (7, 1, 12, 3, 9, 2)
LONGEST = 16


def rollouts(fraction: float, spread: float = 0.4) -> list[reference.Rollout]:
    """Ragged completions whose old and actor log-probs are around pi's, far enough to clip and to cap."""
    rng = np.random.default_rng(3)
    selected = reference.top_tokens([rng.random(length).tolist() for length in LENGTHS], fraction)
    advantages = [0.9, -1.1, 0.4, 0.0, -0.3, 1.3]
    completions = []
    for length, mask, advantage in zip(LENGTHS, selected, advantages, strict=True):
        logprobs = -rng.exponential(2.0, length)
        near = [torch.from_numpy(logprobs + spread * rng.standard_normal(length)) for _ in range(3)]
        completions.append(
            reference.Rollout(
                logprobs=torch.from_numpy(logprobs).requires_grad_(),
                old=near[0],
                actor=near[1],
                base=near[2],
                selected=mask,
                advantage=advantage,
            )
        )
    return completions


def ours(
    completions: list[reference.Rollout], logprobs: list[torch.Tensor], config: LossConfig, dtype: torch.dtype
) -> tuple[LossTerms, KlTerms]:
    """The product's loss over the same completions as one micro-batch, and its KL."""
    masks = [torch.tensor(o.selected) for o in completions]
    counts = torch.tensor([int(mask.sum()) for mask in masks])
    weights = torch.tensor(token_weights(config.kind, LENGTHS, LONGEST), dtype=dtype)

    def flat(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([row.to(dtype)[mask] for row, mask in zip(rows, masks, strict=True)])

    def whole(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([row.to(dtype) for row in rows])

    tokens = TokenBatch(
        logprobs=flat(logprobs),
        old_logprobs=flat([o.old for o in completions]),
        actor_logprobs=flat([o.actor for o in completions]),
        advantages=torch.tensor([o.advantage for o in completions], dtype=dtype).repeat_interleave(counts),
        weights=weights.repeat_interleave(counts),
        sample=torch.arange(len(completions)).repeat_interleave(counts),
        counts=counts,
    )
    everything = KlTokens(
        logprobs=whole(logprobs),
        old_logprobs=whole([o.old for o in completions]),
        actor_logprobs=whole([o.actor for o in completions]),
        base_logprobs=whole([o.base for o in completions]),
        weights=weights.repeat_interleave(torch.tensor(LENGTHS)),
    )
    return policy_loss(tokens, config), kl_loss(everything, config)


def cases() -> list[Any]:
    """Each with its paper's clip range and with one that both sides of every kind's ratios meet."""
    penalties = ((0.0, "kl"), (0.07, "kl"), (0.07, "k3"))
    grid = itertools.product(KINDS, (0.2, 0.5, 1.0), (0.0, 1.3), penalties, ((None, None), (0.2, 0.28)))
    return [
        pytest.param(
            fraction,
            LossConfig(
                kind=kind,  # pyright: ignore[reportArgumentType]
                importance_cap=cap,
                kl_beta=beta,
                kl_gradient=kl,  # pyright: ignore[reportArgumentType]
                clip_low=low,
                clip_high=high,
            ),
            id=f"{kind}-rho{fraction}-cap{cap}-beta{beta}-{kl}-clip{low}",
        )
        for kind, fraction, cap, (beta, kl), (low, high) in grid
        if (kind != "gspo" or fraction == 1.0) and (kind != "sapo" or low is None) and (kind != "dppo" or cap)
    ]


CORRECTIONS: dict[str, dict[str, Any]] = {
    "dual clip": {"dual_clip": 1.4},
    "token mask": {"importance": "token_mask", "importance_floor": 0.7, "importance_cap": 1.3},
    "sequence": {"importance": "sequence", "importance_cap": 1.2},
    "sequence mask": {"importance": "sequence_mask", "importance_floor": 0.6, "importance_cap": 1.8},
    "stale": {"stale_limit": 0.1},
    "all": {"importance": "sequence_mask", "stale_limit": 0.1, "kl_beta": 0.07},
    "temperatures": {"tau_positive": 0.5, "tau_negative": 3.0},
}


def corrected_cases() -> list[Any]:
    """Each correction with each kind that has it; every one changes something here."""
    return [
        pytest.param(1.0, LossConfig(kind=kind, **keys), id=f"{kind}-{name}")  # pyright: ignore[reportArgumentType]
        for kind, (name, keys) in itertools.product(KINDS, CORRECTIONS.items())
        if (name != "dual clip" or kind in CLIPS_THE_RATIO) and (name != "temperatures" or kind == "sapo")
    ]


@pytest.mark.parametrize(("fraction", "config"), [*cases(), *corrected_cases()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_and_gradient_equal_the_papers(
    fraction: float, config: LossConfig, dtype: torch.dtype, tolerance: float
) -> None:
    completions = rollouts(fraction)
    expected = reference.loss(completions, objective_of(config, LONGEST))
    expected.backward()

    leaves = [o.logprobs.detach().to(dtype).requires_grad_() for o in completions]
    terms, kl = ours(completions, leaves, config, dtype)
    (terms.loss + kl.loss).backward()

    # The two nearly cancel in some cases.
    rounding = tolerance * kl.loss.item()
    assert (terms.loss + kl.loss).item() == pytest.approx(expected.item(), rel=tolerance, abs=rounding)
    torch.testing.assert_close(terms.shares.sum(), terms.loss.detach())
    got, wanted = gradient(leaves), gradient([o.logprobs for o in completions])
    assert (got - wanted).norm() <= tolerance * wanted.norm()


def gradient(leaves: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]).double()


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_clipped_tokens_are_those_whose_gradient_stops(kind: str) -> None:
    config = LossConfig(kind=kind, importance_cap=0.0)  # pyright: ignore[reportArgumentType]
    completions = rollouts(0.5)
    leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
    terms, _ = ours(completions, leaves, config, torch.float64)
    expected = [stopped for o in completions for stopped in reference.clipped_tokens(o, objective_of(config, LONGEST))]
    assert terms.clipped.tolist() == expected
    assert 0 < sum(expected) < len(expected)
    terms.loss.backward()
    masks = torch.cat([torch.tensor(o.selected) for o in completions])
    stopped = torch.tensor(expected)
    assert (gradient(leaves)[masks][stopped] == 0).all()


def test_with_a_dual_clip_the_marked_tokens_are_those_without_gradient() -> None:
    """Where the advantage is negative a ratio above the first clip still teaches, up to the second."""
    config = LossConfig(kind="dapo", clip_low=0.1, clip_high=0.1, dual_clip=1.4, importance_cap=0.0)
    completions = rollouts(1.0)
    leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
    terms, _ = ours(completions, leaves, config, torch.float64)
    terms.loss.backward()
    advantages = torch.cat([torch.full((len(o.old),), o.advantage) for o in completions])
    teaches = advantages != 0
    assert torch.equal(terms.clipped[teaches], gradient(leaves)[teaches] == 0)
    ratios = terms.ratios[advantages < 0]
    assert ((ratios > 1.1) & (ratios <= 1.4)).any() and (ratios > 1.4).any()


def test_cispo_marks_clipped_weights_and_stops_no_gradient() -> None:
    config = LossConfig(kind="cispo", clip_low=0.2, clip_high=0.28)
    completions = rollouts(1.0)
    leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
    terms, _ = ours(completions, leaves, config, torch.float64)
    lowest, highest = config.ratio_bounds
    outside = (terms.ratios < lowest) | (terms.ratios > highest)
    assert terms.clipped.tolist() == outside.tolist() and outside.any()
    terms.loss.backward()
    alive = torch.cat([torch.full((len(o.logprobs),), o.advantage != 0) for o in completions])
    assert ((gradient(leaves) != 0) == alive).all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_move_the_gradient_is_that_of_advantage_times_logprob(kind: str) -> None:
    config = LossConfig(kind=kind, importance_cap=0.0)  # pyright: ignore[reportArgumentType]
    completions = rollouts(1.0, spread=0.0)
    leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
    terms, _ = ours(completions, leaves, config, torch.float64)
    terms.loss.backward()
    assert (terms.ratios == 1).all() and not terms.clipped.any()
    weights = token_weights(kind, LENGTHS, LONGEST)
    expected = [torch.full((n,), -w * o.advantage) for n, w, o in zip(LENGTHS, weights, completions, strict=True)]
    torch.testing.assert_close(gradient(leaves), torch.cat(expected).double(), rtol=1e-6, atol=1e-9)


def test_kl_is_zero_where_the_policies_agree_and_positive_elsewhere() -> None:
    config = LossConfig(kl_beta=0.1)
    agreeing, apart = rollouts(1.0, spread=0.0), rollouts(1.0)
    zero, positive = (ours(a, [o.logprobs for o in a], config, torch.float64)[1].kl for a in (agreeing, apart))
    assert (zero == 0).all() and (positive > 0).all()
    expected = torch.stack([reference.k3(p, q) for o in apart for p, q in zip(o.logprobs, o.base, strict=True)])
    torch.testing.assert_close(positive, expected.detach())


@pytest.mark.parametrize(("name", "kind"), [("dual clip", "dapo"), ("temperatures", "sapo"), ("stale", "grpo")])
def test_a_correction_is_not_the_kind_without_it(name: str, kind: Any) -> None:
    found = []
    for keys in ({}, CORRECTIONS[name]):
        leaves = [o.logprobs.detach().clone().requires_grad_() for o in rollouts(1.0)]
        ours(rollouts(1.0), leaves, LossConfig(kind=kind, **keys), torch.float64)[0].loss.backward()
        found.append(gradient(leaves))
    assert (found[0] - found[1]).norm() > 0.01 * found[0].norm()


def test_masks_leave_out_tokens_or_whole_samples() -> None:
    completions = rollouts(1.0)
    rows = [(o.old - o.actor).exp() for o in completions]

    def alive(**keys: Any) -> list[list[bool]]:
        leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
        ours(completions, leaves, LossConfig(kind="sapo", **keys), torch.float64)[0].loss.backward()
        return [(leaf.grad != 0).tolist() for leaf in leaves if leaf.grad is not None]

    moved = [o.advantage != 0.0 for o in completions]
    by_token = [[m and 0.7 <= w <= 1.3 for w in row.tolist()] for m, row in zip(moved, rows, strict=True)]
    assert alive(importance="token_mask", importance_floor=0.7, importance_cap=1.3) == by_token
    kept = [m and 0.6 <= float(row.prod()) <= 1.8 for m, row in zip(moved, rows, strict=True)]
    assert alive(importance="sequence_mask", importance_floor=0.6, importance_cap=1.8) == [
        [one] * len(row) for one, row in zip(kept, rows, strict=True)
    ]
    assert 0 < sum(kept) < sum(moved)


@pytest.mark.parametrize("edge", ["importance_floor", "importance_cap"])
@pytest.mark.parametrize("mask", ["token_mask", "sequence_mask"])
def test_the_edges_of_a_mask_are_in_it(mask: str, edge: str) -> None:
    keys: dict[str, Any] = {"importance": mask, edge: 1.0}
    assert corrected(torch.zeros(3), LossConfig(**keys)).tolist() == [1.0] * 3


def test_only_samples_that_did_badly_are_stale() -> None:
    completions = rollouts(1.0)
    config = LossConfig(stale_limit=0.1)
    terms, _ = ours(completions, [o.logprobs for o in completions], config, torch.float64)
    drift = [float((o.actor - o.logprobs.detach()).mean()) for o in completions]
    stale = [o.advantage < 0 and d > 0.1 for o, d in zip(completions, drift, strict=True)]
    expected = [one for one, o in zip(stale, completions, strict=True) for _ in range(len(o.old))]
    assert terms.stale.tolist() == expected and sum(stale) > 0
    assert any(d > 0.1 and o.advantage > 0 for o, d in zip(completions, drift, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_selected_tokens_adds_nothing(kind: str) -> None:
    config = LossConfig(kind=kind)  # pyright: ignore[reportArgumentType]
    completions = [
        reference.Rollout(
            logprobs=o.logprobs, old=o.old, actor=o.actor, base=o.base, selected=[False] * len(o.old), advantage=1.0
        )
        for o in rollouts(1.0)
    ]
    leaves = [o.logprobs.detach().clone().requires_grad_() for o in completions]
    terms, _ = ours(completions, leaves, config, torch.float64)
    terms.loss.backward()
    assert terms.loss.item() == 0.0
    assert (gradient(leaves) == 0).all()


def distribution(seed: int) -> torch.Tensor:
    """[6] float64 log-probs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)


def expected_gradient(
    sampler: torch.Tensor, old: torch.Tensor | None, **keys: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean gradient of the KL term in the logits of pi, by a sum over all tokens that a sampler draws; and pi."""
    logits = distribution(1).requires_grad_()
    policy = logits.log_softmax(0)
    tokens = KlTokens(
        logprobs=policy,
        old_logprobs=policy.detach() if old is None else old,
        actor_logprobs=sampler,
        base_logprobs=distribution(2),
        weights=sampler.exp(),
    )
    kl_loss(tokens, LossConfig(kl_beta=1.0, **keys)).loss.backward()
    assert logits.grad is not None
    return logits.grad, policy.detach()


def divergence_gradient(policy: torch.Tensor, *, forward: bool) -> torch.Tensor:
    """Of KL(pi || base), or of KL(base || pi), in the logits of pi."""
    logits, base = policy.clone().requires_grad_(), distribution(2)
    p = logits.log_softmax(0)
    divergence = (base.exp() * (base - p)).sum() if forward else (p.exp() * (p - base)).sum()
    divergence.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("sampled", ["the policy", "a sampler", "a sampler, and a pass later"])
def test_the_gradient_is_that_of_the_kl_it_is_called_after(sampled: str) -> None:
    """Exactly, also where another distribution drew the tokens; the cap of the weights is out of the way."""
    sampler = distribution(1) if sampled == "the policy" else distribution(3)
    old = distribution(4) if "later" in sampled else None
    got, policy = expected_gradient(sampler, old, importance_cap=1e9)
    torch.testing.assert_close(got, divergence_gradient(policy, forward=False), rtol=1e-12, atol=1e-14)


def test_the_published_gradient_is_that_of_the_other_kl() -> None:
    got, policy = expected_gradient(distribution(1), None, kl_gradient="k3")
    torch.testing.assert_close(got, divergence_gradient(policy, forward=True), rtol=1e-12, atol=1e-14)
    reverse = divergence_gradient(policy, forward=False)
    assert (got - reverse).norm() > 0.2 * reverse.norm()


def test_the_importance_weights_are_those_before_the_cap() -> None:
    completions = rollouts(1.0)
    terms, _ = ours(completions, [o.logprobs for o in completions], LossConfig(importance_cap=1.0), torch.float64)
    torch.testing.assert_close(terms.importance, torch.cat([(o.old - o.actor).exp() for o in completions]))
    assert terms.importance.max() > 1.0
