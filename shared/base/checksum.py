"""Whether the frozen base in the memory of this process is still what was loaded.

    sum(T) = sum of T's words as integers, modulo 2^64, for every frozen tensor

A flipped bit changes one word by a power of two, and so always changes the sum. Sums are exact on any device and cost
one read of the memory, as much as one more token costs while a batch is decoded. The digest of the file says what was
loaded, not what is in memory hours later.
Left out on purpose: protection against anyone who changes the memory deliberately.
"""

from collections.abc import Callable, Iterator

import torch

from shared.errors import DamageError
from shared.model.layers.lora import PAIR, FrozenLinear
from shared.model.policy import Policy

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BaseChecksum:
    """The sums at the time this object is made, and whether they are the same later."""

    def __init__(self, measure: Callable[[], dict[str, int]]) -> None:
        self.measure = measure
        self.loaded = measure()

    def check(self) -> None:
        """DamageError with the name of the first tensor that has changed."""
        now = self.measure()
        for name, loaded in self.loaded.items():
            if now[name] != loaded:
                raise DamageError(
                    f"The frozen base changed in memory: '{name}' is not what was loaded, so a bit has flipped or"
                    " code has written there. Nothing was saved since. Use `resume`, which continues from the last"
                    " checkpoint and loads the base again; if it happens again, test the memory of this machine."
                )


def frozen_sums(policy: Policy) -> dict[str, int]:
    return {name: word_sum(tensor) for name, tensor in frozen_tensors(policy)}


def frozen_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything but the adapter: weights of the linears, embeddings, norms, biases, computed tables, head."""
    seen: set[int] = set()
    for name, tensor in all_tensors(policy):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def all_tensors(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """A tied head appears twice."""
    for name, parameter in policy.backbone.named_parameters():
        if not name.endswith(PAIR):
            yield name, parameter
    yield from policy.backbone.named_buffers()
    yield "lm_head", policy.head
    if policy.form.bias is not None:
        yield "lm_head.bias", policy.form.bias
    for name, module in policy.backbone.named_modules():
        if isinstance(module, FrozenLinear):
            yield from ((f"{name}.{part}", tensor) for part, tensor in module.tensors().items())


def word_sum(tensor: torch.Tensor) -> int:
    """In words of 64 bits; the words of its own size before the first and behind the last of these are added too."""
    values = tensor.detach().contiguous().flatten()
    size = values.element_size()
    in_word = 8 // size
    first = min(-values.storage_offset() % in_word, values.numel())
    last = values.numel() - (values.numel() - first) % in_word
    rest = torch.cat([values[:first], values[last:]]).view(WORDS[size])
    return int(values[first:last].view(torch.int64).sum()) + int(rest.sum(dtype=torch.int64))
