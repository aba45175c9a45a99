"""Keys and values of the tokens so far: once for each prompt, and in a slot of its own for each completion.

    scores = [ q K_prompt^T | q K_completion^T ]        output = p_prompt V_prompt + p_completion V_completion

The new token of a row attends to both. The completions of a prompt are queries side by side over the same keys, so a
prompt is read from memory once a step instead of G times, and is never copied. Prompts are left-padded. Completions
need no mask, because all rows have the same number of new tokens. The slot of a row that has ended is empty; when half
of the slots are, the cache is packed.

Duck-typed after transformers' cache: the attention layers call `update` and attend to what it returns.
Left out on purpose: paging. An order's shape is known before it starts.
"""

import torch

from shared.model.attention import capped
from shared.model.products import scaled_product


class Slots:
    """Where the tokens of each row are; S = P * places slots."""

    def __init__(self, visible: torch.Tensor, prompt_of_row: torch.Tensor) -> None:
        """visible: [P, width] the columns of a prompt that are not empty. prompt_of_row: [N], sorted."""
        self.visible = visible
        self.assign(prompt_of_row)

    def assign(self, prompt_of_row: torch.Tensor) -> None:
        """A slot for each row, those of a prompt side by side."""
        place = torch.arange(len(prompt_of_row), device=prompt_of_row.device)
        place = place - torch.searchsorted(prompt_of_row, prompt_of_row)
        self.places = int(place.max()) + 1
        self.of_row = prompt_of_row * self.places + place
        self.full = len(self.of_row) == self.count
        self.bias = torch.zeros(self.visible.shape, device=place.device).masked_fill_(~self.visible, float("-inf"))

    @property
    def count(self) -> int:
        return len(self.visible) * self.places

    def in_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [S, ...], zeros where a row has ended."""
        return rows if self.full else rows.new_zeros((self.count, *rows.shape[1:])).index_copy_(0, self.of_row, rows)

    def in_rows(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.full else slots.index_select(0, self.of_row)

    def keep(self, going: torch.Tensor) -> bool:
        """[n] bool: the rows that go on, in their order. Whether half of the slots are empty now."""
        self.of_row = self.of_row[going]
        self.full = False
        return 0 < 2 * len(self.of_row) <= self.count

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop prompts that no row continues any more, and places that no prompt needs any more: [P'] prompts that
        are kept, [S'] which slot's tokens come into each."""
        before = self.of_row
        needed, prompt_of_row = torch.unique(before // self.places, return_inverse=True)
        self.visible = self.visible[needed]
        self.assign(prompt_of_row)
        source = torch.zeros(self.count, dtype=torch.int64, device=before.device)
        source[self.of_row] = before
        return needed, source


class KVCache:
    """Room for `room` new tokens of each of N rows, which continue P prompts."""

    is_compileable = False

    def __init__(self, padding: torch.Tensor, width: int, prompt_of_row: torch.Tensor, room: int) -> None:
        """padding: [P] how many of a prompt's `width` columns are empty. prompt_of_row: [N], sorted."""
        self.room = room
        self.layers: list[LayerCache] = []
        self.slots = Slots(torch.arange(width, device=padding.device) >= padding[:, None], prompt_of_row)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> "tuple[torch.Tensor | LayerCache, torch.Tensor]":
        """First run: the prompts, [P, heads, width, D], which attend to themselves. Then one token a row."""
        if layer == len(self.layers):
            self.layers.append(LayerCache(self.slots, keys, values, self.room))
            return keys, values
        self.layers[layer].append(keys, values)
        return self.layers[layer], values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, under the name transformers asks for."""
        return self.slots.visible.shape[1] + self.layers[0].length if self.layers else 0

    def prompt_mask(self) -> torch.Tensor:
        """[P, 1, width, width] what a prompt's columns may attend to.

        Every column sees itself: an empty one would otherwise turn into NaN, and 0 * NaN would reach the others.
        """
        visible = self.slots.visible
        columns = torch.arange(visible.shape[1], device=visible.device)
        seen = (columns <= columns[:, None]) & visible[:, None]
        return (seen | (columns == columns[:, None]))[:, None]

    def token_mask(self) -> torch.Tensor:
        """[1, 1, 1, 1] for transformers, which makes one if it is given none; what attends by itself needs none."""
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.slots.visible.device)

    def keep(self, going: torch.Tensor) -> None:
        """[n] bool: the rows that go on, in their order."""
        if self.slots.keep(going):
            prompts, slots = self.slots.pack()
            for layer in self.layers:
                layer.pack(prompts, slots)


class LayerCache:
    """One layer's part.

    It refers to the slots and not to the cache, which refers to it: in a circle, the tensors of an order would stay in
    memory until Python's garbage collector runs, which may be dozens of orders later.
    """

    def __init__(self, slots: Slots, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        self.slots = slots
        self.length = 0
        self.prompt_keys, self.prompt_values = keys.contiguous(), values.contiguous()
        shape = (slots.count, keys.shape[1], room, keys.shape[3])
        self.completion_keys, self.completion_values = keys.new_zeros(shape), values.new_zeros(shape)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """[n, heads, 1, D] one token of each row."""
        self.completion_keys[self.slots.of_row, :, self.length] = keys[:, :, 0]
        self.completion_values[self.slots.of_row, :, self.length] = values[:, :, 0]
        self.length += 1

    def pack(self, prompts: torch.Tensor, slots: torch.Tensor) -> None:
        """[P'] prompts to keep, [S'] which slot's tokens come into each."""
        self.prompt_keys, self.prompt_values = self.prompt_keys[prompts], self.prompt_values[prompts]
        self.completion_keys, self.completion_values = self.completion_keys[slots], self.completion_values[slots]

    def attend(
        self, query: torch.Tensor, scaling: float, window: int | None = None, cap: float | None = None
    ) -> torch.Tensor:
        """query [n, heads, 1, D] -> [n, 1, heads, D]; h stands for a key's head and q for the queries that share it.

        All rows have the same number of new tokens and prompts end in the same column, so a window starts in the same
        column everywhere.
        """
        slots, (prompts, heads, width, size) = self.slots, self.prompt_keys.shape
        first = 0 if window is None else max(0, width + self.length - window)
        seen, in_completion = slice(min(first, width), width), slice(max(0, first - width), self.length)
        queries = slots.in_slots(query[:, :, 0]).view(prompts, slots.places, heads, -1, size)
        prompt_keys, prompt_values = (t.flatten(0, 1)[:, seen] for t in (self.prompt_keys, self.prompt_values))
        keys, values = (t.flatten(0, 1)[:, in_completion] for t in (self.completion_keys, self.completion_values))
        to_prompt = capped(scaled_product(by_prompt(queries), prompt_keys.transpose(1, 2), scaling), cap)
        to_prompt = to_prompt.unflatten(0, (prompts, heads)).add_(slots.bias[:, None, None, seen])
        to_completion = capped(scaled_product(by_completion(queries), keys.transpose(1, 2), scaling), cap)
        scores = [by_slot(to_prompt, queries), to_completion.view(*queries.shape[:-1], -1)]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1).to(query.dtype)
        of_prompt = by_prompt(weights[..., : to_prompt.shape[-1]]) @ prompt_values
        of_completion = by_completion(weights[..., to_prompt.shape[-1] :]) @ values
        mixed = of_completion.view(queries.shape).add_(by_slot(of_prompt.view(prompts, heads, -1, size), queries))
        return slots.in_rows(mixed.view(slots.count, 1, -1, size))


def by_prompt(slots: torch.Tensor) -> torch.Tensor:
    """[P, places, h, q, X] -> [P * h, places * q, X]"""
    return slots.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def by_completion(slots: torch.Tensor) -> torch.Tensor:
    """[P, places, h, q, X] -> [S * h, q, X]"""
    return slots.flatten(0, 2)


def by_slot(prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[P, h, places * q, X] -> [P, places, h, q, X], the first four sizes being those of `like`."""
    return prompts.unflatten(2, (like.shape[1], like.shape[3])).transpose(1, 2)
