"""The objective of a step: one sum over tokens t of samples i, and one for the KL.

    r_it = pi(o_it) / pi_old(o_it)          ratio to the policy before the first update of the step
    c_it = min(pi_old(o_it) / mu(o_it), C)  importance weight to the sampler mu, no gradient
    k_it = exp(q - p) - (q - p) - 1         k3 estimate of KL(pi || base), p = log pi, q = log pi_base

    grpo, dr_grpo, dapo   L = - sum w_i c_it min(r_it A_i, clip(r_it, 1 - e_lo, 1 + e_hi) A_i)
    gspo                  the same with r_i, c_i: geometric means over the sample's tokens (2507.18071)
    dual_clip d           these four, where A_i < 0: max(that, d A_i)  (1912.09729)
    cispo                 L = - sum w_i c_it sg(clip(r_it, 1 - e_lo, 1 + e_hi)) A_i log pi(o_it)  (2506.13585)
    sapo                  L = - sum w_i c_it 4 / tau sigmoid(tau (r_it - 1)) A_i, tau by the sign of A_i  (2511.20347)
    dppo                  L = - sum w_i M_it c_it r_it A_i; M_it = 0 where A_i > 0 and pi - mu > e_hi, or A_i < 0 and
                          pi - mu < - e_lo, of the token's probabilities (2602.04879, binary total variation)
    all of them           + beta sum w_i c_it r_it k_it, over every sampled token and not the selected ones alone
    sft                   L = - sum w_i log pi(o_it), of answers that somebody wrote; no ratio, no advantage
    opd                   as dapo, with A_it = log pi_T(o_it) - log pi_old(o_it) of a teacher pi_T in place of A_i

What may be done with c, of which the KL always has the first:

    token           min(pi_old / mu, C)                                      TIS (fengyao.notion.site, 2025)
    token_mask      pi_old / mu where it is in [F, C], else 0                IcePop (2510.18855)
    sequence        the same two of prod_t pi_old(o_it) / mu(o_it)           MIS, sequence_mask: "When speed kills
    sequence_mask                                                            stability" (2025), TRL's default
    stale_limit s   and 0 where A_i < 0 and mean_t log mu - log pi > s       OPSM, DeepSeek-V3.2 (2512.02556)

Token weights w_i, with N samples of lengths T_i (sampled tokens), S = sum T_i and the cap T_max; masked tokens count in
T_i and S, what an environment put between two turns does not:

    grpo, gspo, sapo   1 / (N T_i)       dapo, cispo, sft, opd   1 / S       dr_grpo, dppo   1 / (N T_max)

N and S count the samples of groups that teach nothing as the papers do (A = 0 there); learner/objective/batch.py says
which.
With one update in a step pi_old = sg(pi): r = 1, clipping has no effect, and the gradient is that of c A log pi. DPPO's
mask compares with mu, so it has an effect on samples of an older version. Its weight is pi / mu, which c r is below C;
its sum over tokens gets Dr. GRPO's constant. Left out: DPPO's masks by KL and by the k likeliest tokens.

The ratio in front of k_it carries gradient (DeepSeek-V3.2, 2512.02556). Without it the mean of the gradient is that of
KL(base || pi), another quantity (2506.09477); `loss.kl_gradient = "k3"` is DeepSeekMath's term as published, w_i k_it.
gspo's c_i is a mean where verl and TRL take a product, which one long completion makes 0 or the cap; its KL has the
c_it of tokens. It needs all tokens of a completion: a ratio over selected ones is in no paper, and is refused.

opd is on-policy distillation (2306.13649 with the reverse KL): the policy samples, and each token's gain is how much
more likely the teacher finds it. Over the sampler, E[A_it] = -KL(pi || pi_T) at that token, and with ratio one the mean
of the gradient is that KL's. What a token does to later ones is left out, as is usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.config.tree import LossConfig


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The selected tokens of one micro-batch, flattened to n."""

    logprobs: torch.Tensor
    """[n] log pi, with gradient."""
    old_logprobs: torch.Tensor
    """[n] log pi_old, detached."""
    actor_logprobs: torch.Tensor
    """[n] log mu."""
    teacher_logprobs: torch.Tensor | None = None
    """[n] log pi_T; None without a teacher."""
    advantages: torch.Tensor
    """[n] A of the token's sample."""
    weights: torch.Tensor
    """[n] w of the token's sample."""
    sample: torch.Tensor
    """[n] int64 which sample of the micro-batch the token belongs to."""
    counts: torch.Tensor
    """[B] int64 how many of the n tokens each sample has."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The loss of a micro-batch and what the metrics want to know."""

    loss: torch.Tensor
    """Scalar; micro-batch losses add up to the step's."""
    shares: torch.Tensor
    """[n] what each token adds to it, detached; one that is not finite names the token."""
    ratios: torch.Tensor
    """[n] r, detached."""
    clipped: torch.Tensor
    """[n] bool: tokens that clipping, or DPPO's mask, takes the gradient from."""
    importance: torch.Tensor
    """[n] pi_old / mu before it is truncated or masked; the sample's if that is what is used."""
    stale: torch.Tensor
    """[n] bool: tokens of samples that off-policy sequence masking leaves out."""


