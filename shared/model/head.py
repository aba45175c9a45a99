"""Log-probs and entropies of tokens without `[tokens, vocab]` logits in memory.

    y = scale (W h + b),     z = cap tanh(y / cap) / temperature,     most models: y = W h, z = y / temperature
    log p_t = z_t - logsumexp(z),     H = logsumexp(z) - sum_j p_j z_j

The vocabulary goes through the head in tiles of columns, and maximum, sum and entropy are carried from tile to tile:

    m' = max(m, max z),    f = exp(m - m'),    s' = f s + sum exp(z - m')
    u' = f (u + s (m - m')) + sum exp(z - m') (z - m')
    logsumexp(z) = m + log s,    H = log s - u / s

The gradient of a log-prob is linear in what arrives for it, so its direction is known with the sums, and every product
is computed once, in the forward pass. The target is left out of the sum, because with p_t near 1 the difference would
be rounding alone.

    d log p_t / dh = (1 - p_t) dz_t / dy_t W_t - sum_{j != t} p_j dz_j / dy_j W_j
    dz / dy = scale (1 - tanh(y / cap)^2) / temperature

In bf16 on a CPU, y is computed around the target's value (shared/model/layers/products.py), and the sums are in fp32.
For sampled tokens the error of a log-prob is a fifteenth of what rounding y itself would give. For a target that is
hardly ever sampled it is as large as that.

The head is frozen, so there is no weight gradient; the entropy is a statistic and carries none either.
shared/model/kernels/head.py adds a tile to the sums in one launch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shared.model.layers.products import RowsTimesWeight, product_of_largest, product_tiles


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Log-prob of each token, and entropy of the distribution that it was drawn from."""

    logprobs: torch.Tensor
    """[n] fp32 log-prob of each target, differentiable with respect to the hidden rows."""
    entropies: torch.Tensor
    """[n] fp32 entropy in nats, detached; [0] if they were not asked for."""


@dataclass(frozen=True, kw_only=True)
class LogitForm:
    """How a model turns W h into logits."""

    bias: torch.Tensor | None = None
    """[V] (Phi)"""
    scale: float = 1.0
    """Granite, Cohere"""
    cap: float | None = None
    """Gemma 2"""

    @property
    def is_plain(self) -> bool:
        """Whether W h are the logits."""
        return self.bias is None and self.scale == 1.0 and self.cap is None

    def logits(self, product: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """[n, v] fp32, these columns of W h -> [n, v] at temperature 1, in the same memory"""
        logits = product if self.bias is None else product.add_(self.bias[columns])
        logits = logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """dlogits / dW h; logits at temperature 1"""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap).square())


PLAIN = LogitForm()
CPU_COLUMNS, CARD_COLUMNS = 2048, 8192
"""Of the vocabulary that are in memory at once."""


def columns_at_once(device: torch.device) -> int:
    """On a CPU, a tile of few rows stays in the cache. On a card every tile costs some ten launches, which take longer
    than the products of a narrow one; 512 rows of a wide one are 16 MiB."""
    return CPU_COLUMNS if device.type == "cpu" else CARD_COLUMNS


@dataclass(frozen=True, kw_only=True)
class Head:
    """What turns a hidden row into a distribution."""

    weight: torch.Tensor
    """[V, H]"""
    form: LogitForm
    """From W h to logits."""
    temperature: float
    """That they are divided by."""


class VocabularySums(Protocol):
    """What is carried from tile to tile, for n rows."""

    largest: torch.Tensor
    """[n] m"""
    total: torch.Tensor
    """[n] s"""
    target: torch.Tensor
    """[n] logit of the target"""

    def add(self, product: torch.Tensor, columns: slice, center: torch.Tensor | None) -> None:
        """product [n, v], center [n, 1]: their sum is W h in these columns. The product may be overwritten; without a
        center it is fp32."""
        ...

    def entropies(self) -> torch.Tensor:
        """[n]; [0] if they were not asked for"""
        ...

    def mean(self) -> torch.Tensor:
        """[n, H] sum of p dz / dy W without the target, at temperature 1."""
        ...


class SumsOf(Protocol):
    """Makes the sums of no tile yet."""

    def __call__(
        self, head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, entropies: bool, directions: bool
    ) -> VocabularySums: ...


