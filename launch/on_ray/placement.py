"""What a run asks of a Ray cluster. Nothing of Ray is imported here.

    CPUs    of a process: its threads
    cards   of the learner and of each actor: `ray.learner_gpus` and `ray.actor_gpus`. Where these are 0 and
            compute.device is 'cuda', half a card for the learner and half a card for all actors together

The machines are not known before Ray has chosen them. So nothing is planned, and what [compute] leaves open is chosen
as if they were like this one, with a card if the learner asks for one. A process that asks for none sees none.
A cluster that can never hold all processes at once is refused. In one that is merely busy, the learner waits until it
has room, and then link.silence_s for an actor.
Left out on purpose: several ranks of a learner, which meet on the loopback interface, and one base for learner and
actor (compute.residency), which needs both on one machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from launch.supervisor.topology import Topology
from shared.config.processes import ActorConfig, ComputeConfig, RayConfig
from shared.errors import ConfigError
from shared.process.processor import Capacity, look_at_capacity

Machine = Literal["here", "ray"]
"""Where learner and actors run: on this machine, or where Ray has room."""
HALF = 0.5
ROUNDING = 1e-6
NONE_TAKEN: Mapping[str, float] = MappingProxyType({})
REMEDY = "add nodes, or lower compute.learner_threads, compute.actor_threads, compute.actors or the shares in [ray]"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one process asks for."""

    name: str
    """Of the process."""
    cpus: int
    gpus: float
    """Cards; less than 1 is a share of one card."""

    @property
    def resources(self) -> dict[str, float]:
        """Under Ray's names, without what is not asked for."""
        return {name: amount for name, amount in (("CPU", float(self.cpus)), ("GPU", self.gpus)) if amount}


def capacity_on_ray(compute: ComputeConfig, ray: RayConfig) -> Capacity:
    """What [compute] is chosen for. ConfigError for what cannot be placed."""
    refuse_what_needs_one_machine(compute)
    return replace(look_at_capacity(), card=learner_gpus(ray, compute) > 0.0)


def refuse_what_needs_one_machine(compute: ComputeConfig) -> None:
    if compute.ranks > 1:
        raise ConfigError(
            f"compute.ranks is {compute.ranks}, but all ranks of a learner run on one machine and Ray may choose"
            " several; set it to 1, or leave --on ray out."
        )
    if compute.residency == "shared":
        raise ConfigError(
            "compute.residency = 'shared' needs learner and actor on one machine, and Ray may choose two; set it to"
            " 'auto', or leave --on ray out."
        )
    if compute.learner_card or compute.actor_card:
        raise ConfigError(
            f"compute.learner_card is {compute.learner_card} and compute.actor_card is {compute.actor_card}, but Ray"
            " chooses the cards and shows each process its own as number 0; set both to 0."
        )


def learner_gpus(ray: RayConfig, compute: ComputeConfig) -> float:
    return ray.learner_gpus or (HALF if compute.device == "cuda" else 0.0)


def actor_gpus(ray: RayConfig, compute: ComputeConfig) -> float:
    """Of each actor."""
    # Ray counts ten-thousandths of a card.
    rest = int(1e4 * HALF / compute.actors) / 1e4
    return ray.actor_gpus or (rest if compute.device == "cuda" else 0.0)


def places_of(plan: Topology, compute: ComputeConfig, ray: RayConfig, actor: ActorConfig) -> list[Place]:
    """Of learner and actors; followers stay on this machine. Where servers sample, actors need no card."""
    actors = 0.0 if actor.is_elsewhere else actor_gpus(ray, compute)
    gpus = {plan.learner.name: learner_gpus(ray, compute)} | {process.name: actors for process in plan.actors}
    return [
        Place(name=process.name, cpus=process.threads, gpus=gpus[process.name])
        for process in (plan.learner, *plan.actors)
    ]


def refuse_without_room(places: Sequence[Place], nodes: Sequence[Mapping[str, float]]) -> None:
    """ConfigError if not all of them can run at once. nodes: what each has in all, under Ray's names."""
    wanted, found = total([place.resources for place in places]), total(nodes)
    has = f"the Ray cluster has {in_words(found)} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    for place in places:
        if not any(fits(place.resources, node) for node in nodes):
            raise ConfigError(
                f"{place.name} needs {in_words(place.resources)} on one node, and {has}, none with so much; {REMEDY}."
            )
    if not fits(wanted, found):
        raise ConfigError(f"{len(places)} processes need {in_words(wanted)}, but {has}; {REMEDY}.")
    if not hold_all(places, nodes):
        raise ConfigError(
            f"{len(places)} processes need {in_words(wanted)}, each of them on one node"
            f"{' and each share on one card' if wanted['GPU'] else ''}, and {has}, on which they do not fit together;"
            f" {REMEDY}."
        )


def hold_all(places: Sequence[Place], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether the nodes have room for the learner, which comes first, and all actors at once. Actors all ask for the
    same, so it is enough to try the learner on each node and to count."""
    learner, *actors = places
    if not actors:
        return any(fits(learner.resources, node) for node in nodes)
    actor = actors[0].resources
    counts = [processes_that_fit(actor, node) for node in nodes]
    changes = [
        processes_that_fit(actor, node, learner.resources) - count
        for node, count in zip(nodes, counts, strict=True)
        if fits(learner.resources, node)
    ]
    return any(sum(counts) + change >= len(actors) for change in changes)


def processes_that_fit(
    wanted: Mapping[str, float], found: Mapping[str, float], taken: Mapping[str, float] = NONE_TAKEN
) -> int:
    """On a node, beside one other process. Each asks for one CPU at least, and for a share of one card at most. taken:
    by the other."""
    by_cpus = copies_that_fit(wanted["CPU"], found.get("CPU", 0.0) - taken.get("CPU", 0.0))
    share, cards, one_taken = wanted.get("GPU", 0.0), int(found.get("GPU", 0.0)), taken.get("GPU", 0.0)
    if not share:
        return by_cpus
    beside = copies_that_fit(share, 1.0 - one_taken) - copies_that_fit(share, 1.0) if one_taken else 0
    return min(by_cpus, cards * copies_that_fit(share, 1.0) + beside)


def copies_that_fit(amount: float, room: float) -> int:
    return int((room + ROUNDING) / amount)


def fits(wanted: Mapping[str, float], found: Mapping[str, float]) -> bool:
    return all(found.get(name, 0.0) + ROUNDING >= amount for name, amount in wanted.items())


def total(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of CPUs and cards."""
    return {name: sum(part.get(name, 0.0) for part in parts) for name in ("CPU", "GPU")}


def asked_for(places: Sequence[Place]) -> str:
    """For people, before the start."""
    return f"it is asked for {'; '.join(f'{place.name}: {in_words(place.resources)}' for place in places)}"


def in_words(resources: Mapping[str, float]) -> str:
    """`2 CPUs and 0.5 cards`"""
    cpus, cards = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'}" + (
        f" and {cards:g} card{'' if cards == 1 else 's'}" if cards else ""
    )
