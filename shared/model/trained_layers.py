"""The layers of a Llama, Qwen2 or Qwen3 model over prompts and completions, without their modules, with gradients.

    layer         z = x + W_o attend(rotate(q), rotate(k), v),   q, k, v = stack(norm(x)),   feed-forward(z)
    norm          y = w r x, r = (mean x^2 + eps)^-1/2      dx = r (g - r^2 x mean(g x)), g = w dy
    stack         y_i = W_i x + b_i + s_i B_i A_i x         dx = sum_i dy_i W_i + l_i A_i, l_i = s_i dy_i B_i
                                                            dA_i = l_i^T x, dB_i = s_i dy_i^T (A_i x)
    feed-forward  z + W_down (silu(u) v), u, v = stack      du = silu'(u) v dh, dv = silu(u) dh

The rows of prompts and completions are one matrix, so each weight is read once; only attention tells them apart, and
only there is anything padded, bucket by bucket. The gradients are by hand: autograd through the modules keeps more,
copies more, and has products for each adapter alone. Norms and the product of the gate are computed again in the
backward pass, which takes a hundredth of its time. In bf16 all operations of the forward pass round as the modules do,
since the actor decodes with these roundings; on a card, norms round once less in both processes. The modules stay in
place, and shared/base/load.py compares the two.

Not covered: other model types, and sequences without a shared prompt, which only checks use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.model.attention import attention
from shared.model.linears import OWN_LAYERS
from shared.model.lora import LoraLinear
from shared.model.products import product_in_two, widened_rows
from shared.model.sequences import Masks, Places

Grads = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: torch.Tensor
    eps: float

    @staticmethod
    def of(module: Any) -> "Norm":
        return Norm(weight=module.weight, eps=module.variance_epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return AloneNormed.apply(x, self)  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In bf16 the module rounds before it multiplies by the weight. On a card, one kernel does all of it and rounds
        once."""
        if x.dtype == torch.float32 or not x.is_cpu:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        # Squares would be added in another order if heads lay column by column, as some products give them. In bf16 and
        # with many rows, `rms_norm` takes three times as long.
        wide = widened_rows(x)
        return wide.mul_(self.inverse(wide)).to(x.dtype).mul_(self.weight)

    def inverse(self, wide: torch.Tensor) -> torch.Tensor:
        """[..., H] fp32 -> [..., 1] r"""
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return length.square_().div_(wide.shape[-1]).add_(self.eps).rsqrt_()

    def backward(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """dx"""
        wide = widened_rows(x)
        inverse = self.inverse(wide)
        found = grad.float().mul_(self.weight.float())
        share = torch.linalg.vecdot(found, wide)[..., None].mul_(inverse.square()).div_(-x.shape[-1])
        return found.addcmul_(wide, share).mul_(inverse).to(x.dtype)


class AloneNormed(torch.autograd.Function):
    """A norm by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.norm.backward(*ctx.saved_tensors, grads[0]), None


class Stack:
    """Linears that read the same input, each with or without an adapter."""

    def __init__(self, *linears: Any) -> None:
        self.linears = linears

    def adapted(self) -> Iterator[tuple[Any, LoraLinear | None]]:
        """The frozen linears, each with its adapter if there is one and it is switched on."""
        for linear in self.linears:
            adapter = linear if isinstance(linear, LoraLinear) else None
            yield (adapter.base if adapter else linear), (adapter if adapter and adapter.enabled else None)

    def parameters(self) -> list[nn.Parameter]:
        """A and B of every adapter."""
        return [value for _, adapter in self.adapted() if adapter for value in (adapter.lora_A, adapter.lora_B)]

    def forward(self, x: torch.Tensor) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """[n, in] -> [n, out] of each; A x, A and B for the backward pass."""
        layers = list(self.adapted())
        found = [(adapter.lora_A, adapter.lora_B.to(x.dtype)) for _, adapter in layers if adapter]
        if not found:
            return [base(x) for base, _ in layers], ()
        a = torch.cat([pair[0] for pair in found]).to(x.dtype)
        low = F.linear(x, a)
        parts = iter(zip(low.split([len(pair[0]) for pair in found], dim=1), found, strict=True))
        outputs: list[torch.Tensor] = []
        for base, adapter in layers:
            y = base(x)
            if adapter:
                part, (_, b) = next(parts)
                y.addmm_(part, b.t(), alpha=adapter.scale)
            outputs.append(y)
        return outputs, (low, a, *(b for _, b in found))

    def backward(
        self, x: torch.Tensor, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], wanted: bool = True
    ) -> tuple[torch.Tensor | None, Grads]:
        """dx, and dA and dB of every adapter in fp32."""
        layers = list(self.adapted())
        x_grad = None
        if wanted:
            for (base, _), grad in zip(layers, grads, strict=True):
                x_grad = base.matmul.input_gradient(grad, x_grad)
        if not kept:
            return x_grad, []
        low, a, *bs = kept
        found = [(adapter, grad) for (_, adapter), grad in zip(layers, grads, strict=True) if adapter]
        low_grads = [(grad @ b).mul_(adapter.scale) for (adapter, grad), b in zip(found, bs, strict=True)]
        low_grad = low_grads[0] if len(low_grads) == 1 else torch.cat(low_grads, dim=1)
        if x_grad is not None:
            x_grad.addmm_(low_grad, a)
        sizes = [part.shape[1] for part in low_grads]
        a_grads = product_in_two(low_grad.t(), x).split(sizes)
        b_grads = [
            product_in_two(part.t(), grad).mul_(adapter.scale).t()
            for (adapter, grad), part in zip(found, low.split(sizes, dim=1), strict=True)
        ]
        return x_grad, [grad for pair in zip(a_grads, b_grads, strict=True) for grad in pair]


class Normed(torch.autograd.Function):
    """A stack over a norm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm, stack: Stack, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[n, H] -> [n, out] of each linear"""
        outputs, kept = stack.forward(norm.forward(x))
        ctx.save_for_backward(x, *kept)
        ctx.norm, ctx.stack = norm, stack
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        y_grad, of_adapters = ctx.stack.backward(ctx.norm.forward(x), kept, grads, ctx.needs_input_grad[0])
        return None if y_grad is None else ctx.norm.backward(x, y_grad), None, None, *of_adapters


class Output(torch.autograd.Function):
    """x + W y, of one linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, stack: Stack, *_: torch.Tensor) -> torch.Tensor:
        (output,), kept = stack.forward(y)
        ctx.save_for_backward(y, *kept)
        ctx.stack = stack
        return output.add_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, *kept = ctx.saved_tensors
        y_grad, of_adapters = ctx.stack.backward(y, kept, grads, ctx.needs_input_grad[1])
        return grads[0], y_grad, None, *of_adapters


