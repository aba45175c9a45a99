"""Conversations of several turns: the keys and values of what was computed stay, and the next turn continues them.

    first turn    prompt -> tokens, end                                      as any completion
    next turn     kept keys and values | end, what was put between, opening -> tokens, end

The last token of a turn was drawn and not fed yet, so it comes first of what the next turn feeds. A turn is decoded
like a completion of its own, whose prompt is all that comes before it: the loops of the engine need not know. Draws
continue in the completion's own stream, at the number of tokens it has drawn.

A conversation is named by its group and its seed. What is kept is a copy on the device, until the engine sleeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actor.engines.prompts import PromptPass, last_hidden, run_prompts
from protocol.messages import GroupOrder
from shared.model.policy import Policy

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer."""
Name = tuple[str, int]


@dataclass(kw_only=True)
class Turns:
    """What is known of the conversations of an order."""

    kept: dict[Name, Pairs] = field(default_factory=dict[Name, Pairs])
    """[heads, T, D] of the tokens that were fed."""
    drawn: dict[Name, int] = field(default_factory=dict[Name, int])
    """Tokens drawn in the turns before."""

    def before(self, group: GroupOrder) -> Pairs | None:
        """What the prompt of this group begins with; None where a conversation begins."""
        return self.kept.get((group.group_id, group.seeds[0]))

    def drawn_before(self, group: GroupOrder, index: int) -> int:
        return self.drawn.get((group.group_id, group.seeds[index]), 0)

    def ended(self, group: GroupOrder, index: int, pairs: Pairs) -> None:
        """Keep what was fed, the last drawn token not included."""
        self.kept[group.group_id, group.seeds[index]] = pairs

    def draw(self, group: GroupOrder, index: int, count: int) -> None:
        name = (group.group_id, group.seeds[index])
        self.drawn[name] = self.drawn.get(name, 0) + count


class ContinuedPass:
    """Gives each row its kept keys and values and records those of the tokens that are run: [P, width] new columns."""

    is_compileable = False

    def __init__(self, kept: Sequence[Pairs], dtype: torch.dtype) -> None:
        self.lengths = [len_of(pairs) for pairs in kept]
        width = max(self.lengths)
        self.before: Pairs = [
            (
                torch.stack([at_the_right(pairs[layer][0], width) for pairs in kept]).to(dtype),
                torch.stack([at_the_right(pairs[layer][1], width) for pairs in kept]).to(dtype),
            )
            for layer in range(len(kept[0]))
        ]
        self.layers: Pairs = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[P, heads, new, D]: the tokens attend to what was kept and to themselves."""
        self.layers.append((keys, values))
        before = self.before[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before these, under the name transformers asks for."""
        return self.before[0][0].shape[2]


def run_continued(
    policy: Policy, prompts: Sequence[np.ndarray], kept: Sequence[Pairs], width: int
) -> tuple[PromptPass, torch.Tensor]:
    """P prompts of which the beginnings are kept -> all their keys and values, [P, H] hidden of the last tokens."""
    passed, device = ContinuedPass(kept, policy.dtype), policy.device
    new = [prompt[length:] for prompt, length in zip(prompts, passed.lengths, strict=True)]
    columns = max(len(ids) for ids in new)
    ids = torch.zeros((len(new), columns), dtype=torch.int64, device=device)
    for row, some in enumerate(new):
        ids[row, columns - len(some) :] = torch.from_numpy(some.astype(np.int64))
    padding = columns - torch.tensor([len(some) for some in new], device=device)
    starts = torch.tensor(passed.lengths, device=device)
    numbers = torch.arange(columns, device=device)
    positions = starts[:, None] + (numbers - padding[:, None]).clamp(min=0)
    # An empty column sees itself, as in PromptPass.mask.
    own = ((numbers <= numbers[:, None]) & (numbers >= padding[:, None])[:, None]) | (numbers == numbers[:, None])
    most = passed.get_seq_length()
    seen = torch.arange(most, device=device) >= most - starts[:, None]
    mask = torch.cat([seen[:, None].expand(-1, columns, -1), own], dim=2)[:, None]
    hidden = last_hidden(policy, ids, positions, mask, passed)
    return joined(passed, new, width, device), hidden


def run_groups(
    policy: Policy, groups: Sequence[GroupOrder], turns: Turns | None, width: int
) -> tuple[PromptPass, torch.Tensor]:
    """Their prompts, from the beginning or from what is kept; all groups of a turn are alike in that."""
    prompts = [group.prompt_ids for group in groups]
    kept = [turns.before(group) for group in groups] if turns else []
    known = [pairs for pairs in kept if pairs is not None]
    return run_continued(policy, prompts, known, width) if known else run_prompts(policy, prompts, width)


def joined(passed: ContinuedPass, new: Sequence[np.ndarray], width: int, device: torch.device) -> PromptPass:
    """As if the prompts had been run whole, in `width` columns."""
    lengths = [before + len(ids) for before, ids in zip(passed.lengths, new, strict=True)]
    whole = PromptPass(width - torch.tensor(lengths, device=device), width)
    for before, made in zip(passed.before, passed.layers, strict=True):
        keys, values = (
            torch.stack(
                [
                    at_the_right(torch.cat([old[row][:, -length:], own[row][:, -len(ids) :]], dim=1), width)
                    for row, (length, ids) in enumerate(zip(passed.lengths, new, strict=True))
                ]
            )
            for old, own in zip(before, made, strict=True)
        )
        whole.layers.append((keys, values))
    return whole


def at_the_right(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[heads, T, D] -> [heads, width, D]"""
    return torch.nn.functional.pad(rows, (0, 0, width - rows.shape[1], 0))


def len_of(pairs: Any) -> int:
    return pairs[0][0].shape[1]
