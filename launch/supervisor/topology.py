"""Which processes a configuration means: argv, environment and log of each. Pure; starts nothing.

Today one learner and one actor on one machine. More actors start by hand with `python -m actor`, here or elsewhere;
they need no line here, since the learner lets in every key that `python -m launch key` made.

What can go wrong with the processes of a run that is not the user's to mend.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from shared.config.tree import Config
from shared.process.determinism import cpu_environment
from shared.run.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process to start."""

    name: str
    """`learner` or `actor0`; also the prefix of its log lines."""
    argv: tuple[str, ...]
    """Program and arguments."""
    environment: dict[str, str]
    """What is set on top of the launcher's own environment."""
    threads: int
    """CPU threads it may use."""
    log: Path
    """File that takes its stdout and stderr."""

    @property
    def stacks(self) -> Path:
        """File that takes its stacks when it is asked for them, or stands still."""
        return self.log.with_name(f"stacks-{self.name}.txt")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All processes of one run."""

    run_dir: Path
    """Directory of the run."""
    endpoint: str
    """Where the actor dials the learner."""
    learner: Process
    """The process with state; the run ends when it does."""
    actors: tuple[Process, ...]
    """Disposable; restarted when they die."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """In the order in which they are started."""
        return (self.learner, *self.actors)


def topology(run_dir: Path, config: Config) -> Topology:
    """The processes for this configuration."""
    run = ("--run", str(run_dir))
    compute = config.compute
    return Topology(
        run_dir=run_dir,
        endpoint=config.link.endpoint,
        learner=process("learner", ("learner", *run), compute.learner_threads, config, run_dir),
        actors=(process("actor0", ("actor", *run, "--id", "actor0"), compute.actor_threads, config, run_dir),),
    )


def process(name: str, module: tuple[str, ...], threads: int, config: Config, run_dir: Path) -> Process:
    """One Python module as a process, threads pinned."""
    return Process(
        name=name,
        argv=(sys.executable, "-m", *module),
        # Unbuffered, so that a log holds the last line even of a process that was killed.
        environment=cpu_environment(threads, config.compute.blas) | {"PYTHONUNBUFFERED": "1"},
        threads=threads,
        log=RunDir(run_dir).logs / f"{name}.log",
    )


class ProcessFailed(Exception):
    """A process of the run crashed; the message holds its last log lines."""
