"""Programs that doctor starts to look at what could crash or hang it.

    python -m launch.doctor.probes torch DEVICE           the driver, then torch, then bitsandbytes, a JSON line each
    python -m launch.doctor.probes reward FILE.py:NAME    exit 0 if that is a function that can be imported

Whatever crashes here crashes this process alone. An import that fails is left to raise: the last line of its traceback
is what doctor shows.
"""

import ctypes
import sys
from typing import Any

import msgspec

from launch.doctor.facts.card import Device, Driver, RoundTrip, TorchBuild
from shared.errors import RewardError
from shared.process.parent_death import die_with_parent

SHAPE = (128, 256)


def look_at_libraries(device: str) -> None:
    """One stage after the other."""
    tell(Driver(cuda=driver_cuda()))
    build = torch_build(device)
    tell(build)
    tell(round_trip("cuda" if build.devices and device != "cpu" else "cpu"))


def tell(stage: msgspec.Struct) -> None:
    """At once: the next stage may be the last."""
    print(msgspec.json.encode(stage).decode(), flush=True)


def driver_cuda() -> tuple[int, int] | None:
    """What the driver's own library says; needs no card and no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def torch_build(device: str) -> TorchBuild:
    """PyTorch and the cards that it sees, unless only the CPU is asked for."""
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
    """One card."""
    return Device(name=torch.cuda.get_device_name(index), capability=torch.cuda.get_device_capability(index))


def round_trip(device: str) -> RoundTrip:
    """A random matrix to NF4 and back."""
    from importlib.metadata import version

    import torch

    from shared.model.nf4 import BLOCK, kernel_state, kernel_values, quantize

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


def try_reward(spec: str) -> None:
    """Leave in a sentence if there is no such function."""
    from actor.verifiers.reward_function import load_reward_function

    try:
        load_reward_function(spec)
    except RewardError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    die_with_parent()
    {"torch": look_at_libraries, "reward": try_reward}[sys.argv[1]](sys.argv[2])
