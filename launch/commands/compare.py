"""`compare`: which of two policies is better on the same tasks, by how much, and which tasks flipped.

    A - B over the same tasks, greedy and sampled, each with an interval and a verdict (shared/statistics.py)

There are two verdicts, so each is made at 97.5 % (Bonferroni): if the policies are equal, at least one verdict says
otherwise in at most 5 % of comparisons. Greedy completions and single draws are judged by the exact sign test.

Each side is a run, whose evaluation `--label` is read, or the file of an evaluation. Two evaluations with different
tasks, verifiers or caps are refused, since their difference would mean nothing. Where temperatures or draws differ, the
sampled completions get no verdict: a share of one draw varies more than one of eight. For two runs, the
time and the energy of their steps are shown too, in total and per point of reward.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.display.console import make_console, next_command
from launch.display.report import spent_rows
from protocol.outcome import Outcome
from protocol.plain_text import for_terminal
from shared.errors import DataError
from shared.run.evaluation import Decoded, Evaluation, TaskResult, read_evaluation, right
from shared.run.reader import Run
from shared.run.run_dir import RunDir
from shared.statistics import Difference, paired

MAX_COLUMNS = 100
NAME_COLUMNS, SPENT_COLUMNS = 26, 28
VERDICTS = 2
LEVEL = 1 - 0.05 / VERDICTS


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two policies."""

    name: str
    """The path that the user typed."""
    evaluation: Evaluation


def compare_runs(*, first: Path, second: Path, label: str, flips: int) -> int:
    sides = open_side(first, label), open_side(second, label)
    refuse_unlike(*sides)
    console = make_console()
    runs = [Run(path) for path in (first, second) if path.is_dir()]
    for line in (*report(*sides, flips), *(spent_lines(*runs) if len(runs) == len(sides) else ())):
        console.print(line, soft_wrap=True, markup=False)
    return 0


def open_side(path: Path, label: str) -> Side:
    """path: a run directory or the file of an evaluation."""
    if "/" in label:
        raise DataError(f"--label got '{label}', expected the name of an evaluation; give a file in place of the run.")
    file = path if os.path.isfile(path) else RunDir.open(path).eval / f"{label}.json"
    evaluation = read_evaluation(file)
    if evaluation is None:
        there = ", ".join(sorted(other.stem for other in file.parent.glob("*.json"))) or "none"
        raise DataError(
            f"{path} has no evaluation '{label}' (there are: {there}); make one with"
            f" `{next_command('eval', str(path))}` and name it with --label."
        )
    if not evaluation.task_results:
        raise DataError(f"{file} has no results per task, which a paired comparison needs; evaluate again.")
    return Side(name=str(path), evaluation=evaluation)


def refuse_unlike(a: Side, b: Side) -> None:
    """The most frequent mistake is checked first. Equal tasks may have come from different files."""
    one, other = a.evaluation, b.evaluation
    must_agree = (
        ("other tasks", one.tasks_sha256, other.tasks_sha256, tasks_of),
        ("another verifier", one.verifier, other.verifier, lambda of: of.verifier),
        ("another cap", one.greedy.cap, other.greedy.cap, lambda of: of.greedy.cap),
    )
    for what, mine, theirs, words in must_agree:
        if mine != theirs:
            raise DataError(
                f"{a.name} and {b.name} cannot be compared: the second was evaluated with {what} ({words(one)} against"
                f" {words(other)}); run `eval` on both with the same data, --problems and caps."
            )


def tasks_of(evaluation: Evaluation) -> str:
    """`256 of data/test.jsonl, sha256 1a2b3c4d`"""
    return f"{evaluation.n} of {evaluation.source}, sha256 {evaluation.tasks_sha256[:8]}"


def report(a: Side, b: Side, flips: int) -> Iterator[str]:
    one, other = a.evaluation, b.evaluation
    yield f"A  {described(a)}"
    yield f"B  {described(b)}"
    yield f"on the same {one.n} tasks of {one.source}, verifier {one.verifier}, cap {one.greedy.cap}"
    yield ""
    up, down = flipped(one, other), flipped(other, one)
    greedy = paired(right(one), right(other), LEVEL)
    yield verdict("greedy", one.greedy, other.greedy, greedy)
    yield f"         right in A alone {len(up)}, in B alone {len(down)}{chance(greedy)}"
    yield from sampled_lines(one, other)
    yield (
        f"at most {VERDICTS} verdicts, each at {100 * LEVEL:g} % (Bonferroni): of two equal policies, one is called"
        " better in at most 5 % of comparisons"
    )
    yield from shown("right in A, wrong in B", up, flips)
    yield from shown("right in B, wrong in A", down, flips)


