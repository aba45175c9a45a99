"""The live panel of a run on a terminal: pure functions from a `View` to something that rich can draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.display.sparkline import scale, sparkline
from launch.display.watch import (
    WINDOW,
    Row,
    actor_figures,
    clock,
    curve,
    goal,
    mean,
    number,
    outcome_shares,
    seconds_left,
    steps_done,
    time_shares,
    value,
)
from protocol.outcome import Outcome
from protocol.plain_text import for_terminal

CURVE_HEIGHT = 5
SHOWN_ACTORS = 8
COLOURS: dict[str, str] = {
    Outcome.CORRECT: "green",
    Outcome.WRONG: "red",
    Outcome.UNPARSABLE: "magenta",
    Outcome.TRUNCATED: "yellow",
    Outcome.TIMEOUT: "bright_black",
    Outcome.ERROR: "bright_red",
    Outcome.ABSTAIN: "bright_black",
    "rollout": "cyan",
    "swap": "magenta",
    "verify": "yellow",
    "update": "green",
    "idle": "bright_black",
}


@dataclass(frozen=True, kw_only=True)
class View:
    """What the panel shows."""

    title: str
    """The run directory."""
    steps: int
    """Steps of the whole run."""
    rows: Sequence[Row]
    """Finished steps."""
    elapsed_s: float
    """Since the launcher started."""
    last_lines: Mapping[str, str]
    """Last log line of each process."""
    notes: Sequence[str]
    """The last things that the supervisor did."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curve of the reward, or of the loss, as wide as the panel."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        values = curve(self.view.rows)
        low, high = scale(values)
        lines = sparkline(
            values,
            steps=self.view.steps,
            width=options.max_width - 6,
            height=CURVE_HEIGHT,
            ascii_only=options.ascii_only,
        )
        for index, line in enumerate(lines):
            mark = {0: f"{high:4.1f}", CURVE_HEIGHT - 1: f"{low:4.1f}"}.get(index, "    ")
            yield Text.assemble((f"{mark}  ", "dim"), (line, "green"))


def draw(view: View) -> RenderableType:
    middle = running(view) if view.rows else [waiting(view)]
    parts = [progress(view), Text(), *middle, *messages(view)]
    # As Text, since rich would read brackets in a plain string as markup.
    title = Text(f"tandem  {for_terminal(view.title)}")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def waiting(view: View) -> Text:
    what = "no step is finished yet" if view.last_lines else "starting: both processes load torch, then the model"
    return Text(what, "dim")


def progress(view: View) -> RenderableType:
    done = steps_done(view.rows)
    left = clock(seconds_left(view.rows, view.steps))
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    times = f"{clock(view.elapsed_s)} so far" + (f", {left} left" if left != "-" else "")
    grid.add_row(Text(f"step {done}/{view.steps}", "bold"), ProgressBar(total=view.steps, completed=done), times)
    return grid


def running(view: View) -> list[RenderableType]:
    """Reward, curve, and the figures of the last step."""
    last = view.rows[-1]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("outcomes", shares(outcome_shares(last)))
    grid.add_row("time", shares(time_shares(view.rows)))
    grid.add_row("sampling", sampling(last))
    grid.add_row("learning", learning(last))
    grid.add_row("memory", memory(last))
    return [reward(view), Curve(view=view), Text(), grid, *actor_lines(last)]


def actor_lines(row: Row) -> list[RenderableType]:
    """A line for each of several actors, and what keeps them from more work."""
    figures = actor_figures(row)
    if not figures:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for name in ("actor", "tokens/s", "waiting", "faults", "version"):
        table.add_column(name, no_wrap=True, justify="left" if name == "actor" else "right")
    for name, found in list(figures.items())[:SHOWN_ACTORS]:
        cells = (("tokens_per_s", ",.0f"), ("waiting", ".0%"), ("faults", ".0f"), ("version", ".0f"))
        table.add_row(for_terminal(name), *(number(value(found, key), form) for key, form in cells))
    lines: list[RenderableType] = [Text(), table]
    if (more := len(figures) - SHOWN_ACTORS) > 0:
        lines.append(Text(f"and {more} more", "dim"))
    limits = {key.partition("/")[2]: share for key, share in row.items() if key.startswith("limited/")}
    lines += [
        Text(f"{key} costs the actors {share or 0.0:.0%} of their time", "yellow") for key, share in limits.items()
    ]
    return lines


def reward(view: View) -> Text:
    key = goal(view.rows)
    now, recent = value(view.rows[-1], key), mean(view.rows[-WINDOW:], key)
    first = mean(view.rows[:WINDOW], key)
    return Text.assemble(
        (f"{key.partition('/')[0]} ", "dim"),
        (number(now, ".2f"), "bold green"),
        ("   last five ", "dim"),
        (number(recent, ".2f"), "bold"),
        ("   first five ", "dim"),
        number(first, ".2f"),
    )


def shares(parts: Mapping[str, float]) -> Text:
    texts = [Text(f"{name} {part:.0%}", COLOURS[name]) for name, part in parts.items()]
    return Text("  ").join(texts) if texts else Text("-")


def sampling(row: Row) -> str:
    turns = value(row, "turns/mean")
    return (
        f"{number(value(row, 'tokens_per_s'), ',.0f')} tokens/s   "
        f"length {number(value(row, 'length/mean'), '.0f')}   "
        f"entropy {number(value(row, 'entropy/mean'), '.3f')}" + (f"   turns {turns:.1f}" if turns > 1 else "")
    )


def learning(row: Row) -> str:
    idle, total = (number(value(row, f"groups/{name}"), ".0f") for name in ("idle", "total"))
    return (
        f"lr {number(value(row, 'lr'), '.1e')}   "
        f"idle groups {idle}/{total}   "
        f"mismatch p99 {number(value(row, 'mismatch/p99'), '.0e')}"
    )


def memory(row: Row) -> str:
    return "   ".join(f"{name} {number(value(row, f'mem/{name}_mb'), ',.0f')} MB" for name in ("learner", "actor"))


def messages(view: View) -> list[RenderableType]:
    """The last log line of each process and the notes of the supervisor, each cut to one line."""
    lines = [Text(f"{name} | {line}", "dim") for name, line in view.last_lines.items()]
    lines += [Text(note, "yellow") for note in view.notes]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return [Text(), *lines] if lines else []
