"""Seeded arithmetic word problems in GSM8K format, at three levels.

Level k is a story of k events, so k operations, on integers that stay in 0..99:

    Tom has 12 apples. He buys 7. He eats 4. How many apples are left?
    12 + 7 = 19
    19 - 4 = 15
    #### 15

A stable hash of the text decides whether a problem is for training or held out, so no seed or count puts one question
into both. A story has an opening with a first number, one sentence for each operation it knows, and a question. Its
words are few and short, because the embedded tokenizer has room for about 250 merges and short prompts keep sampling
fast.
Left out: files of problems, since a seed describes them completely; several phrasings of one event, units, fractions.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from shared.errors import DataError

Op = Literal["+", "-", "*"]


@dataclass(frozen=True, kw_only=True)
class Story:
    """One setting. `{who}` and `{pronoun}` stand for a person, `{kind}` for an adjective, `{n}` for a number."""

    name: str
    """Key of the story."""
    opening: str
    """First sentence, which gives the number to start from."""
    gain: str
    """Sentence that adds `{n}`."""
    loss: str
    """Sentence that subtracts `{n}`."""
    grows: bool
    """Whether multiplications by 2 and 3 may happen."""
    question: str
    """Last sentence."""


GROWTH: dict[int, str] = {2: "Then they double.", 3: "Then they triple."}
HEROES: tuple[tuple[str, str], ...] = (
    ("Tom", "He"),
    ("Ann", "She"),
    ("Sam", "He"),
    ("Mia", "She"),
    ("Ben", "He"),
    ("Eva", "She"),
    ("Max", "He"),
    ("Zoe", "She"),
)
KINDS: tuple[str, ...] = ("big", "red", "new", "nice", "small")

STORIES: tuple[Story, ...] = (
    Story(
        name="apples",
        opening="{who} has {n} apples.",
        gain="{pronoun} buys {n}.",
        loss="{pronoun} eats {n}.",
        grows=False,
        question="How many apples are left?",
    ),
    Story(
        name="coins",
        opening="{who} has {n} coins.",
        gain="{pronoun} finds {n}.",
        loss="{pronoun} pays {n}.",
        grows=True,
        question="How many coins now?",
    ),
    Story(
        name="bus",
        opening="A {kind} bus has {n} seats in use.",
        gain="Then {n} get on.",
        loss="Then {n} get off.",
        grows=False,
        question="How many seats in use now?",
    ),
    Story(
        name="books",
        opening="A {kind} room has {n} books.",
        gain="{who} puts in {n}.",
        loss="{who} takes {n}.",
        grows=False,
        question="How many books are in?",
    ),
    Story(
        name="plants",
        opening="A {kind} field has {n} plants.",
        gain="{who} sows {n}.",
        loss="Then {n} die.",
        grows=True,
        question="How many plants are left?",
    ),
    Story(
        name="pens",
        opening="A {kind} shop has {n} pens.",
        gain="It buys {n}.",
        loss="It sells {n}.",
        grows=False,
        question="How many pens now?",
    ),
    Story(
        name="hens",
        opening="A {kind} farm has {n} hens.",
        gain="Then {n} come.",
        loss="Then {n} go.",
        grows=True,
        question="How many hens are in?",
    ),
    Story(
        name="points",
        opening="{who} has {n} points.",
        gain="{pronoun} wins {n}.",
        loss="{pronoun} loses {n}.",
        grows=True,
        question="How many points now?",
    ),
    Story(
        name="fish",
        opening="A {kind} lake has {n} fish.",
        gain="{who} adds {n}.",
        loss="{who} takes {n}.",
        grows=False,
        question="How many fish are left?",
    ),
    Story(
        name="buns",
        opening="{who} has {n} buns.",
        gain="{pronoun} bakes {n}.",
        loss="{pronoun} sells {n}.",
        grows=False,
        question="How many buns are left?",
    ),
)


Split = Literal["train", "held_out"]

LEVELS = (1, 2, 3)
LARGEST = 99
_LARGEST_OPERAND = 20
MAX_REPEATS = 500
"""After this many repeated questions in a row, few new ones can be left."""
_HELD_OUT_ONE_IN = 8
QuestionT = TypeVar("QuestionT", bound="Question")


class Question(Protocol):
    @property
    def question(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with its solution and gold answer."""

    question: str
    """The word problem, one paragraph of plain text."""
    solution: str
    """Worked steps, one equation a line, and a last line `#### n`."""
    answer: int
    """The n of that last line, in 0..99."""
    level: int
    """Number of operations, 1 to 3."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One event of a story, as arithmetic."""

    op: Op
    """How the event changes the running number."""
    operand: int
    """By which number, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A problem as arithmetic, with the text that tells it."""

    story: Story
    """The setting."""
    question: str
    """The text that tells it."""
    start: int
    """Number in the opening."""
    moves: tuple[Move, ...]
    """The events in order; as many as the level."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One equation `left op right = result`, true or not."""

    left: int
    """Running number before the event."""
    move: Move
    """The event."""
    result: int
    """Running number after it, as written."""

    def __str__(self) -> str:
        return f"{self.left} {self.move.op} {self.move.operand} = {self.result}"


