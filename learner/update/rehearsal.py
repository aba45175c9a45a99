"""One step of the largest kind before the first real one, so that what does not fit is known at once.

    samples   groups of G completions as long as the cap allows, all of the longest prompt, each token in the objective;
              as many groups as fill two micro-batches, if a step may have so many
    computed  forward and backward of both micro-batches, so that the second one meets the gradients of the first, and
              what the optimizer allocates
    left      nothing: gradients are thrown away, the optimizer is not stepped, no random number is drawn

If memory runs out, the rehearsal is repeated in smaller parts as any step (budget.py), and the run begins with those.
Left out on purpose: completions of different lengths. Attention pads those of a bucket
(shared/model/layers/sequences.py), and a model without layers of our own pads all, which may take more memory; such a
step is repeated in smaller parts.
"""

import logging
from dataclasses import dataclass

import numpy as np

from learner.objective.batch import Sample, TrainSample
from learner.update.budget import Attempts
from learner.update.forward_pass import UNCHANGED
from learner.update.update import Update

MICRO_BATCHES = 2
log = logging.getLogger("learner")


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A step of this run cannot be larger."""

    prompt: int
    """Tokens."""
    completion: int
    """Tokens."""
    group: int
    """G"""
    groups: int
    """P"""
    tells_entropies: bool
    """Whether the engine does; if not, the learner computes them."""

    def samples(self, token_budget: int, *, in_kl: bool, penalised: bool) -> list[TrainSample]:
        """Enough of them for MICRO_BATCHES."""
        tokens = self.prompt + self.group * self.completion
        enough = 1 + -(-MICRO_BATCHES * token_budget // tokens)
        names = [f"group{p}[{g}]" for p in range(min(self.groups, enough)) for g in range(self.group)]
        return [self.sample(name, in_kl=in_kl, penalised=penalised) for name in names]

    def sample(self, name: str, *, in_kl: bool, penalised: bool) -> TrainSample:
        zeros, every = np.zeros(self.completion, np.float32), np.ones(self.completion, bool)
        sample = Sample(
            name=name,
            prompt_ids=np.zeros(self.prompt, np.int32),
            completion_ids=np.zeros(self.completion, np.int32),
            trained=every,
            actor_logprobs=zeros,
            entropies=zeros if self.tells_entropies else None,
            advantage=1.0,
        )
        penalties = every.astype(np.float32) if penalised else zeros
        return TrainSample(sample=sample, selected=every, weight=1.0, penalties=penalties, in_kl=in_kl)


class Rehearsal:
    """Of the update of a run."""

    def __init__(self, update: Update, attempts: Attempts, largest: Largest) -> None:
        self.update = update
        self.attempts = attempts
        self.largest = largest

    def run(self) -> None:
        """OutOfMemory, which says what to change, if not even the smallest parts fit."""
        budget = self.attempts.budget
        self.attempts.repeated("the largest step", self.once)
        log.info("the largest step (%s) fits with %s", self.largest, budget.now)

    def once(self) -> bool:
        update = self.update
        in_kl, penalised = update.loss.kl_beta > 0.0, update.constraint.beta > 0.0
        limit = self.attempts.budget.limit.tokens
        update.accumulate(self.largest.samples(limit, in_kl=in_kl, penalised=penalised), UNCHANGED)
        update.reserve()
        update.optimizer.zero_grad()
        return True
