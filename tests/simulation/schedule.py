"""What happens in one simulated run, drawn from its seed: the run itself, the faults of the network, which processes
are killed and when.

    Schedule = Shape (decides the result) + Faults (must not)

A schedule is a function of its seed alone. Times are virtual seconds; an undisturbed run takes some 5 to 15 of them.
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shared.config.processes import CheckpointConfig, JournalConfig, LinkConfig, LogConfig, PipelineConfig
from shared.config.tree import Config, RolloutConfig, RunConfig

HEARTBEAT_S = 1.0
SILENCE_S = 8.0
LATE_S, FOREVER_S = 2.0, 1e6
"""Less than what a slow actor takes, so that many an order is given to two; or never."""
CALM_AT_S = 20.0
"""From here on there are no faults."""
CALM_S = 90.0
"""A run must end within this time of calm: three times what the slowest recovery takes."""

Death = Literal["kill", "power cut", "stop"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the result of a run."""

    steps: int
    """Steps of the run."""
    max_lag: int
    """Steps ordered ahead."""
    prompts: int
    """Groups a step."""
    groups_per_order: int
    """As configured; 0 for all in one."""
    replacement_rounds: int
    """As configured."""


@dataclass(frozen=True, kw_only=True)
class LineFaults:
    """How the network treats a message while it may misbehave."""

    delay_s: float
    """Largest ordinary delay."""
    drop: float
    """Share lost one by one. A real socket loses everything in a broken link, so this is harsher."""
    double: float
    """Share that comes twice."""
    late: float
    """Share that comes up to three seconds late, overtaken by others."""
    keeps_for_next_start: bool
    """Whether what was sent to a dead learner waits for its next start."""
    notices_gone_s: float
    """How long sending to a dead actor seems to work."""
    real_bytes: bool
    """Messages go through the codec."""


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One death of one process."""

    victim: int
    """-1 for the learner, else the actor's place."""
    at_s: float
    """When, or the earliest time of counting `at_point`."""
    at_point: int
    """The how-manieth named point after that; 0 for the time itself."""
    death: Death
    """How."""
    down_s: float
    """Until it is started again."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The link is broken for a while."""

    actor: int
    """Whose."""
    at_s: float
    """From when."""
    for_s: float
    """How long."""
    noticed: bool
    """Whether the learner's sends fail, rather than vanish."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One simulated run."""

    seed: int
    """What all of it was drawn from."""
    shape: Shape
    """Decides the result."""
    actors: int
    """How many there are."""
    credits: int
    """Orders each of them takes at once."""
    checkpoint_every: int
    """Steps from one checkpoint to the next."""
    compacts: bool
    """The journal keeps only what the last checkpoints need."""
    line_faults: LineFaults
    """Of the network."""
    crashes: tuple[Crash, ...]
    """Deaths."""
    cuts: tuple[Cut, ...]
    """Broken links."""
    new_names: bool
    """A restarted actor has another id."""
    stale: int
    """Orders that are first filled from a stale adapter: the gate refuses them, and their step is sampled again."""
    hostile: bool
    """Somebody with a key of the run says well-formed nonsense until the calm."""
    one_machine: bool
    """The actors pass adapters on to each other."""
    loses_files: bool
    """What a dead actor had written for others is gone."""

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return config_of(self.shape, self.credits, self.checkpoint_every, self.compacts)


QUIET = LineFaults(
    delay_s=0.01,
    drop=0.0,
    double=0.0,
    late=0.0,
    keeps_for_next_start=True,
    notices_gone_s=0.0,
    real_bytes=True,
)


@lru_cache(maxsize=256)
def config_of(shape: Shape, credits: int, checkpoint_every: int, compacts: bool) -> Config:
    """The product's own configuration."""
    return Config(
        run=RunConfig(steps=shape.steps, seed=3),
        rollout=RolloutConfig(
            prompts=shape.prompts,
            group=2,
            max_new_tokens=6,
            groups_per_order=shape.groups_per_order,
            replacement_rounds=shape.replacement_rounds,
        ),
        pipeline=PipelineConfig(max_lag=shape.max_lag),
        link=LinkConfig(
            heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S, credits=credits, late_s=LATE_S if compacts else FOREVER_S
        ),
        checkpoint=CheckpointConfig(every=checkpoint_every, keep=2),
        journal=JournalConfig(keep="checkpoints" if compacts else "all"),
        log=LogConfig(rollouts_per_step=0),
    )


