"""The two engines side by side in one process: installing an adapter, and tokens a second at G = 8, 32, 128.

    python -m benchmarks.vllm_engines               (in .venv-vllm, which `tests/run.sh vllm` makes)
    python -m benchmarks.vllm_engines --embedded    the embedded model alone; the other one has half a billion
                                                    parameters and takes minutes and 4 GB

One prompt, G completions; each figure is the median of `--repeats` after one that is not counted. Both engines have the
same adapter of rank 16 on all linears, and compute in fp32 from the same dequantised values.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from actor.engines.vllm_options import DISTRIBUTIONS, version_of
from benchmarks.machine import write_result
from shared.process.determinism import cpu_environment

GROUPS = (8, 32, 128)
ENGINES = ("hf", "vllm")
TOKENS = {"embedded": 48, "half billion": 16}


def main() -> None:
    """Each engine and model in a process of its own: one process holds one vLLM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", nargs=3, metavar=("ENGINE", "MODEL", "TOKENS"), help="measure this one and print it")
    args = parser.parse_args()
    if args.case:
        engine, model, tokens = args.case
        print(json.dumps(case(engine, model, int(tokens), args.repeats)))
        return
    with tempfile.TemporaryDirectory() as folder:
        models = {"embedded": "embedded"} | ({} if args.embedded else {"half billion": half_billion(Path(folder))})
        figures = {
            name: {engine: fresh(engine, path, name, args) for engine in ENGINES} for name, path in models.items()
        }
    print(json.dumps(figures, indent=2))
    print(
        write_result(
            "vllm_engines",
            {"vllm": version_of(*DISTRIBUTIONS), "threads": 2, "rank": 16, "repeats": args.repeats, "models": figures},
        )
    )


def half_billion(folder: Path) -> str:
    """A random model of that shape."""
    from benchmarks.half_billion_model import write_model

    (folder / "model").mkdir()
    write_model(folder / "model", 0)
    return str(folder / "model")


def fresh(engine: str, path: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case, in a new process."""
    words = ["--repeats", str(args.repeats), "--case", engine, path, str(TOKENS[name])]
    argv = [sys.executable, "-m", "benchmarks.vllm_engines", *words]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def case(engine_name: str, path: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Start, install, decode."""
    from actor.wiring import build_engine
    from launch.presets.load import load_config
    from protocol.messages import GroupOrder, Sampling
    from shared.base.cache import cached_base
    from shared.model.adapter_file import read_layout
    from shared.seeding import sample_seeds

    keys = {"model.path": path, "actor.engine": engine_name, "rollout.prompts": 1, "rollout.group": max(GROUPS)}
    config = load_config("embedded", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    base = cached_base(config.model)
    start_s, (engine, prompter) = timed(lambda: build_engine(config))
    adapter = some_adapter(read_layout(base.folder, config.lora).adapter())
    import numpy as np

    prompt = np.array(prompter.prompt_ids("Tom has 6 coins. He finds 4. How many coins now?"), dtype=np.int32)

    def decode(size: int) -> int:
        seeds = sample_seeds(0, "benchmark", 0, 0, size)
        order = GroupOrder(group_id="g", prompt_ids=prompt, columns={}, seeds=seeds)
        sampling = Sampling(temperature=1.0, max_new_tokens=tokens)
        ((samples),) = engine.generate((order,), sampling, lambda ended: None)
        return sum(len(sample.ids) for sample in samples)

    installs = [timed(lambda v=v: engine.install(v, adapter))[0] for v in range(repeats + 1)][1:]
    return {
        "start_s": round(start_s, 2),
        "adapter_mb": round(len(adapter) / 1e6, 2),
        "install_ms": round(1000 * median(installs), 2),
        "tokens_per_s": {str(size): round(median(rates(decode, size, repeats)), 1) for size in GROUPS},
    }


def rates(decode: Callable[[int], int], size: int, repeats: int) -> list[float]:
    """Tokens a second, the first call not counted."""
    found = [(seconds, done) for seconds, done in (timed(lambda: decode(size)) for _ in range(repeats + 1))]
    return [done / seconds for seconds, done in found[1:]]


def some_adapter(adapter: Any) -> bytes:
    """Small values everywhere."""
    import torch

    from shared.model.adapter_file import adapter_bytes

    adapter.initialise(0)
    with torch.no_grad():
        for layer in adapter.layers.values():
            layer.lora_B.fill_(1e-3)
    return adapter_bytes(adapter)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came out."""
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


if __name__ == "__main__":
    os.environ.update(cpu_environment(2, "fast") | {"HF_HUB_OFFLINE": "1"})
    main()
