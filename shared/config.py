"""The whole configuration as one typed tree: defaults, ranges and meaning of every key stand here (those of an update
and of the actor in shared/config_update.py and config_actor.py) and nowhere else.

Layers, later wins: defaults below, a TOML file (a preset or the user's own), `--set section.key=value`.
A key that does not exist, a wrong type or a value out of range is refused with its path and the nearest known key.
The resolved tree is written to the run directory as JSON and read back from there by every process.
Left out on purpose: environment variables, includes, per-machine overrides. No torch here: config errors come at once.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.messages import Outcome
from shared.config_actor import ActorConfig
from shared.config_section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from shared.config_update import (
    BatchConfig,
    ConstraintConfig,
    GrowthConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
)

Treatment = Literal["train", "drop", "stop"]
OfTruncated = Literal["train", "mask", "drop", "stop"]
VerifierKind = Literal["gsm8k", "exact", "math", "callable"]


class RunConfig(Section, frozen=True, kw_only=True):
    """What is run."""

    steps: Positive = 40
    """Optimizer steps of the whole run."""
    seed: NonNegative = 0
    """Root of every random stream: adapter, task order, sampling."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The frozen base."""

    path: str = "embedded"
    """`embedded`, a folder in Hugging Face format, or a hub id (then fetched once into the hub's own cache)."""
    revision: str = "main"
    """Hub revision; pin a commit for runs that must repeat."""
    quantization: Literal["nf4", "none"] = "nf4"
    """`nf4`: bitsandbytes, block 64, double quantisation. `none`: the checkpoint's own weights, for comparison."""
    dequantize: Literal["auto", "held", "each_call"] = "auto"
    """Keep the dequantised values in memory, or recompute them in every call; the numbers are the same.
    `auto` holds them on CPU only."""
    cache_dir: str = ""
    """Where quantised bases are kept; empty means $XDG_CACHE_HOME/tandem or ~/.cache/tandem."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """The adapter: Y = W4(x) + alpha/rank * B(A(x)), B = 0 at the start."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """R."""
    alpha: PositiveFloat = 32.0
    """Scale numerator."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last names of the linears that get an adapter."""


class TasksConfig(Section, frozen=True, kw_only=True):
    """Where the questions come from."""

    source: str = "embedded"
    """`embedded`, `gsm8k`, `math`, `math500`, a .jsonl/.json/.csv/.parquet file, a folder with one such file a split
    (train.jsonl, test.jsonl), or a hub data set id. Relative to where the run is started."""
    subset: str = ""
    """Configuration of a hub data set; empty for a named source's own, or none."""
    split: str = ""
    """Split to train on; empty takes a named source's own, else `train`."""
    held_out: str = ""
    """File, folder, named source, or split of `source` to evaluate on during the run. Empty holds out a tenth of the
    training rows, drawn by `seed`, and all copies of their questions (embedded has its own)."""
    test: str = ""
    """File, folder, named source, or split of `source` for `eval --test`. Empty takes the `test` split of a named
    source or folder, if there is one. Training never reads it."""
    seed: NonNegative = 0
    """Which rows are held out, which of the others `limit` takes, and which held-out ones `eval.problems` takes."""
    question: str = ""
    """Column with the question; empty takes a named source's own, else `question`."""
    answer: str = ""
    """Column with the gold answer, or with a solution that ends in `#### 18` or a box; empty as for `question`. Other
    columns travel to the verifier under their own names."""
    level: str = ""
    """Column with the difficulty, for curricula and tables; empty as for `question`. There may be none."""
    subject: str = ""
    """Column with the field; the same."""
    system_prompt: str = ""
    """Put before every question as the system turn; empty for none."""
    few_shot: NonNegative = 0
    """Rows shown before every question as turns that were answered, with their solution if there is one. They are the
    first of the training file, and are not trained on."""
    levels: tuple[Annotated[int, Meta(ge=1, le=3)], ...] = (1, 2, 3)
    """Levels of the embedded problems."""
    limit: NonNegative = 2048
    """At most this many training tasks, a sample by `seed`; 0 takes all."""
    max_prompt_tokens: Positive = 256
    """A longer prompt is dropped and counted, never cut."""


