"""The whole configuration as one typed tree. The classes of shared/config list every key with its default, range and
meaning; there is no other list.

Layers, later wins: the defaults, a TOML file (a preset or the user's own), `--set section.key=value`.
An unknown key, a wrong type or a value out of range is refused, with its path and what was meant.
The resolved tree is written to the run directory as JSON, and every process reads it from there.
Left out on purpose: environment variables, includes, per-machine overrides. No torch here: config errors come at once.
"""

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from shared.config.data import Advantage, CurriculumConfig, RewardConfig, SftConfig, TasksConfig, VerifierConfig
from shared.config.environment import NO_ENVIRONMENT, EnvironmentConfig
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
    RayConfig,
    ServerConfig,
    TrackingConfig,
)
from shared.config.training import (
    BatchConfig,
    ConstraintConfig,
    GrowthConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    TeacherConfig,
)
from shared.config.types import NonNegative, Positive, Section

OLD = 2
"""pipeline.max_lag from which samples are so old that a weight alone does not keep all runs learning."""
STALE_LIMIT = 0.1


class RunConfig(Section, frozen=True, kw_only=True):
    """Length and seed of the run."""

    steps: Positive = 40
    """Steps of the whole run, each with `batch.updates` x `loss.passes` updates."""
    seed: NonNegative = 0
    """Seed of all randomness: adapter, order of tasks, sampling."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """What is sampled in each step."""

    prompts: Positive = 16
    """P, the number of groups in a step."""
    group: Annotated[int, Meta(ge=1, le=4096)] = 8
    """G, the number of completions of each prompt. From 2 to 4096; 1 in a warm start."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Cap on a completion in tokens. At most 1,000,000."""
    temperature: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Softmax temperature of training samples, at most 100. Actor and learner both apply it."""
    groups_per_order: NonNegative = 0
    """Number of groups in one order, which are decoded together. 0 puts the whole step into one order, or
    into several if the columns of its tasks are larger than a message takes (8 MiB). Its completions must fit into one
    message (64 MiB) when all are as long as possible. The sampled tokens depend on it."""
    replacement_rounds: NonNegative = 0
    """How many times in a step groups that teach nothing are replaced by more orders (dynamic sampling). Those that are
    not replaced count in the divisor of the loss and in the KL, with an advantage of 0."""


class Config(Section, frozen=True, kw_only=True):
    """The root of the tree."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    tasks: TasksConfig = TasksConfig()
    sft: SftConfig = SftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    server: ServerConfig = ServerConfig()
    environment: EnvironmentConfig = NO_ENVIRONMENT
    verifier: VerifierConfig = VerifierConfig()
    reward: RewardConfig = RewardConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig = TeacherConfig()
    constraint: ConstraintConfig = ConstraintConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    growth: GrowthConfig = GrowthConfig()
    guard: GuardConfig = GuardConfig()
    pipeline: PipelineConfig = PipelineConfig()
    link: LinkConfig = LinkConfig()
    compute: ComputeConfig = ComputeConfig()
    ray: RayConfig = RayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def objective(self) -> LossConfig:
        """[loss], with a stale_limit where none is given: old samples need one (benchmarks/off_policy.py)."""
        if self.loss.stale_limit is not None:
            return self.loss
        needs_one = self.pipeline.max_lag >= OLD and self.compares and self.loss.kind != "dppo"
        fits = self.loss.entropy_fraction == 1.0
        return replace(self.loss, stale_limit=STALE_LIMIT if needs_one and fits else 0.0)

    @property
    def advantage(self) -> Advantage:
        """reward.advantage if it is given, else as in the paper of loss.kind."""
        return self.reward.advantage or ("mean" if self.loss.kind in ("dr_grpo", "dppo") else "std")

    @property
    def can_be_extended(self) -> bool:
        """Whether steps after the planned end are those of a run that was planned longer. With a lag they had to be
        ordered before that end; stages that share all steps, and rates that fall until the last one, would have been
        different."""
        return not self.pipeline.max_lag and not self.curriculum.shares_steps and self.optimizer.schedule == "constant"

    @property
    def is_warm_start(self) -> bool:
        """Whether it learns written answers and samples nothing but its evaluations."""
        return self.loss.kind == "sft"

    @property
    def compares(self) -> bool:
        """Whether a group teaches only by the differences between its completions."""
        return self.loss.kind not in ("sft", "opd")

    @property
    def needs_actor(self) -> bool:
        return not self.is_warm_start or (self.eval.problems > 0 and not self.eval.beside)

    @property
    def most_prompts(self) -> int:
        """Largest number of groups in a step, without replacements."""
        return max(self.rollout.prompts, self.growth.max_prompts)


def warm_start(config: Config) -> Config:
    """The same model, adapter, data, sizes and rates, with the likelihood of written answers as its objective. What is
    about sampled groups has its default."""
    return replace(
        config,
        loss=LossConfig(kind="sft", importance_cap=0.0),
        # At temperature 1, so that the loss is the plain likelihood.
        rollout=RolloutConfig(prompts=config.rollout.prompts, group=1, max_new_tokens=config.rollout.max_new_tokens),
        reward=RewardConfig(),
        teacher=TeacherConfig(),
        constraint=ConstraintConfig(),
        curriculum=CurriculumConfig(),
        growth=GrowthConfig(),
        pipeline=PipelineConfig(),
    )
