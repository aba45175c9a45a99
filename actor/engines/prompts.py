"""Runs prompts, each once for its group, and keeps their keys and values.

Prompts of different lengths are padded on the left, so that their last tokens are in one column. They run in pieces,
since an evaluation order may have more than a hundred of them, and their activations would take gigabytes:

    prompts of a piece = max(1, PIECE_TOKENS // longest prompt)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shared.config.processes import PIECE_TOKENS
from shared.model.policy import Policy


class PromptPass:
    """Records keys and values of the prompts while they are run, [P, width] left-padded."""

    is_compileable = False

    def __init__(self, padding: torch.Tensor, width: int) -> None:
        """padding: [P] how many of a prompt's `width` columns are empty."""
        self.visible = torch.arange(width, device=padding.device) >= padding[:, None]
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[P, heads, width, D] prompts attend to themselves."""
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before these, under the name transformers asks for."""
        return 0

    def mask(self) -> torch.Tensor:
        """[P, 1, width, width] what a prompt's columns may attend to.

        Every column sees itself: an empty one would otherwise turn into NaN, and 0 * NaN would reach the others.
        """
        columns = torch.arange(self.visible.shape[1], device=self.visible.device)
        seen = (columns <= columns[:, None]) & self.visible[:, None]
        return (seen | (columns == columns[:, None]))[:, None]


def pieces(prompts: Sequence[int], longest: int, tokens: int = PIECE_TOKENS) -> Iterator[Sequence[int]]:
    """Numbers of prompts -> the numbers of each piece. tokens: of a piece."""
    size = max(1, tokens // longest)
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def run_prompts(policy: Policy, prompts: Sequence[np.ndarray], width: int) -> tuple[PromptPass, torch.Tensor]:
    """P prompts in `width` columns -> their keys and values, [P, H] hidden of the last tokens."""
    ids = torch.zeros((len(prompts), width), dtype=torch.int64, device=policy.device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
    padding = width - torch.tensor([len(prompt) for prompt in prompts], device=policy.device)
    positions = (torch.arange(width, device=policy.device) - padding[:, None]).clamp(min=0)
    passed = PromptPass(padding, width)
    return passed, last_hidden(policy, ids, positions, passed.mask(), passed)


def last_hidden(
    policy: Policy, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """[B, t] ids through transformers' layers -> [B, H] hidden at the last column. cache: duck-typed after theirs."""
    output = policy.backbone(
        input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
    )
    return output.last_hidden_state[:, -1]
