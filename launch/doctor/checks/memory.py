"""Memory against an estimate of what the configured model needs."""

from launch.doctor.amount import size
from launch.doctor.device import on_card
from launch.doctor.estimate import Need, host_need
from launch.doctor.finding import Finding, error, note, ok, warning
from launch.doctor.known import Missing, known
from launch.doctor.machine import Machine

SMALLER = "use a smaller model, model.dequantize=each_call, batch.checkpointing=true or a smaller batch.token_budget"
MIN_SHARED_BYTES = 64 * 2**20
"""What Docker gives unless it is told otherwise."""


def available(machine: Machine) -> Finding:
    """What is free against what the two processes need."""
    memory, need = known(machine.memory), needed(machine)
    return judge(
        memory.available,
        f"{size(memory.available)} of {size(memory.total)} are free",
        need,
        f"end other programs; or {SMALLER}",
    )


def container_limit(machine: Machine) -> Finding:
    """The same within a container's limit."""
    cgroup = known(machine.cgroup)
    if cgroup.memory_limit is None or cgroup.memory_left is None:
        return ok("no limit on memory")
    return judge(
        cgroup.memory_left,
        f"the container may hold {size(cgroup.memory_limit)}, {size(cgroup.memory_left)} are left",
        needed(machine),
        f"raise the limit (docker: --memory); or {SMALLER}",
    )


def needed(machine: Machine) -> Need | None:
    """By both processes; nobody knows before the model is here."""
    shape = known(machine.model).shape
    return None if isinstance(shape, Missing) else host_need(machine.config, shape, card=on_card(machine))


def judge(free: int, found: str, need: Need | None, remedy: str) -> Finding:
    """Less than the weights cannot work; less than the estimate may not."""
    if need is None:
        return note(f"{found}; what a run needs can be told once the model is here")
    found = f"{found}; a run needs about {size(need.total)}"
    if free < need.weights:
        return error(found, remedy)
    return warning(found, remedy) if free < need.total else ok(found)


def swap(machine: Machine) -> Finding:
    """Not in heavy use already."""
    memory = known(machine.memory)
    if not memory.swap_total:
        return ok("no swap: what does not fit is killed, and the run can be resumed")
    used = memory.swap_total - memory.swap_free
    found = f"{size(used)} of {size(memory.swap_total)} swap in use"
    if used > memory.swap_total / 2:
        return warning(found, "end other programs: a process that swaps is slower than its silence limit allows")
    return ok(found)


def shared_memory(machine: Machine) -> Finding:
    """/dev/shm as libraries expect it."""
    memory = known(machine.memory)
    if memory.shared_total is None or not memory.shared_writable:
        return warning("/dev/shm is missing or not writable", "start the container with --ipc=host or --shm-size=1g")
    if memory.shared_total <= MIN_SHARED_BYTES:
        return note(
            f"/dev/shm has {size(memory.shared_total)}: enough for the built-in engine, not for every library",
            "start the container with --ipc=host or --shm-size=1g",
        )
    return ok(f"/dev/shm has {size(memory.shared_total)}")


def windows(machine: Machine) -> Finding:
    """WSL2 has limits of its own."""
    memory = known(machine.memory)
    if not memory.wsl:
        return ok("Linux of its own, no WSL")
    found = f"WSL2 with {size(memory.total)}: half of the machine's memory by default, and little of it can be pinned"
    if on_card(machine):
        return warning(
            f"{found}; processes on the card cannot be listed, and a full card spills into slow host memory",
            "set memory= in .wslconfig, keep the run directory on the Linux side, leave room on the card",
        )
    return note(found, "set memory= in .wslconfig if more is needed, and keep the run directory on the Linux side")
