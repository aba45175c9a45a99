"""What a reward function is given: the keyword arguments of TRL's GRPOTrainer, made from the jobs of one call.

    prompts         texts, or conversations: [{"role": "system", ...}, {"role": "user", "content": question}]
    completions     texts, or conversations of one message: [{"role": "assistant", "content": text}]
                    with an environment, the text of all turns and of the answers between them
    completion_ids  lists of token ids
    trainer_state   global_step and max_steps; any other attribute raises and says so
    log_extra       log_extra(column, values): one value a completion, for the rollout log
    log_metric      log_metric(name, value): a number, for the metrics
    gold_answer     what the verifiers compare with: the end of a whole solution, or the answer as it is, as text
    others          the columns of the data set, with the names and values that they have there, None included

`verifier.form` says which form prompts and completions have. With `auto` they are conversations if a chat template
rendered the prompt, as in TRL. The examples of tasks.few_shot are part of the prompt's tokens, but not of these
messages. Left out: `environments`, and images.
"""

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from traceback import walk_tb
from typing import Any

from msgspec import structs

from actor.verifiers.verdict import ScoreJob, Verdict
from protocol.limits import MAX_NAME_CHARS, MAX_SCORE
from protocol.plain_text import for_wire
from shared.config.data import EARLIER, SYSTEM, UNCONVERTED, RewardForm

MAX_EXTRA_CHARS = 300
MAX_LOGGED = 16
"""Columns, and metrics, that the functions may log in one call: each crosses the wire with every group."""
GOLD_ANSWER = "gold_answer"
NOT_FOR_FUNCTIONS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that are left out, as in TRL."""
NOT_IN_THE_DATA = frozenset({SYSTEM, EARLIER, UNCONVERTED})


class TrainerState:
    """The part of transformers' TrainerState that is known where completions are scored."""

    is_local_process_zero = is_world_process_zero = True

    def __init__(self, **known: int) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(self.__dict__) or "nothing"
        raise AttributeError(f"trainer_state.{name} is not known here; of trainer_state there is {known}")


class RewardLog:
    """Collects what the functions of one call log."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, completions: int) -> None:
        """For the next call."""
        self.completions = completions
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.extras: dict[str, list[str]] = {}

    def extra(self, column: str, values: Iterable[Any]) -> None:
        texts = [for_wire(str(value)[:MAX_EXTRA_CHARS]) for value in values]
        if len(texts) != self.completions:
            raise ValueError(f"log_extra got {len(texts)} values of {column!r} for {self.completions} completions")
        self.extras[logged_name("log_extra", column, self.extras)] = texts

    def metric(self, name: str, value: float) -> None:
        """A value that the wire cannot carry is left out: a metric never stops a run."""
        number = float(value)
        if abs(number) <= MAX_SCORE:
            self.metrics[logged_name("log_metric", name, self.metrics)].append(number)

    def added_to(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        if not self.metrics and not self.extras:
            return list(verdicts)
        metrics = {name: fmean(values) for name, values in self.metrics.items()}
        return [
            structs.replace(verdict, metrics=metrics, extras={name: of[place] for name, of in self.extras.items()})
            for place, verdict in enumerate(verdicts)
        ]


def logged_name(function: str, name: str, taken: Mapping[str, object]) -> str:
    # for_wire first: half of a surrogate pair cannot be printed, and becomes `?`.
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not (name := for_wire(name)).isprintable():
        raise ValueError(
            f"{function} got the name {name!r}; a text of 1 to {MAX_NAME_CHARS} printable characters is needed"
        )
    if name not in taken and len(taken) == MAX_LOGGED:
        raise ValueError(f"{function} got more than {MAX_LOGGED} names, of which {name!r} is the last")
    return name


def is_conversation(form: RewardForm, job: ScoreJob) -> bool:
    return form == "messages" or (form == "auto" and job.context.chat)


def arguments(jobs: Sequence[ScoreJob], form: RewardForm, log: RewardLog) -> dict[str, Any]:
    """A data column cannot replace an argument of TRL's."""
    columns = [as_in_the_data(job.columns) for job in jobs]
    names = dict.fromkeys(name for one in columns for name in one if name not in NOT_FOR_FUNCTIONS)
    state = jobs[0].context if jobs else None
    known = {name: getattr(state, name, None) for name in ("global_step", "max_steps")}
    return {
        **{name: [one.get(name) for one in columns] for name in names},
        "prompts": [prompt(job) if is_conversation(form, job) else job.prompt for job in jobs],
        "completions": [completion(job) if is_conversation(form, job) else written(job) for job in jobs],
        "completion_ids": [job.completion_ids for job in jobs],
        "trainer_state": TrainerState(**{name: value for name, value in known.items() if value is not None}),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def as_in_the_data(columns: Mapping[str, str]) -> dict[str, Any]:
    """The columns as they are in the data, with the gold answer as `gold_answer` beside them. For reward functions,
    environments and agents."""
    converted: dict[str, Any] = {name: text for name, text in columns.items() if name not in NOT_IN_THE_DATA}
    given = converted | json.loads(columns.get(UNCONVERTED, "{}"))
    gold = {GOLD_ANSWER: columns.get("answer")} if "answer" in given else {}
    return gold | given


def prompt(job: ScoreJob) -> list[dict[str, str]]:
    system = job.columns.get(SYSTEM, job.context.system_prompt)
    question = job.columns.get("question", job.prompt)
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *json.loads(job.columns.get(EARLIER, "[]")), {"role": "user", "content": question}]


def completion(job: ScoreJob) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": written(job)}]


def written(job: ScoreJob) -> str:
    return job.completion if job.all_turns is None else job.all_turns


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """All of them if the function has **kwargs, otherwise those that it names. TypeError if it needs others."""
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"its argument '{parameter.name}' takes no name, and all arguments are given by name")
        if parameter.name not in offered:
            raise TypeError(missing(parameter.name, offered))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    named = {parameter.name for parameter in parameters}
    return {name: value for name, value in offered.items() if name in named}


def missing(name: str, offered: Mapping[str, Any]) -> str:
    if name == "environments":
        return "it needs the argument 'environments', which reward functions are not given here"
    return f"it needs the argument '{name}', which is no column of the data; there are {', '.join(sorted(offered))}"


TEXTS_GIVEN = "is plain text; set verifier.form = 'messages' for a function that reads [0]['content']"
MESSAGES_GIVEN = "is a list of messages; read its [0]['content'], or set verifier.form = 'text'"


def blamed(error: BaseException, given: Mapping[str, Any]) -> str:
    """Which argument has another form than the function expects, as the end of a sentence; empty if it is not that.

    The innermost frame that has an entry of prompts or completions among its variables says which of the two it was.
    """
    if not isinstance(error, TypeError | AttributeError):
        return ""
    held = [(name, entry) for name in ("completions", "prompts") for entry in given.get(name, ())]
    is_text = all(isinstance(entry, str) for _, entry in held)
    words = ("'str'", "string ind") if is_text else ("list", "dict")
    if not any(word in str(error) for word in words):
        return ""
    for frame in reversed([frame for frame, _ in walk_tb(error.__traceback__)]):
        variables = list(frame.f_locals.values())
        for name, entry in held:
            if any(value is entry for value in variables):
                return f": each entry of '{name}' {TEXTS_GIVEN if is_text else MESSAGES_GIVEN}"
    return ""
