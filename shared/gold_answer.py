r"""Numbers as GSM8K writes them, and the number in a gold answer.

A number is written 18, -3, 1,234, $18, 18. or 18.0 and becomes a canonical decimal string. That is exact at any length,
and needs no conversion whose cost grows with the square of the digits.

Also the boxes of a text: `\boxed{...}` and `\fbox{...}`. All patterns and functions here take linear time.
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal

MARKER = "####"

# A minus after a digit or letter is no sign: in `20-5` and `x-5` it is not part of the number.
NUMBER = re.compile(
    r"(?:(?P<sign>(?<![0-9A-Za-z])[-\u2212])[$\u20ac\u00a3]?)?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\.(?P<decimals>[0-9]+))?"
)
# What may come between the marker and the number: blanks, a plus, a currency, bold type, an escaped dollar.
LEAD_IN = re.compile(r"[ \t\u00a0+*\\$\u20ac\u00a3]*")


def on_marked_line(text: str) -> list[str]:
    """The rest of the line after the last `####`, if it begins with a number."""
    _, marker, tail = text.rpartition(MARKER)
    line = tail.split("\n", 1)[0] if marker else ""
    lead_in = LEAD_IN.match(line)
    start = lead_in.end() if lead_in else 0
    return [line[start:]] if NUMBER.match(line, start) else []


def gold_number(answer: str) -> str | None:
    """The gold answer in canonical form, or None unless there is exactly one number in it."""
    numbers = numbers_in(on_marked_line(answer if MARKER in answer else MARKER + answer.strip()))
    return numbers[0] if len(numbers) == 1 else None


def plain_number(value: float) -> str:
    """As people write it: 0.00001 and 3, where Python writes 1e-05 and 3.0."""
    return format(Decimal(repr(value)), "f").removesuffix(".0") if math.isfinite(value) else str(value)


def numbers_in(written: Sequence[str]) -> list[str]:
    """The different numbers in some texts, in canonical form."""
    return list(dict.fromkeys(canonical(match) for text in written for match in NUMBER.finditer(text)))


def canonical(match: re.Match[str]) -> str:
    """A number without grouping, padding zeros or a sign on zero: -1,234.50 is -1234.5, 018.0 is 18."""
    whole = match["whole"].replace(",", "").lstrip("0") or "0"
    decimals = (match["decimals"] or "").rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return f"-{number}" if match["sign"] and number != "0" else number


BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
Span = tuple[int, int, str]
"""Start, end, content."""


def boxes(text: str) -> list[Span]:
    """Start, end and content of every closed box that contains no other box."""
    open_braces: list[int | None] = []
    found: list[Span] = []
    starts: list[int] = []
    for token in BOX_TOKEN.finditer(text):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and starts.pop() == start and not (found and found[-1][0] > start):
                found.append((start, token.end(), text[text.index("{", start) + 1 : token.start()]))
        elif token[0].endswith("{") and token[0] != "\\{":
            open_braces.append(token.start())
            starts.append(token.start())
    return found
