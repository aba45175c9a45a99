"""Two reports: what a run prints when it ends, and the table of one evaluation.

print_report        how the run ended, base against trained, the reward, a few completions, and what to type next
print_evaluation    every figure with its interval, n, draws and cap; `markdown` is the same as a document
spent_rows          time and energy per point of reward, for the page and for `compare`
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from launch.display.console import next_command
from launch.display.live import actor_lines
from launch.display.sparkline import sparkline
from launch.display.watch import WINDOW, Row, Watch, clock, curve, goal, mean, number, seconds
from protocol.outcome import Outcome
from protocol.plain_text import for_terminal
from shared.run.evaluation import Decoded, Evaluation, Example, Share, largest, read_evaluation, right
from shared.run.forecast import Figures, Spent
from shared.run.run_dir import RunDir
from shared.run.summary import Summary, read_summary
from shared.statistics import paired

CURVE_WIDTH = 40
SAMPLES = 3
MAX_QUESTION = 200
COSTS = (
    ("time per step", "step_s", "s"),
    ("  decoding", "rollout_s", "s"),
    ("  update", "update_s", "s"),
    ("memory of the learner", "learner_mb", " MiB"),
    ("memory of the actor", "actor_mb", " MiB"),
    *(
        (f"{process}'s turn on the card, {words}", f"{process}_{kind}_mb", " MiB")
        for process in ("learner", "actor")
        for kind, words in {"allocated": "allocated", "reserved": "reserved", "driver": "all programs"}.items()
    ),
    ("tokens per completion", "completion_tokens", ""),
)
"""Name, field of Figures, unit."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the report of a run is made from."""

    run_dir: Path
    steps: int
    """Steps that the run was to have."""
    summary: Summary | None
    """None if the run ended before the learner wrote one."""
    base: Evaluation | None
    """Before the first step."""
    final: Evaluation | None
    """After the last step."""
    rows: Sequence[Row]
    """One for each step."""


def read_results(run: RunDir, steps: int) -> Results:
    watch = Watch(run.metrics)
    watch.poll()
    summary = read_summary(run)
    ended = summary is not None and summary.status == "done"
    return Results(
        run_dir=run.path,
        steps=steps,
        summary=summary,
        base=read_evaluation(run.eval / "base.json"),
        # A finished run that is being trained further still has the evaluation of its first end.
        final=read_evaluation(run.eval / "final.json") if ended else None,
        rows=watch.rows,
    )


def print_report(console: Console, run: RunDir, steps: int, *, can_be_extended: bool) -> None:
    results = read_results(run, steps)
    console.print(report(results, ascii_only=console.options.ascii_only))
    # Not wrapped, so that a command can be copied.
    console.print(next_commands(results, can_be_extended=can_be_extended), soft_wrap=True)


def report(results: Results, *, ascii_only: bool = False) -> RenderableType:
    """The report without the next commands."""
    parts: list[RenderableType] = [Text(), Text(headline(results), "bold")]
    if results.rows:
        parts += [Text(), reward_line(results.rows, ascii_only), *actor_lines(results.rows[-1])]
    if results.base:
        parts += [Text(), accuracy_table(results.base, results.final)]
    if results.base and results.final:
        parts += side_by_side(results.base.examples, results.final.examples)
    if results.summary:
        parts += forecast(results.summary.predicted, results.summary.measured)
    if results.summary and results.summary.why:
        parts += [Text(), Text(for_terminal(str(results.summary.why)))]
    return Group(*parts, Text(), facts(results), Text())


def headline(results: Results) -> str:
    summary = results.summary
    if summary is None:
        return "stopped before the run began"
    if summary.status == "done":
        return f"done: {summary.steps} steps in {clock(summary.wall_s)}"
    # A learner that is stopped while it loads writes no summary, so this one is from the session before.
    status = "stopped" if summary.status == "running" else summary.status
    return f"{status} after step {summary.steps} of {results.steps}, {clock(summary.wall_s)} in total"


def reward_line(rows: Sequence[Row], ascii_only: bool) -> Text:
    """First five steps, curve, last five."""
    key, line = goal(rows), sparkline(curve(rows), steps=len(rows), width=CURVE_WIDTH, ascii_only=ascii_only)[0]
    return Text.assemble(
        f"{key.partition('/')[0]}: first five steps {number(mean(rows[:WINDOW], key), '.2f')}  ",
        (line, "green"),
        "  last five ",
        (number(mean(rows[-WINDOW:], key), ".2f"), "bold green"),
    )


