r"""A final answer as it is written, brought into one spelling: `\dfrac12` and `\frac{1}{2}` are not two.

What stands around the value (currency, unit, percent sign, base) is taken off and kept beside it. Nothing is computed
here, and nothing is dropped that could change the value.
"""

import re
from dataclasses import dataclass

SPELLINGS = [
    (re.compile("[\u2212\u2010-\u2013]"), "-"),
    (re.compile("\u00d7"), r"\\times "),
    (re.compile("\u00f7"), r"\\div "),
    (re.compile("\u00b7"), r"\\cdot "),
    (re.compile("\u03c0"), r"\\pi "),
    (re.compile("\u221e"), r"\\infty "),
    (re.compile("\u222a"), r"\\cup "),
    (re.compile("\u221a\\(?([0-9A-Za-z]+)\\)?"), r"\\sqrt{\1}"),
    (re.compile("\u00bd"), r"\\frac{1}{2}"),
    (re.compile("\u00b2"), "^2"),
    (re.compile("\u00b3"), "^3"),
    (re.compile("\u00b0"), r"^\\circ"),
    (re.compile("[\u00a0\u2009\u202f\r\n\t]"), " "),
    (re.compile(r"\\(?:left|right|bigl?|bigr?|displaystyle)(?![A-Za-z])|(?<!\\)\\(?:[!,;:]|(?= ))"), ""),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|~"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac *([0-9])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac *\{[^{}]*\}) *([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt *([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:mbox|textbf|textit|textrm|mathrm|mathbf|operatorname) *\{"), r"\\text{"),
    (re.compile(r"\\(?:ge|geq|geqslant)(?![A-Za-z])|\u2265"), r"\\ge "),
    (re.compile(r"\\(?:le|leq|leqslant)(?![A-Za-z])|\u2264"), r"\\le "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
]
WRAPPING = re.compile(r"^(?:\*\*|`|\$|\\\(|\\\[|\s)+|(?:\*\*|`|(?<!\\)\$|\\\)|\\\]|[\s.,;:])+$")
CURRENCY = re.compile(r"^(-?)\s*\\?([$\u20ac\u00a3])\s*(?=-?[0-9.])")
PERCENT = re.compile(r"\s*(?:\\?%|percent)$", re.IGNORECASE)
DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\text\{ *degrees? *\}|degrees?)$", re.IGNORECASE)
TEXT_UNIT = re.compile(r"(?<=[0-9})])\s*\\text\{([^{}]*)\}(\s*\^\s*\{?[0-9]\}?)?$")
PROSE_UNIT = re.compile(
    r"(?<=[0-9}])\s+([A-Za-z]{2,}(?:[ /-][A-Za-z]+){0,2})$|(?<=[0-9]) ?((?:cm|mm|km|m)\^\{?[23]\}?)$"
)
BASE = re.compile(r"([0-9A-Fa-f]+)_\{?([0-9]+)\}?")
MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*")
GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
WORDS = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One final answer."""

    value: str
    """Formula or text, in one spelling."""
    unit: str = ""
    """In lower case, singular; empty for none."""
    percent: bool = False
    """A percent sign follows."""
    base: str = ""
    """The base written below the number; empty for none."""


def read_answer(written: str) -> Answer:
    """Value and surroundings of an answer as it is written."""
    for pattern, spelling in SPELLINGS:
        written = pattern.sub(spelling, written)
    value = MEMBER.sub("", WRAPPING.sub("", written))
    value, percent = strip(PERCENT, value)
    value, degrees = strip(DEGREES, value)
    value, unit = take_unit(value)
    if currency := CURRENCY.match(value):
        unit = unit or WORDS[currency[2]]
        value = currency[1] + value[currency.end() :]
    base = BASE.fullmatch(value.replace(" ", ""))
    if GROUPED.fullmatch(value.replace(" ", "")):
        value = value.replace(",", "").replace(" ", "")
    return Answer(
        value=base[1] if base else " ".join(value.split()),
        unit="degree" if degrees else unit,
        percent=percent,
        base=base[2] if base else "",
    )


def strip(pattern: re.Pattern[str], value: str) -> tuple[str, bool]:
    """Without what the pattern finds at the end, and whether it found it."""
    shorter = pattern.sub("", value)
    return (shorter, True) if shorter and shorter != value else (value, False)


def take_unit(value: str) -> tuple[str, str]:
    """A unit at the end, behind a number, apart."""
    for pattern in (TEXT_UNIT, PROSE_UNIT):
        if match := pattern.search(value):
            unit = " ".join("".join(group or "" for group in match.groups()).lower().split())
            return value[: match.start()].rstrip(), unit.removesuffix("s").replace("{", "").replace("}", "")
    return value, ""
