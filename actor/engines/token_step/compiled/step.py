"""The structures of step.h, filled from a policy and the keys and values of an order.

Weights and norms are read where they are: codes or values of the mapped base, or its sums with the adapter. A and B are
copied for each version, in the type of the base and filled up with zeros, because a tile has 16 outputs and, with AMX,
32 inputs.

It covers the models that layers.py covers, if their hidden size, inner size and head size are multiples of 16, the last
at most 256, and the dense base is mapped, also where codes are read.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from actor.engines.token_step.compiled.library import Library
from actor.engines.token_step.compiled.stored_codes import StoredWeight
from actor.engines.token_step.packed import Packable, RowProduct
from actor.engines.token_step.stacks import Linear, frozen
from shared.errors import ModelError
from shared.model.layers.lora import LoraLinear
from shared.model.layers.trained_layers import signed
from shared.model.policy import Policy
from shared.model.sampler import DrawnTokens

TILE = 16
"""As in products.h."""
LARGEST_HEAD = 256
"""As in attention_vectors.h."""
ALIGNMENT = 64
ADDRESS, INTEGER, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
STACKS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Of one input."""


class StepRows(Protocol):
    """What the C code needs of `Rows` in actor/engines/kv_cache.py."""

    prompt_of_row: torch.Tensor

    @property
    def columns(self) -> int: ...

    @property
    def column(self) -> int: ...

    def bias(self, window: int | None) -> torch.Tensor | None: ...


class StepCache(Protocol):
    """Keys and values of one layer, and in `rows` a StepRows."""

    rows: Any
    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


FindCodes = Callable[[str], StoredWeight | None]
"""Of a linear, by its name; None where its values are read."""


def no_codes(_linear: str) -> None:
    """Of a base that is read as values."""


class LinearFields(ctypes.Structure):
    """`Linear` of products.h: the same order and types."""

    _fields_ = [
        *((name, ADDRESS) for name in ("weight", "bias", "codes", "scales", "levels", "a", "b")),
        *((name, INTEGER) for name in ("inputs", "outputs", "rank", "b_inputs")),
        ("scale", NUMBER),
    ]


class LayerFields(ctypes.Structure):
    """`Layer` of step.h."""

    _fields_ = [
        *((name, LinearFields) for name in LINEARS),
        *((name, ADDRESS) for name in ("norm_in", "norm_mlp", "norm_q", "norm_k")),
        *((name, ADDRESS) for name in ("prompt_keys", "prompt_values", "keys", "values", "bias")),
    ]


