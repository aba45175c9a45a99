r"""Compares a final answer with the gold answer: as text, as numbers, part by part, and only then as formulas.

    numbers     18, 1,234, 18.00, .5, 1/2, \frac12, 1\frac{1}{2}, 3 \times 10^4, 4.2e1, 0.\overline{3}: compared as
                exact fractions. A rounded decimal is a different number, unless `verifier.rounded_digits` says how many
                digits are enough. 0,5 is 0.5 only if the gold answer is a single number that is not whole; otherwise
                it is a list
    tuples, intervals, matrices     same brackets, and the parts in order. A column may be written as a tuple. Sums,
                multiples and products of matrices are computed
    lists, sets, unions, \pm        the parts in any order, and the same number of them. A list may be written as a set.
                `x=1, y=2; x=3, y=4` are the points (1,2) and (3,4)
    inequalities    as the intervals that they describe; so are |x-1| < 3, x \ne 2 and \mathbb{R} \setminus \{2\}
    equations   each side that is not a name must equal the gold value: 41=42 is not 42, but 6 \cdot 7 = 42 is. Names
                are x, x_1, AB, f(2), f'(x), |AB|, m+n, (p,q), P(X=3), \sin A, \text{Area}. In `P = 2(l+w) = 14` the
                middle side is skipped, because other letters keep it from having a value. What follows \approx must be
                the value before it, rounded
    ratios      6:8 is 3:4 and 3/4. 3:30 is a time of the day if both sides are one
    choices     (B), B and \text{(B) } 12 are the same choice
    words       the same words and signs; letters of words are never multiplied
    formulas    math_equality.py

A percent sign or a base must be in the gold answer too. A unit may be missing on either side, but two units must be
the same one (words_beside.py). `\log` without a base is the logarithm to base ten. A percent sign is never computed:
25% is not 0.25.
"""

import re
from fractions import Fraction

from actor.verifiers.answer_parts import (
    ANY_LETTER,
    ASKED_FOR,
    BOUNDED,
    COORDINATES,
    EQUALS,
    MAX_CHARS,
    NAME,
    as_intervals,
    ascending,
    brackets,
    equations_of,
    is_beside,
    is_text,
    matrix,
    named_one_by_one,
    named_parts,
    one_name,
    out_of_order,
    points,
    sides,
    split,
    words,
)
from actor.verifiers.answer_text import FinalAnswer, Unreadable, read_answer
from actor.verifiers.final_answer import boxed_answers
from actor.verifiers.number_answer import DECIMAL, EXPONENT, SCIENTIFIC, as_number, squeeze
from actor.verifiers.words_beside import same_unit

DECIMAL_COMMA = re.compile(r"(-?[0-9]+),([0-9]{1,2}|[0-9]{4,})|(-?0),([0-9]+)")
GOLD_COMMA = re.compile(r"(-?0),([0-9]{2,})")
APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
OR = re.compile(r"\bor\b|\\(?:text|mbox|textrm) *\{ *or *\}|,(?= *\\text *\{ *or)")
CLOCK = re.compile(
    r"([01]?[0-9]|2[0-4])(?::([0-5][0-9])(?::00)?)? *(?:\\text\{ *)?(?:([ap])\.?m\.?)? *\}?", re.IGNORECASE
)
CHOICE = re.compile(
    r"(?:\\text\{ *)?(?:(?:option|choice|answer) *)?(?:\\text\{ *)?(?:\(([A-J])\)|([A-J])[.:)]) *\}?(?:[.:] *)?(.*?)"
    r"|(?:\\text\{ *)?(?:option|choice|answer) *\(?([A-J])\)? *\}?|(?:\\text\{ *)?([A-J]) *\}?",
    re.IGNORECASE,
)
ONE_SIGN = re.compile(r"([\^_])\{([0-9A-Za-z])\}(?![0-9])")
# A part of a ratio is not zero, and does not begin with it unless it is a decimal fraction.
OF_A_CLOCK = re.compile(r"0(?!\.)")
NAMED_POINT = re.compile(r"[A-Z]'? *(\(.*\))")
UNCLOSED = "\\boxed"


def equals_gold(answers: list[str], gold: str, rounded_digits: int = 0) -> bool:
    """Whether the final answer is the gold answer. Unreadable if that cannot be decided."""
    if any(len(answer) > MAX_CHARS for answer in answers):
        raise Unreadable(f"A final answer longer than {MAX_CHARS} characters.")
    comparison = Comparison(rounded_digits)
    expected = read_answer(", ".join(boxed_answers(gold)) or gold)
    # Several ways of writing one value are one answer; several values can only be a list.
    ways = [way for answer in answers for way in OR.split(answer)]
    if len(ways) > 1 and all(comparison.same(expected, read_answer(way)) for way in ways):
        return True
    return comparison.same(expected, read_answer(", ".join(answers)))


