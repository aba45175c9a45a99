"""From the judged groups of a step to the batch of its update; objective/batch.py says what is fixed on the way."""

from learner.objective.batch import (
    StepBatch,
    idle_groups,
    idle_samples,
    needs_entropies,
    step_batch,
    teaching_samples,
)
from learner.objective.judged import Collected
from learner.update.forward_pass import ForwardPass
from learner.update.stage_end import StageEnd
from learner.update.teacher import Teacher
from shared.config.data import Advantage
from shared.config.tree import ConstraintConfig, LossConfig, RolloutConfig
from shared.process.trace import NO_TRACE, Trace


class Batches:
    """Builds batches; has the policy score entropies where the engine sent none and the mask needs them."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        *,
        loss: LossConfig,
        constraint: ConstraintConfig,
        rollout: RolloutConfig,
        advantage: Advantage,
        updates: int,
        stage_end: StageEnd | None = None,
        teacher: Teacher | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        """updates: of a pass. stage_end: sees the groups first, if the curriculum has stages and keeps the policy close
        to them. teacher: whom a distillation follows."""
        self.forward_pass = forward_pass
        self.loss = loss
        self.constraint = constraint
        self.rollout = rollout
        self.advantage: Advantage = advantage
        self.updates = updates
        self.stage_end = stage_end
        self.teacher = teacher
        self.trace = trace

    def build(self, step: int, collected: Collected) -> StepBatch:
        groups, rounds = collected.groups, self.rollout.replacement_rounds
        idle = len(groups) - collected.teaching
        if self.stage_end:
            self.stage_end.before_update([judged.group for judged in groups])
        samples = teaching_samples(groups, self.advantage, rounds)
        if needs_entropies(self.loss, self.constraint):
            with self.trace.phase("entropies"):
                samples = self.forward_pass.with_entropies(samples)
        if self.teacher:
            with self.trace.phase("teacher"):
                samples = self.teacher.read(samples)
        return step_batch(
            samples,
            idle_samples(groups, rounds),
            idle_groups=idle,
            replaced=idle - len(idle_groups(groups, rounds)),
            # Samples of an older version are expected to differ from the policy, and those of a writer anyway.
            on_policy=self.loss.kind != "sft" and all(order.policy_version == step for order in collected.filled),
            loss=self.loss,
            constraint=self.constraint,
            max_new_tokens=self.rollout.max_new_tokens,
            most_updates=self.updates,
        )
