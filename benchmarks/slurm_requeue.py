"""Does a run on Slurm end the same when its job is requeued or preempted? A real cluster of one node, real jobs.

    python -m benchmarks.slurm_requeue [--only CASE ...]        needs root, slurm-wlm and munge; takes some minutes

munged, slurmctld and slurmd are started in a folder of their own (tests/support/slurm_cluster.py). Each case submits
the scripts of launch/slurm with the embedded model and disturbs the job once it has done some steps:

    requeued        `scontrol requeue`: TERM to all processes
    preempted       a job of a partition with a higher priority takes the node: the same
    noticed         the same in a partition with a GraceTime
    warned          USR1 to the batch shell, as --signal=B:USR1 sends it before the time limit; the script requeues
    killed          the same as `requeued`, and KILL to learner and actor at once, which else comes after KillWait
    array           learner.sbatch and two tasks of actors.sbatch; the learner is requeued while they fill orders

`same` says whether the adapter's hash is that of an uninterrupted run outside Slurm; `at_checkpoint` whether the job
stopped at a finished step. Results: results/slurm_requeue.json; exit 1 if a hash differs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from tests.support.runs import ROOT, kill, launch, num_rows, processes_of, rows, sets, summary, wait_until
from tests.support.slurm_cluster import Cluster, slurm_cluster

SIZES = {
    "run.steps": 14,
    "rollout.prompts": 8,
    "rollout.groups_per_order": 2,
    "eval.problems": 0,
    "checkpoint.every": 10,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
}
SCRIPTS = ROOT / "launch" / "slurm"
DISTURBED_AFTER = 3
"""Steps."""
WAIT_S = 400.0


def main(names: list[str], folder: Path) -> int:
    """The cases, one after the other."""
    os.environ["TANDEM_PYTHON"] = sys.executable
    plain = launch("run", "embedded", "--out", folder / "plain", *sets(SIZES))
    assert plain.returncode == 0, plain.stdout + plain.stderr
    expected = summary(folder / "plain")["adapter_sha256"]
    (folder / "slurm").mkdir()
    found: dict[str, Any] = {}
    with slurm_cluster(folder / "slurm", cpus=4, kill_wait_s=90) as cluster:
        version = cluster.command("sinfo", "--version").strip()
        for name in names:
            found[name] = one_case(cluster, folder / name, CASES[name], expected)
            print(name, json.dumps(found[name]), flush=True)
    figures = {"slurm": version, "config": SIZES, "adapter_sha256": expected, "cases": found}
    print(write_result("slurm_requeue", figures))
    return 0 if all(case["same"] for case in found.values()) else 1


def one_case(
    cluster: Cluster, out: Path, case: Callable[[Cluster, Path], dict[str, Any]], expected: str
) -> dict[str, Any]:
    began = time.monotonic()
    more = case(cluster, out)
    done = summary(out)
    keys = [path for path in (out / "keys").rglob("*") if path.is_file()]
    return {
        "same": done["adapter_sha256"] == expected and done["status"] == "done",
        "steps": done["steps"],
        **more,
        "keys_readable_by_others": sum(bool(path.stat().st_mode & 0o077) for path in keys),
        "wall_s": round(time.monotonic() - began, 1),
    }


def submitted(cluster: Cluster, out: Path, script: str, *before: str) -> str:
    """A job that has done some steps. before: options of sbatch."""
    log = f"--output={out}-%j.log"
    job = cluster.submit(log, *before, SCRIPTS / script, out, "embedded", *sets(SIZES), cwd=ROOT)
    wait_until(lambda: num_rows(out) >= DISTURBED_AFTER, f"steps of job {job}", WAIT_S)
    return job


def stopped_and_resumed(cluster: Cluster, out: Path, job: str, back: Callable[[], None]) -> dict[str, Any]:
    """Waits until the job is in the queue again, and until it has ended. back: what must happen before it can start."""
    wait_until(lambda: cluster.state(job) == "PENDING", f"job {job} in the queue", WAIT_S)
    stopped = summary(out)
    logged = num_rows(out)
    back()
    cluster.start_now(job)
    wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED", "CANCELLED"), f"the end of job {job}", WAIT_S)
    about = cluster.about(job)
    said = Path(f"{out}-{job}.log").read_text()
    return {
        "state": about["JobState"],
        "restarts": int(about["Restarts"]),
        "stopped_after": logged,
        "at_checkpoint": stopped["status"] == "stopped" and newest_checkpoint(out, logged),
        "resumed": f"start 1: resume {out}" in said,
    }


def newest_checkpoint(out: Path, step: int) -> bool:
    """Whether there was a checkpoint of this step when the job stopped."""
    return f"step-{step:06d}" in {path.name for path in (out / "checkpoints").iterdir()}


def requeued(cluster: Cluster, out: Path) -> dict[str, Any]:
    job = submitted(cluster, out, "one_node.sbatch")
    cluster.command("scontrol", "requeue", job)
    return stopped_and_resumed(cluster, out, job, lambda: None)


def preempted(cluster: Cluster, out: Path, partition: str = "low") -> dict[str, Any]:
    job = submitted(cluster, out, "one_node.sbatch", f"--partition={partition}")
    urgent = cluster.submit("--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1", cwd=out)
    ended = lambda: cluster.state(urgent) == "COMPLETED"  # noqa: E731
    return stopped_and_resumed(cluster, out, job, lambda: wait_until(ended, "the urgent job", WAIT_S))


def noticed(cluster: Cluster, out: Path) -> dict[str, Any]:
    return preempted(cluster, out, "noticed")


def warned(cluster: Cluster, out: Path) -> dict[str, Any]:
    job = submitted(cluster, out, "one_node.sbatch")
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    return stopped_and_resumed(cluster, out, job, lambda: None)


def killed(cluster: Cluster, out: Path) -> dict[str, Any]:
    """At any point of a step: there is no time for a checkpoint."""
    job = submitted(cluster, out, "one_node.sbatch")
    cluster.command("scontrol", "requeue", job)
    kill([*processes_of(out, "learner"), *processes_of(out, "actor")])
    return stopped_and_resumed(cluster, out, job, lambda: None)


def array(cluster: Cluster, out: Path) -> dict[str, Any]:
    learner = cluster.submit(
        f"--output={out}-%j.log", SCRIPTS / "learner.sbatch", out, "embedded", *sets(SIZES), cwd=ROOT
    )
    actors = cluster.submit(
        "--array=0-1", f"--output={out}-%A-%a.log", SCRIPTS / "actors.sbatch", out, learner, cwd=ROOT
    )
    wait_until(lambda: helped(out) == 2, "orders that the array filled", WAIT_S)
    before = num_rows(out)
    cluster.command("scontrol", "requeue", learner)
    figures = stopped_and_resumed(cluster, out, learner, lambda: None)
    cluster.cancel(actors)
    return figures | {"actors_that_helped": helped(out), "requeued_after": before}


def helped(out: Path) -> int:
    """Actors of the array that filled an order."""
    if not (out / "metrics.jsonl").exists():
        return 0
    keys = {key for row in rows(out) for key, value in row.items() if key.endswith("/tokens_per_s") and value}
    return sum(key.startswith("actors/array") for key in keys)


CASES: Mapping[str, Callable[[Cluster, Path], dict[str, Any]]] = {
    case.__name__: case for case in (requeued, preempted, noticed, warned, killed, array)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    chosen = parser.parse_args().only
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(chosen, Path(place)))
