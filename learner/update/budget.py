"""How large the parts of a step may be, and what happens when memory runs out.

    tokens   of a micro-batch;  rows   of the head that are computed at once
    out of memory    the step is repeated with half of the rows, down to FEWEST_ROWS; then with half of the tokens, down
                     to one sample a micro-batch; then the run stops
    later            after `wait` steps without that, tokens double, then rows, up to what is configured
    wait             FIRST_WAIT at first, twice as long after each step that ran out of memory

A step is repeated as a whole from the host's arrays, batch and all passes in one size. Nothing of the failed attempt
stays: no gradient, no update of an earlier pass, and no tensor, since the exception that holds them is gone before the
next attempt begins.

The size decides the last bits of a gradient, and memory is no function of a run's config. So on a card the journal
notes the size of every step before its policy is published, and a checkpoint has the state of the budget: a resumed or
replayed run cuts its steps as they were cut. On a CPU nothing is noted, because there a size never changes: a process
without memory is killed.
Left out on purpose: memory that runs out below PyTorch's allocator (a library's handle), which is another error.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from shared.config.tree import BatchConfig
from shared.errors import TrainingStopped, in_words
from shared.process.card import Driver

FEWEST_ROWS = 64
"""With fewer, reading the head takes the time. A tile of this many rows is a few megabytes."""
FIRST_WAIT = 16
"""Steps. A larger size that fails costs a part of a step."""

Done = TypeVar("Done")
log = logging.getLogger("learner")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the parts of a step."""

    tokens: int
    """Most in a micro-batch of several samples."""
    rows: int
    """Most of the head at once."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens in a micro-batch and {self.rows} rows of the head at once"


NOTHING = Size(tokens=0, rows=0)


class OutOfMemory(TrainingStopped):
    """Not even the smallest parts fit."""


class Budget:
    """The size of the current step."""

    def __init__(self, limit: Size) -> None:
        """limit: as configured."""
        self.limit = limit
        self.now = limit
        self.wait = FIRST_WAIT
        self.quiet = 0
        """Steps since the size changed."""
        self.failed = False
        """Whether memory ran out since the last step ended."""
        self.largest = NOTHING
        """Of the parts of this attempt; no tokens if all of its micro-batches have one sample."""

    @staticmethod
    def of(config: BatchConfig) -> "Budget":
        return Budget(Size(tokens=config.token_budget, rows=config.head_rows))

    def begin(self, noted: Size | None) -> None:
        """A step, in the size that was noted when it was computed before."""
        if noted and noted != self.now:
            self.now, self.failed = noted, True

    def saw(self, part: Size) -> None:
        """What is about to be computed."""
        known = self.largest
        self.largest = Size(tokens=max(known.tokens, part.tokens), rows=max(known.rows, part.rows))

    def shrink(self) -> bool:
        """A size in which something of the failed attempt would be smaller; False if there is none."""
        rows, tokens = min(self.now.rows, self.largest.rows), min(self.now.tokens, self.largest.tokens)
        if rows > FEWEST_ROWS:
            self.now = Size(tokens=self.now.tokens, rows=max(FEWEST_ROWS, rows // 2))
        elif tokens:
            self.now = Size(tokens=max(1, tokens // 2), rows=self.now.rows)
        else:
            return False
        self.failed, self.largest = True, NOTHING
        return True

    def end(self) -> None:
        """The step was computed; the next one may be larger."""
        self.largest = NOTHING
        if self.failed:
            self.failed, self.quiet, self.wait = False, 0, 2 * self.wait
        elif self.now != self.limit:
            self.quiet += 1
            if self.quiet == self.wait:
                self.grow()

    def grow(self) -> None:
        self.quiet = 0
        if self.now.tokens < self.limit.tokens:
            self.now = Size(tokens=min(2 * self.now.tokens, self.limit.tokens), rows=self.now.rows)
        else:
            self.now = Size(tokens=self.now.tokens, rows=min(2 * self.now.rows, self.limit.rows))
        log.info("memory has been enough for %d steps: from now on %s", self.wait, self.now)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; empty while memory has never run out."""
        if self.wait == FIRST_WAIT:
            return {}
        return {"tokens": self.now.tokens, "rows": self.now.rows, "wait": self.wait, "quiet": self.quiet}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.now = Size(tokens=state["tokens"], rows=state["rows"])
            self.wait, self.quiet = state["wait"], state["quiet"]


class Notes(Protocol):
    """Where the sizes of steps are noted: the journal, or what a replay compares with."""

    def size_of(self, step: int) -> Size | None:
        """As noted when the step was computed; None if it was not."""
        ...

    def note_size(self, step: int, size: Size) -> None:
        """Durable when this returns."""
        ...


class NoNotes:
    """Where no step is computed twice."""

    def size_of(self, step: int) -> Size | None:
        return None

    def note_size(self, step: int, size: Size) -> None:
        """Not kept."""


NO_NOTES = NoNotes()


class Undoable(Protocol):
    """What a failed attempt may have left half done."""

    def undo(self) -> None: ...


class Attempts:
    """Repeats steps in smaller parts until they fit."""

    def __init__(self, budget: Budget, update: Undoable, notes: Notes, driver: Driver | None = None) -> None:
        """driver: of the card; None on a CPU."""
        self.budget = budget
        self.update = update
        self.notes = notes
        self.driver = driver

    def until_it_fits(self, step: int, work: Callable[[], Done]) -> Done:
        """work: a whole step, from collected groups to new parameters."""
        self.budget.begin(self.notes.size_of(step))
        done = self.repeated(f"step {step + 1}", work)
        if self.driver or self.budget.now != self.budget.limit:
            self.notes.note_size(step, self.budget.now)
        self.budget.end()
        return done

    def repeated(self, what: str, work: Callable[[], Done]) -> Done:
        while (done := self.attempt(what, work)) is None:
            self.update.undo()
            if self.driver:
                self.driver.release()
            smallest = self.budget.now
            if not self.budget.shrink():
                raise OutOfMemory(too_large(what, smallest))
            log.warning("%s is repeated with at most %s", what, self.budget.now)
        return done

    def attempt(self, what: str, work: Callable[[], Done]) -> Done | None:
        """None if memory ran out. Only when this has returned are the tensors of the attempt free."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            log.warning("%s ran out of memory (%s)", what, in_words(error))
            return None


def too_large(what: str, smallest: Size) -> str:
    return (
        f"{what[0].upper()}{what[1:]} does not fit into the memory of the card with one completion at a time and"
        f' {smallest.rows} rows of the head; end other programs on the card, or use batch.recompute = "always", a'
        " smaller rollout.max_new_tokens, tasks.max_prompt_tokens or lora.rank, or a smaller model."
    )
