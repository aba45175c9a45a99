"""Runs sequences through the backbone, the prompt of a group once for all its completions.

    prompts      [P, Lp] -> hidden, keys and values of every layer
    completions  [B, Lc] -> attend to their prompt's keys and values, then to themselves

The numbers are those of whole sequences, up to rounding. The work on a prompt is done once instead of G times, and
gradients flow back into it through its keys and values. Without completions the prompts are whole sequences,
right-padded and without a mask: causality makes the padding harmless, and the fast kernels need no mask.
Left out on purpose: activation checkpointing with shared prompts, which transformers cannot combine with a cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The input of the backbone."""

    prompts: torch.Tensor
    """[P, Lp] int64, right-padded; whole sequences if there are no completions."""
    lengths: torch.Tensor
    """[P] int64 tokens of each prompt."""
    completions: torch.Tensor | None
    """[B, Lc] int64, right-padded."""
    owner: torch.Tensor
    """[B] int64 index of each completion's prompt."""


class PromptCache:
    """Keys and values of the prompts; in the second run they come before those of the completions.

    It has the interface of transformers' cache: the attention layers call `update`.
    """

    is_compileable = False

    def __init__(self, owner: torch.Tensor) -> None:
        """owner: [B] index of each completion's prompt."""
        self.owner = owner
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.recorded = False

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First run: record. Second run: the prompt, then the completion."""
        if not self.recorded:
            self.keys.append(keys)
            self.values.append(values)
            return keys, values
        before = (self.keys[layer][self.owner], self.values[layer][self.owner])
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the current run. transformers calls this method."""
        return self.keys[0].shape[2] if self.recorded else 0


def hidden_rows(backbone: nn.Module, sequences: Sequences) -> torch.Tensor:
    """[P * Lp + B * Lc, H], prompts first."""
    prompts, completions, lengths, owner = (
        sequences.prompts,
        sequences.completions,
        sequences.lengths,
        sequences.owner,
    )
    if completions is None:
        return run(backbone, input_ids=prompts, use_cache=False)
    cache = PromptCache(owner)
    none = torch.zeros_like(lengths)
    mask = visible(none, 0, prompts.shape[1])
    before = run(backbone, cache, input_ids=prompts, position_ids=positions(none, prompts), attention_mask=mask)
    cache.recorded = True
    mask = visible(lengths[owner], prompts.shape[1], completions.shape[1])
    starts = positions(lengths[owner], completions)
    after = run(backbone, cache, input_ids=completions, position_ids=starts, attention_mask=mask)
    return torch.cat([before, after])


def run(backbone: nn.Module, cache: PromptCache | None = None, **inputs: Any) -> torch.Tensor:
    """[B, L] ids -> [B * L, H]"""
    cached = {} if cache is None else {"past_key_values": cache, "use_cache": True}
    return backbone(**inputs, **cached).last_hidden_state.flatten(0, 1)


def positions(starts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return starts[:, None] + torch.arange(ids.shape[1], device=ids.device)


def visible(lengths: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """[B, 1, columns, width + columns]: the first `lengths` of `width` prompt columns, and the row itself so far."""
    offsets = torch.arange(columns, device=lengths.device)
    prompt = torch.arange(width, device=lengths.device) < lengths[:, None]
    causal = offsets[None, :] <= offsets[:, None]
    count = len(lengths)
    parts = [prompt[:, None].expand(count, columns, width), causal.expand(count, columns, columns)]
    return torch.cat(parts, dim=2)[:, None]
