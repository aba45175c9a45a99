"""Cores against threads, memory against an estimate of what the model needs, and what a container or shell allows."""

from launch.doctor.estimate import Need, host_need, work_of
from launch.doctor.finding import Finding, Missing, error, known, note, ok, size, warning
from launch.doctor.machine import Machine, on_card
from learner.durable.journal import SEGMENT_BYTES
from shared.process.determinism import cpu_environment

SETTLED = {"MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}
"""Change which kernels run; a run sets them itself only where its config says so."""
HARMFUL = {
    "OMP_THREAD_LIMIT",
    "OMP_DYNAMIC",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_HW_SUBSET",
    "KMP_ALL_THREADS",
    "MKL_DOMAIN_NUM_THREADS",
    "MKL_ENABLE_INSTRUCTIONS",
    "DNNL_MAX_CPU_ISA",
    *SETTLED,
}
"""Take effect whatever the configuration says; pinning two processes to the same cores is the worst of them."""
SMALLER = "use a smaller model, model.dequantize=each_call, batch.checkpointing=true or a smaller batch.token_budget"
MIN_OPEN_FILES = 128
COMFORTABLE_OPEN_FILES = 1024
ADDRESS_BYTES = 16 * 2**30
"""What torch's libraries, threads and file maps reserve in one process, with a margin."""
MIN_PROCESSES = 256


def vector_units(machine: Machine) -> Finding:
    """AVX2 at least, where there is such a thing."""
    processor = known(machine.processor)
    if processor.architecture not in ("x86_64", "AMD64"):
        return note(f"{processor.name} ({processor.architecture}); bits were compared on x86 processors only")
    if "avx2" not in processor.flags:
        found = f"{processor.name} has no AVX2"
        if machine.config.compute.blas == "portable":
            return error(found, "use compute.blas=fast, which takes what there is; portable needs AVX2")
        return warning(found, "use a processor from after 2015; matrix products are several times slower here")
    wide = sorted(flag for flag in processor.flags if flag in ("avx512f", "avx512_bf16", "amx_tile"))
    return ok(f"{processor.name} with {', '.join(['avx2', *wide])}")


def cores(machine: Machine) -> Finding:
    """As many as the larger process has threads."""
    processor, compute = known(machine.processor), machine.config.compute
    most, both = max(compute.learner_threads, compute.actor_threads), compute.learner_threads + compute.actor_threads
    found = f"{processor.cores} cores; threads: learner {compute.learner_threads}, actor {compute.actor_threads}"
    if most > processor.cores:
        return warning(
            found,
            f"--set compute.learner_threads={min(compute.learner_threads, processor.cores)} "
            f"--set compute.actor_threads={min(compute.actor_threads, processor.cores)}; "
            "threads beyond the cores make each step slower, not faster",
        )
    if both > processor.cores and machine.config.pipeline.max_lag:
        return note(
            f"{found}: the two take turns, so pipeline.max_lag overlaps nothing on a CPU",
            "fewer threads each, so that both fit, or pipeline.max_lag=0",
        )
    return ok(found)


def container_share(machine: Machine) -> Finding:
    """Processor time that the container leaves for the threads."""
    share, compute = known(machine.cgroup).cpus, machine.config.compute
    if share is None:
        return ok("no limit on processor time")
    most = max(compute.learner_threads, compute.actor_threads)
    if share < most:
        return warning(
            f"the container gives {share:g} cores' worth of time for {most} threads",
            f"raise the limit (docker: --cpus={most}), or use {max(int(share), 1)} threads",
        )
    return ok(f"the container gives {share:g} cores' worth of time, threads need {most}")


def variables(machine: Machine) -> Finding:
    """None that overrides the configuration."""
    found, compute = known(machine.processor).variables, machine.config.compute
    ours = cpu_environment(compute.learner_threads, compute.blas)
    harmful = sorted(name for name in found if name in HARMFUL and name not in ours)
    if harmful:
        return warning(
            f"in force whatever the configuration says: {', '.join(f'{name}={found[name]}' for name in harmful)}",
            f"unset {' '.join(harmful)}",
        )
    replaced = sorted(name for name in found if name in ours and found[name] != ours[name])
    if replaced:
        return note(
            f"{', '.join(f'{name}={found[name]}' for name in replaced)}: replaced for the processes of a run",
            "use compute.learner_threads, compute.actor_threads and compute.blas instead",
        )
    return ok("no variable overrides threads or vector units")


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
    if isinstance(shape, Missing):
        return None
    return host_need(machine.config.model, work_of(machine.config), shape, card=on_card(machine))


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


def open_files(machine: Machine) -> Finding:
    """Sockets, segments, libraries."""
    limit = known(machine.limits).open_files
    if limit is None or limit >= COMFORTABLE_OPEN_FILES:
        return ok(f"{limit or 'any number of'} open files a process")
    found, remedy = f"{limit} open files a process", f"ulimit -n {COMFORTABLE_OPEN_FILES}"
    return error(found, remedy) if limit < MIN_OPEN_FILES else warning(found, remedy)


def file_size(machine: Machine) -> Finding:
    """Journal segments and the quantised base."""
    limit = known(machine.limits).file_bytes
    if limit is None:
        return ok("files of any size")
    shape = known(machine.model).shape
    largest = SEGMENT_BYTES if isinstance(shape, Missing) else max(SEGMENT_BYTES, shape.file_bytes)
    found = f"files up to {size(limit)}; the largest of a run has about {size(largest)}"
    return error(found, "ulimit -f unlimited") if limit < largest else ok(found)


def address_space(machine: Machine) -> Finding:
    """Far more is reserved than used."""
    limit = known(machine.limits).address_bytes
    if limit is None:
        return ok("any amount of address space")
    found, remedy = f"{size(limit)} of address space a process", "ulimit -v unlimited; bound memory by a cgroup instead"
    if on_card(machine):
        return error(f"{found}: CUDA reserves more than the card and the machine have together", remedy)
    return warning(found, remedy) if limit < ADDRESS_BYTES else ok(found)


def processes(machine: Machine) -> Finding:
    """Every thread counts, of all programs of this user."""
    limit = known(machine.limits).processes
    if limit is not None and limit < MIN_PROCESSES:
        return warning(f"{limit} processes and threads for this user", f"ulimit -u {4 * MIN_PROCESSES}")
    return ok(f"{limit or 'any number of'} processes and threads")
