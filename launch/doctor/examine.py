"""Every check there is, and what each says about a machine. A name is `group.function`; names are stable."""

from collections.abc import Callable
from dataclasses import dataclass

from launch.doctor.checks import (
    card,
    clock,
    disk,
    limits,
    link,
    memory,
    model,
    processor,
    run_folder,
    software,
    verifier,
)
from launch.doctor.finding import Finding, warning
from launch.doctor.known import UnknownFact
from launch.doctor.machine import Machine

Check = Callable[[Machine], Finding]

CHECKS: dict[str, tuple[Check, ...]] = {
    "software": (software.python, software.libraries, software.torch, software.bitsandbytes),
    "processor": (processor.vector_units, processor.cores, processor.container_share, processor.variables),
    "memory": (memory.available, memory.container_limit, memory.swap, memory.shared_memory, memory.windows),
    "card": (card.present, card.driver, card.architecture, card.sharing, card.memory, card.allocator),
    "disk": (disk.writable, disk.space, disk.speed, disk.file_system, disk.modes, disk.locks, disk.clock),
    "limits": (limits.open_files, limits.file_size, limits.address_space, limits.processes),
    "link": (link.address, link.socket_path, link.socket_folder),
    "clock": (clock.date, clock.steady),
    "run": (run_folder.directory, run_folder.keys, run_folder.lock, run_folder.lease),
    "model": (model.present, model.access, model.own_code, model.hub_cache, model.base_cache, model.tasks),
    "verifier": (verifier.function,),
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
