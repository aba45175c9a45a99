"""What layers compute between their matrix products, forward and back, and that in PyTorch's own operations.

    norm         y = w r x, r = (mean x^2 + eps)^-1/2      dx = r (g - r^2 x mean(g x)), g = w dy
    gated        h = silu(u) v                             du = silu'(u) v dh, dv = silu(u) dh
    heads        rows -> padded sequences by head, queries and keys rotated by their positions
    attention    P = softmax(scale S + mask)               dS = scale P (dP - sum(P dP))
    adapter                                                dA = l^T x, dB = s dy^T (A x), thin products in fp32

In bf16 the forward pass rounds where the modules do, since the actor decodes with these roundings; on a card, norms
round once less in both processes. shared/model/compiled/kernels.py computes each of these in one pass over memory.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from shared.model.layers.products import product_in_two, widened_rows
from shared.model.layers.sequences import Places

Rotation = tuple[torch.Tensor, torch.Tensor]
"""[n, 1, D] cosine and sine of each row's position; the sine is negative in the first half, because the halves of a
head change places."""
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LayerMath(Protocol):
    """Arguments stay as they are unless it says otherwise."""

    def row_major(self, x: torch.Tensor) -> torch.Tensor:
        """[n, m] row after row in memory, where the other functions need that"""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension."""
        ...

    def norm_gradient(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """dx + added"""
        ...

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def gated_gradients(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Three:
        """u, v, dh, whose memory is used for a result -> h once more, du, dv. Keeping h would take half as much again
        as u and v."""
        ...

    def heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, places: Places
    ) -> list[torch.Tensor]:
        """[n, heads, D] -> query [P, heads, Lp, D], key and value of the prompts; then, of each bucket of completions,
        query [B', heads, L', D], key and value of Lp + L'"""
        ...

    def heads_gradients(self, grads: Sequence[torch.Tensor], rotation: Rotation, places: Places) -> Three:
        """Of what `heads` returns -> of query, key and value"""
        ...

    def attention_weights(
        self, scores: torch.Tensor, scaling: float, mask: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[B, heads, t, L] fp32, which may be overwritten, [B, 1, t, L] bool -> [B, heads, t, L] of that type"""
        ...

    def score_gradients(self, weights: torch.Tensor, grad: torch.Tensor, scaling: float) -> torch.Tensor:
        """P, dP [..., L], whose memory is used -> dS"""
        ...

    def transposed_product(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """[n, R], [n, m] or [n, m], [n, R] -> scale a^T b in fp32, for the gradient of an adapter"""
        ...


class TorchMath:
    """On a CPU and on a card."""

    def row_major(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """In bf16 the module rounds before it multiplies by the weight. On a card, one kernel does all of it and rounds
        once."""
        if x.dtype == torch.float32 or not x.is_cpu:
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        # Squares would be added in another order if heads lay column by column, as some products give them. In bf16 and
        # with many rows, `rms_norm` takes three times as long.
        wide = widened_rows(x)
        return wide.mul_(inverse_rms(wide, eps)).to(x.dtype).mul_(weight)

    def norm_gradient(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = widened_rows(x)
        inverse = inverse_rms(wide, eps)
        found = grad * weight.float()
        share = torch.linalg.vecdot(found, wide)[..., None].mul_(inverse.square()).div_(-x.shape[-1])
        found = found.addcmul_(wide, share).mul_(inverse).to(x.dtype)
        return found if added is None else found.add_(added)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate).mul_(up)

    def gated_gradients(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Three:
        active = F.silu(gate)
        # Each result but this one overwrites what is not needed any more.
        up_grad = active * grad
        product, slope = active.mul_(up), grad.mul_(up)
        return product, torch.ops.aten.silu_backward.grad_input(slope, gate, grad_input=slope), up_grad

    def heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation, places: Places
    ) -> list[torch.Tensor]:
        queries, keys, values = (
            places.padded(part) for part in (rotated(query, rotation), rotated(key, rotation), value)
        )
        found = [part[0].contiguous() for part in (queries, keys, values)]
        for number, owner in enumerate(places.owners, start=1):
            joined = (torch.cat([parts[0][owner], parts[number]], dim=2) for parts in (keys, values))
            found += [queries[number].contiguous(), *joined]
        return found

    def heads_gradients(self, grads: Sequence[torch.Tensor], rotation: Rotation, places: Places) -> Three:
        query = places.joined(grads[::3])
        key, value = (places.joined(added_to_prompts(grads[first::3], places)) for first in (1, 2))
        return rotated_back(query, rotation), rotated_back(key, rotation), value

    def attention_weights(
        self, scores: torch.Tensor, scaling: float, mask: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        scores = (scores if scaling == 1.0 else scores.mul_(scaling)).masked_fill_(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1).to(dtype)

    def score_gradients(self, weights: torch.Tensor, grad: torch.Tensor, scaling: float) -> torch.Tensor:
        return grad.sub_(torch.linalg.vecdot(grad, weights)[..., None]).mul_(weights).mul_(scaling)

    def transposed_product(self, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if a.shape[1] > b.shape[1]:
            return self.transposed_product(b, a, scale).t()
        found = product_in_two(a.t(), b)
        return found if scale == 1.0 else found.mul_(scale)


TORCH_MATH = TorchMath()


def inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] fp32 -> [..., 1] r"""
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return length.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()


def added_to_prompts(grads: Sequence[torch.Tensor], places: Places) -> list[torch.Tensor]:
    """Gradients of the keys or values that attention saw in the prompts and in each bucket -> of the prompts' own and
    of each bucket's own. What a bucket gives for those of its prompts is summed into the first."""
    width = places.prompts.shape[1]
    return [of_all_prompts(grads, places), *(grad[:, :, width:] for grad in grads[1:])]


def of_all_prompts(grads: Sequence[torch.Tensor], places: Places) -> torch.Tensor:
    """What the prompts' own attention gives, and what each bucket does."""
    width, (of_prompts, *of_buckets) = places.prompts.shape[1], grads
    for owner, grad in zip(places.owners, of_buckets, strict=True):
        of_prompts = of_prompts.index_add(0, owner, grad[:, :, :width])
    return of_prompts


def signed(sin: torch.Tensor) -> torch.Tensor:
    """With the first half negative."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[n, heads, D]"""
    cos, signed_sin = rotation
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


def rotated_back(grad: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, signed_sin = rotation
    return (grad * cos).add_((grad * signed_sin).roll(grad.shape[-1] // 2, -1))
