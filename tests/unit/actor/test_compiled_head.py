"""Logits in C from a head in 8 bits: the formula, the largest ones, and the file of its codes."""

from pathlib import Path

import pytest
import torch
from msgspec import structs

from actor.engines.forms import eight_bit_head_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.head import CompiledHead, TiledHead, tiled_head
from actor.engines.token_step.eight_bit import CODES, in_eight_bits
from shared.config.model import ModelConfig
from shared.config.processes import ActorConfig
from shared.config.tree import Config
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes
from shared.model.layers.nf4 import WEIGHTS
from shared.tensor_file import map_file
from tests.support.architectures import architecture_model
from tests.support.fakes import tiny_prompter
from tests.unit.actor.test_coded import resident_kb
from tests.unit.actor.test_compiled_codes import IN_BF16, base_of, kinds
from tests.unit.actor.test_compiled_step import Kind, library_of, logprobs_of
from tests.unit.actor.test_compiled_step import pytestmark as needs_compiler
from tests.unit.actor.test_layers import ADAPTED, decoded, policy_of

pytestmark = needs_compiler
EXACT = 64
"""So many of the largest are exact."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def rounded_logits(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The formula of eight_bit.py, in float64 but for q, where rounding would turn a tie."""
    scales, sums, codes = (part.double() for part in in_eight_bits(weight))
    low, high = x.float().aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    q = ((x.float() - low) / step.clamp(min=1e-30)).round()
    return scales * step.double() * (q.double() @ codes.t()) + low.double() * sums


@kinds
@pytest.mark.parametrize("rows", [1, 9, 17, 40, 70])
@pytest.mark.parametrize(("size", "width"), [(40, 64), (1000, 80), (30_000, 64)])
def test_the_largest_logits_are_exact_and_the_others_follow_the_formula(
    tmp_path: Path, size: int, width: int, rows: int, kind: Kind
) -> None:
    weight, x = drawn(size, width), drawn(rows, width)
    found = CompiledHead(library_of(kind, tmp_path), TiledHead.of(weight), weight)(x).double()
    rounded, exact = rounded_logits(weight, x), x.double() @ weight.double().t()
    largest = rounded.topk(min(EXACT, size), dim=1).indices
    assert torch.allclose(found.gather(1, largest), exact.gather(1, largest), rtol=0, atol=1e-4)
    is_rounded, is_exact = (torch.isclose(found, known, rtol=1e-5, atol=1e-4) for known in (rounded, exact))
    assert (is_rounded | is_exact).all()
    # What is computed again matters, and in a large vocabulary it is little.
    assert (rounded.gather(1, largest) - exact.gather(1, largest)).abs().max() > 1e-3
    assert size < 30_000 or (~is_rounded).double().mean() < 0.05


@kinds
def test_a_row_depends_on_nothing_else(tmp_path: Path, kind: Kind) -> None:
    weight, x = drawn(5000, 128), drawn(40, 128)
    head = CompiledHead(library_of(kind, tmp_path), TiledHead.of(weight), weight)
    whole = head(x)
    for rows in (1, 16, 33):
        assert torch.equal(head(x[:rows]), whole[:rows])
    head.threads = 3
    assert torch.equal(head(x), whole)


@kinds
def test_a_row_without_a_range_and_one_that_is_no_number_spoil_no_other(tmp_path: Path, kind: Kind) -> None:
    weight, x = drawn(5000, 128), drawn(3, 128)
    head = CompiledHead(library_of(kind, tmp_path), TiledHead.of(weight), weight)
    known = head(x)
    for bad in (float("nan"), float("inf")):
        x[1, 5] = bad
        found = head(x)
        assert torch.equal(found[::2], known[::2])
        assert not found[1].isfinite().any()
    x[1] = 0.0
    assert not head(x)[1].any()


def test_codes_lie_side_by_side() -> None:
    weight = drawn(37, 70)
    head, (scales, sums, codes) = TiledHead.of(weight), in_eight_bits(weight)
    assert head.codes.shape == (3, 32, 16, 4)
    for row in (0, 15, 16, 36):
        for column in (0, 3, 4, 69):
            assert head.codes[row // 16, column // 4, row % 16, column % 4] == codes[row, column]
    assert not head.codes[2, :, 5:].any() and not head.codes[:, 18:].any(), "filled up with zeros"
    assert torch.equal(head.scales[:37], scales) and torch.equal(head.sums[:37], sums) and not head.scales[37:].any()


@pytest.mark.parametrize("size", [40, 97, 9000])
def test_a_head_is_known_by_its_ends(size: int) -> None:
    weight = drawn(size, 70)
    head = TiledHead.of(weight)
    assert head.matches(weight)
    assert not head.matches(weight[:-20]) and not head.matches(weight[:, :-8])
    for row in (0, size - 1):
        other = weight.clone()
        other[row] *= -1
        assert not head.matches(other)


def settled(base_folder: Path) -> Config:
    model = ModelConfig(path=str(architecture_model(base_folder, "Qwen2")), cache_dir=str(base_folder / "cache"))
    return Config(model=model, actor=ActorConfig(head="int8"))


def test_a_run_maps_its_file_and_gives_it_back_between_orders(tmp_path: Path) -> None:
    base, config, library = base_of(tmp_path), settled(tmp_path), library_of(IN_BF16[0], tmp_path)
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    head, file = eight_bit_head_for(config, base, policy, library), tiled_head(base).folder / WEIGHTS
    assert isinstance(head, TiledHead) and head.file is not None
    assert head.codes.data_ptr() == head.file.tensors[CODES].data_ptr() and head.codes.data_ptr() % 64 == 0
    engine = HFEngine(policy, tiny_prompter(*range(6)), eight_bit=head, compiled=library)
    plain = HFEngine(policy, tiny_prompter(*range(6)), compiled=library)
    found = logprobs_of(decoded(engine))
    assert found != logprobs_of(decoded(plain)) and engine.loop != plain.loop
    assert resident_kb(file) > 0
    engine.sleep()
    assert resident_kb(file) == 0
    assert logprobs_of(decoded(engine)) == found
    adapter = adapter_bytes(policy.adapter)
    engine.install(1, adapter)
    head.codes.view(-1)[5] ^= 1
    with pytest.raises(DamageError, match=r"head\.codes"):
        engine.install(2, adapter)
    dense = structs.replace(config, actor=structs.replace(config.actor, head="dense"))
    assert eight_bit_head_for(dense, base, policy, library) is None


def test_the_file_belongs_to_its_base_and_damage_is_found(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    made = tiled_head(base)
    assert made == tiled_head(base) and base.digest[:16] in made.folder.name
    policy = policy_of(tmp_path, "Qwen2", torch.bfloat16, ADAPTED[1])
    assert TiledHead.mapped(map_file(made.folder / WEIGHTS)).matches(policy.head)
    content = bytearray((made.folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (made.folder / WEIGHTS).write_bytes(content)
    with pytest.raises(DamageError, match="is damaged"):
        tiled_head(base)
