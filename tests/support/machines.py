"""Made-up machines: a good one for doctor, ways to change it, and a speed for the plan."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec

from launch.card.cards import Card, Cards
from launch.card.plan import CardPlan
from launch.doctor.disk import Disk, Folder, Link, RunFolder
from launch.doctor.finding import Missing
from launch.doctor.hardware import Limits, Processor
from launch.doctor.libraries import Device, Driver, Library, Reward, RoundTrip, Software, TorchBuild
from launch.doctor.machine import Machine
from launch.doctor.model import Hub, Model
from launch.plan.machine import LayerTimes, OtherTimes, Rates, Speed, machine_speed
from launch.plan.shape import ModelShape
from launch.plan.work import Dtype
from shared.config.load import resolve
from shared.config.tree import Config
from shared.model.kernels.toolchain import Toolchain
from shared.process.free_memory import Cgroup, Memory
from shared.process.processor import cores_here

Change = Callable[[Machine], Machine]
GIB = 2**30
RUN = Path("runs/first")
FOLDER = Folder(path=RUN, existing=Path("runs"), writable=True, free=100 * GIB)
SMALL = ModelShape(
    linear=700_000,
    rest=70_000,
    adapter=10_000,
    file_bytes=3 << 20,
    layers=4,
    hidden=128,
    key_value=64,
    vocabulary=512,
    heads=4,
    outputs=4 * 1280,
    own_layers=True,
)
HALF = ModelShape(
    linear=357_826_560,
    rest=136_206_720,
    adapter=24 * (2 * 896 + 2 * (896 + 128) + 2 * 896 + 3 * (896 + 4864)),
    file_bytes=988_097_824,
    layers=24,
    hidden=896,
    key_value=128,
    vocabulary=151_936,
    heads=14,
    outputs=24 * (3 * 896 + 2 * 128 + 2 * 4864),
    own_layers=True,
)
"""Qwen2.5-0.5B."""
QWEN_15B = ModelShape(
    linear=1_310_000_000,
    rest=467_000_000,
    adapter=1_153_750,
    file_bytes=3_550_000_000,
    layers=28,
    hidden=1536,
    key_value=256,
    vocabulary=151_936,
    heads=12,
    outputs=28 * (3 * 1536 + 2 * 256 + 2 * 8960),
    own_layers=True,
)
TIMES = (1e-9, 1e-9, 1e-9, 2e-9, 8e-9)
RATES = Rates(
    product=TIMES,
    gradient=8e-9,
    head=5e-11,
    head_token_step=1e-9,
    packed=TIMES,
    packing=0.0,
    coded=(),
    eight_bit=(),
    compiled=None,
    layer=LayerTimes(
        token_step=OtherTimes(calls=1e-4, per_value=1e-9),
        folded_token_step=OtherTimes(calls=1e-4, per_value=1e-9),
        update=OtherTimes(calls=1e-3, per_value=1e-8),
    ),
)
SPEED = Speed(rates=RATES, sampler=5e-9, operation=1e-6, byte=1e-10, fresh=1e-13)
"""Made-up times of a machine."""


def assume_speed(cache: Path) -> None:
    """Runs in this cache folder plan with the made-up times. To measure takes half a minute beside other tests, and a
    measurement that was made beside them does not hold for long."""
    for threads, dtype in product({1, 2, cores_here()}, get_args(Dtype)):
        machine_speed(cache, threads, "fast", dtype, measure=lambda *_: SPEED, is_busy=lambda: False)


CARD = Card(uuid="GPU-a", name="RTX 3070", driver="580.1", total=8 * GIB, free=7 * GIB, mode="Default", processes=())
TORCH_CUDA = TorchBuild(
    version="2.13.0+cu130",
    cuda_build="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "compute_90"),
    devices=(Device(name="RTX 3070", capability=(8, 6)),),
    cuda_error="",
)
TOOLCHAIN = Toolchain(
    triton="3.7.1",
    compiler="/usr/bin/gcc",
    header=Path("/usr/include/python3.11/Python.h"),
    has_header=True,
    cache=Path("/home/user/.triton/cache"),
    cache_serves=True,
)
ROUND_TRIP = RoundTrip(version="0.50.2", device="cpu", round_trip=0.15, kernel_gap=0.0)


def config(**sections: Mapping[str, object]) -> Config:
    """With these keys, for example `config(compute={"device": "cpu"})`."""
    return resolve({**sections, "compute": {"learner_threads": 2, "actor_threads": 2, **sections.get("compute", {})}})


def sound() -> Machine:
    """Nothing to say about it."""
    return Machine(
        config=config(),
        run_dir=RUN,
        software=Software(
            python="3.11.7",
            python_versions=">=3.11",
            libraries=(
                Library(name="numpy", versions="<3,>=2.3", installed="2.4.1"),
                Library(name="torch", versions=">=2.11,<2.14", installed="2.11.0+cu130"),
            ),
        ),
        driver=Driver(cuda=None),
        torch=TorchBuild(version="2.13.0+cpu", cuda_build=None, architectures=(), devices=(), cuda_error=""),
        bitsandbytes=ROUND_TRIP,
        cards=Cards(trouble="", cards=(), variables={}),
        toolchain=TOOLCHAIN,
        processor=Processor(
            name="A processor", architecture="x86_64", flags=frozenset({"avx", "avx2"}), cores=4, variables={}
        ),
        cgroup=Cgroup(cpus=None, memory_limit=None, memory_left=None),
        memory=Memory(
            total=16 * GIB,
            available=12 * GIB,
            swap_total=4 * GIB,
            swap_free=4 * GIB,
            wsl=False,
        ),
        plan=Missing("there is no card"),
        disk=Disk(
            folder=FOLDER,
            trouble="",
            free_files=10**6,
            kind="ext4",
            sync_s=0.002,
            keeps_modes=True,
            keeps_locks=True,
        ),
        limits=Limits(open_files=1024, file_bytes=None, address_bytes=None, processes=None),
        link=Link(address="ipc", trouble="", busy=False),
        run=RunFolder(state="new", started=False, keys_trouble="", keys_mode=None, lock_owner="", lease_holder=""),
        model=Model(
            kind="embedded",
            folder=Path("model"),
            shape=SMALL,
            base_cache=FOLDER,
            cached=frozenset(),
            hub_cache=FOLDER,
            offline=False,
            trouble="",
            tasks_trouble="",
        ),
        hub=Missing("not asked"),
        reward=Reward(function="", trouble=""),
    )


def but(subject: str, **fields: Any) -> Change:
    """The sound machine with other facts about one subject."""
    return lambda machine: replace(machine, **{subject: replace(getattr(machine, subject), **fields)})


def configured(**sections: Mapping[str, object]) -> Change:
    """Another configuration."""
    return lambda machine: replace(machine, config=config(**sections))


def torch(**fields: Any) -> Change:
    """A PyTorch for cards, different in these fields."""
    return lambda machine: replace(machine, torch=msgspec.structs.replace(TORCH_CUDA, **fields))


def cards(**fields: Any) -> Change:
    """A card, different in these fields."""
    return lambda machine: replace(machine, cards=Cards(trouble="", cards=(replace(CARD, **fields),), variables={}))


def round_trip(**fields: Any) -> Change:
    """Another outcome of the round trip."""
    return lambda machine: replace(machine, bitsandbytes=msgspec.structs.replace(ROUND_TRIP, **fields))


def both(*changes: Change) -> Change:
    """One after the other."""

    def change(machine: Machine) -> Machine:
        for step in changes:
            machine = step(machine)
        return machine

    return change


def planned(peak: int, *, fits: bool, **remedy: str) -> Change:
    """A plan for the card."""
    plan = CardPlan(
        fits=fits,
        budget_bytes=7 * GIB,
        peak_bytes=peak,
        residency="release",
        processes={},
        choices={},
        remedies=[{key.replace("__", "."): value for key, value in remedy.items()}] if remedy else [],
        waiting={},
    )
    return lambda machine: replace(machine, plan=plan)


def setting(**variables: str) -> Change:
    """Variables that PyTorch's allocator and CUDA read."""
    return but("cards", variables=variables)


def remote(hub: Hub | Missing, **fields: Any) -> Change:
    """A model that is not here."""
    absent = but("model", kind="hub", folder=None, shape=Missing("not here"), **fields)
    return both(configured(model={"path": "owner/name"}), absent, lambda machine: replace(machine, hub=hub))


def folder(**fields: Any) -> Change:
    """Another folder for the run."""
    return but("disk", folder=replace(FOLDER, **fields))


def cache_of(name: str, **fields: Any) -> Change:
    """Another cache folder."""
    return but("model", **{name: replace(FOLDER, **fields)})


def write_model(folder: Path, facts: Mapping[str, object], tensors: Mapping[str, list[int]]) -> int:
    """A model of headers alone; gives the size of its file."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}} | {name: {"shape": s} for name, s in tensors.items()}
    ).encode()
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return 8 + len(header)
