r"""Whether a final answer equals the gold one: as text, as a number, by its parts, and only then as a formula.

    numbers     18, 1,234, 18.00, .5, 1/2, \frac12, 1\frac{1}{2}, 3 \times 10^4: exactly, as fractions. A rounded
                decimal is another number than the fraction it stands for
    tuples, intervals, matrices     brackets and parts in order
    lists, sets, unions, \pm        parts in any order, as many here as there
    equations   every side that is no bare name must equal the gold value, so 41=42 is not 42, and 6 \cdot 7 = 42 is
    words       the same words. Their letters are never multiplied with each other
    formulas    math_equality.py, within what may be written there

A percent sign or a base must be in the gold answer too; a unit may be missing on either side, but not differ.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from actor.answer_text import Answer, read_answer

MAX_CHARS = 500
MAX_DIGITS = 1000
INTEGER = re.compile(r"-?[0-9]+")
DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
RATIO = re.compile(r"(-?)(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
MIXED = re.compile(r"(-?)([0-9]+)(?:\\frac\{([0-9]+)\}\{([0-9]+)\}| ([0-9]+)/([0-9]+))")
GROUPED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\\times|\\cdot|\*)10\^(?:\{(-?[0-9]{1,3})\}|([0-9]))")
EQUALS = re.compile(r"(?<![<>!:\\])=")
NAME = re.compile(r"[A-Za-z](?:_\{?[0-9A-Za-z]+\}?)?(?:\([a-z]\))?|\\(?:theta|alpha|beta|lambda|mu|angle [A-Z]{1,3})")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MATRIX = re.compile(r"\\begin\{[pbv]?matrix\}(.*)\\end\{[pbv]?matrix\}")
COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "oo"}
BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")
OPEN, CLOSE = "([{", ")]}"


class Unreadable(Exception):
    """An answer that is no formula we read."""


def equals_gold(answers: list[str], gold: str) -> bool:
    """Whether what was given as the final answer is the gold answer. Unreadable if that cannot be said."""
    if any(len(answer) > MAX_CHARS for answer in answers):
        raise Unreadable(f"A final answer longer than {MAX_CHARS} characters.")
    # Several ways of writing one value are one answer; several values can only be a list.
    if len(answers) > 1 and all(same(read_answer(gold), read_answer(answer)) for answer in answers):
        return True
    return same(read_answer(gold), read_answer(", ".join(answers)))


def same(gold: Answer, given: Answer) -> bool:
    """Surroundings first, then the value."""
    if (given.percent and not gold.percent) or given.base not in ("", gold.base):
        return False
    if given.unit and gold.unit and given.unit != gold.unit:
        return False
    return same_value(gold.value, given.value)


def same_value(gold: str, given: str) -> bool:
    """Two values, taken apart as far as they can be."""
    if squeeze(gold) == squeeze(given):
        return True
    if is_text(gold) or is_text(given):
        return letters(gold) == letters(given) != ""
    for kind in (same_sides, same_list, same_matrix):
        verdict = kind(gold, given)
        if verdict is not None:
            return verdict
    number, other = as_number(gold), as_number(given)
    if number is not None and other is not None:
        return number == other
    from actor.math_equality import formulas_equal

    return formulas_equal(gold, given)


def squeeze(value: str) -> str:
    """Without blanks, but for those between digits: 1 2/3 is not 12/3."""
    return BLANK.sub("", value)


def is_text(value: str) -> bool:
    """Whether words stand in it that are not the names of functions."""
    outside = TEXT.sub(" ", value)
    if TEXT.search(value) and not re.search(r"[0-9\\]", outside):
        return True
    return any(word not in FUNCTIONS and len(word) > 2 for word in WORD.findall(COMMAND.sub(" ", outside)))


def letters(value: str) -> str:
    """Letters and digits of a text, case and brackets aside."""
    return " ".join(re.findall(r"[a-z0-9]+", TEXT.sub(r" \1 ", value).lower()))


def same_sides(gold: str, given: str) -> bool | None:
    """Equations; None if neither is one, or both are proper ones, which is for the formulas."""
    gold_sides = [side.strip() for side in EQUALS.split(gold)]
    sides = [side.strip() for side in EQUALS.split(given)]
    if len(gold_sides) == len(sides) == 1:
        return None
    names, gold_names = NAME.fullmatch(sides[0]), NAME.fullmatch(gold_sides[0])
    if len(gold_sides) == 1:
        values = sides[1:] if names else sides
        return all(bool(side) and same(read_answer(gold), read_answer(side)) for side in values)
    if len(sides) == 1:
        return bool(gold_names) and len(gold_sides) == 2 and same_value(gold_sides[1], given)
    if (
        len(sides) == 2
        and len(gold_sides) == 2
        and names
        and gold_names
        and squeeze(sides[0]) == squeeze(gold_sides[0])
    ):
        return same_value(gold_sides[1], sides[1])
    return None if len(sides) == len(gold_sides) == 2 else False


def same_list(gold: str, given: str) -> bool | None:
    """Tuples and intervals in order, lists and unions in any order; None if neither is one."""
    for separator in (r"\cup", ","):
        parts, given_parts = split(gold, separator), split(given, separator)
        if len(parts) > 1 or len(given_parts) > 1:
            return in_any_order(parts, given_parts)
    ends, inner = brackets(gold)
    given_ends, given_inner = brackets(given)
    parts, given_parts = split(inner, ","), split(given_inner, ",")
    if len(parts) < 2 and len(given_parts) < 2:
        return None
    if "\\{" in (ends, given_ends):
        return ends == given_ends and in_any_order(parts, given_parts)
    return ends == given_ends and in_order(parts, given_parts)


def same_matrix(gold: str, given: str) -> bool | None:
    """Cell by cell; None if neither is a matrix."""
    matrix, other = MATRIX.fullmatch(gold), MATRIX.fullmatch(given)
    if not matrix or not other:
        return False if matrix or other else None
    rows, other_rows = matrix[1].split(r"\\"), other[1].split(r"\\")
    return len(rows) == len(other_rows) and all(
        in_order(row.split("&"), other_row.split("&")) for row, other_row in zip(rows, other_rows, strict=True)
    )


def in_order(gold: list[str], given: list[str]) -> bool:
    """One by one."""
    return len(gold) == len(given) and all(map(same_part, gold, given))


def in_any_order(gold: list[str], given: list[str]) -> bool:
    """Each of them once."""
    if len(gold) != len(given):
        return False
    left = list(given)
    for part in gold:
        place = next((place for place, other in enumerate(left) if same_part(part, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def same_part(gold: str, given: str) -> bool:
    """Two parts of a list, each an answer in its own right."""
    return bool(gold.strip() and given.strip()) and same(read_answer(gold), read_answer(given))


def split(value: str, separator: str) -> list[str]:
    """At a separator that stands in no bracket; `\\pm` stands for two."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(value):
        depth += (value[place] in OPEN) - (value[place] in CLOSE)
        if depth == 0 and value.startswith(separator, place):
            parts.append(value[start:place])
            start = place = place + len(separator)
            continue
        place += 1
    parts.append(value[start:])
    if separator == ",":
        parts = re.split(r"\s*,?\s*\b(?:and|or)\b\s*", value) if len(parts) == 1 else parts
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
    if value[:1] in ("(", "[") and value[-1:] in (")", "]"):
        return value[0] + value[-1], value[1:-1]
    return "", value


def as_number(value: str) -> Fraction | None:
    """The rational number that is written there, if that is all there is."""
    value = squeeze(value)
    value = value[1:] if value.startswith("+") else value
    if len(value) > MAX_DIGITS:
        return None
    readers: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction]]] = [
        (DECIMAL, lambda match: Fraction(match[0].rstrip(".") or "0")),
        (RATIO, lambda match: sign(match) * Fraction(int(match[2] or match[4]), int(match[3] or match[5]))),
        (
            MIXED,
            lambda match: (
                sign(match) * (int(match[2]) + Fraction(int(match[3] or match[5]), int(match[4] or match[6])))
            ),
        ),
        (GROUPED, lambda match: Fraction(match[0].replace(" ", ""))),
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
