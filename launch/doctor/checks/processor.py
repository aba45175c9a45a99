"""Cores against threads, vector units, and variables that would have their own way."""

from launch.doctor.finding import Finding, error, note, ok, warning
from launch.doctor.known import known
from launch.doctor.machine import Machine
from shared.determinism import cpu_environment

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
