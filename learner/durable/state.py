"""The learner's whole state as the files of a checkpoint, and back.

    adapter_model.safetensors, adapter_config.json   PEFT's format: the folder loads in PEFT and vLLM as it is
    optimizer.safetensors                            AdamW's moments
    policy-000012.safetensors                        older versions that pending orders name (max_lag > 0 only)
    anchor.safetensors                               what the policy is kept close to (curriculum.ewc, curriculum.kl_to)
    state.json                                       step, versions, pending orders, norms, gate, budget, totals

Random streams are derived from the run's seed and a name (shared/seeding.py), so seed and positions are all there is
to save. An update is a function of this state and the journal.

RunTotals (elapsed time, best checkpoint) are in it too, so that a resume keeps them. The best checkpoint has the
highest held-out accuracy (greedy, evaluated during the run); of two equals, the later one. Training reward does not
choose: it depends on how hard the curriculum's tasks are, and includes shaping. So a run without `eval.every` has no
best checkpoint.

A curriculum names tasks by their number, so a state is of no use with other tasks. What they were is in tasks.json of
the run directory, written before the first order: a run that was killed before its first checkpoint has it too.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from learner.continual.anchor import Anchor
from learner.durable.checkpoint import Checkpoint, UnsavedCheckpoint
from learner.orders.plan import StepPlan
from learner.tasks.tasks import TaskDigests
from learner.update.gradient_check import Norms
from learner.update.optimizer import Optimizer
from learner.update.publisher import Publisher
from shared.config.data import TasksConfig
from shared.errors import ConfigError, DamageError, DataError
from shared.run.files import FileParts, write_whole
from shared.run.reader import intact
from shared.run.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Best:
    """An evaluated checkpoint."""

    step: int
    """Updates behind it."""
    accuracy: float
    """Share of held-out tasks with a correct greedy completion."""


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Of all steps until now, across restarts."""

    wall_s: float = 0.0
    """Time spent on them."""
    best: Best | None = None
    """The best of the checkpoints that were evaluated; None if none was."""


def better(known: Best | None, found: Best) -> Best:
    """The higher accuracy, or the later of two equals. A step that is evaluated again replaces itself."""
    if known is None or known.step == found.step:
        return found
    return max(known, found, key=lambda best: (best.accuracy, best.step))


ADAPTER = "adapter_model.safetensors"
ANCHOR = "anchor.safetensors"


