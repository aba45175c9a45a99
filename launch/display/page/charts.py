"""Curves as inline SVG: data in, paths out. The template draws axes and legends from the same records.

A curve of 10,000 steps becomes POINTS points; the band behind it is the smallest and largest value of the steps that a
point stands for. A value that was not measured leaves a gap. The y axis begins at 0, and ends at 1 for shares; where
all values are far from 0, it has their range.
Left out on purpose: zooming and hovering, which the window has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.display.watch import PHASES
from shared.run.metrics import MetricsTable, Thinned

POINTS = 240
WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 22
FAR = 0.5
"""Where the smallest value is above this share of the largest, the axis does not begin at 0."""
PARTS = "reward/"
WHOLE = ("reward/mean", "reward/std", "reward/min", "reward/max")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve of a chart."""

    name: str
    """For the legend."""
    path: str
    """SVG path of the means."""
    band: str
    """SVG path around what they stand for; empty if every point is one step."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, ready to be drawn."""

    title: str
    lines: Sequence[Line]
    named: bool
    """Whether the name of a single line says something."""
    bottom: str
    """Labels of the ends of the axes."""
    top: str
    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From values to places on the chart."""

    first: float
    last: float
    bottom: float
    top: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / max(self.last - self.first, 1.0)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.top - value) / (self.top - self.bottom)

    def point(self, step: float, value: float) -> str:
        return f"{self.x(step):.1f} {self.y(value):.1f}"


OUTCOMES = {name: f"outcome/{name}" for name in ("correct", "wrong", "unparsable", "truncated")}
FAULTS = {name: f"outcome/{name}" for name in ("timeout", "error", "abstain")}
GROUPS = {"sampled": "groups/total", "taught nothing": "groups/idle", "quarantined": "groups/quarantined"}
CURVES: Sequence[tuple[str, Mapping[str, str]]] = (
    ("Reward", {"mean": "reward/mean"}),
    ("Loss", {"loss": "loss"}),
    ("Outcomes, share of the answers", OUTCOMES),
    ("Verifier's faults, share of the answers", FAULTS),
    ("Groups of a step", GROUPS),
    ("Entropy, nats a token", {"entropy": "entropy/mean"}),
    ("Tokens that carried gradient, share", {"selected": "selected/fraction"}),
    ("Policy ratio and importance weight", {"ratio": "ratio/mean", "importance": "importance/mean"}),
    ("Mismatch of actor and learner, nats", {"mean": "mismatch/mean", "99th percentile": "mismatch/p99"}),
    ("Length, tokens", {"length": "length/mean"}),
    ("Gradient norm", {"norm": "grad_norm"}),
    ("KL, nats", {"to the reference": "kl", "to the teacher": "teacher/kl"}),
    ("Tokens a second", {"tokens": "tokens_per_s"}),
    ("Time of a step, s", {name: f"time/{name}_s" for name in PHASES}),
    ("Energy of a step, J", {source: f"energy/{source}_j" for source in ("card", "cpu")}),
    ("Memory, MiB", {"learner": "mem/learner_mb", "actor": "mem/actor_mb"}),
)
"""Title; name of a line -> key of the metrics."""


def charts_of(metrics: MetricsTable) -> list[Chart]:
    """Those that have something to show."""
    keys = metrics.keys()
    parts = {key.removeprefix(PARTS): key for key in keys if key.startswith(PARTS) and key not in WHOLE}
    logged = {key.removeprefix("logged/"): key for key in keys if key.startswith("logged/")}
    curves = (*CURVES[:1], ("Parts of the reward, unweighted", parts), ("Logged by rewards", logged), *CURVES[1:])
    found = ((title, metrics.thinned(list(names.values()), POINTS), names) for title, names in curves)
    return [
        chart(
            title,
            {name: thinned[key] for name, key in names.items() if is_worth_a_line(thinned[key])},
            named=names in (parts, logged),
        )
        for title, thinned, names in found
        if any(is_worth_a_line(curve) for curve in thinned.values())
    ]


def is_worth_a_line(curve: Thinned) -> bool:
    """Whether there is anything but zeros."""
    return any(curve.high)


def chart(title: str, curves: Mapping[str, Thinned], *, named: bool = False) -> Chart:
    """curves: by name; at least one has a value."""
    steps = [step for curve in curves.values() for step in curve.step]
    lows = [value for curve in curves.values() for value in curve.low if value is not None]
    highs = [value for curve in curves.values() for value in curve.high if value is not None]
    bottom, top = limits(min(lows), max(highs))
    scale = Scale(first=min(steps), last=max(steps), bottom=bottom, top=top)
    return Chart(
        title=title,
        lines=[line(name, curve, scale) for name, curve in curves.items()],
        named=named,
        bottom=label(bottom),
        top=label(top),
        first=str(min(steps)),
        last=str(max(steps)),
    )


def limits(low: float, high: float) -> tuple[float, float]:
    """Bottom and top of the axis."""
    if low >= 0.0 and high <= 1.0 and high > 0.25:
        return 0.0, 1.0
    if low == high:
        return (0.0, high or 1.0) if high >= 0 else (low, 0.0)
    return (low if low < 0 or low > FAR * high else 0.0), high


def line(name: str, curve: Thinned, scale: Scale) -> Line:
    rows = list(zip(curve.step, curve.mean, curve.low, curve.high, strict=True))
    path, pen = "", "M"
    for step, mean, _, _ in rows:
        if mean is None:
            pen = "M"
            continue
        path += f"{pen}{scale.point(step, mean)}"
        pen = "L"
    known = [(step, low, high) for step, _, low, high in rows if low is not None and high is not None]
    wide = any(high > low for _, low, high in known)
    upper = [scale.point(step, high) for step, _, high in known]
    lower = [scale.point(step, low) for step, low, _ in reversed(known)]
    # A single point is drawn as a short line.
    path = path if path.count("L") or not known else f"{path}h2"
    return Line(name=name, path=path, band=f"M{'L'.join([*upper, *lower])}Z" if wide else "")


def points(rows: Sequence[tuple[int, float, float, float]]) -> Thinned:
    """Step, mean, low, high: of measurements that have intervals."""
    return Thinned(
        step=[row[0] for row in rows],
        mean=[row[1] for row in rows],
        low=[row[2] for row in rows],
        high=[row[3] for row in rows],
    )


def label(value: float) -> str:
    """`0`, `0.25`, `1,431`, `3.2e-06`"""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