def sampled_lines(one: Evaluation, other: Evaluation) -> Iterator[str]:
    if why := why_no_verdict(one.sampled, other.sampled):
        yield f"sampled  A {one.sampled.accuracy:.1%}, B {other.sampled.accuracy:.1%}: no verdict, {why}"
        return
    found = paired([task.sampled for task in one.task_results], [task.sampled for task in other.task_results], LEVEL)
    yield verdict("sampled", one.sampled, other.sampled, found)
    yield f"         {draws(one, other)}{chance(found)}"


def why_no_verdict(a: Decoded, b: Decoded) -> str:
    """Why the sampled completions have no verdict; empty if they have one."""
    if a.temperature != b.temperature:
        return f"because A has temperature {a.temperature:g} and B {b.temperature:g}"
    if a.draws != b.draws:
        return f"because A has {a.draws} draws a task and B {b.draws}; run `eval` on both with the same --samples"
    return ""


def described(side: Side) -> str:
    """`runs/first: final, after 40 steps, adapter 1a2b3c4d5e6f`"""
    one = side.evaluation
    return f"{side.name}: {one.label}, after {one.version} steps, adapter {one.adapter_sha256[:12]}"


def verdict(name: str, a: Decoded, b: Decoded, difference: Difference) -> str:
    """`greedy   A 90.0%, B 66.0%: A - B = +24.0 points, 97.5 % [+12.1, +35.9]: A is better`"""
    interval = f"[{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    points = f"{100 * difference.mean:+.1f} points, {100 * LEVEL:g} % {interval}"
    if not difference.certain:
        who = f"no significant difference at n = {difference.n}"
    else:
        who = "A is better" if difference.mean > 0 else "B is better"
    return f"{name:8s} A {a.accuracy:.1%}, B {b.accuracy:.1%}: A - B = {points}: {who}"


def chance(difference: Difference) -> str:
    """The p-value, where a sign test decides."""
    return "" if difference.p is None else f"; sign test p = {difference.p:.3g}"


def draws(one: Evaluation, other: Evaluation) -> str:
    return (
        f"temperature {one.sampled.temperature:g}; {one.sampled.draws} draws a task with seed {one.seed} in A,"
        f" {other.sampled.draws} with seed {other.seed} in B"
    )


def flipped(a: Evaluation, b: Evaluation) -> list[tuple[TaskResult, TaskResult]]:
    """Tasks whose greedy completion is correct in a and not in b."""
    pairs = zip(a.task_results, b.task_results, strict=True)
    return [(one, other) for one, other in pairs if one.greedy == Outcome.CORRECT != other.greedy]


def spent_lines(a: Run, b: Run) -> Iterator[str]:
    """Nothing if a run has no step."""
    if not (len(a.metrics) and len(b.metrics)):
        return
    rows = [{name: spent_words(*row) for name, *row in spent_rows(run.spent())} for run in (a, b)]
    yield ""
    yield f"{'time and energy':{NAME_COLUMNS}s} {'A':{SPENT_COLUMNS}s} B"
    for name in dict.fromkeys(name for of in rows for name in of):
        one, other = (of.get(name, "") for of in rows)
        yield f"  {name:{NAME_COLUMNS - 2}s} {one:{SPENT_COLUMNS}s} {other}".rstrip()


def spent_words(whole: str, of_a_point: str) -> str:
    """`12 s, 0.5 s a point`"""
    return f"{whole}, {of_a_point} a point" if of_a_point else whole


def shown(title: str, pairs: list[tuple[TaskResult, TaskResult]], limit: int) -> Iterator[str]:
    """The first few of these tasks, with the final words of both completions."""
    if pairs and limit:
        yield ""
        yield f"{title} ({min(limit, len(pairs))} of {len(pairs)}):"
    for good, bad in pairs[:limit]:
        yield f"  {short(good.question)}  [gold {short(good.answer)}]"
        yield f"    right  {short(good.last_words)}"
        yield f"    {bad.greedy:6s} {short(bad.last_words)}"


def short(text: str) -> str:
    """The end of the text, on one line: the final answer is there."""
    line = for_terminal(" ".join(text.split()))
    return line if len(line) <= MAX_COLUMNS else f"...{line[3 - MAX_COLUMNS :]}"
