"""A run folder, read: everything that pages, reports, commands and notebooks show of a run comes from here.

    from shared.run import Run
    run = Run("runs/first")
    run.metrics.column("reward/mean"), run.rollouts.heads(12)[0], run.rollouts.group(12, 0).samples[3].mismatch()
    run.metrics_frame(), run.samples_frame()                                    # pandas, if it is installed

Nothing is written and nothing is kept open. Each call looks at the files again, so a run that trains can be read as it
grows, and a large one costs what is asked for: metrics are columns, groups are found by their place in the file
(metrics.py, rollout_index.py). A file that is damaged or being replaced counts as not there. Texts of models and
data are returned as they are; whoever shows them must escape them. One object serves one thread at a time.
Left out on purpose: the journal, which is the learner's, and the weights in checkpoints.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import DamageError, UserError
from shared.run.evaluation import Evaluation, read_evaluation
from shared.run.file_lock import is_locked
from shared.run.forecast import Spent, spent
from shared.run.growing_file import last_lines
from shared.run.history import Event, Phase, restarts, stages, starts, step_phases, traced
from shared.run.metrics import MetricsTable
from shared.run.rollout_index import RolloutIndex
from shared.run.run_dir import RunDir, RunInfo
from shared.run.summary import Summary, read_summary

if TYPE_CHECKING:
    import pandas

Content = TypeVar("Content")
State = Literal["new", "running", "done", "stopped", "failed", "dead"]
"""`new`: its learner has written no summary. `dead`: the summary says running, and no process holds the run's lock."""
STEP_FOLDER = re.compile(r"step-(\d{6,})")
LOG_LINES = 10_000
"""Of a log that are looked through, from its end."""


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A checkpoint."""

    step: int
    path: Path
    num_bytes: int
    saved_at: float
    """Seconds since 1970."""
    best: bool
    """Whether it has the highest held-out accuracy of those that were evaluated."""


@dataclass(frozen=True, kw_only=True)
class RefusedBatch:
    """A batch in quarantine/."""

    step: int
    """As in metrics.jsonl."""
    kind: str
    """Of the fault; empty if the file cannot be read."""
    what: str
    """The fault in words."""
    sample: str
    """The suspect: group id and place."""
    path: Path
    num_bytes: int
    saved_at: float
    """Seconds since 1970."""


class Run:
    """One run. RunDirError if the folder is none."""

    def __init__(self, path: Path | str) -> None:
        self.files = RunDir.open(Path(path))
        self.metrics = MetricsTable(self.files.metrics)
        self.rollouts = RolloutIndex(self.files.rollouts)

    @property
    def path(self) -> Path:
        return self.files.path

    def config(self) -> Config:
        """As it is now: `resume` may have changed the number of steps."""
        return config_from_json(self.files.config.read_bytes())

    def info(self) -> RunInfo | None:
        return intact(self.files.read_info)

    def summary(self) -> Summary | None:
        return intact(lambda: read_summary(self.files))

    def spent(self) -> Spent:
        """Until now."""
        summary = self.summary()
        return spent(self.metrics, summary.spent.unread if summary and summary.spent else {})

    def state(self) -> State:
        summary = self.summary()
        if summary is None:
            return "new"
        return "dead" if summary.status == "running" and not is_locked(self.files.lock) else summary.status

    def stamp(self) -> str:
        """Another one as soon as one of its files has changed."""
        files = self.files
        watched = (files.config, files.metrics, files.rollouts, files.summary, files.eval, files.checkpoints)
        return f"{self.state()}-{hash(tuple(map(state_of, watched))):x}"

    def evaluations(self) -> list[Evaluation]:
        """All that can be read, the oldest policy first."""
        found = [intact(lambda file=file: read_evaluation(file)) for file in sorted(self.files.eval.glob("*.json"))]
        return sorted((one for one in found if one), key=lambda one: (one.version, one.label == "final", one.label))

    def checkpoints(self) -> list[SavedStep]:
        best = best_step(self.files.checkpoints / "best.json")
        folders = sorted(self.files.checkpoints.glob("step-*"))
        # One may be removed at this moment.
        found = [intact(lambda folder=folder: saved_step(folder, best)) for folder in folders]
        return [one for one in found if one]

    def quarantine(self) -> list[RefusedBatch]:
        files = sorted(self.files.quarantine.glob("step-*.safetensors"))
        found = [intact(lambda file=file: refused(file)) for file in files]
        return [one for one in found if one]

    def logs(self) -> dict[str, Path]:
        """By name of the process: `learner`, `actor0`, `stacks-learner`."""
        return {file.stem: file for file in sorted(self.files.logs.glob("*")) if file.suffix in (".log", ".txt")}

    def log_tail(self, name: str, lines: int = 200) -> list[str]:
        """The last lines of a log; none if there is no such log."""
        file = self.logs().get(name)
        return last_lines(file, lines) if file else []

    def phases(self, first: int = 1, last: int | None = None) -> list[Phase]:
        """Of these steps, from their times in the metrics: the actors decode and score, then the learner updates. With
        a lag they overlapped, which only a trace shows."""
        steps, names = self.metrics.column("step"), ("time_s", "time/step_s", "time/rollout_s", "time/verify_s")
        columns = [self.metrics.known_column(name) for name in (*names, "time/update_s")]
        places = np.flatnonzero((steps >= first) & (steps <= (np.inf if last is None else last)))
        rows = zip(steps[places].tolist(), *(column[places].tolist() for column in columns), strict=True)
        return [phase for step, *times in rows for phase in step_phases(int(step), *times)]

    def trace(self) -> list[Phase]:
        """As measured with --trace; empty without it."""
        files = sorted(self.files.logs.glob("trace-*.json"))
        found = [phase for file in files for phase in traced(file)]
        return sorted(found, key=lambda phase: phase.start_s)

    def events(self) -> list[Event]:
        """In the order of their steps."""
        return sorted(self.all_events(), key=lambda event: (event.step, event.at or 0.0))

    def all_events(self) -> Iterator[Event]:
        yield from starts(self.log_tail("learner", LOG_LINES))
        yield from restarts(self.log_tail("supervisor", LOG_LINES))
        for saved in self.checkpoints():
            text = f"checkpoint, {saved.num_bytes / 2**20:.1f} MiB" + (", the best" if saved.best else "")
            yield Event(kind="checkpoint", step=saved.step, at=saved.saved_at, text=text)
        for one in self.evaluations():
            text = f"evaluation '{one.label}': {100 * one.greedy.accuracy:.1f} % of {one.n} (greedy)"
            yield Event(kind="evaluation", step=one.version, at=None, text=text)
        for batch in self.quarantine():
            text = batch.what or f"{batch.path.name} cannot be read"
            yield Event(kind="quarantine", step=batch.step, at=batch.saved_at, text=text)
        yield from stages(self.metrics.column("step"), self.metrics.column("curriculum/stage"))

    def metrics_frame(self) -> "pandas.DataFrame":
        """One row a step."""
        return frame(self.metrics.whole())

    def samples_frame(self, first: int = 1, last: int | None = None) -> "pandas.DataFrame":
        """One row a sample, without its tokens. If the reward has several parts, `reward/score` and `reward/<name>` of
        each, unweighted, as in metrics.jsonl."""
        steps = [step for step in self.rollouts.steps() if first <= step and (last is None or step <= last)]
        return frame([row for step in steps for row in sample_rows(self.rollouts, step)])

    def tokens_frame(self, step: int, number: int, sample: int) -> "pandas.DataFrame":
        """One row a token of an answer."""
        group = self.rollouts.group(step, number)
        if group is None or not 0 <= sample < len(group.samples):
            raise UserError(f"{self.path} has no sample {sample} of group {number} in step {step}; see rollouts.heads.")
        one = group.samples[sample]
        columns = {"logprob": one.logprob, "learner": one.learner(), "ratio": one.ratio(), "mismatch": one.mismatch()}
        others = {"id": one.ids, "text": one.pieces, "sampled": one.sampled(), "entropy": one.entropy, "mask": one.mask}
        return frame({**others, **columns})


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is one; those that were written last come first."""
    here = [folder] if RunDir(folder).config.is_file() else []
    below = [path.parent for path in folder.glob("*/config.json")] if folder.is_dir() else []
    return sorted([*here, *below], key=lambda path: -last_write(RunDir(path)))


