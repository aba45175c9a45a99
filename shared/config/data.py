"""The sections [tasks], [curriculum], [verifier] and [reward]: what is asked, in which order, and how it is judged."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.messages import Outcome
from shared.config.types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Treatment = Literal["train", "drop", "stop"]
OfTruncated = Literal["train", "mask", "drop", "stop"]
Advantage = Literal["mean", "std", "rloo", "maxrl", "batch", "gdpo"]
VerifierKind = Literal["gsm8k", "exact", "math", "callable", "environment"]
RewardForm = Literal["auto", "text", "messages"]
MAX_WORKERS = 64
SYSTEM = "system_message"
"""Column of a task whose question is a chat in the data: its system message, which wins over tasks.system_prompt."""
EARLIER = "earlier_messages"
"""Column of a task whose question ends a chat of several turns: JSON of the messages between system message and
question."""
UNCONVERTED = "unconverted"
"""Column of a task: one JSON object with the values of its row that are null, or that the other columns have under
another name, as text instead of their own type, or cut. Reward functions, environments and agents get them back."""


class TasksConfig(Section, frozen=True, kw_only=True):
    """Where the tasks come from."""

    source: str = "embedded"
    """`embedded` (arithmetic word problems), `numbers` (the largest, smallest or second number of a list),
    `calculations` and `guessing` (for a calculator and a game), `gsm8k`, `math`, `math500`, a .jsonl, .json, .csv or
    .parquet file, a folder with one such file for each split (train.jsonl, test.jsonl), or the id of a hub data set.
    Paths are relative to the current folder."""
    subset: str = ""
    """Configuration of a hub data set. If empty, the one that belongs to a named source, or none."""
    split: str = ""
    """Split to train on. If empty, the one that belongs to a named source, else `train`."""
    held_out: str = ""
    """Held-out tasks, which are evaluated during the run: a file, a folder, a named source, or a split of `source`. If
    empty, a tenth of the questions is held out, drawn by `seed`, each with all its rows; if all rows have the same
    question, a tenth of the rows. Sources that are generated here have held-out tasks of their own."""
    test: str = ""
    """Tasks for `eval --test`: a file, a folder, a named source, or a split of `source`. If empty, the `test` split of
    a named source or folder, if there is one. Training never reads them."""
    seed: NonNegative = 0
    """Decides which rows are held out, which of the others `limit` takes, and which held-out tasks `eval.problems`
    takes."""
    question: str = ""
    """Column with the question: text, or a list of {role, content} that ends in a message of the user, perhaps with a
    system message at its beginning. If empty, the one that belongs to a named source, else `question`. Held-out and
    test data need the same columns, unless they are a named source."""
    answer: str = ""
    """Column with the gold answer, or with a solution that ends in `#### 18` or a box. If empty, the one that belongs
    to a named source, else `answer`. If given, the data must have it. The verifier gets all other columns under their
    own names. If another column is called `answer`, only reward functions and environments get it. They get the gold
    answer as `gold_answer`."""
    level: str = ""
    """Column with the difficulty, for curricula and tables. If empty, the one that belongs to a named source, else
    `level`. The data may have no such column. If there is none and solutions have GSM8K's calculator notes, the number
    of notes is the level."""
    subject: str = ""
    """Column with the subject, for tables. The same rules as for `level`."""
    system_prompt: str = ""
    """System message before every question. If empty, there is none. A question that is a list with a system message
    keeps its own. `generate`, `generate --chat` and exports take that one if it is the same in all training tasks."""
    few_shot: NonNegative = 0
    """Number of solved examples that are shown before every question, as earlier messages of the chat. They are the
    first rows of the training file, with their solution if there is one. They are not trained on, nor are other rows
    of a file with the same question and answer, unless all have these. Each must have a question and an answer."""
    levels: Annotated[tuple[Annotated[int, Meta(ge=1, le=3)], ...], Meta(min_length=1)] = (1, 2, 3)
    """Levels of the embedded tasks: any of 1, 2 and 3."""
    limit: NonNegative = 2048
    """Largest number of training tasks. A longer data set is sampled by `seed`; 0 takes all of it."""
    max_prompt_tokens: Positive = 256
    """Longest prompt in tokens. A task with a longer one is dropped and counted; a prompt is never cut."""


class SftConfig(Section, frozen=True, kw_only=True):
    """What a warm start learns (`python -m launch sft`): answers that somebody wrote. A step takes rollout.prompts of
    them. Answers of more than rollout.max_new_tokens and prompts of more than tasks.max_prompt_tokens are left out."""

    source: str = ""
    """Where they come from: a file, a folder or a hub id, as in tasks.source. If empty, the training tasks of [tasks]
    with their solutions, prompted as in a run."""
    chats: str = "messages"
    """Column with chats, each a list of {role, content}. Every answer of the assistant is learned, after all that came
    before it. tasks.system_prompt is put before chats that have none."""
    question: str = "question"
    """Column with the question, where there are no chats: text, or a list of {role, content}."""
    solution: str = "solution"
    """Column with the answer to learn, in the same two forms."""


class CurriculumConfig(Section, frozen=True, kw_only=True):
    """Which task comes when. The formulas are in learner/curriculum/pass_rate.py and learner/curriculum/stages.py."""

    kind: Literal["shuffled", "pass_rate", "levels", "sent"] = "shuffled"
    """`shuffled`: every task once an epoch. `pass_rate`: a task is drawn in proportion to its expected p (1 - p).
    `levels`: stages, one for each value of `column`. `sent`: stages of rising semantic entropy, which `python -m launch
    curriculum` measures before the run."""
    column: str = "level"
    """Column of the data that says how hard a task is. `levels` makes a stage of each of its values. `pass_rate`
    expects of a task what it saw of other tasks with the same value."""
    explore: Fraction = 0.1
    """`pass_rate`: share of the draws in which all tasks are equally likely. Above 0, at most 1."""
    sharpness: PositiveFloat = 1.0
    """`pass_rate`: the power to which p (1 - p) is raised. Higher values choose among fewer tasks."""
    prior: PositiveFloat = 4.0
    """`pass_rate`: the mean pass rate of tasks with the same `column` counts as much as this many completions."""
    half_life: PositiveFloat = 8.0
    """`pass_rate`: after this many steps a completion counts half, because the policy has changed since."""
    advance_at: Fraction = 0.8
    """Stages: the next stage begins when the mean pass rate of five steps reaches this. Above 0, at most 1."""
    stage_steps: NonNegative = 0
    """Stages: a stage ends after this many steps at the latest. 0 takes run.steps divided by the number of stages."""
    replay: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Stages: share of the draws that goes to tasks of earlier stages. At least 0, below 1."""
    stages: Annotated[int, Meta(ge=1, le=64)] = 2
    """`sent`: number of stages, from 1 to 64. `levels` has one for each value of `column`."""
    samples: Annotated[int, Meta(ge=2, le=1024)] = 8
    """`sent`: M, the number of completions of each task from which its semantic entropy is measured. From 2 to 1024."""
    cache: str = ""
    """`sent`: file with the measured entropies. If empty, a file below model.cache_dir, one for each model,
    template, sampling, verifier and data set. It is refused if it was measured with another of these."""
    ewc: NonNegativeFloat = 0.0
    """Stages: lambda of elastic weight consolidation, from the end of the first stage on (learner/continual/ewc.py). 0
    turns it off. The Fisher matrix is scaled to mean 1, so lambda / 2 is the weight of |dW - dW*|^2. The metric
    `ewc/penalty` shows the resulting loss."""
    ewc_decay: Fraction = 1.0
    """Stages: factor that the Fisher matrix of earlier stages is multiplied by at the end of each stage. Above 0, at
    most 1."""
    ewc_samples: Positive = 256
    """Stages: largest number of completions, all from the last step of a stage, that its Fisher matrix is measured on.
    Each costs one backward pass."""
    kl_to: Literal["base", "start", "stage"] = "base"
    """Reference of loss.kl_beta: `base`, `start` for the policy before the first step (lora.start_from), or `stage` for
    the policy at the start of the stage."""

    @property
    def has_stages(self) -> bool:
        return self.kind in ("levels", "sent")

    @property
    def shares_steps(self) -> bool:
        """Whether the stages share all steps of the run, so that their lengths depend on its planned end."""
        return self.has_stages and not self.stage_steps

    @property
    def needs_stages(self) -> bool:
        """Whether the policy is pulled towards the one at the end of an earlier stage."""
        return self.ewc > 0.0 or self.kl_to == "stage"

    @property
    def anchored(self) -> bool:
        """Whether an earlier policy has to be kept."""
        return self.needs_stages or self.kl_to == "start"

    def __post_init__(self) -> None:
        self.expand_home("cache")


