"""The dense base is the NF4 base in another spelling: same values, same layout, its own digest."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.base.cache import CachedBase, cached_base, dense_base
from shared.base.checksum import frozen_tensors
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes, layout_digest, read_layout
from shared.model.layers.nf4 import WEIGHTS
from shared.tensor_file import map_file
from tests.support.fakes import CPU, RANK, dense_twin, tiny_policy

TARGETS = ("q_proj", "down_proj")


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> CachedBase:
    return cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path)))


def test_its_values_are_those_the_learner_computes_with(checkpoint: Path, base: CachedBase) -> None:
    dense = load_file(dense_base(base, torch.float32).folder / WEIGHTS)
    twin = dict(dense_twin(checkpoint).named_parameters())
    assert dense.keys() == load_file(checkpoint / "model.safetensors").keys()
    for name, value in dense.items():
        assert torch.equal(value, twin[name]), name
    assert "quantization_config" not in (dense_base(base, torch.float32).folder / "config.json").read_text()


def test_every_type_has_a_file_of_its_own(checkpoint: Path, base: CachedBase) -> None:
    exact = load_file(dense_base(base, torch.float32).folder / WEIGHTS)
    rounded = load_file(dense_base(base, torch.bfloat16).folder / WEIGHTS)
    assert rounded.keys() == exact.keys()
    for name, value in rounded.items():
        assert torch.equal(value, exact[name].bfloat16()), name


def test_whole_numbers_keep_their_type(tmp_path: Path) -> None:
    """The odd one is of a name that comes first: each tensor must begin where its type allows it."""
    stored = {
        "a": torch.rand(3),
        "flags": torch.ones(3, dtype=torch.int8),
        "table": torch.arange(5),
        "w": torch.rand(3, 5),
    }
    save_file(stored, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    found = load_file(dense_base(CachedBase(folder=tmp_path, digest="a" * 64), torch.bfloat16).folder / WEIGHTS)
    assert torch.equal(found["table"], stored["table"]) and torch.equal(found["w"], stored["w"].bfloat16())
    mapped = map_file(dense_base(CachedBase(folder=tmp_path, digest="a" * 64), torch.bfloat16).folder / WEIGHTS).tensors
    assert mapped.keys() == stored.keys() and all(torch.equal(mapped[name], found[name]) for name in found), "aligned"


def test_a_base_without_codes_that_has_the_type_is_not_copied(checkpoint: Path, tmp_path: Path) -> None:
    model = ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path), quantization="none")
    base = cached_base(model)
    assert dense_base(base, torch.float32) == base
    assert dense_base(base, torch.bfloat16).folder != base.folder


def test_the_weights_of_a_policy_are_views_of_the_file(checkpoint: Path, base: CachedBase) -> None:
    """A process that maps the file has no copy of its own."""
    model = ModelConfig(path=str(checkpoint), cache_dir=str(base.folder.parent))
    policy = load_policy(base, model, LoraConfig(), CPU, torch.float32)
    mapped = ranges_of(dense_base(base, torch.float32).folder / WEIGHTS)
    for name, tensor in frozen_tensors(policy):
        if "rotary" not in name:
            assert any(start <= tensor.data_ptr() < end for start, end in mapped), name


def test_a_mapped_file_has_the_tensors_that_were_written(tmp_path: Path, base: CachedBase) -> None:
    written = {"table": torch.arange(5), "mask": torch.tensor([True, False]), "w": torch.rand(3, 5).bfloat16()}
    save_file(written, tmp_path / WEIGHTS, metadata={"format": "pt"})
    for file in (tmp_path / WEIGHTS, dense_base(base, torch.bfloat16).folder / WEIGHTS):
        found, expected = map_file(file).tensors, load_file(file)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def ranges_of(file: Path) -> list[tuple[int, int]]:
    """Where this file is mapped in this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [(int(start, 16), int(end, 16)) for start, end in (line[0].split("-") for line in lines)]


def test_it_is_made_once_and_belongs_to_these_codes_alone(base: CachedBase) -> None:
    first = dense_base(base, torch.float32)
    made = (first.folder / WEIGHTS).stat().st_mtime_ns
    assert dense_base(base, torch.float32) == first and (first.folder / WEIGHTS).stat().st_mtime_ns == made
    assert base.digest[:16] in first.folder.name and first.digest != base.digest
    other = CachedBase(folder=base.folder, digest="f" * 64)
    assert dense_base(other, torch.float32).folder != first.folder


def test_a_bit_that_flipped_on_the_disk_is_noticed(base: CachedBase) -> None:
    file = dense_base(base, torch.float32).folder / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamageError, match=r"model.safetensors is not what was written there"):
        dense_base(base, torch.float32)


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
