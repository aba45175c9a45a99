"""Does a pretrained model learn? Reward curves, and accuracy before and after on the same problems.

Trains a preset with the model of a folder, once for each seed, for the steps of the preset or for a number of minutes;
then evaluates base and last checkpoint on the same held-out problems, or with --test on the test set, greedily and
sampled at T = 1. The differences are paired by problem; greedy and sampled are two statements, so each interval is one
of 97.5 %, as in `compare`. Minutes count from the start of the first step to the last whole step; evaluations take none
of them. The curves are drawn beside the result file.

With --work the runs stay in a folder, and a later call with the same settings trains none of them again: it evaluates
what has ended. A run of other settings is refused.

    python -m benchmarks.real_model cpu_135m MODEL_FOLDER --weights bf16
    python -m benchmarks.real_model cpu_05b MODEL_FOLDER --weights bf16 --seeds 0 --minutes 60 --test --problems 320 \
        --set tasks.source=GSM8K_FOLDER
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.curves import picture
from benchmarks.level_runs import refuse_other_settings, work_folder
from benchmarks.machine import RESULTS, write_result
from benchmarks.time_to_reward import tandem_rows
from launch.commands.compare import LEVEL
from launch.presets.load import load_config
from shared.run.evaluation import Decoded, Evaluation, read_evaluation, right
from shared.run.run_dir import RunDir
from shared.run.summary import read_summary
from shared.statistics import Difference, paired

Run = dict[str, Any]

POLL_S = 1.0
ENOUGH_STEPS = 5000
"""More than any run of minutes makes; the disk must have room for so many."""
LAUNCH = (sys.executable, "-m", "launch")


def main() -> None:
    """Train each seed, evaluate, write the result and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("model", type=Path, help="a folder in Hugging Face format")
    parser.add_argument("--weights", required=True, help="what the weights of the folder are, such as bf16")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="of training (default: the steps of the preset)")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--test", action="store_true", help="evaluate on the test set, not on held-out problems")
    parser.add_argument("--set", action="append", default=[], help="one more key of the configuration, as in `run`")
    parser.add_argument("--name", help="of the result file (default: real_model_<preset>)")
    parser.add_argument("--work", type=Path, help="folder in which the runs stay (default: a temporary one)")
    args = parser.parse_args()
    name = args.name or f"real_model_{args.preset}"
    with work_folder(args.work) as work:
        runs = [measured(seed, args, work / str(seed)) for seed in args.seeds]
    about = {"preset": args.preset, "model": args.model.name, "weights": args.weights, "set": args.set}
    print(write_result(name, about | {"minutes": args.minutes, "test_set": args.test, "runs": runs}))
    drawing = RESULTS / f"{name}.svg"
    curves = {label_of(run): run["rewards"] for run in runs}
    drawing.write_text(picture(f"{args.model.name}, preset {args.preset}: mean reward of a step", "step", curves))
    print(drawing)


def measured(seed: int, args: argparse.Namespace, out: Path) -> Run:
    """One training run and its two evaluations."""
    note_settings(out, args)
    if not has_ended(out):
        train(out, args.preset, overrides(seed, args), args.minutes)
    rows = tandem_rows(out)
    before, after = (evaluated(out, args, base=base) for base in (True, False))
    rewards = [round(row["reward"], 4) for row in rows]
    run = {
        "seed": seed,
        "steps": len(rows),
        "training_s": round(rows[-1]["time_s"], 1),
        "reward_first_five": round(fmean(rewards[:5]), 3),
        "reward_last_five": round(fmean(rewards[-5:]), 3),
        "problems": before.n,
        **compared(before, after),
    }
    print(json.dumps(run, indent=2), flush=True)
    return run | {"rewards": rewards}


def note_settings(out: Path, args: argparse.Namespace) -> None:
    """Beside a run that begins; one that is there already must have these."""
    file = out.with_suffix(".json")
    settings = {"preset": args.preset, "model": str(args.model.resolve()), "minutes": args.minutes, "set": args.set}
    if out.is_dir():
        refuse_other_settings(file, settings)
    else:
        file.write_text(json.dumps({"settings": settings}))