class Comparison:
    """Compares final answers with gold answers."""

    def __init__(self, rounded_digits: int) -> None:
        self.rounded_digits = rounded_digits

    def same(self, gold: FinalAnswer, given: FinalAnswer) -> bool:
        if (given.percent and not gold.percent) or given.base not in ("", gold.base):
            return False
        if not same_unit(gold.unit, given.unit):
            return False
        return self.same_value(gold.value, given.value)

    def same_value(self, gold: str, given: str) -> bool:
        """Compares two values, which are taken apart as far as possible."""
        if without_braces(gold) == without_braces(given):
            return True
        if UNCLOSED in given:
            return False
        gold, given = equations_of(gold), equations_of(given)
        for kind in (self.same_choice, self.same_time, self.same_ratio):
            verdict = kind(gold, given)
            if verdict is not None:
                return verdict
        if not is_text(sides(given)[-1]):
            for kind in (self.same_comma, self.same_rounded, self.same_interval, self.same_list, self.same_sides):
                verdict = kind(gold, given)
                if verdict is not None:
                    return verdict
        if is_text(gold) or is_text(given):
            return words(gold) == words(given) != ""
        verdict = self.same_matrix(gold, given)
        return self.same_formula(gold, given) if verdict is None else verdict

    def same_choice(self, gold: str, given: str) -> bool | None:
        """The letter of one of several choices, with or without what it says; None if neither names one."""
        (letter, rest), (other, other_rest) = choice(gold), choice(given)
        if not (rest or other_rest):
            return letter == other if letter and other and len(gold + given) > 2 else None
        if letter and other:
            return letter == other and (not rest or not other_rest or self.same_part(rest, other_rest))
        return self.same_part(rest or gold, other_rest or given)

    def same_time(self, gold: str, given: str) -> bool | None:
        """Times of the day; None if one of them is none. `3:30` may be in the morning or after noon."""
        time, other = CLOCK.fullmatch(gold), CLOCK.fullmatch(given)
        if not time or not other or not all(match[2] or match[3] for match in (time, other)):
            return None
        (hour, minute, half), (other_hour, other_minute, other_half) = moment(time), moment(other)
        if (time[3] or other[3]) and not (half and other_half):
            hour, other_hour = hour % 12, other_hour % 12
        return (hour, minute) == (other_hour, other_minute)

    def same_ratio(self, gold: str, given: str) -> bool | None:
        """`6:8` is 3:4, and so is 3/4; None if neither is a ratio."""
        parts, others = split(gold, ":"), split(given, ":")
        if len(parts) == len(others) == 1 or any(mark in gold + given for mark in ("=", ",", "\\{", "\\text")):
            return None
        if any(OF_A_CLOCK.match(part.strip()) for part in parts + others):
            return False
        if 1 in (len(parts), len(others)):
            quotients = [f"\\frac{{{pair[0]}}}{{{pair[1]}}}" if len(pair) == 2 else pair[0] for pair in (parts, others)]
            return max(len(parts), len(others)) == 2 and self.same_part(*quotients)
        return len(parts) == len(others) and all(
            self.same_part(f"({part})*({others[0]})", f"({other})*({parts[0]})")
            for part, other in zip(parts[1:], others[1:], strict=True)
        )

    def same_formula(self, gold: str, given: str) -> bool:
        """Compares two numbers exactly, and anything else by the value of the formulas."""
        number, other = as_number(gold), as_number(given)
        if number is not None and other is not None:
            return number == other or self.close_enough(gold, given)
        # Not at the top: it imports sympy, which takes a second, and numbers need none.
        from actor.verifiers.math_equality import formulas_equal

        return formulas_equal(gold, given) or self.close_enough(gold, given)

    def close_enough(self, gold: str, given: str) -> bool:
        """Whether one is the other, rounded to at least this many digits."""
        return self.rounded_digits > 0 and (
            is_rounded(gold, given, self.rounded_digits) or is_rounded(given, gold, self.rounded_digits)
        )

    def same_comma(self, gold: str, given: str) -> bool | None:
        """A decimal comma, if the gold answer is one number that is not whole. None if there is none."""
        if gold_comma := GOLD_COMMA.fullmatch(gold):
            return self.same_value(".".join(gold_comma.groups()), given)
        comma = DECIMAL_COMMA.fullmatch(given)
        number = as_number(gold) if comma else None
        return (
            None
            if not comma or number is None or number.denominator == 1
            else self.same_value(gold, ".".join(filter(None, comma.groups())))
        )

    def same_rounded(self, gold: str, given: str) -> bool | None:
        r"""The value before `\approx`, if the value after it is the same one, rounded. None if there is none."""
        if "\\approx" not in gold + given:
            return None
        exact, gold_exact = given, APPROXIMATELY.split(gold)[0].strip()
        parts = [part.strip() for part in APPROXIMATELY.split(given)]
        if len(parts) > 1:
            named = not parts[0] or bool(NAME.fullmatch(parts[0]))
            exact = parts[1] if named else parts[0]
            if len(parts) > 2 or not (named or is_rounded(EQUALS.split(exact)[-1], parts[1], 1)):
                return False
        return bool(gold_exact) and self.same(read_answer(gold_exact), read_answer(exact))

    def same_interval(self, gold: str, given: str) -> bool | None:
        """Inequalities as intervals. None if neither is one, or if only one of them can be read as intervals."""
        if not (BOUNDED.search(gold) or BOUNDED.search(given)):
            return None
        variable, intervals = as_intervals(gold)
        other, given_intervals = as_intervals(given)
        if not (variable or other) or not (intervals and given_intervals):
            return None
        if variable and other and variable != other and ANY_LETTER not in (variable, other):
            return False
        return self.in_any_order(intervals, given_intervals)

    def same_sides(self, gold: str, given: str) -> bool | None:
        """Equations. None if neither is one, or if both must be compared as formulas."""
        gold_sides, given_sides = sides(gold), sides(given)
        if len(gold_sides) == len(given_sides) == 1:
            return None
        gold_name = NAME.fullmatch(gold_sides[0]) and not COORDINATES.fullmatch(gold_sides[0])
        name = NAME.fullmatch(given_sides[0])
        if (
            len(gold_sides) == 2
            and gold_name
            and (len(given_sides) == 1 or (name and one_name(given_sides[0], gold_sides[0])))
        ):
            gold_sides = gold_sides[1:]
        elif len(gold_sides) == 1 and name and "," in given_sides[0] and ("," not in gold or out_of_order(name[0])):
            return False
        if len(gold_sides) == 1:
            named = len(given_sides) > 1 and (name or ASKED_FOR.fullmatch(given_sides[0]))
            values = given_sides[1:] if named else given_sides
            if named:
                values = [side for side in values[:-1] if not is_beside(side, gold_sides[0])] + values[-1:]
            return all(bool(side) and self.same(read_answer(gold_sides[0]), read_answer(side)) for side in values)
        if len(given_sides) == len(gold_sides) == 2 and squeeze(gold_sides[0]) == squeeze(given_sides[0]):
            return self.same_part(gold_sides[1], given_sides[1]) or None
        if name and gold_name and "(" in given_sides[0] + gold_sides[0]:
            return False
        return None if len(given_sides) == len(gold_sides) == 2 else False

    def same_list(self, gold: str, given: str) -> bool | None:
        """Tuples and intervals in order; lists, sets and unions in any order. None if neither is one."""
        gold, given = in_points(gold, given), in_points(given, gold)
        ends, inner = brackets(gold)
        given_ends, given_inner = brackets(given)
        if "\\{" in (ends, given_ends) and {ends, given_ends} <= {"\\{", ""}:
            gold, given = inner, given_inner
            ends = given_ends = ""
            if "\\cup" not in gold + given:
                return self.in_any_order(split(gold, ","), split(given, ","))
        for separator in (r"\cup", ","):
            parts, given_parts = split(gold, separator), split(given, separator)
            if {ends, given_ends} == {"()", ""} and len(parts) != len(given_parts):
                return self.same_tuple(ends, inner, parts, given_inner, given_parts)
            if len(parts) > 1 or len(given_parts) > 1:
                return self.same_parts(parts, given_parts)
        parts, given_parts = split(inner, ","), split(given_inner, ",")
        if len(parts) < 2 and len(given_parts) < 2:
            return None
        if ("=" in gold + given) or "matrix}" in gold + given:
            return None
        return ends == given_ends and self.in_order(parts, given_parts)

    def same_tuple(self, ends: str, inner: str, parts: list[str], given_inner: str, given_parts: list[str]) -> bool:
        """A tuple and `x = 3, y = 2`, if the letters are in alphabetical order."""
        if ends:
            names, values = named_parts(given_parts)
            return ascending(names, values) and self.in_order(split(inner, ","), values)
        names, values = named_parts(parts)
        return ascending(names, values) and self.in_order(values, split(given_inner, ","))

    def same_parts(self, gold: list[str], given: list[str]) -> bool:
        """In any order; but in the same order if the gold answer names its parts and the given answer does not."""
        names, gold = named_parts(gold)
        given_names, given = named_parts(given)
        if len(names) == len(gold) > 1 and len(set(names)) > 1:
            if not given_names and not any(map(EQUALS.search, given)):
                return self.in_order(gold, given)
            gold = [f"{name}={part}" for name, part in zip(names, gold, strict=True)]
        elif names and given_names and names[0] != given_names[0]:
            return False
        if len(given_names) == len(given) > 1 and len(set(given_names)) > 1:
            given = [f"{name}={part}" for name, part in zip(given_names, given, strict=True)]
        return self.in_any_order(gold, given)

    def same_matrix(self, gold: str, given: str) -> bool | None:
        """Cell by cell; a vector may be written as a column or as a tuple. None if neither is a matrix."""
        rows, others = matrix(gold), matrix(given)
        if rows is None and others is None:
            return None
        rows, others = rows or column(gold), others or column(given)
        return len(rows) == len(others) and all(map(self.in_order, rows, others))

    def in_order(self, gold: list[str], given: list[str]) -> bool:
        return len(gold) == len(given) and all(map(self.same_part, gold, given))

    def in_any_order(self, gold: list[str], given: list[str]) -> bool:
        if len(gold) != len(given):
            return False
        left = list(given)
        for part in gold:
            place = next((place for place, other in enumerate(left) if self.same_part(part, other)), None)
            if place is None:
                return False
            del left[place]
        return True

    def same_part(self, gold: str, given: str) -> bool:
        """Compares two parts of a list as answers of their own."""
        return bool(gold.strip() and given.strip()) and self.same(read_answer(gold), read_answer(given))


