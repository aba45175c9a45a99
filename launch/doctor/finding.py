"""What one check says."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From harmless to what would stop a run."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A judgement and what to do about it."""

    level: Level
    """`error`: a run would fail. `warning`: it may fail, or be slow. `note`: worth knowing."""
    found: str
    """What is so."""
    remedy: str = ""
    """What to do; empty where there is nothing to do."""


def ok(found: str) -> Finding:
    """As it should be."""
    return Finding(level="ok", found=found)


def note(found: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(level="note", found=found, remedy=remedy)


def warning(found: str, remedy: str) -> Finding:
    """A run may fail, or be slow."""
    return Finding(level="warning", found=found, remedy=remedy)


def error(found: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(level="error", found=found, remedy=remedy)
