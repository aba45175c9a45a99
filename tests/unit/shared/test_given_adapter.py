"""Adapters that PEFT made: equal logits at the start, and one sentence for each way in which one does not fit."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from learner.durable.find_adapter import adapter_folder
from learner.wiring import load_trained_policy
from shared.base.cache import cached_base
from shared.config.load import config_to_json, resolve
from shared.config.tree import Config
from shared.errors import ModelError, RunDirError, UserError
from shared.model.adapter_file import adapter_bytes, adapter_config, layout_digest, read_adapter, read_layout
from shared.model.given_adapter import CONFIG, WEIGHTS, PeftLora, fitting_adapter
from shared.run.run_dir import RunDir
from tests.support.fakes import dense_twin, hidden_of, shake, tiny_policy

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT asks transformers for a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TARGETS = ["q_proj", "v_proj", "down_proj"]
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def made_by_peft(checkpoint: Path, folder: Path, **given: Any) -> Any:
    """An adapter with random values in A and B, saved by PEFT; PEFT's model, as it computes."""
    facts: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | given
    model: Any = get_peft_model(dense_twin(checkpoint), PeftConfig(**facts)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return model


def config_for(checkpoint: Path, **lora: Any) -> Config:
    model = {"path": str(checkpoint), "cache_dir": str(checkpoint.parent / "cache")}
    ours: dict[str, Any] = {"rank": 4, "alpha": 12.0, "targets": TARGETS} | lora
    return resolve({"model": model, "lora": ours, "compute": {"learner_threads": 1, "actor_threads": 1}})


def taken(folder: Path, config: Config) -> bytes:
    layout = read_layout(cached_base(config.model).folder, config.lora)
    return fitting_adapter(folder, layout, (config.model.path,))[WEIGHTS]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"use_rslora": True}, {"rslora": True}),
        ({"rank_pattern": {"q_proj": 2, "down_proj": 6}}, {"ranks": {"q_proj": 2, "down_proj": 6}}),
        ({"rank_pattern": {"q_proj": 2}, "use_rslora": True}, {"ranks": {"q_proj": 2}, "rslora": True}),
    ],
    ids=["plain", "rslora", "ranks", "both"],
)
def test_before_the_first_step_the_logits_are_those_of_peft(
    checkpoint: Path, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    model = made_by_peft(checkpoint, tmp_path / "theirs", **theirs)
    config = config_for(checkpoint, **ours)
    policy = load_trained_policy(config, "cpu", taken(tmp_path / "theirs", config))
    ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = hidden_of(policy, ids) @ policy.head.t()
        with model.disable_adapter():
            base = model(input_ids=ids).logits
        # Both add in an order of their own, and which, depends on the processor.
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=0, atol=1e-4)
    assert (found - base).abs().max() > 0.1


def test_what_we_write_is_read_by_peft_with_ranks_and_scale(checkpoint: Path, tmp_path: Path) -> None:
    lora = config_for(checkpoint, ranks={"v_proj": 7}, rslora=True).lora
    policy = tiny_policy(checkpoint, lora=lora)
    (tmp_path / WEIGHTS).write_bytes(adapter_bytes(policy.adapter))
    (tmp_path / CONFIG).write_bytes(adapter_config(lora, str(checkpoint)))
    model: Any = PeftModel.from_pretrained(dense_twin(checkpoint), str(tmp_path))
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        found = hidden_of(policy, ids) @ policy.head.t()
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert {value.shape[0] for name, value in policy.adapter.parameters().items() if "v_proj.lora_A" in name} == {7}


def test_ours_is_taken_back_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(checkpoint, ranks={"v_proj": 7})
    policy = tiny_policy(checkpoint, lora=config.lora)
    (tmp_path / WEIGHTS).write_bytes(adapter_bytes(policy.adapter))
    (tmp_path / CONFIG).write_bytes(adapter_config(config.lora, config.model.path))
    again = load_trained_policy(config, "cpu", taken(tmp_path, config))
    assert adapter_bytes(again.adapter) == adapter_bytes(policy.adapter)
    assert layout_digest(again.adapter) == read_layout(cached_base(config.model).folder, config.lora).digest


def test_half_precision_is_widened_without_loss(checkpoint: Path, tmp_path: Path) -> None:
    made_by_peft(checkpoint, tmp_path)
    halved = {name: value.bfloat16() for name, value in load_file(tmp_path / WEIGHTS).items()}
    save_file(halved, tmp_path / WEIGHTS)
    config = config_for(checkpoint)
    shapes = read_layout(cached_base(config.model).folder, config.lora).shapes
    for name, value in read_adapter(taken(tmp_path, config), shapes).items():
        assert torch.equal(value.bfloat16(), halved[f"base_model.model.{name}.weight"])


def test_patterns_are_read_as_peft_reads_them() -> None:
    facts = {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 4}}
    lora = PeftLora.read(facts | {"alpha_pattern": {"model.layers.0.self_attn.q_proj": 6}, "use_rslora": True})
    layers = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    assert [lora.rank_of(layer) for layer in layers] == [2, 2, 4]
    assert [lora.rank_of(f"{layer}_x") for layer in layers] == [8, 8, 8]
    assert [lora.scale_of(layer) for layer in layers] == [6 / math.sqrt(2), 16 / math.sqrt(2), 16 / 2]


