"""The error of a process that does not fit on its card while it loads: what was planned for it, what was free when it
began, and the cheapest change that leaves more room.

In a step or an order that runs out of memory, something smaller can be tried (learner/update/budget.py,
actor/engines/hf_engine.py). Base, adapter and optimizer have one size, so loading ends the process with a sentence.
A card without room for even the context of a process says so through another exception of PyTorch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ComputeConfig
from shared.errors import ModelError, in_words
from shared.process.card import MIB, Driver

OUT_OF_MEMORY = 2
"""CUDA's number of this error."""


@contextmanager
def fitting(who: str, planned: int, remedy: str, driver: Driver | None = None) -> Iterator[None]:
    """ModelError if memory runs out inside the block. who: `learner`, `actor`. planned: bytes that its tensors and
    caches take at its peak; 0 if unknown. driver: of the card; None while there is no context to ask it."""
    free = ""
    try:
        if driver:
            free = f"{driver.free_bytes() // MIB} MiB of {driver.total_bytes() // MIB} MiB were free when it began"
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        needs = f"{planned // MIB} MiB were planned for it at its peak" if planned else "nothing was planned for it"
        raise ModelError(
            f"The {who} does not fit into the free memory of the card while it loads ({in_words(error)}):"
            f" {', '.join(filter(None, (needs, free)))}; end other programs on the card, or {remedy}."
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of PyTorch's allocator, or of CUDA itself."""
    return isinstance(error, torch.OutOfMemoryError) or getattr(error, "error_code", 0) == OUT_OF_MEMORY


def lighter(compute: ComputeConfig, model: ModelConfig, lora: LoraConfig) -> str:
    """The cheapest change with which a process holds less, in the order of the planner (launch/card/plan.py)."""
    if compute.residency in ("auto", "release") and compute.learner_card == compute.actor_card:
        return "run with --set compute.residency=swap"
    if model.quantization == "none":
        return "run with --set model.quantization=nf4"
    if model.dequantize == "once":
        return "run with --set model.dequantize=each_call"
    if lora.rank > 1:
        return f"run with --set lora.rank={lora.rank // 2}, or take a smaller model"
    return "take a smaller model"
