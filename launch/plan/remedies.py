"""The smallest changes of a configuration that make a run fit into memory.

    fits   predicted memory x REFUSAL_MARGIN <= what is free

Predicted memory was 0.94 to 1.14 of what was measured (benchmarks/results/predicted*.json), so a run is refused only if
it would not fit even 10 % below the prediction. Changes are tried one key at a time, each with its gentlest value that
is enough. If none is enough alone, changes are added one after the other, in the order of what they cost, and those
that turn out not to be needed are taken back.
Left out: changes of the model or of the machine, which the text of a refusal names.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from launch.plan.memory import HostMemory, Items, host_memory, size
from launch.plan.shape import ModelShape
from launch.plan.work import Work
from shared.config.processes import DEFAULT_MOST_ROWS, ActorConfig
from shared.errors import ConfigError

REFUSAL_MARGIN = 0.9


W = TypeVar("W")
"""What a run computes: Work on a CPU, CardWork on a card."""


@dataclass(frozen=True, kw_only=True)
class Change(Generic[W]):
    """One key with another value."""

    key: str
    """`section.key`"""
    value: str
    """As `--set` takes it."""
    apply: Callable[[W], W]
    """The work with it."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Remedy(Generic[W]):
    """Changes that are enough together."""

    changes: tuple[Change[W], ...]
    """One for each key."""
    total: int
    """Predicted bytes with them."""

    @property
    def settings(self) -> dict[str, str]:
        """Key -> value."""
        return {change.key: change.value for change in self.changes}

    def __str__(self) -> str:
        return f"{' '.join(f'--set {change}' for change in self.changes)} ({size(self.total)})"


def fits(total: int, free: int | None) -> bool:
    return free is None or total * REFUSAL_MARGIN <= free


def refuse_if_too_large(memory: HostMemory, free: int | None, ways: Sequence[Remedy[Work]], path: str) -> None:
    """ConfigError that names the changes. path: of the model."""
    if free is None or fits(memory.total, free):
        return
    found = f"The run needs about {size(memory.total)} of memory and {size(free)} are free"
    if not ways:
        largest = max(all_items(memory).items(), key=lambda item: item[1])
        raise ConfigError(
            f"{found}; no change of its sizes is enough (the largest part is {largest[0]}, {size(largest[1])}): take a"
            f" smaller model than '{path}', or a machine with more memory."
        )
    listed = "; or ".join(map(str, ways))
    raise ConfigError(f"{found}. It would fit with {listed}. Or end other programs, or take a smaller model.")


def all_items(memory: HostMemory) -> Items:
    parts = {
        "both processes": memory.shared,
        "launcher": memory.launcher,
        "learner": memory.learner,
        "actor": memory.actor,
        "update": memory.update,
        "rollout": memory.rollout,
        "evaluation": memory.evaluation,
        "evaluator": memory.evaluator,
    }
    return {f"{part}: {name}": amount for part, items in parts.items() for name, amount in items.items()}


def remedies(shape: ModelShape, work: Work, free: int | None) -> Iterator[Remedy[Work]]:
    """Nothing if the run fits."""
    if free is None or fits(host_memory(shape, work).total, free):
        return iter(())
    return remedies_of(work, changes(work), lambda one: host_memory(shape, one).total, lambda total: fits(total, free))


def remedies_of(
    work: W, ladders: Iterable[Iterable[Change[W]]], total: Callable[[W], int], fits: Callable[[int], bool]
) -> Iterator[Remedy[W]]:
    """Every single change that is enough, or the smallest combination that was found. total: bytes of a work."""

    def remedy(*chosen: Change[W]) -> Remedy[W]:
        changed = work
        for change in chosen:
            changed = change.apply(changed)
        return Remedy(changes=chosen, total=total(changed))

    all_ladders = [found for ladder in ladders if (found := list(ladder))]
    alone = [one for ladder in all_ladders if (one := gentlest(ladder, remedy, fits))]
    if alone:
        yield from alone
        return
    chosen: list[Change[W]] = []
    for ladder in all_ladders:
        chosen.append(ladder[-1])
        if fits(remedy(*chosen).total):
            yield remedy(*needed(chosen, remedy, fits))
            return


