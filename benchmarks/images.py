"""Are the images of docker/ built, and does a run end the same in two containers? Real images, real containers.

    TANDEM_TEST_BASE=IMAGE python -m benchmarks.images [--only CASE ...]     needs root, podman and podman-compose

The three images for a CPU are built with the base image that is named; docker/README.md makes one from Debian's
packages, and tests/support/containers.py has what else a machine may need. Each case prepares a run of the embedded
model with the image `cpu` and trains it with the services `learner` and `actor` of docker/compose.yaml:

    trained     from start to end
    stopped     `down` after some steps, and `up` again
    killed      KILL to the actor's container after some steps; its restart policy starts it again

`same` says whether the adapter's hash is that of the same run without containers. `inside` is what a process of each
container is, sees and may write. Results: results/images.json; exit 1 if a hash differs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.machine import write_result
from tests.support.containers import TARGETS, Containers, containers, missing, output
from tests.support.runs import launch, num_rows, rows, summary, wait_until

DISTURBED_AFTER = 3
"""Steps."""
WAIT_S = 600.0


def main(names: list[str], folder: Path) -> int:
    """Build, one run without containers, and the cases one after the other."""
    if reason := missing():
        print(reason)
        return 2
    images = built(Containers(run=folder))
    plain = launch("run", "embedded", "--out", folder / "plain", wait_s=WAIT_S)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    expected = summary(folder / "plain")["adapter_sha256"]
    found: dict[str, Any] = {}
    for name in names:
        found[name] = one_case(folder / name, CASES[name], expected)
        print(name, json.dumps(found[name]), flush=True)
    figures = {
        "podman": output("podman", "--version").split()[-1],
        "preset": "embedded",
        "adapter_sha256": expected,
        "images": images,
        "cases": found,
    }
    print(write_result("images", figures))
    return 0 if all(case["same"] for case in found.values()) else 1


def built(ours: Containers) -> dict[str, Any]:
    """Seconds and size of each image. The first installs the packages; the others find that layer."""
    found: dict[str, Any] = {}
    for service, image in TARGETS.items():
        began = time.monotonic()
        ours.build(service, *(() if found else ("--no-cache",)))
        seconds = time.monotonic() - began
        size = int(output("podman", "image", "inspect", "--format", "{{.Size}}", image))
        found[image] = {"build_s": round(seconds, 1), "size_mb": round(size / 1e6)}
        print(image, json.dumps(found[image]), flush=True)
    return found


def one_case(out: Path, case: Callable[[Containers], dict[str, Any]], expected: str) -> dict[str, Any]:
    with containers(out) as ours:
        ours.prepare()
        began = time.monotonic()
        more = case(ours)
        wall_s = time.monotonic() - began
    done, reward = summary(out), [row["reward/mean"] for row in rows(out)]
    return {
        "same": done["adapter_sha256"] == expected and done["status"] == "done",
        "steps": done["steps"],
        "first_five": round(fmean(reward[:5]), 3),
        "last_five": round(fmean(reward[-5:]), 3),
        **more,
        "wall_s": round(wall_s, 1),
    }


def trained(ours: Containers) -> dict[str, Any]:
    ours.train()
    return {}


def begun(ours: Containers) -> int:
    """In the background; the steps that are logged when it returns."""
    ours.train("-d")
    wait_until(lambda: num_rows(ours.run) >= DISTURBED_AFTER, "steps in containers", WAIT_S)
    return num_rows(ours.run)


def stopped(ours: Containers) -> dict[str, Any]:
    begun(ours)
    inside = {service: ours.look_inside(service) for service in ("learner", "actor")}
    ours.compose("down")
    at, status = num_rows(ours.run), summary(ours.run)["status"]
    checkpoint = f"step-{at:06d}" in {path.name for path in (ours.run / "checkpoints").iterdir()}
    ours.train()
    return {"stopped_after": at, "at_checkpoint": status == "stopped" and checkpoint, "inside": inside}


def killed(ours: Containers) -> dict[str, Any]:
    at = begun(ours)
    ours.kill("actor")
    wait_until(lambda: not ours.state("learner")["State"]["Running"], "the end of the run", WAIT_S)
    return {"killed_after": at, "restarts": ours.state("actor")["RestartCount"]}


CASES: Mapping[str, Callable[[Containers], dict[str, Any]]] = {
    case.__name__: case for case in (trained, stopped, killed)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    chosen = parser.parse_args().only
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(chosen, Path(place)))
