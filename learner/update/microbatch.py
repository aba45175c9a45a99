"""Micro-batches as tensors: sequences for the backbone, flat used tokens for head and loss.

The position before a token predicts it: the prompt's last position the first token of a completion, the completion's
position t - 1 its token t. So only the tokens before the last used one are fed, since nothing depends on later ones.
Only the hidden rows that predict used tokens (selected by the entropy mask, penalised by the constraint, or all of them
for the KL) meet the head: that is where the mask saves work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from learner.objective.batch import TrainSample
from learner.update.budget import Size
from shared.model.layers.sequences import Places, Sequences


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
    return sum(prompt_lengths(samples).values()) + sum(sample.num_fed for sample in samples)


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
    teacher_logprobs: torch.Tensor | None
    """[u] fp32; None without a teacher."""
    weights: torch.Tensor
    """[u] fp32."""
    advantages: torch.Tensor
    """[n] fp32."""
    sample: torch.Tensor
    """[n] int64 in [0, B)."""
    counts: torch.Tensor
    """[B] int64 how many of the n tokens are of each sample."""
    weight_sum: float
    """Of the n tokens."""
    names: tuple[str, ...]
    """[B] for error messages."""


def placed(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a card by way of pinned memory, so that the host does not wait until the card has come so far."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def micro_batch(samples: Sequence[TrainSample], device: torch.device) -> MicroBatch:
    """All that depends on values is computed here, on the host's arrays."""
    sequences, rows = shared_layout(samples, device)
    counts = [int(s.selected.sum()) for s in samples]
    tokens = [s.sample.completion_ids[s.used] for s in samples]
    penalties = np.concatenate([s.penalties[s.used] * np.float32(s.weight) for s in samples])
    actor = [s.sample.actor_logprobs[s.used] for s in samples]
    selected = np.concatenate([s.selected[s.used] for s in samples])
    advantages = np.repeat([s.sample.advantage for s in samples], counts)
    used = [len(row) for row in rows]
    weights = np.repeat([s.weight for s in samples], used)
    in_kl = np.repeat([s.in_kl for s in samples], used)
    weights = weights.astype(np.float32)
    return MicroBatch(
        sequences=sequences,
        rows=placed(np.concatenate(rows), device),
        targets=placed(np.concatenate(tokens).astype(np.int64), device),
        selected=placed(np.flatnonzero(selected), device),
        penalised=placed(np.flatnonzero(penalties), device),
        penalties=placed(penalties[penalties != 0], device),
        in_kl=placed(np.flatnonzero(in_kl), device),
        actor_logprobs=placed(np.concatenate(actor), device),
        teacher_logprobs=teacher_logprobs(samples, device),
        weights=placed(weights, device),
        advantages=placed(advantages.astype(np.float32), device),
        sample=placed(np.repeat(np.arange(len(samples)), counts), device),
        counts=placed(np.array(counts), device),
        weight_sum=float(torch.from_numpy(weights[selected]).sum().numpy()),
        names=tuple(s.sample.name for s in samples),
    )


def teacher_logprobs(samples: Sequence[TrainSample], device: torch.device) -> torch.Tensor | None:
    rows = [s.sample.teacher_logprobs[s.used] for s in samples if s.sample.teacher_logprobs is not None]
    return placed(np.concatenate(rows), device) if rows else None


def shared_layout(samples: Sequence[TrainSample], device: torch.device) -> tuple[Sequences, list[np.ndarray]]:
    """Each group's prompt once; completions by the tokens that are fed, the longest first, as buckets need it. Of each
    sample, in the order of `samples`, the rows that predict its used tokens."""
    prompts = {s.sample.group: s.sample.prompt_ids for s in samples}
    number = {group: index for index, group in enumerate(prompts)}
    order = sorted(range(len(samples)), key=lambda index: -samples[index].num_fed)
    laid = [samples[index] for index in order]
    owner = [number[s.sample.group] for s in laid]
    counts = [s.num_fed for s in laid]
    fed = [s.sample.completion_ids[:count] for s, count in zip(laid, counts, strict=True)]
    first, second = padded(list(prompts.values())), padded(fed)
    rows: dict[int, np.ndarray] = {}
    for row, (index, sample) in enumerate(zip(order, laid, strict=True)):
        last_of_prompt = owner[row] * first.shape[1] + len(sample.sample.prompt_ids) - 1
        before_token = first.size + row * second.shape[1] + np.arange(-1, len(sample.used) - 1)
        before_token[0] = last_of_prompt
        rows[index] = before_token[sample.used]
    lengths = [len(prompt) for prompt in prompts.values()]
    sequences = Sequences(
        prompts=placed(first, device),
        lengths=placed(np.array(lengths), device),
        completions=placed(second, device),
        owner=placed(np.array(owner), device),
        places=Places.of(lengths, counts, owner, partial(placed, device=device)),
    )
    return sequences, [rows[index] for index in range(len(samples))]


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Ragged rows as [len(rows), longest] int64, at least one column wide, zeros at the right."""
    ids = np.zeros((len(rows), max(1, *(len(row) for row in rows))), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids
