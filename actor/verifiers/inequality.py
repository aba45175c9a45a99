r"""Inequalities as the intervals they describe: `-2 \le x < 7` is [-2,7) for x, `x < 1 or x > 3` two of them.

Only one letter between bounds is read. `and`, absolute values and what must be solved first are left to
math_equality.py.
"""

import re

RELATION = re.compile(r"\\(?:le|ge|lt|gt)(?![A-Za-z])|[<>]=?")
LETTER = re.compile(r"[A-Za-z](?:\([a-z]\))?|\\(?:theta|alpha|beta|lambda|mu)")
JOINED = re.compile(r",?\s*\bor\b|\\(?:cup|lor|vee)(?![A-Za-z])")


def as_intervals(value: str) -> tuple[str, list[str]]:
    """The letter of inequalities joined by `or`, and their intervals; of intervals no letter and those themselves."""
    found = [as_interval(part.strip()) for part in JOINED.split(value)]
    variables = {variable for variable, _ in found}
    return (
        (variables.pop(), [interval for _, interval in found])
        if len(variables) == 1 and all(interval for _, interval in found)
        else ("", [])
    )


def as_interval(value: str) -> tuple[str, str]:
    """Of one inequality, its letter and the interval, empty if it is not read; of others, no letter and itself."""
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
