"""The processes of a run: argv, environment and log of each, from the configuration. Starts nothing.

There is one learner, which may have several ranks, and `compute.actors` actors on one machine; a warm start has actors
only for its evaluations. More of them are started manually with `python -m actor`, on any machine. They need no entry
here, since the learner accepts every key that `python -m launch key` made.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from shared.config.model import ModelConfig
from shared.config.processes import ActorConfig, ComputeConfig
from shared.config.tree import Config
from shared.process.determinism import Blas, cpu_environment
from shared.process.processor import weight_bytes
from shared.run.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process to start."""

    name: str
    """`learner`, `learner1` or `actor0`; also the prefix of its log lines."""
    argv: tuple[str, ...]
    """Program and arguments."""
    environment: dict[str, str]
    """Added to the launcher's own environment."""
    threads: int
    """CPU threads it may use."""
    log: Path
    """File for its stdout and stderr."""
    awaited: bool = False
    """Of a follower: the end of the run waits for it, however long it takes."""

    @property
    def stacks(self) -> Path:
        """File for its stacks, written on request or when it makes no progress."""
        return self.log.with_name(f"stacks-{self.name}.txt")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All processes of one run."""

    run_dir: Path
    """Directory of the run."""
    endpoint: str
    """Address at which the actors connect to the learner."""
    learner: Process
    """The process with state, rank 0; the run ends when it does."""
    actors: tuple[Process, ...]
    """They have no state and are started again when they die."""
    ranks: tuple[Process, ...] = ()
    """The other ranks of the learner. If one dies, the run ends."""
    followers: tuple[Process, ...] = ()
    """They read the run's files, and the evaluator writes eval/; whatever happens to them, the run goes on."""

    @property
    def notes(self) -> Path:
        """What the launcher notes of them; pages show it."""
        return RunDir(self.run_dir).logs / "supervisor.log"

    @property
    def processes(self) -> tuple[Process, ...]:
        """In the order in which they are started."""
        return (self.learner, *self.ranks, *self.actors, *self.followers)


def topology(run_dir: Path, config: Config, *, trace: bool = False, meeting: str = "meeting") -> Topology:
    """meeting: where ranks of the learner meet. Each start of a run needs another one."""
    run, traced = ("--run", str(run_dir)), ("--trace",) if trace else ()
    compute = config.compute
    meets = ("--meeting", meeting) if compute.ranks > 1 else ()
    learner = ("learner", *run, *meets, *traced)
    ranks = {f"learner{rank}": ("learner", *run, "--rank", str(rank), *meets) for rank in range(1, compute.ranks)}
    actors = {f"actor{number}": ("actor", *run, "--id", f"actor{number}", *traced) for number in range(compute.actors)}
    followers: list[Process] = []
    if config.eval.beside:
        module = ("launch.evaluator", *run)
        evaluator = process("evaluator", module, compute.actor_threads, compute.blas, run_dir)
        followers.append(replace(evaluator, awaited=True))
    if config.tracking.kind != "none":
        followers.append(process("tracker", ("launch.tracking", *run), 1, compute.blas, run_dir))
    return Topology(
        run_dir=run_dir,
        endpoint=config.link.endpoint,
        learner=process("learner", learner, compute.learner_threads, compute.blas, run_dir),
        actors=tuple(
            process(name, module, compute.actor_threads, compute.blas, run_dir)
            for name, module in actors.items()
            if config.needs_actor
        ),
        ranks=tuple(
            process(name, module, compute.learner_threads, compute.blas, run_dir) for name, module in ranks.items()
        ),
        followers=tuple(followers),
    )


def arithmetic(compute: ComputeConfig, model: ModelConfig, actor: ActorConfig) -> str:
    """What a run computes with, as chosen when it was made or started, and what was assumed for that."""
    actors = "an actor" if compute.actors == 1 else f"each of {compute.actors} actors"
    learner = "the learner" if compute.ranks == 1 else f"each of {compute.ranks} ranks of the learner"
    threads = f"{compute.learner_threads} threads for {learner} and {compute.actor_threads} for {actors}"
    assumed = f"; '{model.path}' is not on this machine yet and counts as large where that is to be chosen"
    sampled = ", sampled from NF4 codes" if actor.weights == "nf4" else ""
    logits = ", logits from the head in 8 bits" if actor.head == "int8" else ""
    compiled = ", token steps compiled" if actor.token_step == "compiled" else ""
    return f"{compute.dtype}{sampled}{logits}{compiled}, {threads}{assumed if weight_bytes(model) is None else ''}"


def process(name: str, module: tuple[str, ...], threads: int, blas: Blas, run_dir: Path) -> Process:
    return Process(
        name=name,
        argv=(sys.executable, "-m", *module),
        # Unbuffered, so that a log has the last line even of a process that was killed.
        environment=cpu_environment(threads, blas) | {"PYTHONUNBUFFERED": "1"},
        threads=threads,
        log=RunDir(run_dir).logs / f"{name}.log",
    )


class ProcessFailed(Exception):
    """A process of the run crashed or stalled; not the user's error. The message has its last log lines."""


class LearnerKilled(ProcessFailed):
    """A signal ended the learner, or its machine was lost: it can go on where its journal ends."""
