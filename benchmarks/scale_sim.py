"""How many actors can one learner serve, what breaks first, and what does a group cost it?

    python -m benchmarks.scale_sim [--rounds 5] [--quick] [--profile 1000]     results/scale_sim.json and .svg

Dispatcher, journal, codec, checks and the building of orders are the project's and work on a real disk; the actors are
simulated (simulated_actors.py has their distributions). A group is eight completions of a stated mean length, with
log-probs and entropies, after a prompt of 100 tokens.

    alone    1,000 actors that have every answer ready: how fast messages are decoded, checked, journaled (one fsync for
             all that came together) and acknowledged. Orders are given out beforehand, outside of that time
    actors   1 to 10,000 actors that take ten seconds an order, hang, die and come back; steps of one order an actor,
             ordered one step ahead (max_lag = 1), and an update that takes UPDATE_S
    memory   1,000 actors for many steps, with a journal that is kept short: resident memory over time
    publish  one more version of 35 MB for all of them

Asked: TARGET groups a second alone, and a memory that does not grow.
"""

import argparse
import cProfile
import gc
import json
import pstats
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bars import picture
from benchmarks.machine import RESULTS, write_result
from benchmarks.simulated_actors import (
    EACH_FACTOR,
    HANG,
    HANG_SHARE,
    HEARTBEAT_S,
    OWN_FACTOR,
    SILENCE_S,
    VOCABULARY,
    Clock,
    Load,
    SimulatedPort,
)
from learner.durable.journal import Journal
from learner.durable.recorder import JournalRecorder
from learner.objective.judged import admit
from learner.orders.dispatch import Dispatcher
from learner.orders.order_check import OrderCheck
from learner.orders.orders import build_orders
from learner.tasks.tasks import Task
from learner.update.publisher import policy_message
from protocol.messages import FilledOrder, Order, Policy, Sampling, Welcome
from shared.config.load import resolve
from tests.support.fakes import hello_of, scripted_identity

TARGET = 20_000
ACTORS = (1, 10, 100, 1000, 10_000)
SAMPLES, PROMPT, GROUPS = 8, 100, 8
"""Completions of a group, tokens of a prompt, groups of an order."""
LATE_S, UPDATE_S, PUMP_EVERY_S = 120.0, 5.0, 0.05
LAG = 1
MOST_GROUPS = 16_000
"""Of a round; all of them are in memory."""
ADAPTER_MB = 35
WELCOME = Welcome(run_id="scale", heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S, mark=0)
MIB = 2**20
TITLE = "Learner's time for a group of 8 completions, in microseconds, by number of actors"


class TimedJournal:
    """The real journal; the time of its syncs and its bytes are noted."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.journal = journal
        self.clock = clock
        self.bytes = self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.journal, name)

    def append(self, *parts: bytes) -> None:
        self.bytes += sum(map(len, parts))
        self.end_sync()
        with self.clock.counts("write"):
            self.journal.append(*parts)

    def sync(self) -> None:
        self.syncs += 1
        with self.clock.waits("fsync"):
            self.journal.sync()

    def begin_sync(self) -> None:
        self.syncs += 1
        self.journal.begin_sync()

    def end_sync(self) -> None:
        with self.clock.waits("fsync"):
            self.journal.end_sync()


class TimedCheck:
    """The real check."""

    def __init__(self, clock: Clock) -> None:
        self.check = OrderCheck(vocabulary=VOCABULARY, rewards=frozenset(), built_in=True)
        self.clock = clock

    def fault(self, order: Order, policy: Policy, filled: FilledOrder) -> str:
        with self.clock.counts("check"):
            return self.check.fault(order, policy, filled)


class Bench:
    """A learner without a model, and its actors."""

    def __init__(self, folder: Path, load: Load, groups_per_order: int = GROUPS, adapter_mb: float = 1.0) -> None:
        self.load = load
        self.groups_per_order = groups_per_order
        self.clock = Clock()
        self.port = SimulatedPort(load, self.clock)
        config = resolve({})
        self.journal: Any = TimedJournal(Journal.open(folder), self.clock)
        self.recorder = JournalRecorder(self.journal, 0, partial(admit, verifier=config.verifier, reward=config.reward))
        check: Any = TimedCheck(self.clock)
        expected = hello_of(scripted_identity())
        self.dispatcher = Dispatcher(
            self.port, self.recorder, expected, WELCOME, check, now=self.clock.now, late_s=LATE_S
        )
        self.adapter = np.zeros(round(adapter_mb * 10**6), np.uint8)
        self.published: dict[int, float] = {}
        prompt = np.arange(PROMPT, dtype=np.int32)
        self.tasks = [
            Task(prompt_ids=prompt + number, columns={"question": "How many coins now? " * 8, "answer": str(number)})
            for number in range(64)
        ]

    def publish(self, version: int) -> None:
        with self.clock.stands():
            self.adapter[:8] = np.frombuffer(np.int64(version).tobytes(), np.uint8)
            policy = policy_message(version, self.adapter.tobytes())
        self.dispatcher.publish(policy, oldest_needed=version - LAG)
        self.published[version] = self.clock.now()

    def orders(self, step: int, version: int, count: int) -> list[Order]:
        tasks = [self.tasks[number % len(self.tasks)] for number in range(count * self.groups_per_order)]
        with self.clock.counts("build orders"):
            return build_orders(
                tasks,
                seed=0,
                lane="train",
                step=step,
                first_slot=0,
                samples=SAMPLES,
                version=version,
                sampling=Sampling(temperature=1.0, max_new_tokens=2 * self.load.tokens),
                groups_per_order=self.groups_per_order,
            )

    def all_join(self) -> None:
        while len(self.dispatcher.peers.by_address) < self.load.actors:
            self.dispatcher.pump(0.1)

    def update(self, seconds: float) -> None:
        """The learner computes, and serves its actors meanwhile."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.dispatcher.pump()
            # The pump's own time is part of the update's.
            self.clock.skipped += PUMP_EVERY_S

    def forget(self, step: int) -> None:
        """As after a checkpoint."""
        self.recorder.checkpointed(step)
        self.recorder.forget_before(step)

    def close(self) -> None:
        self.journal.close()


