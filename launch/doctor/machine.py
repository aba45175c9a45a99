"""All that the checks read: the configuration, and the facts about this machine, each gathered within a time limit."""

from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from launch.card.cards import NVIDIA_SMI_S, Cards, look_at_cards
from launch.card.command import NotPlanned, plan_here
from launch.card.plan import CardPlan
from launch.card.work import CardWork, card_work
from launch.doctor.disk import Disk, Link, RunFolder, look_at_disk, look_at_link, look_at_run
from launch.doctor.finding import Missing
from launch.doctor.hardware import (
    Limits,
    Processor,
    look_at_limits,
    look_at_processor,
)
from launch.doctor.libraries import (
    Driver,
    Reward,
    RoundTrip,
    Software,
    TorchBuild,
    TorchFacts,
    look_at_reward,
    look_at_software,
    look_at_torch,
)
from launch.doctor.model import Hub, Model, ask_hub, look_at_model
from launch.doctor.probe import Look
from launch.plan.cost import dtype_of
from launch.plan.memory import NF4_BYTES
from launch.plan.shape import ModelShape
from launch.plan.work import VALUE_BYTES
from shared.config.tree import Config
from shared.model.kernels.toolchain import Toolchain, look_at_toolchain
from shared.process.free_memory import Cgroup, Memory, look_at_cgroup, look_at_memory

QUICK_S = 3.0
"""For what takes milliseconds on a healthy machine."""
HUB_S = 10.0
"""Two requests, after the name of the hub was resolved."""
TORCH_S = 40.0
"""Importing torch and bitsandbytes takes seconds, on a slow network disk up to half a minute."""
PLAN_S = 60.0
"""Torch and transformers are imported, and the code of both processes is run without values."""
REWARD_S = 15.0
SPARE_S = 2.0
"""For a process that was killed to end."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The configuration, and each fact or the reason why it is missing."""

    config: Config
    """Of the run that is planned."""
    run_dir: Path
    """Its directory."""
    software: Software | Missing
    """Installed and allowed versions."""
    driver: Driver | Missing
    """The card's driver."""
    torch: TorchBuild | Missing
    """PyTorch; Missing if it does not load."""
    bitsandbytes: RoundTrip | Missing
    """How exactly it quantises; Missing if it does not work."""
    cards: Cards | Missing
    """What nvidia-smi lists."""
    toolchain: Toolchain | Missing
    """What Triton needs to compile kernels for a card."""
    processor: Processor | Missing
    """Cores, vector units, variables."""
    cgroup: Cgroup | Missing
    """A container's limits."""
    memory: Memory | Missing
    """RAM and swap."""
    plan: CardPlan | Missing
    """What the run takes of the card."""
    disk: Disk | Missing
    """The file system of the run directory."""
    limits: Limits | Missing
    """ulimit."""
    link: Link | Missing
    """The address that the learner binds."""
    run: RunFolder | Missing
    """The run directory."""
    model: Model | Missing
    """The model and the task files, as far as they are on this machine."""
    hub: Hub | Missing
    """What the hub says about a model that has to be fetched."""
    reward: Reward | Missing
    """The user's reward function."""


def on_card(machine: Machine) -> bool:
    """Whether the run would compute on a card. compute.device = `auto` takes one if PyTorch can use it."""
    device = machine.config.compute.device
    if device == "auto":
        return not isinstance(machine.torch, Missing) and bool(machine.torch.devices)
    return device == "cuda"


def cached_base_bytes(machine: Machine, shape: ModelShape) -> dict[str, int]:
    """Bytes of what the cache keeps of the base, by the names in Model.cached. The dense base is a file of its own,
    but a base without codes that has the number type of the run is its own dense base."""
    model, parameters = machine.config.model, shape.linear + shape.rest
    dtype = dtype_of(machine.config.compute.dtype, on_card=on_card(machine))
    dense = VALUE_BYTES[dtype] * parameters
    kept, is_dense = shape.file_bytes, round(shape.file_bytes / parameters) == VALUE_BYTES[dtype]
    if model.quantization == "nf4":
        kept, is_dense = int(NF4_BYTES * shape.linear) + VALUE_BYTES["bf16"] * shape.rest, False
    return {model.quantization: kept, dtype: dense if reads_dense_base(machine) and not is_dense else 0}


