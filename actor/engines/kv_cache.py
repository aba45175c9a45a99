"""Keys and values of the tokens so far: once for each prompt, and in a row of its own for each completion.

    scores = [ q K_prompt^T | q K_completion^T ] + bias        output = p_prompt V_prompt + p_completion V_completion

The new token of a row attends to both. The completions of a prompt are queries side by side over the same keys, so a
prompt is read from memory once a step instead of G times. Prompts are left-padded. On a CPU, small prompts are copied
to their rows instead. Then attention is five operations instead of twenty, which saves more time than it takes to read
up to COPIED_BYTES more in each layer.

Rows differ in length, because a row that has ended is taken over by another completion. All rows write
the token of one step into the same column, and columns are used again in turn: a completion has at most `room` tokens,
so nothing that it still needs is overwritten. The bias hides from a row what was there before its first token, the
padding of its prompt, and what is outside a sliding window; it is made once a step for all layers.

    column of step s: (s - 1) mod room      age of a column in step s: (s - 1 - column) mod room      seen: age < tokens

Duck-typed after transformers' cache: the attention layers call `update` and attend to what it returns. What a layer
computes does not depend on how rows and columns are managed; actor/engines/fixed_cache.py does that for a card.
Left out on purpose: paging. An order's shape is known before it starts.
"""

from typing import Protocol

import torch

from actor.engines.prompts import PromptPass
from shared.model.layers.attention import capped
from shared.model.layers.products import product_fp32

COPIED_BYTES = 2**20
"""Keys and values of all copies in a layer. launch/plan/memory.py does not count them."""


