"""Decodes an order in buffers of fixed shape: the loop of a card.

The host gives rows to completions, lets the device take up to `look` steps, and then looks at all rows at once. Rows
that have ended are reported and taken over by the next completions, in the order of the groups; prompts run between two
steps, as they are. When none waits and half the slots are empty, the others move together. A step is then for half
as many rows.

    columns read    the longest completion after these steps, raised to a multiple of a quarter of its cap
    columns of a prompt    the longest prompt, raised to a multiple of `PROMPT_COLUMNS`

So the shapes of an order are few, and most of its steps are replayed (actor/engines/replay.py). Rows that have ended
are computed along until the next look. The tokens are those of actor/engines/decoding.py, which is faster on a CPU:
there each row more and each column more takes time, and shapes may change as they like.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actor.engines.engine import Completion, EndedCompletion, Progress
from actor.engines.fixed_cache import FixedShape
from actor.engines.fixed_rows import FixedBuffers, TokenStep
from actor.engines.prompts import pieces
from actor.engines.replay import Capture, Replay, StepShape
from actor.engines.token_step.layers import Layers
from actor.engines.turns import Turns, run_groups
from protocol.messages import Finish, GroupOrder, Sampling
from shared.config.processes import PIECE_TOKENS
from shared.model.policy import Policy
from shared.seeding import uniforms


@dataclass(frozen=True, kw_only=True)
class Grain:
    """How coarse shapes and looks are."""

    look: int = 8
    """Steps between two looks."""
    prompt: int = 64
    """Columns of prompts are a multiple of this."""
    parts: int = 4
    """Into how many equal parts the columns of a completion are cut."""
    piece: int = PIECE_TOKENS
    """Padded prompt tokens that are run at once."""


class FixedLoop:
    """Decodes order after order. Buffers and graphs stay until they are of the wrong shape, or `forget` is called."""

    def __init__(
        self,
        policy: Policy,
        layers: Layers,
        end_ids: torch.Tensor,
        grain: Grain,
        capture: Callable[[], Capture] | None = None,
    ) -> None:
        """capture: makes CUDA graphs; None runs every step as it is."""
        self.policy, self.layers, self.end_ids, self.grain = policy, layers, end_ids, grain
        self.replay = Replay(capture)
        self.buffers: FixedBuffers | None = None

    def forget(self) -> None:
        """Give up all memory but the model's."""
        self.replay.forget()
        self.buffers = None

    def decode(
        self,
        groups: tuple[GroupOrder, ...],
        sampling: Sampling,
        width: int,
        told: Progress,
        turns: Turns | None = None,
    ) -> None:
        """At most `width` rows at once. turns: of conversations."""
        shape = shape_of(groups, sampling.max_new_tokens, width, self.grain.prompt)
        buffers = self.buffers_for(shape)
        step = TokenStep(self.policy, self.layers, buffers, self.end_ids, sampling.temperature)
        decoding = FixedDecoding(groups, self.policy, step, buffers, self.grain, turns)
        while decoding.goes_on():
            decoding.advance(self.replay)
            told(decoding.collect())

    def buffers_for(self, shape: FixedShape) -> FixedBuffers:
        if self.buffers is None or self.buffers.shape != shape:
            # The old ones first, or both would be in memory.
            self.forget()
            self.buffers = FixedBuffers.of(self.policy, self.layers, shape)
        else:
            self.buffers.reset()
        return self.buffers


