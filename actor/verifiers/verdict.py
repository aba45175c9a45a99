"""What goes into scoring and what comes out of it.

These records also cross the pipe between the actor and its scoring workers, so this file stays light: a worker imports
it, and must start at once and stay small.
"""

import hashlib

import msgspec

from protocol.outcome import Outcome
from protocol.plain_text import for_wire

MAX_NOTE = 300
MAX_FINAL_ANSWER = 500
"""As long as the verifier reads a formula."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function may ask about the run, besides prompt and completion."""

    chat: bool = False
    """A chat template rendered the prompt, so it is a conversation."""
    system_prompt: str = ""
    """The first message of that conversation; empty if there is none."""
    global_step: int | None = None
    """Version of the policy that was sampled; None outside a run."""
    max_steps: int | None = None
    """Steps that the run is planned to have; None outside a run."""


class ScoreJob(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to be scored."""

    prompt: str
    """The prompt as text, special tokens removed."""
    completion: str
    """The completion as text, special tokens removed. It ends where the model ended its turn: nothing after counts."""
    completion_ids: list[int]
    """[T] its tokens, end token included; with an environment those of `all_turns`."""
    truncated: bool
    """It ran into the cap on new tokens."""
    columns: dict[str, str]
    """The task's columns: `answer` with the gold answer, and what the data set has besides."""
    all_turns: str | None = None
    """With an environment, from the first turn to the last, with what is between them. `completion` is the last."""
    context: Context = Context()
    """The same for all jobs of an order."""
    compares_answers: bool = False
    """Whether two final answers are compared. That is no completion, and no function of the user is asked about it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about one completion."""

    outcome: Outcome
    """The typed finding; timeout, error and abstain say that nothing was found out."""
    score: float
    """Finite. 1.0 or 0.0 from the built-in verifiers, the function's own number from a user's; 0.0 without one."""
    final_answer: str | None
    """The final answer that was read from the text, in canonical form; None if there is none or none was looked for."""
    note: str
    """Why, for people; empty where the outcome says it all."""
    rewards: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """The named rewards beside the score, unweighted; all that the configuration names, or none in a fault."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """What reward functions gave to log_metric in the call that scored this completion."""
    extras: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """What they gave to log_extra for this completion, as text."""


def fault(outcome: Outcome, note: str) -> Verdict:
    """A verdict without a score; the note becomes one line of bounded length."""
    return Verdict(outcome=outcome, score=0.0, final_answer=None, note=one_line(note))


def bounded(answer: str) -> str:
    """A final answer of bounded length. A long one ends in a digest of all of it, so two that only begin alike still
    count as two."""
    if len(answer) <= MAX_FINAL_ANSWER:
        return answer
    return f"{answer[: MAX_FINAL_ANSWER - 20]}... {hashlib.sha256(answer.encode()).hexdigest()[:16]}"


def one_line(text: str) -> str:
    """White space collapsed, cut to a length that fits a log line, and fit for the wire."""
    line = " ".join(for_wire(text).split())
    return line if len(line) <= MAX_NOTE else line[: MAX_NOTE - 3] + "..."
