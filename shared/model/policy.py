"""The policy: a Hugging Face causal LM whose decoder linears are frozen NF4 with a LoRA adapter beside each.

    hidden = backbone(ids),   logits = form(head hidden) / temperature

This module only computes. shared/base/load.py builds a policy from the cached base and checks it.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from shared.errors import ModelError
from shared.model.head import PLAIN, LogitForm, Sums, SumsOf, TokenStats, head_logits, token_stats
from shared.model.layers.layer_math import TORCH_MATH, LayerMath
from shared.model.layers.linears import Room, room_of
from shared.model.layers.lora import Adapter, AddLowRank, add_low_rank
from shared.model.layers.products import RowsTimesWeight
from shared.model.layers.sequences import Sequences, hidden_rows, recompute_activations
from shared.model.layers.trained_layers import TrainedLayers
from shared.model.sampler import Draw, draw


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What computes the parts that have a kernel of their own (shared/model/kernels/). By default PyTorch does."""

    sums: SumsOf = Sums
    """Of the head, over the vocabulary."""
    add_low_rank: AddLowRank = add_low_rank
    """The adapter's part of a linear, where no gradient is needed."""
    draw: Draw = draw
    """The next token of every row."""
    math: LayerMath = TORCH_MATH
    """What our own layers compute between their products."""

    def names(self) -> list[str]:
        """Which ones these are."""
        named = (kernel if hasattr(kernel, "__qualname__") else type(kernel) for kernel in vars(self).values())
        return [f"{kernel.__module__}.{kernel.__qualname__}" for kernel in named]


TORCH = Kernels()


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
    """Where all tensors are."""
    dtype: torch.dtype
    """Compute type, bf16 or fp32."""
    base_digest: str
    """sha256 of the frozen base."""
    config: Any
    """The model's transformers configuration."""
    lm: Any
    """The whole model as an object of its own class, over the same modules."""
    form: LogitForm = PLAIN
    """How head times hidden row becomes logits."""
    layers: TrainedLayers | None = None
    """What runs prompts and completions through the backbone's layers, where it is not the backbone itself."""
    kernels: Kernels = TORCH
    """Chosen when a process starts; see `with_kernels`."""

    def with_kernels(self, kernels: Kernels) -> Self:
        """The same policy, which computes with these from now on. Its linears are told, too."""
        for layer in self.adapter.layers.values():
            layer.add_low_rank = kernels.add_low_rank
        return replace(self, kernels=kernels, layers=self.layers and self.layers.with_math(kernels.math))

    def hidden(self, sequences: Sequences) -> torch.Tensor:
        """Hidden rows of all positions, [P * Lp + B * Lc, H]; see shared/model/layers/sequences.py."""
        return hidden_rows(self.backbone, sequences, self.layers)

    def stats(
        self, hidden: torch.Tensor, targets: torch.Tensor, *, temperature: float, rows: int, entropies: bool = True
    ) -> TokenStats:
        """Hidden rows [n, H] and the tokens that followed [n] -> log-probs, and entropies if asked for."""
        return token_stats(
            hidden,
            self.head,
            targets,
            temperature=temperature,
            rows=rows,
            form=self.form,
            entropies=entropies,
            sums=self.kernels.sums,
        )

    def logits(self, hidden: torch.Tensor, temperature: float, product: RowsTimesWeight | None = None) -> torch.Tensor:
        """Hidden rows [n, H] -> [n, V] fp32. product: by the head."""
        return head_logits(hidden, self.head, temperature, self.form, product)

    @property
    def room(self) -> Room:
        return room_of(lambda name: getattr(self.config, name, None))

    def refuse_if_too_long(self, prompt: int, completion: int) -> None:
        """ModelError if the model has no positions for so many tokens. It would compute some answer beyond them."""
        if not self.room.holds(prompt + completion):
            raise ModelError(
                f"A prompt of {prompt} tokens and a completion of up to {completion} do not fit into the"
                f" {self.room.positions} positions of this model{self.room.beyond}; use a shorter prompt, or lower"
                " tasks.max_prompt_tokens, rollout.max_new_tokens or the caps of [eval]."
            )

    def recompute_activations(self) -> None:
        """Keep what enters a layer and recompute the rest in the backward pass."""
        recompute_activations(self.backbone)
        if self.layers is not None:
            self.layers.recomputes = True
