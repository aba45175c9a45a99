"""The plan of a run on a card: what both processes take in every phase, what is chosen, and what would make it fit.

    bytes of a phase   context + what PyTorch has reserved + margin
    peak               the largest of: a phase of one process + what the others keep meanwhile (their phase `waiting`)
    fits               peak <= budget

The bytes come from the code of both processes (launch/card/phases.py). What another process keeps depends on
`compute.residency`: with `release` its tensors without the cache, with `swap` not even the base. With `shared` the base
is the learner's, and the actor has none. On two cards it is nothing.

`batch.token_budget`, `batch.head_rows` and `actor.max_sequences` are upper bounds here: if a run does not fit, they are
halved until it does. Keys that are `auto` are chosen in the order of what they cost: activations are kept if they fit,
and the base stays on the card if it can.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, Protocol

import msgspec
from msgspec import structs

from actor.engines.vllm_options import MARGIN_BYTES
from launch.card.items import BASE, CACHED, CONTEXT, CUBLAS, MARGIN, OUTSIDE_PYTORCH, OUTSIDE_TENSORS, WAITING, Peak
from launch.card.work import CardWork
from launch.plan.memory import Items, size_of
from launch.plan.remedies import Change, Remedy, fewer_rows, halves, remedies_of, set_key
from shared.run.forecast import Figures

MIB = 2**20
CONTEXT_BYTES = 400 * MIB
"""What the driver takes for a process before its first tensor. Estimated for small cards; an H200 takes about 700."""
CUBLAS_BYTES = 32 * MIB
"""Workspace of matrix products: 8 x 4096 KiB, as CUBLAS_WORKSPACE_CONFIG says (shared/process/determinism.py). There is
one for each stream, and CUDA graphs have a stream of their own."""
RESIDENCIES = ("release", "swap")
"""The cheapest first: with `swap` the base crosses the bus twice in every step."""
GIVE_BACKS = ("nothing", "kv", "weights", "stop")
CHOSEN = ("compute.residency", "batch.recompute", "batch.token_budget", "batch.head_rows", "actor.max_sequences")
DEPENDS_ON = {
    "learner": ("model", "lora", "tasks", "rollout", "groups", "batch"),
    "actor": ("model", "lora", "tasks", "rollout", "groups", "actor", "eval", "environment"),
}
"""What decides about a process's phases."""
FEWEST_TOKENS, FEWEST_ROWS = 256, 64
ATTEMPTS = 4
SCATTERED = 0.02
"""Of the tensors of many layers: what the allocator cannot use between them. For the choice of sizes alone."""
SHALLOW = (2, 3)
"""Numbers of layers that are run to find out what each layer adds."""


Process = Literal["actor", "learner"]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process."""

    phase: str
    bytes: int
    items: Items


class CardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan --json` prints."""

    fits: bool
    budget_bytes: int
    peak_bytes: int
    residency: str
    processes: dict[str, list[Phase]]
    """`actor` and `learner`."""
    choices: dict[str, str | int]
    """Keys of the configuration, as they are chosen."""
    remedies: list[dict[str, str]]
    """Changes that would make it fit, the cheapest first."""
    waiting: dict[str, int]
    """Bytes of all processes that wait on its card, in the turn of `actor` and of `learner`."""

    @property
    def figures(self) -> Figures:
        """What can be compared with the run. The driver counts all processes, whose turn it is or not."""
        actor, learner = (self.processes[name] for name in ("actor", "learner"))
        return Figures(
            learner_allocated_mb=largest(learner, OUTSIDE_TENSORS),
            learner_reserved_mb=largest(learner, OUTSIDE_PYTORCH),
            learner_driver_mb=largest(learner, {MARGIN}, self.waiting["learner"]),
            actor_allocated_mb=largest(actor, OUTSIDE_TENSORS),
            actor_reserved_mb=largest(actor, OUTSIDE_PYTORCH),
            actor_driver_mb=largest(actor, {MARGIN}, self.waiting["actor"]),
        )


def largest(phases: Sequence[Phase], without: Set[str], more: int = 0) -> int:
    """MiB of the largest phase, without these items."""
    found = (sum(amount for item, amount in phase.items.items() if item not in without) for phase in phases)
    return round((max(found) + more) / MIB)


class Tracer(Protocol):
    """Runs the code of a process."""

    def learner(self, work: CardWork, layers: int) -> list[Peak]:
        """layers: how many of the model's."""
        ...

    def actor(self, work: CardWork, layers: int) -> list[Peak]: ...