@dataclass(frozen=True, kw_only=True)
class KlTokens:
    """The tokens of one micro-batch that count in the KL, flattened to k: all of them, or none."""

    logprobs: torch.Tensor
    """[k] log pi, with gradient."""
    old_logprobs: torch.Tensor
    """[k] log pi_old, detached."""
    actor_logprobs: torch.Tensor
    """[k] log mu."""
    base_logprobs: torch.Tensor
    """[k] log pi_base, detached."""
    weights: torch.Tensor
    """[k] w of the token's sample."""


@dataclass(frozen=True, kw_only=True)
class KlTerms:
    """What a KL penalty comes to in a micro-batch."""

    loss: torch.Tensor
    """Scalar; micro-batches add up to the step's."""
    kl: torch.Tensor
    """[k] k3, detached."""


def token_weights(kind: str, lengths: Sequence[int], max_new_tokens: int) -> list[float]:
    """w_i of every sample of the step."""
    match kind:
        case "grpo" | "gspo" | "sapo":
            return [1 / (len(lengths) * length) for length in lengths]
        case "dapo" | "cispo" | "sft" | "opd":
            return [1 / sum(lengths) for _ in lengths]
        case _:
            return [1 / (len(lengths) * max_new_tokens) for _ in lengths]


def likelihood_loss(tokens: TokenBatch) -> LossTerms:
    """The objective of a warm start. Nobody sampled its tokens, so there are no ratios."""
    shares = -tokens.weights * tokens.logprobs
    nothing = torch.full_like(shares.detach(), torch.nan)
    return LossTerms(
        loss=shares.sum(),
        shares=shares.detach(),
        ratios=nothing,
        clipped=torch.zeros_like(nothing, dtype=torch.bool),
        importance=nothing,
        stale=torch.zeros_like(nothing, dtype=torch.bool),
    )


def policy_loss(tokens: TokenBatch, config: LossConfig) -> LossTerms:
    """The configured objective over one micro-batch."""
    if config.kind == "sft":
        return likelihood_loss(tokens)
    log_ratio = tokens.logprobs - tokens.old_logprobs
    log_importance = tokens.old_logprobs - tokens.actor_logprobs
    if config.kind == "gspo":
        log_ratio = sample_mean(log_ratio, tokens)
    log_importance = importance_level(log_importance, tokens, config)
    ratio = log_ratio.exp()
    stale = is_stale(tokens, config.stale_limit or 0.0)
    correction = corrected(log_importance, config)
    correction = correction.masked_fill(stale, 0.0) if config.stale_limit else correction
    advantages = token_advantages(tokens)
    shares = -tokens.weights * correction * gains(ratio, advantages, tokens, config)
    return LossTerms(
        loss=shares.sum(),
        shares=shares.detach(),
        ratios=ratio.detach(),
        clipped=stopped_by_clip(ratio.detach(), advantages, tokens, config),
        importance=log_importance.exp(),
        stale=stale,
    )


def token_advantages(tokens: TokenBatch) -> torch.Tensor:
    """[n] A of the token's sample, or what a teacher says of the token."""
    teacher = tokens.teacher_logprobs
    return tokens.advantages if teacher is None else teacher - tokens.old_logprobs


