r"""What a final answer is made of: the parts of a list, names and values, brackets, cells of a matrix, intervals.

An inequality is read as the interval it describes: `-2 \le x < 7` is [-2,7) for x, `x < 1 or x > 3` two of them. Only
one letter between bounds is read. `and`, absolute values and what must be solved first are left to math_equality.py.
"""

import re
from itertools import pairwise

MAX_CHARS = 500
EQUALS = re.compile(r"(?<![<>!:\\])=")
ONE_NAME = (
    r"(?:(?:[A-Za-z]|[A-Z]{2,4}|\\(?:theta|alpha|beta|lambda|mu|angle [A-Z]{1,3}))"
    r"(?:_(?:\{[0-9A-Za-z]+\}|[0-9A-Za-z]))?"
    r"(?:\((?:[A-Za-z]|-?[0-9]{1,4})\))?|\\overline\{[A-Z]{2}\}|\\frac\{[A-Za-z]{1,2}\}\{[A-Za-z]{1,2}\}"
    r"|\|[A-Z]{2}\||\\text\{ *(?!(?:not|never|about|less|more)\b)[A-Za-z]{3,} *\})"
)
NAME = re.compile(rf"{ONE_NAME}(?: *[+:] *{ONE_NAME})*+|\( *[A-Za-z](?: *, *[A-Za-z])+ *\)")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
ROW_END = re.compile(r"(?:\\\\)+")
COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
# Letters without a vowel are a product, not a word; so are a, b and c.
PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{3}|[a-c]{3}")
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "oo"}
WORDS_AND_NUMBERS = re.compile(r"[a-z]+[+#]*|-?[0-9]+(?:\.[0-9]+)?|[a-z]+")
JOINED = re.compile(r"\s*\b(?:and|or)\b\s*|\s*\\(?:lor|vee)(?![A-Za-z])\s*")
# LaTeX does not print bare braces.
BRACED = re.compile(r"(?<!\\)\{[^{}]*,[^{}]*\}")
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-df-hj-z](?![A-Za-z])|[A-Z]{2,3}(?![A-Za-z])")
NOT_IN_A_NAME = re.compile(r"[{}\s]")
OPEN, CLOSE = "([{", ")]}"
RELATION = re.compile(r"\\(?:le|ge|lt|gt)(?![A-Za-z])|[<>]=?")
LETTER = re.compile(r"[A-Za-z](?:\([a-z]\))?|\\(?:theta|alpha|beta|lambda|mu)")
INTERVALS_JOINED = re.compile(r",?\s*\bor\b|\\(?:cup|lor|vee)(?![A-Za-z])")


def one_name(given: str, gold: str) -> bool:
    """Whether two names are one: `x_1` and `x_{1}`, `y` and `f(x)`."""
    names = {NOT_IN_A_NAME.sub("", given), NOT_IN_A_NAME.sub("", gold)}
    return len(names) == 1 or names == {"y", "f(x)"}


def is_beside(side: str, gold: str) -> bool:
    """Whether a side in between has letters, other than the gold answer's, that keep it from having a value."""
    return not is_text(side) and bool(set(VARIABLE.findall(side)) - set(VARIABLE.findall(gold)))


def named_parts(parts: list[str]) -> tuple[list[str], list[str]]:
    """The names in `x = 1, y = 2` and the values; one name before several values is for all of them."""
    sides = [[side.strip() for side in EQUALS.split(part)] for part in parts]
    named = [len(pair) == 2 and bool(NAME.fullmatch(pair[0])) for pair in sides]
    if all(named) or (named[0] and all(len(pair) == 1 for pair in sides[1:])):
        return [NOT_IN_A_NAME.sub("", pair[0]) for pair in sides if len(pair) == 2], [pair[-1] for pair in sides]
    return [], parts


def ascending(names: list[str], values: list[str]) -> bool:
    """A name for each value, in the order of the alphabet."""
    return len(names) == len(values) > 1 and all(one < next_one for one, next_one in pairwise(names))


def matrix_rows(inside: str) -> list[list[str]]:
    """The cells; a row end behind the last row opens none."""
    rows = [row.split("&") for row in ROW_END.split(inside)]
    return rows if "".join(rows[-1]).strip() else rows[:-1]


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


def letters(value: str) -> str:
    """Letters and digits of a text, case and brackets aside."""
    return " ".join(WORDS_AND_NUMBERS.findall(TEXT.sub(r" \1 ", value).replace("\\#", "#").lower()))


def split(value: str, separator: str) -> list[str]:
    """At a separator outside brackets; `\\pm` gives two parts."""
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
    """Both values of one `\\pm`."""
    pieces = re.split(r"\\pm(?![A-Za-z])", value)
    return ["+".join(pieces).lstrip("+ "), "-".join(pieces)] if len(pieces) == 2 else [value]


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


def as_intervals(value: str) -> tuple[str, list[str]]:
    """The letter of inequalities joined by `or`, and their intervals. Intervals are returned without a letter."""
    found = [as_interval(part.strip()) for part in INTERVALS_JOINED.split(value)]
    variables = {variable for variable, _ in found}
    return (
        (variables.pop(), [interval for _, interval in found])
        if len(variables) == 1 and all(interval for _, interval in found)
        else ("", [])
    )


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
