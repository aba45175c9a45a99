"""`compare`: which of two policies is better on the same tasks, by how much, and which tasks flipped.

    A - B over the tasks both answered, greedy and sampled, each with an interval and a verdict (shared/statistics.py)

There are two verdicts, so each is made at 97.5 % (Bonferroni): if the policies are equal, at least one of them says
otherwise in at most 5 % of comparisons. Greedy answers, and single draws, are judged by the exact sign test.

Each side is a run, then its evaluation `--label` is taken, or an evaluation's file. Sides that answered other tasks, or
were judged or capped otherwise, are refused: their difference would mean nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.display.console import make_console
from launch.display.next_command import next_command
from shared.errors import DataError
from shared.run.evaluation import Answered, Decoded, Evaluation, read_evaluation, right
from shared.run.run_dir import RunDir
from shared.statistics import Difference, paired

MAX_COLUMNS = 100
VERDICTS = 2
LEVEL = 1 - 0.05 / VERDICTS


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    """As it was asked for."""
    found: Evaluation
    """Its evaluation."""


def run_command(*, first: Path, second: Path, label: str, flips: int) -> int:
    """Read, refuse or compare, print."""
    sides = open_side(first, label), open_side(second, label)
    refuse_unlike(*sides)
    console = make_console(None)
    for line in report(*sides, flips):
        console.print(line, soft_wrap=True, markup=False)
    return 0


def open_side(path: Path, label: str) -> Side:
    """A run's evaluation, or a file."""
    file = path if path.is_file() else RunDir.open(path).eval / f"{label}.json"
    found = read_evaluation(file)
    if found is None:
        there = ", ".join(sorted(other.stem for other in file.parent.glob("*.json"))) or "none"
        raise DataError(
            f"{path} has no evaluation '{label}' (there are: {there}); make one with"
            f" `{next_command('eval', str(path))}` and name it with --label."
        )
    if not found.answers:
        raise DataError(f"{file} does not hold the single answers that a paired comparison needs; evaluate anew.")
    return Side(name=str(path), found=found)


def refuse_unlike(a: Side, b: Side) -> None:
    """What must be the same, in the order in which people get it wrong."""
    must: dict[str, tuple[object, object]] = {
        "other tasks": (tasks_of(a.found), tasks_of(b.found)),
        "another verifier": (a.found.verifier, b.found.verifier),
        "another cap": (a.found.greedy.cap, b.found.greedy.cap),
        "another temperature": (a.found.sampled.temperature, b.found.sampled.temperature),
    }
    for what, (one, other) in must.items():
        if one != other:
            raise DataError(
                f"{a.name} and {b.name} cannot be compared: the second was evaluated with {what} ({one} against"
                f" {other}); evaluate both alike, with `eval` and the same data, --problems and caps."
            )


def tasks_of(found: Evaluation) -> str:
    """`256 of data/test.jsonl, sha256 1a2b3c4d`"""
    return f"{found.n} of {found.source}, sha256 {found.tasks_sha256[:8]}"


def report(a: Side, b: Side, flips: int) -> Iterator[str]:
    """Line by line."""
    yield f"A  {described(a)}"
    yield f"B  {described(b)}"
    yield f"on the same {a.found.n} tasks of {a.found.source}, verifier {a.found.verifier}, cap {a.found.greedy.cap}"
    yield ""
    up, down = flipped(a.found, b.found), flipped(b.found, a.found)
    greedy = paired(right(a.found), right(b.found), LEVEL)
    yield verdict("greedy", a.found.greedy, b.found.greedy, greedy)
    yield f"         right in A alone {len(up)}, in B alone {len(down)}{chance(greedy)}"
    sampled = paired([t.sampled for t in a.found.answers], [t.sampled for t in b.found.answers], LEVEL)
    yield verdict("sampled", a.found.sampled, b.found.sampled, sampled)
    yield f"         {draws(a, b)}{chance(sampled)}"
    yield (
        f"{VERDICTS} verdicts, each at {100 * LEVEL:g} % (Bonferroni): of two equal policies, one is called better"
        " in at most 5 % of comparisons"
    )
    yield from shown("right in A, wrong in B", up, flips)
    yield from shown("right in B, wrong in A", down, flips)


def described(side: Side) -> str:
    """`runs/first: final, after 40 updates, seed 0, adapter 1a2b3c4d5e6f`"""
    found = side.found
    return f"{side.name}: {found.label}, after {found.version} updates, adapter {found.adapter_sha256[:12]}"


def verdict(name: str, a: Decoded, b: Decoded, difference: Difference) -> str:
    """Who is better, by how much, and how sure that is."""
    interval = f"[{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    points = f"{100 * difference.mean:+.1f} points, {100 * LEVEL:g} % {interval}"
    if not difference.certain:
        who = f"no difference can be told at n = {difference.n}"
    else:
        who = "A is better" if difference.mean > 0 else "B is better"
    return f"{name:8s} A {a.accuracy:.1%}, B {b.accuracy:.1%}: A - B = {points}: {who}"


def chance(difference: Difference) -> str:
    """The p of the test that decides, where one does."""
    return "" if difference.p is None else f"; sign test p = {difference.p:.3g}"


def draws(a: Side, b: Side) -> str:
    """How many, with which seeds."""
    one, other = a.found, b.found
    return (
        f"temperature {one.sampled.temperature:g}; {one.sampled.draws} draws a task with seed {one.seed} in A,"
        f" {other.sampled.draws} with seed {other.seed} in B"
    )


def flipped(a: Evaluation, b: Evaluation) -> list[tuple[Answered, Answered]]:
    """Tasks whose greedy answer is right in a alone, as each answered them."""
    pairs = zip(a.answers, b.answers, strict=True)
    return [(one, other) for one, other in pairs if one.greedy == "correct" != other.greedy]


def shown(title: str, pairs: list[tuple[Answered, Answered]], limit: int) -> Iterator[str]:
    """The first few tasks; the one that was right comes first."""
    if pairs and limit:
        yield ""
        yield f"{title} ({min(limit, len(pairs))} of {len(pairs)}):"
    for good, bad in pairs[:limit]:
        yield f"  {short(good.question)}  [gold {short(good.answer)}]"
        yield f"    right  {short(good.said)}"
        yield f"    {bad.greedy:6s} {short(bad.said)}"


def short(text: str) -> str:
    """The end of it, on one line: that is where answers stand."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_COLUMNS else f"...{line[3 - MAX_COLUMNS :]}"
