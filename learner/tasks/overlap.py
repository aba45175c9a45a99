"""Finds questions that a data set has twice, and held-out questions that it also trains on.

Questions are compared as words: letters and digits in lower case, and each operator, so that 5 + 3 is not 5 * 3.
Everything else separates words, and so does a hyphen or a dash in a sentence.

    duplicate    the same words as an earlier training question; a conflict if the gold answers differ
    leaked       a held-out question with the same words as a training question
    near         a held-out question that shares at least 80 % of its n-grams (8 words) with one training question

The time grows linearly with the number of words: an index has each n-gram with the training questions that contain it,
and each n-gram of a held-out question is looked up once; the first few of these questions count. So a phrase that many
questions share does not count as a leak by itself. The index has hashes of n-grams in sorted arrays, 12 bytes for each.
Left out on purpose: meaning; a question in other words is not found.
"""

import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learner.tasks.tasks import whole_question

OTHER_SIGNS = str.maketrans("\u00d7\u00f7\u2212", "*/-")
WORD = re.compile(r"[^\W_]+|[+/^=<>%]|(?<!\*)\*(?!\*)|-(?=\s*(?:[\d(\\]|[^\W\d_aI](?![^\W\d_])))")
"""A minus sign counts only before a number, one letter that is no word, a bracket or a command of LaTeX; a star only
alone, as two of them are Markdown's bold type."""
GRAM = 8
NEAR = 0.8
QUESTIONS_A_GRAM = 8


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Row numbers in the training part or in the held-out part."""

    duplicates: tuple[int, ...]
    """Training questions that repeat an earlier one."""
    conflicts: tuple[int, ...]
    """Those of them whose gold answer differs from the earlier one."""
    leaked: tuple[int, ...]
    """Held-out questions that are also training questions, word by word."""
    near: tuple[int, ...]
    """Held-out questions that are mostly the same as a training question."""

    def in_words(self) -> list[str]:
        """A sentence for each kind that was found."""
        found = [
            (self.duplicates, "training questions occur more than once, word for word"),
            (self.conflicts, "of these have another answer each time"),
        ]
        return [f"{len(places)} {what}" for places, what in found if places] + self.leaks_in_words("held-out")

    def leaks_in_words(self, part: str) -> list[str]:
        """The same of what is evaluated on. part: `held-out` or `test`."""
        found = [
            (self.leaked, f"{part} questions are trained on too, word by word: evaluation on them shows memory"),
            (self.near, f"{part} questions share {NEAR:.0%} of their {GRAM}-grams with another training question"),
        ]
        return [f"{len(places)} {what}" for places, what in found if places]


def find_overlap(train: Sequence[Mapping[str, str]], held_out: Sequence[Mapping[str, str]]) -> Overlap:
    train_words = [words(whole_question(row)) for row in train]
    first: dict[tuple[str, ...], int] = {}
    for place, text in enumerate(train_words):
        first.setdefault(text, place)
    again = [place for place, text in enumerate(train_words) if first[text] != place]
    held_out_words = [words(whole_question(row)) for row in held_out]
    leaked = {place for place, text in enumerate(held_out_words) if text in first}
    index = gram_index(train_words)
    return Overlap(
        duplicates=tuple(again),
        conflicts=tuple(
            place for place in again if train[place].get("answer") != train[first[train_words[place]]].get("answer")
        ),
        leaked=tuple(sorted(leaked)),
        near=tuple(
            place
            for place, text in enumerate(held_out_words)
            if place not in leaked and largest_share(text, index) >= NEAR
        ),
    )


@dataclass(frozen=True, kw_only=True)
class GramIndex:
    """Which texts contain which n-grams."""

    grams: np.ndarray
    """[N] int64, hashes of n-grams, ascending; one that several texts contain is there for each."""
    holders: np.ndarray
    """[N] int32, number of the text that contains it; of equal n-grams ascending."""


def words(text: str) -> tuple[str, ...]:
    """Equal words of all texts share their memory."""
    return tuple(map(sys.intern, WORD.findall(text.lower().translate(OTHER_SIGNS))))


def grams(text: tuple[str, ...]) -> set[int]:
    """Hashes of the n-grams of a text; a shorter text is one n-gram."""
    return {hash(text[start : start + GRAM]) for start in range(max(1, len(text) - GRAM + 1))}


def gram_index(texts: Sequence[tuple[str, ...]]) -> GramIndex:
    found, holders = array("q"), array("i")
    for place, text in enumerate(texts):
        own = grams(text)
        found.extend(own)
        holders.extend([place] * len(own))
    hashes = np.asarray(found)
    order = np.argsort(hashes, kind="stable")
    return GramIndex(grams=hashes[order], holders=np.asarray(holders)[order])


def largest_share(text: tuple[str, ...], index: GramIndex) -> float:
    """The largest share of the text's n-grams that one training question contains."""
    own = np.array([*grams(text)], dtype=np.int64)
    first, end = (np.searchsorted(index.grams, own, side) for side in ("left", "right"))
    places = first[:, None] + np.arange(QUESTIONS_A_GRAM)
    holders = index.holders[places[places < end[:, None]]]
    return np.unique_counts(holders).counts.max(initial=0) / len(own)
