"""The policy: a Hugging Face causal LM whose decoder linears are frozen NF4 with a LoRA adapter beside each.

Built without weights, then filled from the cached base, so that no dense copy of a large model ever exists.
Sequences are right-padded without a mask: causality makes the padding harmless, and the fast attention kernels need it.
The architecture's code comes from transformers alone (shared/model/architecture.py), and whether this computes what
that code
computes is checked at every load (shared/model/load_check.py).
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.config.model import LoraConfig, ModelConfig
from shared.errors import ModelError
from shared.model.architecture import decoder_linears, empty_model, logit_form, read_architecture, unsupported
from shared.model.base_cache import WEIGHTS, CachedBase
from shared.model.head import PLAIN, LogitForm, TokenStats, head_logits, token_stats
from shared.model.load_check import check_paths
from shared.model.lora import Adapter, EachCallMatmul, FrozenLinear, HeldMatmul, LoraLinear
from shared.model.nf4 import from_tensors
from shared.model.sequences import Sequences, hidden_rows

log = logging.getLogger("policy")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Model, adapter and head, on one device."""

    backbone: nn.Module
    """Decoder without its head; ids [B, T] -> hidden [B, T, H]."""
    head: torch.Tensor
    """[V, H] frozen output matrix (the embedding where the two are tied)."""
    adapter: Adapter
    """The trainable part."""
    device: torch.device
    """Where everything lives."""
    dtype: torch.dtype
    """Compute type: bf16 on a card, fp32 on a CPU."""
    base_digest: str
    """sha256 of the frozen base."""
    config: Any
    """The checkpoint's transformers configuration."""
    lm: Any
    """The whole model as its own class has it, over the same modules."""
    form: LogitForm = PLAIN
    """What becomes of head times hidden row before it is logits."""

    def hidden(self, sequences: Sequences) -> torch.Tensor:
        """Hidden rows of all positions, [P * Lp + B * Lc, H]; see shared/model/sequences.py."""
        return hidden_rows(self.backbone, sequences)

    def stats(self, hidden: torch.Tensor, targets: torch.Tensor, *, temperature: float, rows: int) -> TokenStats:
        """Hidden rows [n, H] and the tokens that followed [n] -> log-probs and entropies."""
        return token_stats(hidden, self.head, targets, temperature=temperature, rows=rows, form=self.form)

    def logits(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """Hidden rows [n, H] -> [n, V] fp32"""
        return head_logits(hidden, self.head, temperature, self.form)

    def checkpoint_activations(self) -> None:
        """Keep one activation a layer and recompute the rest in the backward pass.

        transformers does so in layers that are being trained. Only the layers are told so, and nothing inside them:
        dropout would come to life there.
        """
        for module in self.backbone.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True
        self.backbone.activation_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]


def pick_device(device: str) -> torch.device:
    """`auto` takes the card if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "compute.device is 'cuda' but PyTorch sees no card; use compute.device=cpu or mend the driver."
        )
    return torch.device(device)


def load_policy(base: CachedBase, model: ModelConfig, lora: LoraConfig, device: torch.device) -> Policy:
    """Fill an empty model from the cached base and put the adapter in."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = read_architecture(base.folder)
    lm = empty_model(config)
    tensors = load_file(base.folder / WEIGHTS, device="cpu")
    held = model.dequantize == "held" or (model.dequantize == "auto" and device.type == "cpu")
    log.info(linears_sentence(lm, tensors))
    adapter = Adapter(replace_linears(lm, tensors, lora, device, dtype, held))
    fill_rest(lm, tensors, device, dtype)
    adapter_to(adapter, device)
    policy = Policy(
        backbone=getattr(lm, lm.base_model_prefix),
        head=lm.get_output_embeddings().weight.detach(),
        adapter=adapter,
        device=device,
        dtype=dtype,
        base_digest=base.digest,
        config=config,
        lm=lm,
        form=logit_form(lm),
    )
    check_paths(policy)
    return policy


def linears_sentence(lm: Any, names: Iterable[str]) -> str:
    """How many of the model's linears are NF4, and which are not; the head never is."""
    codes = {name.partition(".weight.")[0] for name in names if ".weight.quant_state" in name}
    head = lm.get_output_embeddings()
    linears = {name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head}
    dense = Counter(name.rpartition(".")[2] for name in linears - codes)
    named = ", ".join(f"{count} {name}" for name, count in sorted(dense.items()))
    return f"{len(linears & codes)} linears are NF4 and {dense.total()} are left dense{f': {named}' if named else ''}"


def replace_linears(
    lm: Any, tensors: dict[str, torch.Tensor], lora: LoraConfig, device: torch.device, dtype: torch.dtype, held: bool
) -> dict[str, LoraLinear]:
    """Swap every decoder linear for a frozen one, with an adapter where the config asks for it."""
    layers: dict[str, LoraLinear] = {}
    linears = decoder_linears(lm)
    for name, linear in linears.items():
        if f"{name}.weight" not in tensors:
            raise missing(lm, f"{name}.weight")
        frozen = frozen_linear(name, tensors, device, dtype, held)
        parent, _, child = name.rpartition(".")
        if child in lora.targets:
            shape = (linear.out_features, linear.in_features)
            frozen = layers[name] = LoraLinear(frozen, shape, lora.rank, lora.alpha / lora.rank)
        setattr(lm.get_submodule(parent), child, frozen)
    if unknown := set(lora.targets) - {name.rpartition(".")[2] for name in layers}:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ModelError(f"lora.targets names '{min(unknown)}', which this model has not; it has {', '.join(known)}.")
    return layers


def frozen_linear(
    name: str, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype, held: bool
) -> FrozenLinear:
    """One linear from the checkpoint's entries."""
    weight_name, bias = f"{name}.weight", tensors.get(f"{name}.bias")
    if tensors[weight_name].dtype == torch.uint8:
        weight = from_tensors(weight_name, tensors, device)
        matmul = HeldMatmul(weight.dequantize(dtype)) if held else EachCallMatmul(weight)
    else:
        matmul = HeldMatmul(tensors[weight_name].to(device, dtype))
    return FrozenLinear(matmul, None if bias is None else bias.to(device, dtype))


def fill_rest(lm: Any, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Embeddings, norms and head from the checkpoint; a head that is the embedding; buffers to the device."""
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    rest = [name for name, value in lm.named_parameters() if value.is_meta]
    for name in rest:
        if name not in tensors:
            raise missing(lm, name)
        parent, _, child = name.rpartition(".")
        value = nn.Parameter(tensors[name].to(device, dtype), requires_grad=False)
        setattr(lm.get_submodule(parent), child, value)
    if tied:
        head.weight = embedding.weight
    stored = lm.state_dict().keys()
    for prefix, module in lm.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            name = f"{prefix}.{key}"
            value = tensors[name].to(buffer.dtype) if name in stored and name in tensors else buffer
            module.register_buffer(key, value.to(device), persistent=False)


def missing(lm: Any, name: str) -> ModelError:
    """A checkpoint of other names, or of another model."""
    reason = f"transformers' class wants a tensor '{name}', and the checkpoint has none of that name"
    return unsupported(lm.config.model_type, reason)


def adapter_to(adapter: Adapter, device: torch.device) -> None:
    """Move the trainable parameters."""
    for layer in adapter.layers.values():
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.data.to(device), layer.lora_B.data.to(device)