def gains(ratio: torch.Tensor, advantages: torch.Tensor, tokens: TokenBatch, config: LossConfig) -> torch.Tensor:
    """[n] what each token adds to the objective before its weight and its correction."""
    clipped_ratio = ratio.clamp(*config.ratio_bounds)
    match config.kind:
        case "cispo":
            return clipped_ratio.detach() * advantages * tokens.logprobs
        case "sapo":
            positive = (advantages > 0).to(ratio.dtype)
            tau = config.tau_negative + (config.tau_positive - config.tau_negative) * positive
            return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        case "dppo":
            return (ratio * advantages).masked_fill(stopped_by_clip(ratio.detach(), advantages, tokens, config), 0.0)
        case _:
            gain = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if config.dual_clip:
        gain = torch.where(advantages < 0, torch.maximum(gain, config.dual_clip * advantages), gain)
    return gain


def kl_loss(tokens: KlTokens, config: LossConfig) -> KlTerms:
    """beta sum w c r k3, or beta sum w k3."""
    kl = k3(tokens.logprobs, tokens.base_logprobs)
    if config.kl_gradient == "kl":
        importance = truncated(tokens.old_logprobs - tokens.actor_logprobs, config.cap)
        weighted = importance * (tokens.logprobs - tokens.old_logprobs).exp() * kl
    else:
        weighted = kl
    return KlTerms(loss=config.kl_beta * (tokens.weights * weighted).sum(), kl=kl.detach())


def importance_level(log_importance: torch.Tensor, tokens: TokenBatch, config: LossConfig) -> torch.Tensor:
    """[n] of each token -> [n] of what is weighted: token, mean of the sample's tokens (gspo) or their sum."""
    if config.importance.startswith("sequence"):
        return sample_sum(log_importance, tokens)
    return sample_mean(log_importance, tokens) if config.kind == "gspo" else log_importance


def corrected(log_importance: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """[n] c"""
    if not config.cap or not config.importance.endswith("mask"):
        return truncated(log_importance, config.cap)
    weight = log_importance.exp()
    return torch.where((weight >= config.importance_floor) & (weight <= config.cap), weight, 0.0)


def truncated(log_importance: torch.Tensor, cap: float) -> torch.Tensor:
    """[n] min(exp(x), cap); ones where the correction is off."""
    if cap == 0.0:
        return torch.ones_like(log_importance)
    return log_importance.exp().clamp(max=cap)


def is_stale(tokens: TokenBatch, limit: float) -> torch.Tensor:
    """[n] bool: the sample did badly, and the policy has moved away from it."""
    if not limit:
        return torch.zeros_like(tokens.advantages, dtype=torch.bool)
    drift = sample_mean(tokens.actor_logprobs - tokens.logprobs.detach(), tokens)
    return (tokens.advantages < 0) & (drift > limit)


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Non-negative, zero where the two policies agree."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def sample_sum(values: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """[n] every token gets the sum over its own sample's tokens."""
    totals = torch.zeros_like(tokens.counts, dtype=values.dtype).index_add(0, tokens.sample, values)
    return totals[tokens.sample]


def sample_mean(values: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """[n] every token gets the mean over its own sample's tokens."""
    totals = torch.zeros_like(tokens.counts, dtype=values.dtype).index_add(0, tokens.sample, values)
    # A sample without a token here has no mean, and nobody asks for it.
    return (totals / tokens.counts.clamp(min=1))[tokens.sample]


def stopped_by_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, tokens: TokenBatch, config: LossConfig
) -> torch.Tensor:
    """[n] bool. CISPO never stops a gradient; there it says where the weight was clipped. SAPO has no clip."""
    lowest, highest = config.ratio_bounds
    if config.kind == "dppo":
        # One plus the change of the token's probability.
        ratio = 1 + tokens.logprobs.detach().exp() - tokens.actor_logprobs.exp()
    above, below = ratio > highest, ratio < lowest
    if config.kind == "cispo":
        return above | below
    stopped = (above & (advantages > 0)) | (below & (advantages < 0))
    return stopped | ((ratio > config.dual_clip) & (advantages < 0)) if config.dual_clip else stopped