class CurriculumConfig(Section, frozen=True, kw_only=True):
    """Which tasks come when; formulas stand in learner/pass_rate.py and learner/stages.py."""

    kind: Literal["shuffled", "pass_rate", "levels", "sent"] = "shuffled"
    """`shuffled`: every task once an epoch. `pass_rate`: in proportion to the expected p (1 - p). `levels`: in stages,
    by the values of `column`. `sent`: in stages of rising semantic entropy, as `python -m launch curriculum` measured
    it."""
    column: str = "level"
    """Column of the data that tells how hard a task is: the stages of `levels`; for `pass_rate`, what is seen of some
    tasks is expected of others with the same value."""
    explore: Fraction = 0.1
    """`pass_rate`: share of the draws in which all tasks are as likely."""
    sharpness: PositiveFloat = 1.0
    """`pass_rate`: power that p (1 - p) is raised to; the higher, the fewer tasks it chooses among."""
    prior: PositiveFloat = 4.0
    """`pass_rate`: how many answers the mean of a task's like counts for."""
    half_life: PositiveFloat = 8.0
    """`pass_rate`: steps after which an answer counts half, since the policy has moved on."""
    advance_at: Fraction = 0.8
    """Stages: mean pass rate of five steps with which the next stage begins."""
    stage_steps: NonNegative = 0
    """Stages: a stage ends after so many steps at the latest; 0 takes run.steps over the number of stages."""
    replay: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Stages: share of the draws that goes to tasks of earlier stages."""
    stages: Annotated[int, Meta(ge=1, le=64)] = 2
    """`sent`: into how many stages the tasks are cut; `levels` has one for each value of `column`."""
    samples: Annotated[int, Meta(ge=2, le=1024)] = 8
    """`sent`: M, answers a task that its semantic entropy is measured with."""
    cache: str = ""
    """`sent`: file with the measured entropies; empty means one below model.cache_dir. Refused if it was measured with
    another model, template, sampling, verifier or data."""
    ewc: NonNegativeFloat = 0.0
    """Stages: lambda of elastic weight consolidation once a stage has ended (learner/ewc.py); 0 turns it off. F has
    mean 1, so it is the weight of lambda / 2 |dW - dW*|^2; `ewc/penalty` says what it came to."""
    ewc_decay: Fraction = 1.0
    """Stages: factor on the Fisher of the stages before, at the end of each."""
    ewc_samples: Positive = 256
    """Stages: at most so many answers of the step that ended a stage go into its Fisher, one backward pass each."""
    kl_to: Literal["base", "stage"] = "base"
    """What loss.kl_beta holds the policy to: the base, or the policy at the stage's start."""

    @property
    def holds(self) -> bool:
        """Whether the end of a stage leaves something behind that the policy is held to."""
        return self.ewc > 0.0 or self.kl_to == "stage"


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


class VerifierConfig(Section, frozen=True, kw_only=True):
    """How completions are scored."""

    kind: VerifierKind = "gsm8k"
    """What the final answer is compared as. `gsm8k`, `exact`: a number. `math`: a number, list or formula, by value.
    `callable`: your own function judges. The final answer stands after `####`, in a box, after `A:`, `Answer:` or `the
    answer is`, or is the last number or formula of the text, trusted in that order."""
    strict: bool = False
    """Trust one form alone: `gsm8k` the number right after the last `####`, `math` the last box, `exact` the number and
    nothing else."""
    rounded_digits: Annotated[int, Meta(ge=0, le=30)] = 0
    """For `math` without `strict`: a decimal of at least so many significant digits, none of them a leading zero, is
    the gold answer if it is that rounded to its decimals: 3 accepts 0.333 for 1/3, but not 0.33 or 0.334. 0 accepts
    exact values only."""
    function: str = ""
    """For `callable`: `path/to/file.py:name`, a function with TRL's reward signature."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Further rewards beside the verifier's score, each with its weight: `think_tags`, `answer_tags` (1 for the form, 0
    for another), or `path/to/file.py:name` as above. Logged by name; they never change an outcome."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Killable scoring processes."""
    limit_s: PositiveFloat = 10.0
    """Wall-clock limit of one call of your function, or of one completion in a built-in verifier; beyond it the worker
    is killed and the sample is a timeout."""
    memory_mb: NonNegative = 1024
    """Private memory a worker may take beyond what it has after loading the verifier; 0 sets no limit. A function that
    brings its own torch or CUDA needs several thousand."""
    environment: tuple[str, ...] = ()
    """Names of further environment variables that a worker gets to see. By default it sees paths, language and thread
    counts, and nothing else, so that no token gets there by accident. That is no boundary: a reward function runs with
    the user's rights, and reads every file that the user may read."""
    on_truncated: OfTruncated = "train"
    """A completion that ran into the cap. `mask`: its reward stays in the group's mean and standard deviation, and none
    of its tokens are trained on or counted in the divisor (DAPO's overlong filtering). `drop`: its reward leaves the
    mean too, so the others are compared among themselves, and running into the cap costs nothing."""
    on_unparsable: Treatment = "train"
    """A completion without a final answer."""
    on_timeout: Treatment = "drop"
    """The verifier took too long, in time or in processor time; `math`: or ran out of memory."""
    on_error: Treatment = "stop"
    """The verifier raised, crashed, or returned NaN, an infinity, another type or a list of another length."""
    on_abstain: Treatment = "drop"
    """The verifier returned None."""

    def treatment(self, outcome: Outcome) -> OfTruncated:
        """What is done with a sample of this outcome."""
        match outcome:
            case Outcome.CORRECT | Outcome.WRONG:
                return "train"
            case Outcome.TRUNCATED:
                return self.on_truncated
            case Outcome.UNPARSABLE:
                return self.on_unparsable
            case Outcome.TIMEOUT:
                return self.on_timeout
            case Outcome.ERROR:
                return self.on_error
            case Outcome.ABSTAIN:
                return self.on_abstain


