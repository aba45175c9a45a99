"""A curve drawn with text, in eighths of the height of a character.

The x axis is the whole run, so the curve grows to the right as the run continues. The y axis is [0, 1] if all values
are in that range, so that a low flat curve looks low; otherwise it is the range of the values. A value that was not
measured (NaN) is left out, and a column without any other is blank.
"""

import math
from collections.abc import Sequence
from statistics import fmean

BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = " ..::-=+#"
EIGHTHS = 8


def sparkline(
    values: Sequence[float], *, steps: int, width: int, height: int = 1, ascii_only: bool = False
) -> list[str]:
    """`height` lines of text, top first; `values` are the steps done of `steps`."""
    limits = scale(values)
    columns = spread([unit(value, limits) for value in values], steps, width)
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    return ["".join(blocks[part(column, row, height)] for column in columns) for row in reversed(range(height))]


def scale(values: Sequence[float]) -> tuple[float, float]:
    """Bottom and top of the curve."""
    known = [value for value in values if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return low, high if high > low else low + 1.0


def unit(value: float, limits: tuple[float, float]) -> float:
    """0 at the bottom, 1 at the top."""
    low, high = limits
    return (value - low) / (high - low)


def spread(heights: Sequence[float], steps: int, width: int) -> list[float]:
    """One height for each column reached so far: steps repeated where there is room, averaged where there is not."""
    steps = max(steps, len(heights))
    reached = -(-len(heights) * width // steps)
    columns: list[float] = []
    for column in range(reached):
        first = column * steps // width
        after = max(first + 1, (column + 1) * steps // width)
        known = [height for height in heights[first:after] if not math.isnan(height)]
        columns.append(fmean(known) if known else math.nan)
    return columns


def part(height: float, row: int, rows: int) -> int:
    """How many eighths of this row a column fills. Row 0 is the lowest; it always shows at least one eighth of a height
    that is known."""
    if math.isnan(height):
        return 0
    eighths = round(height * rows * EIGHTHS) - row * EIGHTHS
    return max(1 if row == 0 else 0, min(EIGHTHS, eighths))
