"""doctor's judgement: every check passes on a sound machine and fails on the facts that it is there for."""

from dataclasses import dataclass, replace

import pytest

from launch.card.cards import CardProcess
from launch.doctor.command import CHECKS, Report, examine
from launch.doctor.finding import Level, Missing
from launch.doctor.libraries import Device, Driver, Library, Reward
from launch.doctor.machine import Machine
from launch.doctor.model import Hub
from launch.plan.cost import work_of
from launch.plan.memory import host_memory
from shared.config.tree import Config
from tests.support.machines import (
    GIB,
    QWEN_15B,
    SMALL,
    Change,
    both,
    but,
    cache_of,
    cards,
    configured,
    folder,
    planned,
    remote,
    round_trip,
    setting,
    sound,
    torch,
)

NAMES = [f"{group}.{check.__name__}" for group, checks in CHECKS.items() for check in checks]
NEEDED = host_memory(SMALL, work_of(Config(), cores=4)).total
UNSEEN = Missing("not finished within 3 s")
HUB = Hub(found=True, gated=False, admitted=True, token=False, num_bytes=GIB)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Facts, and what is said about them."""

    check: str
    """Its name."""
    change: Change
    """From the sound machine to one that has this trouble."""
    level: Level
    """How bad it is."""
    found: str
    """Words of the finding."""
    remedy: str
    """Words of the remedy."""


def case(check: str, level: Level, change: Change, found: str, remedy: str) -> Case:
    """One row of the table."""
    return Case(check=check, level=level, change=change, found=found, remedy=remedy)


def reward(trouble: str, *, late: bool = False) -> Change:
    return lambda m: replace(m, reward=Reward(function="r.py:f", trouble=trouble, timed_out=late))


NUMPY = Library(name="numpy", versions="<3,>=2.3", installed="2.2.0")
LATE = Missing("late", timed_out=True)
IS_WRONG = "is no folder; check it."
GATED = replace(HUB, gated=True, admitted=False)
LARGE = both(configured(batch={"recompute": "never"}), but("model", shape=QWEN_15B))
ON_CARD = both(torch(), configured(compute={"device": "cuda"}))

CASES = [
    case("software.python", "note", but("software", waits_steadily=False), "its waits follow the clock", "`resume`"),
    case("software.python", "error", but("software", python="3.10.2"), "Python 3.10.2, expected >=3.11", "PYTHON="),
    case("software.libraries", "warning", but("software", libraries=(NUMPY,)), "numpy 2.2.0 (expected <3", "run.sh"),
    case(
        "software.libraries",
        "error",
        but("software", libraries=(replace(NUMPY, installed=None),)),
        "not installed: numpy",
        "run.sh",
    ),
    case("software.torch", "note", lambda m: replace(m, torch=LATE), "PyTorch was not checked: late", "may be busy"),
    case("software.bitsandbytes", "note", lambda m: replace(m, bitsandbytes=LATE), "not checked: late", "run doctor"),
    case("software.torch", "error", lambda m: replace(m, torch=Missing("killed by signal 11")), "signal 11", "run.sh"),
    case(
        "software.bitsandbytes",
        "error",
        lambda m: replace(m, bitsandbytes=Missing("ImportError: x")),
        "ImportError: x",
        "model.quantization=none",
    ),
    case("software.bitsandbytes", "error", round_trip(round_trip=0.7), "quantises wrongly: an error of 0.7", "run.sh"),
    case("software.bitsandbytes", "error", round_trip(round_trip=float("nan")), "quantises wrongly", "run.sh"),
    case("software.bitsandbytes", "error", round_trip(kernel_gap=0.01), "differ from the NF4 formula", "run.sh"),
    case(
        "software.bitsandbytes",
        "note",
        both(configured(model={"quantization": "none"}), lambda m: replace(m, bitsandbytes=Missing("x"))),
        "it is not needed",
        "",
    ),
    case("processor.vector_units", "warning", but("processor", flags=frozenset({"avx"})), "no AVX2", "processor"),
    case(
        "processor.vector_units",
        "error",
        both(but("processor", flags=frozenset({"avx"})), configured(compute={"blas": "portable"})),
        "no AVX2",
        "compute.blas=fast",
    ),
    case("processor.vector_units", "note", but("processor", architecture="aarch64"), "aarch64", ""),
    case("processor.cores", "warning", but("processor", cores=1), "1 cores", "compute.learner_threads=1"),
    case(
        "processor.cores",
        "note",
        both(but("processor", cores=3), configured(pipeline={"max_lag": 1})),
        "take turns",
        "pipeline.max_lag=0",
    ),
    case("processor.container_share", "warning", but("cgroup", cpus=1.5), "1.5 cores of processor time", "--cpus=2"),
    case(
        "processor.variables",
        "warning",
        but("processor", variables={"OMP_PROC_BIND": "true"}),
        "OMP_PROC_BIND=true",
        "unset OMP_PROC_BIND",
    ),
    case(
        "processor.variables",
        "warning",
        but("processor", variables={"ATEN_CPU_CAPABILITY": "default"}),
        "ATEN_CPU_CAPABILITY=default",
        "unset",
    ),
    case(
        "processor.variables",
        "note",
        but("processor", variables={"OMP_NUM_THREADS": "64"}),
        "OMP_NUM_THREADS=64: replaced",
        "compute.learner_threads",
    ),
    case("memory.available", "error", but("memory", available=GIB // 2), "512 MiB of 16.0 GiB", "end other"),
    case("memory.available", "warning", but("memory", available=NEEDED - 1), "a run needs about", "end other"),
    case("memory.available", "error", LARGE, "a run needs about", "recompute=always"),
    case("memory.available", "note", remote(HUB), "once the model is on this machine", ""),
    case(
        "memory.container_limit",
        "error",
        but("cgroup", memory_limit=GIB, memory_left=GIB // 2),
        "the container may use 1.0 GiB, 512 MiB of it are free",
        "--memory",
    ),
    case("memory.swap", "warning", but("memory", swap_free=GIB), "3.0 GiB of 4.0 GiB swap in use", "end other"),
    case("memory.windows", "note", but("memory", wsl=True), "WSL2", ".wslconfig"),
    case("memory.windows", "warning", both(ON_CARD, but("memory", wsl=True)), "cannot be listed", "leave memory free"),
    case("card.present", "error", configured(compute={"device": "cuda"}), "has no CUDA", "compute.device=cpu"),
    case("card.present", "warning", cards(), "this build of PyTorch has no CUDA; the CPU is used", "pytorch.org"),
    case(
        "card.present",
        "warning",
        both(cards(), torch(devices=(), cuda_error="driver too old")),
        "it cannot be used: driver too old",
        "update the driver",
    ),
    case("card.present", "warning", both(cards(), torch(devices=())), "does not see the card", "--gpus all"),
    case("card.present", "warning", but("cards", trouble="Driver/library mismatch"), "has no CUDA", "pytorch.org"),
    case(
        "card.present",
        "error",
        both(ON_CARD, torch(devices=()), setting(CUDA_VISIBLE_DEVICES="")),
        "CUDA_VISIBLE_DEVICES='' hides it",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    case("card.present", "error", both(ON_CARD, torch(devices=())), "no card was found", "nvidia-smi"),
    case(
        "card.driver",
        "error",
        both(torch(), lambda m: replace(m, driver=Driver(cuda=(12, 4)))),
        "supports CUDA up to 12.4, PyTorch was built for 13.0",
        "update the NVIDIA driver",
    ),
    case(
        "card.driver",
        "note",
        both(torch(cuda_build="12.8"), lambda m: replace(m, driver=Driver(cuda=(12, 4)))),
        "within one major version",
        "update the NVIDIA driver",
    ),
    case(
        "card.architecture",
        "error",
        torch(devices=(Device(name="GTX 1080", capability=(6, 1)),)),
        "GTX 1080 is sm_61",
        "pytorch.org",
    ),
    case(
        "card.architecture",
        "error",
        both(ON_CARD, torch(devices=(Device(name="Tesla T4", capability=(7, 5)),))),
        "Tesla T4 is sm_75, which has no bf16",
        "compute.dtype=fp32",
    ),
    case("card.sharing", "error", both(ON_CARD, cards(mode="Exclusive_Process")), "one process", "-c DEFAULT"),
    case("card.sharing", "note", cards(mode="Prohibited"), "Prohibited on RTX 3070", "-c DEFAULT"),
    case(
        "card.memory",
        "error",
        both(
            ON_CARD,
            cards(free=GIB // 2, processes=(CardProcess(pid=12, name="/usr/bin/python", num_bytes=7 * GIB),)),
            planned(5 * GIB, fits=False, compute__residency="swap"),
        ),
        "512 MiB of 8.0 GiB are free on RTX 3070, used by /usr/bin/python (process 12, 7.0 GiB); a run needs 5.0 GiB",
        "or --set compute.residency=swap",
    ),
    case(
        "card.memory",
        "error",
        both(
            ON_CARD,
            cards(free=2 * GIB, processes=(CardProcess(pid=3, name="x", num_bytes=None),)),
            planned(9 * GIB, fits=False),
        ),
        "x (process 3, an unknown amount)",
        "take a smaller model",
    ),
    case("card.memory", "note", both(ON_CARD, cards()), "what a run needs is not known: there is no card", ""),
    case(
        "card.allocator",
        "warning",
        setting(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64, expandable_segments:True"),
        "can neither be shared by processes (CUDA IPC) nor be released by vLLM",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    case("card.allocator", "warning", setting(PYTORCH_ALLOC_CONF="expandable_segments:True"), "CUDA IPC", "unset"),
    case("card.allocator", "warning", setting(PYTORCH_ALLOC_CONF="backend:cudaMallocAsync"), "no pools", "unset"),
    case(
        "card.allocator",
        "warning",
        setting(PYTORCH_ALLOC_CONF="a:1", PYTORCH_CUDA_ALLOC_CONF="a:2"),
        "two settings that contradict each other",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    case("card.allocator", "warning", setting(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), "for every tensor", "unset"),
    case("card.allocator", "warning", setting(CUDA_LAUNCH_BLOCKING="1"), "every kernel", "unset CUDA_LAUNCH_BLOCKING"),
    case("card.kernels", "warning", both(ON_CARD, but("toolchain", compiler=None)), "no C compiler", "gcc libc6-dev"),
    case(
        "disk.writable",
        "error",
        but("disk", trouble="Read-only disk"),
        "written to: Read-only disk",
        "--out",
    ),
    case("disk.space", "error", folder(free=100 << 20), "100 MiB free", "free some space"),
    case(
        "disk.space",
        "error",
        both(folder(free=GIB), but("model", shape=QWEN_15B)),
        "1.0 GiB free under runs, a run may need 1.3 GiB",
        "smaller checkpoint.keep",
    ),
    case(
        "disk.space",
        "error",
        both(folder(free=4 * GIB), but("model", shape=QWEN_15B), configured(curriculum={"kind": "levels", "ewc": 0.1})),
        "4.0 GiB free under runs, a run may need",
        "smaller checkpoint.keep",
    ),
    case("disk.space", "error", both(folder(free=GIB), configured(run={"steps": 99_999})), "1.0 GiB free", "run.steps"),
    case(
        "disk.space",
        "warning",
        both(folder(free=100 << 20), but("run", state="run")),
        "minus what this one has written already",
        "free some space",
    ),
    case("disk.space", "error", but("disk", free_files=3), "3 more files fit", "free some space"),
    case("disk.speed", "warning", but("disk", sync_s=0.8), "takes 800 ms", "local SSD"),
    case("disk.speed", "note", but("disk", sync_s=0.06), "takes 60 ms: the learner waits", "local SSD"),
    case("disk.file_system", "warning", but("disk", kind="tmpfs"), "lost after a power cut", "--out"),
    case("disk.file_system", "warning", but("disk", kind="nfs4"), "stored on another system", "second learner"),
    case("disk.file_system", "warning", but("disk", kind="fuse.sshfs"), "stored on another system", "second learner"),
    case("disk.file_system", "note", but("disk", kind="overlay"), "inside the container", "mount a volume"),
    case("disk.modes", "error", but("disk", keeps_modes=False), "can be read by others", "Windows"),
    case("disk.locks", "error", but("disk", keeps_locks=False), "flock does not keep a second process out", "--out"),
    case("limits.open_files", "error", but("limits", open_files=39), "39 open files", "ulimit -n 1024"),
    case("limits.open_files", "warning", but("limits", open_files=40), "40 open files", "ulimit -n 1024"),
    case("limits.file_size", "error", but("limits", file_bytes=1 << 20), "files up to 1 MiB", "ulimit -f unlimited"),
    case(
        "limits.file_size",
        "error",
        both(configured(compute={"dtype": "bf16"}), but("limits", file_bytes=GIB), but("model", shape=QWEN_15B)),
        "the largest file of a run needs about 3.3 GiB",
        "ulimit -f unlimited",
    ),
    case("limits.address_space", "warning", but("limits", address_bytes=4 * GIB), "4.0 GiB", "ulimit -v unlimited"),
    case(
        "limits.address_space",
        "error",
        both(ON_CARD, but("limits", address_bytes=64 * GIB)),
        "CUDA reserves more",
        "ulimit -v unlimited",
    ),
    case("limits.processes", "warning", but("limits", processes=100), "100 processes and threads", "ulimit -u"),
    case(
        "link.address",
        "error",
        but("link", address="tcp://0.0.0.0:5757", trouble="Address already in use", busy=True),
        "tcp://0.0.0.0:5757 cannot be bound: Address already in use",
        "ss -ltnp",
    ),
    case(
        "link.address",
        "note",
        both(
            but("link", address="tcp://0.0.0.0:5757", trouble="Address already in use", busy=True),
            but("run", state="run", lock_owner="process 7"),
        ),
        "this run's learner uses it",
        "",
    ),
    case(
        "link.address",
        "error",
        but("link", address="tcp://203.0.113.1:5757", trouble="Cannot assign requested address"),
        "Cannot assign requested address",
        "link.bind",
    ),
    case("run.directory", "note", but("run", state="run"), "runs/first has a run", "resume"),
    case("run.directory", "error", but("run", state="other"), "is not empty and has no run", "another --out"),
    case(
        "run.keys",
        "error",
        but("run", state="run", keys_trouble="The key file k can be read by others; run `chmod 600 k`."),
        "The key file k can be read by others",
        "run `chmod 600 k`",
    ),
    case("run.keys", "error", but("run", state="run", keys_mode=0o755), "(mode 0755)", "chmod 700 runs/first/keys"),
    case("run.lock", "error", but("run", state="run", lock_owner="process 7"), "in use by process 7", "stop it"),
    case(
        "run.lease", "warning", but("run", state="run", lease_holder="process 8"), "process 8 has the lease", "end it"
    ),
    case("model.present", "error", but("model", kind="folder", folder=None), "is not a model", "config.json"),
    case("model.present", "error", remote(UNSEEN, offline=True), "HF_HUB_OFFLINE is set", "hf download owner/name"),
    case("model.present", "warning", remote(UNSEEN), "could not be asked: not finished within 3 s", "hf download"),
    case("model.present", "error", remote(replace(HUB, found=False)), "neither a folder on this", "model.path"),
    case("model.present", "error", remote(HUB, trouble=f"'/x' {IS_WRONG}"), "'/x' is no folder", "check it"),
    case("model.targets", "error", but("model", trouble=f"'q' {IS_WRONG}"), "'q' is no folder", "check it"),
    case("model.present", "note", remote(HUB), "'owner/name' (1.0 GiB) will be fetched", "hf download owner/name"),
    case("model.present", "note", remote(replace(HUB, num_bytes=None)), "(size unknown)", "hf download"),
    case("model.access", "warning", remote(UNSEEN), "could not ask the hub whether 'owner/name' is gated", "network"),
    case("model.access", "note", remote(UNSEEN, offline=True), "the hub is not asked", "unset HF_HUB_OFFLINE"),
    case("model.access", "error", remote(GATED), "is gated and there is no token on this machine", "hf auth login"),
    case("model.access", "error", remote(replace(GATED, token=True)), "this token has no access", "ask for access"),
    case("model.hub_cache", "error", both(remote(HUB), cache_of("hub_cache", free=1)), "about 1.0 GiB", "HF_HOME"),
    case("model.hub_cache", "error", both(remote(HUB), cache_of("hub_cache", writable=False)), "runs", "HF_HOME"),
    case("model.base_cache", "error", cache_of("base_cache", free=1 << 20), "1 MiB free", "model.cache_dir"),
    case("model.base_cache", "error", cache_of("base_cache", writable=False), "may write to", "model.cache_dir"),
    case("model.tasks", "error", but("model", tasks_trouble=f"x.csv {IS_WRONG}"), "x.csv is no folder", "check it"),
    case("verifier.function", "error", reward("it is no file"), "'r.py:f' cannot be used: it is no file", "fix the"),
    case("verifier.function", "warning", reward("too slow", late=True), "was not checked: too slow", "may be busy"),
]


def finding(machine: Machine, check: str) -> Report:
    """What this check says."""
    (report,) = [report for report in examine(machine) if report.check == check]
    return report


def test_a_sound_machine_gives_no_finding() -> None:
    reports = examine(sound())
    assert [report.check for report in reports] == NAMES
    assert {report.finding.level for report in reports} == {"ok"}
    assert all(report.finding.found and not report.finding.remedy for report in reports)


def test_every_check_is_shown_failing() -> None:
    assert {case.check for case in CASES} == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check} {case.found}")
def test_a_check_fails_on_the_facts_it_is_there_for(case: Case) -> None:
    found = finding(case.change(sound()), case.check).finding
    assert found.level == case.level, found
    assert case.found in found.found
    assert case.remedy in found.remedy
    assert bool(found.remedy) == bool(case.remedy)
    assert found.level == "note" or found.remedy, "a warning or an error without a remedy"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check} {case.found}")
def test_what_is_said_is_plain_text_on_one_line(case: Case) -> None:
    found = finding(case.change(sound()), case.check).finding
    assert "\n" not in found.found + found.remedy
    assert not found.found.endswith(".")
    assert not found.remedy.endswith(".")
