"""The card: there or not, its driver, who is on it, and settings that do not go with two processes."""

import re
from collections.abc import Mapping

from launch.doctor.estimate import card_need, work_of
from launch.doctor.facts.card import Card, Cards, Holder
from launch.doctor.finding import Finding, Missing, error, known, note, ok, size, warning
from launch.doctor.machine import Machine, on_card

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BUILD = "install a build of PyTorch with CUDA (https://pytorch.org/get-started)"


def present(machine: Machine) -> Finding:
    """What `compute.device` asks for."""
    device = machine.config.compute.device
    if device == "cpu":
        return ok("not asked for: compute.device is 'cpu'")
    cards, torch = known(machine.cards), known(machine.torch)
    if torch.devices:
        return ok(f"PyTorch can use {', '.join(card.name for card in torch.devices)}")
    why = missing_because(cards.variables, torch.cuda_build, torch.cuda_error or cards.trouble, bool(cards.cards))
    if device == "cuda":
        return error(f"compute.device is 'cuda', but {why[0]}", f"{why[1]}; or use --set compute.device=cpu")
    if cards.cards or cards.trouble or torch.cuda_error:
        return warning(f"there is a card or a driver, but {why[0]}; the CPU is used", why[1])
    return ok("no card; the CPU is used")


def missing_because(variables: Mapping[str, str], build: str | None, trouble: str, seen: bool) -> tuple[str, str]:
    """Why PyTorch has no card, and the remedy."""
    hidden = variables.get("CUDA_VISIBLE_DEVICES", "0")
    if hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES"
    if build is None:
        return "this build of PyTorch has no CUDA", BUILD
    if trouble:
        return f"it cannot be used: {trouble}", "mend or update the driver (nvidia-smi must list the card)"
    if seen:
        return "PyTorch does not see the card that nvidia-smi lists", "start the container with --gpus all"
    return "no card was found", "check the driver with nvidia-smi; in a container use --gpus all"


def driver(machine: Machine) -> Finding:
    """New enough for the CUDA that PyTorch was built for."""
    build, newest = known(machine.torch).cuda_build, known(machine.driver).cuda
    if build is None or newest is None:
        return ok("no driver, or no CUDA in PyTorch: nothing to compare")
    major, minor = (int(part) for part in build.split(".")[:2])
    found = f"the driver serves CUDA up to {newest[0]}.{newest[1]}, PyTorch was built for {build}"
    if newest[0] < major:
        return error(found, "update the NVIDIA driver, or install a PyTorch build for an older CUDA")
    if newest < (major, minor):
        return note(
            f"{found}: works within one major version, without compiling kernels at run time",
            "update the NVIDIA driver",
        )
    return ok(found)


def architecture(machine: Machine) -> Finding:
    """PyTorch has kernels for the card."""
    torch = known(machine.torch)
    if not torch.devices:
        return ok("no card in use")
    for card in torch.devices:
        if not any(serves(built, card.capability) for built in torch.architectures):
            return error(
                f"{card.name} is sm_{card.capability[0]}{card.capability[1]}, PyTorch was compiled for "
                f"{', '.join(torch.architectures)}",
                f"{BUILD} for this card, or --set compute.device=cpu",
            )
    return ok(f"PyTorch has kernels for {', '.join(card.name for card in torch.devices)}")


def serves(built: str, capability: tuple[int, int]) -> bool:
    """`sm_86` runs on 8.6 and 8.9; `compute_90` is compiled at run time for 9.0 and all later ones."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", built)
    if not found:
        return False
    version = int(found[2]), int(found[3])
    if found[4]:
        return version == capability
    return version <= capability and (found[1] == "compute" or version[0] == capability[0])


def sharing(machine: Machine) -> Finding:
    """Two processes may be on it."""
    modes = {card.name: card.mode for card in known(machine.cards).cards if card.mode not in ("Default", "[N/A]")}
    if not modes:
        return ok("processes may share it, or there is none")
    found = f"compute mode {', '.join(f'{mode} on {name}' for name, mode in modes.items())}: one process at most"
    remedy = "sudo nvidia-smi -c DEFAULT"
    return error(found, remedy) if on_card(machine) else note(found, remedy)


def memory(machine: Machine) -> Finding:
    """Free memory against what both processes need, and who has the rest."""
    card = used(known(machine.cards))
    if card is None:
        return ok("no card")
    found = f"{size(card.free)} of {size(card.total)} are free on {card.name}{held_by(card)}"
    if not on_card(machine):
        return ok(f"{found}; not used by this configuration")
    shape = known(machine.model).shape
    if isinstance(shape, Missing):
        return note(f"{found}; what a run needs can be told once the model is here")
    need = card_need(machine.config.model, work_of(machine.config), shape)
    found = f"{found}; a run needs about {size(need.total)}"
    remedy = (
        "end the processes named, or use a smaller batch.token_budget, batch.checkpointing=true, or a smaller model"
    )
    if card.free < need.weights:
        return error(found, remedy)
    return warning(found, remedy) if card.free < need.total else ok(found)


def used(cards: Cards) -> Card | None:
    """The one that a run would take: the first, or the first that CUDA_VISIBLE_DEVICES names."""
    first = cards.variables.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    named = [card for index, card in enumerate(cards.cards) if first == str(index) or card.uuid.startswith(first)]
    return (named or [*cards.cards, None])[0]


def held_by(card: Card) -> str:
    """`, held by ...`"""
    return f", held by {', '.join(words(holder) for holder in card.holders)}" if card.holders else ""


def words(holder: Holder) -> str:
    """`python (process 12, 3.1 GiB)`"""
    amount = "an unknown amount" if holder.held is None else size(holder.held)
    return f"{holder.name} (process {holder.pid}, {amount})"


def allocator(machine: Machine) -> Finding:
    """Nothing in PyTorch's settings that keeps a card from being shared or given back."""
    variables = known(machine.cards).variables
    texts = {name: variables[name] for name in ALLOCATOR if name in variables}
    shown = ", ".join(f"{name}={text}" for name, text in texts.items())
    if len(set(texts.values())) > 1:
        return warning(f"two settings that differ: {shown}", f"unset {ALLOCATOR[1]}")
    plain = shown.replace(" ", "").lower()
    if "expandable_segments:true" in plain:
        return warning(
            f"{shown}: such memory can neither be shared between processes (CUDA IPC) nor slept (vLLM)",
            f"unset {' '.join(texts)}",
        )
    if "backend:cudamallocasync" in plain:
        return warning(
            f"{shown}: that allocator has no pools to share and gives memory back on its own terms",
            f"unset {' '.join(texts)}",
        )
    if variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0":
        return warning(
            "PYTORCH_NO_CUDA_MEMORY_CACHING makes every tensor a call to the driver",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        return warning("CUDA_LAUNCH_BLOCKING makes every kernel wait for the one before", "unset CUDA_LAUNCH_BLOCKING")
    return ok(f"PyTorch's own settings{f', with {shown}' if shown else ''}")
