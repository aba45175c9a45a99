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

Layers of our own (trained_layers.py) compute no padding, except in attention, which needs sequences of one
length. It takes completions in buckets of similar length, so that one long completion does not make the others as
long. A place is a position of the padded prompts and completions; a token that is fed has a row in the matrix that
these layers compute.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

LEAST_PADDING_SAVED = 64
"""Places. A new bucket begins only if it saves at least so much padding. With less, on two cores, its calls take longer
than the padding. Not measured on a card."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sequences that attention computes as if each had the length of the longest."""

    shape: tuple[int, int]
    """How many, and their length."""
    row_count: int
    """How many of their tokens are fed. Their rows follow one another in the matrix of all rows."""
    kept: torch.Tensor | None = None
    """[row_count] int64 their places in the bucket; None if every place has a row."""

    @staticmethod
    def of(counts: Sequence[int], to_device: Callable[[np.ndarray], torch.Tensor]) -> "Bucket":
        """counts: how many tokens of each sequence are fed."""
        kept = kept_places(counts)
        shape = len(counts), max(1, *counts)
        return Bucket(shape=shape, row_count=sum(counts), kept=None if kept is None else to_device(kept))

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """[row_count, heads, D] -> [sequences, heads, length, D], zeros where no row is"""
        places = scattered(rows, self.kept, self.shape[0] * self.shape[1])
        return places.unflatten(0, self.shape).transpose(1, 2)

    def rows_of(self, padded: torch.Tensor) -> torch.Tensor:
        """[sequences, heads, length, D] -> [row_count, heads, D]"""
        return taken(padded.transpose(1, 2).flatten(0, 1), self.kept)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the rows are among the places of P prompts padded to Lp and B completions padded to Lc."""

    place_count: int
    """P Lp + B Lc"""
    prompts: Bucket
    completions: tuple[Bucket, ...]
    owners: tuple[torch.Tensor, ...]
    """Of each bucket of completions, [sequences] int64 index of each one's prompt."""
    kept: torch.Tensor | None = None
    """[n] int64 the places of all rows; None if every place has one."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        counts: Sequence[int],
        owner: Sequence[int],
        to_device: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
    ) -> "Places":
        """lengths: tokens of each prompt. counts: how many tokens of each completion are fed; with the longest first,
        least is padding. owner: index of each completion's prompt. Made on the host, since reading these numbers from
        a card would make the host wait. to_device: brings an array there."""
        kept = kept_places(lengths, counts)
        parts = [slice(*ends) for ends in pairwise([*bucket_starts(counts), len(counts)])]
        return Places(
            place_count=sum(len(tokens) * max(1, *tokens) for tokens in (lengths, counts)),
            prompts=Bucket.of(lengths, to_device),
            completions=tuple(Bucket.of(counts[part], to_device) for part in parts),
            owners=tuple(to_device(np.array(owner[part])) for part in parts),
            kept=None if kept is None else to_device(kept),
        )

    @staticmethod
    def of_everything(prompts: torch.Tensor, completions: torch.Tensor, owner: torch.Tensor) -> "Places":
        """Every place has a row, padding too."""
        first, second = (
            Bucket(shape=(len(ids), ids.shape[1]), row_count=ids.numel()) for ids in (prompts, completions)
        )
        return Places(
            place_count=first.row_count + second.row_count, prompts=first, completions=(second,), owners=(owner,)
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order of the rows."""
        return self.prompts, *self.completions

    def padded(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """[n, heads, D] -> [sequences, heads, length, D] of each bucket"""
        parts = rows.split([bucket.row_count for bucket in self.buckets])
        return [bucket.padded(part) for bucket, part in zip(self.buckets, parts, strict=True)]

    def joined(self, padded: Iterable[torch.Tensor]) -> torch.Tensor:
        """[sequences, heads, length, D] of each bucket -> [n, heads, D]"""
        return torch.cat([bucket.rows_of(part) for bucket, part in zip(self.buckets, padded, strict=True)])


def bucket_starts(counts: Sequence[int]) -> Iterator[int]:
    """counts: tokens of each completion, the longest first. A new bucket begins at a completion with at most three
    quarters of the tokens of the bucket's first one, if this one and all later ones save LEAST_PADDING_SAVED."""
    longest = 0
    for number, count in enumerate(counts):
        worth = (len(counts) - number) * (longest - count) >= LEAST_PADDING_SAVED
        if number == 0 or (4 * count <= 3 * longest and worth):
            longest = count
            yield number


def kept_places(*parts: Sequence[int]) -> np.ndarray | None:
    """parts: how many tokens each sequence has; in each part, sequences are padded to the longest. [n] int64 the places
    of the tokens; None if that is every place."""
    filled = [np.arange(max(1, *counts)) < np.asarray(counts)[:, None] for counts in parts]
    kept = np.concatenate([places.ravel() for places in filled])
    return None if kept.all() else np.flatnonzero(kept)


def taken(places: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """[places, ...] -> [n, ...]"""
    return places if kept is None else places.index_select(0, kept)


def scattered(rows: torch.Tensor, kept: torch.Tensor | None, count: int) -> torch.Tensor:
    """[n, ...] -> [count, ...], zeros where no row is: the inverse of `taken`"""
    return rows if kept is None else rows.new_zeros(count, *rows.shape[1:]).index_copy(0, kept, rows)


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
    places: Places | None = None
    """Which places have a token that is fed, and the buckets of attention; hidden rows of other places may be
    anything. None: every place is fed."""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """True for the columns that each query sees."""

    prompts: torch.Tensor
    """[P, 1, Lp, Lp]"""
    completions: tuple[torch.Tensor, ...]
    """Of each bucket of B' completions padded to L', [B', 1, L', Lp + L']."""

    @staticmethod
    def of(places: Places, lengths: torch.Tensor) -> "Masks":
        """lengths: [P] tokens of each prompt."""
        width = places.prompts.shape[1]
        pairs = zip(places.completions, places.owners, strict=True)
        return Masks(
            prompts=visible(torch.zeros_like(lengths), 0, width),
            completions=tuple(visible(lengths[owner], width, bucket.shape[1]) for bucket, owner in pairs),
        )


class LayersTogether(Protocol):
    """Layers that compute prompts and completions in one run, without padding."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, places: Places, masks: Masks) -> torch.Tensor:
        """[n], [n], prompts first -> [n, H]"""
        ...


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


def hidden_rows(backbone: nn.Module, sequences: Sequences, layers: LayersTogether | None = None) -> torch.Tensor:
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
    none, before = torch.zeros_like(lengths), lengths[owner]
    at = positions(none, prompts), positions(before, completions)
    if layers is not None:
        places = sequences.places or Places.of_everything(prompts, completions, owner)
        ids, numbers = (torch.cat([part.flatten() for part in pair]) for pair in ((prompts, completions), at))
        masks = Masks.of(places, lengths)
        found = layers(taken(ids, places.kept), taken(numbers, places.kept), places, masks)
        return scattered(found, places.kept, places.place_count)
    cache = PromptCache(owner)
    mask = visible(none, 0, prompts.shape[1])
    first = run(backbone, cache, input_ids=prompts, position_ids=at[0], attention_mask=mask)
    cache.width = prompts.shape[1]
    mask = visible(before, prompts.shape[1], completions.shape[1])
    second = run(backbone, cache, input_ids=completions, position_ids=at[1], attention_mask=mask)
    return torch.cat([first, second])


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
