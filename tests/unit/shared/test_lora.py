"""The adapter: nothing at B = 0, the formula elsewhere, and files that PEFT reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save
from torch import nn

from shared.config.model import LoraConfig
from shared.errors import DamageError, ModelError
from shared.model.adapter_file import adapter_bytes, adapter_config, digest, install_adapter, layout_digest
from shared.model.layers.lora import Adapter, DenseMatmul, DequantizingMatmul, FrozenLinear, LoraLinear
from shared.model.layers.nf4 import quantize
from shared.model.policy import Policy
from tests import reference
from tests.support.fakes import dense_twin, hidden_of, shake, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")

RANK_8 = LoraConfig(rank=8, alpha=24.0, targets=("q_proj", "down_proj"))


def some_ids() -> torch.Tensor:
    return torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(policy: Policy) -> torch.Tensor:
    return hidden_of(policy, some_ids()) @ policy.head.t()


def test_one_layer_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=generator), torch.randn(5, generator=generator)
    layer = LoraLinear(FrozenLinear(DenseMatmul(weight), bias), (5, 7), rank=3, scale=12.0 / 3)
    a, b = torch.randn(3, 7, generator=generator), torch.randn(5, 3, generator=generator)
    layer.lora_A, layer.lora_B = nn.Parameter(a), nn.Parameter(b)
    x = torch.randn(4, 7, generator=generator)
    expected = reference.lora(x.double(), weight.double(), bias.double(), a.double(), b.double(), alpha=12.0)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x.view(2, 2, 7)).view(4, 5), layer(x))


@pytest.mark.parametrize("dense", [True, False])
def test_a_gradient_is_added_to_what_other_linears_gave(dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    quantised = quantize(torch.randn(6, 64, generator=generator))
    matmul = DenseMatmul(quantised.dequantize(torch.float32)) if dense else DequantizingMatmul(quantised)
    grad, total = torch.randn(5, 6, generator=generator), torch.randn(5, 64, generator=generator)
    expected = total + matmul.input_gradient(grad)
    assert matmul.input_gradient(grad, total) is total
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("below_is_trained", [True, False])
def test_one_layers_gradients_are_those_of_the_formula(dense: bool, below_is_trained: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    quantised = quantize(torch.randn(6, 64, generator=generator))
    weight = quantised.dequantize(torch.float32)
    matmul = DenseMatmul(weight) if dense else DequantizingMatmul(quantised)
    layer = LoraLinear(FrozenLinear(matmul, torch.ones(6)), (6, 64), rank=3, scale=4.0)
    layer.lora_A.data.normal_(generator=generator)
    layer.lora_B.data.normal_(generator=generator)
    layer.requires_grad_(True)
    x = torch.randn(5, 64, generator=generator, requires_grad=below_is_trained)
    arriving = torch.randn(5, 6, generator=generator)
    layer(x).backward(arriving)
    names = {"x": x, "A": layer.lora_A, "B": layer.lora_B}
    exact = {name: value.detach().double().requires_grad_() for name, value in names.items()}
    y = reference.lora(exact["x"], weight.double(), torch.ones(6).double(), exact["A"], exact["B"], alpha=12.0)
    y.backward(arriving.double())
    for name in ("x", "A", "B") if below_is_trained else ("A", "B"):
        got, expected = names[name].grad, exact[name].grad
        assert got is not None and expected is not None and got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_folded_layer_agrees_with_the_unfolded_one_until_it_is_switched_off() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=generator), torch.randn(5, generator=generator)
    layer = LoraLinear(FrozenLinear(DenseMatmul(weight), bias), (5, 7), rank=3, scale=4.0)
    layer.lora_A.data.normal_(generator=generator)
    x = torch.randn(2, 4, 7, generator=generator)
    with torch.no_grad():
        base = layer(x)
        layer.fold()
        assert torch.equal(layer(x), base), "B = 0 adds nothing"
        layer.lora_B.data.normal_(generator=generator)
        assert torch.equal(layer(x), base), "folded is a copy of one version"
        layer.fold()
        folded, layer.folded = layer(x), None
        torch.testing.assert_close(folded, layer(x))
        assert not torch.allclose(folded, base)
        layer.fold()
        layer.enabled = False
        assert torch.equal(layer(x), base)


def test_a_sum_is_not_used_where_a_gradient_is_wanted() -> None:
    layer = LoraLinear(FrozenLinear(DenseMatmul(torch.ones(5, 7)), None), (5, 7), rank=3, scale=4.0)
    layer.fold()
    layer.lora_B.requires_grad_()
    layer(torch.ones(2, 7)).sum().backward()
    assert layer.lora_B.grad is not None


def test_only_full_precision_folds(checkpoint: Path) -> None:
    half = LoraLinear(
        FrozenLinear(DenseMatmul(torch.ones(5, 7, dtype=torch.bfloat16)), None), (5, 7), rank=3, scale=4.0
    )
    half.fold()
    assert half.folded is None
    Adapter({"half": half}).cast_to(torch.bfloat16)
    half.fold()
    assert half.lora_A.dtype == torch.bfloat16 and half.folded is None
    policy = tiny_policy(checkpoint, dequantize="each_call")
    policy.adapter.fold()
    assert all(layer.folded is None for layer in policy.adapter.layers.values())


def test_a_new_adapter_is_the_base_bit_for_bit(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint, shaken=False)
    assert all(value.any() for name, value in policy.adapter.parameters().items() if name.endswith("lora_A"))
    with policy.adapter.switched_off():
        base = logits(policy)
    assert torch.equal(logits(policy), base)


def test_switched_off_is_the_base_and_back_on_is_not(checkpoint: Path) -> None:
    fresh, shaken = tiny_policy(checkpoint, shaken=False), tiny_policy(checkpoint)
    moved = logits(shaken)
    with shaken.adapter.switched_off():
        assert torch.equal(logits(shaken), logits(fresh))
    assert torch.equal(logits(shaken), moved) and not torch.equal(moved, logits(fresh))


def test_an_error_inside_switches_the_adapter_on_again(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    moved = logits(policy)
    with pytest.raises(KeyError), policy.adapter.switched_off():
        raise KeyError
    assert torch.equal(logits(policy), moved)


def test_the_start_depends_on_the_seed_alone(checkpoint: Path) -> None:
    first, second = tiny_policy(checkpoint), tiny_policy(checkpoint)
    for policy in (first, second):
        policy.adapter.initialise(5)
    assert adapter_bytes(first.adapter) == adapter_bytes(second.adapter)
    second.adapter.initialise(6)
    assert digest(adapter_bytes(first.adapter)) != digest(adapter_bytes(second.adapter))
    for name, value in first.adapter.parameters().items():
        bound = value.shape[1] ** -0.5
        assert value.abs().max() == 0 if name.endswith("lora_B") else 0.8 * bound < value.abs().max() <= bound


# PEFT asks transformers for a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora", [LoraConfig(rank=4, alpha=8.0), RANK_8], ids=["all", "two"])
def test_peft_reads_our_files_with_equal_logits(checkpoint: Path, tmp_path: Path, lora: LoraConfig) -> None:
    policy = tiny_policy(checkpoint, lora=lora)
    (tmp_path / "adapter_model.safetensors").write_bytes(adapter_bytes(policy.adapter))
    (tmp_path / "adapter_config.json").write_bytes(adapter_config(lora, str(checkpoint)))
    base = dense_twin(checkpoint)
    model: Any = PeftModel.from_pretrained(base, str(tmp_path))
    loaded = {name: value for name, value in model.named_parameters() if "lora_" in name}
    assert len(loaded) == len(policy.adapter.parameters())
    with torch.no_grad():
        torch.testing.assert_close(logits(policy), model(input_ids=some_ids()).logits, rtol=1e-5, atol=1e-5)


def test_an_actor_keeps_the_values_that_it_computes_with(checkpoint: Path) -> None:
    learner, actor = (tiny_policy(checkpoint, shaken=shaken, dtype=torch.bfloat16) for shaken in (True, False))
    actor.adapter.cast_to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        install_adapter(actor.adapter, adapter_bytes(learner.adapter, dtype))
        assert {value.dtype for value in actor.adapter.parameters().values()} == {torch.bfloat16}
        assert torch.equal(logits(actor), logits(learner))
    assert layout_digest(actor.adapter) == layout_digest(learner.adapter)


def test_an_adapter_travels_as_bytes(checkpoint: Path) -> None:
    here, there = tiny_policy(checkpoint), tiny_policy(checkpoint)
    shake(here, 9)
    data = adapter_bytes(here.adapter)
    install_adapter(there.adapter, data)
    assert adapter_bytes(there.adapter) == data
    assert torch.equal(logits(here), logits(there))


def renamed(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[f"{name}x"] = tensors.pop(name)


def narrowed(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


def halved(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].half()


def poisoned(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][0, 0] = torch.nan


def removed(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


@pytest.mark.parametrize("damage", [renamed, narrowed, halved, poisoned, removed])
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_installed(checkpoint: Path, damage: Any) -> None:
    policy = tiny_policy(checkpoint)
    before = adapter_bytes(policy.adapter)
    tensors = {name: value + 1 for name, value in load(before).items()}
    name = max(tensors)
    damage(tensors, name)
    with pytest.raises(DamageError, match=name):
        install_adapter(policy.adapter, save(tensors))
    assert adapter_bytes(policy.adapter) == before


def test_the_layout_digest_tells_ranks_scales_and_targets_apart(checkpoint: Path) -> None:
    layouts = [
        LoraConfig(rank=4, alpha=8.0),
        LoraConfig(rank=8, alpha=16.0),
        LoraConfig(rank=4, alpha=16.0),
        LoraConfig(rank=4, alpha=8.0, targets=("q_proj",)),
    ]
    found = {layout_digest(tiny_policy(checkpoint, lora=lora).adapter) for lora in layouts}
    assert len(found) == 4
    same = tiny_policy(checkpoint, lora=layouts[0], quantization="none")
    assert layout_digest(same.adapter) in found


def test_a_target_that_the_model_has_not_is_refused_with_those_it_has(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"'c_attn'.*down_proj, gate_proj"):
        tiny_policy(checkpoint, lora=LoraConfig(rank=2, targets=("q_proj", "c_attn")))
