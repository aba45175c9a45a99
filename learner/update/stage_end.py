"""Sets the anchor when a stage of the curriculum has ended, before that step's update.

The step that ended the stage has just been collected. Its completions were sampled from the current policy, so they
are what the Fisher needs, at one backward pass each. (With pipeline.max_lag the version they were drawn from is
older by that many steps.) All completions count, right or wrong, of groups that teach or not: the Fisher is about
what the policy samples, not about its reward.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from learner.continual.anchor import Anchor
from learner.continual.fisher import Weights, diagonal_fisher
from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import Sample, all_samples
from learner.update.forward_pass import ForwardPass
from protocol.messages import Group

log = logging.getLogger("learner")


class StageEnd:
    """Between curriculum, policy and anchor."""

    def __init__(self, curriculum: Callable[[], CurriculumFigures], forward_pass: ForwardPass, anchor: Anchor) -> None:
        self.curriculum = curriculum
        self.forward_pass = forward_pass
        self.anchor = anchor

    def before_update(self, groups: Sequence[Group]) -> None:
        """Nothing, unless these groups ended a stage."""
        stage = self.curriculum().stage
        if stage == self.anchor.stage:
            return
        log.info("stage %d begins; the policy is kept close to what it is now", stage)
        samples = [sample for group in groups for sample in all_samples(group, np.zeros(len(group.lengths)))]
        samples = spread(samples, self.anchor.config.ewc_samples)
        self.anchor.set(stage, self.fisher(samples) if self.penalises else {})

    def fisher(self, samples: Sequence[Sample]) -> Weights:
        with self.forward_pass.through_modules():
            return diagonal_fisher(self.forward_pass.policy.adapter, self.log_likelihoods(samples))

    @property
    def penalises(self) -> bool:
        return self.anchor.config.ewc > 0.0

    def log_likelihoods(self, samples: Sequence[Sample]) -> Iterator[torch.Tensor]:
        """log p(y | x) of one sample after the other."""
        for sample in samples:
            yield self.forward_pass.log_likelihood(sample)
            self.forward_pass.progress()


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most so many, evenly from all groups."""
    if len(samples) <= count:
        return list(samples)
    return [samples[place] for place in np.linspace(0, len(samples) - 1, count).round().astype(int)]
