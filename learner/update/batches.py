"""From the answers of a step to the batch of an update; batch.py says what is settled on the way."""

from collections.abc import Sequence

from learner.objective.batch import StepBatch, flat, group_teaches, idle_samples, step_batch, teaching_samples
from learner.update.stage_end import StageEnd
from learner.update.update import Update
from protocol.messages import FilledOrder
from shared.config.tree import Config


class Batches:
    """Builds batches; asks the policy for entropies where the engine had none and the mask needs them."""

    def __init__(self, config: Config, update: Update, stage_end: StageEnd | None = None) -> None:
        """stage_end: looks at the groups first, where a curriculum in stages leaves something behind."""
        self.config = config
        self.update = update
        self.stage_end = stage_end

    def build(self, answers: Sequence[FilledOrder]) -> StepBatch:
        """All groups of the step."""
        groups = flat(answers)
        if self.stage_end:
            self.stage_end.before_update(groups)
        dropped = sum(not group_teaches(group, self.config) for group in groups)
        samples = self.update.with_entropies(teaching_samples(groups, self.config))
        return step_batch(samples, dropped, self.config, idle_samples(groups, self.config))
