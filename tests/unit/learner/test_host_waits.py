"""The host never waits for a card within a micro-batch: nothing there asks a device for a value.

On tensors without values (shared/base/meta.py) such a question is an error of PyTorch's own. On a CPU the operations
are looked at, because a policy with codes is only read there.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from learner.objective.batch import StepBatch, TrainSample
from learner.update.figures import PassPart
from learner.update.forward_pass import UNCHANGED
from learner.update.update import Update
from shared.base.architecture import architecture_of
from shared.base.meta import meta_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.config.tree import BatchConfig, Config, ConstraintConfig, LossConfig
from shared.model.policy import Policy
from tests.support.architectures import SHAPE, SUPPORTED
from tests.support.fakes import FAMILIES, tiny_group, tiny_model, tiny_policy
from tests.support.steps import step_batch, teaching_samples, update_of

pytestmark = pytest.mark.usefixtures("one_thread")

WAITS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique2")
"""Operations whose result, or its shape, the host must read."""
CONSTRAINT = ConstraintConfig(beta=0.1, low_entropy=0.5, share=0.2)
CONFIGS = {
    "plain": Config(),
    "gspo": Config(loss=LossConfig(kind="gspo")),
    "masked": Config(loss=LossConfig(entropy_fraction=0.2)),
    "kl": Config(loss=LossConfig(kl_beta=0.1)),
    "constraint": Config(constraint=CONSTRAINT),
}


class Waits(TorchDispatchMode):
    """Notes the operations that a host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        asks = name in WAITS or name.startswith("unique") or (name == "index" and by_mask(args[1]))
        self.found += [name] if asks else []
        self.count += 1
        return func(*args, **(kwargs or {}))


def by_mask(indices: Any) -> bool:
    """How many rows a mask selects, only its device knows."""
    return any(index is not None and index.dtype == torch.bool for index in indices)


def batch_for(config: Config) -> StepBatch:
    """Padding in prompts and completions, which are in two buckets; one sample has no token in the objective."""
    groups = [tiny_group([1.0, 0.0, 0.0], [3, 40, 7], group_id="ab"[seed], seed=seed) for seed in range(2)]
    batch = step_batch(teaching_samples(groups, config), 0, config)
    assert len({len(sample.sample.prompt_ids) for sample in batch.samples}) == 2
    return batch


def unmasked(batch: StepBatch) -> list[TrainSample]:
    first, *others = batch.samples
    return [replace(first, selected=np.zeros(len(first.selected), bool)), *others]


def one_micro_batch(policy: Policy, config: Config) -> tuple[Update, PassPart]:
    update = update_of(policy, config)
    return update, update.backward(unmasked(batch_for(config)), UNCHANGED)


@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_cpu_no_operation_would_wait(checkpoint: Path, name: str) -> None:
    policy = tiny_policy(checkpoint, dequantize="each_call")
    with Waits() as seen:
        one_micro_batch(policy, CONFIGS[name])
    assert seen.found == [] and seen.count > 300


def test_what_would_wait_is_seen() -> None:
    values = torch.arange(4.0)
    with Waits() as seen:
        float(values.sum())
        values.nonzero()
        values[values > 1]
        torch.bincount(values.long())
        values.unique()
    assert {"_local_scalar_dense", "nonzero", "index", "bincount", "_unique2"} <= set(seen.found)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_micro_batch_runs_over_tensors_without_values(tmp_path: Path, name: str, recompute: str) -> None:
    config = structs.replace(CONFIGS[name], batch=BatchConfig(head_rows=5))
    update, part = one_micro_batch(policy_without_values(tmp_path, recompute=recompute == "always"), config)
    assert part.loss.is_meta and part.mismatch.is_meta
    assert all(value.grad is not None and value.grad.is_meta for value in update.optimizer.parameters.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_asks(tmp_path: Path, family: Any) -> None:
    one_micro_batch(policy_without_values(tmp_path, family), Config())


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Granite", "Olmo2"])
def test_nor_do_the_layers_of_transformers(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**SHAPE | SUPPORTED[name])
    policy = trained({**config.to_dict(), "model_type": config.model_type})
    assert policy.layers is None
    one_micro_batch(policy, Config())


def policy_without_values(folder: Path, family: Any = "qwen2", *, recompute: bool = False) -> Policy:
    policy = trained(json.loads((tiny_model(folder, family) / "config.json").read_text()))
    if recompute:
        policy.recompute_activations()
    return policy


def trained(facts: dict[str, Any]) -> Policy:
    policy = meta_policy(architecture_of(facts), ModelConfig(), LoraConfig(), torch.bfloat16)
    policy.adapter.requires_grad()
    return policy
