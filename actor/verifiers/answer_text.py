r"""A final answer as it is written, brought into one spelling: `\dfrac12` and `\frac{1}{2}` are not two.

What is written around the value (currency, unit, percent sign, base) is taken off and kept beside it. Nothing is
computed here, and nothing is dropped that could change the value.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

DOUBLED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|boxed|fbox|text|left|right|pi|begin|end|cdot|times|div|in|cup|infty|le|ge|leq"
    r"|geq|neq?|ldots|circ|pm|sin|cos|tan|ln|log|theta|alpha|beta|overline|mathbb|quad)(?![A-Za-z])|[{}])"
)
SIGNS = [
    (re.compile("[\u2212\u2010-\u2014\uff0d]"), "-"),
    (re.compile("\u2260"), r"\\ne "),
    (re.compile("\u2248"), r"\\approx "),
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
    (re.compile("[\u00a0\u2009\u202f]"), " "),
    (re.compile("\u2265"), r"\\ge "),
    (re.compile("\u2264"), r"\\le "),
]
SPELLINGS = [
    (re.compile(r",\\! *|\{,\}(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), "."),
    (re.compile(r"\.\.\.+|\\(?:dots|cdots)(?![A-Za-z])"), r"\\ldots "),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{ *\\\}"), r"\\emptyset "),
    (re.compile(r"\\begin\{array\} *\{[clr| ]*\}"), r"\\begin{matrix}"),
    (re.compile(r"\\end\{array\}"), r"\\end{matrix}"),
    (re.compile(r"!=|\\not *="), r"\\ne "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:approxeq|simeq|doteq)(?![A-Za-z])"), r"\\approx "),
    (re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|log|ln)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\text *\{\s*,?\s*(and|or)\s*\}"), r" \1 "),
    (re.compile("[\r\n\t]"), " "),
    (re.compile(r"\\(?:left|right|bigl?|bigr?|displaystyle)(?![A-Za-z])|(?<!\\)\\(?:[!,;:]|(?= ))"), ""),
    (re.compile(r"\\q?quad|~"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac *([0-9])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac *\{[^{}]*\}) *([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt *([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\^_0-9A-Za-z} ])([0-9]+)\{([0-9]+)\}"), r"\1\2"),
    (re.compile(r"\\(?:mbox|textbf|textit|textrm|textnormal|textsf|mathrm|mathbf|operatorname) *\{"), r"\\text{"),
    (re.compile(r"\\(?:ge|geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\(?:le|leq|leqslant)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
]
WRAPPING = re.compile(r"^(?:\*\*|`|\$|\\\(|\\\[|\s)+|(?:\*\*|`|(?<!\\)\$|\\\)|\\\]|[\s.,;:])+$")
CURRENCY = re.compile(r"^(-?)\s*\\?([$\u20ac\u00a3])\s*(?=-?[0-9.])")
PERCENT = re.compile(r"\s*(?:\\?%|percent|\\text\{ *(?:percent|%) *\})$", re.IGNORECASE)
DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\\text\{ *degrees? *\}|degrees?)$", re.IGNORECASE)
TEXT_UNIT = re.compile(r"(?<=[0-9})])\s*\\text\{([^{}]*)\}(\s*\^\s*\{?[0-9]\}?)?$")
PROSE_UNIT = re.compile(
    r"(?<=[0-9}])\s+([A-Za-z]{2,}(?:[ /-][A-Za-z]+){0,2})$|(?<=[0-9]) ?((?:cm|mm|km|m)\^\{?[23]\}?)$"
    r"|(?<=[0-9])((?:km|cm|mm|kg|ml|mph|ft|lbs?)|[a-z]{4,})$"
)
BASE = re.compile(r"([0-9A-Fa-f]+)_\{?([0-9]+)\}?")
MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*")
SET_BUILDER = re.compile(r"\\\{ *[A-Za-z](?: *\\in *\\mathbb *\{?R\}?)? *(?:\\mid|\||:) *(.*[<>=lgn].*)\\\}")
REALS = re.compile(r"\\mathbb *(?:R|\{R\}) *")
LONE_EQUALS = re.compile(r"^=\s*(?=[^=]+$)")
INNER_DOLLAR = re.compile(r"(?<=[0-9}])\$(?= )")
GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
# Words that make another value of the number or formula behind them, or before them.
CHANGED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|anything but|other than|(?:less|more|fewer|greater|larger|smaller) than"
    r"|at (?:least|most)|up to|about|around|approximately|roughly|nearly|almost|minus|negative|under|above|below|twice"
    r"|double|half of|root of|cannot)"
    r"|n't)(?:\s++(?:be|equal|equals|to|the))*+[\s*$(\\]*+$",
    re.IGNORECASE,
)
SCALE = r"hundreds?|thousands?|millions?|billions?|trillions?|dozens?|mod|modulo|factorial|squared|cubed|halves|thirds"
CHANGED_BEHIND = re.compile(
    r"[\s*$)}\]\\-]{0,20}+(?:text *\{ *)?(?:(?:" + SCALE + r"|plus|minus|times|divided|or (?:more|less|fewer|so)"
    r"|and (?:a |one )?(?:half|third|quarter)|(?:is|was)(?:n't| not| wrong| incorrect| false)|pi|sin|cos|tan|log|ln)\b"
    r"|isn't|wasn't)",
    re.IGNORECASE,
)
# Signs that change a number behind them. What may be behind one: a short unit, closing signs, then a word or nothing.
SIGN_BEFORE = re.compile("[<>~!\u00ac\u2010-\u2014\u2200-\u22ff\uff0d]\\s?$|[0-9][a-z] ?[-+*/] ?$")
SHORT_UNITS = (
    "(?:km|cm|mm|m|ft|in)(?:[\u00b2\u00b3]|\\^[23])"
    "|km|cm|mm|m|kg|mg|g|lbs?|oz|ft|in|ml|l|hrs?|h|mins?|s|mph|am|pm|st|nd|rd|th|cents?|dollars?"
)
NO_SIGN = "\u00ac-\u00af\u00b1-\u2012\u2015-\u2017\u2020-\u209f\u20d0-\U0010ffff"
BEHIND = re.compile(
    rf"(?:{SHORT_UNITS})?(?![A-Za-z0-9])-?(?![0-9+/^<>~|&@#_'{NO_SIGN}])(?:[\s*$)}}\]\"]|\\[,;: ])*+"
    rf"(?!-(?![ -]*[A-Za-z]{{2}})|[+/^<>~|&{NO_SIGN}]|(?<=[*])[A-Za-z0-9(]|[A-Zb-z](?![A-Za-z.]))"
)
BESIDE = 60
NO_UNIT = re.compile(
    r"\b(?:"
    + SCALE
    + r"|plus|minus|times|divided|or|and|not|is|was|wrong|pi|sin|cos|tan|cot|sec|csc|log|ln|exp"
    + r"|if|right|even|odd|percent)\b",
    re.IGNORECASE,
)
WORDS = {"$": "dollar", "\u20ac": "euro", "\u00a3": "pound"}


class Unreadable(Exception):
    """A final answer that is not a formula we can read."""


@dataclass(frozen=True, kw_only=True)
class FinalAnswer:
    """One final answer."""

    value: str
    """Formula or text, in one spelling."""
    unit: str = ""
    """In lower case, singular; empty for none."""
    percent: bool = False
    """A percent sign follows."""
    base: str = ""
    """The base written below the number; empty for none."""


def undoubled(text: str) -> str:
    r"""`\\frac`, which was escaped twice, becomes `\frac`."""
    return DOUBLED.sub(lambda match: "\\", text) if "\\\\" in text else text


@lru_cache(maxsize=4096)
def read_answer(written: str) -> FinalAnswer:
    """Value and surroundings of a final answer. A group shares its gold answer, which the cache reads only once."""
    written = undoubled(written)
    for pattern, spelling in SPELLINGS if written.isascii() else SIGNS + SPELLINGS:
        written = pattern.sub(spelling, written)
    value = MEMBER.sub("", WRAPPING.sub("", written))
    value = "(-\\infty,\\infty)" if REALS.fullmatch(value) else SET_BUILDER.sub(r"\1", value)
    value = LONE_EQUALS.sub("", value)
    value = INNER_DOLLAR.sub("", value)
    value, percent = strip(PERCENT, value)
    value, degrees = strip(DEGREES, value)
    value, unit = take_unit(value)
    if currency := CURRENCY.match(value):
        unit = unit or WORDS[currency[2]]
        value = currency[1] + value[currency.end() :]
    base = BASE.fullmatch(value.replace(" ", ""))
    if GROUPED.fullmatch(value):
        value = value.replace(",", "")
    return FinalAnswer(
        value=base[1] if base else " ".join(value.split()),
        unit="degree" if degrees else unit,
        percent=percent,
        base=base[2] if base else "",
    )


def strip(pattern: re.Pattern[str], value: str) -> tuple[str, bool]:
    """Remove what the pattern finds at the end; also whether it found something."""
    shorter = pattern.sub("", value)
    return (shorter, True) if shorter and shorter != value else (value, False)


def take_unit(value: str) -> tuple[str, str]:
    """The value without the unit behind its number, and the unit."""
    for pattern in (TEXT_UNIT, PROSE_UNIT):
        match = pattern.search(value)
        if match and not NO_UNIT.search(match[0]):
            unit = " ".join("".join(group or "" for group in match.groups()).lower().split())
            return value[: match.start()].rstrip(), unit.removesuffix("s").replace("{", "").replace("}", "")
    return value, ""
