"""Are several actors as fast as their sum? 1, 2, 4 and 8 real processes over real sockets, with engines that sleep.

Plan, dispatcher, journal, keys and encryption of the learner and link, loop and rollout of the actors are the
project's. Engine and scorer are scripted: completions follow from seed, prompt and adapter alone, and an order takes as
long as it sleeps, so that the processor does not decide. The update is a hash over all that was consumed, and its
digest is the next adapter: a group in another place, from another adapter or with another token changes the last one.

    share of linear    orders a second over (number of actors x orders a second of one); of unequal actors, over the sum
                       of what each could do alone
    hash               the last adapter at max_lag = 0: one for any number of actors

    python -m benchmarks.actors [--steps 4] [--prompts 64] [--latency-s 0.2]
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actor.engines.engine import Completion, Progress
from actor.link import Link
from actor.loop import serve
from actor.rollout import Rollout
from benchmarks.machine import write_result
from learner.curriculum.curriculum import Shuffled
from learner.durable.journal import Journal
from learner.durable.recorder import JournalRecorder
from learner.objective.batch import flat
from learner.objective.judged import Admission
from learner.orders.dispatch import Dispatcher
from learner.orders.plan import StepPlan
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.endpoint import local_endpoint
from protocol.messages import FilledOrder, GroupOrder, Sampling, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from shared.config.load import resolve
from shared.config.tree import Config
from shared.process.lease import NoLease
from tests.support.fakes import (
    CHECK,
    RULES,
    ScriptedEngine,
    ScriptedScorer,
    hello_of,
    scripted_identity,
    spelled,
    toy_policy,
    toy_tasks,
)

COUNTS = (1, 2, 4, 8)
UNEQUAL = (1.0, 1.5, 2.0, 3.0)
"""Latencies of four actors, as multiples."""
WARM_UP = 2
"""Steps in which the learner measures its actors."""
WAIT_S = 60.0
WELCOME = Welcome(run_id="actors", heartbeat_s=1.0, silence_s=WAIT_S, mark=0)


class SleepingEngine(ScriptedEngine):
    """As scripted, after a while for each group."""

    def __init__(self, latency_s: float) -> None:
        super().__init__()
        self.latency_s = latency_s

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        self.filled, self.installed = [], []
        time.sleep(self.latency_s * len(groups))
        return super().generate(groups, sampling, progress)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--latency-s", type=float, default=0.2)
    args = parser.parse_args()
    base = args.latency_s
    cases = {f"{count} equal": [base] * count for count in COUNTS}
    cases["4 unequal"] = [base * multiple for multiple in UNEQUAL]
    found = {name: measured(latencies, args.steps, args.prompts) for name, latencies in cases.items()}
    figures = {
        "latency_s": base,
        "steps": args.steps,
        "orders_a_step": args.prompts,
        "unequal_latencies": UNEQUAL,
        "crews": with_shares(found, cases, base),
        "hashes": sorted({one["hash"] for one in found.values()}),
    }
    print(json.dumps(figures, indent=2))
    print(write_result("actors", figures))


def with_shares(
    found: Mapping[str, dict[str, Any]], cases: Mapping[str, Sequence[float]], base: float
) -> dict[str, Any]:
    """Each with its share of what its actors could do alone, as one of them did."""
    alone = found["1 equal"]["orders_per_s"]
    return {
        name: one
        | {"share_of_linear": round(one["orders_per_s"] / sum(alone * base / each for each in cases[name]), 4)}
        for name, one in found.items()
    }


def measured(latencies: Sequence[float], steps: int, prompts: int) -> dict[str, Any]:
    """latencies: of each actor."""
    names = [f"actor{number}" for number in range(len(latencies))]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "keys").mkdir(mode=0o700)
        create_keys(folder / "keys", names)
        # Forked before the learner has a thread or a socket: what is imported need not be imported again.
        context = multiprocessing.get_context("fork")
        actors = [
            context.Process(target=act, args=(folder, name, each)) for name, each in zip(names, latencies, strict=True)
        ]
        for actor in actors:
            actor.start()
        try:
            return learn(folder, len(latencies), steps, prompts)
        finally:
            for actor in actors:
                actor.join(WAIT_S)
                actor.kill()


def act(folder: Path, name: str, latency_s: float) -> None:
    """An actor's process."""
    port = ZmqActorPort(local_endpoint(folder), load_actor_key(folder / "keys" / f"{name}.json"))
    link = Link(port, "the learner", name, scripted_identity(), credits=2, rules_digest=RULES)
    link.join(WAIT_S)
    serve(link, Rollout(SleepingEngine(latency_s), ScriptedScorer(), NoLease(), spelled))
    port.close()


def learn(folder: Path, num_actors: int, steps: int, prompts: int) -> dict[str, Any]:
    """The learner's process, without a model."""
    rollout = {"prompts": prompts, "group": 4, "max_new_tokens": 16, "groups_per_order": 1}
    config = resolve({"rollout": rollout, "run": {"steps": WARM_UP + steps}})
    port = ZmqLearnerPort(local_endpoint(folder), load_learner_keys(folder / "keys"), allowance=float("inf"))
    journal = Journal.open(folder / "journal")
    recorder = JournalRecorder(journal, 0, Admission.of(config.verifier, config.reward))
    dispatcher = Dispatcher(port, recorder, hello_of(scripted_identity()), WELCOME, CHECK)
    while len(dispatcher.peers.by_address) < num_actors:
        dispatcher.pump(0.1)
    try:
        return train(config, dispatcher, steps, prompts)
    finally:
        dispatcher.end_run(WAIT_S)
        port.close()
        journal.close()


def train(config: Config, dispatcher: Dispatcher, steps: int, prompts: int) -> dict[str, Any]:
    tasks = toy_tasks(prompts)
    plan = StepPlan(config, tasks, Shuffled(len(tasks), config.run.seed), dispatcher)
    adapter, started, cpu = b"adapter of version 0", 0.0, 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started, cpu = time.monotonic(), processor_s()
        dispatcher.publish(toy_policy(step, adapter), oldest_needed=step)
        plan.order_ahead(version=step)
        adapter = updated(adapter, plan.collect(step).filled)
    wall_s = time.monotonic() - started
    report = dispatcher.peers.report()
    return {
        "orders_per_s": round(steps * prompts / wall_s, 3),
        "step_s": round(wall_s / steps, 4),
        "learner_cpu_share": round((processor_s() - cpu) / wall_s, 4),
        "limited": report.limited,
        "hash": hashlib.sha256(adapter).hexdigest(),
    }


def updated(adapter: bytes, filled: Sequence[FilledOrder]) -> bytes:
    chain = hashlib.sha256(adapter)
    for group in flat(filled):
        chain.update(group.group_id.encode() + group.completion_ids.tobytes() + repr(group.scores).encode())
    return chain.digest()


def processor_s() -> float:
    """Of this process."""
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    main()
