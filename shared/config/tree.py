"""The whole configuration as one typed tree: defaults, ranges and meaning of every key stand here (those of an update
and of the actor in shared/config/training.py and config_actor.py) and nowhere else.

Layers, later wins: defaults below, a TOML file (a preset or the user's own), `--set section.key=value`.
A key that does not exist, a wrong type or a value out of range is refused with its path and the nearest known key.
The resolved tree is written to the run directory as JSON and read back from there by every process.
Left out on purpose: environment variables, includes, per-machine overrides. No torch here: config errors come at once.
"""

from typing import Annotated

from msgspec import Meta

from shared.config.data import CurriculumConfig, RewardConfig, TasksConfig, VerifierConfig
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import (
    ActorConfig,
    CheckpointConfig,
    ComputeConfig,
    EvalConfig,
    JournalConfig,
    LinkConfig,
    LogConfig,
    PipelineConfig,
)
from shared.config.training import BatchConfig, ConstraintConfig, GrowthConfig, GuardConfig, LossConfig, OptimizerConfig
from shared.config.types import NonNegative, Positive, PositiveFloat, Section


class RunConfig(Section, frozen=True, kw_only=True):
    """What is run."""

    steps: Positive = 40
    """Optimizer steps of the whole run."""
    seed: NonNegative = 0
    """Root of every random stream: adapter, task order, sampling."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """What one step samples."""

    prompts: Positive = 16
    """P, groups a step."""
    group: Annotated[int, Meta(ge=2, le=4096)] = 8
    """G, completions a prompt."""
    max_new_tokens: Positive = 64
    """Cap on one completion."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature of training samples, applied on both sides."""
    groups_per_order: NonNegative = 0
    """Groups decoded together in one order; 0 puts the whole step into one. Part of what makes tokens repeatable."""
    replacement_rounds: NonNegative = 0
    """How often groups that teach nothing are replaced by further orders within a step (dynamic sampling). Those that
    are not replaced count in the loss's divisor and in the KL, with an advantage of 0."""


class Config(Section, frozen=True, kw_only=True):
    """The root."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    tasks: TasksConfig = TasksConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    verifier: VerifierConfig = VerifierConfig()
    reward: RewardConfig = RewardConfig()
    loss: LossConfig = LossConfig()
    constraint: ConstraintConfig = ConstraintConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    growth: GrowthConfig = GrowthConfig()
    guard: GuardConfig = GuardConfig()
    pipeline: PipelineConfig = PipelineConfig()
    link: LinkConfig = LinkConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @property
    def divides_by_std(self) -> bool:
        """What reward.divide_by_std says, or else the paper of loss.kind."""
        given = self.reward.divide_by_std
        return self.loss.kind != "dr_grpo" if given is None else given

    @property
    def most_prompts(self) -> int:
        """Groups that a step may come to order, replacements aside."""
        return max(self.rollout.prompts, self.growth.max_prompts)
