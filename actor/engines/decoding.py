"""Tracks which completions of an order are being decoded, and the tokens drawn so far.

Completions wait in the order of the groups. At most `width` have a row. A row whose completion has ended is taken over
by the next one that waits, so that the weights are always read for a full batch; when none waits, the row leaves, and
the last row takes its place. The sequence of batch shapes follows from the order and the tokens alone. A prompt is in
memory from the first completion that gets a row until none of its completions has one.

The first token of a completion is drawn from the last hidden row of its prompt. A row that is taken over skips the step
in which the prompt is run: it is computed with any token, which nothing attends to.
"""

import numpy as np
import torch

from actor.engines.engine import Completion, EndedCompletion
from actor.engines.kv_cache import KVCache
from actor.engines.prompts import PromptPass
from actor.engines.turns import Turns
from protocol.messages import Finish, GroupOrder, Sampling
from shared.model.sampler import Draw
from shared.seeding import uniforms


class Decoding:
    """The completions of one order while they are being decoded; all tensors over rows have the rows' order."""

    def __init__(
        self,
        groups: tuple[GroupOrder, ...],
        sampling: Sampling,
        width: int,
        device: torch.device,
        draw: Draw,
        turns: Turns | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """turns: of conversations, whose keys and values are kept. compiled: as in KVCache."""
        self.turns = turns
        self.groups, self.cap, self.device, self.draw = groups, sampling.max_new_tokens, device, draw
        self.completions = [(group, index) for group, order in enumerate(groups) for index in range(len(order.seeds))]
        self.group_of = torch.tensor([group for group, _ in self.completions], device=device)
        self.prompt_lengths = torch.tensor([len(group.prompt_ids) for group in groups], device=device)
        rows = min(width, len(self.completions))
        self.cache = KVCache(rows, self.cap, int(self.prompt_lengths.max()), device, compiled=compiled)
        self.uniforms = self.draw_uniforms() if sampling.temperature > 0 else None
        self.ids = torch.zeros((len(self.completions), self.cap), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(self.ids.shape, device=device)
        self.entropies = torch.zeros_like(self.logprobs)
        self.done: list[EndedCompletion] = []
        self.rows = torch.arange(rows, device=device)
        """[n] index of each row's completion."""
        self.tokens = torch.zeros_like(self.rows)
        """[n] how many of its tokens are drawn."""
        self.last_ids = torch.zeros_like(self.rows)
        self.next = rows
        self.loaded: list[int] = []
        """Groups whose prompts are in memory."""
        self.last_hidden = torch.empty(0, device=device)
        """[P, H] of these prompts."""
        self.settled, self.begun = False, False
        """Whether `assign` has run since the rows changed; whether every row has a token."""

    def draw_uniforms(self) -> torch.Tensor:
        """[N, cap] each completion's own stream."""
        streams = [self.stream(*completion) for completion in self.completions]
        return torch.from_numpy(np.stack(streams)).to(self.device)

    def stream(self, group: int, index: int) -> np.ndarray:
        """[cap] the draws of a completion, after those of its turns before."""
        order = self.groups[group]
        drawn = self.turns.drawn_before(order, index) if self.turns else 0
        return uniforms(order.seeds[index], drawn + self.cap)[drawn:]

    @property
    def positions(self) -> torch.Tensor:
        """[n] of the tokens that were drawn last."""
        return self.prompt_lengths[self.group_of[self.rows]] + self.tokens - 1

    def append(self, logits: torch.Tensor, end_ids: torch.Tensor) -> list[EndedCompletion]:
        """Draw the next token of every row; those that end are returned, and their rows go to others or leave."""
        drawn = self.draw(logits, None if self.uniforms is None else self.uniforms[self.rows, self.tokens])
        self.ids[self.rows, self.tokens] = drawn.ids
        self.logprobs[self.rows, self.tokens] = drawn.logprobs
        self.entropies[self.rows, self.tokens] = drawn.entropies
        self.tokens += 1
        self.begun = True
        self.last_ids = drawn.ids
        stopped = torch.isin(drawn.ids, end_ids)
        over = stopped | (self.tokens == self.cap)
        return self.replace(over, stopped) if bool(over.any()) else []

    def replace(self, over: torch.Tensor, stopped: torch.Tensor) -> list[EndedCompletion]:
        """The first rows that are over are taken over by those that wait; the others leave."""
        ended_rows = over.nonzero().squeeze(1)
        if self.turns:
            self.keep(self.turns, ended_rows.tolist())
        ended = self.ended(ended_rows, stopped[ended_rows].tolist())
        self.done += ended
        taken, left = ended_rows.tensor_split([min(len(ended_rows), len(self.completions) - self.next)])
        self.rows[taken] = torch.arange(self.next, self.next + len(taken), device=self.device)
        self.tokens[taken] = 0
        self.next += len(taken)
        if len(left):
            self.leave(left)
        self.settled, self.begun = False, not len(taken)
        return ended

    def keep(self, turns: Turns, ended_rows: list[int]) -> None:
        for row in ended_rows:
            group, index = self.completions[int(self.rows[row])]
            turns.ended(self.groups[group], index, self.cache.fed(row, int(self.tokens[row]) - 1))

    def leave(self, left: torch.Tensor) -> None:
        """Rows at the end take the places of those that leave."""
        remaining = len(self.rows) - len(left)
        going = torch.ones(len(self.rows), dtype=torch.bool, device=self.device).index_fill_(0, left, False)
        target = left[left < remaining]
        source = going[remaining:].nonzero().squeeze(1) + remaining
        self.cache.move_rows(source, target)
        for kept in (self.rows, self.tokens, self.last_ids):
            kept[target] = kept[source]
        self.rows, self.tokens, self.last_ids = (kept[:remaining] for kept in (self.rows, self.tokens, self.last_ids))

    def ended(self, ended_rows: torch.Tensor, stopped: list[bool]) -> list[EndedCompletion]:
        """What these rows have sampled."""
        found: list[EndedCompletion] = []
        numbers, lengths = (kept[ended_rows].tolist() for kept in (self.rows, self.tokens))
        for number, length, stop in zip(numbers, lengths, stopped, strict=True):
            ids = self.ids[number, :length].int().cpu().numpy()
            logprobs, entropies = (kept[number, :length].cpu().numpy() for kept in (self.logprobs, self.entropies))
            finish = Finish.STOP if stop else Finish.LENGTH
            completion = Completion(ids=ids, logprobs=logprobs, entropies=entropies, finish=finish)
            group, index = self.completions[number]
            found.append(EndedCompletion(group=group, index=index, completion=completion))
        return found

    def missing(self) -> list[int]:
        """Groups that have a row and whose prompts are not in memory."""
        return sorted(set(self.group_of[self.rows].tolist()) - set(self.loaded))

    def load(self, groups: list[int], prompts: PromptPass, last_hidden: torch.Tensor) -> None:
        """Take the prompts of these groups into memory, those that no row needs any more out of it."""
        if self.loaded:
            self.drop_prompts()
        self.cache.add_prompts(prompts)
        self.last_hidden = torch.cat([self.last_hidden, last_hidden]) if self.loaded else last_hidden
        self.loaded += groups

    def drop_prompts(self) -> None:
        """Those of which no row is decoded."""
        used = set(self.group_of[self.rows].tolist())
        kept = [place for place, group in enumerate(self.loaded) if group in used]
        if len(kept) < len(self.loaded):
            needed = torch.tensor(kept, dtype=torch.int64, device=self.device)
            self.cache.keep_prompts(needed)
            self.last_hidden = self.last_hidden[needed]
            self.loaded = [self.loaded[place] for place in kept]

    def settle(self) -> None:
        """Tell the cache which rows there are now. Half-empty places are given up."""
        self.assign()
        if 2 * len(self.rows) <= len(self.loaded) * self.cache.rows.places:
            self.drop_prompts()
            self.assign()
        self.settled = True

    def assign(self) -> None:
        place_of_group = torch.full((len(self.groups),), -1, device=self.device)
        place_of_group[torch.tensor(self.loaded, device=self.device)] = torch.arange(
            len(self.loaded), device=self.device
        )
        self.prompt_of_row = place_of_group[self.group_of[self.rows]]
        self.cache.assign(self.prompt_of_row)

    def with_first(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] of this step; rows whose completion has no token yet get the last one of their prompt."""
        if self.begun:
            return hidden
        new = self.tokens == 0
        hidden[new] = self.last_hidden[self.prompt_of_row[new]]
        return hidden
