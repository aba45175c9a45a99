"""How fast this machine computes in one number type: measured in a few seconds and kept in the cache folder.

    product     seconds per weight of `x W^T` for 1 to 512 rows; with one row it is the time to read a weight
    packed      the same with packed weights where they help (actor/engines/token_step/packed.py); and packing itself
    coded       the same with codes where they are read, up to 32 rows (actor/engines/token_step/coded.py)
    eight bit   the same with weights in 8 bits where they are read (actor/engines/token_step/eight_bit.py)
    compiled    products, head, layers and sampler of the token step in C (actor/engines/token_step/compiled), and head
                and layers of an update with C code (shared/model/compiled)
    gradient    seconds per weight of `dy W` for 512 rows
    head        the same of logits with log-probs, forward and backward, as the learner computes them
    sampler     seconds per row and token of the vocabulary
    layer       seconds of a layer besides its products, in a token step and in an update: for its calls, and for each
                value that a product gives
    operation   seconds of an operation on a tensor so small that only the call counts
    byte        seconds per byte that an operation on a large tensor reads or writes
    fresh       seconds per byte of memory that the process gets from the system: what an update needs was given back
                after the last one

Weights of 64 MB are used in turn, so that they come from memory and not from a processor's cache, as in a real model.
Products, head and sampler are measured by calling the functions of a run. The measurement has a process of its own,
with the threads and variables that the processes of a run get, because torch reads them once, and because the launcher
never loads torch.

The cache's file belongs to one processor, one set of versions, one number type and one number of threads: its name is
a digest of them. If the file is older than MAX_AGE_DAYS or damaged, the machine is measured again. A measurement made
beside busy processes holds while others compute, at most MAX_BUSY_AGE_S.
Left out on purpose: a card, whose times are not planned yet, and any wait for a quiet machine.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from launch.plan.work import Dtype
from shared.config.processes import CODED_ROWS
from shared.errors import UserError
from shared.process.determinism import Blas, cpu_environment
from shared.process.processor import C_CODE_COMPILERS, cores_here, find_compiler, is_busy
from shared.run.files import make_folder, write_whole
from shared.run.run_dir import cpu_name

FORMAT = 25
"""Changes with what is measured."""
MAX_AGE_DAYS, MAX_BUSY_AGE_S = 30.0, 3600.0
LIMIT_S = 60.0
"""Of the process that measures. Importing torch from a slow disk takes half of it."""
ROWS = (1, 8, 32, 128, 512)
SAMPLER_ROWS = 8


class OtherTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer takes besides its products with the base."""

    calls: float
    """Seconds however few values it has: Python, and the start of each operation."""
    per_value: float
    """Seconds for each value that these products give: norms, activations, attention, and the adapter at its default
    rank."""


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer, besides its products with the base."""

    token_step: OtherTimes
    """In a token step."""
    folded_token_step: OtherTimes
    """The same with sums of base and adapter."""
    update: OtherTimes
    """In an update of one micro-batch, forward and backward."""


class CompiledUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Of an update that takes C code between its products."""

    layer: OtherTimes
    """As `LayerTimes.update`."""
    head: float
    """As `Rates.head`."""


class CompiledTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the token step in C, and of an update."""

    product: tuple[float, ...]
    """Seconds per weight for each of ROWS."""
    coded: tuple[float, ...]
    """The same with weights that are read as codes; empty in fp32, and where the processor is slow at it."""
    head: tuple[float, ...]
    """Seconds per weight of a head in 8 bits, for each of ROWS; empty where `coded` is."""
    token_step: OtherTimes
    """What a layer takes besides."""
    folded_token_step: OtherTimes
    """The same with sums of base and adapter."""
    sampler: float
    """Seconds per row and token of the vocabulary."""
    update: CompiledUpdate | None
    """None where PyTorch computes it."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times that depend on the number type."""

    product: tuple[float, ...]
    """Seconds per weight for each of ROWS."""
    gradient: float
    """Seconds per weight for the last of ROWS."""
    head: float
    """Seconds per weight of the head and row, forward and backward."""
    head_token_step: float
    """Seconds per weight of the head for the logits of SAMPLER_ROWS rows."""
    packed: tuple[float, ...]
    """As `product`, with packed weights."""
    packing: float
    """Seconds to pack a weight; 0 where nothing is packed."""
    coded: tuple[float, ...]
    """As `product` for the first of ROWS, with weights that are read as codes; empty where none are."""
    eight_bit: tuple[float, ...]
    """As `product`, with weights in 8 bits; empty where the processor has no VNNI."""
    compiled: CompiledTimes | None
    """Of C code; None where it cannot be compiled."""
    layer: LayerTimes
    """What a layer takes besides these products."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine was measured to do with a number of threads."""

    rates: Rates
    """Of what depends on the number type."""
    sampler: float
    """Seconds per row and token of the vocabulary."""
    operation: float
    """Seconds."""
    byte: float
    """Seconds for each byte that an operation on a large tensor reads or writes."""
    fresh: float
    """Seconds for each byte of memory that comes from the system."""
    busy: bool = False
    """Whether many other threads ran just before or after it."""

    def product_s(self, rows: float) -> float:
        """Seconds per weight for this many rows."""
        return between(self.rates.product, rows)

    def packed_s(self, rows: float) -> float:
        """The same with packed weights."""
        return between(self.rates.packed, rows)

    def coded_s(self, rows: float) -> float:
        """The same with codes, where they are read."""
        return between(self.rates.coded, rows) if self.rates.coded else self.product_s(rows)


