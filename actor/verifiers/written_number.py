r"""The rational number that is written there: 18, 1 234, 1/2, 1\frac{1}{2}, 3 \times 10^4, 4.2e1, 0.\overline{3}.

Exactly, as a fraction. A decimal fraction goes on after `\ldots` only where its last digits are there three times.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from actor.verifiers.answer_text import Unreadable

MAX_DIGITS = 1000
DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
RATIO = re.compile(r"(-?)(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+))")
GROUPED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\\times|\\cdot|\*)10\^(?:\{(-?[0-9]{1,3})\}|([0-9]))")
EXPONENT = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})")
REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}")
ELLIPSIS = re.compile(r"(-?)([0-9]*)\.([0-9]*?)([0-9]{1,6}?)\4{2,}\\ldots")
BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")


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
    """Of a number whose first group is its minus."""
    return -1 if match[1] else 1


def mixed(match: re.Match[str]) -> Fraction:
    """Of a whole number and a fraction below one. `11 7/6` is two numbers side by side."""
    fraction = Fraction(int(match[3] or match[5]), int(match[4] or match[6]))
    if fraction >= 1:
        raise Unreadable("A mixed number whose fraction is not below one.")
    return sign(match) * (int(match[2]) + fraction)


def repeating(match: re.Match[str]) -> Fraction:
    """Of a decimal fraction whose last digits repeat."""
    shift = 10 ** len(match[3])
    period = Fraction(int(match[4]), 10 ** len(match[4]) - 1) / shift
    return sign(match) * (Fraction(int(match[2] or "0")) + Fraction(int(match[3] or "0"), shift) + period)