def last_write(run: RunDir) -> float:
    files = (run.metrics, run.summary, run.config)
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def state_of(path: Path) -> tuple[int, int, int]:
    """Another one if the file, or what a folder lists, has changed; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def intact(read: Callable[[], Content | None]) -> Content | None:
    """None if the file is damaged, or is being replaced or removed at this moment."""
    try:
        return read()
    except (DamageError, OSError):
        return None


def best_step(file: Path) -> int | None:
    """Of checkpoints/best.json; None without one."""
    try:
        return int(msgspec.json.decode(file.read_bytes(), type=dict[str, float])["step"])
    except (OSError, ValueError, KeyError):
        return None


def saved_step(folder: Path, best: int | None) -> SavedStep | None:
    """None if the folder is no checkpoint."""
    name = STEP_FOLDER.fullmatch(folder.name)
    if name is None or not folder.is_dir():
        return None
    return SavedStep(
        step=int(name[1]),
        path=folder,
        num_bytes=sum(file.stat().st_size for file in folder.glob("*") if file.is_file()),
        saved_at=folder.stat().st_mtime,
        best=int(name[1]) == best,
    )


def refused(file: Path) -> RefusedBatch | None:
    """None if the name of the file says no step."""
    name = STEP_FOLDER.match(file.name)
    if name is None:
        return None
    state, fault = file.stat(), fault_of(file)
    words = {key: str(fault.get(key, "")) for key in ("kind", "what", "sample")}
    return RefusedBatch(step=int(name[1]), path=file, num_bytes=state.st_size, saved_at=state.st_mtime, **words)


def fault_of(file: Path) -> Mapping[str, Any]:
    """fault.json in the file of a batch; empty if it cannot be read."""
    try:
        with safe_open(file, framework="numpy") as parts:
            return msgspec.json.decode(parts.get_tensor("fault.json").tobytes(), type=dict[str, Any])
    except (OSError, ValueError, SafetensorError):
        return {}


def sample_rows(rollouts: RolloutIndex, step: int) -> Iterator[Mapping[str, Any]]:
    heads = rollouts.heads(step)
    groups = rollouts.groups(step) if has_parts(rollouts, step, heads) else {}
    for number, head in heads.items():
        fate = {"task": head.task, "fate": head.fate, "stale": head.stale}
        parts = [one.rewards for one in groups[number].samples] if number in groups else [{}] * len(head.rewards)
        rows = zip(head.rewards, head.advantages, head.outcomes, head.lengths, parts, strict=False)
        for index, (reward, advantage, outcome, length, named) in enumerate(rows):
            figures = {"reward": reward, "advantage": advantage, "outcome": outcome, "length": length}
            figures |= {f"reward/{name}": value for name, value in named.items()}
            yield {"step": step, "group": number, "sample": index, **figures, **fate}


def has_parts(rollouts: RolloutIndex, step: int, numbers: Iterable[int]) -> bool:
    """Whether rewards of this step have parts, which only whole lines tell. All its groups have the same."""
    readable = (group for number in numbers if (group := rollouts.group(step, number)))
    first = next(readable, None)
    return first is not None and any(sample.rewards for sample in first.samples)


def frame(data: Any) -> "pandas.DataFrame":
    """Rows or columns as a table of pandas."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("Tables need pandas, which is not installed; use `pip install pandas`.") from error
    return pandas.DataFrame(data)
