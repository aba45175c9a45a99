"""What it costs the learner's steps to publish a large adapter to many actors.

    python -m benchmarks.publishing [--actors 64] [--mb 35] [--pairs 6] [--step-s 15]     writes results/publishing.json
    python -m benchmarks.publishing --machines 8                            writes results/publishing_8_machines.json

A learner computes real updates of the embedded model, always the same ones, as many as take about `step-s` seconds. Its
dispatcher serves 64 actors over TCP, which are real ports and links in a few processes. Each pair has two steps:

    without   orders for all actors, of a version that they have
    with      a new version of 35 MB, and orders for all actors that name it

Both count from the first order to the end of the updates. The actors stand for other machines, so they and ZeroMQ's own
thread have one core, the actors at the lowest priority, and the learner's thread has the other. Asked: the median over
pairs of with / without is at most MOST. --machines: so many share the actors, and those of one machine pass adapters on
to each other; else each actor has a machine of its own. `sending_s` is what the learner's other threads, ZeroMQ's above
all, compute more for a version.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from actor.link import Link
from actor.passed_on import PassedOn
from benchmarks.gauges import gauges
from benchmarks.machine import write_result
from launch.commands.in_process import LocalFiller, local_actor
from launch.presets.load import load_config
from learner.objective.batch import StepBatch
from learner.objective.judged import collected
from learner.orders.dispatch import Dispatcher
from learner.orders.plan import judge_of
from learner.update.update import Update
from learner.wiring import build_trainer, load_model
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.messages import Policy, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from shared.config.tree import Config
from tests.support.fakes import CHECK, RULES, filled, hello_of, scripted_identity, toy_orders
from tests.support.live_run import OnceRecorder

MOST = 1.02
PROCESSES = 4
WAIT_S = 300.0
SETTINGS = ("eval.problems=0", "compute.learner_threads=1", "compute.actor_threads=1", "rollout.prompts=8")
LEARNER_CORE, OTHER_CORE = 0, 1


def act(endpoint: str, keys: Path, names: Mapping[str, Path | None]) -> None:
    """Some actors, each in a thread, on the core that is not the learner's."""
    os.sched_setaffinity(0, {OTHER_CORE})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    threads = [threading.Thread(target=serve, args=(endpoint, keys, *item), daemon=True) for item in names.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(endpoint: str, keys: Path, name: str, machine: Path | None) -> None:
    """Fill orders at once, with made-up numbers."""
    port = ZmqActorPort(endpoint, load_actor_key(keys / f"{name}.json"), silence_s=WAIT_S)
    passes = PassedOn(machine) if machine else None
    link = Link(port, endpoint, name, scripted_identity(), credits=2, rules_digest=RULES, passed_on=passes)
    link.join(WAIT_S)
    while work := link.next_order():
        link.deliver(filled(*work))
    port.close()


def one_batch(config: Config) -> tuple[Update, StepBatch]:
    """A step of the embedded model that can be applied again and again."""
    model = load_model(config)
    with local_actor(config) as actor:
        from learner.quarantine.quarantine import keep_nowhere
        from learner.wiring import build_learner

        filler = LocalFiller(actor.rollout)
        learner = build_learner(model, filler, keep_nowhere)
        filler.publish(learner.state.publisher.versions[0].message, oldest_needed=0)
        learner.state.plan.order_ahead(version=0)
        found = learner.state.plan.collect(0)
    trainer = build_trainer(model.policy, config, lambda: None)
    batch = trainer.batches.build(1, collected(found.filled, judge_of(config)))
    assert not batch.on_policy and batch.used
    return trainer.update, batch


class Bench:
    """The learner's end."""

    def __init__(self, actors: int, machines: int, mb: int, folder: Path) -> None:
        """machines: that share the actors; 0 for one each."""
        self.names = [f"actor{number}" for number in range(actors)]
        self.homes = [folder / f"machine{number % machines}" if machines else None for number in range(actors)]
        create_keys(folder / "keys", self.names)
        # Threads that are started here inherit the core: ZeroMQ's, and those that watch keys and connections.
        os.sched_setaffinity(0, {OTHER_CORE})
        self.port = ZmqLearnerPort("tcp://127.0.0.1:*", load_learner_keys(folder / "keys"))
        os.sched_setaffinity(0, {LEARNER_CORE})
        welcome = Welcome(run_id="publishing", heartbeat_s=2.0, silence_s=WAIT_S, mark=0)
        self.recorder = OnceRecorder()
        self.dispatcher = Dispatcher(self.port, self.recorder, hello_of(scripted_identity()), welcome, CHECK)
        self.adapter = np.random.default_rng(0).integers(0, 256, mb * 10**6, dtype=np.uint8)
        self.step = self.version = 0
        homes = list(zip(self.names, self.homes, strict=True))
        self.processes = [self.start(folder / "keys", dict(homes[part::PROCESSES])) for part in range(PROCESSES)]

    def start(self, keys: Path, names: Mapping[str, Path | None]) -> BaseProcess:
        process = multiprocessing.get_context("spawn").Process(
            target=act, args=(self.port.endpoint, keys, names), daemon=True
        )
        process.start()
        return process

    def all_join(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.dispatcher.peers.by_address) < len(self.names):
            self.dispatcher.pump(0.1)
            assert time.monotonic() < deadline, "not all actors have joined"

    def publish(self) -> None:
        """Another version; its bytes are no adapter."""
        self.version += 1
        self.adapter[:8] = np.frombuffer(np.int64(self.version).tobytes(), np.uint8)
        adapter = self.adapter.copy()
        nothing = np.zeros(0, np.int32)
        policy = Policy(
            version=self.version,
            adapter=adapter,
            sha256=hashlib.sha256(adapter.tobytes()).hexdigest(),
            canary_ids=nothing,
            canary_logprobs=nothing.astype(np.float32),
        )
        self.dispatcher.publish(policy, oldest_needed=self.version)

    def order(self) -> list[str]:
        """One order for each actor."""
        self.step += 1
        orders = toy_orders(self.step, count=len(self.names), version=self.version)
        self.dispatcher.submit(orders)
        return [order.order_id for order in orders]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.port.close()


def step(bench: Bench, update: Update, batch: StepBatch, repeats: int, *, published: bool) -> dict[str, float]:
    """One step, from its orders to the end of its updates."""
    if published:
        bench.publish()
    start, busy, all_busy = time.perf_counter(), time.thread_time(), time.process_time()
    order_ids = bench.order()
    queued = time.perf_counter()
    for _ in range(repeats):
        update.apply(1, batch)
        bench.dispatcher.pump()
    done, worked = time.perf_counter(), time.thread_time()
    bench.dispatcher.collect(order_ids)
    filled, other_threads = time.perf_counter(), time.process_time() - all_busy - (time.thread_time() - busy)
    bench.recorder.recorded.clear()
    return {
        "step_s": done - start,
        "thread_s": worked - busy,
        "queueing_s": queued - start,
        "all_filled_s": filled - start,
        "other_threads_s": other_threads,
    }


def more_work(pair: Mapping[str, Mapping[str, float]]) -> float:
    """Of the learner's other threads, for a version."""
    return pair["with"]["other_threads_s"] - pair["without"]["other_threads_s"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, default=64)
    parser.add_argument("--machines", type=int, default=0)
    parser.add_argument("--mb", type=int, default=35)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=15.0)
    args = parser.parse_args()
    update, batch = one_batch(load_config("embedded", list(SETTINGS)))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.actors, args.machines, args.mb, Path(folder))
        try:
            bench.publish()
            bench.all_join()
            start = time.perf_counter()
            for _ in range(8):
                update.apply(1, batch)
            repeats = max(1, round(args.step_s / ((time.perf_counter() - start) / 8)))
            step(bench, update, batch, repeats, published=True)
            before_mb = gauges(os.getpid())["rss_mb"]
            pairs: list[dict[str, Any]] = []
            for number in range(args.pairs):
                order = (False, True) if number % 2 else (True, False)
                found = {published: step(bench, update, batch, repeats, published=published) for published in order}
                pairs.append({"without": found[False], "with": found[True]})
                print(pairs[-1], flush=True)
            after_mb = gauges(os.getpid())["rss_mb"]
        finally:
            bench.close()
    ratios = [pair["with"]["step_s"] / pair["without"]["step_s"] for pair in pairs]
    threads = [pair["with"]["thread_s"] / pair["without"]["thread_s"] for pair in pairs]
    figures = {
        "actors": args.actors,
        "machines": args.machines or args.actors,
        "mb": args.mb,
        "updates_a_step": repeats,
        "times_as_long": round(statistics.median(ratios), 4),
        "times_the_thread": round(statistics.median(threads), 4),
        "queueing_s": round(statistics.median(pair["with"]["queueing_s"] for pair in pairs), 4),
        "sending_s": round(statistics.median(more_work(pair) for pair in pairs), 3),
        "more_mb": round(after_mb - before_mb, 1),
        "pairs": pairs,
        "passed": statistics.median(ratios) <= MOST,
    }
    print(write_result(f"publishing_{args.machines}_machines" if args.machines else "publishing", figures))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
