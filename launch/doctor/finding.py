"""What one check says, and a fact that may be missing."""

from dataclasses import dataclass
from typing import Literal, TypeVar

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From harmless to what would stop a run."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A judgement and what to do about it."""

    level: Level
    """`error`: a run would fail. `warning`: it may fail, or be slow. `note`: worth knowing."""
    found: str
    """What the check saw, and what it expected."""
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def ok(found: str) -> Finding:
    return Finding(level="ok", found=found)


def note(found: str, remedy: str = "") -> Finding:
    return Finding(level="note", found=found, remedy=remedy)


def warning(found: str, remedy: str) -> Finding:
    return Finding(level="warning", found=found, remedy=remedy)


def error(found: str, remedy: str) -> Finding:
    return Finding(level="error", found=found, remedy=remedy)


@dataclass(frozen=True)
class Missing:
    """A look that gave nothing."""

    reason: str
    """Why: it took too long, there is nothing to look at, it crashed."""
    timed_out: bool = False
    """Whether a probe took too long, which says nothing about what it looked at."""


class UnknownFact(Exception):
    """A check needs a fact that could not be found out."""


def known(fact: T | Missing) -> T:
    """The fact itself. If it is missing, the check ends here and the reason becomes its finding."""
    if isinstance(fact, Missing):
        raise UnknownFact(fact.reason)
    return fact
