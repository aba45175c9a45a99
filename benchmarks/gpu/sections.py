"""The sections of the suite: what each needs, and the process that runs one.

    python -m benchmarks.gpu.sections NAME [NAME ...] --out FOLDER [--device cpu] [--small]

A section is a function of a Place and a Note (measured.py). On a card it has a process of its own, so a crash, a card
that is out of memory or the time limit loses this section alone, and what it had noted is kept. FOLDER/NAME.json gets
its figures, and `error` with the end of the traceback if it failed. Models and runs are made in the same folder.
benchmarks/gpu_suite.py starts the sections, most valuable first.
"""

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Part = Literal["A", "B", "C"]
SMALL_CARD_GIB = 8.0


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is measured together."""

    name: str
    part: Part
    limit_s: int
    """On a card; less if the budget of the suite ends before."""
    function: str
    """`module.function` in this folder."""
    free_gib: float | None = None
    """What a ballast leaves free of the card; None leaves the whole card."""

    @property
    def starts_runs(self) -> bool:
        """Whether its work is done by processes that it starts."""
        return self.function.startswith("runs.")


SECTIONS = (
    Section(name="facts", part="A", limit_s=60, function="facts.facts"),
    Section(name="tests", part="A", limit_s=400, function="runs.tests"),
    Section(name="embedded_run", part="A", limit_s=120, function="runs.embedded_run"),
    Section(name="learner_phases", part="B", limit_s=90, function="in_process.learner_phases", free_gib=SMALL_CARD_GIB),
    Section(name="actor_phases", part="B", limit_s=90, function="in_process.actor_phases", free_gib=SMALL_CARD_GIB),
    Section(name="step_graph", part="B", limit_s=120, function="runs.step_graph", free_gib=SMALL_CARD_GIB),
    Section(name="token_step", part="B", limit_s=120, function="in_process.token_step"),
    Section(name="mismatch", part="B", limit_s=90, function="in_process.mismatch"),
    Section(name="kernels", part="B", limit_s=60, function="products.kernels"),
    Section(name="products", part="B", limit_s=60, function="products.products"),
    Section(name="step_3b", part="B", limit_s=120, function="runs.step_3b", free_gib=SMALL_CARD_GIB),
    Section(name="trl", part="C", limit_s=220, function="others.trl"),
    Section(name="step_eager", part="C", limit_s=180, function="runs.step_eager", free_gib=SMALL_CARD_GIB),
    Section(name="residencies", part="C", limit_s=120, function="runs.residencies", free_gib=SMALL_CARD_GIB),
    Section(name="vllm", part="C", limit_s=120, function="others.vllm"),
)
"""In the order in which they run. What does not fit into `--budget-s` any more is left out."""


def named(name: str) -> Section:
    return next(section for section in SECTIONS if section.name == name)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=[section.name for section in SECTIONS], metavar="NAME")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    return max(run(named(name), args.out, args.device, small=args.small) for name in args.names)


def run(section: Section, work: Path, device: str, *, small: bool) -> int:
    """Exit code: 1 if it failed."""
    import torch

    from benchmarks.gpu.measured import Note, Place

    note, began = Note(work / f"{section.name}.json"), time.monotonic()
    try:
        function_of(section)(Place(work=work, device=torch.device(device), small=small), note)
    except (Exception, SystemExit):
        note(error=traceback.format_exc()[-3000:])
    note(seconds=round(time.monotonic() - began, 1))
    return int("error" in note.figures)


def function_of(section: Section) -> Callable[..., None]:
    module, _, function = section.function.partition(".")
    return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)


if __name__ == "__main__":
    sys.exit(main())
