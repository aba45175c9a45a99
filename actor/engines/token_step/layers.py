"""Runs a token step of a Llama, Qwen2 or Qwen3 model without calling the modules of its layers.

    q, k, v = rotate(W_qkv norm(x)),   x += W_o attend(q),   x += W_down (silu(W_gate h) W_up h),   h = norm(x)

For one token a row, a small model spends most of its time between the operations: in module calls, in products of two
or three linears with the same input (stacks.py), in rotary tables for each call. In fp32 operations are also joined
where that changes the last bit only. In bf16 each is rounded exactly as in the modules, because the learner computes
with those, and rounding changes a value by up to 0.4 % there; where weights are read as codes, the base's scales, the
adapter and sums are rounded differently (coded.py). (On a card, norms round once less in fp32 and in bf16.)

Modules and weights are the policy's own, and the engine compares its decode loop with the model's class before it is
used (HFEngine.check). Prompts, and models of other types, go through transformers' layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from actor.engines.token_step.coded import CodedWeight, Codes
from actor.engines.token_step.packed import Packable, RowProduct
from actor.engines.token_step.stacks import FindCodes, Linear, Stack
from shared.model.layers.trained_layers import Norm, covers, signed
from shared.model.policy import Policy

STEP = 8
"""In bf16 on a CPU the number of rows is raised to a multiple of this. oneDNN compiles a product of each shape anew,
which takes a millisecond and half a megabyte (shared/process/determinism.py), and rows leave one after the other."""


class KeptTokens(Protocol):
    """Keys and values of one layer."""

    @property
    def count(self) -> int:
        """Rows that have some."""
        ...

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """[n, heads, 1, D] the token of this step."""
        ...

    def attend(self, query: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
        """query [n, heads, 1, D] -> [n, 1, heads, D]"""
        ...


class Layer:
    """One decoder layer."""

    def __init__(self, module: Any, find_codes: FindCodes) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.attention = attention
        self.norm_in, self.norm_mlp = Norm.of(module.input_layernorm), Norm.of(module.post_attention_layernorm)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.norm_q, self.norm_k = (norm and Norm.of(norm) for norm in norms)
        self.qkv = Stack((attention.q_proj, attention.k_proj, attention.v_proj), find_codes)
        self.gate_up, self.activation = Stack((mlp.gate_proj, mlp.up_proj), find_codes), mlp.act_fn
        self.out, self.down = Stack((attention.o_proj,), find_codes), Stack((mlp.down_proj,), find_codes)

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], kept: KeptTokens) -> torch.Tensor:
        """[n', H] one token of each row -> [n', H]; the rows of the cache come first."""
        attention, count = self.attention, kept.count
        parts = self.qkv(self.norm_in.forward(x))
        query, key, value = (part.view(len(part), -1, attention.head_dim) for part in parts)
        heads = query.shape[1]
        if self.norm_q and self.norm_k:
            query, key = self.norm_q.forward(query), self.norm_k.forward(key)
        turned = rotated(torch.cat([query, key], dim=1), *rotation)[:count]
        kept.append(turned[:, heads:, None], value[:count, :, None])
        # Read in each call: a check of the loop makes windows narrow.
        window = getattr(attention, "sliding_window", None)
        mixed = kept.attend(turned[:, :heads, None], attention.scaling, window)
        x = self.out.added(lengthened(mixed.flatten(1), len(x)), x)
        gate, up = self.gate_up(self.norm_mlp.forward(x))
        return self.down.added(self.activation(gate) * up, x)


class Layers:
    """The decoder, for one token of each row."""

    def __init__(self, policy: Policy, codes: Codes | None = None) -> None:
        """codes: of weights that are read as such where the rows are few."""
        self.backbone: Any = policy.backbone
        self.dtype = policy.dtype
        names = {id(module): name for name, module in policy.lm.named_modules()}

        def find_codes(linears: Sequence[Linear]) -> CodedWeight | None:
            return codes and codes.of([names[id(linear)] for linear in linears])

        self.layers = [Layer(module, find_codes) for module in self.backbone.layers]

    def prepare(self) -> None:
        """Take the adapter as it is now."""
        for stack in self.stacks():
            stack.prepare(self.dtype)

    def stacks(self) -> Iterator[Stack]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)

    def row_products(self) -> list[RowProduct]:
        """By all dense weights of the base."""
        return [product for stack in self.stacks() for product in stack.row_products()]

    def thin_products(self) -> list[Packable]:
        """Of the adapter."""
        return [product for stack in self.stacks() for product in stack.thin_products()]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, cached: Sequence[KeptTokens]) -> torch.Tensor:
        """[n], [n] -> [n, H]"""
        count = len(ids)
        if self.dtype != torch.float32 and ids.is_cpu:
            ids, positions = (lengthened(rows, count + -count % STEP) for rows in (ids, positions))
        x = self.backbone.embed_tokens(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])
        rotation = cos, signed(sin)
        for layer, kept in zip(self.layers, cached, strict=True):
            x = layer(x, rotation, kept)
        return Norm.of(self.backbone.norm).forward(x[:count])


def lengthened(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[n, ...] -> [count, ...] with zeros at the end."""
    return rows if len(rows) == count else torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def layers_of(policy: Policy, codes: Codes | None = None) -> Layers | None:
    """None if this module does not cover the model."""
    return Layers(policy, codes) if covers(policy.backbone) else None


def rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """[n, heads, D]; the halves change places, and the sine of the first one is negative."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    if x.dtype != torch.float32:
        return x * cos + swapped * signed_sin
    return torch.addcmul(x * cos, swapped, signed_sin)