class RewardConfig(Section, frozen=True, kw_only=True):
    """From verifier scores to rewards and advantages."""

    truncated: float = 0.0
    """Added to the reward of a truncated completion; below zero penalises it."""
    length: float = 0.0
    """Weight of the length reward: 0 up to `length_free` tokens, 1 at the cap, linear between; below zero penalises
    long answers. It never changes an outcome."""
    length_free: NonNegative = 0
    """Tokens that cost nothing."""
    shaped_groups: Literal["drop", "train"] = "drop"
    """A group whose scores are all equal and whose rewards differ by named rewards, length or truncation alone: drop it
    as one that teaches nothing, or train on it. Rewards for form are learned before the first right answer only so."""
    divide_by_std: bool | None = None
    """Advantage = (r - mean) / (std + 1e-4) instead of r - mean. Not given: as in the paper of loss.kind, false for
    `dr_grpo` and true for the others; `dr_grpo` refuses true."""


class PipelineConfig(Section, frozen=True, kw_only=True):
    """How far sampling runs ahead of learning."""

    max_lag: Annotated[int, Meta(ge=0, le=64)] = 0
    """Groups of step s are sampled from version max(0, s - max_lag), exactly. On a CPU with cores for the threads of
    both processes, sampling and learning then overlap."""


class LinkConfig(Section, frozen=True, kw_only=True):
    """The wire."""

    endpoint: str = "ipc"
    """`ipc` (a socket in a private folder of this machine) or `tcp://host:port` as the actor dials it."""
    bind: str = ""
    """What the learner binds if it differs from `endpoint`, for example `tcp://0.0.0.0:5757`."""
    heartbeat_s: PositiveFloat = 2.0
    """Progress is shown this often."""
    silence_s: PositiveFloat = 120.0
    """A peer silent for longer is dead; also the limit of any wait for one to come. A process that makes no progress
    for so long writes its stacks to `logs/stacks-NAME.txt` and ends."""
    credits: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Orders an actor holds at once."""
    late_s: PositiveFloat = 300.0
    """An order unanswered for longer is given to an actor without work as well; the first answer counts."""


class ComputeConfig(Section, frozen=True, kw_only=True):
    """What the processes run on. On CPU the thread counts are part of the result's last bit."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the card if there is one."""
    learner_threads: Annotated[int, Meta(ge=1, le=256)] = 2
    """CPU threads of the learner."""
    actor_threads: Annotated[int, Meta(ge=1, le=256)] = 2
    """CPU threads of an actor."""
    blas: Literal["fast", "portable"] = "fast"
    """`fast`: the widest vector units here. `portable`: AVX2 kernels only, the same bits on more machines."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the learner's state is written."""

    every: Positive = 10
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 3
    """Newest checkpoints kept; the best one (`eval.every`) is kept besides."""


class JournalConfig(Section, frozen=True, kw_only=True):
    """What stays of the actors' answers once the adapter has learned from them."""

    keep: Literal["all", "checkpoints"] = "all"
    """`all`: `replay` goes from step 0; some 12 bytes a sampled token (42 kB a step of the embedded preset).
    `checkpoints`: only what the newest `checkpoint.keep` checkpoints need; `replay` goes from the oldest of them."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out evaluation before the first and after the last step, and in between if asked for."""

    problems: NonNegative = 256
    """At most this many held-out problems, a sample by `tasks.seed`; 0 turns evaluation off."""
    every: NonNegative = 0
    """Steps from one evaluation during training to the next; 0 for none. Training goes on as if there were none. Each
    is made of a checkpoint, and the best of these checkpoints is kept: without this there is no best one."""
    max_new_tokens: NonNegative = 0
    """Cap; 0 takes the training cap."""
    long_cap: NonNegative = 0
    """Evaluate a second time with this cap, which shows what the first one costs; 0 for no second time."""
    samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Answers drawn for each problem at the training temperature, besides the greedy one; several give pass@k."""

    def is_due(self, done: int) -> bool:
        """Whether an evaluation follows so many steps."""
        return bool(self.problems and self.every) and done % self.every == 0


class LogConfig(Section, frozen=True, kw_only=True):
    """What is written for people."""

    rollouts_per_step: NonNegative = 2
    """Groups of each step written to rollouts.jsonl."""


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
