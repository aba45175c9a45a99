"""Seeded questions about numbers: two kinds for a model with tools, and one that small pretrained models answer
sometimes, as they must to learn from it (`benchmarks.prompt_forms` measures how often).

    calculations   37 boxes hold 48 pens each. How many pens?              a product of two numbers from 12 to 99
                   A shop has 374 pens and buys 589. How many pens?        a sum of two numbers from 120 to 899
                   A shop has 874 pens and sells 589. How many pens?       a difference of two such numbers
    guessing       Ann thinks of a number from 1 to 31. Which one is it?   the number is in the column `answer`
    numbers        Which number is the smallest? 41, 17, 88, 23            or the largest, or the second

The numbers of calculations are too large for a small model to compute with, and the game cannot be won without asking.
Lists have three to six distinct numbers from 10 to 99. `subject` is the kind of calculation, or what is asked of a
list. As with the word problems, a hash decides whether a question is for training or held out; in the game it is one of
question and answer together, because only 8 questions and 31 answers exist.
Left out: more kinds of lists, and levels; three kinds are enough to see a model learn in some minutes.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from learner.tasks.word_problems import HEROES, Split, draw_distinct, split_of

LARGEST_SECRET = 31
"""Five guesses find every number up to here if each halves what is left."""
FACTORS, TERMS = (12, 99), (120, 899)
THINGS = ("pens", "cups", "nuts", "eggs", "cards", "coins")
Op = Literal["*", "+", "-"]
OPS: tuple[Op, ...] = ("*", "+", "-")
SMALLEST, LARGEST = 10, 99
LENGTHS = (3, 6)
KINDS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "largest": max,
    "smallest": min,
    "second": lambda numbers: numbers[1],
}
"""What is asked of a list -> the answer."""


@dataclass(frozen=True, kw_only=True)
class Calculation:
    """A question about two numbers."""

    question: str
    left: int
    op: Op
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.op} {self.right}"

    @property
    def answer(self) -> int:
        return {"*": self.left * self.right, "+": self.left + self.right, "-": self.left - self.right}[self.op]


@dataclass(frozen=True, kw_only=True)
class Game:
    """A number to be guessed."""

    question: str
    secret: int


def calculations(split: Split, count: int, seed: int) -> list[Calculation]:
    """`count` distinct questions of one split, the kinds in rotation; the same arguments give the same list."""
    rng = random.Random(seed)
    return draw_distinct(count, split, lambda number: draw_calculation(rng, OPS[number % len(OPS)]))


def draw_calculation(rng: random.Random, op: Op) -> Calculation:
    left, right = (rng.randint(*(FACTORS if op == "*" else TERMS)) for _ in range(2))
    if op == "-":
        left, right = max(left, right), min(left, right)
    thing = rng.choice(THINGS)
    if op == "*":
        said = f"{left} boxes hold {right} {thing} each."
    else:
        said = f"A shop has {left} {thing} and {'buys' if op == '+' else 'sells'} {right}."
    return Calculation(question=f"{said} How many {thing}?", left=left, op=op, right=right)


def games(split: Split, count: int, seed: int) -> list[Game]:
    """`count` games of one split, some of them alike."""
    drawn = endless_games(random.Random(seed))
    return [next(game for game in drawn if split_of(f"{game.question} {game.secret}") == split) for _ in range(count)]


def endless_games(rng: random.Random) -> Iterator[Game]:
    while True:
        who, _ = rng.choice(HEROES)
        question = f"{who} thinks of a number from 1 to {LARGEST_SECRET}. Which one is it?"
        yield Game(question=question, secret=rng.randint(1, LARGEST_SECRET))


@dataclass(frozen=True, kw_only=True)
class ListQuestion:
    """A question about a list with its solution and gold answer."""

    question: str
    """The question and the list, on one line."""
    solution: str
    """A sentence with the answer, and a last line `#### n`."""
    answer: int
    """The n of that last line, a number of the list."""
    kind: str
    """A key of KINDS."""


def list_questions(split: Split, count: int, seed: int) -> list[ListQuestion]:
    """`count` distinct questions of one split, the kinds in rotation; the same arguments give the same list."""
    rng, kinds = random.Random(seed), tuple(KINDS)
    return draw_distinct(count, split, lambda number: draw_list(rng, kinds[number % len(kinds)]))


def draw_list(rng: random.Random, kind: str) -> ListQuestion:
    """A random list, and a question about it."""
    numbers = rng.sample(range(SMALLEST, LARGEST + 1), rng.randint(*LENGTHS))
    answer = KINDS[kind](numbers)
    return ListQuestion(
        question=f"Which number is the {kind}? {', '.join(map(str, numbers))}",
        solution=f"The {kind} number is {answer}.\n#### {answer}",
        answer=answer,
        kind=kind,
    )
