"""The layers of a Llama, Qwen2 or Qwen3 model over prompts and completions, without their modules, with gradients.

    layer         z = x + W_o attend(rotate(q), rotate(k), v),   q, k, v = stack(norm(x)),   feed-forward(z)
    stack         y_i = W_i x + b_i + s_i B_i A_i x         dx = sum_i dy_i W_i + l_i A_i, l_i = s_i dy_i B_i
                                                            dA_i = l_i^T x, dB_i = s_i dy_i^T (A_i x)
    feed-forward  z + W_down (silu(u) v), u, v = stack

The rows of prompts and completions are one matrix, so each weight is read once; only attention tells them apart, and
only there is anything padded, bucket by bucket. The gradients are by hand: autograd through the modules keeps more,
copies more, and has products for each adapter alone. Norms and the product of the gate are computed again in the
backward pass, which takes a hundredth of its time. layer_math.py has what is computed between the products. The modules
stay in place, and shared/base/load.py compares the two.

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

from shared.model.layers.attention import attention
from shared.model.layers.layer_math import TORCH_MATH, LayerMath, Rotation, signed
from shared.model.layers.linears import OWN_LAYERS
from shared.model.layers.lora import LoraLinear
from shared.model.layers.sequences import Masks, Places

Grads = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMSNorm over the last dimension."""

    weight: torch.Tensor
    eps: float
    math: LayerMath = TORCH_MATH

    @staticmethod
    def of(module: Any, math: LayerMath = TORCH_MATH) -> "Norm":
        return Norm(weight=module.weight, eps=module.variance_epsilon, math=math)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return AloneNormed.apply(x, self)  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.math.norm(x, self.weight, self.eps)

    def backward(self, x: torch.Tensor, grad: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """dx, and what is added to it."""
        return self.math.norm_gradient(x, self.weight, self.eps, grad, added)


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

    def __init__(self, *linears: Any, math: LayerMath = TORCH_MATH) -> None:
        self.linears, self.math = linears, math

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
            return [self.math.row_major(base(x)) for base, _ in layers], ()
        a = torch.cat([pair[0] for pair in found]).to(x.dtype)
        low = F.linear(x, a)
        parts = iter(zip(low.split([len(pair[0]) for pair in found], dim=1), found, strict=True))
        outputs: list[torch.Tensor] = []
        for base, adapter in layers:
            y = self.math.row_major(base(x))
            if adapter:
                part, (_, b) = next(parts)
                y.addmm_(part, b.t(), alpha=adapter.scale)
            outputs.append(y)
        return outputs, (low, a, *(b for _, b in found))

    def backward(
        self, x: torch.Tensor, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], wanted: bool = True
    ) -> tuple[torch.Tensor | None, Grads]:
        """dx, and dA and dB of every adapter in fp32."""
        low_grad = self.low_gradient(kept, grads)
        x_grad = self.input_gradient(kept, grads, low_grad) if wanted else None
        return x_grad, self.adapter_gradients(x, kept, grads, low_grad)

    def low_gradient(self, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """[n, sum of R] l of every adapter, side by side; None if there is none."""
        if not kept:
            return None
        found = [(adapter, grad) for (_, adapter), grad in zip(self.adapted(), grads, strict=True) if adapter]
        parts = [(grad @ b).mul_(adapter.scale) for (adapter, grad), b in zip(found, kept[2:], strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def input_gradient(
        self, kept: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], low_grad: torch.Tensor | None
    ) -> torch.Tensor:
        """dx"""
        x_grad = None
        for (base, _), grad in zip(self.adapted(), grads, strict=True):
            x_grad = base.matmul.input_gradient(grad, x_grad)
        return x_grad if low_grad is None else x_grad.addmm_(low_grad, kept[1])  # pyright: ignore

    def adapter_gradients(
        self,
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        low_grad: torch.Tensor | None,
    ) -> Grads:
        """dA and dB of every adapter in fp32."""
        if low_grad is None:
            return []
        found = [(adapter, grad) for (_, adapter), grad in zip(self.adapted(), grads, strict=True) if adapter]
        sizes = [len(adapter.lora_A) for adapter, _ in found]
        a_grads = self.math.transposed_product(low_grad, x).split(sizes)
        b_grads = [
            self.math.transposed_product(grad, part, adapter.scale)
            for (adapter, grad), part in zip(found, kept[0].split(sizes, dim=1), strict=True)
        ]
        return [grad for pair in zip(a_grads, b_grads, strict=True) for grad in pair]


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
        (output,), of_down = down.forward(norm.math.gated(gate, up))
        ctx.save_for_backward(x, gate, up, *kept, *of_down)
        ctx.parts, ctx.count = (norm, gate_up, down), len(kept)
        return output.add_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (norm, gate_up, down) = grads, ctx.parts
        x, gate, up, *kept = ctx.saved_tensors
        kept, of_down = kept[: ctx.count], kept[ctx.count :]
        low_grad = down.low_gradient(of_down, grads)
        product_grad = down.input_gradient(of_down, grads, low_grad)
        product, gate_grad, up_grad = norm.math.gated_gradients(gate, up, product_grad)
        down_grads = down.adapter_gradients(product, of_down, grads, low_grad)
        y_grad, gate_up_grads = gate_up.backward(norm.forward(x), kept, (gate_grad, up_grad), ctx.needs_input_grad[0])
        x_grad = None if y_grad is None else norm.backward(x, y_grad, grad)
        return x_grad, None, None, None, *gate_up_grads, *down_grads


class Heads(torch.autograd.Function):
    """Rotated queries and keys, and values, by head, padded in each bucket; before a completion's keys and values come
    those of its prompt."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        places: Places,
        math: LayerMath,
    ) -> tuple[torch.Tensor, ...]:
        ctx.rotation, ctx.places, ctx.math = rotation, places, math
        return tuple(math.heads(query, key, value, rotation, places))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.math.heads_gradients(grads, ctx.rotation, ctx.places), None, None, None


class TrainedLayers:
    """The decoder."""

    def __init__(self, backbone: Any, math: LayerMath = TORCH_MATH) -> None:
        self.backbone = backbone
        self.math = math
        self.layers = [Layer(module, math) for module in backbone.layers]
        self.recomputes = False
        """Keep what enters a layer and compute the rest again in the backward pass."""

    def with_math(self, math: LayerMath) -> "TrainedLayers":
        """The same layers, which compute with this between their products."""
        found = TrainedLayers(self.backbone, math)
        found.recomputes = self.recomputes
        return found

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
        return Norm.of(self.backbone.norm, self.math)(x)


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any, math: LayerMath) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention, self.math = attention, math
        self.norm_in = Norm.of(module.input_layernorm, math)
        self.norm_mlp = Norm.of(module.post_attention_layernorm, math)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.norm_q, self.norm_k = (norm and Norm.of(norm, math) for norm in norms)
        stack = partial(Stack, math=math)
        self.qkv, self.out = stack(attention.q_proj, attention.k_proj, attention.v_proj), stack(attention.o_proj)
        self.gate_up, self.down = stack(mlp.gate_proj, mlp.up_proj), stack(mlp.down_proj)

    def __call__(self, x: torch.Tensor, rotation: Rotation, places: Places, masks: Masks) -> torch.Tensor:
        """[n, H] -> [n, H]"""
        parts: Any = Normed.apply(x, self.norm_in, self.qkv, *self.qkv.parameters())
        query, key, value = (part.unflatten(1, (-1, self.attention.head_dim)) for part in parts)
        if self.norm_q and self.norm_k:
            query, key = self.norm_q(query), self.norm_k(key)
        heads: Any = Heads.apply(query, key, value, rotation, places, self.math)
        seen = zip(range(0, len(heads), 3), (masks.prompts, *masks.completions), strict=True)
        mixed = places.joined(self.attend(heads[first : first + 3], mask) for first, mask in seen).flatten(1)
        x = Output.apply(x, mixed, self.out, *self.out.parameters())  # pyright: ignore[reportAssignmentType]
        parameters = (*self.gate_up.parameters(), *self.down.parameters())
        return FeedForward.apply(x, self.norm_mlp, self.gate_up, self.down, *parameters)  # pyright: ignore

    def attend(self, heads: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Query [B, heads, t, D], key and value [B, kv heads, L, D] -> [B, heads, t, D]"""
        # Read in each call: a check makes windows narrow.
        window = getattr(self.attention, "sliding_window", None)
        options = {"scaling": self.attention.scaling, "sliding_window": window, "math": self.math}
        query, key, value = heads
        return attention(self.attention, query, key, value, mask, **options)[0].transpose(1, 2)


def trained_layers(backbone: Any) -> TrainedLayers | None:
    """None if the model's layers differ; the caller then uses transformers' layers."""
    return TrainedLayers(backbone) if covers(backbone) else None


def covers(backbone: Any) -> bool:
    """Whether the layers are those of this module; the decode loop of the actor asks too."""
    config = backbone.config
    return config.model_type in OWN_LAYERS and config.hidden_act == "silu"
