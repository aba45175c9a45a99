"""The rows of an order on the device, and one token of each of them.

    draw     logits of the last hidden rows -> a token, its log-prob, its entropy; the row may end with it
    decode   the token through the decoder -> the hidden rows of the next step

Everything that a step reads or writes has a fixed address and shape, and nothing in it waits for the device or follows
from a value: a row that has ended is computed along and changes nothing that is read. So the same code is run by a CPU,
by a card, by a CUDA graph, and over tensors without values for a plan. The host looks at the rows every few steps
(actor/engines/fixed_decoding.py).

A row begins with the hidden row of its prompt's last token and no tokens of its own. Draws come from the completion's
own stream, so they depend neither on its row nor on when it got one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from actor.engines.fixed_cache import FixedCache, FixedShape, KeySizes
from actor.engines.token_step.layers import Layers
from shared.model.policy import Policy


class FixedRowState:
    """One entry for each row; rows in use come first."""

    def __init__(self, rows: int, room: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.zeros((rows, hidden), dtype=dtype, device=device)
        """[n, H] that the next token is drawn from."""
        self.alive = torch.zeros(rows, dtype=torch.bool, device=device)
        """[n] whether its completion goes on."""
        self.stopped = torch.zeros_like(self.alive)
        """[n] whether it has ended itself."""
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """[n] how many are drawn."""
        self.prompt_lengths = torch.zeros_like(self.tokens)
        # One column more than a completion has: where rows that have ended write.
        self.ids = torch.zeros((rows, room + 1), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((rows, room + 1), device=device)
        self.entropies = torch.zeros_like(self.logprobs)
        self.uniforms = torch.zeros((rows, room + 1), dtype=torch.float64, device=device)
        """[n, room + 1] the draws of its completion."""

    def all(self) -> list[torch.Tensor]:
        kept = (self.hidden, self.alive, self.stopped, self.tokens, self.prompt_lengths)
        return [*kept, self.ids, self.logprobs, self.entropies, self.uniforms]

    def reset(self) -> None:
        for kept in self.all():
            kept.zero_()

    def begin(
        self, rows: Sequence[int], hidden: torch.Tensor, lengths: Sequence[int], uniforms: np.ndarray | None
    ) -> None:
        """Completions begin in these rows: the last hidden rows of their prompts [k, H], how long these are, and their
        draws [k, room]; None takes the most likely token."""
        device = hidden.device
        target = torch.tensor(list(rows), device=device)
        self.hidden[target] = hidden
        self.alive[target], self.stopped[target], self.tokens[target] = True, False, 0
        self.prompt_lengths[target] = torch.tensor(list(lengths), device=device)
        if uniforms is not None:
            self.uniforms[target, :-1] = torch.from_numpy(uniforms).to(device)

    def keep(self, rows: Sequence[int]) -> None:
        """These become the first ones."""
        taken = torch.tensor(list(rows), device=self.alive.device)
        for kept in self.all():
            kept[: len(rows)] = kept[taken]

    def look(self, rows: int) -> tuple[list[bool], list[bool], list[int]]:
        """Of the first rows: alive, stopped, tokens. Waits for the device, once."""
        facts = torch.stack([self.alive[:rows].long(), self.stopped[:rows].long(), self.tokens[:rows]]).tolist()
        return [bool(one) for one in facts[0]], [bool(one) for one in facts[1]], facts[2]


@dataclass(frozen=True, kw_only=True)
class FixedBuffers:
    """Memory of the orders of one shape."""

    shape: FixedShape
    """What there is room for."""
    cache: FixedCache
    """Keys and values."""
    state: FixedRowState
    """All else."""

    @staticmethod
    def of(policy: Policy, layers: Layers, shape: FixedShape) -> "FixedBuffers":
        """On the policy's device, which may be one without values."""
        sizes = key_sizes(policy, layers)
        state = FixedRowState(shape.rows, shape.room, policy.head.shape[1], policy.dtype, policy.device)
        return FixedBuffers(shape=shape, cache=FixedCache(shape, sizes, policy.device), state=state)

    def reset(self) -> None:
        self.cache.reset()
        self.state.reset()


def key_sizes(policy: Policy, layers: Layers) -> KeySizes:
    heads, attention = policy.config.num_key_value_heads, layers.layers[0].attention
    # As `widened` keeps them (actor/engines/kv_cache.py).
    dtype = torch.float32 if policy.device.type == "cpu" else policy.dtype
    return KeySizes(layers=len(layers.layers), heads=heads, size=attention.head_dim, dtype=dtype)


class TokenStep:
    """One token of every row in use."""

    def __init__(
        self, policy: Policy, layers: Layers, buffers: FixedBuffers, end_ids: torch.Tensor, temperature: float
    ) -> None:
        """temperature: 0 takes the most likely token. end_ids [E]"""
        self.policy, self.layers, self.end_ids, self.temperature = policy, layers, end_ids, temperature
        self.cache, self.state, self.room = buffers.cache, buffers.state, buffers.shape.room

    def __call__(self) -> None:
        rows = self.cache.rows
        with scattered():
            ids = self.draw(rows.count)
            tokens = self.state.tokens[: rows.count]
            rows.step(tokens)
            positions = self.state.prompt_lengths[: rows.count] + tokens - 1
            self.state.hidden[: rows.count] = self.layers(ids, positions, self.cache.layers)
            rows.end_step()

    def draw(self, count: int) -> torch.Tensor:
        """[count] ids; what is known of them is written down."""
        state = self.state
        hidden, alive, tokens = state.hidden[:count], state.alive[:count], state.tokens[:count]
        column = tokens[:, None]
        uniforms = state.uniforms[:count].gather(1, column).squeeze(1) if self.temperature else None
        drawn = self.policy.kernels.draw(self.policy.logits(hidden, self.temperature or 1.0), uniforms)
        found = ((state.ids, drawn.ids), (state.logprobs, drawn.logprobs), (state.entropies, drawn.entropies))
        for kept, values in found:
            kept[:count].scatter_(1, column, values[:, None])
        tokens += alive
        stopped = (drawn.ids[:, None] == self.end_ids).any(dim=1).logical_and_(alive)
        state.stopped[:count] |= stopped
        alive &= (tokens < self.room).logical_and_(stopped.logical_not_())
        return drawn.ids


@contextmanager
def scattered() -> Iterator[None]:
    """Inside the block a card scatters in one launch. In PyTorch's deterministic mode it would sort the places first,
    lest two be equal; here each row has a place of its own."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