SHAPES = tuple(
    Shape(steps=steps, max_lag=lag, prompts=prompts, groups_per_order=size, replacement_rounds=rounds)
    for steps, lag, prompts, size, rounds in (
        (3, 0, 2, 1, 0),
        (4, 1, 2, 1, 0),
        (4, 2, 2, 1, 0),
        (3, 0, 2, 1, 1),
        (3, 1, 2, 1, 1),
        (4, 1, 4, 2, 0),
        (4, 0, 2, 0, 0),
        (5, 3, 1, 1, 0),
    )
)


def undisturbed(shape: Shape) -> Schedule:
    """The run that nothing happens to."""
    return Schedule(
        seed=0,
        shape=shape,
        actors=1,
        credits=2,
        checkpoint_every=2,
        compacts=False,
        line_faults=QUIET,
        crashes=(),
        cuts=(),
        new_names=False,
        stale=0,
        hostile=False,
        one_machine=False,
        loses_files=False,
    )


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng, machines = random.Random(f"schedule {seed}"), random.Random(f"machines {seed}")
    actors = rng.choice((1, 1, 2, 2, 3))
    return Schedule(
        seed=seed,
        shape=rng.choice(SHAPES),
        actors=actors,
        credits=rng.choice((1, 2, 2, 3)),
        checkpoint_every=rng.choice((1, 2, 2, 3)),
        compacts=rng.random() < 0.3,
        line_faults=draw_line_faults(rng),
        crashes=tuple(sorted(draw_crashes(rng, actors), key=lambda crash: crash.at_s)),
        cuts=tuple(draw_cut(rng, actors) for _ in range(rng.choice((0, 0, 1, 1, 2)))),
        new_names=rng.random() < 0.25,
        hostile=rng.random() < 0.3,
        stale=rng.choice((0, 0, 0, 1, 2)),
        one_machine=machines.random() < 0.5,
        loses_files=machines.random() < 0.5,
    )


def draw_line_faults(rng: random.Random) -> LineFaults:
    """Half of the networks lose nothing but what a cut takes."""
    rough = rng.random() < 0.5
    return LineFaults(
        delay_s=rng.choice((0.01, 0.05, 0.3)),
        drop=rng.choice((0.0, 0.02, 0.08)) if rough else 0.0,
        double=rng.choice((0.0, 0.05, 0.15)) if rough else 0.0,
        late=rng.choice((0.0, 0.05, 0.15)) if rough else 0.0,
        keeps_for_next_start=rng.random() < 0.5,
        notices_gone_s=rng.choice((0.0, 0.5, 30.0)),
        real_bytes=rng.random() < 0.1,
    )


def draw_crashes(rng: random.Random, actors: int) -> list[Crash]:
    """Up to three of the learner, up to two of each actor."""
    learner = [
        draw_crash(rng, -1, ("kill", "power cut", "power cut", "stop")) for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    others = [draw_crash(rng, actor, ("kill",)) for actor in range(actors) for _ in range(rng.choice((0, 0, 1, 2)))]
    return learner + others


def draw_crash(rng: random.Random, victim: int, deaths: tuple[Death, ...]) -> Crash:
    """At an instant, or at one of the named points soon after."""
    return Crash(
        victim=victim,
        at_s=rng.uniform(0.0, 6.0),
        at_point=rng.choice((0, rng.randint(1, 60))),
        death=rng.choice(deaths),
        down_s=rng.choice((0.05, rng.uniform(0.1, 2.0), rng.uniform(2.0, 10.0))),
    )


def draw_cut(rng: random.Random, actors: int) -> Cut:
    """Some last longer than the silence that counts as death."""
    return Cut(
        actor=rng.randrange(actors),
        at_s=rng.uniform(0.0, 6.0),
        for_s=rng.choice((rng.uniform(0.1, 2.0), rng.uniform(2.0, 11.0))),
        noticed=rng.random() < 0.5,
    )