def problems(split: Split, count: int, seed: int, levels: tuple[int, ...]) -> list[Problem]:
    """`count` distinct problems of one split, the levels in rotation; the same arguments give the same list."""
    rng = random.Random(seed)
    plots = draw_distinct(count, split, lambda number: draw_plot(rng, levels[number % len(levels)], split))
    return [to_problem(plot) for plot in plots]


def draw_distinct(count: int, split: Split, draw: Callable[[int], QuestionT]) -> list[QuestionT]:
    """`count` different questions of one split; DataError if there are fewer. draw: gets how many there are already."""
    found: dict[str, QuestionT] = {}
    repeats = 0
    while len(found) < count:
        drawn = draw(len(found))
        if split_of(drawn.question) != split:
            continue
        repeats = repeats + 1 if drawn.question in found else 0
        if repeats > MAX_REPEATS:
            raise DataError(
                f"tasks.source was asked for {count} different questions ({split}), but has little more than"
                f" {len(found)}; set a smaller tasks.limit."
            )
        found.setdefault(drawn.question, drawn)
    return list(found.values())


def draw_plot(rng: random.Random, level: int, split: Split) -> Plot:
    """A random plot of `level` events whose text belongs to `split`."""
    while True:
        plot = _draw_any_plot(rng, level)
        if split_of(plot.question) == split:
            return plot


def split_of(question: str) -> Split:
    """The split of a question. crc32 never changes, unlike `hash`."""
    return "held_out" if zlib.crc32(question.encode()) % _HELD_OUT_ONE_IN == 0 else "train"


def to_problem(plot: Plot) -> Problem:
    steps = work_out(plot.start, plot.moves)
    answer = steps[-1].result
    lines = [*map(str, steps), f"#### {answer}"]
    return Problem(question=plot.question, solution="\n".join(lines), answer=answer, level=len(plot.moves))


def work_out(start: int, moves: tuple[Move, ...]) -> list[Step]:
    """One step per move, each with the result of the step before."""
    steps: list[Step] = []
    value = start
    for move in moves:
        steps.append(Step(left=value, move=move, result=apply(value, move)))
        value = steps[-1].result
    return steps


def apply(value: int, move: Move) -> int:
    """`value op operand`."""
    match move.op:
        case "+":
            return value + move.operand
        case "-":
            return value - move.operand
        case "*":
            return value * move.operand


def _draw_any_plot(rng: random.Random, level: int) -> Plot:
    story = rng.choice(STORIES)
    start = value = rng.randint(2, _LARGEST_OPERAND)
    moves: list[Move] = []
    for _ in range(level):
        moves.append(_draw_move(rng, story, value))
        value = apply(value, moves[-1])
    return Plot(story=story, question=_tell(rng, story, start, moves), start=start, moves=tuple(moves))


def _draw_move(rng: random.Random, story: Story, value: int) -> Move:
    """A random event that keeps the running number in 0..99."""
    ops: list[Op] = []
    if value < LARGEST:
        ops.append("+")
    if value > 0:
        ops.append("-")
    if story.grows and 0 < 2 * value <= LARGEST:
        ops.append("*")
    op = rng.choice(ops)
    largest = {"+": LARGEST - value, "-": value, "*": 3 if 3 * value <= LARGEST else 2}[op]
    return Move(op=op, operand=rng.randint(2 if op == "*" else 1, min(_LARGEST_OPERAND, largest)))


def _tell(rng: random.Random, story: Story, start: int, moves: list[Move]) -> str:
    who, pronoun = rng.choice(HEROES)
    kind = rng.choice(KINDS)
    sentences = [story.opening.format(who=who, kind=kind, n=start)]
    for move in moves:
        sentence = {"+": story.gain, "-": story.loss, "*": GROWTH.get(move.operand, "")}[move.op]
        sentences.append(sentence.format(who=who, pronoun=pronoun, n=move.operand))
    return " ".join([*sentences, story.question])
