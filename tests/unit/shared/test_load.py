"""A policy is compared with its model's own class when its base is first loaded, and not again for each process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared.base.cache import CachedBase, cached_base
from shared.base.load import check_once, check_paths
from shared.config.model import ModelConfig
from shared.errors import ModelError
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from tests.support.architectures import architecture_model
from tests.support.fakes import tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")


class CountedConfig(LlamaConfig):
    """A Llama by another name."""

    model_type = "counted"


class Counted(LlamaForCausalLM):
    """It counts how often its own forward runs, which only a check calls."""

    config_class = CountedConfig  # pyright: ignore[reportAssignmentType]
    calls = 0

    def forward(self, *args: Any, **options: Any) -> Any:
        type(self).calls += 1
        return super().forward(*args, **options)


class WrongConfig(LlamaConfig):
    """A Llama by another name."""

    model_type = "wrong"


class Wrong(LlamaForCausalLM):
    """What it does to its logits is in no configuration."""

    config_class = WrongConfig  # pyright: ignore[reportAssignmentType]

    def forward(self, *args: Any, **options: Any) -> Any:
        output = super().forward(*args, **options)
        assert output.logits is not None
        output.logits *= 1.02
        return output


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    for config, model in ((CountedConfig, Counted), (WrongConfig, Wrong)):
        AutoConfig.register(config.model_type, config)
        AutoModelForCausalLM.register(config, model)
    yield


def model_of(folder: Path, model_type: str) -> Path:
    """A tiny Llama under this model type."""
    source = architecture_model(folder, "Llama")
    file = source / "config.json"
    file.write_text(file.read_text().replace('"llama"', f'"{model_type}"'))
    return source


def base_of(source: Path) -> CachedBase:
    return cached_base(ModelConfig(path=str(source), cache_dir=str(source.parent / "cache")))


def marks(source: Path) -> list[Path]:
    return sorted((source.parent / "cache").glob("*.passed-*.json"))


def test_a_base_that_passed_is_not_checked_again(tmp_path: Path) -> None:
    source = model_of(tmp_path, "counted")
    before = Counted.calls
    tiny_policy(source)
    first = Counted.calls - before
    tiny_policy(source)
    assert (first, Counted.calls - before) == (1, 1)
    # The base itself is as it was written: a mark inside it would count as damage.
    assert base_of(source).folder.is_dir() and len(marks(source)) == 1


def test_another_kind_of_product_is_checked_by_itself(tmp_path: Path) -> None:
    source = model_of(tmp_path, "counted")
    tiny_policy(source, dequantize="once")
    before = Counted.calls
    tiny_policy(source, dequantize="each_call")
    tiny_policy(source, quantization="none")
    assert Counted.calls - before == 2


def test_a_class_that_computes_something_else_is_refused_at_every_load(tmp_path: Path) -> None:
    source = model_of(tmp_path, "wrong")
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^Model type 'wrong' is not supported: over whole sequences"):
            tiny_policy(source)
    assert not marks(source)


@pytest.fixture
def loaded(checkpoint: Path) -> tuple[Policy, CachedBase]:
    return tiny_policy(checkpoint), base_of(checkpoint)


def test_each_path_and_each_edition_of_the_code_is_checked(loaded: tuple[Policy, CachedBase], tmp_path: Path) -> None:
    policy, base = loaded
    done: list[str] = []
    (tmp_path / "engine.py").write_text("one = 1\n")
    for name in ("first", "first", "second"):
        check_once(policy, base, f"{tmp_path}/{name}", lambda name=name: done.append(name), [tmp_path])
    assert done == ["first", "second"]
    (tmp_path / "engine.py").write_text("one = 2\n")
    check_once(policy, base, f"{tmp_path}/first", lambda: done.append("edited"), [tmp_path])
    assert done == ["first", "second", "edited"]


def test_layers_that_leave_out_an_adapter_are_refused(checkpoint: Path) -> None:
    """A fresh adapter has B = 0, so the check draws one."""
    policy = tiny_policy(checkpoint, shaken=False)
    before = adapter_bytes(policy.adapter)
    check_paths(policy)
    assert adapter_bytes(policy.adapter) == before, "the adapter is as it was"
    assert policy.layers is not None
    down = policy.layers.layers[0].down
    down.linears = tuple(linear.base for linear in down.linears)
    with pytest.raises(ModelError, match="over shared prompts log-probs differ"):
        check_paths(policy)
