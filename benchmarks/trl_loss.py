"""The other side of trl_gradients.py: TRL's own loss of given log-probs, and its gradient in them.

In TRL's own environment, `GRPOTrainer._compute_loss` is called with a stand-in for the trainer, whose forward pass
returns the log-probs. What TRL does with the sampler's log-probs before that is within its generation; those few lines
are repeated here. Imports nothing of Tandem.

    python -P trl_loss.py < cases.json > gradients.json
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer  # pyright: ignore[reportMissingImports]

DEFAULTS = {"delta": None, "use_bias_correction_kl": True, "steps_per_generation": 1}


class Accelerator:
    """Of one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    gather_for_metrics = gather

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def trainer(case: dict[str, Any], logprobs: torch.Tensor) -> SimpleNamespace:
    """What _compute_loss reads of a trainer."""
    keys = case["trl"]
    args = SimpleNamespace(**DEFAULTS | keys.get("args", {}))
    return SimpleNamespace(
        args=args,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        loss_type=keys["loss_type"],
        importance_sampling_level=keys.get("importance_sampling_level", "token"),
        off_policy_mask_threshold=keys.get("off_policy_mask_threshold"),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        beta=keys.get("beta", 0.0),
        epsilon_low=keys.get("epsilon_low", 0.2),
        epsilon_high=keys.get("epsilon_high", 0.2),
        max_completion_length=case["longest"],
    )


def importance(case: dict[str, Any], old: torch.Tensor, actor: torch.Tensor) -> torch.Tensor:
    """[B, T] or [B, 1]"""
    mode, low, high = (case["trl"].get(key) for key in ("mode", "clip_min", "clip_max"))
    if mode is None:
        return torch.ones_like(old)
    difference = old - actor
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (low or 0.0)) | (ratio > high), 0.0)


def gradient(case: dict[str, Any]) -> list[list[float]]:
    """[B, T] of the loss in the log-probs."""
    names = ("logprobs", "old", "actor", "base", "mask", "advantages")
    given = {name: torch.tensor(case[name], dtype=torch.float64) for name in names}
    mask, logprobs = given["mask"], given["logprobs"].requires_grad_()
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids),
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "old_logps": (given["old"] * mask).sum(-1),
        "sampling_per_token_logps": given["actor"],
        "ref_per_token_logps": given["base"],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": importance(case, given["old"] * mask, given["actor"] * mask),
    }
    kind = RLOOTrainer if case["trl"]["loss_type"] == "rloo" else GRPOTrainer
    kind._compute_loss(trainer(case, logprobs), None, inputs).backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    json.dump({name: gradient(case) for name, case in json.load(sys.stdin).items()}, sys.stdout)
