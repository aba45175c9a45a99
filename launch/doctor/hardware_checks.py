"""Checks of the hardware: threads against cores, the memory a run needs (launch/plan) against what is free, the cards,
and the limits that a container or a shell sets."""

import re
from collections.abc import Mapping

from launch.card.cards import chosen_card, free_memory
from launch.card.text import ways
from launch.doctor.finding import Finding, Missing, error, known, note, ok, warning
from launch.doctor.machine import Machine, cached_base_bytes, on_card, waiting_bytes
from launch.plan.cost import chosen_work, memory_beside_card, work_of
from launch.plan.memory import host_memory, size
from launch.plan.remedies import fits, remedies
from learner.durable.journal import SEGMENT_BYTES
from shared.model.kernels.toolchain import missing
from shared.process.determinism import cpu_environment
from shared.process.entry_point import MIN_DESCRIPTORS
from shared.process.processor import INSTALL_COMPILER, gains_by_packing, within
from shared.process.usable_cards import BF16_CAPABILITY, CPU_INSTEAD, CUDA_BUILD, HIDDEN, card_numbers, roles_here

FIXED_BY_CONFIG = {"MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}
"""Change which kernels run. A run sets them itself, but only if its configuration says so."""
SLOWER = "no C compiler: PyTorch computes all of token steps and updates, which then take up to twice as long"
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
    *FIXED_BY_CONFIG,
}
"""Override the configuration. The worst of them pin both processes to the same cores."""
SMALLER = "use a smaller model, model.dequantize=each_call, batch.recompute=always or a smaller batch.token_budget"
COMFORTABLE_OPEN_FILES = 1024
ADDRESS_BYTES = 16 * 2**30
"""What torch's libraries, threads and mapped files reserve in one process, with a margin."""
MIN_PROCESSES = 256
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FP32 = "use --set compute.dtype=fp32, or a card of compute capability 8.0 or later"
NOT_FETCHED = "how much a run needs is known once the model is on this machine"


def vector_units(machine: Machine) -> Finding:
    processor = known(machine.processor)
    if processor.architecture not in ("x86_64", "AMD64"):
        return note(f"{processor.name} ({processor.architecture}); equal results were tested on x86 processors only")
    if "avx2" not in processor.flags:
        found = f"{processor.name} has no AVX2"
        if machine.config.compute.blas == "portable":
            return error(found, "use compute.blas=fast, which uses what the processor has; portable needs AVX2")
        return warning(found, "use a processor made after 2015; matrix products are several times slower without AVX2")
    wide = sorted(flag for flag in processor.flags if flag in ("avx512f", "avx512_bf16", "amx_tile"))
    return ok(f"{processor.name} with {', '.join(['avx2', *wide])}")


def cores(machine: Machine) -> Finding:
    processor, compute = known(machine.processor), machine.config.compute
    learner, actor, ranks = compute.learner_threads, compute.actor_threads, compute.ranks
    name = "learner" if ranks == 1 else f"each of {ranks} ranks"
    each = "actor" if compute.actors == 1 else f"each of {compute.actors} actors"
    found = f"{processor.cores} cores; threads: {name} {learner}, {each} {actor}"
    if max(learner, actor) > processor.cores:
        return warning(
            found,
            f"--set compute.learner_threads={min(learner, processor.cores)} "
            f"--set compute.actor_threads={min(actor, processor.cores)}; "
            "more threads than cores make each step slower",
        )
    if ranks > 1 and ranks * learner > processor.cores:
        return warning(
            f"{found}: the ranks wait for each other's cores",
            f"--set compute.learner_threads={max(1, processor.cores // ranks)}, or fewer ranks",
        )
    if compute.threads > processor.cores and machine.config.pipeline.max_lag:
        return note(
            f"{found}: the processes take turns, so pipeline.max_lag overlaps nothing here",
            "use fewer threads for each, so that all fit, or pipeline.max_lag=0",
        )
    if compute.threads > processor.cores and compute.actors > 1:
        return note(
            f"{found}: the actors take turns, so several are no faster than one here",
            "use fewer threads for each, so that all fit, or compute.actors=1",
        )
    return ok(found)


def container_share(machine: Machine) -> Finding:
    share, compute = known(machine.cgroup).cpus, machine.config.compute
    if share is None:
        return ok("no limit on processor time")
    most = max(compute.learner_threads, compute.actor_threads)
    if share < most:
        return warning(
            f"the container allows {share:g} cores of processor time for {most} threads",
            f"raise the limit (docker: --cpus={most}), or use {max(int(share), 1)} threads",
        )
    return ok(f"the container allows {share:g} cores of processor time, the threads need {most}")