class Sums:
    """In PyTorch's own operations."""

    def __init__(
        self, head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, entropies: bool, directions: bool
    ) -> None:
        self.head, self.targets = head, targets
        count = len(hidden)
        self.largest = hidden.new_full((count,), torch.finfo(torch.float32).min, dtype=torch.float32)
        self.total = torch.zeros_like(self.largest)
        self.target = torch.zeros_like(self.largest)
        self.spread = torch.zeros_like(self.largest) if entropies else None
        """[n] u"""
        self.weighted = torch.zeros_like(hidden, dtype=torch.float32) if directions else None
        """[n, H] sum of exp(z - m) dz / dy W without the target"""

    def add(self, product: torch.Tensor, columns: slice, center: torch.Tensor | None) -> None:
        form, temperature = self.head.form, self.head.temperature
        logits = form.logits(product if center is None else product.float().add_(center), columns)
        slope = form.slope(logits) if self.weighted is not None else 1.0
        logits = logits if temperature == 1.0 else logits.div_(temperature)
        targets = self.targets - columns.start
        inside = (targets >= 0) & (targets < logits.shape[1])
        column = targets.clamp(0, logits.shape[1] - 1)[:, None]
        self.target = torch.where(inside, logits.gather(1, column).squeeze(1), self.target)
        largest = torch.maximum(self.largest, logits.amax(dim=1))
        fade = (self.largest - largest).exp_()
        shifted = logits.sub_(largest[:, None])
        if self.spread is None:
            share = shifted.exp_()
        else:
            share = shifted.exp()
            moved = self.spread + self.total * (self.largest - largest)
            self.spread = moved * fade + shifted.mul_(share).sum(dim=1)
        self.total = self.total * fade + share.sum(dim=1)
        self.largest = largest
        if self.weighted is not None:
            weight = self.head.weight[columns]
            share = share if isinstance(slope, float) and slope == 1.0 else share.mul_(slope)
            share.scatter_(1, column, share.gather(1, column).masked_fill_(inside[:, None], 0.0))
            self.weighted.mul_(fade[:, None]).add_(share.to(weight.dtype) @ weight)

    def entropies(self) -> torch.Tensor:
        return self.largest[:0] if self.spread is None else self.total.log() - self.spread / self.total

    def mean(self) -> torch.Tensor:
        assert self.weighted is not None
        return self.weighted / self.total[:, None]


def token_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    rows: int,
    form: LogitForm = PLAIN,
    entropies: bool = True,
    sums: SumsOf = Sums,
) -> TokenStats:
    """hidden [n, H], weight [V, H], targets [n] -> statistics of n tokens, `rows` of them at a time."""
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    head = Head(weight=weight, form=form, temperature=temperature)
    parts = [
        over_vocabulary(head, rows_of, goals, sums, entropies=entropies, directions=wanted)
        for rows_of, goals in zip(hidden.detach().split(rows), targets.split(rows), strict=True)
    ]
    logprobs, found, directions = (torch.cat(column) for column in zip(*parts, strict=True))
    if wanted:
        logprobs = KnownGradient.apply(hidden, logprobs, directions)
    return TokenStats(logprobs=logprobs, entropies=found)  # pyright: ignore[reportArgumentType]


def head_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
    form: LogitForm = PLAIN,
    product: RowsTimesWeight | None = None,
) -> torch.Tensor:
    """[n, H] x [V, H] -> [n, V] fp32 to sample from. product: by the weight; None for `product_of_largest`."""
    logits = form.logits(product(hidden) if product else product_of_largest(hidden, weight))
    return logits if temperature == 1.0 else logits.div_(temperature)


def over_vocabulary(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, sums_of: SumsOf, *, entropies: bool, directions: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n] log-probs, [n] entropies, [n, H] fp32 their gradients; the last two with no rows if not asked for."""
    sums = sums_of(head, hidden, targets, entropies=entropies, directions=directions)
    for columns, product, center in product_tiles(hidden, head.weight.t(), columns_at_once(hidden.device), targets):
        sums.add(product, columns, center)
        # Or it would still be there while the next one is computed.
        del product
    logprobs = sums.target - sums.largest - sums.total.log()
    if not directions:
        return logprobs, sums.entropies(), hidden[:0]
    form = head.form
    slope = form.slope(sums.target * head.temperature) if form.cap is not None else form.scale
    own = (-torch.expm1(logprobs) * slope)[:, None] * head.weight[targets]
    return logprobs, sums.entropies(), (own - sums.mean()).div_(head.temperature)


class KnownGradient(torch.autograd.Function):
    """Log-probs whose gradient was computed with them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, logprobs: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """hidden: what the gradient is of."""
        ctx.save_for_backward(directions)
        ctx.dtype = hidden.dtype
        return logprobs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """[n] -> [n, H]"""
        return (grads[0][:, None] * ctx.saved_tensors[0]).to(ctx.dtype), None, None
