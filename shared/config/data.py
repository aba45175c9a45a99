"""Keys of tasks, curriculum, verifier and reward."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.messages import Outcome
from shared.config.types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Treatment = Literal["train", "drop", "stop"]


OfTruncated = Literal["train", "mask", "drop", "stop"]


VerifierKind = Literal["gsm8k", "exact", "math", "callable"]


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
    """Which tasks come when; formulas stand in learner/curriculum/pass_rate.py and learner/curriculum/stages.py."""

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
    """Stages: lambda of elastic weight consolidation once a stage has ended (learner/continual/ewc.py); 0 turns it off.
    F has
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
