"""Everything that the checks look at: a configuration, and all facts of this machine, each within its time."""

from dataclasses import dataclass
from pathlib import Path

from launch.doctor.facts.card import LIMIT_S as CARD_LIMIT_S
from launch.doctor.facts.card import Cards, Driver, RoundTrip, TorchBuild, TorchFacts, look_at_cards, look_at_torch
from launch.doctor.facts.disk import Disk, Link, RunFolder, look_at_disk, look_at_link, look_at_run
from launch.doctor.facts.model import Hub, Model, kind_of, local_folder, look_at_hub, look_at_model
from launch.doctor.facts.processor import (
    Cgroup,
    Limits,
    Memory,
    Processor,
    look_at_cgroup,
    look_at_limits,
    look_at_memory,
    look_at_processor,
)
from launch.doctor.facts.software import Reward, Software, look_at_reward, look_at_software
from launch.doctor.finding import Missing
from launch.doctor.probe import Look
from shared.config.tree import Config

QUICK_S = 3.0
"""For what takes milliseconds on a sound machine."""
HUB_S = 10.0
"""Two questions and a resolver."""
TORCH_S = 40.0
"""Importing torch and bitsandbytes takes seconds, and on a cold network disk many."""
REWARD_S = 15.0
SPARE_S = 2.0
"""For the end of a process that was killed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts, or why there are none."""

    config: Config
    """What is to be run."""
    run_dir: Path
    """Where."""
    software: Software | Missing
    """Versions and windows."""
    driver: Driver | Missing
    """The card's driver."""
    torch: TorchBuild | Missing
    """PyTorch; Missing if it does not load."""
    bitsandbytes: RoundTrip | Missing
    """NF4 there and back; Missing if it does not work."""
    cards: Cards | Missing
    """What nvidia-smi lists."""
    processor: Processor | Missing
    """Cores and vector units."""
    cgroup: Cgroup | Missing
    """A container's limits."""
    memory: Memory | Missing
    """RAM, swap, shared memory."""
    disk: Disk | Missing
    """Under the run directory."""
    limits: Limits | Missing
    """ulimit."""
    link: Link | Missing
    """The wire's address."""
    run: RunFolder | Missing
    """The run directory, where it exists."""
    model: Model | Missing
    """The model as far as it is here."""
    hub: Hub | Missing
    """What the hub says about one that is not here."""
    reward: Reward | Missing
    """The user's reward function."""


def on_card(machine: Machine) -> bool:
    """As `compute.device` says; `auto` takes a card that PyTorch can use."""
    device = machine.config.compute.device
    if device == "auto":
        return not isinstance(machine.torch, Missing) and bool(machine.torch.devices)
    return device == "cuda"


def gather(config: Config, run_dir: Path) -> Machine:
    """Everything."""
    # First and alone, so that the libraries that are loaded next do not slow the disk that is measured.
    disk = Look(lambda: look_at_disk(run_dir), QUICK_S).result()
    torch = Look(lambda: look_at_torch(config.compute.device, TORCH_S), TORCH_S + SPARE_S)
    reward = Look(lambda: look_at_reward(config.verifier, REWARD_S), REWARD_S + SPARE_S)
    hub = Look(lambda: ask_hub(config), HUB_S)
    cards = Look(look_at_cards, 2 * CARD_LIMIT_S)
    software = Look(look_at_software, QUICK_S)
    processor = Look(look_at_processor, QUICK_S)
    cgroup = Look(look_at_cgroup, QUICK_S)
    memory = Look(look_at_memory, QUICK_S)
    limits = Look(look_at_limits, QUICK_S)
    link = Look(lambda: look_at_link(config.link, run_dir), QUICK_S)
    run = Look(lambda: look_at_run(run_dir), QUICK_S)
    model = Look(lambda: look_at_model(config), HUB_S)
    library = answered(torch.result())
    return Machine(
        config=config,
        run_dir=run_dir,
        software=software.result(),
        driver=library.driver,
        torch=library.torch,
        bitsandbytes=library.bitsandbytes,
        cards=cards.result(),
        processor=processor.result(),
        cgroup=cgroup.result(),
        memory=memory.result(),
        disk=disk,
        limits=limits.result(),
        link=link.result(),
        run=run.result(),
        model=model.result(),
        hub=hub.result(),
        reward=reward.result(),
    )


def answered(facts: TorchFacts | Missing) -> TorchFacts:
    """A probe that could not even be started leaves all its stages unanswered."""
    if isinstance(facts, Missing):
        return TorchFacts(driver=facts, torch=facts, bitsandbytes=facts)
    return facts


def ask_hub(config: Config) -> Hub | Missing:
    """Only about a model that would have to be fetched."""
    if kind_of(config.model) != "hub":
        return Missing("not asked: model.path is no hub id")
    if local_folder(config.model):
        return Missing("not asked: the model is here")
    return look_at_hub(config.model)
