"""Lays the anchor when a stage of the curriculum has ended, before that step's update.

The step that ended the stage has just been collected: its answers were drawn from the policy as it still is, so they
are what the Fisher needs and cost one backward pass each. (With pipeline.max_lag the version they were drawn from is
older by that many steps.) Taken are all answers, right or wrong, of groups that teach or not: the Fisher is about what
the policy says, not about what it is paid for.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from learner.continual.anchor import Anchor
from learner.continual.fisher import diagonal_fisher
from learner.curriculum.curriculum import CurriculumFigures
from learner.objective.batch import Sample, all_samples
from learner.update.update import Update, whole
from protocol.messages import Group

log = logging.getLogger("learner")


class StageEnd:
    """Between curriculum, update and anchor."""

    def __init__(self, curriculum: Callable[[], CurriculumFigures], update: Update, anchor: Anchor) -> None:
        self.curriculum = curriculum
        self.update = update
        self.anchor = anchor

    def before_update(self, groups: Sequence[Group]) -> None:
        """Nothing, unless these groups ended a stage."""
        stage = self.curriculum().stage
        if stage == self.anchor.stage:
            return
        log.info("stage %d begins; the policy is held to what it is now", stage)
        answers = [sample for group in groups for sample in all_samples(group, np.zeros(len(group.lengths)))]
        samples = spread(answers, self.anchor.config.ewc_samples)
        fisher = diagonal_fisher(self.update.policy.adapter, self.log_likelihoods(samples)) if self.penalises else {}
        self.anchor.lay(stage, fisher)

    @property
    def penalises(self) -> bool:
        """Whether a Fisher is wanted."""
        return self.anchor.config.ewc > 0.0

    def log_likelihoods(self, samples: Sequence[Sample]) -> Iterator[torch.Tensor]:
        """log p(y | x) of one answer after the other."""
        for sample in samples:
            yield self.update.forward(self.update.on_device([whole(sample)])).logprobs.sum()
            self.update.progress()


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most so many, evenly from all groups."""
    if len(samples) <= count:
        return list(samples)
    return [samples[place] for place in np.linspace(0, len(samples) - 1, count).round().astype(int)]
