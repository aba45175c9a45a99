"""The names of the rewards in verifier.rewards: `think_tags` keeps its name, `path/to/file.py:brevity` is `brevity`."""

import math
from collections.abc import Mapping

from shared.config.data import VerifierConfig
from shared.config.types import check_function_name
from shared.errors import ConfigError

FORMS = ("think_tags", "answer_tags")
SUM_DECIDES = "a completion counts as correct if the weighted sum of its rewards is at least 0.5"
TAKEN = ("mean", "std", "min", "max", "score", "length", "truncated")
"""Names that rows of metrics.jsonl already use."""


def name_of(spec: str) -> str:
    return spec.rpartition(":")[2]


def is_function(spec: str) -> bool:
    return ":" in spec


def weights(rewards: Mapping[str, float]) -> dict[str, float]:
    return {name_of(spec): weight for spec, weight in rewards.items()}


def runs_functions(verifier: VerifierConfig) -> bool:
    """Whether a worker runs any function of the user's."""
    return verifier.kind == "callable" or any(map(is_function, verifier.rewards))


def form_in_words(verifier: VerifierConfig) -> str:
    """What reward functions are given, for the start of a run. Models without a chat template are refused."""
    form = "texts" if verifier.form == "text" else "lists of messages"
    why = ": the model has a chat template" if verifier.form == "auto" else ""
    return f"reward functions get prompts and completions as {form} (verifier.form = '{verifier.form}'{why})"


def rewards_in_words(verifier: VerifierConfig) -> list[str]:
    """What to know about the reward functions of a run at its start."""
    lines = [form_in_words(verifier)] if runs_functions(verifier) else []
    return lines + ([f"{SUM_DECIDES}; {name_one(verifier.rewards)}"] if sum_decides(verifier) else [])


def sum_decides(verifier: VerifierConfig) -> bool:
    """Whether a weighted sum says what is correct. A single reward with weight 1 is its own sum."""
    return verifier.adds_up_rewards and not verifier.correct and list(verifier.rewards.values()) != [1.0]


def name_one(rewards: Mapping[str, float]) -> str:
    return f"if one reward decides, name it with verifier.correct ({', '.join(weights(rewards))})"


def check_verifier(verifier: VerifierConfig) -> None:
    """ConfigError if a key is missing that this kind needs, or given that it would ignore."""
    kind = verifier.kind
    if verifier.adds_up_rewards and not verifier.rewards:
        raise ConfigError("verifier.kind is 'callable' but verifier.function is empty; set it to path/to/file.py:name.")
    if verifier.function and kind != "callable":
        raise ConfigError(
            f"verifier.function = '{verifier.function}' is for verifier.kind = 'callable', but that is '{kind}', which"
            " would score without it; set the kind, or add the function to [verifier.rewards] with a weight."
        )
    if verifier.function:
        check_function_name("verifier.function", verifier.function)
    if verifier.rounded_digits and kind != "math":
        raise ConfigError(
            f"verifier.rounded_digits = {verifier.rounded_digits} is for verifier.kind = 'math', but that is '{kind}';"
            " set the kind, or remove rounded_digits."
        )
    check_rewards(verifier.rewards)
    check_correct(verifier)


def check_correct(verifier: VerifierConfig) -> None:
    """ConfigError if verifier.correct is given and would be ignored, or names no reward."""
    given, key = verifier.correct, "function" if verifier.kind == "callable" else "kind"
    if given and not verifier.adds_up_rewards:
        raise ConfigError(
            f"verifier.correct = '{given}' is for verifier.kind = 'callable' without a function, but verifier.{key} ="
            f" '{getattr(verifier, key)}' decides what is correct; remove verifier.correct."
        )
    if given and given not in (*verifier.rewards, *weights(verifier.rewards)):
        raise ConfigError(
            f"verifier.correct is '{given}', expected one of verifier.rewards: {', '.join(weights(verifier.rewards))}."
        )


def check_rewards(rewards: Mapping[str, float]) -> None:
    """ConfigError unless each reward is known, has a finite weight and a name that no other has."""
    for spec, weight in rewards.items():
        if not math.isfinite(weight):
            raise ConfigError(f"verifier.rewards gives '{spec}' the weight {weight}; expected a finite number.")
        if not is_function(spec) and spec not in FORMS:
            raise ConfigError(
                f"verifier.rewards names '{spec}', expected {', '.join(FORMS)} or a function as path/to/file.py:name."
            )
        if not name_of(spec).isidentifier() or name_of(spec) in TAKEN:
            raise ConfigError(
                f"verifier.rewards names '{spec}', which cannot be called '{name_of(spec)}' in the logs; give the"
                " function another name."
            )
        if is_function(spec):
            check_function_name("verifier.rewards", spec)
    if len(weights(rewards)) < len(rewards):
        raise ConfigError(
            "verifier.rewards has two functions of the same name, and the logs could not tell them apart; rename one."
        )
