"""Runs a decode step of a Llama, Qwen2 or Qwen3 model without calling the modules of its layers.

    q, k, v = rotate(W_qkv norm(x)),   x += W_o attend(q),   x += W_down (silu(W_gate h) W_up h),   h = norm(x)

For one token a row, a small model spends most of its time between the operations: in module calls, in products of two
or three linears with the same input, in rotary tables for each call. Here such linears are one product where they are
folded, and their A matrices are one product where they are not. A and B are cast to the compute type once for each
version. In fp32 operations are also joined where that changes the last bit only. In bf16 each is rounded exactly as in
the modules, because the learner computes with those, and rounding changes a value by up to 0.4 % there.

Left out: one product for q, k and v (or gate and up) over the base itself. It would need a second copy of the base, or
a file in which those weights are neighbours, and brings less than a tenth where reading the weights takes the time.

Modules and weights are the policy's own, and the engine compares its decode loop with the model's class before it is
used (HFEngine.check). Prompts, and models of other types, go through transformers' layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from actor.engines.kv_cache import KVCache
from shared.model.lora import Adapter, FrozenLinear, LoraLinear
from shared.model.policy import Policy
from shared.model.trained_layers import Norm, covers, signed

Linear = LoraLinear | FrozenLinear


def dense_bytes(adapter: Adapter) -> int:
    """Of the linears whose values are in memory."""
    dense = [layer.base.matmul.dense for layer in adapter.layers.values()]
    return sum(weight.nbytes for weight in dense if weight is not None)


class Stack:
    """Linears that read the same input."""

    def __init__(self, *linears: Any) -> None:
        self.linears: tuple[Linear, ...] = linears
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.sizes: list[int] = []
        self.low: torch.Tensor | None = None
        self.high: list[torch.Tensor | None] = []

    def prepare(self, dtype: torch.dtype) -> None:
        """Take the adapter as it is now."""
        adapted = [linear for linear in self.linears if isinstance(linear, LoraLinear)]
        folded = [linear.folded for linear in adapted if linear.folded is not None]
        if len(folded) == len(self.linears):
            self.join(adapted, folded)
            return
        self.weight = None
        self.low = torch.cat([linear.lora_A.detach() for linear in adapted]).to(dtype) if adapted else None
        self.high = [
            linear.lora_B.detach().t().to(dtype).contiguous() if isinstance(linear, LoraLinear) else None
            for linear in self.linears
        ]

    def join(self, linears: list[LoraLinear], folded: list[torch.Tensor]) -> None:
        """One weight, of which the folded ones become views, so that nothing is in memory twice. Later versions are
        computed into these views."""
        if self.weight is not None and all(
            part.untyped_storage().data_ptr() == self.weight.data_ptr() for part in folded
        ):
            return
        self.weight, self.sizes = torch.cat(folded), [len(weight) for weight in folded]
        for linear, part in zip(linears, self.weight.split(self.sizes), strict=True):
            linear.folded = part
        self.bias = None
        biases = [linear.base.bias for linear in linears]
        if any(bias is not None for bias in biases):
            parts = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(folded, biases, strict=True)]
            self.bias = torch.cat(parts)

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """[n, in] -> [n, out] of each."""
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias).split(self.sizes, dim=1)
        low = None if self.low is None else F.linear(x, self.low)
        first, outputs = 0, list[torch.Tensor]()
        for linear, high in zip(self.linears, self.high, strict=True):
            if low is not None and high is not None and isinstance(linear, LoraLinear):
                part = low[:, first : first + len(high)]
                outputs.append(linear.base(x).addmm_(part, high, alpha=linear.scale))
                first += len(high)
            else:
                outputs.append(linear(x))
        return outputs

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + W x + b, of a single linear."""
        if self.weight is not None and self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return residual + self(x)[0]


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention = attention
        self.norm_in, self.norm_mlp = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.norm_q, self.norm_k = (norm and Norm.of(norm) for norm in norms)
        self.qkv = Stack(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up, self.activation = Stack(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.out, self.down = Stack(attention.o_proj), Stack(mlp.down_proj)

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], cache: KVCache, index: int
    ) -> torch.Tensor:
        """[n, H] one token of each row -> [n, H]"""
        attention, kept = self.attention, cache.layers[index]
        parts = self.qkv(self.norm_in.forward(x))
        query, key, value = (part.unflatten(1, (-1, attention.head_dim)) for part in parts)
        heads = query.shape[1]
        if self.norm_q and self.norm_k:
            query, key = self.norm_q.forward(query), self.norm_k.forward(key)
        turned = rotated(torch.cat([query, key], dim=1), *rotation)
        kept.append(turned[:, heads:, None], value[:, :, None])
        # Read in each call: a check of the loop makes windows narrow.
        window = getattr(attention, "sliding_window", None)
        mixed = kept.attend(turned[:, :heads, None], attention.scaling, window)
        x = self.out.added(mixed.flatten(1), x)
        gate, up = self.gate_up(self.norm_mlp.forward(x))
        return self.down.added(self.activation(gate) * up, x)


class Layers:
    """The decoder, for one token of each row."""

    def __init__(self, policy: Policy) -> None:
        self.backbone: Any = policy.backbone
        self.dtype = policy.dtype
        self.layers = [Layer(module) for module in self.backbone.layers]

    def prepare(self) -> None:
        """Take the adapter as it is now."""
        for layer in self.layers:
            for stack in (layer.qkv, layer.out, layer.gate_up, layer.down):
                stack.prepare(self.dtype)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """[n], [n] -> [n, H]"""
        x = self.backbone.embed_tokens(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])
        rotation = cos, signed(sin)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, cache, index)
        return Norm.of(self.backbone.norm).forward(x)


def layers_of(policy: Policy) -> Layers | None:
    """None if this module does not cover the model."""
    return Layers(policy) if covers(policy.backbone) else None


def rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """[n, heads, D]; the halves change places, and the sine of the first one is negative."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    if x.dtype != torch.float32:
        return x * cos + swapped * signed_sin
    return torch.addcmul(x * cos, swapped, signed_sin)
