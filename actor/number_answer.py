r"""Numbers as final answers, for `gsm8k` and `exact`.

A number is written as gold_number.py says, with a unit or a percent sign behind it. What is not one number but plain
arithmetic (1/2, \frac12, 9+9=18) is computed with 60 digits; of an equation every side counts. Several different
numbers are no answer. Every pattern runs in linear time.
"""

import re
from collections.abc import Sequence
from typing import Any

from actor.answer_text import read_answer
from actor.formula import read_formula
from actor.formula_value import Unsure, Values
from actor.math_answer import EQUALS, MAX_CHARS, NAME, Unreadable, as_number
from shared.gold_number import LEAD_IN, NUMBER, numbers_in

ONLY_A_NUMBER = re.compile(LEAD_IN.pattern + NUMBER.pattern + r"[\s.*$%]*")
# The same number twice with this between is not that number. An exclamation mark is joy, not a factorial.
COMPUTES = re.compile(
    r"\\(?!text|mathrm|mbox|left|right|quad)[A-Za-z]|[\^_]|[0-9][eE][-+]?[0-9]"
    r"|[0-9)}][ ]*[-+*/\u2212\u00d7\u00f7][ ]*[0-9({\\]"
)
SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")
SAME = 1e-40
VALUES = Values()


def whole_text(text: str) -> list[str]:
    """The text, if it is a number and nothing else."""
    return [text] if ONLY_A_NUMBER.fullmatch(text.strip()) else []


def is_number(written: Sequence[str], gold: str) -> bool:
    """Whether a final answer, as it is written, is this number."""
    if numbers_in(written) == [gold] and not any(COMPUTES.search(text) for text in written):
        return True
    return all(computes_to(text, gold) for text in written)


def computes_to(written: str, gold: str) -> bool:
    """Whether plain arithmetic gives this number, on every side of an equation."""
    if max(len(written), len(gold)) > MAX_CHARS or SIDE_BY_SIDE.search(written):
        return False
    answer = read_answer(written)
    if answer.percent or answer.base:
        return False
    sides = [side.strip() for side in EQUALS.split(answer.value)]
    values = [value_of(side) for side in (sides[1:] if len(sides) > 1 and NAME.fullmatch(sides[0]) else sides)]
    expected = VALUES.number(gold)
    return all(value is not None and abs(value - expected) <= SAME * abs(expected) for value in values)


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
