"""The learner's whole state as the files of a checkpoint, and back.

    adapter_model.safetensors, adapter_config.json   PEFT's format: the folder loads in PEFT and vLLM as it is
    optimizer.safetensors                            AdamW's moments
    policy-000012.safetensors                        older versions that pending orders name (max_lag > 0 only)
    anchor.safetensors                               what the policy is held to (curriculum.ewc, curriculum.kl_to)
    state.json                                       step, versions, curriculum, pending orders, norms, best step, seed

Random streams are derived from the run's seed and a name (shared/seeding.py), so seed and positions are all there is
to save. An update is a function of this state and the journal.

What a run must know of the steps behind it. It is in a checkpoint, so that a resume changes nothing of it.

The best checkpoint is the one with the highest held-out accuracy (greedy answers, evaluated during the run); of two
equals, the later one. Training reward does not choose: a curriculum decides how hard the tasks behind it are, and
shaping counts in it. So a run without `eval.every` has no best checkpoint.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from learner.continual.anchor import Anchor
from learner.durable.checkpoint import Checkpoint
from learner.orders.plan import StepPlan
from learner.update.gradient_check import Norms
from learner.update.optimizer import Optimizer
from learner.update.publisher import Publisher
from shared.config.tree import Config
from shared.errors import ConfigError, DamageError
from shared.model.adapter_file import adapter_config


@dataclass(frozen=True, kw_only=True)
class Best:
    """An evaluated checkpoint."""

    step: int
    """Updates behind it."""
    score: float
    """Share of right greedy answers to the held-out tasks."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The steps until now."""

    wall_s: float = 0.0
    """Time spent on them, all lives of the run together."""
    best: Best | None = None
    """The best of the checkpoints that were evaluated; None if none was."""


def better(known: Best | None, found: Best) -> Best:
    """The higher score, or the later of two equals. A step that is evaluated again replaces itself."""
    if known is None or known.step == found.step:
        return found
    return max(known, found, key=lambda best: (best.score, best.step))


ADAPTER = "adapter_model.safetensors"
ANCHOR = "anchor.safetensors"


class LearnerState:
    """Everything that must survive: adapter, optimizer, plan, published versions."""

    def __init__(
        self,
        config: Config,
        publisher: Publisher,
        optimizer: Optimizer,
        norms: Norms,
        plan: StepPlan,
        base_digest: str,
        anchor: Anchor | None = None,
    ) -> None:
        self.config = config
        self.publisher = publisher
        self.optimizer = optimizer
        self.norms = norms
        self.plan = plan
        self.base_digest = base_digest
        self.anchor = anchor

    def save(self, step: int, past: Past) -> Checkpoint:
        """The state after `step` updates."""
        versions = self.publisher.versions
        facts: dict[str, Any] = {
            "step": step,
            "wall_s": past.wall_s,
            "best": asdict(past.best) if past.best else None,
            "seed": self.config.run.seed,
            "base_digest": self.base_digest,
            "adapter_sha256": versions[step].sha256,
            "versions": sorted(versions),
            "sampler": self.plan.state_dict(),
            "norms": self.norms.state_dict(),
        }
        files = {
            ADAPTER: versions[step].adapter.tobytes(),
            "adapter_config.json": adapter_config(self.config.lora, self.config.model.path),
            "optimizer.safetensors": self.optimizer.state_bytes(),
            "state.json": json.dumps(facts, indent=2).encode(),
        }
        if self.anchor:
            files[ANCHOR] = self.anchor.state_bytes()
        older = {version_file(v, step): versions[v].adapter.tobytes() for v in versions if v < step}
        return Checkpoint(step=step, files=files | older)

    def load(self, checkpoint: Checkpoint) -> Past:
        """Put everything back; returns what else must be known of the steps until then."""
        try:
            return self._load(checkpoint)
        except KeyError as error:
            raise DamageError(
                f"The checkpoint of step {checkpoint.step} has no {error}; restore it from a copy, or go on with the"
                " version of Tandem that wrote it."
            ) from error

    def _load(self, checkpoint: Checkpoint) -> Past:
        facts = json.loads(checkpoint.files["state.json"])
        if facts["base_digest"] != self.base_digest:
            raise DamageError(
                f"The checkpoint of step {checkpoint.step} belongs to another base model"
                f" ({facts['base_digest'][:12]}, here {self.base_digest[:12]}); restore the model files it began with."
            )
        self._refuse_another_seed(facts["seed"])
        self.optimizer.load_state_bytes(checkpoint.files["optimizer.safetensors"])
        self.plan.load_state_dict(facts["sampler"])
        self.norms.load_state_dict(facts["norms"])
        if self.anchor:
            self.anchor.load_state_bytes(checkpoint.files[ANCHOR])
        names = {version: version_file(version, checkpoint.step) for version in facts["versions"]}
        self.publisher.restore({version: checkpoint.files[name] for version, name in names.items()})
        best = Best(**facts["best"]) if facts["best"] else None
        return Past(wall_s=facts["wall_s"], best=best)

    def _refuse_another_seed(self, seed: int) -> None:
        """What was trained drew from this seed; a journal of two seeds could not be replayed."""
        now = self.config.run.seed
        if now != seed:
            raise ConfigError(
                f"run.seed is {now} in config.json, but the run began with {seed}; set it back to {seed}, or begin"
                " a new run."
            )


def version_file(version: int, newest: int) -> str:
    """Where a version lies in a checkpoint."""
    return ADAPTER if version == newest else f"policy-{version:06d}.safetensors"