def is_rounded(exact: str, decimal: str, digits: int) -> bool:
    """Whether a decimal fraction with at least this many digits is the other number, rounded to its decimals."""
    decimal = squeeze(decimal)
    power = SCIENTIFIC.fullmatch(decimal) or EXPONENT.fullmatch(decimal)
    mantissa = power[1] if power else decimal
    if not DECIMAL.fullmatch(mantissa) or "." not in mantissa or len(mantissa.lstrip("-0.").replace(".", "")) < digits:
        return False
    rounded, number = as_number(decimal), as_number(exact)
    if number is None:
        from actor.verifiers.math_equality import value_of_constant

        number = value_of_constant(exact)
    exponent = int(power[power.lastindex or 2]) if power else 0
    step = Fraction(10) ** (exponent - len(mantissa.partition(".")[2]))
    return number is not None and rounded is not None and abs(number - rounded) <= step / 2


def without_braces(value: str) -> str:
    """The same text for `x^{2}` and `x^2`."""
    return ONE_SIGN.sub(r"\1\2", squeeze(value))


def choice(value: str) -> tuple[str, str]:
    """The letter that a value names as its choice, and what it says behind it."""
    match = CHOICE.fullmatch(value)
    if not match:
        return "", ""
    return next(filter(None, (match[1], match[2], match[4], match[5]))).upper(), (match[3] or "").strip()


def moment(match: re.Match[str]) -> tuple[int, int, str]:
    """Hour and minute, on the clock of 24 hours where the half of the day is known, and that half."""
    hour, half = int(match[1]), (match[3] or "").lower()
    if half:
        hour = hour % 12 + 12 * (half == "p")
    elif hour > 12 or hour == 0:
        half = "p" if hour else "a"
    return hour, int(match[2] or 0), half


def column(value: str) -> list[list[str]]:
    """The parts of a tuple as a column."""
    ends, inner = brackets(value)
    return [[part] for part in split(inner, ",")] if ends == "()" else []


def in_points(value: str, other: str) -> str:
    """Assignments to several letters as points, where the other side has points or assigns to the same letters."""
    if named := NAMED_POINT.fullmatch(value):
        return named[1] if other.startswith("(") else value
    if points(other) and len(points(named_one_by_one(value))) == 1:
        return named_one_by_one(value)
    found, others = points(value), points(other)
    if len(found) < 2 or (others and set(found[0]) != set(others[0])):
        return value
    return ",".join(f"({','.join(point[name] for name in sorted(point))})" for point in found)