class FeedForward(torch.autograd.Function):
    """x + W_down (silu(W_gate y) W_up y), y = norm(x)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm, gate_up: Stack, down: Stack, *_: torch.Tensor) -> torch.Tensor:
        y = norm.forward(x)
        (gate, up), kept = gate_up.forward(y)
        (output,), of_down = down.forward(F.silu(gate).mul_(up))
        ctx.save_for_backward(x, gate, up, *kept, *of_down)
        ctx.parts, ctx.count = (norm, gate_up, down), len(kept)
        return output.add_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (norm, gate_up, down) = grads, ctx.parts
        x, gate, up, *kept = ctx.saved_tensors
        # Computed again: it is as wide as the gate, a third of what would be kept.
        active = F.silu(gate)
        product = active * up
        product_grad, of_down = down.backward(product, kept[ctx.count :], grads)
        # Each result overwrites a tensor that is not needed any more, but none of its own factors: on a CPU, `mul_` may
        # take twice as long.
        up_grad = torch.mul(active, product_grad, out=product)
        torch.mul(product_grad, up, out=active)
        gate_grad = torch.ops.aten.silu_backward.grad_input(active, gate, grad_input=product_grad)
        y = norm.forward(x)
        y_grad, of_gate_up = gate_up.backward(y, kept[: ctx.count], (gate_grad, up_grad), ctx.needs_input_grad[0])
        x_grad = None if y_grad is None else norm.backward(x, y_grad).add_(grad)
        return x_grad, None, None, None, *of_gate_up, *of_down


class Heads(torch.autograd.Function):
    """Rotated queries and keys, and values, by head, padded in each bucket; before a completion's keys and values come
    those of its prompt."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        places: Places,
    ) -> tuple[torch.Tensor, ...]:
        """[n, heads, D] -> query [P, heads, Lp, D], key and value of the prompts; then, of each bucket of completions,
        query [B', heads, L', D], key and value of Lp + L'"""
        ctx.rotation, ctx.places = rotation, places
        queries, keys, values = (
            places.padded(part) for part in (rotated(query, rotation), rotated(key, rotation), value)
        )
        found = [part[0].contiguous() for part in (queries, keys, values)]
        for number, owner in enumerate(places.owners, start=1):
            joined = (torch.cat([parts[0][owner], parts[number]], dim=2) for parts in (keys, values))
            found += [queries[number].contiguous(), *joined]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places: Places = ctx.places
        query = places.joined(grads[::3])
        key, value = (places.joined(added_to_prompts(grads[first::3], places)) for first in (1, 2))
        return rotated_back(query, ctx.rotation), rotated_back(key, ctx.rotation), value, None, None


