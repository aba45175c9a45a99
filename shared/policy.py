"""The policy: a Hugging Face causal LM whose decoder linears are frozen NF4 with a LoRA adapter beside each.

Built without weights, then filled from the cached base, so that no dense copy of a large model ever exists.
Sequences are right-padded without a mask: causality makes the padding harmless, and the fast attention kernels need it.
Any architecture that `AutoModelForCausalLM` builds from `nn.Linear` works; its code comes from transformers alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shared.attention import install_attention
from shared.base_cache import WEIGHTS, CachedBase
from shared.config import LoraConfig, ModelConfig
from shared.errors import ModelError
from shared.head import TokenStats, token_stats
from shared.lora import Adapter, EachCallMatmul, FrozenLinear, HeldMatmul, LoraLinear
from shared.nf4 import from_tensors
from shared.sequences import Sequences, hidden_rows


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

    def hidden(self, sequences: Sequences) -> torch.Tensor:
        """Hidden rows of all positions, [P * Lp + B * Lc, H]; see shared/sequences.py."""
        return hidden_rows(self.backbone, sequences)

    def stats(self, hidden: torch.Tensor, targets: torch.Tensor, *, temperature: float, rows: int) -> TokenStats:
        """Hidden rows [n, H] and the tokens that followed [n] -> log-probs and entropies."""
        return token_stats(hidden, self.head, targets, temperature=temperature, rows=rows)

    def checkpoint_activations(self) -> None:
        """Keep one activation a layer and recompute the rest in the backward pass."""
        self.backbone.train()
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
    config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
    # Quantised layers are ours, not transformers'.
    config.__dict__.pop("quantization_config", None)
    lm = empty_model(config)
    tensors = load_file(base.folder / WEIGHTS, device="cpu")
    held = model.dequantize == "held" or (model.dequantize == "auto" and device.type == "cpu")
    adapter = Adapter(replace_linears(lm, tensors, lora, device, dtype, held))
    fill_rest(lm, tensors, device, dtype)
    adapter_to(adapter, device)
    embedding = lm.get_input_embeddings().weight
    head = embedding if config.tie_word_embeddings else lm.get_output_embeddings().weight
    return Policy(
        backbone=getattr(lm, lm.base_model_prefix),
        head=head.detach(),
        adapter=adapter,
        device=device,
        dtype=dtype,
        base_digest=base.digest,
        config=config,
    )


def empty_model(config: Any) -> Any:
    """The architecture without weights, eval mode; computed buffers (rotary tables) are real."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation=install_attention())
    for name, module in list(lm.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, child = name.rpartition(".")
            setattr(lm.get_submodule(parent), child, type(module)(config=config))
    return lm.eval().requires_grad_(False)


def replace_linears(
    lm: Any, tensors: dict[str, torch.Tensor], lora: LoraConfig, device: torch.device, dtype: torch.dtype, held: bool
) -> dict[str, LoraLinear]:
    """Swap every decoder linear for a frozen one, with an adapter where the config asks for it."""
    layers: dict[str, LoraLinear] = {}
    linears = [(n, m) for n, m in lm.named_modules() if isinstance(m, nn.Linear) and ".layers." in n]
    for name, linear in linears:
        frozen = frozen_linear(name, tensors, device, dtype, held)
        parent, _, child = name.rpartition(".")
        if child in lora.targets:
            shape = (linear.out_features, linear.in_features)
            frozen = layers[name] = LoraLinear(frozen, shape, lora.rank, lora.alpha / lora.rank)
        setattr(lm.get_submodule(parent), child, frozen)
    if unknown := set(lora.targets) - {name.rpartition(".")[2] for name in layers}:
        known = sorted({name.rpartition(".")[2] for name, _ in linears})
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
    """Embeddings, norms and head from the checkpoint; computed buffers to the device."""
    rest = [name for name, value in lm.named_parameters() if value.is_meta]
    for name in rest:
        if name not in tensors:
            raise ModelError(f"The checkpoint has no tensor '{name}'; it does not belong to its config.json.")
        parent, _, child = name.rpartition(".")
        value = nn.Parameter(tensors[name].to(device, dtype), requires_grad=False)
        setattr(lm.get_submodule(parent), child, value)
    for module in lm.modules():
        for key, buffer in module.named_buffers(recurse=False):
            module.register_buffer(key, buffer.to(device), persistent=False)


def adapter_to(adapter: Adapter, device: torch.device) -> None:
    """Move the trainable parameters."""
    for layer in adapter.layers.values():
        layer.lora_A.data, layer.lora_B.data = layer.lora_A.data.to(device), layer.lora_B.data.to(device)
