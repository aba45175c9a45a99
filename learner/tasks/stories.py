"""The stories of the word problems.

A story has an opening with a first number, one sentence for each operation it knows, and a question. The words are few
and short on purpose: the tokenizer has room for about 250 merges, and short prompts keep rollouts fast. Left out on
purpose: several phrasings of one event, units, fractions, and numbers in words (beyond double and triple).
"""

from dataclasses import dataclass
from typing import Literal

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
