"""Log-probs and entropies of tokens without ever holding `[tokens, vocab]` logits.

    z = W h / temperature,   log p_t = z_t - logsumexp(z),   H = logsumexp(z) - sum_j p_j z_j

Rows meet the head in chunks of at most `rows`; the backward pass recomputes each chunk:

    d log p_t / dz_j = 1[j = t] - p_j

The head is frozen, so there is no weight gradient; the entropy is a statistic and carries none either.
"""

from dataclasses import dataclass
from typing import Any

import torch

from shared.products import product_fp32


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """What a distribution said about the tokens that followed."""

    logprobs: torch.Tensor
    """[n] fp32 log-prob of each target, differentiable with respect to the hidden rows."""
    entropies: torch.Tensor
    """[n] fp32 entropy in nats, detached."""


def token_stats(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, rows: int
) -> TokenStats:
    """hidden [n, H], weight [V, H], targets [n] -> statistics of n tokens."""
    logprobs, entropies = ChunkedHead.apply(hidden, weight, targets, temperature, rows)  # pyright: ignore
    return TokenStats(logprobs=logprobs, entropies=entropies)


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, H] x [V, H] -> [n, V] fp32; both processes use this one function so that they agree."""
    logits = product_fp32(hidden, weight.t())
    return logits if temperature == 1.0 else logits / temperature


class ChunkedHead(torch.autograd.Function):
    """The chunked pass with its own backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Statistics chunk by chunk; only the inputs are kept."""
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            logits = head_logits(hidden[part], weight, temperature)
            log_p = torch.log_softmax(logits, dim=-1)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropies[part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """dh = (1[j = t] - p_j) W / temperature * d log p"""
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(targets), ctx.rows):
            part = slice(start, start + ctx.rows)
            grad = grads[0][part, None] / ctx.temperature
            grad_logits = torch.softmax(head_logits(hidden[part], weight, ctx.temperature), dim=-1).mul_(-grad)
            grad_logits.scatter_add_(1, targets[part, None], grad)
            grad_hidden[part] = grad_logits.to(weight.dtype) @ weight
        return grad_hidden, None, None, None, None