def added_to_prompts(grads: Sequence[torch.Tensor], places: Places) -> list[torch.Tensor]:
    """Gradients of the keys or values that attention saw in the prompts and in each bucket -> of the prompts' own and
    of each bucket's own. What a bucket gives for those of its prompts is summed into the first."""
    width, (of_prompts, *of_buckets) = places.prompts.shape[1], grads
    for owner, grad in zip(places.owners, of_buckets, strict=True):
        of_prompts = of_prompts.index_add(0, owner, grad[:, :, :width])
    return [of_prompts, *(grad[:, :, width:] for grad in of_buckets)]


def signed(sin: torch.Tensor) -> torch.Tensor:
    """With the first half negative, because the halves of a head change places."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[n, heads, D]; the halves change places, and the sine of the first one is negative."""
    cos, signed_sin = rotation
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


def rotated_back(grad: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, signed_sin = rotation
    return (grad * cos).add_((grad * signed_sin).roll(grad.shape[-1] // 2, -1))


class TrainedLayers:
    """The decoder."""

    def __init__(self, backbone: Any) -> None:
        self.backbone = backbone
        self.layers = [Layer(module) for module in backbone.layers]
        self.recomputes = False
        """Keep what enters a layer and compute the rest again in the backward pass."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, places: Places, masks: Masks) -> torch.Tensor:
        """[n], [n], prompts first -> [n, H]"""
        x = self.backbone.embed_tokens(ids)
        rotation = self.backbone.rotary_emb(x[None], positions[None])
        cos, sin = (table[0, :, None] for table in rotation)
        rotation = cos, signed(sin)
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in self.layers:
            if self.recomputes and torch.is_grad_enabled():
                x: Any = again(layer, x, rotation, places, masks)
            else:
                x = layer(x, rotation, places, masks)
        return Norm.of(self.backbone.norm)(x)


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention = attention
        self.norm_in, self.norm_mlp = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.norm_q, self.norm_k = (norm and Norm.of(norm) for norm in norms)
        self.qkv = Stack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up, self.down = Stack(mlp.gate_proj, mlp.up_proj), Stack(mlp.down_proj)
        self.out = Stack(attention.o_proj)

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], places: Places, masks: Masks
    ) -> torch.Tensor:
        """[n, H] -> [n, H]"""
        parts: Any = Normed.apply(x, self.norm_in, self.qkv, *self.qkv.parameters())
        query, key, value = (part.unflatten(1, (-1, self.attention.head_dim)) for part in parts)
        if self.norm_q and self.norm_k:
            query, key = self.norm_q(query), self.norm_k(key)
        heads: Any = Heads.apply(query, key, value, rotation, places)
        seen = zip(range(0, len(heads), 3), (masks.prompts, *masks.completions), strict=True)
        mixed = places.joined(self.attend(heads[first : first + 3], mask) for first, mask in seen).flatten(1)
        x = Output.apply(x, mixed, self.out, *self.out.parameters())  # pyright: ignore[reportAssignmentType]
        parameters = (*self.gate_up.parameters(), *self.down.parameters())
        return FeedForward.apply(x, self.norm_mlp, self.gate_up, self.down, *parameters)  # pyright: ignore

    def attend(self, heads: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Query [B, heads, t, D], key and value [B, kv heads, L, D] -> [B, heads, t, D]"""
        # Read in each call: a check makes windows narrow.
        window = getattr(self.attention, "sliding_window", None)
        options = {"scaling": self.attention.scaling, "sliding_window": window}
        query, key, value = heads
        return attention(self.attention, query, key, value, mask, **options)[0].transpose(1, 2)


def trained_layers(backbone: Any) -> TrainedLayers | None:
    """None if the model's layers differ; the caller then uses transformers' layers."""
    return TrainedLayers(backbone) if covers(backbone) else None


def covers(backbone: Any) -> bool:
    """Whether the layers are those of this module; the decode loop of the actor asks too."""
    config = backbone.config
    return config.model_type in OWN_LAYERS and config.hidden_act == "silu"
