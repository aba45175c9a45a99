"""Everything that a card can show, in three calls of ten minutes on a machine that may have no network.

    python -m benchmarks.gpu_suite --part A --budget-s 540 --out FOLDER     does it work
    python -m benchmarks.gpu_suite --part B --budget-s 540 --out FOLDER     memory and time, of parts and of steps
    python -m benchmarks.gpu_suite --part C --budget-s 540 --out FOLDER     TRL, and other ways to compute
    python -m benchmarks.gpu_suite --dry-run                                all sections on a CPU, in a minute

Sections (benchmarks/gpu/sections.py) run one after the other, each as a group of processes with a time limit of its
own; at the limit the group is killed, and what it noted before stays. Before a section that is measured on a small
card, a ballast takes the rest of the memory (benchmarks/gpu/ballast.py). FOLDER gets three files: `summary.json`, with
the figures of all sections, whole after each of them; `log`, what the sections printed; `table.txt`, a line for each.

A dry run gives each section a model of two layers and a few tokens, on a CPU. It shows that the code of every section
runs, and measures nothing. So it may save the time in which libraries are loaded: sections that compute in their own
process share one, beside those that start whole runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu.ballast import ballast
from benchmarks.gpu.sections import SECTIONS, Section
from shared.run.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 3.0
LEAST_S = 15
"""With less time than this left, a section is not started."""
Command = Callable[..., list[str]]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONUNBUFFERED": "1",
}
"""Of all sections: nothing is fetched, and results can be repeated."""
DRY = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Of a dry run: two groups of sections share the cores, and nothing is compiled, so nothing is prepared for it."""


def main() -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--part", choices=("A", "B", "C"), help="default: all")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="sections that do not fit are left out")
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"), help="folder for the results")
    parser.add_argument("--work", type=Path, help="folder for models and runs that stays (default: a temporary one)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these sections alone")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with the smallest sizes")
    args = parser.parse_args()
    sections = chosen(args.part, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    with working_folder(args.work) as work:
        suite = Suite(work=work, out=args.out, dry=args.dry_run, ends_at=time.monotonic() + args.budget_s)
        suite.run(sections)
    return int(any("error" in found for found in suite.found.values()))


def chosen(part: str | None, only: Sequence[str] | None) -> list[Section]:
    found = [section for section in SECTIONS if part in (None, section.part)]
    if unknown := set(only or ()) - {section.name for section in found}:
        raise SystemExit(f"there is no section '{min(unknown)}'; choose from {', '.join(s.name for s in found)}")
    return [section for section in found if not only or section.name in only]


@contextmanager
def working_folder(named: Path | None) -> Iterator[Path]:
    if named:
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gpu_suite-") as folder:
        yield Path(folder)


@dataclass(kw_only=True)
class Suite:
    """The sections of one call, and what was found so far."""

    work: Path
    out: Path
    dry: bool
    ends_at: float
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    taken: float | None = None
    """What the ballast leaves free now; None without one."""
    alone: Lock = field(default_factory=Lock)
    """Of a thread that writes results."""
    command: Command = field(default_factory=lambda: command)
    """Of sections."""

    def run(self, sections: Sequence[Section]) -> None:
        (self.out / "log").write_bytes(b"")
        if self.dry:
            groups = [[s for s in sections if s.starts_runs == own] for own in (True, False)]
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(self.measure, filter(None, groups)))
            return
        with ExitStack() as weights:
            for section in sections:
                if self.left_s() > LEAST_S:
                    self.weigh(section, weights)
                self.measure([section])

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    def weigh(self, section: Section, weights: ExitStack) -> None:
        """The ballast that this section needs, and no other."""
        if section.free_gib != self.taken:
            weights.close()
            self.taken = section.free_gib
            if section.free_gib is not None:
                taken = weights.enter_context(ballast(section.free_gib, int(self.left_s()) + 60, "cuda"))
                self.log(f"ballast: {json.dumps(taken)}\n".encode())

    def measure(self, sections: Sequence[Section]) -> None:
        """In one process, to their end or to their limit."""
        limit = min(float(sum(section.limit_s for section in sections)), self.left_s())
        if self.left_s() < LEAST_S:
            for section in sections:
                self.note(section, {"error": "not started: no time was left"})
            return
        names = [section.name for section in sections]
        with tempfile.TemporaryFile() as output:
            code = in_group(self.command(names, self.work, dry=self.dry), self.environment(), limit, output.fileno())
            output.seek(0)
            self.log(f"\n==== {', '.join(names)}\n".encode() + output.read())
        for section in sections:
            file = self.work / f"{section.name}.json"
            figures = json.loads(file.read_bytes()) if file.is_file() else {}
            if "seconds" not in figures:
                figures["error"] = f"killed after {limit:.0f} s" if code == -signal.SIGKILL else f"ended with {code}"
            self.note(section, figures)

    def environment(self) -> dict[str, str]:
        dry = DRY if self.dry else {}
        return os.environ | ENVIRONMENT | dry | {"XDG_CACHE_HOME": str(self.work / "cache")}

    def log(self, text: bytes) -> None:
        with self.alone, (self.out / "log").open("ab") as log:
            log.write(text)

    def note(self, section: Section, figures: dict[str, Any]) -> None:
        with self.alone:
            self.found[section.name] = figures
            write_whole(self.out / "summary.json", json.dumps(self.found, indent=1).encode(), durable=False)
            write_whole(self.out / "table.txt", self.table().encode(), durable=False)
            print(line_of(section.name, figures), flush=True)

    def table(self) -> str:
        return "\n".join(line_of(name, figures) for name, figures in self.found.items()) + "\n"


def line_of(name: str, figures: dict[str, Any]) -> str:
    """Name, time, and how it ended."""
    ended = figures.get("error", figures.get("skipped", "done")).strip().splitlines()[-1]
    return f"{name:16} {figures.get('seconds', 0.0):6.1f} s  {ended}"


def command(names: Sequence[str], work: Path, *, dry: bool) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.gpu.sections", *names, "--out", str(work)]
    return [*words, "--device", "cpu", "--small"] if dry else words


def in_group(words: Sequence[str], environment: dict[str, str], limit_s: float, output: int) -> int:
    """Exit code of a command in a group of its own; at the limit, all its processes are ended."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # A run's launcher ends its processes when it is asked to.
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main())