class VerifierConfig(Section, frozen=True, kw_only=True):
    """How completions are scored."""

    kind: VerifierKind = "gsm8k"
    """How final answers are compared. `gsm8k`, `exact`: as numbers. `math`: as numbers, lists or formulas, by value.
    `callable`: your own function decides. `environment`: `get_reward` of [environment] decides. The final answer is
    looked for after `####`, in a box, after `A:`, `Answer:` or `the answer is`, and as the last number or formula of
    the text, in this order."""
    strict: bool = False
    """Accept one form only: `gsm8k` the number right after the last `####`, `math` the last box, `exact` the number and
    nothing else."""
    rounded_digits: Annotated[int, Meta(ge=0, le=30)] = 0
    """For `math` without `strict`: accept a decimal with at least this many significant digits if it is the gold answer
    rounded to its number of decimals. With 3, 0.333 is accepted for 1/3, and 0.33 and 0.334 are not. 0 accepts exact
    values only. At most 30."""
    function: str = ""
    """For `callable`: `path/to/file.py:name`, a function with TRL's reward signature, or a class: each worker makes one
    object of it and calls that. A completion is correct if its value is at least 0.5. If empty, the score is the
    weighted sum of `rewards`, of those that are not None; then set `correct` too."""
    form: RewardForm = "auto"
    """What reward functions get as prompts and completions: `text`, or `messages`, lists of {role, content}. `auto`:
    messages if the model has a chat template, as in TRL."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """More rewards besides the verifier's score, each with its weight: `think_tags`, `answer_tags` (1 if the format is
    followed, else 0), or `path/to/file.py:name` as above. They are logged by name. An outcome follows from them only if
    they are the score, for `callable` without `function`."""
    correct: str = ""
    """For `callable` without `function`: the one of `rewards`, by its name or as it is there, that decides whether a
    completion is correct: if its value, without the weight, is at least 0.5. If that is None, it is not. The score
    stays the weighted sum. If empty, a completion is correct if this sum is at least 0.5."""
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    """Number of scoring processes, from 1 to 64. Each can be killed without harm to the actor. With one, your function
    gets all completions of an order in one call; with several, each call has whole groups."""
    limit_s: PositiveFloat = 10.0
    """Wall-clock limit in seconds for one call of your function, or for one completion in a built-in verifier. With
    `math` and a function in `rewards`, a call has this for every 32 completions. A worker that takes longer is killed,
    and the outcome is a timeout."""
    memory_mb: NonNegative = 1024
    """Private memory in MB that a worker may take beyond what it has after loading the verifier. 0 sets no limit. A
    function that imports torch or uses CUDA needs several thousand."""
    environment: tuple[str, ...] = ()
    """Names of more environment variables that a worker may read. By default it has paths, language and thread counts
    only, so that no token gets there by accident. This is not a security boundary: a reward function runs with the
    rights of the user and can read every file that the user can."""
    on_truncated: OfTruncated = "train"
    """What to do with a completion that reached the cap. `train`: nothing special. `mask`: its reward counts in the
    group's mean and standard deviation, but none of its tokens are trained on or counted in the divisor (DAPO's
    overlong filtering). `drop`: its reward does not count in the mean either, so the other completions are compared
    with each other and reaching the cap costs nothing. `stop`: end the run."""
    on_unparsable: Treatment = "train"
    """What to do with a completion without a final answer: `train`, `drop` or `stop` as above."""
    on_timeout: Treatment = "drop"
    """What to do when the verifier took too much time or processor time, or `math` ran out of memory."""
    on_error: Treatment = "stop"
    """What to do when the verifier raised, crashed, or returned NaN, an infinity, a wrong type or a list of the wrong
    length."""
    on_abstain: Treatment = "drop"
    """What to do when the verifier returned None, or what an environment says first does not fit into the cap."""

    @property
    def adds_up_rewards(self) -> bool:
        """Whether the score is the weighted sum of the named rewards."""
        return self.kind == "callable" and not self.function

    def treatment(self, outcome: Outcome) -> OfTruncated:
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
    """Added to the reward of a truncated completion. Use a negative value as a penalty."""
    length: float = 0.0
    """Weight of the length reward, which is 0 up to `length_free` tokens, 1 at the cap, and linear between. Use a
    negative value to penalise long completions. It never changes an outcome."""
    length_free: NonNegative = 0
    """Number of tokens that the length reward leaves out."""
    shaped_groups: Literal["drop", "train"] = "drop"
    """What to do with a group whose scores are all equal, so that its rewards differ only by named rewards, length or
    truncation: `drop` it, or `train` on it. Use `train` if format rewards should be learned before any final answer is
    correct. With `gdpo`, a score that is a sum of rewards counts as the sum that `gdpo` makes of them."""
    advantage: Advantage | None = None
    """How rewards r become advantages; the formulas are in learner/objective/rewards.py. `mean`: r - mean of the group.
    `std`: the same divided by the group's standard deviation. `rloo`: r - mean of the others. `maxrl`: (r - mean) /
    mean, for scores from 0 up and nothing else. `batch`: r - mean, over the standard deviation in the step
    (REINFORCE++). `gdpo`: every reward over its own standard deviation in the group, their weighted sum over its
    standard deviation in the step. If not given, as in the paper of loss.kind: `mean` for `dr_grpo` and `dppo`, else
    `std`. `dr_grpo` refuses `std`."""
