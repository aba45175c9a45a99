"""Log-probs and entropies of tokens without `[tokens, vocab]` logits in memory.

    y = scale (W h + b),     z = cap tanh(y / cap) / temperature,     most models: y = W h, z = y / temperature
    log p_t = z_t - logsumexp(z),     H = logsumexp(z) - sum_j p_j z_j

Rows go through the head in chunks of at most `rows`, and the backward pass recomputes each chunk:

    d log p_t / dz_j = 1[j = t] - p_j,     dz / dy = (1 - tanh(y / cap)^2) / temperature

The head is frozen, so there is no weight gradient; the entropy is a statistic and carries none either.
"""

from dataclasses import dataclass
from typing import Any

import torch

from shared.model.products import product_fp32


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Log-prob of each token, and entropy of the distribution that it was drawn from."""

    logprobs: torch.Tensor
    """[n] fp32 log-prob of each target, differentiable with respect to the hidden rows."""
    entropies: torch.Tensor
    """[n] fp32 entropy in nats, detached."""


@dataclass(frozen=True, kw_only=True)
class LogitForm:
    """How a model turns W h into logits."""

    bias: torch.Tensor | None = None
    """[V] (Phi)"""
    scale: float = 1.0
    """Granite, Cohere"""
    cap: float | None = None
    """Gemma 2"""

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """[n, V] W h -> [n, V] at temperature 1"""
        logits = product if self.bias is None else product + self.bias
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def through(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """dL / dlogits -> dL / dW h; logits at temperature 1"""
        grad = grad if self.cap is None else grad * (1 - (logits / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale


PLAIN = LogitForm()


def token_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    rows: int,
    form: LogitForm = PLAIN,
) -> TokenStats:
    """hidden [n, H], weight [V, H], targets [n] -> statistics of n tokens."""
    logprobs, entropies = ChunkedHead.apply(hidden, weight, targets, temperature, rows, form)  # pyright: ignore
    return TokenStats(logprobs=logprobs, entropies=entropies)


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, form: LogitForm = PLAIN
) -> torch.Tensor:
    """[n, H] x [V, H] -> [n, V] fp32; both processes use this one function so that they agree."""
    logits = form.logits(product_fp32(hidden, weight.t()))
    return logits if temperature == 1.0 else logits / temperature


class ChunkedHead(torch.autograd.Function):
    """The pass in chunks, with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        rows: int,
        form: LogitForm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only the inputs are kept."""
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            logits = head_logits(hidden[part], weight, temperature, form)
            log_p = torch.log_softmax(logits, dim=-1)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            entropies[part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.rows, ctx.form = temperature, rows, form
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        """dh = (1[j = t] - p_j) dz_j / dy_j W / temperature * d log p"""
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(targets), ctx.rows):
            part = slice(start, start + ctx.rows)
            grad = grads[0][part, None] / ctx.temperature
            logits = head_logits(hidden[part], weight, ctx.temperature, ctx.form)
            grad_logits = torch.softmax(logits, dim=-1).mul_(-grad)
            grad_logits.scatter_add_(1, targets[part, None], grad)
            if ctx.form is not PLAIN:
                grad_logits = ctx.form.through(grad_logits, logits * ctx.temperature)
            grad_hidden[part] = grad_logits.to(weight.dtype) @ weight
        return grad_hidden, None, None, None, None, None