class Resumable(Protocol):
    """A part whose state is a few JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LearnerState:
    """Everything that must survive: adapter, optimizer, plan, published versions, guard, sizes."""

    def __init__(
        self,
        seed: int,
        adapter_config: bytes,
        publisher: Publisher,
        optimizer: Optimizer,
        norms: Norms,
        plan: StepPlan,
        guard: Resumable,
        gate: Resumable,
        budget: Resumable,
        base_digest: str,
        anchor: Anchor | None = None,
    ) -> None:
        """seed: of the run. adapter_config: of PEFT, for the folder of a checkpoint."""
        self.seed = seed
        self.adapter_config = adapter_config
        self.publisher = publisher
        self.optimizer = optimizer
        self.norms = norms
        self.plan = plan
        self.guard = guard
        self.gate = gate
        self.budget = budget
        self.base_digest = base_digest
        self.anchor = anchor

    def to_save(self, step: int, totals: RunTotals) -> UnsavedCheckpoint:
        """The state after this many steps."""
        versions = self.publisher.versions
        facts: dict[str, Any] = {
            "step": step,
            "wall_s": totals.wall_s,
            "best": asdict(totals.best) if totals.best else None,
            "seed": self.seed,
            "base_digest": self.base_digest,
            "adapter_sha256": versions[step].sha256,
            "versions": sorted(versions),
            "plan": self.plan.state_dict(),
            "norms": self.norms.state_dict(),
            "guard": self.guard.state_dict(),
            "gate": self.gate.state_dict(),
            "budget": self.budget.state_dict(),
        }
        files: dict[str, FileParts] = {
            "adapter_config.json": (self.adapter_config,),
            "optimizer.safetensors": self.optimizer.state_parts(),
            "state.json": (json.dumps(facts, indent=2).encode(),),
        }
        if self.anchor:
            files[ANCHOR] = self.anchor.state_parts()
        adapters = {version_file(v, step): self.publisher.file(v) for v in versions if v <= step}
        return UnsavedCheckpoint(step=step, files=files | adapters)

    def load(self, checkpoint: Checkpoint) -> RunTotals:
        """Put everything back; returns what else must be known of the steps until then."""
        try:
            return self._load(checkpoint)
        except KeyError as error:
            raise DamageError(
                f"The checkpoint of step {checkpoint.step} has no {error}; restore it from a copy, or go on with the"
                " version of Tandem that wrote it."
            ) from error

    def _load(self, checkpoint: Checkpoint) -> RunTotals:
        facts = json.loads(checkpoint.files["state.json"])
        if facts["base_digest"] != self.base_digest:
            raise DamageError(
                f"The checkpoint of step {checkpoint.step} belongs to another base model"
                f" ({facts['base_digest'][:12]}, here {self.base_digest[:12]}); restore the model files it began with."
            )
        self._refuse_another_seed(facts["seed"])
        self.optimizer.load_state_bytes(checkpoint.files["optimizer.safetensors"])
        self.plan.load_state_dict(facts["plan"])
        self.norms.load_state_dict(facts["norms"])
        self.guard.load_state_dict(facts["guard"])
        self.gate.load_state_dict(facts["gate"])
        self.budget.load_state_dict(facts["budget"])
        if self.anchor:
            self.anchor.load_state_bytes(checkpoint.files[ANCHOR])
        names = {version: version_file(version, checkpoint.step) for version in facts["versions"]}
        self.publisher.restore({version: checkpoint.files[name] for version, name in names.items()})
        best = Best(**facts["best"]) if facts["best"] else None
        return RunTotals(wall_s=facts["wall_s"], best=best)

    def _refuse_another_seed(self, seed: int) -> None:
        now = self.seed
        if now != seed:
            raise ConfigError(
                f"run.seed is {now} in config.json, but the run began with {seed}; set it back to {seed}, or begin"
                " a new run."
            )


def version_file(version: int, newest: int) -> str:
    """The file of a version in a checkpoint."""
    return ADAPTER if version == newest else f"policy-{version:06d}.safetensors"


def write_task_digests(run: RunDir, tasks: TaskDigests) -> None:
    """Before anything is ordered, so that every later start can tell whether the data are the same."""
    write_whole(run.tasks, msgspec.json.format(msgspec.json.encode(tasks), indent=2))


def refuse_other_tasks(run: RunDir, tasks: TaskDigests) -> None:
    """DataError if the run began with others. For `resume` and `replay`."""
    difference = read_task_digests(run).difference_in_words(tasks)
    if difference:
        raise DataError(
            f"{run.path} began with {difference}: its data, or the model's tokenizer or chat template, have changed;"
            " put them back, or begin a new run, from this one's adapter if you like (lora.start_from ="
            f" '{run.path}')."
        )


def trained_system(run: RunDir, config: TasksConfig) -> str | None:
    """The system message of every training task, which may be in the data; None if they have different ones. That of
    the configuration if the run has not begun, or its tasks.json cannot be read."""
    known = intact(lambda: read_task_digests(run))
    systems = (known.systems if known else ()) or (config.system_prompt,)
    return systems[0] if len(systems) == 1 else None


def read_task_digests(run: RunDir) -> TaskDigests:
    try:
        return msgspec.json.decode(run.tasks.read_bytes(), type=TaskDigests)
    except (OSError, ValueError) as error:
        raise DamageError(
            f"{run.tasks} cannot be read ({error}), so it is unknown whether the data are still the same;"
            f" restore it from a copy, or begin a new run with lora.start_from = '{run.path}'."
        ) from error
