"""Versions, whether the libraries with machine code of their own work here, and whether the reward function loads."""

from packaging.specifiers import SpecifierSet

from launch.doctor.finding import Finding, Missing, error, known, note, ok, warning
from launch.doctor.machine import Machine

MAX_KERNEL_GAP = 1e-5
"""A card may fuse a product and a sum that the formula rounds twice."""
INSTALL = "run ./launch/run.sh, which makes .venv with the right versions, and use .venv/bin/python"
MAX_ROUND_TRIP = 0.2
"""Of a block's largest value: NF4's widest gap is 0.304, so half of it, and something for the quantised scales."""


def python(machine: Machine) -> Finding:
    """The interpreter's version."""
    software = known(machine.software)
    found = f"Python {software.python}, expected {software.python_window}"
    if software.python not in SpecifierSet(software.python_window, prereleases=True):
        return error(found, "install a newer Python and make .venv anew: PYTHON=/path/to/python ./launch/run.sh")
    return ok(found)


def libraries(machine: Machine) -> Finding:
    """Every dependency inside its window."""
    found = known(machine.software).libraries
    missing = [f"{library.name} ({library.window})" for library in found if library.installed is None]
    outside = [
        f"{library.name} {library.installed} (expected {library.window})"
        for library in found
        if library.installed is not None and library.installed not in SpecifierSet(library.window, prereleases=True)
    ]
    if missing:
        return error(f"not installed: {', '.join(missing)}", INSTALL)
    if outside:
        return warning(f"outside of what was tested: {', '.join(outside)}", INSTALL)
    return ok(f"all {len(found)} are inside their windows")


def torch(machine: Machine) -> Finding:
    """It loads."""
    if isinstance(machine.torch, Missing):
        return error(f"PyTorch does not load: {machine.torch.reason}", f"try `python -c 'import torch'`; {INSTALL}")
    cuda = machine.torch.cuda_build
    return ok(f"PyTorch {machine.torch.version} loads, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}")


def bitsandbytes(machine: Machine) -> Finding:
    """NF4 there and back, by its kernels and by the formula."""
    unused = machine.config.model.quantization == "none"
    if isinstance(machine.bitsandbytes, Missing):
        found = f"bitsandbytes does not work: {machine.bitsandbytes.reason}"
        if unused:
            return note(f"{found} (model.quantization is 'none', so it is not needed)")
        return error(found, f"{INSTALL}; or train without it: --set model.quantization=none")
    library = machine.bitsandbytes
    name = f"bitsandbytes {library.version} on {library.device}"
    # Written so that NaN fails.
    if not library.round_trip <= MAX_ROUND_TRIP:
        return error(f"{name} quantises wrongly: error {library.round_trip:.3g} of a block's scale", INSTALL)
    if not library.kernel_gap <= MAX_KERNEL_GAP:
        return error(f"{name} has kernels that differ from the format by {library.kernel_gap:.3g}", INSTALL)
    return ok(f"{name} quantises and dequantises NF4 as it should")


def function(machine: Machine) -> Finding:
    """The user's reward function can be imported."""
    reward = known(machine.reward)
    if not reward.function:
        return ok(f"built in: {machine.config.verifier.kind}")
    if reward.trouble:
        return error(
            f"verifier.function = '{reward.function}' cannot be used: {reward.trouble}",
            "mend the file; importing it must end by itself, within seconds and without input",
        )
    return ok(f"{reward.function} can be imported")