def variables(machine: Machine) -> Finding:
    """Environment variables that override the configuration."""
    found, compute = known(machine.processor).variables, machine.config.compute
    ours = cpu_environment(compute.learner_threads, compute.blas)
    harmful = sorted(name for name in found if name in HARMFUL and name not in ours)
    if harmful:
        return warning(
            f"variables that override the configuration: {', '.join(f'{name}={found[name]}' for name in harmful)}",
            f"unset {' '.join(harmful)}",
        )
    replaced = sorted(name for name in found if name in ours and found[name] != ours[name])
    if replaced:
        return note(
            f"{', '.join(f'{name}={found[name]}' for name in replaced)}: replaced in the processes of a run",
            "use compute.learner_threads, compute.actor_threads and compute.blas instead",
        )
    return ok("no variable overrides threads or vector units")


def available(machine: Machine) -> Finding:
    memory = known(machine.memory)
    found = f"{size(memory.available)} of {size(memory.total)} are free"
    return compare_memory(machine, memory.available, found, "end other programs")


def container_limit(machine: Machine) -> Finding:
    cgroup = known(machine.cgroup)
    if cgroup.memory_limit is None or cgroup.memory_left is None:
        return ok("no limit on memory")
    found = f"the container may use {size(cgroup.memory_limit)}, {size(cgroup.memory_left)} of it are free"
    return compare_memory(machine, cgroup.memory_left, found, "raise the limit (docker: --memory)")


def compare_memory(machine: Machine, free: int, found: str, first: str) -> Finding:
    """Of this amount of free memory. The variant is chosen by all that is known, as `run` does. An error: `run`
    refuses. A warning: it starts, but may run out. first: what to do rather than change the run."""
    shape = known(machine.model).shape
    if isinstance(shape, Missing):
        return note(f"{found}; {NOT_FETCHED}")
    if on_card(machine):
        config = machine.config
        waiting = waiting_bytes(machine, shape)
        need = memory_beside_card(shape, config.lora.largest_rank, config.compute.parallel, waiting)
        found, too_large, ways = f"{found}; a run needs about {size(need.total)}", free < need.started, ()
    else:
        processor = known(machine.processor)
        cores = processor.cores if isinstance(machine.cgroup, Missing) else within(processor.cores, machine.cgroup.cpus)
        packs = gains_by_packing(processor.flags, machine.config.compute)
        work = work_of(machine.config, cores=cores, packs=packs)
        started = not isinstance(machine.run, Missing) and machine.run.started
        work = chosen_work(shape, work, free_for_run(machine), started=started)
        need = host_memory(shape, work)
        found, too_large = f"{found}; a run needs about {size(need.total)}", not fits(need.total, free)
        ways = tuple(remedies(shape, work, free))
    remedy = "; or ".join((first, *(map(str, ways) if ways else (SMALLER,))))
    if too_large:
        return error(found, remedy)
    return warning(found, remedy) if free < need.total else ok(found)


def free_for_run(machine: Machine) -> int | None:
    """As `run` finds it (shared/process/free_memory.py): the smaller of both amounts, as far as they are known."""
    free = None if isinstance(machine.memory, Missing) else machine.memory.available
    left = None if isinstance(machine.cgroup, Missing) else machine.cgroup.memory_left
    return min((amount for amount in (free, left) if amount is not None), default=None)


def swap(machine: Machine) -> Finding:
    memory = known(machine.memory)
    if not memory.swap_total:
        return ok("no swap: a process that runs out of memory is killed, and the run can be resumed")
    used = memory.swap_total - memory.swap_free
    found = f"{size(used)} of {size(memory.swap_total)} swap in use"
    if used > memory.swap_total / 2:
        return warning(found, "end other programs: a process that swaps can be so slow that it counts as hung")
    return ok(found)


def windows(machine: Machine) -> Finding:
    """WSL2 sets limits of its own."""
    memory = known(machine.memory)
    if not memory.wsl:
        return ok("not WSL")
    found = f"WSL2 with {size(memory.total)}: by default half of the machine's memory, and little of it can be pinned"
    if on_card(machine):
        return warning(
            f"{found}; processes on the card cannot be listed, and a full card uses slow host memory",
            "set memory= in .wslconfig, keep the run directory on the Linux side, and leave memory free on the card",
        )
    return note(found, "set memory= in .wslconfig if more is needed, and keep the run directory on the Linux side")


