"""Every check there is, and what each says about a machine. A name is `group.function`; names are stable."""

from collections.abc import Callable
from dataclasses import dataclass

from launch.doctor.checks import card, disk, model, processor, software
from launch.doctor.finding import Finding, UnknownFact, warning
from launch.doctor.machine import Machine

Check = Callable[[Machine], Finding]

CHECKS: dict[str, tuple[Check, ...]] = {
    "software": (software.python, software.libraries, software.torch, software.bitsandbytes),
    "processor": (processor.vector_units, processor.cores, processor.container_share, processor.variables),
    "memory": (
        processor.available,
        processor.container_limit,
        processor.swap,
        processor.windows,
    ),
    "card": (card.present, card.driver, card.architecture, card.sharing, card.memory, card.allocator),
    "disk": (disk.writable, disk.space, disk.speed, disk.file_system, disk.modes, disk.locks),
    "limits": (processor.open_files, processor.file_size, processor.address_space, processor.processes),
    "link": (disk.address,),
    "run": (disk.directory, disk.keys, disk.lock, disk.lease),
    "model": (model.present, model.access, model.hub_cache, model.base_cache, model.tasks),
    "verifier": (software.function,),
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """One check and its finding."""

    group: str
    """`disk`"""
    check: str
    """`disk.speed`"""
    finding: Finding
    """What it says."""


def examine(machine: Machine) -> list[Report]:
    """All checks, in order."""
    return [
        Report(group=group, check=f"{group}.{check.__name__}", finding=judged(check, machine))
        for group, checks in CHECKS.items()
        for check in checks
    ]


def judged(check: Check, machine: Machine) -> Finding:
    """The check's own word, or why it has none."""
    try:
        return check(machine)
    except UnknownFact as error:
        return warning(f"could not be looked at: {error}", "try again; if it stays so, a run may meet the same trouble")
