"""Sections for what others do with the same model, prompts, sizes, LoRA, optimizer and reward.

    trl     TRL's GRPOTrainer with PEFT and bitsandbytes: the same NF4 codes, read by transformers' own loader
    vllm    vLLM in the place of our decode loop, where it is installed

TRL's settings on a card are in benchmarks/trl_grpo.py. Its step is timed as ours, the first left out.
"""

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.measured import CardWatch, Note, Place
from benchmarks.gpu.runs import last_words
from benchmarks.gpu.shapes import R1, Size, config_of, keys_of, model_of
from benchmarks.time_to_reward import trl_command
from shared.base.cache import cached_base
from tests.support.runs import ROOT

STEPS = 3
TRL_S = 190
"""Loading included. On an H200 three steps took longer than 170 s."""
NEEDED = ("trl", "peft", "accelerate", "datasets")


def trl(place: Place, note: Note) -> None:
    size = R1.at(place)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        note(skipped=f"{', '.join(missing)} is not installed here")
        return
    out = place.work / "trl_rows.json"
    words = trl_words(place, size, out)
    note(size=vars(size), command=words[1:])
    out.unlink(missing_ok=True)
    with CardWatch() as card:
        code, said = ended(words)
    note(exit_code=code, card=card.figures())
    if out.is_file():
        note(**trl_figures(out))
    if code != 0:
        note(said=said)
        raise SystemExit("TRL did not end" if code else f"TRL did not end within {TRL_S} s")


def ended(words: list[str]) -> tuple[int | None, str]:
    """Exit code and last words; None at the limit, which leaves the steps until then."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TRL_S)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, last_words(done.stderr)


def trl_words(place: Place, size: Size, out: Path) -> list[str]:
    keys = keys_of(place, size, place.size(STEPS, 2))
    options = {
        "--model": for_transformers(cached_base(model_of(place, size)).folder, place.work / "trl-model"),
        "--tasks": keys["tasks.source"],
        "--device": place.device.type,
        "--dtype": "bf16",
        "--reward": "parity",
        "--target": 2.0,
        "--max-steps": keys["run.steps"],
        "--out": out,
        "--seed": 0,
        "--threads": 2,
    }
    return trl_command(sys.executable, config_of(keys), options)


def for_transformers(base: Path, folder: Path) -> Path:
    """The same files, with the type to compute in: without it, transformers multiplies in fp32."""
    folder.mkdir(exist_ok=True)
    for file in base.iterdir():
        if file.name != "config.json" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] |= {"bnb_4bit_compute_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def trl_figures(out: Path) -> dict[str, Any]:
    """Its rows, as benchmarks/trl_grpo.py writes them."""
    rows = json.loads(out.read_text())
    times = [after["time_s"] - before["time_s"] for before, after in pairwise(rows)]
    medians = {"median_step_s": round(median(times), 3)} if times else {}
    return {"step_s": [round(time, 3) for time in times], **medians, "rows": rows}


def vllm(place: Place, note: Note) -> None:
    if importlib.util.find_spec("vllm") is None:
        note(skipped="vllm is not installed here")
        return
    from benchmarks.gpu_vllm import case

    model = model_of(place, R1.at(place))
    for weights in ("nf4", "dense"):
        note(**{weights: case(model.path, weights, "kv", {"model.cache_dir": model.cache_dir})})
