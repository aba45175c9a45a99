"""How much the log-probs of a token step that reads NF4 codes differ from the learner's, against one that does not.

    d = log-prob of a sampled token as the actor reports it - that of the model's own class over the dense base

All engines sample from the same policy in bf16, with an adapter that is not zero. The dense engine's `d` is what the
order of summation does in bf16. The importance weight of GRPO takes `d` for what it is, a difference of two policies.

    dense          dense weights                     nf4          codes
    dense, int8    the same, the head in 8 bits      nf4, int8    the same, the head in 8 bits

    python -m benchmarks.coded_mismatch MODEL_FOLDER ... [--groups 16] [--tokens 128]
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from actor.engines.hf_engine import HFEngine
from benchmarks.decode_bound import Head, Weights, opened
from benchmarks.machine import write_result
from protocol.messages import GroupOrder, Sampling
from shared.base.load import class_logprobs
from shared.model.prompt import load_tokenizer
from shared.process.determinism import pin_torch

GROUP = 4
KINDS: dict[str, tuple[Weights, Head]] = {
    "dense": ("dense", "dense"),
    "dense, int8": ("dense", "int8"),
    "nf4": ("nf4", "dense"),
    "nf4, int8": ("nf4", "int8"),
}
"""What is read of the layers and of the head."""
QUESTION = "Ann has {} apples and buys {} bags with {} apples each. How many does she have? Explain your answer.\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    pin_torch(torch.get_num_threads())
    found: dict[str, dict[str, dict[str, float]]] = {}
    for folder in args.folders:
        orders = questions(folder, args.groups)
        for kind, (weights, head) in KINDS.items():
            engine = opened(folder, "bf16", 0.5, weights, head, token_step="torch")
            figures = figures_of(differences(engine, orders, args.tokens))
            found.setdefault(Path(folder).name, {})[kind] = figures
            print(Path(folder).name, kind, figures, flush=True)
    print(write_result("coded_mismatch", {"models": found}))


def questions(folder: str, groups: int) -> tuple[GroupOrder, ...]:
    tokenizer, rng = load_tokenizer(Path(folder)), np.random.default_rng(0)
    texts = [QUESTION.format(*rng.integers(2, 99, 3)) for _ in range(groups)]
    return tuple(
        GroupOrder(
            group_id=str(number),
            prompt_ids=np.array(tokenizer.encode(text), dtype=np.int32),
            columns={},
            seeds=tuple(range(GROUP * number, GROUP * number + GROUP)),
        )
        for number, text in enumerate(texts)
    )


@torch.no_grad()
def differences(engine: HFEngine, orders: tuple[GroupOrder, ...], tokens: int) -> torch.Tensor:
    """Of every sampled token, eight rows at a time: few enough to be read as codes."""
    found: list[torch.Tensor] = []
    for start in range(0, len(orders), 2):
        part = orders[start : start + 2]
        groups = engine.generate(part, Sampling(temperature=1.0, max_new_tokens=tokens), lambda ended: None)
        for order, completions in zip(part, groups, strict=True):
            for one in completions:
                ids = torch.from_numpy(np.concatenate([order.prompt_ids, one.ids])).long()[None]
                known = class_logprobs(engine.policy, ids)[0, len(order.prompt_ids) - 1 :]
                found.append(torch.from_numpy(one.logprobs) - known)
    engine.sleep()
    return torch.cat(found)


def figures_of(d: torch.Tensor) -> dict[str, float]:
    """kl: mean of exp(-d) - 1 + d, Schulman's estimate of KL(actor, learner)."""
    values = {
        "tokens": float(len(d)),
        "mean_abs": float(d.abs().mean()),
        "rms": float(d.square().mean().sqrt()),
        "largest": float(d.abs().max()),
        "kl": float((torch.exp(-d) - 1 + d).mean()),
    }
    return {name: round(value, 5) for name, value in values.items()}


if __name__ == "__main__":
    main()