def accuracy_table(base: Evaluation, final: Evaluation | None) -> RenderableType:
    votes = [f"maj@{k}" for k in largest(base.sampled.maj_at) if k > 1]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "greedy", "sampled", *votes, "n", "time"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("n", "time") else "left")
    table.add_row("base", *accuracy_cells(base))
    if final:
        table.add_row("trained", *accuracy_cells(final), style="bold")
    parts: list[RenderableType] = [Text(f"held-out accuracy with its 95 % interval, seed {base.seed}"), table]
    if final and base.task_results and base.tasks_sha256 == final.tasks_sha256:
        parts += [Text(gain(base, final))]
    if final and (before := base.sampled.rewards) and (after := final.sampled.rewards):
        parts += [Text(f"mean reward, sampled: base {before['mean']:.3f}, trained {after['mean']:.3f}")]
    return Group(*parts)


def accuracy_cells(found: Evaluation) -> list[str]:
    """maj@k for the largest k only."""
    votes = [share(one) for k, one in largest(found.sampled.maj_at).items() if k > 1]
    return [share(found.greedy), share(found.sampled), *votes, str(found.n), seconds(found.wall_s)]


def gain(base: Evaluation, final: Evaluation) -> str:
    """In pairs, since the tasks are the same: two intervals side by side would suggest a wider one."""
    found = paired(right(final), right(base))
    interval = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
    return f"greedy, trained minus base, in pairs: {100 * found.mean:+.1f} points  ({interval})"


def share(measured: Share) -> str:
    """`71.5 %  (65.7 to 76.7)`"""
    return f"{100 * measured.accuracy:.1f} %  ({100 * measured.low:.1f} to {100 * measured.high:.1f})"


def side_by_side(before: Sequence[Example], after: Sequence[Example]) -> Iterator[RenderableType]:
    """The first few questions, with the completions of base and trained policy."""
    for old, new in list(zip(before, after, strict=False))[:SAMPLES]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        for who, sample in (("base", old), ("trained", new)):
            table.add_column(Text.assemble(f"{who}: ", outcome(sample)), ratio=1)
        table.add_row(*(Text(for_terminal(sample.completion.strip())) for sample in (old, new)))
        yield Text(for_terminal(old.question.strip()), "italic")
        yield table


def outcome(sample: Example) -> Text:
    return Text(sample.outcome, "green" if sample.outcome == Outcome.CORRECT else "red")


def forecast(predicted: Figures | None, measured: Figures | None) -> Iterator[RenderableType]:
    """Predicted and measured cost side by side; nothing if one of them is missing."""
    if predicted is None or measured is None:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "predicted", "measured"):
        table.add_column(name, no_wrap=True, justify="right" if name else "left")
    for name, field, unit in COSTS:
        pair = [getattr(figures, field) for figures in (predicted, measured)]
        if None not in pair:
            table.add_row(name, *(seconds(amount) if unit == "s" else f"{amount:.0f}{unit}" for amount in pair))
    if table.row_count:
        yield table


ENERGY = {"card": "energy of the card", "cpu": "energy of the processor"}
SpentRow = tuple[str, str, str]


def spent_rows(spent: Spent) -> Iterator[SpentRow]:
    """What, of all steps, of a point of reward. A source of energy without a figure says why."""
    yield "points of reward", "none" if spent.points is None else f"{spent.points:.1f}", ""
    for part, amount in spent.seconds.items():
        yield part, seconds(amount), seconds(spent.seconds_per_point[part]) if spent.points else ""
    for source, name in ENERGY.items():
        if source in spent.joules:
            yield name, joules(spent.joules[source]), joules(spent.joules_per_point[source]) if spent.points else ""
        elif source in spent.unread:
            yield name, spent.unread[source], ""


def joules(amount: float) -> str:
    """`0.314 J`, `812 J`, `21.5 kJ`, `3.42 MJ`."""
    if amount >= 1e4:
        return f"{amount / 1e6:.3g} MJ" if amount >= 1e6 else f"{amount / 1e3:.3g} kJ"
    return f"{amount:.0f} J" if amount >= 100 else f"{amount:.3g} J"


def facts(results: Results) -> Text:
    lines = [f"run directory  {results.run_dir}"]
    if results.summary:
        lines += [f"adapter        sha256 {results.summary.adapter_sha256}"]
    if (page := RunDir(results.run_dir).report).is_file():
        lines += [f"report         {page}"]
    return Text("\n".join(lines))


def next_commands(results: Results, *, can_be_extended: bool) -> Text:
    folder = str(results.run_dir)
    if results.summary is not None and results.summary.status == "done":
        commands = {
            "try the trained policy": next_command("generate", folder, *question(results.final or results.base)),
            "export it": next_command("export", folder, "--out", f"{results.run_dir.name}-adapter"),
            "check the result": next_command("replay", folder),
        }
        if can_be_extended:
            commands["train further"] = next_command("resume", folder, "--steps", str(2 * results.steps))
    else:
        commands = {"continue, nothing is lost": next_command("resume", folder)}
    width = max(map(len, commands))
    return Text("\n".join(f"{what:<{width}}  {command}" for what, command in commands.items()))


