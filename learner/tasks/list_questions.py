"""Seeded questions about a short list of numbers, which small pretrained models answer sometimes:

    Which number is the smallest? 41, 17, 88, 23
    The smallest number is 17.
    #### 17

What is asked for is the largest, the smallest or the second number; `subject` says which. The lists have three to six
distinct numbers from 10 to 99. As with the word problems, a hash of the text decides whether a question is for training
or held out. A model learns from tasks that it solves sometimes; `benchmarks.prompt_forms` measures how often it does.
Left out: more kinds, and levels; three kinds are enough to see a model learn in some minutes.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from learner.tasks.word_problems import Split, draw_distinct

SMALLEST, LARGEST = 10, 99
LENGTHS = (3, 6)
KINDS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "largest": max,
    "smallest": min,
    "second": lambda numbers: numbers[1],
}
"""What is asked for -> the answer."""


@dataclass(frozen=True, kw_only=True)
class ListQuestion:
    """A question with its solution and gold answer."""

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
    return draw_distinct(count, split, lambda number: draw(rng, kinds[number % len(kinds)]))


def draw(rng: random.Random, kind: str) -> ListQuestion:
    """A random list, and a question about it."""
    numbers = rng.sample(range(SMALLEST, LARGEST + 1), rng.randint(*LENGTHS))
    answer = KINDS[kind](numbers)
    return ListQuestion(
        question=f"Which number is the {kind}? {', '.join(map(str, numbers))}",
        solution=f"The {kind} number is {answer}.\n#### {answer}",
        answer=answer,
        kind=kind,
    )
