"""How many actors can one learner serve, what breaks first, and what does a group cost it?

    python -m benchmarks.scale_sim [--rounds 5] [--only alone] [--quick]     results/scale_sim.json, .svg, _memory.svg

Dispatcher, journal, codec, checks and the building of orders are the project's and work on a real disk; the actors are
simulated (simulated_actors.py has their distributions, simulated_learner.py the rest). A group is eight completions of
a stated mean length, with log-probs and entropies, after a prompt of 100 tokens.

    alone    1,000 actors that have every answer ready: how fast messages are decoded, checked, journaled (one fsync for
             all that came together) and acknowledged. Orders are given out beforehand, outside of that time
    actors   1 to 10,000 actors that take ten seconds an order, hang, die and come back; steps of one order an actor,
             ordered one step ahead (max_lag = 1), and an update that takes UPDATE_S
    memory   1,000 actors for many steps, with a journal that is kept short: resident memory over time
    publish  one more version of 35 MB for all of them

Asked: TARGET groups a second alone, and a memory that does not grow.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import curves
from benchmarks.bars import picture
from benchmarks.machine import RESULTS, write_result
from benchmarks.simulated_actors import EACH_FACTOR, HANG, HANG_SHARE, OWN_FACTOR, Load
from benchmarks.simulated_learner import GROUPS, LAG, PROMPT, SAMPLES, Bench

TARGET = 20_000
ACTORS = (1, 10, 100, 1000, 10_000)
UPDATE_S = 5.0
MOST_GROUPS = 16_000
"""Of a round; all of them are in memory."""
ADAPTER_MB = 35
MIB = 2**20
TITLE = "Learner's time for a group of 8 completions, in microseconds, by number of actors"
MEMORY_TITLE = "Resident memory in MB after each step of 8,000 groups by 1,000 actors"


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
        "resident_mb": round(psutil.Process().memory_info().rss / MIB),
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
        "mb_of_each_step": [round(one, 1) for one in found],
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


def alone_of_all(rounds: int, quick: bool) -> list[dict[str, Any]]:
    shapes = [(64, 1), (64, 8), (64, 32), (256, 8)]
    return [in_a_folder(partial(alone, tokens=each, groups_per_order=size, rounds=rounds)) for each, size in shapes]


def steps_of_all(rounds: int, quick: bool) -> dict[str, Any]:
    counts = ACTORS[:3] if quick else ACTORS
    return {
        f"{one:,}": in_a_folder(partial(steps, actors=one, num_steps=min(rounds, most_steps(one)))) for one in counts
    }


def most_steps(actors: int) -> int:
    return 2 if actors > 1000 else 6


def publish_to_all(rounds: int, quick: bool) -> list[dict[str, Any]]:
    return [in_a_folder(partial(published, actors=one)) for one in ACTORS[: 2 if quick else 4]]


def memory_over_time(rounds: int, quick: bool) -> dict[str, Any]:
    return in_a_folder(partial(memory, num_steps=4 if quick else 8 * rounds))


PARTS = {"alone": alone_of_all, "memory": memory_over_time, "publish": publish_to_all, "steps": steps_of_all}


def measured(part: str, rounds: int, quick: bool) -> dict[str, Any]:
    """One part, with what its figures depend on besides the code."""
    began, load = time.monotonic(), os.getloadavg()[0]
    found = PARTS[part](rounds, quick)
    print(json.dumps({part: found}), flush=True)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rounds": rounds,
        "load_before": round(load, 1),
        "took_s": round(time.monotonic() - began),
        "found": found,
    }


def draw(figures: dict[str, Any]) -> None:
    """The pictures of what was measured."""
    if "steps" in figures:
        bars = {name: one["us_a_group_by_part"] for name, one in figures["steps"]["found"].items()}
        (RESULTS / "scale_sim.svg").write_text(picture(TITLE, bars))
    if "memory" in figures:
        line = {"learner and simulation together": figures["memory"]["found"]["mb_of_each_step"]}
        (RESULTS / "scale_sim_memory.svg").write_text(curves.picture(MEMORY_TITLE, "step", line))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and actors; writes no result")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement, and steps at most")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; the result keeps the others")
    args = parser.parse_args()
    file = RESULTS / "scale_sim.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    found = {part: measured(part, 1 if args.quick else args.rounds, args.quick) for part in args.only or PARTS}
    if args.quick:
        return 0
    figures = stated() | {part: (known | found)[part] for part in PARTS if part in known | found}
    if "alone" in figures:
        best = max(one["groups_per_s"] for one in figures["alone"]["found"])
        figures["target"] = {"groups_per_s": TARGET, "reached": best >= TARGET}
    draw(figures)
    print(write_result("scale_sim", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
