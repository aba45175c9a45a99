"""What may not be installed: names, shapes, types, numbers and headers that are not those of the model's adapter."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from shared.config.model import LoraConfig
from shared.errors import DamageError
from shared.model.adapter_file import LoraLayout, adapter_bytes, install_adapter, read_adapter, rounded_file
from shared.model.layers.lora import Adapter, DenseMatmul, FrozenLinear, LoraLinear

NAME = "base_model.model.a.lora_A.weight"


def adapter() -> Adapter:
    """Two layers of different shapes, all values 1."""
    layers = {
        name: LoraLinear(FrozenLinear(DenseMatmul(torch.zeros(shape)), None), shape, rank=2, scale=1.0)
        for name, shape in {"a": (5, 6), "b": (4, 3)}.items()
    }
    made = Adapter(layers)
    for parameter in made.parameters().values():
        parameter.data.fill_(1.0)
    return made


def good() -> dict[str, torch.Tensor]:
    """An adapter that fits, all values 2."""
    return {
        f"base_model.model.{name}.weight": torch.full_like(value, 2.0) for name, value in adapter().parameters().items()
    }


def with_header(change: Callable[[str], str]) -> bytes:
    """Good tensors under another header."""
    data = save(good())
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length].decode().rstrip()).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def doubled(header: str) -> str:
    """The first tensor's entry once more, with the place of another."""
    tree = json.loads(header)
    return header[:-1] + f', "{NAME}": {json.dumps(tree[NAME])}' + "}"


def entry(**changes: Any) -> Callable[[str], str]:
    """One entry changed."""

    def change(header: str) -> str:
        tree = json.loads(header)
        tree[NAME] |= changes
        return json.dumps(tree)

    return change


def renamed(header: str) -> str:
    """A name that is a path."""
    tree = json.loads(header)
    tree["../../evil"] = tree.pop(NAME)
    return json.dumps(tree)


def many(header: str) -> str:
    """A header that alone would take megabytes."""
    return json.dumps(
        json.loads(header) | {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(9999)}
    )


def tensors(**changes: torch.Tensor) -> bytes:
    """The adapter with another A."""
    return save(good() | {NAME: changes["value"]})


def not_finite(value: float) -> bytes:
    """One element of one tensor."""
    bad = torch.full((2, 6), 2.0)
    bad[1, 3] = value
    return tensors(value=bad)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven bytes": lambda: b"\0" * 7,
    "noise": lambda: np.random.default_rng(0).bytes(1000),
    "length beyond the end": lambda: (10**3).to_bytes(8, "little") + b"{}",
    "length beyond memory": lambda: (2**63).to_bytes(8, "little") + b"{}",
    "header is a list": lambda: with_header(lambda header: "[]"),
    "header is no JSON": lambda: with_header(lambda header: header[:-1]),
    "header is deep": lambda: with_header(lambda header: '{"a":' * 900 + "1" + "}" * 900),
    "header is large": lambda: with_header(many),
    "name twice": lambda: with_header(doubled),
    "name is a path": lambda: with_header(renamed),
    "one missing": lambda: save({name: value for name, value in good().items() if name != NAME}),
    "one more": lambda: save(good() | {"x": torch.zeros(1)}),
    "other shape": lambda: tensors(value=torch.zeros(6, 2)),
    "no elements": lambda: tensors(value=torch.zeros(0, 6)),
    "float64": lambda: tensors(value=torch.zeros(2, 6, dtype=torch.float64)),
    "float16": lambda: tensors(value=torch.zeros(2, 6, dtype=torch.float16)),
    "int32": lambda: tensors(value=torch.zeros(2, 6, dtype=torch.int32)),
    "NaN": lambda: not_finite(float("nan")),
    "infinity": lambda: not_finite(float("-inf")),
    "unknown type": lambda: with_header(entry(dtype="F128")),
    "overlap": lambda: with_header(entry(data_offsets=[8, 56])),
    "offsets beyond the end": lambda: with_header(entry(data_offsets=[0, 10**9])),
    "offsets backwards": lambda: with_header(entry(data_offsets=[48, 0])),
    "shape that overflows": lambda: with_header(entry(shape=[2**62, 2**62])),
    "a byte less": lambda: save(good())[:-1],
    "a byte more": lambda: save(good()) + b"\0",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_of_it_is_installed(what: str) -> None:
    target = adapter()
    with pytest.raises(DamageError):
        install_adapter(target, HOSTILE[what]())
    assert all(bool((value == 1.0).all()) for value in target.parameters().values())


def test_a_large_header_is_not_even_read() -> None:
    with pytest.raises(DamageError, match=r"header has \d+ bytes, too many for 4 tensors"):
        install_adapter(adapter(), with_header(many))


def test_what_fits_is_installed() -> None:
    target = adapter()
    install_adapter(target, save(good()))
    assert all(bool((value == 2.0).all()) for value in target.parameters().values())
    install_adapter(target, adapter_bytes(adapter()))
    assert all(bool((value == 1.0).all()) for value in target.parameters().values())


def test_an_adapter_is_rounded_as_its_file_is() -> None:
    """What a run sends its actors, and what `eval` makes of a checkpoint."""
    given = adapter()
    for parameter in given.parameters().values():
        parameter.data.fill_(1 / 3)
    assert adapter_bytes(given, torch.bfloat16) == rounded_file(adapter_bytes(given)) != adapter_bytes(given)


def test_an_adapter_that_changes_nothing_has_every_tensor_of_the_layout() -> None:
    layout = LoraLayout(layers={"layer.q_proj": (6, 4), "layer.k_proj": (2, 4)}, lora=LoraConfig(rank=8))
    found = read_adapter(layout.zeros(), layout.shapes)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == layout.shapes
    assert not any(bool(tensor.any()) for tensor in found.values())