class StepFields(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = [
        *(
            (name, ADDRESS)
            for name in ("layers", "norm", "prompt_of_row", "x", "cos", "sin", "out", "scratch", "scores")
        ),
        *((name, INTEGER) for name in ("depth", "hidden", "inner", "heads", "kv_heads", "size", "ax_features")),
        *((name, INTEGER) for name in ("threads", "rows", "width", "columns", "column")),
        *((name, INTEGER) for name in ("row_apart", "head_apart")),
        ("eps", NUMBER),
        ("scaling", NUMBER),
    ]


def has_covered_sizes(policy: Policy) -> bool:
    """Of a model that layers.py covers."""
    backbone: Any = policy.backbone
    config, size = policy.config, backbone.layers[0].self_attn.head_dim
    fits = not any(width % TILE for width in (config.hidden_size, config.intermediate_size, size))
    return fits and size <= LARGEST_HEAD


class CompiledLayers:
    """The decoder, for one token of each row."""

    def __init__(self, policy: Policy, library: Library, codes: FindCodes = no_codes) -> None:
        """library: of the policy's type. codes: of a linear, by its name; in bf16 only."""
        known = (ctypes.sizeof(StepFields), ctypes.sizeof(LayerFields), LARGEST_HEAD)
        if (*library.structure_bytes, library.largest_head) != known:
            raise ModelError(f"{library.name} has other structures than step.py; set actor.token_step to 'torch'.")
        if not has_covered_sizes(policy):
            raise ModelError("the C code does not cover layers of these sizes; set actor.token_step to 'torch'.")
        self.library, self.dtype = library, policy.dtype
        self.backbone: Any = policy.backbone
        self.kept: list[torch.Tensor] = []
        """Tensors whose addresses the structures have."""
        self.layers = (LayerFields * len(self.backbone.layers))()
        self.linears = [linears_of(module) for module in self.backbone.layers]
        self.factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """A and B of a linear, by its id."""
        self.step = StepFields()
        self.scratch = self.scores = torch.empty(0)
        self.names = {id(module): name for name, module in policy.lm.named_modules()}
        self.codes = codes
        self.fill(policy)

    def fill(self, policy: Policy) -> None:
        """All that stays the same from version to version."""
        first, config, step = self.backbone.layers[0].self_attn, policy.config, self.step
        for fields, module in zip(self.layers, self.backbone.layers, strict=True):
            attention = module.self_attn
            norms = {"norm_in": module.input_layernorm, "norm_mlp": module.post_attention_layernorm}
            norms |= {"norm_q": getattr(attention, "q_norm", None), "norm_k": getattr(attention, "k_norm", None)}
            for name, norm in norms.items():
                setattr(fields, name, norm and self.address(norm.weight))
        step.layers, step.depth = ctypes.addressof(self.layers), len(self.layers)
        step.norm, step.eps = self.address(self.backbone.norm.weight), self.backbone.norm.variance_epsilon
        step.hidden, step.inner = config.hidden_size, config.intermediate_size
        step.heads, step.kv_heads = config.num_attention_heads, config.num_key_value_heads
        step.size, step.scaling, step.threads = first.head_dim, first.scaling, torch.get_num_threads()

    def address(self, tensor: torch.Tensor) -> int:
        """Of this tensor in the policy's type, which stays in memory."""
        self.kept.append(tensor.detach().to(self.dtype).contiguous())
        return self.kept[-1].data_ptr()

    def prepare(self) -> None:
        """Take the adapter as it is now."""
        for fields, linears in zip(self.layers, self.linears, strict=True):
            for name, linear in linears.items():
                self.fill_linear(getattr(fields, name), linear)
        ranks = max(sum(getattr(layer, name).rank for name in stack) for layer in self.layers for stack in STACKS)
        if ranks + TILE != self.step.ax_features:
            # B's inputs are filled up to `rank_step`, A's outputs only to TILE. So the last B reads up to TILE numbers
            # behind the last A x.
            self.step.ax_features = ranks + TILE
            self.scratch = torch.zeros(self.library.most_rows * self.features())
            self.step.scratch = self.scratch.data_ptr()

    def features(self) -> int:
        """Activations of a row."""
        step = self.step
        heads = 2 * step.heads + 2 * step.kv_heads + 2
        return 2 * step.hidden + step.inner + step.ax_features + heads * step.size

    def fill_linear(self, fields: LinearFields, linear: Linear) -> None:
        adapter = linear if isinstance(linear, LoraLinear) else None
        folded = adapter and adapter.folded
        weight = frozen(linear).matmul.dense if folded is None else folded
        if weight is None or weight.dtype != self.dtype or not weight.is_contiguous():
            raise ModelError("a weight of the base is not dense; set actor.token_step to 'torch'.")
        fields.weight, (fields.outputs, fields.inputs) = weight.data_ptr(), weight.shape
        bias = frozen(linear).bias
        if bias is not None and not fields.bias:
            fields.bias = self.address(bias)
        fields.codes = fields.a = fields.b = fields.rank = fields.b_inputs = 0
        if folded is None and (stored := self.codes(self.names[id(linear)])):
            fields.codes, fields.scales = stored.codes.data_ptr(), stored.scales.data_ptr()
            fields.levels = stored.levels.data_ptr()
        if adapter and folded is None:
            a, b = self.copied_factors(adapter)
            fields.a, fields.b, fields.scale = a.data_ptr(), b.data_ptr(), adapter.scale
            fields.rank, fields.b_inputs = len(a), b.shape[1]

    def copied_factors(self, linear: LoraLinear) -> tuple[torch.Tensor, torch.Tensor]:
        """[rank', in], [out, rank''] into the memory of the version before."""
        (rank, inputs), outputs = linear.lora_A.shape, len(linear.lora_B)
        if id(linear) not in self.factors:
            a = torch.zeros(rank + -rank % TILE, inputs, dtype=self.dtype)
            self.factors[id(linear)] = a, torch.zeros(outputs, rank + -rank % self.library.rank_step, dtype=self.dtype)
        a, b = self.factors[id(linear)]
        a[:rank], b[:, :rank] = linear.lora_A.detach(), linear.lora_B.detach()
        return a, b

    def row_products(self) -> list[RowProduct]:
        """Empty: the C code reads weights as they lie, so none is copied into oneDNN's layout (packed.py)."""
        return []

    def thin_products(self) -> list[Packable]:
        return []

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, cached: Sequence[StepCache]) -> torch.Tensor:
        """[n], [n] -> [n, H]"""
        x = self.backbone.embed_tokens(ids)
        cos, sin = self.backbone.rotary_emb(x[:, None], positions[:, None])
        # Their memory is read until the call returns.
        inputs = {"x": x.float(), "cos": cos.float(), "sin": signed(sin).float()}
        inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        out, step = torch.empty_like(x), self.step
        for name, tensor in inputs.items():
            setattr(step, name, tensor.data_ptr())
        step.rows, step.out = len(ids), out.data_ptr()
        self.point_at(cached)
        self.library.token_step(ctypes.addressof(step))
        return out

    def point_at(self, cached: Sequence[StepCache]) -> None:
        """At keys and values."""
        step = self.step
        rows: StepRows = cached[0].rows
        step.prompt_of_row = rows.prompt_of_row.data_ptr()
        step.width, step.columns, step.column = cached[0].prompt_keys.shape[2], rows.columns, rows.column
        step.row_apart, step.head_apart, *_ = cached[0].keys.stride()
        needed = step.threads * self.library.score_floats(ctypes.addressof(step))
        if needed > len(self.scores):
            self.scores = torch.empty(2 * needed)
            step.scores = self.scores.data_ptr()
        for fields, kept, module in zip(self.layers, cached, self.backbone.layers, strict=True):
            fields.prompt_keys, fields.prompt_values = kept.prompt_keys.data_ptr(), kept.prompt_values.data_ptr()
            fields.keys, fields.values = kept.keys.data_ptr(), kept.values.data_ptr()
            # Read in each call: a check of the loop makes windows narrow.
            bias = rows.bias(getattr(module.self_attn, "sliding_window", None))
            fields.bias = None if bias is None else bias.data_ptr()


