"""Penalised tokens: SENT's second variant (arXiv 2512.04359) and KL-Cov (2505.22617), as a term of the loss.

    L      the ceil(lambda S) response tokens of the step with the lowest entropy
    cov_t  = (log mu(o_t) - mean_L log mu) (A_t - mean_L A)           means over the tokens of L
    c_t    = beta * high for the k = ceil(share |L|) highest cov_t, beta * low for the k lowest, else 0
    loss  += sum_t w_t c_t k3_t                                       k3 of KL(pi || reference), w_t as in loss.py

If a token is already likely and its completion did well (or unlikely and it did badly), the update pushes it further
towards certainty, and entropy is lost there. SENT's released code has two variants. This is its second, lambda = 0.8
with KL-Cov inside L and the base as reference. Its first, and the abstract, penalise all of L alike: share = 0.5, high
= low = 1 is that one. KL-Cov: lambda = 1, low = 0, and as reference the policy before the first pass, whose KL has a
gradient from the second pass on. Their k of 2e-4 to 1e-3 is of batches a hundred times larger than a step here: 2e-4 of
2,600 tokens is one at each end, about 1 % of the gradient, and KL-Cov's own coefficient is 1.

k3's gradient is taken as it is, without loss.py's ratio: these tokens are chosen, not drawn, so there is no mean over
pi to be right about, and each is pulled to its reference. Tokens of high entropy stay free, so this goes with the
entropy mask: a token may be masked out of the objective and penalised here. S counts the samples that are trained on.
mu is the sampler: its log-probs are those of the policy the step was drawn from, and cost no pass. Which tokens are
penalised, and how strongly, is fixed over the whole step; a cut into micro-batches changes nothing. Ties: earlier first
among covariances; equal entropies are in L together. Left out on purpose: |log pi - log pi_old| as a stand-in for the
KL (SENT's released code); in one pass it is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.objective.entropy_mask import share_count
from learner.objective.loss import KlTerms, k3
from shared.config.tree import ConstraintConfig


@dataclass(frozen=True, kw_only=True)
class PenalisedTokens:
    """The penalised tokens of one micro-batch, flattened to m."""

    logprobs: torch.Tensor
    """[m] log pi, with gradient."""
    reference: torch.Tensor
    """[m] log-probs of the reference, detached."""
    weights: torch.Tensor
    """[m] w c."""


def constraint_loss(tokens: PenalisedTokens) -> KlTerms:
    kl = k3(tokens.logprobs, tokens.reference)
    return KlTerms(loss=(tokens.weights * kl).sum(), kl=kl.detach())


def penalty_coefficients(
    low_NT: Sequence[np.ndarray],
    logprobs_NT: Sequence[np.ndarray],
    advantages_N: Sequence[float],
    config: ConstraintConfig,
) -> list[np.ndarray]:
    """N ragged rows of [T] bool (in L) and sampler's log-probs -> N rows of [T] coefficients c."""
    lengths = [len(row) for row in logprobs_NT]
    low = np.concatenate(low_NT)
    logprobs = np.concatenate(logprobs_NT).astype(np.float64)[low]
    advantages = np.repeat(np.array(advantages_N), lengths)[low]
    covariances = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    coefficients = np.zeros(sum(lengths), dtype=np.float32)
    coefficients[low] = config.beta * strengths(covariances, config)
    return np.split(coefficients, np.cumsum(lengths)[:-1])


def strengths(covariances: np.ndarray, config: ConstraintConfig) -> np.ndarray:
    """[l] -> [l] high, low or 0; where the two ends of a short step meet, high."""
    count = share_count(config.share, len(covariances))
    found = np.zeros(len(covariances))
    found[np.argsort(covariances, kind="stable")[:count]] = config.low
    found[np.argsort(-covariances, kind="stable")[:count]] = config.high
    return found