class SeenRows(Protocol):
    """What a layer asks about the rows of a step. Those of a prompt have places side by side."""

    @property
    def count(self) -> int:
        """Rows."""
        ...

    @property
    def prompts(self) -> int:
        """Whose keys are read."""
        ...

    @property
    def places(self) -> int:
        """Of each prompt."""
        ...

    @property
    def columns(self) -> int:
        """Of completions that are read."""
        ...

    def store(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        """[n, heads, 1, D] of this step's token into [most, heads, room, D]."""
        ...

    def bias(self, window: int | None) -> torch.Tensor | None:
        """[n, 1, 1, width + columns] 0 where a row sees a column; None if every row sees all of them."""
        ...

    def in_slots(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [P, places, ...], anything where no row is."""
        ...

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """[P, heads, places, ...] into [n, heads, ...]"""
        ...


class Rows:
    """Which prompt each row continues, and what it sees."""

    def __init__(self, room: int, width: int, device: torch.device) -> None:
        self.room, self.width, self.device = room, width, device
        self.visible = torch.empty((0, width), dtype=torch.bool, device=device)
        """[P, width] the columns of the prompts in memory that are not empty."""
        self.now = 0
        self.biases: dict[int | None, torch.Tensor | None] = {}

    def assign(self, prompt_of_row: torch.Tensor) -> None:
        """[n] the prompt in memory that each row continues. The rows of a prompt get places side by side."""
        self.count, prompts = len(prompt_of_row), len(self.visible)
        order = torch.argsort(prompt_of_row, stable=True)
        ordered, rows = prompt_of_row[order], torch.arange(self.count, device=self.device)
        place = torch.empty_like(rows)
        place[order] = rows - torch.searchsorted(ordered, ordered)
        self.places = int(place.max()) + 1
        self.prompt_of_row, self.place_of_row = prompt_of_row, place
        slot = prompt_of_row * self.places + place
        self.full = self.count == prompts * self.places and bool((slot == rows).all())
        self.of_slot = torch.zeros(prompts * self.places, dtype=torch.int64, device=self.device)
        self.of_slot[slot] = rows

    def step(self, tokens: torch.Tensor) -> None:
        """[n] how many tokens each row has with that of this step, 0 if that does not count."""
        self.now += 1
        self.tokens = tokens
        self.biases.clear()

    @property
    def prompts(self) -> int:
        return len(self.visible)

    @property
    def columns(self) -> int:
        """How many are in use."""
        return min(self.now, self.room)

    @property
    def column(self) -> int:
        """Of this step."""
        return (self.now - 1) % self.room

    def store(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        kept[: self.count, :, self.column] = new[:, :, 0]

    def bias(self, window: int | None) -> torch.Tensor | None:
        if window not in self.biases:
            self.biases[window] = self.made_bias(window)
        return self.biases[window]

    def made_bias(self, window: int | None) -> torch.Tensor | None:
        age = (self.now - 1 - torch.arange(self.columns, device=self.device)) % self.room
        prompt, completion = self.visible[self.prompt_of_row], age < self.tokens[:, None]
        if window is not None:
            before = self.width - torch.arange(self.width, device=self.device)
            prompt = prompt & (before - 1 + self.tokens[:, None] < window)
            completion = completion & (age < window)
        seen = torch.cat([prompt, completion], dim=1)
        if bool(seen.all()):
            return None
        # A row whose token does not count may see nothing at all.
        seen[:, -1] |= ~seen.any(dim=1)
        return torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, float("-inf"))[:, None, None]

    def in_slots(self, rows: torch.Tensor) -> torch.Tensor:
        slots = rows if self.full else rows.index_select(0, self.of_slot)
        return slots.unflatten(0, (-1, self.places))

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if self.full:
            rows.unflatten(0, (-1, self.places)).copy_(slots.transpose(1, 2))
        else:
            rows.copy_(slots[self.prompt_of_row, :, self.place_of_row])


class KVCache:
    """Up to `most` rows with room for `room` new tokens each, which continue the P prompts in memory."""

    is_compileable = False

    def __init__(
        self,
        most: int,
        room: int,
        width: int,
        device: torch.device,
        copied_bytes: int = COPIED_BYTES,
        *,
        compiled: bool = False,
    ) -> None:
        """copied_bytes: the most that copies of prompts may take in a layer. compiled: whether the token step in C
        reads it, which takes values in the type of the model, and prompts where they are."""
        self.most, self.copied_bytes = most, copied_bytes if device.type == "cpu" and not compiled else 0
        self.widens = device.type == "cpu" and not compiled
        self.rows = Rows(room, width, device)
        self.layers: list[LayerCache] = []

    def add_prompts(self, prompts: PromptPass) -> None:
        """Behind those in memory."""
        self.rows.visible = torch.cat([self.rows.visible, prompts.visible])
        for layer, pair in enumerate(prompts.layers):
            keys, values = (widened(kept) for kept in pair) if self.widens else pair
            if layer == len(self.layers):
                self.layers.append(self.new_layer(keys, values))
            else:
                self.layers[layer].add_prompts(keys, values)

    def new_layer(self, keys: torch.Tensor, values: torch.Tensor) -> "LayerCache":
        """[P, heads, width, D]"""
        copied = self.most * (keys[0].nbytes + values[0].nbytes) <= self.copied_bytes
        columns = self.rows.room + (self.rows.width if copied else 0)
        rows = (t.new_zeros((self.most, t.shape[1], columns, t.shape[3])) for t in (keys, values))
        return LayerCache(self.rows, keys.contiguous(), values.contiguous(), *rows, copied=copied)

    def assign(self, prompt_of_row: torch.Tensor) -> None:
        """[n] the prompt in memory that each row continues."""
        self.rows.assign(prompt_of_row)
        for layer in self.layers:
            layer.copy_prompts(prompt_of_row)

    def keep_prompts(self, needed: torch.Tensor) -> None:
        """[P'] indices of those that stay in memory. `assign` follows."""
        self.rows.visible = self.rows.visible[needed]
        for layer in self.layers:
            layer.prompt_keys, layer.prompt_values = layer.prompt_keys[needed], layer.prompt_values[needed]

    def fed(self, row: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[heads, T, D] keys and values of a row: its prompt and the last `tokens` that were fed."""
        rows = self.rows
        seen = rows.visible[rows.prompt_of_row[row]]
        columns = (rows.now - 1 - torch.arange(tokens - 1, -1, -1, device=rows.device)) % rows.room
        return [layer.fed(int(rows.prompt_of_row[row]), seen, row, columns) for layer in self.layers]

    def move_rows(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Rows whose place has changed. `assign` follows."""
        used = slice(0, self.rows.columns)
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[target, :, used] = kept[source, :, used]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> "tuple[LayerCache, torch.Tensor]":
        """[n, heads, 1, D] one token of each row."""
        self.layers[layer].append(keys, values)
        return self.layers[layer], values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, under the name transformers asks for."""
        return self.rows.width + self.rows.columns

    def token_mask(self) -> torch.Tensor:
        """[1, 1, 1, 1] for transformers, which makes one if it is given none; what attends by itself needs none."""
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.rows.device)


class LayerCache:
    """One layer's part.

    It refers to the rows and not to the cache, which refers to it: in a circle, the tensors of an order would stay in
    memory until Python's garbage collector runs, which may be dozens of orders later.
    """

    def __init__(
        self,
        rows: SeenRows,
        prompt_keys: torch.Tensor,
        prompt_values: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        copied: bool = False,
    ) -> None:
        """[P, heads, width, D] of prompts, [most, heads, room, D] of completions. copied: with room for a copy of the
        prompt before those of the completion, [most, heads, width + room, D]."""
        self.rows, self.prompt_keys, self.prompt_values = rows, prompt_keys, prompt_values
        width = prompt_keys.shape[2] if copied else 0
        self.keys, self.values = keys[:, :, width:], values[:, :, width:]
        self.whole = (keys, values) if copied else None

    @property
    def count(self) -> int:
        return self.rows.count

    def add_prompts(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.prompt_keys = torch.cat([self.prompt_keys, keys])
        self.prompt_values = torch.cat([self.prompt_values, values])

    def copy_prompts(self, prompt_of_row: torch.Tensor) -> None:
        """[n] To the rows that continue them."""
        if self.whole:
            for whole, prompts in zip(self.whole, (self.prompt_keys, self.prompt_values), strict=True):
                whole[: len(prompt_of_row), :, : prompts.shape[2]] = prompts[prompt_of_row]

    def fed(
        self, prompt: int, seen: torch.Tensor, row: int, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[heads, T, D] copies: the columns of the prompt that are not empty, then these of the completion."""
        keys = torch.cat([self.prompt_keys[prompt][:, seen], self.keys[row][:, columns]], dim=1)
        return keys, torch.cat([self.prompt_values[prompt][:, seen], self.values[row][:, columns]], dim=1)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """[n, heads, 1, D] the token of this step."""
        self.rows.store(self.keys, keys)
        self.rows.store(self.values, values)

    def attend(
        self, query: torch.Tensor, scaling: float, window: int | None = None, cap: float | None = None
    ) -> torch.Tensor:
        """query [n, heads, 1, D] -> [n, 1, heads, D]; h stands for a key's head and q for the queries that share it."""
        if self.whole:
            return self.attend_to_copies(self.whole, query, scaling, window, cap)
        rows, (_, heads, width, size) = self.rows, self.prompt_keys.shape
        count, columns, prompts = rows.count, rows.columns, rows.prompts
        prompt_keys, prompt_values = (t[:prompts].flatten(0, 1) for t in (self.prompt_keys, self.prompt_values))
        keys, values = (t[:count, :, :columns].flatten(0, 1) for t in (self.keys, self.values))
        # A bf16 query would be rounded once more, so there the scores are scaled.
        exact = keys.dtype == torch.float32
        queries = (query.float() * scaling if exact else query).view(count, heads, -1, size)
        scores = torch.empty((*queries.shape[:3], width + columns), device=query.device)
        to_prompt = product_fp32(by_prompt(rows.in_slots(queries)), prompt_keys.transpose(1, 2))
        rows.write(to_prompt.view(prompts, heads, rows.places, -1, width), scores[..., :width])
        to_completion = product_fp32(queries.flatten(0, 1), keys.transpose(1, 2))
        scores[..., width:] = to_completion.view(*queries.shape[:3], columns)
        scores = capped(scores if exact else scores.mul_(scaling), cap)
        bias = rows.bias(window)
        weights = torch.softmax(scores if bias is None else scores.add_(bias), dim=-1)
        # Rounded as in the modules, wherever they are multiplied.
        weights = weights.to(query.dtype).to(values.dtype)
        of_prompt = torch.bmm(by_prompt(rows.in_slots(weights[..., :width])), prompt_values)
        mixed = torch.empty((*queries.shape[:3], values.shape[-1]), dtype=values.dtype, device=query.device)
        rows.write(of_prompt.view(prompts, heads, rows.places, -1, mixed.shape[-1]), mixed)
        mixed += torch.bmm(weights[..., width:].flatten(0, 1), values).view(mixed.shape)
        return mixed.view(count, 1, -1, mixed.shape[-1]).to(query.dtype)

    def attend_to_copies(
        self,
        whole: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """The same where prompt and completion of a row are side by side."""
        count, used = self.rows.count, self.prompt_keys.shape[2] + self.rows.columns
        keys, values = (t[:count, :, :used].flatten(0, 1) for t in whole)
        queries = (query.float() * scaling).reshape(len(keys), -1, keys.shape[2])
        scores = capped(torch.bmm(queries, keys.transpose(1, 2)), cap)
        if (bias := self.rows.bias(window)) is not None:
            scores.view(count, -1, used).add_(bias[:, 0])
        weights = torch.softmax(scores, dim=-1).to(query.dtype).to(values.dtype)
        return torch.bmm(weights, values).view(count, 1, -1, values.shape[2]).to(query.dtype)


def widened(cached: torch.Tensor) -> torch.Tensor:
    """In fp32. PyTorch has no product of bf16 factors with an fp32 result on a CPU, and a bf16 product of so few rows
    takes twice as long; one of a new shape, as in each step, ten times."""
    return cached.float()


def by_prompt(slots: torch.Tensor) -> torch.Tensor:
    """[P, places, h, q, X] -> [P * h, places * q, X]"""
    return slots.transpose(1, 2).flatten(2, 3).flatten(0, 1)
