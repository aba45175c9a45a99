"""Keys and values at addresses and in shapes that do not change, for a step that a CUDA graph can repeat.

    rows    slots x places      slot s holds one prompt; rows s * places ... s * places + places - 1 continue it
    prompt  [slots, heads, width, D], padded on the left        completion  [rows, heads, room, D]

The attention is that of actor/engines/kv_cache.py. What differs is how rows and columns are managed. A row writes its
t-th token into its own column t - 1, a place that is known on the device alone, so nothing that a step does follows
from the tokens of the host. All columns up to a bound are read, and a bias hides those that a row does not have yet.

If all completions of an order have a row from the start, a slot has a place for each completion of a group and its
prompt is in memory once. Otherwise a slot is a row, so that a row can be taken over by a completion of any group; the
prompt is then copied, which the width of an order allows for (`rows_at_once`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actor.engines.kv_cache import LayerCache
from actor.engines.prompts import PromptPass


@dataclass(frozen=True, kw_only=True)
class FixedShape:
    """Room of the buffers."""

    slots: int
    """Prompts."""
    places: int
    """Rows of each."""
    width: int
    """Columns of a prompt."""
    room: int
    """Columns of a completion."""

    @property
    def rows(self) -> int:
        return self.slots * self.places


@dataclass(frozen=True, kw_only=True)
class KeySizes:
    """What a model keeps of a token."""

    layers: int
    """Each with its own keys and values."""
    heads: int
    """Of keys."""
    size: int
    """Of a head."""
    dtype: torch.dtype
    """As they are kept."""


class FixedRows:
    """What each row sees. The first `prompts` slots are in use."""

    def __init__(self, shape: FixedShape, device: torch.device) -> None:
        self.prompts, self.places, self.columns = shape.slots, shape.places, shape.room
        self.visible = torch.zeros((shape.slots, shape.width), dtype=torch.bool, device=device)
        """[slots, width] columns of the prompts that are not empty."""
        self.before = torch.arange(shape.width - 1, -1, -1, device=device)
        """[width] how many columns of the prompt follow each."""
        self.numbers = torch.arange(shape.room, device=device)
        self.tokens = self.place = self.numbers[:0]
        self.biases: dict[int | None, torch.Tensor] = {}

    @property
    def count(self) -> int:
        return self.prompts * self.places

    def step(self, tokens: torch.Tensor) -> None:
        """[n] how many tokens each row has with that of this step, at least one."""
        # A capture that failed has left biases that nobody has filled.
        self.biases.clear()
        self.tokens, self.place = tokens, (tokens - 1)[:, None, None, None]

    def end_step(self) -> None:
        """Let go of what was made for the step; a graph has it in memory of its own."""
        self.biases.clear()
        self.tokens = self.place = self.numbers[:0]

    def store(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        kept[: self.count].scatter_(2, self.place.expand(new.shape), new.to(kept.dtype))

    def bias(self, window: int | None) -> torch.Tensor:
        if window not in self.biases:
            self.biases[window] = self.made_bias(window)
        return self.biases[window]

    def made_bias(self, window: int | None) -> torch.Tensor:
        """A row that goes on sees its own token. One that has ended may be beyond the columns that are read: it sees
        anything, since a row of scores that is empty would have no token to draw."""
        tokens, numbers = self.tokens[:, None], self.numbers[: self.columns]
        prompt = self.visible[: self.prompts, None].expand(-1, self.places, -1).flatten(0, 1)
        completion = numbers < tokens
        if window is not None:
            prompt = prompt & (self.before + tokens < window)
            completion = completion & (tokens - 1 - numbers < window)
        hidden = torch.cat([prompt, completion], dim=1).logical_not_()
        if window is not None:
            hidden[:, -1] &= hidden.all(dim=1).logical_not_()
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))[:, None, None]

    def in_slots(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self.prompts, self.places, *rows.shape[1:])

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        rows.view(self.prompts, self.places, *rows.shape[1:]).copy_(slots.transpose(1, 2))


class FixedCache:
    """All layers. Outside of steps, prompts are put into slots and slots change places."""

    def __init__(self, shape: FixedShape, sizes: KeySizes, device: torch.device) -> None:
        self.shape, self.rows = shape, FixedRows(shape, device)
        prompt = (shape.slots, sizes.heads, shape.width, sizes.size)
        completion = (shape.rows, sizes.heads, shape.room, sizes.size)
        self.layers = [
            LayerCache(
                self.rows,
                *(torch.zeros(of, dtype=sizes.dtype, device=device) for of in (prompt, prompt, completion, completion)),
            )
            for _ in range(sizes.layers)
        ]

    def reset(self) -> None:
        """For another order. Zeros, because a value that is not finite would reach a row through a weight of 0."""
        self.rows.prompts = self.shape.slots
        self.rows.visible.zero_()
        for layer in self.layers:
            for kept in (layer.prompt_keys, layer.prompt_values, layer.keys, layer.values):
                kept.zero_()

    def put(self, prompts: PromptPass, sources: Sequence[int], slots: Sequence[int]) -> None:
        """Prompt number `sources[i]` of those that were run into slot `slots[i]`, at the right."""
        taken, target = (torch.tensor(list(of), device=self.rows.visible.device) for of in (sources, slots))
        first = self.shape.width - prompts.visible.shape[1]
        self.rows.visible[target] = torch.nn.functional.pad(prompts.visible[taken], (first, 0))
        for layer, made in zip(self.layers, prompts.layers, strict=True):
            for kept, new in zip((layer.prompt_keys, layer.prompt_values), made, strict=True):
                kept[:, :, first:].index_copy_(0, target, new[taken].to(kept.dtype))

    def fed(self, row: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[heads, T, D] keys and values of a row: its prompt and the first `tokens` of its completion."""
        slot = row // self.shape.places
        seen, columns = self.rows.visible[slot], self.rows.numbers[:tokens]
        return [layer.fed(slot, seen, row, columns) for layer in self.layers]

    def copy_slots(self, sources: Sequence[int], slots: Sequence[int]) -> None:
        """Prompts that are in memory into other slots too."""
        if sources:
            taken, target = (torch.tensor(list(of), device=self.rows.visible.device) for of in (sources, slots))
            for kept in self.of_slots():
                kept[target] = kept[taken]

    def keep(self, slots: Sequence[int]) -> None:
        """These become the first slots, in this order, and the only ones in use."""
        taken = torch.tensor(list(slots), device=self.rows.visible.device)
        for kept in self.of_slots():
            kept[: len(slots)] = kept[taken]
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                of_slot = kept.unflatten(0, (-1, self.shape.places))
                of_slot[: len(slots)] = of_slot[taken]
        self.rows.prompts = len(slots)

    def of_slots(self) -> list[torch.Tensor]:
        """[slots, ...] each"""
        of_layers = (kept for layer in self.layers for kept in (layer.prompt_keys, layer.prompt_values))
        return [self.rows.visible, *of_layers]
