r"""Numbers as final answers: 18, 1 234, 1/2, 1\frac{1}{2}, 3 \times 10^4, 4.2e1, 0.\overline{3}.

`as_number` reads a rational number exactly, as a fraction. A decimal fraction may end in `\ldots` only if its last
digits are written three times.

`is_number` decides for the kinds `gsm8k` and `exact`. A number is written as shared/gold_answer.py reads it, and a
unit, a rate such as /hour or a percent sign may follow it. Plain arithmetic (1/2, \frac12, 9+9=18) is computed with 60
digits, and every side of an equation counts. Several different numbers are not a final answer, and neither are two side
by side, unless they are a mixed number (3 1/2) that is the whole side. Every pattern runs in linear time.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from actor.verifiers.answer_parts import EQUALS, MAX_CHARS, NAME
from actor.verifiers.answer_text import Unreadable, read_answer
from actor.verifiers.formula import read_formula
from actor.verifiers.formula_value import Unsure, Values
from actor.verifiers.words_beside import BEHIND, BESIDE, CHANGED_BEFORE, CHANGED_BEHIND, EQUAL, RATE
from shared.gold_answer import LEAD_IN, NUMBER, canonical

MAX_DIGITS = 1000
DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
RATIO = re.compile(r"(-?)(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+(?: [0-9]{3})*)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+))")
GROUPED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\\times|\\cdot|\*)10\^(?:\{(-?[0-9]{1,3})\}|([0-9]))")
EXPONENT = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE](?:([-+]?[0-9]{1,3}))")
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}")
ELLIPSIS = re.compile(r"(-?)([0-9]*)\.([0-9]*?)([0-9]{1,6}?)\4{2,}\\ldots")
BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")
ONLY_A_NUMBER = re.compile(LEAD_IN.pattern + NUMBER.pattern + r"[\s.*$%]*")
# LaTeX's blank before a unit; before a number it means `about`.
TIE = re.compile(r"(?<=[0-9}])~(?=\\|[A-Za-z])")
# The same number twice with this between is not that number. An exclamation mark is not read as a factorial.
COMPUTES = re.compile(
    r"\\(?!text|mathrm|mbox|left|right|quad)[A-Za-z]|[\^_]|[0-9][eE][-+]?[0-9]"
    rf"|[0-9)}}][ ]*(?!{RATE})[-+*/\u2212\u00d7\u00f7][ ]*[0-9({{\\]"
)
# What may touch a number: a word only behind a blank, of signs only those that leave its value as it is.
BEFORE = re.compile(
    r"(?:^|[A-Za-z][ \t\u00a0\n\"'({\[*$\u20ac\u00a3\\]|[:,.;)\"']"
    rf"|{EQUAL})[ \t\u00a0\n*$\u20ac\u00a3\\({{\[\"']*$"
    rf"|(?:^|{EQUAL})[ \t*$(]*\+[ \t$]*$"
)
TWICE = re.compile(r"[=(]")
SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9]")
ONE_MIXED = re.compile(r"(?<![0-9.,/])[-+]?[0-9]{1,9} [0-9]{1,9}/[0-9]{1,9}(?![0-9/]|[.,][0-9])")
SAME = 1e-40
VALUES = Values()


def whole_text(text: str) -> list[str]:
    """The text, if it is a number and nothing else."""
    return [text] if ONLY_A_NUMBER.fullmatch(text.strip()) else []


def is_number(written: Sequence[str], gold: str) -> bool:
    """Whether a final answer, as it is written, is this number."""
    plain = [TIE.sub(" ", text) for text in written]
    return all(says(text, gold) or computes_to(text, gold) for text in plain)


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
    if max(len(written), len(gold)) > MAX_CHARS or "~" in written:
        return False
    answer = read_answer(written)
    if answer.percent or answer.base or holds_two_numbers(written, answer.value):
        return False
    exact = as_exact(answer.value)
    if exact is not None:
        return exact == as_exact(gold)
    sides = [side.strip() for side in EQUALS.split(answer.value)]
    values = [value_of(side) for side in (sides[1:] if len(sides) > 1 and NAME.fullmatch(sides[0]) else sides)]
    expected = VALUES.number(gold)
    return all(value is not None and abs(value - expected) <= SAME * abs(expected) for value in values)


def holds_two_numbers(written: str, value: str) -> bool:
    """Whether two numbers are side by side, other than as a mixed number that is a whole side: 1 1/2, not 3 * 1 1/2."""
    if SIDE_BY_SIDE.search(ONE_MIXED.sub("0", written)):
        return True
    sides = [side.strip() for side in EQUALS.split(value) if SIDE_BY_SIDE.search(side)]
    return not all(map(ONE_MIXED.fullmatch, sides))


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


def squeeze(value: str) -> str:
    """Without blanks, but for those between digits: 1 2/3 is not 12/3."""
    return BLANK.sub("", value)


def as_number(value: str) -> Fraction | None:
    """The rational number that is written there, if that is all there is."""
    value = squeeze(value)
    value = value[1:] if value.startswith("+") else value
    if len(value) > MAX_DIGITS:
        return None
    readers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction]]] = [
        (DECIMAL, lambda match: Fraction(match[0].rstrip(".") or "0")),
        (RATIO, lambda match: sign(match) * Fraction(int(match[2] or match[4]), int(match[3] or match[5]))),
        (MIXED, mixed),
        (GROUPED, lambda match: Fraction(match[0].replace(" ", ""))),
        (EXPONENT, lambda match: Fraction(match[1]) * Fraction(10) ** int(match[2])),
        (REPEATING, repeating),
        (ELLIPSIS, repeating),
        (SCIENTIFIC, lambda match: Fraction(match[1]) * Fraction(10) ** int(match[2] or match[3])),
    ]
    for pattern, read in readers:
        if match := pattern.fullmatch(value):
            try:
                return read(match)
            except ZeroDivisionError as error:
                raise Unreadable("A division by zero.") from error
    return None


def sign(match: re.Match[str]) -> int:
    """-1 if the first group of the match is a minus."""
    return -1 if match[1] else 1


def mixed(match: re.Match[str]) -> Fraction:
    """Of a whole number and a fraction below one. `11 7/6` is two numbers side by side."""
    fraction = Fraction(int(match[3] or match[5]), int(match[4] or match[6]))
    if fraction >= 1:
        raise Unreadable("A mixed number whose fraction is not below one.")
    return sign(match) * (int(match[2].replace(" ", "")) + fraction)


def repeating(match: re.Match[str]) -> Fraction:
    """Of a decimal fraction whose last digits repeat."""
    shift = 10 ** len(match[3])
    period = Fraction(int(match[4]), 10 ** len(match[4]) - 1) / shift
    return sign(match) * (Fraction(int(match[2] or "0")) + Fraction(int(match[3] or "0"), shift) + period)