def make_card_plan(facts: Mapping[str, Any], work: CardWork, budget: int, tracer: Tracer) -> CardPlan:
    """facts: the model's config.json. budget: bytes of the card that both processes may take."""
    planner = Planner(facts["num_hidden_layers"], budget, tracer)
    chosen = planner.choose(work)
    actor, learner = (planner.whole(process, chosen) for process in ("actor", "learner"))
    peak = turns(actor, learner, chosen)
    return CardPlan(
        fits=peak <= budget,
        budget_bytes=budget,
        peak_bytes=peak,
        residency=chosen.compute.residency,
        processes={"actor": actor, "learner": learner},
        choices={key: value_of(chosen, key) for key in chosen_keys(chosen)},
        remedies=[] if peak <= budget else [remedy.settings for remedy in planner.remedies(work)],
        waiting=dict(zip(("actor", "learner"), waiting(actor, learner, chosen), strict=True)),
    )


def chosen_keys(work: CardWork) -> tuple[str, ...]:
    return *CHOSEN, *(("actor.give_back",) if work.actor.engine == "vllm" else ())


def value_of(work: CardWork, key: str) -> str | int:
    section, _, name = key.partition(".")
    return getattr(getattr(work, section), name)


def turn(process: Sequence[Phase], others: int) -> int:
    """The most that is taken while one computes. others: bytes of those that wait on its card."""
    return max(phase.bytes for phase in process[:-1]) + others


def turns(actor: Sequence[Phase], learner: Sequence[Phase], work: CardWork) -> int:
    beside_actor, beside_learner = waiting(actor, learner, work)
    return max(turn(actor, beside_actor), turn(learner, beside_learner))


def waiting(actor: Sequence[Phase], learner: Sequence[Phase], work: CardWork) -> tuple[int, int]:
    """Bytes of the processes that wait, in the turn of an actor and in that of the learner."""
    one, count = actor[-1].bytes, work.compute.actors
    return learner[-1].bytes + (count - 1) * one, count * one if work.shares_card else 0


class Planner:
    """Finds the largest sizes that fit."""

    def __init__(self, layers: int, budget: int, tracer: Tracer) -> None:
        """layers: of the model."""
        self.layers, self.budget, self.tracer = layers, budget, tracer
        self.known: dict[tuple[object, ...], list[Peak]] = {}

    def choose(self, work: CardWork) -> CardWork:
        """The smallest sizes if nothing fits. What is asked for is tried first, because it fits most of the time."""
        first = first_of(work)
        if self.over(first) <= 0:
            return first
        room = self.budget
        for _ in range(ATTEMPTS):
            found = next((found for one in homes(work) if (found := self.largest(one, room))), None)
            if found is None:
                break
            if (over := self.over(found)) <= 0:
                return found
            # What the allocator caches does not follow from a few layers, so that much is left for it.
            room -= over
        return smallest(work)

    def over(self, work: CardWork) -> int:
        """Bytes that are missing; negative if some are left."""
        return turns(self.whole("actor", work), self.whole("learner", work), work) - self.budget

    def largest(self, one: CardWork, room: int) -> CardWork | None:
        """That fits into so many bytes, with base and engine where they are."""
        actor, learner = self.quick("actor", one), self.quick("learner", one)
        beside_actor, beside_learner = waiting(actor, learner, one)
        if beside_learner + learner[0].bytes > room:
            return None
        batch = first_that_fits(batches(one), lambda each: turn(self.quick("learner", each), beside_learner) <= room)
        width = first_that_fits([widths(one)], lambda each: turn(self.quick("actor", each), beside_actor) <= room)
        return replace(batch, actor=width.actor) if batch and width else None

    def least(self, work: CardWork) -> int:
        """The peak with the smallest sizes."""
        small = smallest(work)
        return turns(self.quick("actor", small), self.quick("learner", small), small)

    def quick(self, process: Process, work: CardWork) -> list[Phase]:
        """From a few layers."""
        low, high = SHALLOW
        if self.layers <= high or (process == "actor" and work.actor.engine != "hf"):
            return self.whole(process, work)
        pair = zip(self.peaks(process, work, low), self.peaks(process, work, high), strict=True)
        more = (self.layers - low) // (high - low)
        return phases_of(process, [extended(one, other, more) for one, other in pair], work)

    def whole(self, process: Process, work: CardWork) -> list[Phase]:
        return phases_of(process, self.peaks(process, work, self.layers), work)

    def peaks(self, process: Process, work: CardWork, layers: int) -> list[Peak]:
        """Run once for what they depend on."""
        key = (process, layers, *(getattr(work, section) for section in DEPENDS_ON[process]))
        if key not in self.known:
            run = self.tracer.actor if process == "actor" else self.tracer.learner
            self.known[key] = run(work, layers)
        return self.known[key]

    def remedies(self, work: CardWork) -> Iterator[Remedy]:
        return remedies_of(work, changes(work), self.least, lambda total: total <= self.budget)


def extended(one: Peak, other: Peak, more: int) -> Peak:
    """From two numbers of layers to another: one + more (other - one). What is cached follows no such law."""
    names = {**one.items, **other.items}
    items = {
        name: one.items.get(name, 0) + more * (other.items.get(name, 0) - one.items.get(name, 0)) for name in names
    }
    cached = max(peak.reserved - size_of(peak.items) for peak in (one, other))
    return Peak(name=one.name, items=items, reserved=round((1 + SCATTERED) * size_of(items)) + cached)