def shape_of(groups: Sequence[GroupOrder], room: int, width: int, grain: int) -> FixedShape:
    """A slot for each group if all completions fit and the groups are equal, else one for each row. No row is ever
    without a completion that began in it. grain: of the prompts' columns."""
    sizes = [len(group.seeds) for group in groups]
    longest = max(len(group.prompt_ids) for group in groups)
    together = len(set(sizes)) == 1 and sum(sizes) <= width
    slots, places = (len(groups), sizes[0]) if together else (min(width, sum(sizes)), 1)
    return FixedShape(slots=slots, places=places, width=-(-longest // grain) * grain, room=room)


class FixedDecoding:
    """One order."""

    def __init__(
        self,
        groups: tuple[GroupOrder, ...],
        policy: Policy,
        step: TokenStep,
        buffers: FixedBuffers,
        grain: Grain,
        turns: Turns | None = None,
    ) -> None:
        self.turns = turns
        self.groups, self.policy, self.step, self.grain = groups, policy, step, grain
        self.shape, self.cache, self.state = buffers.shape, buffers.cache, buffers.state
        self.completions = [(group, index) for group, order in enumerate(groups) for index in range(len(order.seeds))]
        self.waiting = deque(range(len(self.completions)))
        self.running: dict[int, int] = {}
        """Row -> number of its completion."""
        self.tokens = [0] * self.shape.rows
        """Of each row, at the last look."""
        self.held: list[int | None] = [None] * self.shape.slots
        """The group whose prompt is in each slot."""
        self.last_hidden = self.state.hidden.new_zeros(len(groups), self.state.hidden.shape[1])
        """[groups, H] of the prompts that have run."""

    def goes_on(self) -> bool:
        """Give free rows to completions that wait. False if all have ended."""
        if free := self.free_rows():
            self.begin([(row, self.waiting.popleft()) for row in free])
        elif self.running:
            self.close_up()
        return bool(self.running)

    def free_rows(self) -> list[int]:
        """For the next completions, in their order."""
        if self.waiting and self.shape.places > 1:
            # All begin at once, each in the slot of its group.
            return [group * self.shape.places + index for group, index in self.completions]
        free = [row for row in range(self.cache.rows.count) if row not in self.running]
        return free[: len(self.waiting)]

    def begin(self, pairs: list[tuple[int, int]]) -> None:
        """Rows and the completions that begin in them."""
        group_of = {row: self.completions[number][0] for row, number in pairs}
        self.load({row // self.shape.places: group for row, group in group_of.items()})
        draws = [self.draws_of(number) for _, number in pairs] if self.step.temperature else None
        self.state.begin(
            list(group_of),
            self.last_hidden[list(group_of.values())],
            [len(self.groups[group].prompt_ids) for group in group_of.values()],
            np.stack(draws) if draws else None,
        )
        for row, number in pairs:
            self.running[row], self.tokens[row] = number, 0

    def draws_of(self, number: int) -> np.ndarray:
        """[room]"""
        group, index = self.completions[number]
        order = self.groups[group]
        drawn = self.turns.drawn_before(order, index) if self.turns else 0
        return uniforms(order.seeds[index], drawn + self.shape.room)[drawn:]

    def load(self, wanted: dict[int, int]) -> None:
        """Get the prompts of these groups into these slots: slot -> group."""
        changed = {slot: group for slot, group in wanted.items() if self.held[slot] != group}
        place = {group: slot for slot, group in enumerate(self.held) if group is not None}
        copied = {slot: place[group] for slot, group in changed.items() if group in place}
        self.cache.copy_slots(list(copied.values()), list(copied))
        missing = sorted(set(changed.values()) - set(place))
        for part in pieces(missing, self.shape.width, self.grain.piece):
            self.run(part, {slot: group for slot, group in changed.items() if group in part})
        for slot, group in changed.items():
            self.held[slot] = group

    def run(self, part: Sequence[int], slots: dict[int, int]) -> None:
        """The prompts of some groups."""
        some = [self.groups[group] for group in part]
        width = max(len(group.prompt_ids) for group in some)
        passed, hidden = run_groups(self.policy, some, self.turns, width)
        self.cache.put(passed, [part.index(group) for group in slots.values()], list(slots))
        self.last_hidden[list(part)] = hidden

    def advance(self, replay: Replay) -> None:
        """Take steps until the next look."""
        drawn = [self.tokens[row] for row in self.running]
        count, rows = min(self.grain.look, self.shape.room - min(drawn)), self.cache.rows
        grain = -(-self.shape.room // self.grain.parts)
        rows.columns = min(self.shape.room, -(-(max(drawn) + count) // grain) * grain)
        shape = StepShape(
            rows=rows.count, width=self.shape.width, columns=rows.columns, temperature=self.step.temperature
        )
        for _ in range(count):
            replay(shape, self.step)

    def collect(self) -> list[EndedCompletion]:
        """Look at the rows; those that have ended are free."""
        alive, stopped, self.tokens = self.state.look(self.cache.rows.count)
        over = [row for row in sorted(self.running) if not alive[row]]
        if not over:
            return []
        kept = (self.state.ids, self.state.logprobs, self.state.entropies)
        ids, logprobs, entropies = (values[over].cpu().numpy() for values in kept)
        ended: list[EndedCompletion] = []
        for place, row in enumerate(over):
            used = slice(0, self.tokens[row])
            completion = Completion(
                ids=ids[place, used].astype(np.int32),
                logprobs=logprobs[place, used].copy(),
                entropies=entropies[place, used].copy(),
                finish=Finish.STOP if stopped[row] else Finish.LENGTH,
            )
            group, index = self.completions[self.running.pop(row)]
            if self.turns:
                self.turns.ended(self.groups[group], index, self.cache.fed(row, self.tokens[row] - 1))
            ended.append(EndedCompletion(group=group, index=index, completion=completion))
        return ended

    def close_up(self) -> None:
        """Slots with a row that goes on move to the front, if they are at most half of those in use. Then no completion
        waits, so nobody asks any more which prompts are held."""
        places, count = self.shape.places, self.cache.rows.prompts
        live = sorted({row // places for row in self.running})
        while 2 * len(live) <= count and count > 1:
            count = -(-count // 2)
        if count == self.cache.rows.prompts:
            return
        empty = (slot for slot in range(self.cache.rows.prompts) if slot not in live)
        slots = [*live, *(next(empty) for _ in range(count - len(live)))]
        self.cache.keep(slots)
        rows = [slot * places + place for slot in slots for place in range(places)]
        self.state.keep(rows)
        self.running = {new: self.running[row] for new, row in enumerate(rows) if row in self.running}
        self.tokens = [self.tokens[row] for row in rows]