def in_a_folder(work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        return work(Path(place) / "journal")


# --- the learner's side alone


def alone(folder: Path, tokens: int, groups_per_order: int, rounds: int) -> dict[str, Any]:
    """Every round all orders are with the actors first, then all come back at once."""
    load = Load(actors=1000, credits=2, seconds_an_order=0.0, tokens=tokens, delay_s=0.0, mean_life_s=float("inf"))
    bench = Bench(folder, load, groups_per_order)
    bench.publish(0)
    bench.all_join()
    count = min(2 * load.actors, MOST_GROUPS // groups_per_order)
    seconds: list[float] = []
    waited = 0.0
    for step in range(rounds + 1):
        orders = bench.orders(step, 0, count)
        bench.dispatcher.submit(orders)
        if step == 1:  # Actors are trusted once they have filled one.
            bench.clock.parts.clear()
            bench.journal.bytes = bench.journal.syncs = 0
            waited = bench.clock.waited
        before = bench.clock.worked()
        bench.dispatcher.collect([order.order_id for order in orders])
        if step:
            seconds.append(bench.clock.worked() - before)
        with bench.clock.stands():
            bench.forget(step + 1)
            gc.collect()
    bench.close()
    groups = count * groups_per_order
    return {
        "groups_per_order": groups_per_order,
        "mean_tokens_of_a_completion": tokens,
        "journal_bytes_a_group": round(bench.journal.bytes / (rounds * groups)),
        "groups_per_s": round(groups * rounds / sum(seconds)),
        "groups_per_s_of_each_round": [round(groups / one) for one in seconds],
        "cpu_us_a_group": round(1e6 * (sum(seconds) - bench.clock.waited + waited) / (rounds * groups), 1),
        "us_a_group_by_part": parts_of(bench, sum(seconds), rounds * groups, without=("build orders", "send order")),
        "orders_an_fsync": round(rounds * count / bench.journal.syncs, 1),
        "journal_mb_per_s": round(bench.journal.bytes / sum(seconds) / 1e6, 1),
    }


def parts_of(bench: Bench, seconds: float, groups: int, without: Sequence[str] = ()) -> dict[str, float]:
    """Microseconds a group; the rest is the dispatcher's own, with the message for the journal."""
    parts = {name: one for name, one in bench.clock.parts.items() if name not in without}
    parts["dispatcher and recorder"] = seconds - sum(parts.values())
    return {name: round(1e6 * one / groups, 2) for name, one in sorted(parts.items())}


# --- steps with many actors


def steps(folder: Path, actors: int, num_steps: int) -> dict[str, Any]:
    """Of all steps but the first, which has no measured actors."""
    load = Load(actors=actors, credits=2, seconds_an_order=10.0, tokens=64)
    bench = Bench(folder, load)
    bench.publish(0)
    bench.all_join()
    count, ages, waits = actors, [], []
    started = worked = 0.0
    for step in range(num_steps + 1):
        for ahead in range(step, step + LAG + 1) if step == 0 else (step + LAG,):
            bench.dispatcher.submit(bench.orders(ahead, max(0, ahead - LAG), count))
        if step == 1:
            started, worked = bench.clock.now(), bench.clock.worked()
            bench.clock.parts.clear()
        before = bench.clock.now()
        bench.dispatcher.collect([f"train/{step:06d}/u{slot:04d}" for slot in range(0, count * GROUPS, GROUPS)])
        waits.append(bench.clock.now() - before)
        bench.update(UPDATE_S)
        bench.publish(step + 1)
        ages.append(bench.clock.now() - bench.published[max(0, step - LAG)])
        with bench.clock.stands():
            bench.forget(step + 1)
    passed, busy = bench.clock.now() - started, bench.clock.worked() - worked
    groups = num_steps * count * GROUPS
    bench.close()
    return {
        "actors": actors,
        "steps": num_steps,
        "orders_a_step": count,
        "groups_per_s": round(groups / passed, 1),
        "learner_us_a_group": round(1e6 * busy / groups, 1),
        "learner_busy_share": round(busy / passed, 4),
        "us_a_group_by_part": parts_of(bench, busy, groups),
        "deaths": bench.port.deaths,
        "staleness_versions": LAG,
        "age_of_the_policy_s": round(statistics.mean(ages[1:]), 1),
        "waits_for_the_last_order_s": round(statistics.mean(waits[1:]), 1),
    }


def published(folder: Path, actors: int) -> dict[str, Any]:
    """The learner's time for one more version of ADAPTER_MB, beyond that of a small one."""
    found: dict[float, float] = {}
    for mb in (0.001, ADAPTER_MB):
        load = Load(actors=actors, credits=2, seconds_an_order=0.0, tokens=64, delay_s=0.0, mean_life_s=float("inf"))
        bench = Bench(folder.with_name(f"journal-{mb}"), load, adapter_mb=mb)
        bench.publish(0)
        bench.all_join()
        for step in range(3):
            bench.publish(step)
            bench.clock.parts.clear()
            orders = bench.orders(step, step, actors)
            bench.dispatcher.submit(orders)
            found[mb] = bench.clock.parts["send policy"]
            bench.dispatcher.collect([order.order_id for order in orders])
        bench.close()
    return {
        "actors": actors,
        "mb": ADAPTER_MB,
        "s": round(found[ADAPTER_MB], 4),
        "of_a_small_one_s": round(found[0.001], 4),
    }


def memory(folder: Path, num_steps: int) -> dict[str, Any]:
    """Resident memory after each step, of learner and simulation together."""
    load = Load(actors=1000, credits=2, seconds_an_order=10.0, tokens=64)
    bench, process = Bench(folder, load), psutil.Process()
    bench.publish(0)
    bench.all_join()
    found: list[float] = []
    for step in range(num_steps):
        orders = bench.orders(step, step, 1000)
        bench.dispatcher.submit(orders)
        bench.dispatcher.collect([order.order_id for order in orders])
        bench.publish(step + 1)
        with bench.clock.stands():
            bench.forget(step + 1)
            gc.collect()
            found.append(process.memory_info().rss / MIB)
    bench.close()
    later = found[len(found) // 4 :]
    return {
        "groups": num_steps * 1000 * GROUPS,
        "first_mb": round(found[0], 1),
        "after_a_quarter_mb": round(later[0], 1),
        "last_mb": round(found[-1], 1),
        "mb_per_100_000_groups": round(
            float(np.polyfit(np.arange(len(later)), later, 1)[0]) * 1e5 / (1000 * GROUPS), 3
        ),
        "deaths": bench.port.deaths,
    }


# --- results


def stated() -> dict[str, Any]:
    return {
        "group": {"completions": SAMPLES, "prompt_tokens": PROMPT, "entropies": True},
        "actors": {
            "seconds_an_order": 10.0,
            "sigma_of_an_actor": OWN_FACTOR,
            "sigma_of_an_order": EACH_FACTOR,
            "hang": {"share": HANG_SHARE, "times": HANG},
            "delay_s": Load.delay_s,
            "mean_life_s": Load.mean_life_s,
            "down_s": Load.down_s,
        },
        "update_s": UPDATE_S,
    }


def profile(actors: int) -> None:
    """Where the learner's time goes."""
    with cProfile.Profile() as found:
        in_a_folder(partial(steps, actors=actors, num_steps=2))
    pstats.Stats(found).sort_stats("tottime").print_stats(35)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and actors; writes no result")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    parser.add_argument("--profile", type=int, metavar="ACTORS")
    args = parser.parse_args()
    if args.profile:
        profile(args.profile)
        return 0
    rounds, counts, long = (1, ACTORS[:3], 4) if args.quick else (args.rounds, ACTORS, 8 * args.rounds)
    shapes = [(64, 1), (64, 8), (64, 32), (256, 8)]
    figures: dict[str, Any] = stated() | {"alone": [], "steps": {}}
    for tokens, groups in shapes:
        figures["alone"].append(in_a_folder(partial(alone, tokens=tokens, groups_per_order=groups, rounds=rounds)))
        print(json.dumps(figures["alone"][-1]), flush=True)
    figures["memory"] = in_a_folder(partial(memory, num_steps=long))
    print(json.dumps(figures["memory"]), flush=True)
    figures["publish"] = [in_a_folder(partial(published, actors=actors)) for actors in counts if actors <= 1000]
    for actors in counts:
        num_steps = 2 if actors > 1000 else 6
        figures["steps"][f"{actors:,}"] = in_a_folder(partial(steps, actors=actors, num_steps=num_steps))
        print(json.dumps(figures["steps"][f"{actors:,}"]), flush=True)
    figures["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    best = max(one["groups_per_s"] for one in figures["alone"])
    figures["target"] = {"groups_per_s": TARGET, "reached": best >= TARGET}
    if args.quick:
        return 0
    bars = {name: one["us_a_group_by_part"] for name, one in figures["steps"].items()}
    (RESULTS / "scale_sim.svg").write_text(picture(TITLE, bars))
    print(write_result("scale_sim", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
