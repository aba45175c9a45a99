"""A card without a card: a policy whose tensors have no values, and what a step over them would launch."""

import json
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.base.architecture import decoder_linears, empty_model
from shared.model.lora import Adapter, DequantizingMatmul, FrozenLinear, LoraLinear
from shared.model.nf4 import BLOCK, NF4Weight
from shared.model.policy import Policy

META = torch.device("meta")
UNFILLED = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift", "detach")
NO_LAUNCH = tuple(f"aten::{name}" for name in UNFILLED)
OF_VALUES = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave")
WAITS = {f"aten::{name}" for name in OF_VALUES}
"""The host needs a value from the device, or the shape of the result follows from values."""
SORTS = {f"aten::{name}" for name in ("index_put_", "index_put", "_index_put_impl_", "sort", "argsort", "topk")}
"""In deterministic mode a card sorts all places before it writes to them; or it sorts anyway."""


def meta_policy(config: Any, rank: int = 16) -> Policy:
    """NF4 linears, each with an adapter, in bf16. config: transformers' own."""
    lm, layers = empty_model(config), dict[str, LoraLinear]()
    with META:
        for name, linear in decoder_linears(lm).items():
            shape = (linear.out_features, linear.in_features)
            bias = None if linear.bias is None else torch.empty(shape[0], dtype=torch.bfloat16)
            layers[name] = LoraLinear(FrozenLinear(DequantizingMatmul(meta_nf4(shape)), bias), shape, rank, 2.0)
            parent, _, child = name.rpartition(".")
            setattr(lm.get_submodule(parent), child, layers[name])
        head = lm.get_output_embeddings()
        tied = head.weight is lm.get_input_embeddings().weight
        for name, value in list(lm.named_parameters()):
            if not name.endswith(("lora_A", "lora_B")):
                parent, _, child = name.rpartition(".")
                empty = nn.Parameter(torch.empty(value.shape, dtype=torch.bfloat16), requires_grad=False)
                setattr(lm.get_submodule(parent), child, empty)
    if tied:
        head.weight = lm.get_input_embeddings().weight
    for module in lm.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(key, buffer.to(META), persistent=False)
    return Policy(
        backbone=lm.model,
        head=head.weight.detach(),
        adapter=Adapter(layers),
        device=META,
        dtype=torch.bfloat16,
        base_digest="",
        config=config,
        lm=lm,
    )


def meta_nf4(shape: tuple[int, int]) -> NF4Weight:
    values = shape[0] * shape[1]
    facts = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "bfloat16",
        "shape": list(shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.0,
    }
    return NF4Weight(
        packed=torch.empty((values // 2, 1), dtype=torch.uint8),
        absmax=torch.empty(values // BLOCK, dtype=torch.uint8),
        quant_map=torch.empty(16),
        nested_absmax=torch.empty(-(-values // BLOCK // 256)),
        nested_quant_map=torch.empty(256),
        facts=torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
    )


class Launches(TorchDispatchMode):
    """Counts what a card would launch: everything but views and tensors that are not filled. Use it under `no_grad`: in
    inference mode, operations arrive here before they are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.devices = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation itself, counted."""
        self.devices |= {one.device.type for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        name, returns = func._schema.name, func._schema.returns
        is_view = bool(returns) and all(one.alias_info and not one.alias_info.is_write for one in returns)
        if not is_view and not name.startswith(NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class CardKernels(TorchFunctionMode):
    """Operations that are one kernel on a card and several elsewhere."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """RMSNorm counts as one."""
        if func is not F.rms_norm and func is not torch.rms_norm:
            return func(*args, **(kwargs or {}))
        before = Counter(self.launches.counts)
        found = func(*args, **(kwargs or {}))
        self.launches.counts = before + Counter({"aten::_fused_rms_norm": 1})
        return found