def present(machine: Machine) -> Finding:
    """The card that compute.device asks for."""
    compute = machine.config.compute
    if compute.device == "cpu":
        return ok("not needed: compute.device is 'cpu'")
    cards, torch = known(machine.cards), known(machine.torch)
    if torch.devices:
        names = ", ".join(card.name for card in torch.devices)
        last, used = len(torch.devices) - 1, card_numbers(compute, roles_here(machine.config.actor))
        if max(compute.learner_card + compute.ranks - 1, *used.values()) > last:
            ranks = ", and use fewer ranks: each has the next card" if compute.ranks > 1 else ""
            return error(
                f"PyTorch can use {names}, which is less than the configuration names",
                f"set {' and '.join(f'compute.{role}_card' for role in used)} to at most {last}{ranks}",
            )
        return ok(f"PyTorch can use {names}")
    trouble = torch.cuda_error or cards.trouble
    why, remedy = why_missing(cards.variables, torch.cuda_build, trouble, bool(cards.cards))
    if compute.device == "cuda":
        return error(f"compute.device is 'cuda', but {why}", f"{remedy}; or {CPU_INSTEAD}")
    if cards.cards or cards.trouble or torch.cuda_error:
        return warning(f"there is a card or a driver, but {why}; the CPU is used", remedy)
    return ok("no card; the CPU is used")


def why_missing(variables: Mapping[str, str], build: str | None, trouble: str, seen: bool) -> tuple[str, str]:
    """Why PyTorch has no card, and the remedy. `seen`: nvidia-smi lists one."""
    hidden = variables.get("CUDA_VISIBLE_DEVICES", "0")
    if hidden.strip() in HIDDEN:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES"
    if build is None:
        return "this build of PyTorch has no CUDA", CUDA_BUILD
    if trouble:
        return f"it cannot be used: {trouble}", "repair or update the driver (nvidia-smi must list the card)"
    if seen:
        return "PyTorch does not see the card that nvidia-smi lists", "start the container with --gpus all"
    return "no card was found", "check the driver with nvidia-smi; in a container use --gpus all"


def driver(machine: Machine) -> Finding:
    """Whether it is new enough for the CUDA version that PyTorch was built for."""
    build, newest = known(machine.torch).cuda_build, known(machine.driver).cuda
    if build is None or newest is None:
        return ok("not needed: no driver, or a PyTorch without CUDA")
    major, minor = (int(part) for part in build.split(".")[:2])
    found = f"the driver supports CUDA up to {newest[0]}.{newest[1]}, PyTorch was built for {build}"
    if newest[0] < major:
        return error(found, "update the NVIDIA driver, or install a PyTorch build for an older CUDA")
    if newest < (major, minor):
        return note(
            f"{found}: this works within one major version, but kernels cannot be compiled at run time",
            "update the NVIDIA driver",
        )
    return ok(found)