def phases_of(process: Process, peaks: Sequence[Peak], work: CardWork) -> list[Phase]:
    """With what is not a tensor. On a card of its own, a process that waits is in nobody's way; several actors share
    one."""
    found = [phase_of(process, peak, work) for peak in peaks]
    return found if work.compute.shares_card(process) else [*found[:-1], Phase(phase=WAITING, bytes=0, items={})]


def phase_of(process: Process, peak: Peak, work: CardWork) -> Phase:
    waits, items = peak.name == WAITING, peak.items
    cached = max(0, peak.reserved - size_of(items))
    without_base = {name: amount for name, amount in items.items() if name not in BASE}
    borrows = work.compute.residency == "shared" and work.shares_card
    if waits and not borrows and work.compute.swaps_base(process):
        items, cached = without_base, 0
    elif process == "actor" and borrows:
        items = without_base
    streams = 2 if process == "actor" and work.actor.graphs == "auto" else 1
    around = {} if CONTEXT in items else {CONTEXT: CONTEXT_BYTES, CUBLAS: streams * CUBLAS_BYTES}
    items = {**around, **items, CACHED: cached, **({} if waits else {MARGIN: MARGIN_BYTES})}
    items = {name: amount for name, amount in items.items() if amount}
    return Phase(phase=peak.name, bytes=size_of(items), items=items)


def homes(work: CardWork) -> list[CardWork]:
    """Where base and engine are while they wait, the cheapest first."""
    kept = RESIDENCIES if work.compute.residency == "auto" else (work.compute.residency,)
    given = GIVE_BACKS if work.actor.give_back == "auto" else (work.actor.give_back,)
    return [
        replace(
            work,
            compute=structs.replace(work.compute, residency=one),
            actor=structs.replace(work.actor, give_back=other),
        )
        for one in kept
        for other in (given if work.actor.engine == "vllm" else (work.actor.give_back,))
    ]


def batches(work: CardWork) -> list[list[CardWork]]:
    """For each way of keeping activations, sizes of a micro-batch from the given one down."""
    batch = work.batch
    ways = ("never", "always") if batch.recompute == "auto" else (batch.recompute,)
    rows = max(min(batch.head_rows, FEWEST_ROWS), batch.head_rows // 4)
    sizes = [(batch.token_budget, batch.head_rows)]
    sizes += [(tokens, rows) for tokens in (batch.token_budget, *halves(batch.token_budget, FEWEST_TOKENS))]
    return [
        [
            replace(work, batch=structs.replace(batch, recompute=way, token_budget=tokens, head_rows=rows))
            for tokens, rows in sizes
        ]
        for way in ways
    ]


def widths(work: CardWork) -> list[CardWork]:
    """Completions decoded at once, from the given number down. vLLM's are given."""
    fewer = fewer_rows(work.actor, work.groups * work.rollout.group, 1)
    return [work, *(replace(work, actor=structs.replace(work.actor, max_sequences=one)) for one in fewer)]


def first_of(work: CardWork) -> CardWork:
    """What is asked for."""
    return batches(homes(work)[0])[0][0]


def smallest(work: CardWork) -> CardWork:
    one = homes(work)[-1]
    return replace(batches(one)[-1][-1], actor=widths(one)[-1].actor)


def first_that_fits(ladders: Iterable[Sequence[CardWork]], fits: Callable[[CardWork], bool]) -> CardWork | None:
    """Each ladder goes down in memory."""
    for ladder in ladders:
        if fits(ladder[0]):
            return ladder[0]
        if fits(ladder[-1]):
            return ladder[bisect.bisect_left(ladder, True, key=fits)]
    return None


def changes(work: CardWork) -> Iterator[list[Change[CardWork]]]:
    """Of keys that are not chosen, the cheapest first; of each key the gentlest first."""
    if work.compute.actors > 1:
        yield [set_key("compute", "actors", value) for value in halves(work.compute.actors, 1)]
    if work.compute.residency == "release" and work.shares_card:
        yield [set_key("compute", "residency", "swap")]
        yield [set_key("compute", "residency", "shared")]
    if work.batch.recompute == "never":
        yield [set_key("batch", "recompute", "always")]
    if work.model.quantization == "none":
        yield [set_key("model", "quantization", "nf4")]
    elif work.model.dequantize == "once":
        yield [set_key("model", "dequantize", "each_call")]
    if work.environment.in_turns:
        # What is kept of conversations goes with the order.
        groups = work.rollout.groups_per_order or work.groups
        yield [set_key("rollout", "groups_per_order", value) for value in halves(groups, 1)]
    yield [set_key("rollout", "max_new_tokens", value) for value in halves(work.rollout.max_new_tokens, 64)]
    yield [set_key("tasks", "max_prompt_tokens", value) for value in halves(work.tasks.max_prompt_tokens, 64)]
    yield [set_key("lora", "rank", value) for value in halves(work.lora.rank, 4)]
