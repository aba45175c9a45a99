"""Whether a run would compute on a card here."""

from launch.doctor.known import Missing
from launch.doctor.machine import Machine


def on_card(machine: Machine) -> bool:
    """As `compute.device` says; `auto` takes a card that PyTorch can use."""
    device = machine.config.compute.device
    if device == "auto":
        return not isinstance(machine.torch, Missing) and bool(machine.torch.devices)
    return device == "cuda"
