"""Micro-batches as tensors: right-padded ids for the backbone, flat selected tokens for head and loss.

Position t of a sequence predicts token t + 1, so the last token of each sequence is never fed. Only the hidden rows of
selected tokens meet the head: that is where the entropy mask saves work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.batch import TrainSample


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B sequences and the n tokens among them that carry gradient."""

    ids: torch.Tensor
    """[B, L] int64, prompt and completion without the last token, zeros at the right."""
    rows: torch.Tensor
    """[n] int64 into the flattened [B * L] hidden rows: the positions that predict the selected tokens."""
    targets: torch.Tensor
    """[n] int64 the selected tokens."""
    actor_logprobs: torch.Tensor
    """[n] fp32."""
    advantages: torch.Tensor
    """[n] fp32."""
    weights: torch.Tensor
    """[n] fp32."""
    sample: torch.Tensor
    """[n] int64 in [0, B)."""
    names: tuple[str, ...]
    """[B] for error messages."""


def micro_batch(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    """Pad, flatten, move."""
    width = max(len(s.sample.prompt_ids) + len(s.sample.completion_ids) for s in samples) - 1
    ids = np.zeros((len(samples), width), dtype=np.int64)
    parts = [fill_row(ids, row, sample) for row, sample in enumerate(samples)]
    counts = [len(part) for part in parts]
    tokens = [s.sample.completion_ids[s.selected] for s in samples]
    actor = [s.sample.actor_logprobs[s.selected] for s in samples]
    advantages = np.repeat([s.sample.advantage for s in samples], counts)
    weights = np.repeat([s.weight for s in samples], counts)
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        rows=torch.from_numpy(np.concatenate(parts)).to(device),
        targets=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
        actor_logprobs=torch.from_numpy(np.concatenate(actor)).to(device),
        advantages=torch.from_numpy(advantages.astype(np.float32)).to(device),
        weights=torch.from_numpy(weights.astype(np.float32)).to(device),
        sample=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)).to(device),
        names=tuple(s.sample.name for s in samples),
    )


def fill_row(ids: np.ndarray, row: int, sample: TrainSample) -> np.ndarray:
    """Write one sequence; returns the flat positions that predict its selected tokens."""
    prompt, completion = sample.sample.prompt_ids, sample.sample.completion_ids
    sequence = np.concatenate([prompt, completion])[:-1]
    ids[row, : len(sequence)] = sequence
    return row * ids.shape[1] + len(prompt) - 1 + np.flatnonzero(sample.selected)
