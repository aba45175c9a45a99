"""A fact, or why there is none."""

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """A look that gave nothing."""

    reason: str
    """Why, in words: it took too long, it is not there, it crashed."""


class UnknownFact(Exception):
    """A check needs what nobody could find out."""


def known(fact: T | Missing) -> T:
    """The fact itself; without it the check that asks ends here, and the reason becomes its finding."""
    if isinstance(fact, Missing):
        raise UnknownFact(fact.reason)
    return fact
