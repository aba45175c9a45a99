"""Whether an export is the policy: compares the log-probs of the same tokens, in fp32 on the CPU.

    d = max_t |log p_policy(t) - log p_export(t)|   over NUM_SEQUENCES sequences of random tokens

The policy is computed by the module that trained it, with base and adapter apart. The export is read from its files by
transformers; the files of an adapter are added to the dense base, as PEFT does it. The tokens are random, because
tokens that a model expects have log-probs near 0, which hardly change. In fp32 the two differ by the order of sums.
In bf16 the weights are rounded too; therefore its limit is larger.
"""

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from launch.export.folders import Form, TrainedPolicy
from launch.export.weights import Deltas, merged_weights
from learner.durable.find_adapter import ADAPTER_CONFIG
from learner.durable.state import ADAPTER
from shared.base.cache import CachedBase
from shared.base.load import load_policy
from shared.errors import DamageError
from shared.model.adapter_file import install_adapter
from shared.model.canary import canary_ids, sequence_logprobs
from shared.model.given_adapter import PeftLora
from shared.seeding import derive

NUM_SEQUENCES = 4
TOKENS = 48
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the export differs from the policy."""

    worst: float
    """Largest difference of a log-prob, in nats."""
    mean: float
    """Mean difference, in nats."""
    tokens: int
    """How many were compared."""

    def sentence(self) -> str:
        return (
            f"log-probs of the export differ from the policy's by at most {self.worst:.2e} (mean {self.mean:.2e},"
            f" {self.tokens} random tokens, computed in fp32)"
        )


def measure(out: Path, form: Form, policy: TrainedPolicy, run_seed: int) -> Agreement:
    """Loads one model after the other, so that only one is in memory."""
    vocab = AutoConfig.from_pretrained(policy.base.folder, trust_remote_code=False).vocab_size
    seeds = [derive(run_seed, "export", number) for number in range(NUM_SEQUENCES)]
    sequences = [canary_ids(seed, vocab, TOKENS) for seed in seeds]
    expected = policy_logprobs(policy, sequences)
    gc.collect()
    model = peft_model(out, policy.base) if form == "peft" else merged_model(out)
    found = np.concatenate([logprobs(model, ids) for ids in sequences])
    differences = np.abs(found - expected)
    return Agreement(worst=float(differences.max()), mean=float(differences.mean()), tokens=len(differences))


def refuse_disagreement(found: Agreement, dtype: torch.dtype) -> None:
    if not found.worst <= LIMITS[dtype]:
        raise DamageError(
            f"The export is not the policy: {found.sentence()}, allowed is {LIMITS[dtype]:g}. The export was removed;"
            " try --dtype fp32. If that fails too, report it with this run's config.json."
        )


def policy_logprobs(policy: TrainedPolicy, sequences: list[np.ndarray]) -> np.ndarray:
    """From the codes: a run in bf16 has no dense base in fp32, and one for this alone would stay on the disk."""
    model = replace(policy.model, dequantize="each_call")
    module = load_policy(policy.base, model, policy.lora, torch.device("cpu"), torch.float32)
    install_adapter(module.adapter, policy.adapter)
    return np.concatenate([sequence_logprobs(module, ids) for ids in sequences])


def merged_model(out: Path) -> Any:
    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False).eval()


def peft_model(out: Path, base: CachedBase) -> Any:
    """The dense base plus the written adapter."""
    written = json.loads((out / ADAPTER_CONFIG).read_text())
    deltas = Deltas((out / ADAPTER).read_bytes(), PeftLora.read(written).scale_of)
    config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
    config.__dict__.pop("quantization_config", None)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    weights = dict(merged_weights(base.folder, deltas, torch.float32))
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= set(model.all_tied_weights_keys), (missing, unknown)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """[n + 1] ids -> [n], by transformers alone."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None]).squeeze(1).numpy()
