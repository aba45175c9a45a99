"""Curves as an SVG picture that loads nothing: one line for each run, single values faint, running means strong.

The horizontal axis counts steps. The vertical one begins at 0, or below the smallest value if that is negative. The
labels of the runs are below the axes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10

WIDTH, HEIGHT, LEFT, TOP, LINE = 760, 300, 52, 40, 18
COLOURS = ("#1f77b4", "#d9720b", "#2c8c3c", "#b3272d", "#7d55ac", "#6d4a41")
WINDOW = 5
"""Values in a running mean."""
Ends = tuple[float, float]
"""Of the vertical axis."""


def picture(title: str, across: str, curves: Mapping[str, Sequence[float]]) -> str:
    """The SVG text. curves: label -> one value for each step."""
    steps = max(len(values) for values in curves.values())
    lowest, highest = min(map(min, curves.values())), max(map(max, curves.values()))
    ends = (-ceiling(-lowest) if lowest < 0 else 0.0, ceiling(highest))
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(curves))]
    bottom = TOP + HEIGHT
    parts = [text(LEFT, 22, title, size=15), text(LEFT + WIDTH / 2, bottom + 34, across, anchor="middle")]
    parts += axes(steps, ends)
    for values, colour in zip(curves.values(), colours, strict=True):
        parts.append(line(values, 1, steps, ends, colour, width=1, opacity=0.3))
        parts.append(line(running_means(values), min(WINDOW, len(values)), steps, ends, colour, width=2.5, opacity=1))
    for place, (label, colour) in enumerate(zip(curves, colours, strict=True)):
        below = bottom + 58 + place * LINE
        parts.append(f'<rect x="{LEFT}" y="{below - 8}" width="18" height="4" fill="{colour}"/>')
        parts.append(text(LEFT + 26, below, label))
    size = f'width="{LEFT + WIDTH + 20}" height="{bottom + 58 + len(curves) * LINE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def running_means(values: Sequence[float]) -> list[float]:
    """Of WINDOW values, or of all if there are fewer."""
    window = min(WINDOW, len(values))
    return [sum(values[end - window : end]) / window for end in range(window, len(values) + 1)]


def ceiling(largest: float) -> float:
    """The end of the vertical axis: a round number, not below the largest value."""
    if largest <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(largest))
    return next(times * unit for times in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if times * unit >= largest * 0.999)


def axes(steps: int, ends: Ends) -> list[str]:
    """Five lines across, and the first, middle and last step."""
    parts: list[str] = []
    for part in range(5):
        value = ends[0] + (ends[1] - ends[0]) * part / 4
        parts.append(f'<path d="M{LEFT} {y_of(value, ends):g}H{LEFT + WIDTH}" stroke="#cccccc"/>')
        parts.append(text(LEFT - 6, y_of(value, ends) + 4, f"{value:.3g}", anchor="end"))
    for step in sorted({1, (steps + 1) // 2, steps}):
        parts.append(text(x_of(step, steps), TOP + HEIGHT + 16, str(step), anchor="middle"))
    return parts


def line(
    values: Sequence[float], first: int, steps: int, ends: Ends, colour: str, *, width: float, opacity: float
) -> str:
    """values: of the steps first, first + 1 ..."""
    points = [f"{x_of(step, steps):.1f},{y_of(value, ends):.1f}" for step, value in enumerate(values, first)]
    shown = f'stroke="{colour}" stroke-width="{width:g}" stroke-opacity="{opacity:g}"'
    return f'<polyline fill="none" {shown} points="{" ".join(points)}"/>'


def x_of(step: int, steps: int) -> float:
    return LEFT + WIDTH * (step - 1) / max(steps - 1, 1)


def y_of(value: float, ends: Ends) -> float:
    return TOP + HEIGHT * (ends[1] - value) / (ends[1] - ends[0])


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
