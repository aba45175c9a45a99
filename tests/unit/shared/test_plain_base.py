"""The plain checkpoint is the NF4 base in another spelling: same values, same layout, its own digest."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.config.model import LoraConfig, ModelConfig
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes, layout_digest, read_layout
from shared.model.base_cache import WEIGHTS, CachedBase, cached_base, plain_base
from tests.support.fakes import RANK, dense_twin, tiny_policy

TARGETS = ("q_proj", "down_proj")


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> CachedBase:
    return cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path)))


def test_its_values_are_those_the_learner_computes_with(checkpoint: Path, base: CachedBase) -> None:
    plain = load_file(plain_base(base).folder / WEIGHTS)
    twin = dict(dense_twin(checkpoint).named_parameters())
    assert plain.keys() == load_file(checkpoint / "model.safetensors").keys()
    for name, value in plain.items():
        assert torch.equal(value, twin[name]), name
    assert "quantization_config" not in (plain_base(base).folder / "config.json").read_text()


def test_the_checkpoints_own_type_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    from tests.support.fakes import tiny_checkpoint

    half = tiny_checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    plain = load_file(plain_base(cached_base(ModelConfig(path=str(half), cache_dir=str(tmp_path)))).folder / WEIGHTS)
    assert {value.dtype for value in plain.values()} == {torch.bfloat16}


def test_it_is_made_once_and_belongs_to_these_codes_alone(base: CachedBase) -> None:
    first = plain_base(base)
    made = (first.folder / WEIGHTS).stat().st_mtime_ns
    assert plain_base(base) == first and (first.folder / WEIGHTS).stat().st_mtime_ns == made
    assert base.digest[:16] in first.folder.name and first.digest != base.digest
    other = CachedBase(folder=base.folder, digest="f" * 64)
    assert plain_base(other).folder != first.folder


def test_a_bit_that_flipped_on_the_disk_is_noticed(base: CachedBase) -> None:
    file = plain_base(base).folder / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamageError, match=r"model.safetensors is not what was written there"):
        plain_base(base)


@pytest.mark.parametrize("quantization", ["nf4", "none"])
@pytest.mark.parametrize("targets", [LoraConfig().targets, TARGETS])
def test_the_layout_is_that_of_an_adapter_that_was_built(
    checkpoint: Path, tmp_path: Path, quantization: str, targets: tuple[str, ...]
) -> None:
    lora = LoraConfig(rank=RANK, alpha=3.0 * RANK, targets=targets)
    model = ModelConfig(
        path=str(checkpoint), cache_dir=str(tmp_path), quantization="nf4" if quantization == "nf4" else "none"
    )
    adapter = tiny_policy(checkpoint, quantization=model.quantization, lora=lora).adapter
    layout = read_layout(cached_base(model).folder, lora)
    assert layout.shapes == {name: tuple(value.shape) for name, value in adapter.parameters().items()}
    assert list(layout.shapes) == list(adapter.parameters())
    assert layout.digest == layout_digest(adapter) and layout.scale == 3.0


def test_an_adapter_beside_no_base_begins_with_the_same_bytes(checkpoint: Path, base: CachedBase) -> None:
    lora = LoraConfig(rank=RANK, alpha=2.0 * RANK)
    alone, built = read_layout(base.folder, lora).adapter(), tiny_policy(checkpoint, lora=lora).adapter
    alone.initialise(7)
    built.initialise(7)
    assert adapter_bytes(alone) == adapter_bytes(built) and layout_digest(alone) == layout_digest(built)