def gentlest(
    ladder: Sequence[Change[W]], remedy: Callable[..., Remedy[W]], fits: Callable[[int], bool]
) -> Remedy[W] | None:
    """The first change of one key that is enough; the last one helps most."""
    if not fits(remedy(ladder[-1]).total):
        return None
    return next(found for change in ladder if fits((found := remedy(change)).total))


def needed(
    chosen: Sequence[Change[W]], remedy: Callable[..., Remedy[W]], fits: Callable[[int], bool]
) -> list[Change[W]]:
    """Without the changes that the others do not need."""
    kept = list(chosen)
    for change in chosen:
        others = [other for other in kept if other is not change]
        if fits(remedy(*others).total):
            kept = others
    return kept


def changes(work: Work) -> Iterator[Iterable[Change[Work]]]:
    """For each key its values from the gentlest on. First those that cost time only, then those that change what is
    sampled."""
    yield (fewer_actors(value) for value in halves(work.actors, 1))
    yield (fewer_ranks(value) for value in halves(work.ranks, 1))
    if work.batch.recompute != "always":
        yield [set_key("batch", "recompute", "always")]
    yield (set_key("batch", "token_budget", value) for value in halves(work.batch.token_budget, 64))
    yield (set_key("batch", "head_rows", value) for value in halves(work.batch.head_rows, 32))
    yield (
        set_key("actor", "max_sequences", value)
        for value in fewer_rows(work.actor, work.groups * work.rollout.group, 1)
    )
    if work.dtype == "fp32":
        yield [Change(key="compute.dtype", value="bf16", apply=lambda one: replace(one, dtype="bf16"))]
    if work.model.quantization == "nf4" and work.model.dequantize != "each_call":
        yield [set_key("model", "dequantize", "each_call")]
    if work.samples:
        yield (set_key("rollout", "groups_per_order", value) for value in halves(work.order_groups, 1))
    yield fewer_groups(work)
    yield (shorter_completions(value) for value in halves(work.rollout.max_new_tokens, 16))


def fewer_rows(actor: ActorConfig, completions: int, least: int) -> Iterator[int]:
    """How many our own loop decodes at once, from what `actor.max_sequences` allows down. completions: of a step."""
    if actor.engine == "hf":
        yield from halves(actor.max_sequences or min(DEFAULT_MOST_ROWS, completions), least)


def halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def set_key(section: str, key: str, value: object) -> Change[Any]:
    """A key of a section that the work has whole."""

    def apply(work: Any) -> Any:
        return replace(work, **{section: msgspec.structs.replace(getattr(work, section), **{key: value})})

    return Change(key=f"{section}.{key}", value=str(value).lower(), apply=apply)


def shorter_completions(cap: int) -> Change[Work]:
    change = set_key("rollout", "max_new_tokens", cap)

    def apply(work: Work) -> Work:
        lengths = work.lengths
        shorter = replace(lengths, completion=min(lengths.completion, cap), longest=min(lengths.longest, cap))
        return replace(change.apply(work), lengths=shorter)

    return replace(change, apply=apply)


def fewer_actors(value: int) -> Change[Work]:
    return Change(
        key="compute.actors",
        value=str(value),
        apply=lambda work: replace(work, actors=value, at_once=min(work.at_once, value)),
    )


def fewer_ranks(value: int) -> Change[Work]:
    return Change(
        key="compute.ranks",
        value=str(value),
        apply=lambda work: replace(work, ranks=value, divides=work.divides and value > 1),
    )


def fewer_groups(work: Work) -> Iterator[Change[Work]]:
    """Fewer groups in a step. If growth is on, its limit is lowered, but not below `rollout.prompts`."""
    if work.groups > work.rollout.prompts:
        yield from map(less_growth, halves(work.groups, work.rollout.prompts))
    else:
        yield from map(fewer_prompts, halves(work.rollout.prompts, 1))


def fewer_prompts(value: int) -> Change[Work]:
    change = set_key("rollout", "prompts", value)
    return replace(change, apply=lambda work: replace(change.apply(work), groups=value))


def less_growth(limit: int) -> Change[Work]:
    return Change(key="growth.max_prompts", value=str(limit), apply=lambda work: replace(work, groups=limit))