def question(evaluation: Evaluation | None) -> tuple[str, ...]:
    """The shortest of the examples as an option of `generate`; a chat if there is none."""
    asked = [" ".join(one.question.split()) for one in (evaluation.examples if evaluation else ())]
    # One that begins with a minus would be taken for an option.
    shortest = for_terminal(min((one for one in asked if one and one[0] != "-"), key=len, default=""))
    cut = f"{shortest[:MAX_QUESTION]}..." if len(shortest) > MAX_QUESTION else shortest
    return ("--prompt", cut) if cut else ("--chat",)


HEAD = ("", "accuracy", "95 %", "n", "draws", "cap", "format", "truncated", "length")
LEAST_NEEDED = ("length", "truncated", "format", "draws")
"""Columns that a narrow terminal goes without, in this order. A figure is worth nothing without interval, n and cap."""
MANY_COLUMNS = 1000
TableRow = tuple[str, ...]
LEGEND = (
    "Accuracy is the probability that one completion is correct, with Wilson's 95 % interval over the n tasks. pass@k:"
    " one of k draws is correct. maj@k: the most frequent final answer of k is correct; ties count in part. Both are"
    " estimated without bias from all draws. reward/mean: mean of the whole reward; reward/NAME: of one part, without"
    " its weight. Format: share of completions with a final answer. Length: mean tokens, and the longest."
)


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Whole columns. A narrow terminal has fewer, and names in several lines."""
    console.print(Text(for_terminal(title(evaluation))), soft_wrap=True)
    table, left_out = evaluation_table(evaluation, ()), ()
    while not fits(console, table) and left_out != LEAST_NEEDED:
        left_out = LEAST_NEEDED[: len(left_out) + 1]
        table = evaluation_table(evaluation, left_out)
    console.print(table)
    if left_out:
        console.print(Text(f"left out, as the terminal is narrow: {', '.join(left_out)}; the .md file has them"))


def fits(console: Console, table: Table) -> bool:
    return Measurement.get(console, console.options.update(width=MANY_COLUMNS), table).maximum <= console.width


def evaluation_table(evaluation: Evaluation, left_out: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kept = [place for place, name in enumerate(HEAD) if name not in left_out]
    for place in kept:
        name = HEAD[place]
        table.add_column(name, no_wrap=bool(name), overflow="fold", justify="right" if name else "left")
    for row in rows(evaluation):
        table.add_row(*(Text(for_terminal(row[place])) for place in kept))
    return table


def markdown(evaluation: Evaluation) -> str:
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *rows(evaluation)]
    table = "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)
    return f"# {title(evaluation)}\n\n{table}\n\n{LEGEND}\n"


def title(evaluation: Evaluation) -> str:
    """`step-000040: n = 256 tasks of embedded, seed 0, verifier gsm8k, adapter 1a2b3c4d5e6f`"""
    return (
        f"{evaluation.label}: n = {evaluation.n} tasks of {evaluation.source}, seed {evaluation.seed},"
        f" verifier {evaluation.verifier}, adapter {evaluation.adapter_sha256[:12]}"
    )


def rows(evaluation: Evaluation) -> Iterator[TableRow]:
    """One row for each way to decode, followed by its pass@k, maj@k, levels and subjects."""
    for name, way in evaluation.ways().items():
        yield decoded_row(name, way)
        yield from reward_rows(way)
        yield from parts(beyond_one(way.pass_at), "pass@", way)
        yield from parts(beyond_one(way.maj_at), "maj@", way)
        yield from parts(way.by_level, "level ", way)
        yield from parts(way.by_subject, "", way)


def decoded_row(name: str, way: Decoded) -> TableRow:
    temperature = f" at {way.temperature:g}" if way.temperature else ""
    return (
        f"{name}{temperature}",
        *share_cells(way),
        str(way.draws),
        str(way.cap),
        f"{way.format_rate:.1%}",
        f"{way.truncation_rate:.1%}",
        f"{way.length_mean:.0f} ({way.length_max})",
    )


def reward_rows(way: Decoded) -> Iterator[TableRow]:
    """Indented rows with means that have no interval."""
    for name, value in way.rewards.items():
        yield (f"  reward/{name}", f"{value:.3f}", "", str(way.n), str(way.draws), str(way.cap), "", "", "")


def parts(shares: Mapping[str, Share] | Mapping[int, Share], prefix: str, way: Decoded) -> Iterator[TableRow]:
    """Indented rows with the accuracy alone."""
    for key, share in shares.items():
        yield (f"  {prefix}{key}", *share_cells(share), str(way.draws), str(way.cap), "", "", "")


def beyond_one(shares: Mapping[int, Share]) -> Mapping[int, Share]:
    """Without k = 1, which is the accuracy."""
    return {k: share for k, share in shares.items() if k > 1}


def share_cells(share: Share) -> tuple[str, str, str]:
    """Mean, interval, n."""
    return f"{share.accuracy:.1%}", f"[{share.low:.1%}, {share.high:.1%}]", str(share.n)
