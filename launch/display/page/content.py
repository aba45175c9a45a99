"""Everything a page shows of a run, read once: verdicts, charts, tables, answers, configuration, versions, commands.

The page is a record of a moment, so nothing here is lazy. Texts stay as they are; the template escapes all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from launch.display.console import next_command
from launch.display.page.charts import Chart, chart, charts_of, points
from launch.display.page.tokens import Chosen, chosen_groups
from launch.display.report import COSTS, gain, share, spent_rows
from launch.display.watch import clock, seconds
from launch.why.command import verdicts
from launch.why.view import view_of
from shared.config.tree import Config
from shared.run.evaluation import Decoded, Evaluation
from shared.run.history import Event
from shared.run.metrics import Thinned
from shared.run.reader import Run
from shared.run.summary import RunVerdict

ACCURACY = "Held-out accuracy (greedy), with 95 % intervals"
MOST_EVENTS = 200
OVERLAID = {"Reward": "reward/mean", "Entropy, nats a token": "entropy/mean", "Length, tokens": "length/mean"}
"""Charts that compare runs, by the key of their metrics."""
Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """One run."""

    name: str
    status: str
    """In words, with steps and time."""
    facts: Rows
    """Name and value."""
    verdicts: Sequence[RunVerdict]
    charts: Sequence[Chart]
    evaluations: Rows
    """Label, steps, and accuracy with its interval by way."""
    gain: str
    """Trained minus base; empty without both."""
    levels: Rows
    """Level or subject, base, trained."""
    costs: Rows
    """Name, predicted, measured."""
    spent: Rows
    """Name, of all steps, of a point of reward; empty before the first step."""
    chosen: Sequence[Chosen]
    events: Sequence[Event]
    """The last ones."""
    earlier_events: int
    """How many more there are."""
    changed: Rows
    """Keys that are not the default: key, value, default."""
    config: str
    """All keys, as JSON."""
    versions: Rows
    commands: Rows
    """What for, command."""


def page_of(run: Run) -> RunPage:
    evaluations, config, events = run.evaluations(), msgspec.to_builtins(run.config()), run.events()
    return RunPage(
        name=run.path.resolve().name,
        status=status(run),
        facts=facts(run),
        verdicts=verdicts(view_of(run)),
        charts=[*accuracy_chart({"accuracy": evaluations}), *charts_of(run.metrics)],
        evaluations=[evaluation_row(one) for one in evaluations],
        gain=gain_of(evaluations),
        levels=list(level_rows(evaluations)),
        costs=list(cost_rows(run)),
        spent=list(spent_rows(run.spent())) if len(run.metrics) else [],
        chosen=chosen_groups(run.rollouts),
        events=events[-MOST_EVENTS:],
        earlier_events=max(0, len(events) - MOST_EVENTS),
        changed=changed_keys(config),
        config=msgspec.json.format(msgspec.json.encode(config), indent=2).decode(),
        versions=version_rows(run),
        commands=commands(run.path),
    )


def status(run: Run) -> str:
    summary, steps = run.summary(), run.config().run.steps
    if summary is None:
        return "not started"
    words = {"dead": "killed (its learner is gone)"}.get(run.state(), run.state())
    return f"{words}, {max(len(run.metrics), summary.steps)} of {steps} steps, {clock(summary.wall_s)}"


def facts(run: Run) -> Rows:
    config = run.config()
    summary, damaged = run.summary(), run.metrics.damaged + run.rollouts.damaged
    logged = f"{len(run.rollouts)} groups of {len(run.rollouts.steps())} steps, {run.rollouts.size / 1e6:.1f} MB"
    return [
        ("model", config.model.path),
        ("tasks", config.tasks.source),
        ("verifier", config.verifier.kind),
        ("objective", f"{config.loss.kind}, advantage {config.advantage}"),
        ("answers a step", f"{config.rollout.prompts} prompts x {config.rollout.group}"),
        ("rollouts.jsonl", logged + (f"; {damaged} damaged lines were skipped" if damaged else "")),
        ("adapter", f"sha256 {summary.adapter_sha256}" if summary and summary.adapter_sha256 else "none yet"),
    ]


def accuracy_chart(by_name: Mapping[str, Sequence[Evaluation]]) -> list[Chart]:
    """One line for each name that has several; none without any."""
    curves = {name: accuracies(found) for name, found in by_name.items()}
    drawn = {name: curve for name, curve in curves.items() if len(curve.step) > 1}
    return [chart(ACCURACY, drawn)] if drawn else []


def accuracies(evaluations: Sequence[Evaluation]) -> Thinned:
    """Of the tasks of the first evaluation."""
    same = [one for one in evaluations if one.tasks_sha256 == evaluations[0].tasks_sha256]
    newest = {one.version: one.greedy for one in same}
    return points([(version, one.accuracy, one.low, one.high) for version, one in newest.items()])


def evaluation_row(one: Evaluation) -> tuple[str, ...]:
    return one.label, str(one.version), str(one.n), share(one.greedy), share(one.sampled), at_k(one.sampled)


def at_k(way: Decoded) -> str:
    """`pass@8 71.5 %  (65.7 to 76.7)` for the largest k; empty with one completion a task."""
    shares = [*(("pass", way.pass_at), ("maj", way.maj_at))]
    return ", ".join(f"{name}@{max(found)} {share(found[max(found)])}" for name, found in shares if len(found) > 1)


def first_and_last(evaluations: Sequence[Evaluation]) -> tuple[Evaluation, Evaluation] | None:
    """The base, and the newest policy that was evaluated on the same tasks."""
    base = [one for one in evaluations if one.label == "base"]
    later = [one for one in evaluations if base and one.version > 0 and one.tasks_sha256 == base[0].tasks_sha256]
    return (base[0], later[-1]) if later else None


def gain_of(evaluations: Sequence[Evaluation]) -> str:
    ends = first_and_last(evaluations)
    comparable = ends and ends[0].task_results and len(ends[0].task_results) == len(ends[1].task_results)
    return gain(*ends) if ends and comparable else ""


def level_rows(evaluations: Sequence[Evaluation]) -> Iterator[tuple[str, ...]]:
    if ends := first_and_last(evaluations):
        base, last = ends[0].greedy, ends[1].greedy
        pairs = ((base.by_level, last.by_level), (base.by_subject, last.by_subject))
        for before, after in pairs:
            for name, found in before.items():
                yield name, str(found.n), share(found), share(after[name]) if name in after else ""


def cost_rows(run: Run) -> Iterator[tuple[str, ...]]:
    """What was predicted or measured."""
    summary = run.summary()
    for name, field, unit in COSTS if summary else ():
        pair = [getattr(figures, field, None) for figures in (summary.predicted, summary.measured)] if summary else []
        if any(value is not None for value in pair):
            yield name.strip(), *("" if value is None else amount(value, unit) for value in pair)


def amount(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else f"{value:,.0f}{unit}"


def changed_keys(config: Mapping[str, Any]) -> Rows:
    now, default = flat(config), flat(msgspec.to_builtins(Config()))
    return [(key, text(value), text(default.get(key))) for key, value in now.items() if value != default.get(key)]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def version_rows(run: Run) -> Rows:
    info = run.info()
    if info is None:
        return []
    others = {**info.packages, **{name: str(value) for name, value in (info.compute | info.card).items()}}
    return [
        ("run", info.run_id),
        ("made", info.created),
        ("python", info.python),
        ("platform", info.platform),
        ("processor", f"{info.cpu}, {info.cpu_count} cores"),
        *others.items(),
    ]


def commands(path: Path) -> Rows:
    folder = str(path)
    return [
        ("apply the journal again: must give the same adapter", next_command("replay", folder)),
        ("train further, or continue", next_command("resume", folder)),
        ("try the policy", next_command("generate", folder, "--chat")),
        ("look at a group", next_command("show", folder, "--step", "1", "--group", "0")),
        ("export the adapter", next_command("export", folder, "--out", f"{path.name}-adapter")),
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs beside each other."""

    charts: Sequence[Chart]
    different: Rows
    """Keys that are not the same in all: key, and its value in each run."""
    accuracy: Rows
    """Run, base, last."""


