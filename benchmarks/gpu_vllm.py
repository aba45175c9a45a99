"""vLLM on a card: how long each way of freeing memory takes, how much it frees, and tokens a second by weights.

    python -m benchmarks.gpu_vllm FOLDER_OR_HUB_ID      (with the extra `vllm`, on a machine with a card)

Each case runs in its own process. Nothing here has been measured yet.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from statistics import median
from types import MappingProxyType
from typing import Any

from benchmarks.machine import write_result
from benchmarks.vllm_engines import timed

PARTS = ("kv", "weights", "stop")
WEIGHTS = ("dense", "nf4")
GROUP, TOKENS, ROUNDS = 8, 256, 5


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--case", nargs=2, metavar=("WEIGHTS", "PART"), help="measure this one and print it")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(args.model, *args.case)))
        return
    figures = {f"{weights} {part}": fresh(args.model, weights, part) for weights in WEIGHTS for part in PARTS}
    print(json.dumps(figures, indent=2))
    print(write_result("gpu_vllm", {"model": args.model, "cases": figures}))


def fresh(model: str, weights: str, part: str) -> dict[str, Any]:
    """One case, in a new process."""
    argv = [sys.executable, "-m", "benchmarks.gpu_vllm", model, "--case", weights, part]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def case(model: str, weights: str, part: str, others: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Decode, give back, take again. others: more keys of the configuration."""
    import numpy as np
    import torch

    from actor.wiring import build_engine
    from launch.presets.load import load_config
    from protocol.messages import GroupOrder, Sampling
    from shared.seeding import sample_seeds

    keys = {"model.path": model, "actor.engine": "vllm", "actor.weights": weights, "actor.give_back": part}
    sizes = {"rollout.prompts": 1, "rollout.group": GROUP, "rollout.max_new_tokens": TOKENS, "compute.device": "cuda"}
    config = load_config(
        "embedded", [f"{key}={json.dumps(value)}" for key, value in (keys | sizes | dict(others)).items()]
    )
    start_s, (engine, prompter) = timed(lambda: build_engine(config))
    prompt = np.array(prompter.prompt_ids("Tom has 6 coins. He finds 4. How many coins now?"), dtype=np.int32)
    seeds = sample_seeds(0, "benchmark", 0, 0, GROUP)
    order = GroupOrder(group_id="g", prompt_ids=prompt, columns={}, seeds=seeds)
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS)
    decode = [timed(lambda: engine.generate((order,), sampling, lambda ended: None)) for _ in range(ROUNDS)]
    free = torch.cuda.mem_get_info()[0]
    away, back, freed = [], [], []
    for _ in range(ROUNDS):
        away.append(timed(engine.sleep)[0])
        freed.append(torch.cuda.mem_get_info()[0] - free)
        back.append(timed(engine.wake)[0])
    return {
        "start_s": round(start_s, 1),
        "tokens_per_s": round(median(sum(len(s.ids) for s in samples) / s_ for s_, (samples,) in decode), 1),
        "sleep_s": round(median(away), 3),
        "wake_s": round(median(back), 3),
        "freed_mb": round(median(freed) / 2**20),
    }


if __name__ == "__main__":
    main()