def overrides(seed: int, args: argparse.Namespace) -> list[str]:
    """What differs from the preset."""
    keys: dict[str, Any] = {"run.seed": seed, "model.path": args.model, "eval.problems": 0}
    if args.minutes:
        if load_config(args.preset).optimizer.schedule != "constant":
            raise SystemExit(f"the rate of {args.preset} depends on the number of steps, which --minutes leaves open")
        keys["run.steps"] = ENOUGH_STEPS
    return [*(f"{key}={value}" for key, value in keys.items()), *args.set]


def has_ended(out: Path) -> bool:
    """Whether there is a run that came to its end, or was asked to."""
    summary = read_summary(RunDir.open(out)) if out.is_dir() else None
    return summary is not None and summary.status in {"done", "stopped"}


def train(out: Path, preset: str, keys: Sequence[str], minutes: float | None) -> None:
    """With minutes, the run is stopped as by Ctrl-C, which ends it after a whole step."""
    words = [word for key in keys for word in ("--set", key)]
    log = out.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen([*LAUNCH, "run", preset, "--out", str(out), *words], stdout=output, stderr=output)
        asked = False
        while process.poll() is None:
            time.sleep(POLL_S)
            if minutes and not asked and trained_s(out) >= 60 * minutes:
                process.send_signal(signal.SIGINT)
                asked = True
    if not has_ended(out):
        raise SystemExit(f"the run ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def trained_s(out: Path) -> float:
    """Time of the steps that have ended. The last line may not be whole yet."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    if not lines:
        return 0.0
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    return last["time_s"] - first["time_s"] + first["time/step_s"]


def evaluated(out: Path, args: argparse.Namespace, *, base: bool) -> Evaluation:
    """Of the base or of the last checkpoint, by the command that a user types."""
    options = ["--problems", str(args.problems), *(["--base"] if base else []), *(["--test"] if args.test else [])]
    subprocess.run([*LAUNCH, "eval", str(out), *options], stdout=subprocess.DEVNULL, check=True)
    found = read_evaluation(max((out / "eval").glob("*.json"), key=lambda file: file.stat().st_mtime_ns))
    assert found is not None
    return found


def compared(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Accuracy, length and the paired gain, by way of decoding."""
    if before.tasks_sha256 != after.tasks_sha256:
        raise SystemExit("the two evaluations are of different problems")
    gains = {
        "greedy": paired(right(after), right(before), LEVEL),
        "sampled": paired(sampled(after), sampled(before), LEVEL),
    }
    ways = {way: (getattr(before, way), getattr(after, way)) for way in gains}
    return {
        way: {"before": told(ways[way][0]), "after": told(ways[way][1]), "gain": interval(gain)}
        for way, gain in gains.items()
    }


def sampled(evaluation: Evaluation) -> list[float]:
    return [task.sampled for task in evaluation.task_results]


def told(one: Decoded) -> dict[str, float]:
    """One evaluation in one way, without its tables."""
    keys = ("accuracy", "low", "high", "format_rate", "truncation_rate", "length_mean")
    return {key: round(getattr(one, key), 4) for key in keys}


def interval(gain: Difference) -> dict[str, Any]:
    """The paired difference, and whether its interval leaves out zero."""
    ends = {key: round(getattr(gain, key), 4) for key in ("mean", "low", "high")}
    return ends | {"p": gain.p, "certain": gain.certain}


def label_of(run: Run) -> str:
    """`seed 0: greedy 31 % to 55 % of 512, gain 24 (18 to 30)`"""
    found = run["greedy"]
    shares = f"{found['before']['accuracy']:.0%} to {found['after']['accuracy']:.0%} of {run['problems']}"
    gain = {key: round(100 * found["gain"][key]) for key in ("mean", "low", "high")}
    return f"seed {run['seed']}: greedy {shares}, gain {gain['mean']} points ({gain['low']} to {gain['high']})"


if __name__ == "__main__":
    main()
