"""What protocol, journal and lease cost, as a share of a training step of the embedded model.

Trains a short run, then takes one real step of it (its policy, its order, its groups) and times each part that would
not exist in a single process: adapter to bytes and digest, the messages over a real encrypted socket, check, journal
with fsync, lease. Medians; bytes of each message beside them.

    python -m benchmarks.overhead [--steps 20] [--repeats 50]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from learner.durable.checkpoint import CheckpointStore
from learner.durable.journal import Journal
from learner.durable.recorder import orders_in, read
from learner.durable.state import ADAPTER
from learner.update.publisher import policy_message
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.codec import encode, pack
from protocol.endpoint import local_endpoint
from protocol.messages import Ack, AnyMessage, FilledOrder, GroupOrder, Order, Policy, Sampling
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from protocol.validate import check_groups
from shared.model.adapter_file import digest
from shared.process.lease import Lease
from shared.run.run_dir import RunDir
from shared.seeding import sample_seeds

WAIT_S = 10.0


def main() -> None:
    """Train, time, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder) / "run", args.steps)
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        step_s = statistics.median(row["time/step_s"] for row in rows)
        costs, sizes = measure(run, Path(folder), args.repeats)
    total = sum(costs.values())
    figures: dict[str, Any] = {
        "step_ms": round(1e3 * step_s, 2),
        "cost_ms": {name: round(1e3 * cost, 3) for name, cost in costs.items()},
        "bytes": sizes,
        "total_ms": round(1e3 * total, 3),
        "share_of_step": round(total / step_s, 4),
    }
    print(json.dumps(figures, indent=2))
    print(write_result("overhead", figures))


def train(folder: Path, steps: int) -> RunDir:
    """A short run of the embedded preset."""
    argv = [sys.executable, "-m", "launch", "run", "embedded", "--out", str(folder), "--steps", str(steps)]
    subprocess.run([*argv, "--set", "eval.problems=0"], check=True, stdout=subprocess.DEVNULL)
    return RunDir.open(folder)


def measure(run: RunDir, folder: Path, repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds of each part, and bytes of each message."""
    filled_order = read(next(iter(orders_in(next(Journal.read(run.journal).records())).values())))
    checkpoint = CheckpointStore(run.checkpoints, keep=1).load_latest()
    assert checkpoint is not None
    policy = policy_message(checkpoint.step, checkpoint.files[ADAPTER])
    order, ack = order_of(filled_order), Ack(order_id=filled_order.order_id)
    journal = Journal.open(folder / "journal")
    lease = Lease(folder / "lease")

    def record() -> None:
        journal.append(pack(encode(filled_order)))
        journal.sync()

    def hold_twice() -> None:
        for role in ("actor", "learner"):
            with lease.hold(role):
                pass

    costs = {
        "digest of the adapter": median(lambda: digest(checkpoint.files[ADAPTER]), repeats),
        "policy, order, groups, ack over the socket": exchange(folder, (policy, order), filled_order, ack, repeats),
        "check of the groups": median(lambda: check_groups(filled_order), repeats),
        "journal with fsync": median(record, repeats),
        "lease, taken twice": median(hold_twice, repeats),
    }
    sizes = {type(m).__name__: sum(len(frame) for frame in encode(m)) for m in (policy, order, filled_order, ack)}
    return costs, sizes


def order_of(filled_order: FilledOrder) -> Order:
    """The order that these groups fill, as large as the real one."""
    orders = tuple(
        GroupOrder(
            group_id=group.group_id,
            prompt_ids=group.prompt_ids,
            columns={"question": "q" * 120, "answer": "12", "level": "2"},
            seeds=sample_seeds(0, "train", 0, slot, len(group.lengths)),
        )
        for slot, group in enumerate(filled_order.groups)
    )
    sampling = Sampling(temperature=1.0, max_new_tokens=64)
    return Order(
        order_id=filled_order.order_id, policy_version=0, sampling=sampling, groups=orders, votes=False, teacher=False
    )


def exchange(folder: Path, there: tuple[Policy, Order], back: FilledOrder, ack: AnyMessage, repeats: int) -> float:
    """Median seconds for one step's messages between two real sockets."""
    with exchanging(folder, there, back, ack) as step:
        return median(step, repeats)


@contextmanager
def exchanging(
    folder: Path, there: tuple[Policy, Order], back: FilledOrder, ack: AnyMessage
) -> Generator[Callable[[], None]]:
    """Two real sockets; each call sends one step's messages from one to the other and back."""
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    create_keys(keys, ["bench"])
    endpoint = local_endpoint(folder)
    learner = ZmqLearnerPort(endpoint, load_learner_keys(keys), allowance=float("inf"))
    actor = ZmqActorPort(endpoint, load_actor_key(keys / "bench.json"))
    actor.send(ack)
    first = learner.receive(WAIT_S)
    assert first is not None
    peer = first[0]

    def step() -> None:
        for message in there:
            learner.send(peer, message)
        for _ in there:
            actor.receive(WAIT_S)
        actor.send(back)
        learner.receive(WAIT_S)
        learner.send(peer, ack)
        actor.receive(WAIT_S)

    try:
        yield step
    finally:
        actor.close()
        learner.close()


def median(work: Callable[[], object], repeats: int) -> float:
    """Of single calls, after one to warm up."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
