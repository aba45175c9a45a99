"""Both sides of a run on a card, in one process, and a card with less memory: for tests/gpu."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from actor.engines.hf_engine import HFEngine
from actor.wiring import build_engine
from launch.presets.load import load_config
from learner.wiring import load_trained_policy
from shared.config.tree import Config
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.fakes import shake


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Actor and learner of the embedded model, with the same adapter."""

    config: Config
    """The preset with a few other keys."""
    engine: HFEngine
    """The actor's."""
    policy: Policy
    """The learner's."""


def make_sides(device: torch.device, **keys: Any) -> Sides:
    """keys: `section__key=value`."""
    sets = {"compute.device": device.type} | {name.replace("__", "."): value for name, value in keys.items()}
    config = load_config("embedded", [f"{key}={value}" for key, value in sets.items()])
    engine: Any = build_engine(config)[0]
    policy = load_trained_policy(config, device.type)
    sides = Sides(config=config, engine=engine, policy=policy)
    install_drawn(sides, 1)
    return sides


def install_drawn(sides: Sides, version: int) -> None:
    """Random values in both; each version has others."""
    shake(sides.policy, version)
    sides.engine.install(version, adapter_bytes(sides.policy.adapter))


def release() -> None:
    """What no tensor uses goes back to the driver."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def limited_to(num_bytes: int) -> Iterator[None]:
    """Inside the block, PyTorch gets no more of the card than this."""
    release()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def num_ooms() -> int:
    """How often this process was out of memory."""
    return torch.cuda.memory_stats().get("num_ooms", 0)
