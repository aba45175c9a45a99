"""Files of tensors that are written at once: what safetensors and the mapping read of them."""

from pathlib import Path

import torch
from safetensors.torch import load

from shared.tensor_file import ALIGNMENT, map_file, tensor_bytes

TENSORS = {
    "b.small": torch.arange(5, dtype=torch.uint8),
    "c.wide": torch.randn(3, 7),
    "a.wide": torch.tensor(2.5),
    "e.double": torch.tensor([0.1, 0.2], dtype=torch.float64),
    "d.half": torch.randn(4, 3, dtype=torch.bfloat16).t(),
}


def test_safetensors_reads_what_was_written() -> None:
    found = load(tensor_bytes(TENSORS))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_equal_tensors_give_equal_bytes_in_any_order() -> None:
    assert tensor_bytes(dict(reversed(TENSORS.items()))) == tensor_bytes(TENSORS)


def test_a_mapped_file_has_the_same_tensors_each_at_a_multiple_of_its_type(tmp_path: Path) -> None:
    """Wide types come first, or five bytes would come before a number of four."""
    (tmp_path / "file").write_bytes(tensor_bytes(TENSORS))
    file = map_file(tmp_path / "file")
    places = {name: tensor.data_ptr() for name, tensor in file.tensors.items()}
    assert [*sorted(places, key=places.__getitem__)] == ["e.double", "a.wide", "c.wide", "d.half", "b.small"]
    assert places["e.double"] % ALIGNMENT == 0
    for name, tensor in TENSORS.items():
        assert torch.equal(file.tensors[name], tensor) and places[name] % tensor.dtype.itemsize == 0, name
