r"""Takes a final answer apart: parts of a list, sides of an equation, names and values, cells of a matrix, intervals.

An inequality is read as the intervals that it describes. `-2 \le x < 7` is [-2,7) for x. `x < 1 or x > 3` is two
intervals, and so is `|x| > 1`. `x > 1 and x < 3` is (1,3). Only one letter between bounds is read; anything that must
be solved first is left to math_equality.py. Cells of sums and products of matrices are written out, not computed here.
"""

import re
from itertools import pairwise
from typing import Any

from actor.verifiers.formula import read_formula
from actor.verifiers.formula_value import Unsure, Values

MAX_CHARS = 500
EQUALS = re.compile(r"(?<![<>!:\\])=")
GREEK = r"\\(?:theta|alpha|beta|gamma|delta|lambda|mu|phi|omega|sigma|rho|tau|epsilon|Delta)"
ONE_NAME = (
    rf"(?:(?:(?:\\Delta *)?(?:[A-Z]{{2,4}}|[A-Za-z]|{GREEK})|m? *\\angle *[A-Z0-9]{{1,3}})(?:\^\{{-1\}})?'{{0,2}}"
    r"(?:_(?:\{[0-9A-Za-z,]+\}|[0-9A-Za-z]))?'{0,2}"
    r"(?:\((?:[A-Za-z](?: *, *[A-Za-z])?|-?[0-9]{1,4})\))?|\\overline\{[A-Z]{2}\}"
    r"|[f-hPQ](?:\^\{-1\})?\((?:[^()=]{1,20}|[f-h]\([^()=]{1,20}\))\)|(?:P|E|\\text\{(?:P|Pr|E)\}|\\Pr)\([^()]{1,40}\)"
    rf"|\\(?:sin|cos|tan|cot|sec|csc) *(?:\(?[A-Za-z]\)?|{GREEK}|\\angle *[A-Z]{{1,3}})"
    r"|\\frac\{[A-Za-z]{1,2}\}\{[A-Za-z]{1,2}\}"
    r"|\|(?:[A-Z]{1,2}|[zwuvab])\||\\text\{ *(?!(?:not|never|about|less|more)\b)[A-Za-z]{3,} *\})"
)
NAME = re.compile(rf"{ONE_NAME}(?: *[+:] *{ONE_NAME})*+|\( *[A-Za-z](?: *, *(?:[A-Za-z]|{GREEK}))+ *\)")
# What was asked for, as `a^2+b^2` in `a^2+b^2 = 5`; behind a gold answer's it is an equation in its own right.
POWER = r"[a-z](?:\^(?:[2-9]|\{[2-9]\}))?"
ASKED_FOR = re.compile(rf"(?=[^a-z]*([a-z]))(?=.*(?!\1)[a-z]){POWER}(?: *[-+]? *{POWER})+")
TUPLE_OF_NAMES = re.compile(r"\(([^()=]*)\) *= *\(([^()=]*)\)")
# In these the letters and their values have one order. In which order (m,b) or (r,\theta) stand, the question says.
ALPHABETIC_TUPLE = re.compile(r"\( *[xyz](?: *, *[xyz])+ *\)|\( *[a-d](?: *, *[a-d])+ *\)")
COORDINATES = re.compile(r"[xyz](?: *\+ *[xyz])+")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
ROW_END = re.compile(r"(?:\\\\)+")
COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
# Letters without a vowel are a product, not a word; so are a, b and c.
PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{3}|[a-c]{3}|(?![A-Z][a-z]+$)(?=.*[a-z])[B-DF-HJ-NP-TV-Zb-df-hj-np-tv-z]{3}")
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "oo"}
WORDS_AND_NUMBERS = re.compile(
    r"\\?[a-z]+(?:[+#]+(?! *[a-z0-9]))?|[^\W\d_a-z]+|-?[0-9]+(?:\.[0-9]+)?"
    r"|[+*/^=<>|!]|:(?=[0-9])|(?<![a-z])-|-(?![a-z])"
)
ARTICLE = re.compile(r"^ *(?:an?|the) +(?=[a-z]{3})|\band\b")
JOINED = re.compile(r"\s*\b(?:and|or)\b\s*|\s*\\(?:lor|land)(?![A-Za-z])\s*")
LISTED = re.compile(r";|\b(?:and|or)\b|\\(?:lor|land|pm|mp)(?![A-Za-z])")
SIGN_OF_BOTH = re.compile(r"\\([pm])[mp](?![A-Za-z])")
# LaTeX does not print bare braces.
BRACED = re.compile(r"(?<!\\)\{[^{}]*,[^{}]*\}")
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-df-hj-z](?![A-Za-z])|[A-Z]{2,3}(?![A-Za-z])")
NOT_IN_A_NAME = re.compile(r"_\{[0-9]+(?:,[0-9]+)+\}|[{}\s]")
OPEN, CLOSE = "([{", ")]}"
RELATION = re.compile(r"\\(?:le|ge|lt|gt)(?![A-Za-z])|[<>]=?")
LETTER = re.compile(r"[A-Za-z](?:\([a-z]\))?|\\(?:theta|alpha|beta|lambda|mu)")
INTERVALS_JOINED = re.compile(r",?\s*\bor\b|\\(?:cup|lor)(?![A-Za-z])")
AND = re.compile(r"\s*(,?\s*\band\b|\\land(?![A-Za-z])|,)\s*")
NOT_EQUAL = re.compile(rf"({LETTER.pattern}) *\\ne(?![A-Za-z])(.*)")
BOUNDED = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne|setminus)(?![A-Za-z])|- *\\\{")
WITHOUT = re.compile(r"(?:\\mathbb *\{?R\}?|\(-\\infty *, *\+?\\infty *\)) *(?:\\setminus|-) *\\\{(.*)\\\}")
ABSOLUTE = re.compile(rf"\| *({LETTER.pattern}) *(?:([-+])([^|<>]+))?\|")
ENDS = re.compile(r"([\[(])(.*),(.*)([\])])")
VALUES = Values()
ANY_LETTER = "any"
PIECE = re.compile(r"\\begin\{([pbB]?)matrix\}(.*?)\\end\{\1matrix\}")
MATRIX_TERM = re.compile(r"([-+]?)(.*?)((?:(?:\\cdot|\\times|\*)? *<[0-9]+> *)+)(?:/ *([0-9A-Za-z]+))?")
ROWS = re.compile(r"\\begin\{(?:cases|aligned|align\*?|gathered)\}(.*)\\end\{(?:cases|aligned|align\*?|gathered)\}")
Rows = list[list[str]]


def one_name(given: str, gold: str) -> bool:
    """Whether two names are one: `x_1` and `x_{1}`, `y` and `f(x)`."""
    names = {NOT_IN_A_NAME.sub("", given), NOT_IN_A_NAME.sub("", gold)}
    return len(names) == 1 or names == {"y", "f(x)"}


def is_beside(side: str, gold: str) -> bool:
    """Whether a middle side has letters that the gold answer does not have, so that it has no value."""
    return not is_text(side) and bool(set(VARIABLE.findall(side)) - set(VARIABLE.findall(gold)))


def named_parts(parts: list[str]) -> tuple[list[str], list[str]]:
    """The names in `x = 1, y = 2`, and the values. One name before several values belongs to all of them."""
    pairs = [sides(part) for part in parts]
    named = [len(pair) == 2 and bool(NAME.fullmatch(pair[0])) for pair in pairs]
    if all(named) or (named[0] and all(len(pair) == 1 for pair in pairs[1:])):
        return [NOT_IN_A_NAME.sub("", pair[0]) for pair in pairs if len(pair) == 2], [pair[-1] for pair in pairs]
    return [], parts


def ascending(names: list[str], values: list[str]) -> bool:
    """Whether there is a name for each value, in alphabetical order."""
    return len(names) == len(values) > 1 and all(one < next_one for one, next_one in pairwise(names))


def out_of_order(name: str) -> bool:
    """Whether a tuple of names such as (y,x) has them in another order than their values."""
    letters = re.findall("[a-z]", name)
    return bool(ALPHABETIC_TUPLE.fullmatch(name)) and letters != sorted(letters)


def matrix_rows(inside: str) -> Rows:
    """The cells. A row end after the last row does not start another row."""
    rows = [row.split("&") for row in ROW_END.split(inside)]
    return rows if "".join(rows[-1]).strip() else rows[:-1]


def matrix(value: str) -> Rows | None:
    """The cells of a matrix, or of a sum of multiples and products of some; None for anything else."""
    if "matrix}" not in value:
        return None
    found = [matrix_rows(piece[2]) for piece in PIECE.finditer(value)]
    places = iter(range(len(found)))
    terms = signed_terms(PIECE.sub(lambda piece: f"<{next(places)}>", value))
    total: Rows | None = None
    for written in terms:
        term = MATRIX_TERM.fullmatch(re.sub(r"[(\[] *(<[0-9]+>) *[)\]]", r"\1", written))
        cells = product([found[int(place)] for place in re.findall(r"<([0-9]+)>", term[3])]) if term else None
        if not term or cells is None or (total and shape(total) != shape(cells)):
            return None
        factor = term[2].strip().removesuffix("\\cdot").removesuffix("\\times").removesuffix("*").strip()
        if factor or term[4] or term[1] == "-":
            scale = f"{term[1]}({factor or 1})" + (f"/({term[4]})" if term[4] else "")
            cells = [[f"({scale})*({cell})" for cell in row] for row in cells]
        total = (
            cells
            if total is None
            else [
                [f"({one})+({other})" for one, other in zip(*rows, strict=True)]
                for rows in zip(total, cells, strict=True)
            ]
        )
    return total


def signed_terms(value: str) -> list[str]:
    """The terms of a sum, each with its sign."""
    terms, depth = [""], 0
    for sign in value:
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth == 0 and sign in "+-" and terms[-1].strip():
            terms.append("")
        terms[-1] += sign
    return [term.strip() for term in terms]


def product(factors: list[Rows]) -> Rows | None:
    """The product of matrices; None where their shapes do not fit."""
    result = factors[0]
    for factor in factors[1:]:
        # Each factor doubles what is written in a cell.
        if any(len(cell) > MAX_CHARS for row in result for cell in row):
            return None
        if any(len(row) != len(factor) for row in result) or len({len(row) for row in factor}) != 1:
            return None
        columns = list(zip(*factor, strict=True))
        result = [
            ["+".join(f"({one})*({other})" for one, other in zip(row, column, strict=True)) for column in columns]
            for row in result
        ]
    return result


def shape(rows: Rows) -> list[int]:
    return [len(row) for row in rows]


def is_text(value: str) -> bool:
    """Whether it contains words that are not the names of functions."""
    outside = TEXT.sub(" ", value)
    if TEXT.search(value):
        return True
    words = WORD.findall(COMMAND.sub(" ", outside))
    return any(
        word not in FUNCTIONS and word not in ("and", "or") and len(word) > 2 and not PRODUCT.fullmatch(word)
        for word in words
    )


def words(value: str) -> str:
    """The words, numbers and signs of a text. Case, brackets, an article before it and `and` do not count."""
    plain = TEXT.sub(r" \1 ", value).replace("\\#", "#").lower()
    return " ".join(WORDS_AND_NUMBERS.findall(ARTICLE.sub(" ", plain)))


def split(value: str, separator: str) -> list[str]:
    """At a separator outside brackets; `\\pm` gives two parts."""
    if separator not in value and not (separator == "," and LISTED.search(value)):
        return [value]
    parts: list[str] = []
    depth = start = place = 0
    value = value[1:-1] if BRACED.fullmatch(value) else value
    while place < len(value):
        depth += (value[place] in OPEN) - (value[place] in CLOSE)
        if depth == 0 and (value.startswith(separator, place) or (separator == "," and value[place] == ";")):
            parts.append(value[start:place])
            start = place = place + len(separator)
            continue
        place += 1
    parts.append(value[start:])
    if separator == ",":
        parts = [piece for part in parts for piece in JOINED.split(part)]
        parts = parts[:-2] + parts[-1:] if len(parts) > 2 and not parts[-2].strip() else parts
        parts = [both for part in parts for both in plus_and_minus(part)]
    return parts


def plus_and_minus(value: str) -> list[str]:
    r"""Both values of one `\pm`; `\mp` has the other sign."""
    signs = SIGN_OF_BOTH.findall(value)
    if not signs or signs.count("p") > 1:
        return [value]
    upper = SIGN_OF_BOTH.sub(lambda sign: "+" if sign[1] == "p" else "-", value)
    return [upper.lstrip("+ "), SIGN_OF_BOTH.sub(lambda sign: "-" if sign[1] == "p" else "+", value).lstrip("+ ")]


def brackets(value: str) -> tuple[str, str]:
    """The pair of brackets around the whole value, as `(]`, and what is inside; no ends if there is no such pair."""
    if value.startswith("\\{") and value.endswith("\\}"):
        return "\\{", value[2:-2]
    if value[:1] in ("(", "[") and value[-1:] in (")", "]") and closes_at_the_end(value):
        return value[0] + value[-1], value[1:-1]
    return "", value


def closes_at_the_end(value: str) -> bool:
    """Whether the bracket that opens a value closes where it ends: not so in `(1,2),(3,4)`."""
    depth = 0
    for place, sign in enumerate(value):
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth == 0:
            return place == len(value) - 1
    return False


def sides(value: str) -> list[str]:
    """The sides of an equation. An equals sign inside brackets does not separate two sides."""
    found: list[str] = []
    start = 0
    for sign in EQUALS.finditer(value):
        between = value[start : sign.start()]
        if sum(between.count(bracket) for bracket in OPEN) <= sum(between.count(bracket) for bracket in CLOSE):
            found.append(between.strip())
            start = sign.end()
    return [*found, value[start:].strip()]


def equations_of(value: str) -> str:
    r"""The rows of a `cases` environment as a list, if each is an equation; a function given case by case stays."""
    rows = ROWS.fullmatch(value)
    parts = [row.replace("&", "").strip(" ,;.") for row in ROW_END.split(rows[1])] if rows else []
    parts = [part for part in parts if part]
    return ", ".join(parts) if parts and all(EQUALS.search(part) and not is_text(part) for part in parts) else value


def points(value: str) -> list[dict[str, str]]:
    """`x=1, y=2; x=3, y=4` as one assignment for each point; none if it is anything else."""
    pairs = [sides(part) for part in split(value, ",")]
    if not all(len(pair) == 2 and NAME.fullmatch(pair[0]) and pair[1] for pair in pairs):
        return []
    names = [NOT_IN_A_NAME.sub("", pair[0]) for pair in pairs]
    size = len(set(names))
    groups = [range(start, start + size) for start in range(0, len(names), size)]
    if size < 2 or len(names) % size or any(len({names[place] for place in group}) < size for group in groups):
        return []
    return [{names[place]: pairs[place][1] for place in group} for group in groups]


def named_one_by_one(value: str) -> str:
    """`(x,y) = (1,2)` as `x=1, y=2`; any other value as it is."""
    match = TUPLE_OF_NAMES.fullmatch(value)
    names, values = (split(match[1], ","), split(match[2], ",")) if match else ([], [])
    pairs = zip(names, values, strict=len(names) == len(values))
    return ", ".join(f"{name}={part}" for name, part in pairs) if len(names) == len(values) > 1 else value


def as_intervals(value: str) -> tuple[str, list[str]]:
    """The letter of inequalities joined by `or`, and their intervals. Intervals are returned without a letter."""
    parts = [value] if NOT_EQUAL.fullmatch(value) else INTERVALS_JOINED.split(value)
    found = [intervals_of(part.strip()) for part in parts]
    variables = {variable for variable, _ in found}
    if len(variables) != 1 or not all(intervals for _, intervals in found):
        return "", []
    return variables.pop(), [interval for _, intervals in found for interval in intervals]


def intervals_of(value: str) -> tuple[str, list[str]]:
    """The letter and the intervals of inequalities that hold together."""
    if unequal := NOT_EQUAL.fullmatch(value):
        points = re.sub(rf"{re.escape(unequal[1])} *\\ne(?![A-Za-z])", "", unequal[2])
        return unequal[1], all_but(split(points, ","))
    if without := WITHOUT.fullmatch(value):
        return ANY_LETTER, all_but(split(without[1], ","))
    if ABSOLUTE.search(value):
        return on_both_sides(value)
    joined = AND.split(value)
    if len(joined) == 3 and RELATION.search(joined[0]) and RELATION.search(joined[2]):
        return both(joined[0], joined[2], joined[1] != ",")
    variable, interval = as_interval(value)
    return variable, [interval] if interval else []


def all_but(points: list[str]) -> list[str]:
    """The intervals between these points, and beyond them."""
    if len(points) > 1:
        values = [real(point) for point in points]
        if None in values:
            return []
        points = [point for _, point in sorted(zip(values, points, strict=True))]
    return [f"({low},{high})" for low, high in pairwise(["-\\infty ", *points, "\\infty "])]


def real(written: str) -> Any:
    """The value of a formula without letters; None for any other."""
    formula = read_formula(written.strip())
    try:
        value = formula.value(VALUES, {}) if formula and not formula.letters else None
    except Unsure:
        return None
    return value if VALUES.is_real(value) else None


def on_both_sides(value: str) -> tuple[str, list[str]]:
    """`|x-c| < r` as the interval around c; beyond a bound as two."""
    absolute = ABSOLUTE.search(value)
    if not absolute or value.count("|") != 2:
        return "", []
    letter, sign, distance = absolute.groups()
    center = "" if distance is None else f"({distance})" if sign == "-" else f"-({distance})"
    _, interval = as_interval(ABSOLUTE.sub(" x ", value))
    ends = ENDS.fullmatch(interval)
    if not ends:
        return "", []
    opened, low, high, closed = ends.groups()
    mirror = {"[": "]", "(": ")", "]": "[", ")": "("}
    above = high if "infty" in high else f"{center}+({high})"
    below = "-\\infty " if "infty" in high else f"{center}-({high})"
    if "infty" in low:
        return letter, [f"{mirror[closed]}{below},{above}{closed}"]
    return letter, [
        f"{mirror[closed]}{below},{center}-({low}){mirror[opened]}",
        f"{opened}{center}+({low}),{above}{closed}",
    ]


def both(first: str, second: str, by_word: bool) -> tuple[str, list[str]]:
    """Where two one-sided inequalities hold together. With a comma between two that exclude each other, either."""
    (letter, one), (other_letter, other) = as_interval(first), as_interval(second)
    if "-\\infty" in one:
        one, other = other, one
    low, high = ENDS.fullmatch(one), ENDS.fullmatch(other)
    if not low or not high or letter != other_letter or "infty" not in low[3] or "infty" not in high[2]:
        return "", []
    bounds = real(low[2]), real(high[3])
    if None not in bounds and bounds[0] >= bounds[1]:
        return ("", []) if by_word else (letter, [other, one])
    return letter, [f"{low[1]}{low[2]},{high[3]}{high[4]}"]


def as_interval(value: str) -> tuple[str, str]:
    """The letter of an inequality and its interval, or two empty strings. Other text is returned without a letter."""
    signs, sides = RELATION.findall(value), [side.strip() for side in RELATION.split(value)]
    if not signs:
        return "", value
    closed = [sign[1:2] in ("l", "g", "=") and sign not in ("\\lt", "\\gt") for sign in signs]
    upward = [sign[:2] in ("<", "<=", "\\l") for sign in signs]
    if not upward[0]:
        sides, closed = sides[::-1], closed[::-1]
    if len(signs) == 1:
        # One bound: infinity is the other, open.
        below = bool(LETTER.fullmatch(sides[0]))
        sides, closed = (["-\\infty ", *sides], [False, *closed]) if below else ([*sides, "\\infty "], [*closed, False])
    if len(sides) != 3 or len(set(upward)) != 1 or not all(sides) or not LETTER.fullmatch(sides[1]):
        return "", ""
    return sides[1], f"{'[' if closed[0] else '('}{sides[0]},{sides[2]}{']' if closed[1] else ')'}"
