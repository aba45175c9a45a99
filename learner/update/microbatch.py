"""Micro-batches as tensors: sequences for the backbone, flat used tokens for head and loss.

The position before a token predicts it: the prompt's last position the first token of a completion, the completion's
position t - 1 its token t. So only the tokens before the last used one are fed, since nothing depends on later ones.
Only the hidden rows that predict used tokens (selected by the entropy mask, penalised by the constraint, or all of them
for the KL) meet the head: that is where the mask saves work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.objective.batch import TrainSample
from learner.update.budget import Size
from shared.model.sequences import Sequences


def cut(samples: Sequence[TrainSample], token_budget: int, *, padding: bool) -> list[list[TrainSample]]:
    """Fill micro-batches up to the budget, groups together, those with the longest samples first. padding: whether it
    is computed too and so counts."""
    tokens = counted_by(padding)
    cuts: list[list[TrainSample]] = []
    for sample in longest_first(samples):
        if cuts and tokens([*cuts[-1], sample]) <= token_budget:
            cuts[-1].append(sample)
        else:
            cuts.append([sample])
    return cuts


def largest_part(cuts: Sequence[Sequence[TrainSample]], *, padding: bool) -> Size:
    """Tokens of the largest micro-batch of several samples, and rows of the head of the one with most."""
    tokens = counted_by(padding)
    several = (tokens(samples) for samples in cuts if len(samples) > 1)
    rows = (sum(int(sample.used.sum()) for sample in samples) for samples in cuts)
    return Size(tokens=max(several, default=0), rows=max(rows, default=0))


def counted_by(padding: bool) -> Callable[[Sequence[TrainSample]], int]:
    return padded_tokens if padding else fed_tokens


def by_group(samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """The samples of each group, groups in the order of the batch."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.sample.group, []).append(sample)
    return list(groups.values())


def longest_first(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """By the length of the group's longest sample, so that little is padding."""
    longest: dict[str, int] = {}
    for sample in samples:
        longest[sample.sample.group] = max(total_tokens(sample), longest.get(sample.sample.group, 0))
    return sorted(samples, key=lambda sample: (-longest[sample.sample.group], sample.sample.group))


def padded_tokens(samples: Sequence[TrainSample]) -> int:
    prompts = prompt_lengths(samples)
    completion = max(len(sample.sample.completion_ids) for sample in samples)
    return len(prompts) * max(prompts.values()) + len(samples) * completion


def fed_tokens(samples: Sequence[TrainSample]) -> int:
    return sum(prompt_lengths(samples).values()) + sum(before_last(sample.used) for sample in samples)


def prompt_lengths(samples: Sequence[TrainSample]) -> dict[str, int]:
    return {sample.sample.group: len(sample.sample.prompt_ids) for sample in samples}


def total_tokens(sample: TrainSample) -> int:
    return len(sample.sample.prompt_ids) + len(sample.sample.completion_ids)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B samples and the u tokens among them that are used: n carry the objective, m are penalised, k count in the KL;
    a token may be several of these."""

    sequences: Sequences
    """What the backbone runs over."""
    rows: torch.Tensor
    """[u] int64 into the backbone's hidden rows: the positions that predict the used tokens."""
    targets: torch.Tensor
    """[u] int64 the used tokens."""
    selected: torch.Tensor
    """[n] int64 in [0, u): tokens of the objective."""
    penalised: torch.Tensor
    """[m] int64 in [0, u): tokens of the constraint."""
    penalties: torch.Tensor
    """[m] fp32, what each counts there."""
    in_kl: torch.Tensor
    """[k] int64 in [0, u): tokens of the KL."""
    actor_logprobs: torch.Tensor
    """[u] fp32."""
    weights: torch.Tensor
    """[u] fp32."""
    advantages: torch.Tensor
    """[n] fp32."""
    sample: torch.Tensor
    """[n] int64 in [0, B)."""
    names: tuple[str, ...]
    """[B] for error messages."""


def micro_batch(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    sequences, rows = shared_layout(samples)
    counts = [int(s.selected.sum()) for s in samples]
    tokens = [s.sample.completion_ids[s.used] for s in samples]
    penalties = np.concatenate([s.penalties[s.used] * np.float32(s.weight) for s in samples])
    actor = [s.sample.actor_logprobs[s.used] for s in samples]
    selected = np.concatenate([s.selected[s.used] for s in samples])
    advantages = np.repeat([s.sample.advantage for s in samples], counts)
    used = [len(row) for row in rows]
    weights = np.repeat([s.weight for s in samples], used)
    in_kl = np.repeat([s.in_kl for s in samples], used)
    return MicroBatch(
        sequences=moved(sequences, device),
        rows=torch.from_numpy(np.concatenate(rows)).to(device),
        targets=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
        selected=torch.from_numpy(np.flatnonzero(selected)).to(device),
        penalised=torch.from_numpy(np.flatnonzero(penalties)).to(device),
        penalties=torch.from_numpy(penalties[penalties != 0]).to(device),
        in_kl=torch.from_numpy(np.flatnonzero(in_kl)).to(device),
        actor_logprobs=torch.from_numpy(np.concatenate(actor)).to(device),
        weights=torch.from_numpy(weights.astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages.astype(np.float32)).to(device),
        sample=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)).to(device),
        names=tuple(s.sample.name for s in samples),
    )


def shared_layout(samples: Sequence[TrainSample]) -> tuple[Sequences, list[np.ndarray]]:
    """Each group's prompt once; of each sample, the rows that predict its used tokens."""
    prompts = {s.sample.group: s.sample.prompt_ids for s in samples}
    number = {group: index for index, group in enumerate(prompts)}
    owner = [number[s.sample.group] for s in samples]
    counts = [before_last(s.used) for s in samples]
    fed = [s.sample.completion_ids[:count] for s, count in zip(samples, counts, strict=True)]
    first, second = padded(list(prompts.values())), padded(fed)
    rows: list[np.ndarray] = []
    for row, sample in enumerate(samples):
        last_of_prompt = owner[row] * first.shape[1] + len(sample.sample.prompt_ids) - 1
        before_token = first.size + row * second.shape[1] + np.arange(-1, len(sample.used) - 1)
        before_token[0] = last_of_prompt
        rows.append(before_token[sample.used])
    lengths = [len(prompt) for prompt in prompts.values()]
    sequences = Sequences(
        prompts=torch.from_numpy(first),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        completions=torch.from_numpy(second),
        owner=torch.tensor(owner, dtype=torch.int64),
        counts=torch.tensor(counts, dtype=torch.int64),
    )
    return sequences, rows


def before_last(used: np.ndarray) -> int:
    """[t] bool -> how many tokens come before the last used one."""
    return int(np.flatnonzero(used)[-1]) if used.any() else 0


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Ragged rows as [len(rows), longest] int64, at least one column wide, zeros at the right."""
    ids = np.zeros((len(rows), max(1, *(len(row) for row in rows))), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids


def moved(sequences: Sequences, device: torch.device) -> Sequences:
    completions = sequences.completions
    return Sequences(
        prompts=sequences.prompts.to(device),
        lengths=sequences.lengths.to(device),
        completions=None if completions is None else completions.to(device),
        owner=sequences.owner.to(device),
        counts=None if sequences.counts is None else sequences.counts.to(device),
    )
