"""The canary: a fixed sequence of tokens whose log-probs show that two processes have the same policy.

    ids[t] = floor(vocab * u[t]),  u from the run's seed;      c[t] = log pi(ids[t] | ids[< t]),  t = 1 .. n

The tokens are random: text that the model expects has log-probs near 0, which hardly change with the weights.
The learner computes the log-probs with every version that it publishes, the actor with what it has installed; both use
`sequence_logprobs`. The temperature is always 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from shared.model.layers.sequences import Sequences
from shared.model.policy import Policy
from shared.seeding import derive, uniforms

FEW_WEIGHTS = 2**22
"""Of the head, below which one thread is faster than two."""


@dataclass(frozen=True, kw_only=True)
class Canary:
    """The sequence and its log-probs under one version."""

    ids: np.ndarray
    """[n + 1] int32; empty if nothing is to be compared."""
    logprobs: np.ndarray
    """[n] fp32 of all tokens but the first."""


NO_CANARY = Canary(ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))


def canary_ids(run_seed: int, vocab: int, count: int) -> np.ndarray:
    """[count + 1] the sequence of this run, for `count` log-probs."""
    draws = uniforms(derive(run_seed, "canary"), count + 1 if count else 0)
    return (draws * vocab).astype(np.int32)


def canary_of(policy: Policy, ids: np.ndarray) -> Canary:
    return Canary(ids=ids, logprobs=sequence_logprobs(policy, ids)) if len(ids) else NO_CANARY


@torch.inference_mode()
def sequence_logprobs(policy: Policy, ids: np.ndarray) -> np.ndarray:
    """[n + 1] ids -> [n] fp32 log-probs of all but the first."""
    tokens = torch.from_numpy(ids.astype(np.int64)).to(policy.device)
    lengths = torch.tensor([len(ids) - 1], device=policy.device)
    whole = Sequences(prompts=tokens[None, :-1], lengths=lengths, completions=None, owner=lengths[:0])
    with one_thread() if policy.head.numel() < FEW_WEIGHTS else nullcontext():
        stats = policy.stats(policy.hidden(whole), tokens[1:], temperature=1.0, rows=len(ids))
    return stats.logprobs.cpu().numpy()


@contextmanager
def one_thread() -> Iterator[None]:
    """A second thread would take longer to wake up than this few tokens take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
