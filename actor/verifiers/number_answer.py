r"""Numbers as final answers, for `gsm8k` and `exact`.

A number is written as gold_number.py says, with a unit or a percent sign behind it. What is not one number but plain
arithmetic (1/2, \frac12, 9+9=18) is computed with 60 digits; of an equation every side counts. Several different
numbers are no answer. Every pattern runs in linear time.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from actor.verifiers.answer_text import BEHIND, BESIDE, CHANGED_BEFORE, CHANGED_BEHIND, Unreadable, read_answer
from actor.verifiers.formula import read_formula
from actor.verifiers.formula_value import Unsure, Values
from actor.verifiers.math_answer import EQUALS, MAX_CHARS, NAME
from actor.verifiers.written_number import as_number
from shared.gold_answer import LEAD_IN, NUMBER, canonical

ONLY_A_NUMBER = re.compile(LEAD_IN.pattern + NUMBER.pattern + r"[\s.*$%]*")
# The same number twice with this between is not that number. An exclamation mark is joy, not a factorial.
COMPUTES = re.compile(
    r"\\(?!text|mathrm|mbox|left|right|quad)[A-Za-z]|[\^_]|[0-9][eE][-+]?[0-9]"
    r"|[0-9)}][ ]*[-+*/\u2212\u00d7\u00f7][ ]*[0-9({\\]"
)
# What may touch a number: a word only behind a blank, of signs only those that leave its value as it is.
BEFORE = re.compile(
    r"(?:^|[A-Za-z][ \t\u00a0\n\"'({\[*$\u20ac\u00a3\\]|[:=,.;)\"'])[ \t\u00a0\n*$\u20ac\u00a3\\({\[\"']*$"
    r"|(?:^|=)[ \t*$(]*\+[ \t$]*$"
)
TWICE = re.compile(r"[=(]")
SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")
SAME = 1e-40
VALUES = Values()


def whole_text(text: str) -> list[str]:
    """The text, if it is a number and nothing else."""
    return [text] if ONLY_A_NUMBER.fullmatch(text.strip()) else []


def is_number(written: Sequence[str], gold: str) -> bool:
    """Whether a final answer, as it is written, is this number."""
    return all(says(text, gold) or computes_to(text, gold) for text in written)


def says(written: str, gold: str) -> bool:
    """Whether it is this number, plainly: nothing beside it makes another value of it."""
    end = 0
    for match in NUMBER.finditer(written):
        if canonical(match) != gold or (end and not TWICE.search(written, end, match.start())):
            return False
        before, end = written[max(0, match.start() - BESIDE) : match.start()], match.end()
        if not BEFORE.search(before) or CHANGED_BEFORE.search(before):
            return False
        if not BEHIND.match(written, end) or CHANGED_BEHIND.match(written, end):
            return False
    return end > 0 and not COMPUTES.search(written)


def computes_to(written: str, gold: str) -> bool:
    """Whether plain arithmetic gives this number, on every side of an equation."""
    if max(len(written), len(gold)) > MAX_CHARS or "~" in written or SIDE_BY_SIDE.search(written):
        return False
    answer = read_answer(written)
    if answer.percent or answer.base:
        return False
    exact = as_exact(answer.value)
    if exact is not None:
        return exact == as_exact(gold)
    sides = [side.strip() for side in EQUALS.split(answer.value)]
    values = [value_of(side) for side in (sides[1:] if len(sides) > 1 and NAME.fullmatch(sides[0]) else sides)]
    expected = VALUES.number(gold)
    return all(value is not None and abs(value - expected) <= SAME * abs(expected) for value in values)


def as_exact(value: str) -> Fraction | None:
    """The fraction that is written there."""
    try:
        return as_number(value)
    except Unreadable:
        return None


def value_of(side: str) -> Any:
    """The number that plain arithmetic gives; None if it is no plain arithmetic."""
    try:
        exact = as_number(read_answer(side).value)
        if exact is not None:
            return VALUES.divide(VALUES.number(str(exact.numerator)), VALUES.number(str(exact.denominator)))
        formula = read_formula(side)
        return formula.value(VALUES, {}) if formula and not formula.letters else None
    except (Unsure, Unreadable):
        return None