def waiting_bytes(machine: Machine, shape: ModelShape) -> int:
    """Of the bases that wait in host memory between turns, as it is planned where there is a plan."""
    compute, actor, model = machine.config.compute, machine.config.actor, machine.config.model
    if not isinstance(machine.plan, Missing):
        compute = structs.replace(compute, residency=machine.plan.residency)
    if compute.residency == "shared" and compute.learner_card == compute.actor_card:
        return 0
    cached = cached_base_bytes(machine, shape)
    base = max(cached.values()) if model.dequantize == "once" else cached[model.quantization]
    actors = compute.actors if actor.engine == "hf" else 0
    return base * (compute.swaps_base("learner") + actors * compute.swaps_base("actor"))


def reads_dense_base(machine: Machine) -> bool:
    """Whether a process of the run maps the dense base (shared/base/cache.py)."""
    model, actor = machine.config.model, machine.config.actor
    if model.dequantize == "once" or (model.dequantize == "auto" and not on_card(machine)):
        return True
    return actor.engine == "vllm" and actor.weights != "nf4" and model.quantization == "nf4"


def gather(config: Config, run_dir: Path) -> Machine:
    """All facts. The looks run at the same time, except for the first."""
    # The disk is measured before the libraries are loaded, because loading them would slow it.
    disk = Look(lambda: look_at_disk(run_dir), QUICK_S).result()
    torch = Look(lambda: look_at_torch(config.compute.device, TORCH_S), TORCH_S + SPARE_S)
    reward = Look(lambda: look_at_reward(config.verifier, config.tasks, REWARD_S), REWARD_S + SPARE_S)
    hub = Look(lambda: ask_hub(config.model), HUB_S)
    cards = Look(look_at_cards, 2 * NVIDIA_SMI_S)
    plan = Look(lambda: plan_for_card(card_work(config)), PLAN_S)
    software = Look(look_at_software, QUICK_S)
    toolchain = Look(look_at_toolchain, QUICK_S)
    processor = Look(look_at_processor, QUICK_S)
    cgroup = Look(look_at_cgroup, QUICK_S)
    memory = Look(look_at_memory, QUICK_S)
    limits = Look(look_at_limits, QUICK_S)
    link = Look(lambda: look_at_link(config.link, run_dir), QUICK_S)
    run = Look(lambda: look_at_run(run_dir), QUICK_S)
    model = Look(lambda: look_at_model(config.model, config.lora.targets, config.tasks, config.verifier.kind), HUB_S)
    library = all_stages(torch.result())
    return Machine(
        config=config,
        run_dir=run_dir,
        software=software.result(),
        driver=library.driver,
        torch=library.torch,
        bitsandbytes=library.bitsandbytes,
        cards=cards.result(),
        toolchain=toolchain.result(),
        processor=processor.result(),
        cgroup=cgroup.result(),
        memory=memory.result(),
        plan=plan.result(),
        disk=disk,
        limits=limits.result(),
        link=link.result(),
        run=run.result(),
        model=model.result(),
        hub=hub.result(),
        reward=reward.result(),
    )


def plan_for_card(work: CardWork) -> CardPlan | Missing:
    """Of what is free there now."""
    if work.compute.device == "cpu":
        return Missing("compute.device is 'cpu'")
    try:
        return plan_here(work)
    except NotPlanned as error:
        return Missing(str(error))


def all_stages(facts: TorchFacts | Missing) -> TorchFacts:
    """If the probe could not be started, all its stages are missing."""
    if isinstance(facts, Missing):
        return TorchFacts(driver=facts, torch=facts, bitsandbytes=facts)
    return facts
