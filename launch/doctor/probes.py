"""Programs that doctor starts to look at what could crash or hang it.

    python -m launch.doctor.probes torch DEVICE                   the driver, torch, bitsandbytes: a JSON line for each
    python -m launch.doctor.probes reward FILE.py:NAME COLUMNS    exit 0 if this function can be imported and called

A crash here ends this process only. An import error is not caught: doctor shows the last line of its traceback.
"""

import json
import sys
from typing import Any

import msgspec

from launch.doctor.libraries import Device, Driver, RoundTrip, TorchBuild
from shared.errors import RewardError
from shared.process.parent_death import die_with_parent
from shared.process.usable_cards import driver_library, newest_cuda

SHAPE = (128, 256)


def look_at_libraries(device: str) -> None:
    print_stage(Driver(cuda=newest_cuda(driver_library())))
    build = torch_build(device)
    print_stage(build)
    print_stage(round_trip("cuda" if build.devices and device != "cpu" else "cpu"))


def print_stage(stage: msgspec.Struct) -> None:
    # Flushed, because the next stage may crash.
    print(msgspec.json.encode(stage).decode(), flush=True)


def torch_build(device: str) -> TorchBuild:
    """PyTorch and the cards that it sees. No card is touched if `device` is 'cpu'."""
    import torch

    reason, devices = "", ()
    if torch.version.cuda and device != "cpu":
        try:
            devices = tuple(card(torch, index) for index in range(torch.cuda.device_count()))
            torch.cuda.init()
        except RuntimeError as error:
            reason, devices = str(error).partition("\n")[0], ()
    return TorchBuild(
        version=str(torch.__version__),
        cuda_build=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()) if torch.version.cuda else (),
        devices=devices,
        cuda_error=reason,
    )


def card(torch: Any, index: int) -> Device:
    return Device(name=torch.cuda.get_device_name(index), capability=torch.cuda.get_device_capability(index))


def round_trip(device: str) -> RoundTrip:
    """Quantises a random matrix to NF4 and dequantises it, by the formula and by the kernels of bitsandbytes."""
    from importlib.metadata import version

    import torch

    from shared.model.layers.nf4 import BLOCK, kernel_state, kernel_values, quantize

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(SHAPE, generator=generator).to(device)
    weight = quantize(matrix)
    values = weight.dequantize(torch.float32)
    kernel = kernel_values(weight.packed, kernel_state(weight), torch.float32).view(SHAPE)
    blocks = (values - matrix).view(-1, BLOCK).abs() / matrix.view(-1, BLOCK).abs().amax(1, keepdim=True)
    return RoundTrip(
        version=version("bitsandbytes"),
        device=device,
        round_trip=float(blocks.max()),
        kernel_gap=float((kernel - values).abs().max()),
    )


def try_reward(spec: str, names: str) -> None:
    """Exits with one sentence if the function cannot be imported, or needs an argument that nobody gives. Doctor names
    its key before that. names: JSON of all columns, empty if they are not known."""
    from actor.verifiers.reward_arguments import RewardLog, accepted, arguments
    from actor.verifiers.reward_function import find_reward_function

    columns = dict.fromkeys(json.loads(names))
    try:
        function = find_reward_function(spec, "it")
        # An object of a class is not made: that may load a model.
        if columns and not isinstance(function, type):
            accepted(function, columns | arguments((), "text", RewardLog()))
    except (RewardError, TypeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    die_with_parent()
    {"torch": look_at_libraries, "reward": try_reward}[sys.argv[1]](*sys.argv[2:])
