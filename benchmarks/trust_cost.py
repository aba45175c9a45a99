"""What the safety checks cost: a step of the embedded preset with everything on against everything off, interleaved in
one run.

    for each step:  on, off, off, on     each from the same adapter and optimizer state, with the same orders

so that a machine that is busy with something else slows both; on a busy one the share of processor time, which leaves
out waiting for disk and scoring workers, says more. Strict turns: the cost is not hidden behind the work of the
other process. trust_arms.py says what is on and off.

Each part is also timed alone, once after each of many steps without any of them. In a step a part runs once, with code
and data that the decoding and the gradients before it have pushed out of the caches: that takes up to twice as long as
the same work in a loop. A checkpoint is such a part too. The learner's threads that watch its connections run in both
arms, so their processor time is measured while nothing else runs, and counts in full as if it delayed the step.

    python -m benchmarks.trust_cost [--steps 40]
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from actor.engines.hf_engine import HFEngine
from actor.verifiers.verdict import ScoreJob
from actor.wiring import build_engine
from benchmarks.machine import write_result
from benchmarks.overhead import exchanging
from benchmarks.trust_arms import Arm, DirectScorer, Off, On
from launch.presets.load import load_config
from learner.durable.checkpoint import CheckpointStore
from learner.durable.state import LearnerState, RunTotals
from learner.objective.judged import collected
from learner.orders.orders import TRAIN_LANE, build_orders
from learner.quarantine.quarantine import keep_nowhere
from learner.wiring import Learner, Model, build_learner, load_model
from protocol.codec import encode, pack
from protocol.messages import Ack, FilledOrder, Order, Policy, Sampling
from shared.base.checksum import BaseChecksum, frozen_sums
from shared.config.tree import Config
from shared.model.adapter_file import adapter_bytes, digest, install_adapter
from shared.model.canary import sequence_logprobs
from shared.process.lease import ComputeLease

WARM = 3
PART_STEPS = 40
IDLE_S = 3.0
RESAMPLES = 2000
Part = Callable[[], float]
"""Does this part of a step once; gives its seconds."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One step."""

    wall_s: float
    """As a user sees it."""
    cpu_s: float
    """Of this process; scoring workers come on top."""