class CompiledDraw:
    """Draws a token of each row (shared/model/sampler.py has the contract)."""

    def __init__(self, library: Library) -> None:
        self.library, self.threads = library, torch.get_num_threads()

    def __call__(self, logits: torch.Tensor, uniforms: torch.Tensor | None) -> DrawnTokens:
        """[n, V] fp32, [n] float64"""
        logits, (rows, size) = logits.contiguous(), logits.shape
        drawn = DrawnTokens(
            ids=torch.empty(rows, dtype=torch.int64),
            logprobs=torch.empty(rows),
            entropies=torch.empty(rows),
        )
        slices = -(-size // self.library.draw_slice)
        sums = torch.empty(self.threads * slices * self.library.slice_bytes, dtype=torch.uint8)
        # Under a name, since it is read until the call returns.
        given = None if uniforms is None else uniforms.contiguous()
        found = (tensor.data_ptr() for tensor in (drawn.ids, drawn.logprobs, drawn.entropies))
        self.library.draw(
            logits.data_ptr(),
            rows,
            size,
            None if given is None else given.data_ptr(),
            self.threads,
            sums.data_ptr(),
            *found,
        )
        return drawn


def linears_of(module: Any) -> dict[str, Linear]:
    attention, mlp = module.self_attn, module.mlp
    found: Iterable[Any] = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return dict(zip(LINEARS, (*found, mlp.gate_proj, mlp.up_proj, mlp.down_proj), strict=True))