def architecture(machine: Machine) -> Finding:
    """Whether PyTorch has kernels for the card."""
    torch = known(machine.torch)
    if not torch.devices:
        return ok("no card in use")
    for card in torch.devices:
        if not any(runs_on(built, card.capability) for built in torch.architectures):
            return error(
                f"{card.name} is sm_{card.capability[0]}{card.capability[1]}, PyTorch has kernels for "
                f"{', '.join(torch.architectures)}",
                f"{CUDA_BUILD} for this card, or {CPU_INSTEAD}",
            )
        if on_card(machine) and machine.config.compute.dtype != "fp32" and card.capability < BF16_CAPABILITY:
            return error(f"{card.name} is sm_{card.capability[0]}{card.capability[1]}, which has no bf16", FP32)
    return ok(f"PyTorch has kernels for {', '.join(card.name for card in torch.devices)}")


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """`sm_86` runs on 8.6 and 8.9. `compute_90` is compiled at run time for 9.0 and all later cards."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", built)
    if not found:
        return False
    version = int(found[2]), int(found[3])
    if found[4]:
        return version == capability
    return version <= capability and (found[1] == "compute" or version[0] == capability[0])


def sharing(machine: Machine) -> Finding:
    """Whether as many processes may use the card at one time as the run has there."""
    modes = {card.name: card.mode for card in known(machine.cards).cards if card.mode not in ("Default", "[N/A]")}
    if not modes:
        return ok("processes may share the card, or there is none")
    shown = ", ".join(f"{mode} on {name}" for name, mode in modes.items())
    needs = len(roles_here(machine.config.actor))
    none = "Prohibited" in modes.values()
    most = "no process" if none else "one process at most"
    found = f"compute mode {shown}: {most}, and a run needs {'two' if needs > 1 else 'one'}"
    remedy, too_few = "sudo nvidia-smi -c DEFAULT", needs > 1 or none
    return error(found, remedy) if on_card(machine) and too_few else note(found, remedy)


def memory(machine: Machine) -> Finding:
    """Free memory against what both processes need, and which processes use the rest."""
    cards = known(machine.cards)
    card = chosen_card(cards, number := machine.config.compute.learner_card)
    if card is None and not cards.cards:
        return note(f"not known: {cards.trouble}") if cards.trouble else ok("no card")
    found = (
        free_memory(card) if card else f"nvidia-smi does not list card {number} of CUDA, maybe a part of a card (MIG)"
    )
    if not on_card(machine):
        return ok(f"{found}; not used by this configuration")
    plan = machine.plan
    if isinstance(plan, Missing):
        return note(f"{found}; what a run needs is not known: {plan.reason}")
    if plan.fits:
        return ok(f"{found}; a run needs {size(plan.peak_bytes)}")
    return error(f"{found}; a run needs {size(plan.peak_bytes)}", f"end the processes named; or {ways(plan)}")


def allocator(machine: Machine) -> Finding:
    """Settings of PyTorch that stop processes from sharing the card or from releasing its memory."""
    variables = known(machine.cards).variables
    texts = {name: variables[name] for name in ALLOCATOR if name in variables}
    shown = ", ".join(f"{name}={text}" for name, text in texts.items())
    if len(set(texts.values())) > 1:
        return warning(f"two settings that contradict each other: {shown}", f"unset {ALLOCATOR[1]}")
    plain = shown.replace(" ", "").lower()
    if "expandable_segments:true" in plain:
        return warning(
            f"{shown}: such memory can neither be shared by processes (CUDA IPC) nor be released by vLLM",
            f"unset {' '.join(texts)}",
        )
    if "backend:cudamallocasync" in plain:
        return warning(
            f"{shown}: this allocator has no pools that can be shared, and PyTorch cannot make it release memory",
            f"unset {' '.join(texts)}",
        )
    if variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0":
        return warning(
            "PYTORCH_NO_CUDA_MEMORY_CACHING makes PyTorch call the driver for every tensor",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return warning("CUDA_LAUNCH_BLOCKING makes the CPU wait for every kernel", "unset CUDA_LAUNCH_BLOCKING")
    return ok(f"PyTorch's defaults{f', with {shown}' if shown else ''}")


def kernels(machine: Machine) -> Finding:
    """Whether Triton can start. PyTorch computes where it cannot, so a run does not fail."""
    toolchain = known(machine.toolchain)
    if not on_card(machine):
        in_c = machine.config.actor.token_step != "torch" or machine.config.compute.compiles
        slower = toolchain.compiler is None and in_c
        return note(SLOWER, INSTALL_COMPILER) if slower else ok("not needed: Triton's kernels are for cards")
    if machine.config.compute.kernels == "torch":
        return ok("not needed: compute.kernels is 'torch'")
    if lacks := missing(toolchain):
        return warning(
            f"{'; '.join(lack.found for lack in lacks)}: PyTorch's own operations compute instead of our kernels",
            f"{'; '.join(lack.remedy for lack in lacks)}; or --set compute.kernels=torch",
        )
    return ok(f"Triton {toolchain.triton} can compile kernels with {toolchain.compiler}")


def open_files(machine: Machine) -> Finding:
    limit = known(machine.limits).open_files
    if limit is None or limit >= COMFORTABLE_OPEN_FILES:
        return ok(f"{limit or 'any number of'} open files in one process")
    # Processes raise the soft limit themselves, so this is the hard one.
    found, remedy = f"{limit} open files in one process", f"ulimit -n {COMFORTABLE_OPEN_FILES}, as root"
    return error(found, remedy) if limit < MIN_DESCRIPTORS else warning(found, remedy)


def file_size(machine: Machine) -> Finding:
    """The largest files of a run are journal segments, and those of the base in the cache."""
    limit = known(machine.limits).file_bytes
    if limit is None:
        return ok("files of any size")
    shape = known(machine.model).shape
    largest = (
        SEGMENT_BYTES if isinstance(shape, Missing) else max(SEGMENT_BYTES, *cached_base_bytes(machine, shape).values())
    )
    found = f"files up to {size(limit)}; the largest file of a run needs about {size(largest)}"
    return error(found, "ulimit -f unlimited") if limit < largest else ok(found)


def address_space(machine: Machine) -> Finding:
    """A process reserves far more than it uses."""
    limit = known(machine.limits).address_bytes
    if limit is None:
        return ok("any amount of address space")
    found = f"{size(limit)} of address space for one process"
    remedy = "ulimit -v unlimited; to limit memory, use a cgroup"
    if on_card(machine):
        return error(f"{found}: CUDA reserves more than the memory of card and machine together", remedy)
    return warning(found, remedy) if limit < ADDRESS_BYTES else ok(found)


def processes(machine: Machine) -> Finding:
    """The limit counts every thread of every program of this user."""
    limit = known(machine.limits).processes
    if limit is not None and limit < MIN_PROCESSES:
        return warning(f"{limit} processes and threads for this user", f"ulimit -u {4 * MIN_PROCESSES}")
    return ok(f"{limit or 'any number of'} processes and threads")