class Bench:
    """One learner's parts, and two arms around them."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.model: Model = load_model(config)
        self.actor = ThreadPoolExecutor(1)
        engine, _ = self.actor.submit(build_engine, config).result()
        assert isinstance(engine, HFEngine)
        self.engine = engine
        self.off = Off(self.model, engine, self.actor)
        self.on = On(self.model, engine, self.actor, folder)
        self.learner: Learner = build_learner(self.model, self.on.dispatcher, keep_nowhere)
        self.state: LearnerState = self.learner.state
        self.version = 0
        self.last: tuple[Policy, Order, FilledOrder] | None = None
        self.pumps = 0
        """Times that the last update looked for messages."""

    def orders(self, step: int) -> list[Order]:
        """The same for every arm but for the version."""
        rollout, tasks = self.config.rollout, self.model.tasks.train
        first = step * rollout.prompts % (len(tasks) - rollout.prompts)
        return build_orders(
            tasks[first : first + rollout.prompts],
            seed=self.config.run.seed,
            lane=TRAIN_LANE,
            step=step,
            first_slot=0,
            samples=rollout.group,
            version=self.version,
            sampling=Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens),
            groups_per_order=rollout.groups_per_order,
        )

    def step(self, arm: Arm, step: int) -> Timed:
        """Publish, sample, score, update."""
        self.version += 1
        learner, judge = self.learner, self.state.plan.judge
        self.pumps = 0
        learner.update.forward_pass.progress = lambda: self.pump(arm)
        wall, cpu = time.perf_counter(), time.process_time()
        policy = arm.publish(self.version)
        orders = self.orders(step)
        filled = arm.collect(orders)
        with arm.lease.hold("learner"):
            batch = learner.batches.build(step, collected(filled, judge))
            if batch.used:
                learner.update.apply(step, batch)
        timed = Timed(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
        if arm is self.on:
            self.last = policy, orders[0], filled[0]
        return timed

    def pump(self, arm: Arm) -> None:
        self.pumps += 1
        arm.pump()

    def again(self, arms: Sequence[Arm], step: int) -> list[Timed]:
        """The same step by each of these arms; the last one's result stays."""
        adapter, moments = adapter_bytes(self.model.policy.adapter), self.state.optimizer.state_bytes()
        done: list[Timed] = []
        for arm in arms:
            install_adapter(self.model.policy.adapter, adapter)
            self.state.optimizer.load_state_bytes(moments)
            done.append(self.step(arm, step))
        return done

    def four(self, step: int) -> tuple[list[Timed], list[Timed]]:
        """On, off, off, on."""
        first, *between, last = self.again((self.on, self.off, self.off, self.on), step)
        return [first, last], between

    def close(self) -> None:
        """Both arms, then the actor's thread."""
        self.on.close()
        self.actor.shutdown()


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    steps = WARM + args.steps
    config = load_config("embedded", ["pipeline.max_lag=0", f"run.steps={steps + PART_STEPS}"])
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(config, Path(name))
        for step in range(WARM):
            bench.four(step)
        rounds = [bench.four(step) for step in range(WARM, steps)]
        parts = part_costs(bench, Path(name), range(steps, steps + PART_STEPS))
        watching = watching_share()
        bench.close()
    figures = compared(rounds, parts.pop("checkpoint") / config.checkpoint.every, watching)
    parts_ms = {part: milliseconds(cost) for part, cost in parts.items()}
    figures |= {"parts_ms": parts_ms | {"sum": milliseconds(sum(parts.values()))}}
    print(json.dumps(figures, indent=2))
    print(write_result("trust_cost", figures))


def compared(rounds: list[tuple[list[Timed], list[Timed]]], checkpoint_s: float, watching: float) -> dict[str, Any]:
    """The better of an arm's two tries counts: what disturbs a try only ever adds. Medians over the rounds.

    checkpoint_s: in each step. watching: share of the time.
    """
    on, off = (np.array([[t.wall_s for t in pair[arm]] for pair in rounds]).min(axis=1) for arm in (0, 1))
    cpu_on, cpu_off = (np.array([[t.cpu_s for t in pair[arm]] for pair in rounds]).min(axis=1) for arm in (0, 1))
    both_s = checkpoint_s + watching * np.median(off)
    return {
        "rounds": len(rounds),
        "load_average": os.getloadavg()[1],
        "off_ms": milliseconds(np.median(off)),
        "on_ms": milliseconds(np.median(on) + both_s),
        "checkpoint_ms_a_step": milliseconds(checkpoint_s),
        "watching_threads_ms_a_step": milliseconds(both_s - checkpoint_s),
        "difference_of_the_arms_ms": milliseconds(np.median(on - off)),
        "share": with_interval((on - off + both_s) / off),
        "share_of_processor_time": with_interval((cpu_on - cpu_off + both_s) / cpu_off),
    }


