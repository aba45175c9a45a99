"""Runs sequences through the backbone, the prompt of a group once for all its completions.

    prompts      [P, Lp] -> hidden, keys and values of every layer
    completions  [B, Lc] -> attend to their prompt's keys and values, then to themselves

The numbers are those of whole sequences, up to rounding. The work on a prompt is done once instead of G times, and
gradients flow back into it through its keys and values. Without completions the prompts are whole sequences,
right-padded and without a mask: causality makes the padding harmless, and the fast kernels need no mask.


    layer, prompts         hidden -> hidden, K, V         with batch.recompute: arguments and results are kept,
    layer, completions     hidden, K, V -> hidden         the rest is computed again in the backward pass

transformers refuses to recompute layers with a cache, since a second call would change it. Here each call of a layer
gets a part of the cache that is new, and the prompts' keys and values are arguments, so that gradients reach them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from shared.model.trained_layers import Masks, Places, TrainedLayers


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
    kept: torch.Tensor | None = None
    """[n] int64 the places, among all P Lp + B Lc, whose hidden rows count; those of the others may be anything. None:
    all. Made on the host by `kept_places`: a device would have to be waited for to learn how many there are."""


Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of the prompts in one layer, [P, heads, Lp, D] each."""


class PromptCache:
    """Keys and values of the prompts; in the second run they come before those of the completions.

    It has the interface of transformers' cache: the attention layers call `update`.
    """

    is_compileable = False

    def __init__(self, owner: torch.Tensor) -> None:
        """owner: [B] index of each completion's prompt."""
        self.owner = owner
        self.layers: dict[int, Pair] = {}
        """By the number of the layer."""
        self.width = 0
        """Columns of the prompts, once they are recorded."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object) -> Pair:
        """First run: record. Second run: the prompt, then the completion."""
        if not self.width:
            self.layers[layer] = keys, values
            return keys, values
        return before(self.layers[layer], (keys, values), self.owner)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the current run. transformers calls this method."""
        return self.width


class CachePart:
    """What one call of one layer may read or record."""

    is_compileable = False

    def __init__(self, owner: torch.Tensor, known: Pair | None) -> None:
        self.owner = owner
        self.known = known
        self.found: Pair | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> Pair:
        self.found = keys, values
        return before(self.known, self.found, self.owner) if self.known else self.found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.known[0].shape[2] if self.known else 0


def before(prompts: Pair, own: Pair, owner: torch.Tensor) -> Pair:
    """[P, heads, Lp, D] and [B, heads, L, D] -> [B, heads, Lp + L, D]"""
    return torch.cat([prompts[0][owner], own[0]], dim=2), torch.cat([prompts[1][owner], own[1]], dim=2)


def recompute_activations(backbone: nn.Module) -> None:
    """Keep the arguments of each layer and compute the rest again in the backward pass."""
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.forward = partial(recomputed, layer.forward, number)


def recomputed(forward: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    """forward(*args, **kwargs) of a layer, whose activations are computed again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, PromptCache)), None)
    if cache is None:
        return again(forward, *args, **kwargs)

    owner, first = cache.owner, not cache.width
    # The function must not hold the cache, which holds its results: nothing would free such a cycle.
    args = tuple(CachePart if value is cache else value for value in args)
    kwargs = {name: CachePart if value is cache else value for name, value in kwargs.items()}

    def with_part(known: Pair | None, *args: Any) -> tuple[Any, Pair | None]:
        part = CachePart(owner, known)
        named = {name: part if value is CachePart else value for name, value in kwargs.items()}
        result = forward(*(part if value is CachePart else value for value in args), **named)
        return result, part.found if known is None else None

    result, found = again(with_part, None if first else cache.layers[number], *args)
    if first:
        cache.layers[number] = found
    return result


def hidden_rows(backbone: nn.Module, sequences: Sequences, layers: TrainedLayers | None = None) -> torch.Tensor:
    """[P * Lp + B * Lc, H], prompts first; what padding has there may differ. layers: what computes prompts and
    completions together, if there is one."""
    prompts, completions, lengths, owner = (
        sequences.prompts,
        sequences.completions,
        sequences.lengths,
        sequences.owner,
    )
    if completions is None:
        return run(backbone, input_ids=prompts, use_cache=False)
    if layers is not None:
        return rows_together(layers, prompts, completions, lengths, owner, sequences.kept)
    cache = PromptCache(owner)
    none = torch.zeros_like(lengths)
    mask = visible(none, 0, prompts.shape[1])
    first = run(backbone, cache, input_ids=prompts, position_ids=positions(none, prompts), attention_mask=mask)
    cache.width = prompts.shape[1]
    mask = visible(lengths[owner], prompts.shape[1], completions.shape[1])
    starts = positions(lengths[owner], completions)
    second = run(backbone, cache, input_ids=completions, position_ids=starts, attention_mask=mask)
    return torch.cat([first, second])


def rows_together(
    layers: TrainedLayers,
    prompts: torch.Tensor,
    completions: torch.Tensor,
    lengths: torch.Tensor,
    owner: torch.Tensor,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """[P * Lp + B * Lc, H], all rows in one run, those that do not count left out."""
    none, before = torch.zeros_like(lengths), lengths[owner]
    (count, width), (samples, length) = prompts.shape, completions.shape
    places = Places(prompts=(count, width), completions=(samples, length), owner=owner, kept=kept)
    masks = Masks(
        prompts=visible(none, 0, width),
        completions=visible(before, width, length),
    )
    ids = torch.cat([prompts.flatten(), completions.flatten()])
    at = torch.cat([positions(none, prompts).flatten(), positions(before, completions).flatten()])
    return places.scattered(layers(places.rows_of(ids), places.rows_of(at), places, masks))


def kept_places(lengths: Sequence[int], width: int, counts: Sequence[int], length: int) -> np.ndarray | None:
    """Of P prompts padded to a width and B completions padded to a length, the places of the first tokens: as many as
    each prompt has, and as count of each completion. None if that is all of them."""
    first = [np.arange(size) < np.asarray(many)[:, None] for many, size in ((lengths, width), (counts, length))]
    kept = np.concatenate([places.ravel() for places in first])
    return None if kept.all() else np.flatnonzero(kept)


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