def comparison_of(runs: Mapping[str, Run]) -> Comparison:
    """runs: by name."""
    configs = {name: flat(msgspec.to_builtins(run.config())) for name, run in runs.items()}
    keys = list(dict.fromkeys(key for config in configs.values() for key in config))
    rows = {key: [text(config.get(key)) for config in configs.values()] for key in keys}
    evaluations = {name: run.evaluations() for name, run in runs.items()}
    ends = {name: first_and_last(found) for name, found in evaluations.items()}
    return Comparison(
        charts=[*accuracy_chart(evaluations), *overlaid(runs)],
        different=[(key, *values) for key, values in rows.items() if len(set(values)) > 1],
        accuracy=[(name, *(share(one.greedy) for one in both)) for name, both in ends.items() if both],
    )


def overlaid(runs: Mapping[str, Run]) -> Iterator[Chart]:
    """Means alone: bands of several runs would hide each other."""
    for title, key in OVERLAID.items():
        thinned = {name: run.metrics.thinned([key], 240)[key] for name, run in runs.items()}
        drawn = {name: points_of_means(curve) for name, curve in thinned.items() if any(curve.high)}
        if drawn:
            yield chart(title, drawn)


def points_of_means(curve: Thinned) -> Thinned:
    return Thinned(step=curve.step, mean=curve.mean, low=curve.mean, high=curve.mean)
