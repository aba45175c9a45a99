r"""A final answer in one spelling: `\dfrac12`, `1 \over 2` and `1/2` with a fraction sign are all `\frac{1}{2}`.

The spelling removes what only changes the look (sizes, colors, spacing, bold type) and gives every sign one LaTeX name.
The unit, the percent sign and the base beside the value are taken off and kept as fields. Nothing is computed here, and
nothing is dropped that could change the value.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from actor.verifiers.words_beside import take_unit

DOUBLED = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|boxed|fbox|text|left|right|pi|begin|end|cdot|times|div|in|cup|infty|le|ge|leq"
    r"|geq|neq?|ldots|circ|pm|sin|cos|tan|ln|log|theta|alpha|beta|overline|mathbb|quad)(?![A-Za-z])|[{}])"
)
# `\b` and `\f` at the start of a command, which whatever wrote the text read as one character.
CONTROL = re.compile("[\b\f](?=oxed|egin|inom|rac)")
SIGNS = str.maketrans(
    dict.fromkeys(map(chr, (0x2212, *range(0x2010, 0x2015), 0xFF0D)), "-")
    | dict.fromkeys(map(chr, (0xA0, *range(0x2002, 0x200C), 0x202F, 0x2062, 0x3000)), " ")
    | {"\u2018": "'", "\u2019": "'", "\u2032": "'", "\u201c": '"', "\u201d": '"', "\u2033": '"'}
    | {"\uff0c": ",", "\u3001": ",", "\uff1a": ":", "\uff1b": ";", "\uff08": "(", "\uff09": ")", "\uff1d": "="}
    | {"\uff0b": "+", "\u3002": ".", "\u2044": "/", "\u2215": "/", "\u2236": ":", "\u2223": "|", "\u2217": "*"}
    | {
        sign: f"\\{name} "
        for sign, name in {
            "\u2260": "ne",
            "\u2248": "approx",
            "\u2261": "equiv",
            "\u2264": "le",
            "\u2265": "ge",
            "\u2a7d": "le",
            "\u2a7e": "ge",
            "\u00d7": "times",
            "\u00f7": "div",
            "\u00b7": "cdot",
            "\u22c5": "cdot",
            "\u2219": "cdot",
            "\u00b1": "pm",
            "\u221e": "infty",
            "\u222a": "cup",
            "\u2229": "cap",
            "\u2208": "in",
            "\u2205": "emptyset",
            "\u2216": "setminus",
            "\u2220": "angle",
            "\u2228": "lor",
            "\u2227": "land",
            "\u2026": "ldots",
            "\u27e8": "langle",
            "\u27e9": "rangle",
            "\u230a": "lfloor",
            "\u230b": "rfloor",
            "\u2308": "lceil",
            "\u2309": "rceil",
            "\u03c0": "pi",
            "\u03b1": "alpha",
            "\u03b2": "beta",
            "\u03b3": "gamma",
            "\u03b4": "delta",
            "\u03b8": "theta",
            "\u03bb": "lambda",
            "\u03bc": "mu",
            "\u03c3": "sigma",
            "\u03c6": "phi",
            "\u03c9": "omega",
        }.items()
    }
    | {"\u00b0": "^\\circ", "\u211d": "\\mathbb{R}"}
)
ROOT = re.compile("\u221a\\s*(?:\\(((?:[^()]|\\([^()]*\\))*)\\)|([0-9]+(?:\\.[0-9]+)?|[A-Za-z]))")
ONE_SIGN_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f]+")
LOWERED = re.compile("[\u2080-\u208b]+")
COMMAND = re.compile(r"\\([A-Za-z]+)(?: +(?=\{))?")
# Commands that change only the look, that set text or bold type, and that have another name.
LOOKS = (
    "left right middle big bigl bigr Big Bigl Bigr bigg biggl biggr Bigg displaystyle textstyle scriptstyle limits"
    " nolimits large Large LARGE huge Huge small normalsize bf rm it sf boldmath ensuremath checkmark therefore"
)
TO_TEXT = "mbox textbf textit textrm textnormal textsf texttt textup mathrm mathsf mathit operatorname emph hbox"
BOLD = "mathbf boldsymbol bm pmb underline vec hat widehat overrightarrow mathnormal"
OTHER_NAMES = (
    r"dfrac \frac tfrac \frac cfrac \frac dbinom \binom tbinom \binom geq \ge geqslant \ge leq \le leqslant \le neq \ne"
    r" approxeq \approx simeq \approx doteq \approx varnothing \emptyset lbrace \{ rbrace \} dots \ldots cdots \ldots"
    r" lbrack [ rbrack ] langle ( rangle ) lVert | rVert | lvert | rvert | vert | mid | backslash \setminus"
    r" smallsetminus \setminus wedge \land vee \lor ast * colon : varphi \phi vartheta \theta varepsilon \epsilon"
    r" nicefrac \frac sfrac \frac enspace ~ degree ^\circ textdollar $ equiv ="
)
NAMES = OTHER_NAMES.split()
RENAMED = (
    dict.fromkeys(LOOKS.split(), "")
    | dict.fromkeys(TO_TEXT.split(), "\\text")
    | dict.fromkeys(BOLD.split(), "\\bold")
    | dict(zip(NAMES[::2], NAMES[1::2], strict=True))
    | {"pounds": "\u00a3"}
)
FUNCTION = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp"
SPELLINGS = [
    (re.compile(r"\\(?:left|right) *\."), ""),
    (re.compile(r"\\(?:textcolor|color|colorbox|[hv]?phantom|hspace|vspace)\*? *\{[^{}]*\}"), ""),
    (re.compile(r",\\! *|\{,\}(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), "."),
    (re.compile(r"\.\.\.+"), r"\\ldots "),
    (re.compile(r"\\q?quad"), " "),
    (COMMAND, lambda match: RENAMED.get(match[1], match[0])),
    (re.compile(r"\\\{ *\\\}"), r"\\emptyset "),
    (re.compile(r"\\bold\{((?:[^{}]|\{[^{}]*\})*)\}"), r"\1"),
    (re.compile(r"\\text\{ *([ei]) *\}"), r"\1"),
    (re.compile(rf"\\text\{{ *({FUNCTION}) *\}}"), r"\\\1 "),
    (re.compile(r"\\begin\{array\} *\{[clr| ]*\}"), r"\\begin{matrix}"),
    (re.compile(r"\\end\{array\}"), r"\\end{matrix}"),
    (re.compile(r"(?<=\\\\)\[[0-9.]+ *[a-z]{2}\]"), ""),
    (re.compile(r"!=|\\not *="), r"\\ne "),
    (re.compile(r"\\ne(?![A-Za-z])"), r"\\ne "),
    (re.compile(rf"(?<![\\A-Za-z])(pi|{FUNCTION})(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])(?:inf(?:inity|ty)?|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<![\\A-Za-z])[dt]?(frac|sqrt)(?= *\{)"), r"\\\1"),
    (re.compile(r"(?<=[)\]}]) *(?:U|cup) *(?=[(\[\\])"), r"\\cup "),
    (re.compile(r"(?<![\\A-Za-z])sqrt *\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\text *\{\s*,?\s*(and|or)\s*\}| *\\& *"), lambda match: f" {match[1] or 'and'} "),
    (re.compile(r"\\text *\{ *,? *(and|or) +([^{}]*)\}"), r" \1 \2"),
    (re.compile(r"(?<!\\)\\\|"), "|"),
    (re.compile("[\r\n\t]"), " "),
    (re.compile(r"(?<!\\)\\(?:[!,;:]|(?= ))"), ""),
    (re.compile("~"), " "),
    (re.compile(r"(?<=[0-9A-Za-z)}]) ?\*\* ?(?=[-0-9A-Za-z({])"), "^"),
    (re.compile(r"\^ ?\(((?:[^()]|\([^()]*\))*)\)"), r"^{\1}"),
    (re.compile(r"\^ ?-([0-9]+|[A-Za-z])"), r"^{-\1}"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\over(?![A-Za-z])([^{}]*)$"), r"\\frac{\1\3}{\2\4}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(frac|binom) *([0-9])"), r"\\\1{\2}"),
    (re.compile(r"(\\(?:frac|binom) *\{[^{}]*\}) *([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt *(\[[^\[\]]*\])? *([0-9A-Za-z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"(?<![\^_0-9A-Za-z} ])([0-9]+)\{([0-9]+)\}"), r"\1\2"),
]
WRAPPING = re.compile(r"^(?:\*\*|`|\$|\\\(|\\\[|\s)+|(?:\*\*|`|(?<!\\)\$|\\\)|\\\]|[\s.,;:])+$")
PERCENT = re.compile(r"\s*(?:\\?%|percent|pct|\\text\{ *(?:percent|\\?%) *\})$", re.IGNORECASE)
DEGREES = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\text\{ *degrees? *\}|degrees?)(?:\s*(?:\\text\{)? *([CF]) *\}?)?$", re.IGNORECASE
)
DEGREE = re.compile(r"\s*\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?")
ANGLE = re.compile(r"([0-9]+(?:\.[0-9]+)?|[A-Za-z])\s*\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?")
OF_AN_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
NUMERALS = "two three four five six seven eight nine ten eleven twelve"
BASES = {word: str(number) for number, word in enumerate(NUMERALS.split(), 2)}
BASE = re.compile(r"\(?([0-9A-Fa-f]+)\)?_\{?(?:([0-9]+)|\\text\{([a-z]+)\})\}?")
IN_BASE = re.compile(r"(?<=[0-9]) *(?:\\text\{ *)?\(?(?:in )?base *\}?[- ]*([0-9]+)\)?\}?$")
MODULO = re.compile(r"\s*\(?\\pmod *\{?([0-9a-z]+)\}?\)?$|\s*\((?:\\bmod|mod|\\text\{ *mod *\}) *([0-9a-z]+)\)$")
MEMBER = re.compile(r"^[A-Za-z]\s*(?:\\in(?![A-Za-z])|=(?=\s*\\\{))\s*")
SET_BUILDER = re.compile(r"\\\{ *[A-Za-z](?: *\\in *\\mathbb *\{?R\}?)? *(?:\||:) *(.*[<>=lgn].*)\\\}")
REALS = re.compile(
    r"\\mathbb *(?:R|\{R\}) *|(?:\\text\{)? *(?:all|the set of(?: all)?) real numbers *\}?", re.IGNORECASE
)
REALS_BUT = re.compile(
    r"(?:\\text\{)? *all real numbers,? (?:except|other than|but)(?: for)? *\}? *(?:[a-z] *= *)?([^{}]+)", re.IGNORECASE
)
NESTED = re.compile(r"(?:Matrix\()?\[ *(\[[^\[\]]+\](?: *, *\[[^\[\]]+\])*) *\]\)?")
NEXT_ROW, ROW_END = re.compile(r"\] *& *\["), r"\\\\"
NO_SOLUTION = re.compile(
    r"(?:\\text\{)? *(?:(?:there (?:is|are) )?no (?:real |integer )?solutions?|(?:the )?(?:empty|null) set) *\.?\}?",
    re.IGNORECASE,
)
LONE_EQUALS = re.compile(r"^=\s*(?=[^=]+$)")
INNER_DOLLAR = re.compile(r"(?<=[0-9}])\$(?= )")
GROUPED = re.compile(r"-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
WHOLE_TEXT = re.compile(r"\\text\{ *([^{}]*[0-9][^{}]*|\(?[A-Z]\)?(?: *,(?: *and)? *\(?[A-Z]\)?)*) *\}")
SAID_BEFORE = re.compile(
    r"^\\text\{(?![^{}]*\b(?:not|never|about|less|more)\b)[^{}]*(?:\b(?:is|are|equals)|[:=]) *\} *(?=[^ ])",
    re.IGNORECASE,
)
THE_ANSWER_IS = re.compile(
    r"\\text\{ *(?:the )?(?:final |correct )?(?:answer|option|choice) is:? *([^{}]+)\}", re.IGNORECASE
)
TO = re.compile(r"([0-9.]+) *(?:\\text\{ *to *\}|to) *([0-9.]+)")
OUTWARD = re.compile(r"([\[\]])([^\[\](),]+),([^\[\](),]+)([\[\]])")


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
    r"""`\\frac`, which was escaped twice, and one that was unescaped once too often become `\frac`."""
    text = CONTROL.sub(lambda match: "\\b" if match[0] == "\b" else "\\f", text)
    return DOUBLED.sub(lambda match: "\\", text) if "\\\\" in text else text


@lru_cache(maxsize=4096)
def read_answer(written: str) -> FinalAnswer:
    """Value and surroundings of a final answer. A group shares its gold answer, which the cache reads only once."""
    value = one_spelling(undoubled(written))
    value = MEMBER.sub("", WRAPPING.sub("", value))
    value = set_by_words(INNER_DOLLAR.sub("", LONE_EQUALS.sub("", without_wrapping(value))))
    value, modulus = take(MODULO, value)
    value, percent = strip(PERCENT, value)
    value, degree = take_degrees(value)
    value, base = take_base(value)
    value, unit = take_unit(value)
    if GROUPED.fullmatch(value):
        value = value.replace(",", "")
    return FinalAnswer(value=" ".join(value.split()), unit=degree or unit or modulus, percent=percent, base=base)


def one_spelling(written: str) -> str:
    written = in_ascii(written)
    for pattern, spelling in SPELLINGS:
        written = pattern.sub(spelling, written)
    return written


def in_ascii(written: str) -> str:
    """Signs such as a root or a raised digit as LaTeX writes them."""
    if written.isascii():
        return written
    written = ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", written)
    written = ONE_SIGN_FRACTION.sub(lambda match: f"\\frac{{{plain(match)}}}".replace("\u2044", "}{"), written)
    written = RAISED.sub(lambda match: f"^{{{plain(match)}}}", written)
    return LOWERED.sub(lambda match: f"_{{{plain(match)}}}", written).translate(SIGNS)


def plain(match: re.Match[str]) -> str:
    """The digits and signs of which Unicode has small ones."""
    return unicodedata.normalize("NFKC", match[0]).replace("\u2212", "-")


def without_wrapping(value: str) -> str:
    r"""`{5}`, `\text{5 cm}` and `\text{The area is } 5 cm` are `5` and `5 cm`."""
    value = SAID_BEFORE.sub("", value)
    value = THE_ANSWER_IS.sub(r"\\text{\1}", value)
    if whole := WHOLE_TEXT.fullmatch(value):
        return whole[1].strip()
    while value.startswith("{") and value != "{}" and "," not in value and closing(value) == len(value) - 1:
        value = value[1:-1].strip()
    return value


def closing(value: str) -> int:
    """Where the brace that opens a value is closed; -1 if it is not."""
    depth = 0
    for place, sign in enumerate(value):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return place
    return -1


def set_by_words(value: str) -> str:
    """A set that is said in words, by its condition or with brackets that open outward, as others write it."""
    if REALS.fullmatch(value):
        return "(-\\infty,\\infty)"
    if excepted := REALS_BUT.fullmatch(value):
        return f"\\mathbb{{R}} \\setminus \\{{{excepted[1]}\\}}"
    if rows := NESTED.fullmatch(value):
        cells = rows[1].strip("[] ").replace(",", "&")
        return f"\\begin{{matrix}}{NEXT_ROW.sub(ROW_END, cells)}\\end{{matrix}}"
    if NO_SOLUTION.fullmatch(value):
        return "\\emptyset"
    if ratio := TO.fullmatch(value):
        return f"{ratio[1]}:{ratio[2]}"
    value = OUTWARD.sub(inward, value) if value[:1] == "]" or value[-1:] == "[" else value
    return SET_BUILDER.sub(r"\1", value)


def inward(match: re.Match[str]) -> str:
    """`]1,2]` is `(1,2]`."""
    return f"{'(' if match[1] == ']' else '['}{match[2]},{match[3]}{')' if match[4] == '[' else ']'}"


def strip(pattern: re.Pattern[str], value: str) -> tuple[str, bool]:
    """Remove what the pattern finds at the end; also whether it found something."""
    shorter = pattern.sub("", value)
    return (shorter, True) if shorter and shorter != value else (value, False)


def take(pattern: re.Pattern[str], value: str) -> tuple[str, str]:
    """The value without the modulus behind it, and that modulus."""
    match = pattern.search(value)
    return (value[: match.start()], "mod " + (match[1] or match[2])) if match and match.start() else (value, "")


def take_degrees(value: str) -> tuple[str, str]:
    """The value without its signs of degrees, and the unit; below a function such as sine they are numbers."""
    if OF_AN_ANGLE.search(value):
        return ANGLE.sub(r"(\\frac{\1\\pi}{180})", value), ""
    match = DEGREES.search(value)
    if not match or not match.start():
        return value, ""
    return DEGREE.sub(" ", value[: match.start()]), "degree" + (f" {match[1].lower()}" if match[1] else "")


def take_base(value: str) -> tuple[str, str]:
    """The digits and the base below or behind them."""
    base = BASE.fullmatch(value.replace(" ", ""))
    if base and (base[2] or base[3] in BASES):
        return base[1], base[2] or BASES[base[3]]
    base = IN_BASE.search(value)
    return (value[: base.start()], base[1]) if base else (value, "")