def with_interval(shares: np.ndarray) -> dict[str, float]:
    """The median, and the interval of 95 % of the medians of resampled rounds."""
    draws = np.random.default_rng(0).integers(0, len(shares), (RESAMPLES, len(shares)))
    low, high = np.quantile(np.median(shares[draws], axis=1), [0.025, 0.975])
    return {"median": round(float(np.median(shares)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def part_costs(bench: Bench, folder: Path, steps: Iterable[int]) -> dict[str, float]:
    """Median seconds of each part, each done once after each of these steps without any."""
    assert bench.last is not None
    policy, order, filled_order = bench.last
    (folder / "wire").mkdir()
    with exchanging(folder / "wire", (policy, order), filled_order, Ack(order_id=order.order_id)) as exchange:
        parts = {
            **learner_parts(bench),
            **actor_parts(bench),
            "messages over the encrypted socket": lambda: timed(exchange),
            "checkpoint": checkpoint_part(bench, folder / "checkpoints"),
        }
        times: dict[str, list[float]] = {name: [] for name in parts}
        for step in steps:
            bench.again([bench.off], step)
            for name, part in parts.items():
                times[name].append(part())
    return {name: float(np.median(found)) for name, found in times.items()}


def learner_parts(bench: Bench) -> dict[str, Part]:
    """What the learner does, on the messages of the last step."""
    assert bench.last is not None
    policy, order, filled_order = bench.last
    on, data = bench.on, policy.adapter.tobytes()

    def record() -> None:
        on.journal.append(pack(encode(filled_order)))
        on.journal.sync()

    def pump_all() -> None:
        for _ in range(bench.pumps):
            on.pump()

    return {
        "canary, learner": lambda: timed(lambda: sequence_logprobs(bench.model.policy, policy.canary_ids)),
        "digest, learner": lambda: timed(lambda: digest(data)),
        "check of the filled order": lambda: timed(lambda: on.dispatcher.check.fault(order, policy, filled_order)),
        "journal with fsync": lambda: timed(record),
        "lease, learner": lambda: timed(lambda: hold(on.lease, "learner")),
        "messages looked for during the update": lambda: timed(pump_all),
    }


def actor_parts(bench: Bench) -> dict[str, Part]:
    """What the actor does, in its thread."""
    assert bench.last is not None
    policy, order, filled_order = bench.last
    on, jobs = bench.on, scored_jobs(bench, order, filled_order)

    def in_actor(work: Callable[[], object]) -> float:
        return bench.actor.submit(timed, work).result()

    def workers() -> float:
        in_workers = in_actor(lambda: on.actor_side.scorer.score(jobs, lambda: None))
        return in_workers - in_actor(lambda: DirectScorer().score(jobs, lambda: None))

    return {
        "lease, actor": lambda: in_actor(lambda: hold(on.lease, "actor")),
        "digest, actor": lambda: in_actor(lambda: digest(policy.adapter.tobytes())),
        "check of the base": lambda: in_actor(bench.engine.base.check),
        "canary, actor": lambda: in_actor(lambda: bench.engine.logprobs(policy.canary_ids)),
        "verifier in workers, beyond calling it": workers,
    }


def hold(lease: ComputeLease, role: str) -> None:
    """Take it and give it back."""
    with lease.hold(role):
        pass


def scored_jobs(bench: Bench, order: Order, filled_order: FilledOrder) -> list[ScoreJob]:
    """What the verifier saw in that step."""
    text = bench.model.prompter.text
    jobs: list[ScoreJob] = []
    for asked, group in zip(order.groups, filled_order.groups, strict=True):
        for ids in np.split(group.completion_ids, np.cumsum(group.lengths)[:-1]):
            completion = text(ids.tolist())
            jobs.append(
                ScoreJob(
                    prompt="",
                    completion=completion,
                    completion_ids=ids.tolist(),
                    truncated=False,
                    columns=asked.columns,
                )
            )
    return jobs


def checkpoint_part(bench: Bench, folder: Path) -> Part:
    """One checkpoint, durable, after a look at the base."""
    store = CheckpointStore(folder, bench.config.checkpoint.keep)
    base = BaseChecksum(lambda: frozen_sums(bench.model.policy))
    steps = count(1)

    def save() -> None:
        base.check()
        store.save(bench.state.to_save(step, RunTotals()))

    def part() -> float:
        nonlocal step
        step = next(steps)
        # A run has it already: it was published.
        bench.state.publisher.snapshot(step)
        bench.state.publisher.forget_before(step)
        return timed(save)

    step = 0
    return part


def watching_share() -> float:
    """Processor time of this process while it only waits, as a share of the time."""
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def milliseconds(seconds: Any) -> float:
    """Rounded."""
    return round(1e3 * float(seconds), 3)


if __name__ == "__main__":
    main()
