"""Bars as an SVG picture that loads nothing: one for each case, divided into parts that add up.

The vertical axis begins at 0, and parts below it are left out. The labels of the parts are below the axis.
"""

from collections.abc import Mapping

from benchmarks.curves import COLOURS, HEIGHT, LEFT, LINE, TOP, WIDTH, ceiling, text, y_of

MORE_COLOURS = (*COLOURS, "#8a8a8a", "#c9a227", "#17a2a2", "#444444", "#e377c2", "#9edae5")


def picture(title: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """The SVG text. bars: label -> part -> value."""
    names = sorted({name for parts in bars.values() for name in parts})
    colours = dict(zip(names, MORE_COLOURS, strict=False))
    highest = ceiling(max(sum(value for value in parts.values() if value > 0) for parts in bars.values()))
    bottom, wide = TOP + HEIGHT, WIDTH / len(bars)
    shapes = [text(LEFT, 22, title, size=15), *lines(highest)]
    for place, (label, parts) in enumerate(bars.items()):
        left = LEFT + place * wide + wide / 4
        shapes += bar(left, wide / 2, parts, colours, highest)
        shapes.append(text(left + wide / 4, bottom + 16, label, anchor="middle"))
    for place, name in enumerate(names):
        below = bottom + 44 + place * LINE
        shapes.append(f'<rect x="{LEFT}" y="{below - 8}" width="18" height="8" fill="{colours[name]}"/>')
        shapes.append(text(LEFT + 26, below, name))
    size = f'width="{LEFT + WIDTH + 20}" height="{bottom + 44 + len(names) * LINE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>", ""])


def lines(highest: float) -> list[str]:
    """Five across."""
    found: list[str] = []
    for part in range(5):
        value = highest * part / 4
        height = y_of(value, (0.0, highest))
        found.append(f'<path d="M{LEFT} {height:g}H{LEFT + WIDTH}" stroke="#cccccc"/>')
        found.append(text(LEFT - 6, height + 4, f"{value:.3g}", anchor="end"))
    return found


def bar(left: float, wide: float, parts: Mapping[str, float], colours: Mapping[str, str], highest: float) -> list[str]:
    found: list[str] = []
    base = 0.0
    for name, value in sorted(parts.items()):
        low, top = y_of(base, (0.0, highest)), y_of(base + max(value, 0.0), (0.0, highest))
        shape = f'x="{left:g}" y="{top:.1f}" width="{wide:g}" height="{low - top:.1f}"'
        found.append(f'<rect {shape} fill="{colours[name]}"/>')
        base += max(value, 0.0)
    return found