def between(times: Sequence[float], rows: float) -> float:
    """Between two measurements a straight line, beyond the last one proportional. times: for the first of ROWS."""
    measured = ROWS[: len(times)]
    if rows >= measured[-1]:
        return times[-1] * rows / measured[-1]
    for (low, high), (first, second) in zip(pairwise(measured), pairwise(times), strict=True):
        if rows <= high:
            return first + (second - first) * max(rows - low, 0) / (high - low)
    raise AssertionError("the last number of rows was compared above")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file in the cache."""

    facts: Mapping[str, Any]
    """What the measurement depends on; the file's name is their digest."""
    seconds_since_1970: float
    """When it was made."""
    speed: Speed
    """The result."""

    def still_holds(self, now: float, is_busy: Callable[[], bool]) -> bool:
        """now: in seconds since 1970. is_busy: whether other processes compute now."""
        age_s = now - self.seconds_since_1970
        if self.speed.busy:
            return 0 <= age_s < MAX_BUSY_AGE_S and is_busy()
        return 0 <= age_s < MAX_AGE_DAYS * 86_400


class NotMeasured(Exception):
    """The reason as one sentence."""


def machine_speed(
    cache: Path,
    threads: int,
    blas: Blas,
    dtype: Dtype,
    *,
    measure: Callable[[int, Blas, Dtype], Speed],
    is_busy: Callable[[], bool] = is_busy,
) -> Speed:
    """From the cache folder, or measured now. NotMeasured if it cannot be. is_busy: whether other processes compute."""
    facts = facts_of(threads, blas, dtype)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    file = cache / f"speed-{digest}.json"
    found = read(file)
    if found and found.facts == facts and found.still_holds(time.time(), is_busy):
        return found.speed
    was_busy = is_busy()
    speed = measure(threads, blas, dtype)
    speed = structs.replace(speed, busy=was_busy or is_busy())
    keep(file, Measured(facts=facts, seconds_since_1970=time.time(), speed=speed))
    return speed


def keep(file: Path, measured: Measured) -> None:
    try:
        make_folder(file.parent)
        write_whole(file, msgspec.json.format(msgspec.json.encode(measured), indent=2), durable=False)
    except (OSError, UserError):
        # A cache that cannot be written costs one more measurement; a run will say what is wrong with the folder.
        pass


def facts_of(threads: int, blas: Blas, dtype: Dtype) -> dict[str, Any]:
    """Everything that the measured times depend on."""
    return {
        "format": FORMAT,
        "cpu": cpu_name(),
        "cores": cores_here(),
        "versions": [version(name) for name in ("torch", "transformers", "bitsandbytes")],
        "threads": threads,
        "blas": blas,
        "dtype": dtype,
        "compiles": find_compiler(os.environ, C_CODE_COMPILERS) is not None,
    }


def read(file: Path) -> Measured | None:
    """None if there is no whole one."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured)
    except (OSError, ValueError, RecursionError):
        return None
    return found if is_sound(found.speed) else None


def is_sound(speed: Speed) -> bool:
    """Whether every figure is a time."""
    one, few = speed.rates, sum(rows <= CODED_ROWS for rows in ROWS)
    times = [*one.product, *one.packed, *one.coded, *one.eight_bit, one.gradient, one.head, one.head_token_step]
    times += [speed.sampler, speed.operation, speed.byte, speed.fresh]
    layer, compiled = one.layer, one.compiled
    parts = [layer.token_step, layer.folded_token_step, layer.update]
    if compiled:
        times += [*compiled.product, *compiled.coded, *compiled.head, compiled.sampler]
        parts += [compiled.token_step, compiled.folded_token_step]
        times += [compiled.update.head] if compiled.update else []
        parts += [compiled.update.layer] if compiled.update else []
    times += [time for part in parts for time in (part.calls, part.per_value)]
    in_c = [compiled.product, compiled.coded or ROWS, compiled.head or ROWS] if compiled else []
    is_whole = all(len(times) == len(ROWS) for times in (one.product, one.packed, *in_c))
    is_whole = is_whole and len(one.coded) in (0, few) and len(one.eight_bit) in (0, len(ROWS))
    return is_whole and all(math.isfinite(t) and t > 0 for t in times)


def measure_elsewhere(threads: int, blas: Blas, dtype: Dtype) -> Speed:
    """In a process with the environment of a run's processes."""
    try:
        done = subprocess.run(
            (sys.executable, "-m", "launch.plan.measuring", str(threads), dtype),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            env=os.environ | cpu_environment(threads, blas),
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"the measurement took more than {LIMIT_S:g} s") from error
    except OSError as error:
        raise NotMeasured(f"the measurement cannot be started: {error.strerror}") from error
    try:
        speed = msgspec.json.decode(done.stdout, type=Speed)
    except ValueError as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotMeasured(f"the measurement failed: {lines[-1]}") from error
    if not is_sound(speed):
        raise NotMeasured("the measurement gave a time of zero")
    return speed
