"""The gradients of our objectives beside TRL 1.16's, in the log-probs of ragged completions that are off-policy.

For every objective and correction that TRL has: |ours - TRL's| / |TRL's| in the Euclidean norm, both in float64, and
with ours in fp32. Old and actor's log-probs are about 0.4 nats from the policy's, so that clips, caps and masks
act. Advantages are given to both, because TRL divides by a standard deviation with n - 1. What differs by definition
is brought together first: TRL's RLOO has no divisor by length and one update, its CISPO no lower bound. TRL 1.16 has no
DPPO, and its GSPO takes a product where ours takes a mean of the sampler's weights, so that is compared without.

    python -m benchmarks.trl_gradients --trl-python /path/to/bin/python      (an environment with trl==1.16.0)
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import write_result
from learner.objective.loss import KlTokens, TokenBatch, kl_loss, policy_loss, token_weights
from shared.config.tree import LossConfig

LENGTHS, LONGEST = (7, 1, 12, 3, 9, 2), 16
ADVANTAGES = (0.9, -1.1, 0.4, 0.0, -0.3, 1.3)
TIS = {"mode": "token_truncate", "clip_max": 2.0}
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
OFF = {"importance_cap": 0.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"kind": "grpo"}, {"loss_type": "grpo", **TIS}),
    "dr_grpo": ({"kind": "dr_grpo"}, {"loss_type": "dr_grpo", **TIS}),
    "dapo": ({"kind": "dapo"}, {"loss_type": "dapo", **CLIP, **TIS}),
    "dapo, KL": ({"kind": "dapo", "kl_beta": 0.1, **OFF}, {"loss_type": "dapo", "beta": 0.1, **CLIP}),
    "gspo": (
        {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05, **OFF},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    ),
    "cispo": ({"kind": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3, **TIS}),
    "sapo": (
        {"kind": "sapo"},
        {"loss_type": "sapo", "args": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}, **TIS},
    ),
    "dual clip": ({"kind": "dapo", "dual_clip": 1.4}, {"loss_type": "dapo", "args": {"delta": 1.4}, **CLIP, **TIS}),
    "token_mask": (
        {"kind": "dapo", "importance": "token_mask", "importance_floor": 0.7, "importance_cap": 1.3},
        {"loss_type": "dapo", "mode": "token_mask", "clip_min": 0.7, "clip_max": 1.3, **CLIP},
    ),
    "sequence": (
        {"kind": "dapo", "importance": "sequence", "importance_cap": 1.2},
        {"loss_type": "dapo", "mode": "sequence_truncate", "clip_max": 1.2, **CLIP},
    ),
    "sequence_mask": (
        {"kind": "dapo", "importance": "sequence_mask", "importance_floor": 0.6, "importance_cap": 1.8},
        {"loss_type": "dapo", "mode": "sequence_mask", "clip_min": 0.6, "clip_max": 1.8, **CLIP},
    ),
    "stale": (
        {"kind": "dapo", "stale_limit": 0.1},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1, **CLIP, **TIS},
    ),
    "rloo": ({"kind": "dr_grpo", **OFF}, {"loss_type": "rloo"}),
}
"""Ours, and TRL's."""


def main() -> None:
    """Both sides, the table, the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", required=True, help="Python of an environment with trl==1.16.0")
    table = compared(parser.parse_args().trl_python)
    print(json.dumps(table, indent=2))
    print(write_result("trl_gradients", {"table": table}))


def compared(trl_python: str) -> dict[str, dict[str, float]]:
    """Relative differences of each case."""
    rows = log_probs()
    cases = {name: {**padded(name, rows), "longest": LONGEST, "trl": trl} for name, (_, trl) in CASES.items()}
    script = Path(__file__).with_name("trl_loss.py")
    done = subprocess.run(
        [trl_python, "-P", str(script)], input=json.dumps(cases), stdout=subprocess.PIPE, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    table: dict[str, dict[str, float]] = {}
    for name, (keys, _) in CASES.items():
        wanted = torch.tensor(theirs[name], dtype=torch.float64)[torch.tensor(mask())]
        # TRL's RLOO adds the log-probs of a completion, ours divides by a constant.
        scale = LONGEST if name == "rloo" else 1
        found = {bits: scale * gradient(LossConfig(**keys), name, rows, bits) for bits in ("float64", "float32")}
        table[name] = {bits: float((one - wanted).norm() / wanted.norm()) for bits, one in found.items()}
    return table


def log_probs() -> dict[str, list[np.ndarray]]:
    """[T] of each completion, by policy."""
    rng = np.random.default_rng(3)
    policy = [-rng.exponential(2.0, length) for length in LENGTHS]
    near = {name: [row + 0.4 * rng.standard_normal(len(row)) for row in policy] for name in ("old", "actor", "base")}
    return {"logprobs": policy, **near}


def rows_of(case: str, rows: dict[str, list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """RLOO's ratio is one of the whole completion, so its step is the first."""
    return rows | {"old": rows["logprobs"]} if case == "rloo" else rows


def padded(case: str, rows: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """[B, T] lists."""
    width = max(LENGTHS)
    found = {
        name: [np.pad(row, (0, width - len(row))).tolist() for row in of] for name, of in rows_of(case, rows).items()
    }
    return {**found, "mask": mask(), "advantages": ADVANTAGES}


def mask() -> list[list[bool]]:
    return [[place < length for place in range(max(LENGTHS))] for length in LENGTHS]


def gradient(config: LossConfig, case: str, rows: dict[str, list[np.ndarray]], bits: str) -> torch.Tensor:
    """[n] of our loss in the log-probs, completion after completion."""
    dtype = getattr(torch, bits)
    flat = {name: torch.from_numpy(np.concatenate(of)).to(dtype) for name, of in rows_of(case, rows).items()}
    logprobs = flat["logprobs"].clone().requires_grad_()
    counts = torch.tensor(LENGTHS)
    weights = torch.tensor(token_weights(config.kind, LENGTHS, LONGEST), dtype=dtype).repeat_interleave(counts)
    tokens = TokenBatch(
        logprobs=logprobs,
        old_logprobs=flat["old"],
        actor_logprobs=flat["actor"],
        advantages=torch.tensor(ADVANTAGES, dtype=dtype).repeat_interleave(counts),
        weights=weights,
        sample=torch.arange(len(LENGTHS)).repeat_interleave(counts),
        counts=counts,
    )
    kl = KlTokens(
        logprobs=logprobs,
        old_logprobs=flat["old"],
        actor_logprobs=flat["actor"],
        base_logprobs=flat["base"],
        weights=weights,
    )
    (policy_loss(tokens, config).loss + kl_loss(kl, config).loss).backward()
    assert logprobs.grad is not None
    return logprobs.grad.double()


if __name__ == "__main__":
    main()
