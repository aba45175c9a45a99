"""Runs of the embedded model whose checkpoints are judged on held-out problems of one level each.

A run that was measured is kept as one JSON file in the work folder and not repeated, so a benchmark that was stopped
continues; one that was kept with other settings is refused. Runs are made one after the other, each process with one
thread. Evaluated are 512 held-out problems of each level, one completion greedily and one at T = 1 with the same seeds
for every checkpoint. Evaluation happens after the run and takes none of its time.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import structs

from launch.commands.in_process import LocalActor, LocalFiller, local_actor
from learner.durable.checkpoint import CheckpointStore
from learner.durable.state import ADAPTER
from learner.objective.batch import flat
from learner.orders.orders import build_orders
from learner.tasks.tasks import Task, load_tasks
from learner.update.publisher import policy_message
from protocol.messages import Outcome, Sampling
from shared.config.load import config_from_json
from shared.config.tree import Config

PROBLEMS = 512
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    """The given one, which stays, or a temporary one."""
    if given:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def measured(work: Path, name: str, overrides: Mapping[str, Any], levels: Sequence[int]) -> dict[str, Any]:
    """What a run came to, from the work folder or from doing it now."""
    settings = {**overrides, "levels": levels, "problems": PROBLEMS}
    found = kept(work / f"{name}.json", settings, lambda: train_and_judge(work / name, overrides, levels))
    shutil.rmtree(work / name, ignore_errors=True)
    return found


def kept(file: Path, settings: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """What was measured with these settings: from the file, or from doing it now."""
    if not file.is_file():
        file.write_text(json.dumps({"settings": settings, "found": measure()}))
    refuse_other_settings(file, settings)
    return json.loads(file.read_text())["found"]


def refuse_other_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """What was kept must have been measured with these; a missing file has none."""
    asked = json.loads(json.dumps(settings))
    known = json.loads(file.read_text()).get("settings", {}) if file.is_file() else {}
    differ = [key for key in asked | known if asked.get(key) != known.get(key)]
    if differ:
        got, expected = (", ".join(f"{key}={one.get(key)}" for key in differ) for one in (known, asked))
        raise SystemExit(f"{file} is of a run with {got}, and this call has {expected}: give it another --work folder")


def train_and_judge(out: Path, overrides: Mapping[str, Any], levels: Sequence[int]) -> dict[str, Any]:
    """One run, then all its checkpoints."""
    shutil.rmtree(out, ignore_errors=True)
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(out), *words]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    start = rows[0]["time_s"] - rows[0]["time/step_s"]
    curriculum = [{key: row[key] for key in row if key.startswith(("curriculum/", "ewc/", "kl"))} for row in rows]
    return {
        "seconds": [round(row["time_s"] - start, 3) for row in rows],
        "rows": curriculum,
        "judged": judge(out, levels),
    }


def judge(out: Path, levels: Sequence[int]) -> list[dict[str, Any]]:
    """Accuracy of every checkpoint at every level, both ways of decoding."""
    config = config_from_json((out / "config.json").read_bytes())
    store = CheckpointStore(out / "checkpoints", config.checkpoint.keep)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))
    found: list[dict[str, Any]] = []
    with local_actor(config) as actor:
        filler = LocalFiller(actor.rollout)
        tasks = {level: held_out(config, actor, level) for level in levels}
        for step in steps:
            filler.publish(policy_message(step, store.load(step).files[ADAPTER]), oldest_needed=0)
            for level in levels:
                shares = {way: share(filler, config, tasks[level], step, way) for way in TEMPERATURES}
                found.append({"step": step, "level": level, **shares})
    return found


def held_out(config: Config, actor: LocalActor, level: int) -> Sequence[Task]:
    """The held-out problems of one level."""
    tasks = structs.replace(config.tasks, levels=(level,), limit=1)
    return load_tasks(tasks, actor.prompter, config.verifier.kind).held_out[:PROBLEMS]


def share(filler: LocalFiller, config: Config, tasks: Sequence[Task], version: int, way: str) -> float:
    """Correct completions among all."""
    orders = build_orders(
        tasks,
        seed=0,
        lane=f"judge-{way}",
        step=0,
        first_slot=0,
        samples=1,
        version=version,
        sampling=Sampling(temperature=TEMPERATURES[way], max_new_tokens=config.rollout.max_new_tokens),
        groups_per_order=128,
    )
    filler.submit(orders)
    groups = flat(filler.collect([order.order_id for order in orders]))
    return sum(group.outcomes[0] is Outcome.CORRECT for group in groups) / len(groups)
