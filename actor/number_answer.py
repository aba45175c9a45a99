r"""Numbers as final answers, for `gsm8k` and `exact`.

A number is written 18, -3, 1,234, $18, 18. or 18.0, with a unit or a percent sign behind it, and is compared as a
canonical decimal string: exact at any length, and no conversion whose cost grows with the square of the digits. What is
not one number but plain arithmetic (1/2, \frac12, 9+9=18) is computed with 60 digits; of an equation every side counts.
Several different numbers are no answer. Every pattern runs in linear time.
"""

import re
from collections.abc import Sequence
from typing import Any

from actor.answer_text import read_answer
from actor.formula import read_formula
from actor.formula_value import Unsure, Values
from actor.math_answer import EQUALS, MAX_CHARS, NAME, Unreadable, as_number

MARKER = "####"

# The sign is one only where no digit or letter stands before it: in `20-5` and `x-5` it is not part of the number.
NUMBER = re.compile(
    r"(?:(?P<sign>(?<![0-9A-Za-z])[-\u2212])[$\u20ac\u00a3]?)?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.(?P<decimals>[0-9]+))?"
)
# What may stand between the marker and the number: blanks, a plus, a currency, bold type, an escaped dollar.
LEAD_IN = re.compile(r"[ \t\u00a0+*\\$\u20ac\u00a3]*")
ONLY_A_NUMBER = re.compile(LEAD_IN.pattern + NUMBER.pattern + r"[\s.*$%]*")
# The same number twice with this between is not that number. An exclamation mark is joy, not a factorial.
COMPUTES = re.compile(
    r"\\(?!text|mathrm|mbox|left|right|quad)[A-Za-z]|[\^_]|[0-9][eE][-+]?[0-9]"
    r"|[0-9)}][ ]*[-+*/\u2212\u00d7\u00f7][ ]*[0-9({\\]"
)
SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")
SAME = 1e-40
VALUES = Values()


def on_marked_line(text: str) -> list[str]:
    """What stands on the line of the last `####`, if a number stands right behind it."""
    _, marker, tail = text.rpartition(MARKER)
    line = tail.split("\n", 1)[0] if marker else ""
    lead_in = LEAD_IN.match(line)
    start = lead_in.end() if lead_in else 0
    return [line[start:]] if NUMBER.match(line, start) else []


def whole_text(text: str) -> list[str]:
    """The text, if it is a number and nothing else."""
    return [text] if ONLY_A_NUMBER.fullmatch(text.strip()) else []


def gold_number(answer: str) -> str | None:
    """The gold answer in canonical form, or None if it does not hold exactly one number."""
    numbers = numbers_in(on_marked_line(answer if MARKER in answer else MARKER + answer.strip()))
    return numbers[0] if len(numbers) == 1 else None


def numbers_in(written: Sequence[str]) -> list[str]:
    """The different numbers in some texts, in canonical form."""
    return list(dict.fromkeys(canonical(match) for text in written for match in NUMBER.finditer(text)))


def canonical(match: re.Match[str]) -> str:
    """A number without grouping, padding zeros or a sign on zero: -1,234.50 is -1234.5, 018.0 is 18."""
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    decimals = (match["decimals"] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if match["sign"] and number != "0" else number


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