def changed(folder: Path, change: Change) -> None:
    facts = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    change(facts, tensors)
    (folder / CONFIG).write_text(json.dumps(facts))
    save_file(tensors, folder / WEIGHTS)


def first(tensors: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in sorted(tensors) if part in name)


def without_a_layer(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1.self_attn.q_proj" in name]:
        del tensors[name]


def of_a_deeper_model(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1." in name]:
        tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()


def of_a_wider_model(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    name = first(tensors, "q_proj.lora_A")
    tensors[name] = torch.zeros(4, 65)


def poisoned(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors[first(tensors, "lora_B")][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts, _: facts.update(base_model_name_or_path="org/other"), ("org/other", "model.path")),
        (lambda facts, _: facts.update(peft_type="LOHA"), ("type LOHA", "merge it")),
        (lambda facts, _: facts.update(use_dora=True), ("use_dora", "merge it")),
        (lambda facts, _: facts.update(modules_to_save=["lm_head"]), ("modules_to_save", "lm_head")),
        (lambda facts, _: facts.update(bias="all"), ("bias = all",)),
        (lambda facts, _: facts.update(init_lora_weights="pissa"), ("pissa", "changed the base")),
        (lambda facts, _: facts.update(lora_alpha=8), ("scaled by 2", "by 3", "lora.alpha = 8")),
        (lambda facts, _: facts.update(use_rslora=True), ("lora.rslora = true",)),
        (lambda facts, _: facts.update(alpha_pattern={"q_proj": 8}), ("alpha_pattern",)),
        (lambda facts, _: facts.update(r=8, lora_alpha=24), ("rank 8", "lora.rank = 8")),
        (lambda facts, _: facts.update(rank_pattern={"q_proj": 2}), ("rank 2", "lora.ranks q_proj = 2")),
        (lambda facts, _: facts.pop("r"), ("not what PEFT writes",)),
        (lambda _, tensors: tensors.update(extra=torch.zeros(1)), ("'extra'", "no LoRA matrix")),
        (without_a_layer, ("covers 5 of 6", "layers.1.self_attn.q_proj")),
        (of_a_deeper_model, ("layers.2", "does not have")),
        (of_a_wider_model, ("(4, 65)", "(4, 64)", "q_proj.lora_A")),
        (poisoned, ("not finite",)),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    checkpoint: Path, tmp_path: Path, change: Change, words: tuple[str, ...]
) -> None:
    made_by_peft(checkpoint, tmp_path)
    changed(tmp_path, change)
    with pytest.raises(UserError) as refusal:
        taken(tmp_path, config_for(checkpoint))
    assert str(refusal.value).startswith("lora.start_from: ")
    for word in words:
        assert word in str(refusal.value)


def test_other_targets_are_refused_with_those_to_set(checkpoint: Path, tmp_path: Path) -> None:
    made_by_peft(checkpoint, tmp_path, target_modules=["q_proj", "k_proj"])
    with pytest.raises(UserError, match=r'set lora.targets to \["k_proj", "q_proj"\]'):
        taken(tmp_path, config_for(checkpoint))


@pytest.mark.parametrize("named", ["org/{name}", "unsloth/{name}-bnb-4bit", "unsloth/{name}-unsloth-bnb-4bit", ""])
def test_the_same_base_may_have_another_owner_or_folder(checkpoint: Path, tmp_path: Path, named: str) -> None:
    made_by_peft(checkpoint, tmp_path)
    base = named.format(name=checkpoint.name)
    changed(tmp_path, lambda facts, _: facts.update(base_model_name_or_path=base))
    assert taken(tmp_path, config_for(checkpoint))


def test_a_pickle_is_never_opened(checkpoint: Path, tmp_path: Path) -> None:
    made_by_peft(checkpoint, tmp_path)
    shutil.move(tmp_path / WEIGHTS, tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="never opened"):
        taken(tmp_path, config_for(checkpoint))
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ModelError, match="has no adapter_config"):
        taken(tmp_path, config_for(checkpoint))


def test_another_seed_does_not_change_what_is_started_from(checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(checkpoint)
    policy = tiny_policy(checkpoint, lora=config.lora)
    shake(policy, 3)
    data = adapter_bytes(policy.adapter)
    assert adapter_bytes(load_trained_policy(config, "cpu", data).adapter) == data
    assert adapter_bytes(load_trained_policy(config, "cpu").adapter) != data


@pytest.mark.parametrize("beside", [[], [CONFIG]])
def test_a_folder_with_a_model_is_not_taken_for_a_run(tmp_path: Path, beside: list[str]) -> None:
    """An adapter may be beside it, as in an export."""
    for name in ("config.json", *beside):
        (tmp_path / name).write_text('{"architectures": []}')
    assert adapter_folder("lora.start_from", str(tmp_path)) == tmp_path
    run = RunDir.create(tmp_path / "run", config_to_json(resolve({})))
    with pytest.raises(RunDirError, match="has no checkpoint yet"):
        adapter_folder("lora.start_from", str(run.path))
