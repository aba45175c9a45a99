"""The base in memory: any bit of any frozen tensor that flips is found, and the adapter may change."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from actor.engines.hf_engine import HFEngine
from shared.base.checksum import WORDS, BaseChecksum, frozen_sums, frozen_tensors, word_sum
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from shared.model.head import LogitForm
from tests.support.fakes import VOCAB, shake, tiny_model, tiny_policy, tiny_prompter

pytestmark = pytest.mark.usefixtures("one_thread")


def flip(tensor: torch.Tensor, word: int, bit: int) -> None:
    """In place; the same call flips it back."""
    words = tensor.detach().flatten().view(WORDS[tensor.element_size()])
    mask = 1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit)
    words[word] ^= mask


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dequantize", ["once", "each_call"])
def test_a_flipped_bit_anywhere_is_found_and_named(
    tmp_path: Path, dequantize: Literal["once", "each_call"], tied: bool
) -> None:
    policy = tiny_policy(tiny_model(tmp_path, tied=tied), dequantize=dequantize)
    base = BaseChecksum(lambda: frozen_sums(policy))
    base.check()
    names = [name for name, _ in frozen_tensors(policy)]
    linears = 14
    parts = 1 if dequantize == "once" else 6
    norms, biases, tables = 5, 6, 2
    assert len(names) == linears * parts + norms + biases + tables + (1 if tied else 2), names
    for name, tensor in frozen_tensors(policy):
        for word, bit in ((0, 0), (-1, 8 * tensor.element_size() - 1)):
            flip(tensor, word, bit)
            with pytest.raises(DamageError, match=rf"changed in memory: '{name}'"):
                base.check()
            flip(tensor, word, bit)
    base.check()


def test_the_bias_of_a_head_is_frozen_too(checkpoint: Path) -> None:
    policy, bias = tiny_policy(checkpoint), torch.zeros(VOCAB)
    biased = replace(policy, form=LogitForm(bias=bias))
    base = BaseChecksum(lambda: frozen_sums(biased))
    flip(bias, 3, 0)
    with pytest.raises(DamageError, match=r"changed in memory: 'lm_head\.bias'"):
        base.check()


def test_the_adapter_is_not_frozen(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    base = BaseChecksum(lambda: frozen_sums(policy))
    shake(policy, 5)
    policy.adapter.fold()
    base.check()


def test_an_actor_installs_nothing_beside_a_base_that_changed(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    engine = HFEngine(policy, tiny_prompter())
    engine.install(0, adapter_bytes(policy.adapter))
    flip(policy.head, 3, 0)
    with pytest.raises(DamageError, match="changed in memory"):
        engine.install(1, adapter_bytes(policy.adapter))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_every_bit_of_a_word_counts_in_the_sum(dtype: torch.dtype, length: int, first: int) -> None:
    """Tensors that divide into words of 64 bits, and tensors whose length or place in a larger one does not."""
    tensor = torch.arange(9).to(dtype)[first : first + length]
    before = word_sum(tensor)
    for bit in range(8 * tensor.element_size()):
        flip(tensor, 3, bit)
        assert word_sum(tensor) != before
        flip(tensor, 3, bit)
    assert word_sum(tensor) == before


def test_a_sum_is_that_of_all_words_also_of_those_beside_the_wide_ones() -> None:
    """Sums wrap at 64 bits as the machine's do."""
    words = torch.arange(1005, dtype=torch.int64) * (2**62 - 1)
    assert word_sum(words) == int(words.sum())
    floats = torch.randn(1005, generator=torch.Generator().manual_seed(1))
    narrow = floats.view(torch.int32)
    assert word_sum(floats[:-1]) == int(narrow[:-1].view(torch.int64).sum())
    assert word_sum(floats) == int(narrow[:-1].view(torch.int64).sum()) + int(narrow[-1])
    assert word_sum(floats[1:]) == int(narrow[2:-1].view(torch.int64).sum()) + int(narrow[1]) + int(narrow[-1])
    assert word_sum(floats[1:2]) == int(narrow[1]) and word_sum(floats[:0]) == 0
