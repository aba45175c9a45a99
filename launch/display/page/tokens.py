"""Answers for a page: which groups are worth a look, and each token with the classes that colour it.

Chosen are the groups whose answers differ most (early, in the middle and late), the highest rewards and the longest
answers of the last steps, a group that taught nothing, and one that was refused. A page has at most CELLS tokens, so of
a long answer it shows both ends. The class of a token says in which bin a figure is, and a style sheet gives bins their
colours, so a reader changes what is coloured without a script.

    e  entropy      0.01, 0.1, 0.5, 1, 2 nats            m  mismatch     1e-4, 1e-3, 0.01, 0.1
    r  ratio        0.8, 0.95, 1.05, 1.25                a  advantage * mask    -1, -0.1, 0, 0.1, 1
    k  mask         0, 1                                 x  not sampled: put there by an environment
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.run.rollout_index import RolloutIndex
from shared.run.rollouts import GroupHead, RolloutGroup, RolloutSample

BINS = {
    "e": (0.01, 0.1, 0.5, 1.0, 2.0),
    "m": (1e-4, 1e-3, 0.01, 0.1),
    "r": (0.8, 0.95, 1.05, 1.25),
    "a": (-1.0, -0.1, -1e-9, 1e-9, 0.1, 1.0),
    "k": (0.5,),
}
CELLS = 12_000
SAMPLES = 8
"""Of a group: the best and the worst paid."""
ENDS = 200
"""Tokens at each end of a long answer."""
LATE = 50
"""Steps among which the best paid is looked for."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One token."""

    text: str
    classes: str
    title: str
    """Its figures."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sample, ready to be shown."""

    number: int
    """Place in its group."""
    sample: RolloutSample
    cells: Sequence[Cell]
    """Tokens; of a long answer its ends, with what was left out between them as a cell of its own."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A group that is worth a look."""

    reason: str
    number: int
    """Place in its step."""
    group: RolloutGroup
    answers: Sequence[Answer]


def chosen_groups(rollouts: RolloutIndex) -> list[Chosen]:
    found: list[Chosen] = []
    seen: set[tuple[int, int]] = set()
    left = CELLS
    for reason, step, number in candidates(rollouts):
        group = rollouts.group(step, number)
        if group is None or (step, number) in seen:
            continue
        seen.add((step, number))
        answers = [answer(index, group.samples[index]) for index in best_and_worst(group)]
        cells = sum(len(one.cells) for one in answers)
        if cells <= left:
            left -= cells
            found.append(Chosen(reason=reason, number=number, group=group, answers=answers))
    return found


def candidates(rollouts: RolloutIndex) -> Iterator[tuple[str, int, int]]:
    """Reason, step and number, in the order of a page; some twice."""
    steps = rollouts.steps()
    if not steps:
        return
    middle = steps[len(steps) // 2]
    for reason, step in (("early", steps[0]), ("in the middle", middle), ("late", steps[-1])):
        heads = rollouts.heads(step)
        if heads:
            number = max(heads, key=lambda place: heads[place].spread)
            yield f"{reason}: the group whose rewards differ most", step, number
    late = [(step, number, head) for step in steps[-LATE:] for number, head in rollouts.heads(step).items()]
    for reason, wanted in REASONS.items():
        rows = [row for row in late if wanted(row[2]) is not None]
        if rows:
            step, number, _ = max(rows, key=lambda row: (wanted(row[2]), row[0]))
            yield reason, step, number


def best_paid(head: GroupHead) -> float | None:
    return max(head.rewards, default=None)


def longest(head: GroupHead) -> float | None:
    return max(head.lengths, default=None)


def taught_nothing(head: GroupHead) -> float | None:
    return float(head.step) if head.fate == "idle" else None


def was_refused(head: GroupHead) -> float | None:
    return float(head.step) if head.fate == "quarantined" else None


def was_stale(head: GroupHead) -> float | None:
    return float(head.stale) if head.stale else None


REASONS = {
    "the best paid answer of the last steps": best_paid,
    "the longest answer of the last steps": longest,
    "a group that taught nothing": taught_nothing,
    "a group whose update was refused": was_refused,
    "sampled by an older policy": was_stale,
}


def best_and_worst(group: RolloutGroup) -> list[int]:
    """Places of the samples to show, in their order."""
    ranked = sorted(range(len(group.samples)), key=lambda place: -group.samples[place].reward)
    half = SAMPLES // 2
    return sorted(ranked if len(ranked) <= SAMPLES else [*ranked[:half], *ranked[-half:]])


def answer(number: int, sample: RolloutSample) -> Answer:
    cells = list(cells_of(sample))
    if len(cells) > 2 * ENDS + 1:
        left_out = Cell(text=f" [{len(cells) - 2 * ENDS} tokens left out] ", classes="gap", title="")
        cells = [*cells[:ENDS], left_out, *cells[-ENDS:]]
    return Answer(number=number, sample=sample, cells=cells)


def cells_of(sample: RolloutSample) -> Iterator[Cell]:
    nothing: list[float | None] = [None] * len(sample.ids)
    mask = nothing if sample.mask is None else sample.mask
    columns = zip(
        *(sample.pieces, sample.sampled(), sample.likelihood(), sample.entropy or nothing),
        *(sample.mismatch(), sample.ratio(), sample.push(), mask),
        strict=False,
    )
    for piece, sampled, logprob, entropy, mismatch, ratio, push, carried in columns:
        figures = {"e": entropy, "m": mismatch, "r": ratio, "a": push, "k": carried}
        bins = [f"{name}{bisect_right(BINS[name], value)}" for name, value in figures.items() if value is not None]
        shown = {"log-prob": logprob, "entropy": entropy, "ratio": ratio, "mismatch": mismatch}
        title = ", ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None)
        yield Cell(
            text=piece,
            classes=" ".join(bins if sampled else ["x"]),
            title=title if sampled else "not sampled",
        )
