"""Which tasks a step samples, when they are ordered, from which version, and how many.

    step s is ordered from version max(0, s - max_lag), exactly

So a run depends on config and seed only, at any lag: the lag is the number of steps that are ordered ahead, not the
speed of an actor. Groups that teach nothing may be replaced within the step by groups of further tasks. Pending steps
are part of the state, so a resumed run orders the same tasks again.

The number of groups of a step is fixed, or grows with the noise of the gradient:

    smoothed  x <- memory x + (1 - memory) x_step           for spread and signal (learner/update/gradient_noise.py)
    wanted    factor * spread / signal, or max_prompts where signal <= 0
    next      max(now, min(wanted, rate * now, max_prompts))

It never shrinks: as a policy gets better its true gradient fades while the noise remains, so the wanted number rises
over a run, and one quiet step should not undo that. It follows from the updates alone, so a resumed or replayed run has
the same numbers. A step that was ordered keeps its number.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from learner.curriculum.curriculum import Curriculum
from learner.objective.judged import Collected, Judge, collected
from learner.orders.orders import TRAIN_LANE, build_orders
from learner.tasks.tasks import Task
from learner.update.figures import StepResult
from learner.update.gradient_noise import GradientNoise
from protocol.messages import FilledOrder, Order, Policy, Sampling
from shared.config.tree import Config, GrowthConfig


class BatchSize:
    """The number of groups of the next step."""

    def __init__(self, prompts: int, config: GrowthConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.spread = 0.0
        self.signal = 0.0

    def observe(self, noise: GradientNoise) -> None:
        memory = self.config.memory
        self.spread = memory * self.spread + (1 - memory) * noise.spread
        self.signal = memory * self.signal + (1 - memory) * noise.signal
        within_rate = math.ceil(self.prompts * self.config.rate)
        self.prompts = max(self.prompts, min(self.wanted(), within_rate, self.config.max_prompts))

    def wanted(self) -> int:
        """The number that the noise asks for, at most max_prompts."""
        most = self.config.max_prompts
        asked = self.config.factor * self.spread
        return math.ceil(asked / self.signal) if asked < most * self.signal else most

    def state_dict(self) -> dict[str, Any]:
        """JSON values; a float's shortest form reads back as the same float."""
        return {"prompts": self.prompts, "spread": self.spread, "signal": self.signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts = int(state["prompts"])
        self.spread = float(state["spread"])
        self.signal = float(state["signal"])


class Unfilled(Exception):
    """The run should stop, and these orders are left to its next start: no actor is connected that could fill them, or
    they are those of an evaluation."""


class OrderFiller(Protocol):
    """Takes orders and returns them filled: the dispatcher, or the journal in a replay."""

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available to sample from."""
        ...

    def submit(self, orders: Iterable[Order]) -> None: ...

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """Wait until these are filled; raises Unfilled if they will not be."""
        ...

    def pump(self, timeout_s: float = 0.0) -> None:
        """Serve the link; to be called during long work."""
        ...


Recheck = Callable[[Sequence[FilledOrder]], bool]
"""Whether one of the actors that filled these lied. If so, it is expelled, and no record of these orders counts."""


def nobody_lied(filled: Sequence[FilledOrder]) -> bool:
    return False


class Pending:
    """A step that was ordered and is not collected yet."""

    def __init__(self, step: int, version: int, tasks: list[int]) -> None:
        self.step = step
        self.version = version
        self.tasks = tasks


def judge_of(config: Config) -> Judge:
    return Judge(
        verifier=config.verifier,
        reward=config.reward,
        max_new_tokens=config.rollout.max_new_tokens,
        compares=config.compares,
    )


class StepPlan:
    """Orders steps ahead of time and collects them in order."""

    def __init__(
        self,
        config: Config,
        tasks: Sequence[Task],
        curriculum: Curriculum,
        filler: OrderFiller,
        recheck: Recheck = nobody_lied,
    ) -> None:
        """recheck: of a collected step."""
        self.recheck = recheck
        self.collected: tuple[Pending, Callable[[], None]] | None = None
        """The last step that was collected, and what takes the curriculum back to before it."""
        self.config = config
        self.tasks = tasks
        self.curriculum = curriculum
        self.filler = filler
        self.judge = judge_of(config)
        self.size = BatchSize(config.rollout.prompts, config.growth)
        self.sampling = Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
        self.pending: list[Pending] = []
        self.next_step = 0

    def order_ahead(self, version: int) -> None:
        """Order every step that may be sampled from this version."""
        while self.next_step <= min(version + self.config.pipeline.max_lag, self.config.run.steps - 1):
            self.pending.append(Pending(self.next_step, version, self.curriculum.next(self.size.prompts)))
            self.filler.submit(self.orders(self.pending[-1], first_slot=0))
            self.next_step += 1

    def collect(self, step: int) -> Collected:
        """The judged groups of a step, replacements included. Unfilled leaves the plan unchanged."""
        pending = self.pending[0]
        assert pending.step == step
        self.collected = pending, self.curriculum.way_back()
        filled = self.filler.collect([order.order_id for order in self.orders(pending, first_slot=0)])
        tasks, found = self.replaced(pending, collected(filled, self.judge))
        self.pending.pop(0)
        self.curriculum.observe(found.pass_counts(tasks))
        return replace(found, tasks=tuple(self.tasks[index] for index in tasks))

    def sample_again(self, filled: Sequence[FilledOrder]) -> bool:
        """Take back the step that was collected last, if its orders have numbers of a liar; it is ordered again."""
        if self.collected is None or not self.recheck(filled):
            return False
        pending, take_back = self.collected
        take_back()
        self.pending.insert(0, pending)
        self.filler.submit(self.orders(pending, first_slot=0))
        return True

    def replaced(self, pending: Pending, found: Collected) -> tuple[list[int], Collected]:
        """Tasks and groups of a step, with replacements for the groups that teach nothing."""
        take_back = self.curriculum.way_back()
        tasks = pending.tasks
        for _ in range(self.config.rollout.replacement_rounds):
            missing = len(pending.tasks) - found.teaching
            if missing == 0:
                break
            more = Pending(pending.step, pending.version, self.curriculum.next(missing))
            try:
                found += self.replace(more, first_slot=len(tasks))
            except Unfilled:
                take_back()
                raise
            tasks = tasks + more.tasks
        return tasks, found

    def resize(self, result: StepResult) -> None:
        """Steps that are ordered from now on may be larger, if the update measured its noise."""
        if result.stats and result.stats.noise:
            self.size.observe(result.stats.noise)

    def replace(self, more: Pending, first_slot: int) -> Collected:
        """Sample further groups for a step, from the same version."""
        orders = self.orders(more, first_slot)
        self.filler.submit(orders)
        return collected(self.filler.collect([order.order_id for order in orders]), self.judge)

    def orders(self, pending: Pending, first_slot: int) -> list[Order]:
        """The orders of a step; every call builds the same ones."""
        return build_orders(
            [self.tasks[index] for index in pending.tasks],
            seed=self.config.run.seed,
            lane=TRAIN_LANE,
            step=pending.step,
            first_slot=first_slot,
            samples=self.config.rollout.group,
            version=pending.version,
            sampling=self.sampling,
            groups_per_order=self.config.rollout.groups_per_order,
            teacher=bool(self.config.teacher.url),
        )

    def oldest_needed(self) -> int:
        """The oldest version that an open order may name."""
        return min([pending.version for pending in self.pending], default=self.next_step)

    def state_dict(self) -> dict[str, Any]:
        pending = [[p.step, p.version, p.tasks] for p in self.pending]
        return {
            "next_step": self.next_step,
            "pending": pending,
            "curriculum": self.curriculum.state_dict(),
            "size": self.size.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Pending steps still have to be submitted, by submit_pending."""
        self.next_step = int(state["next_step"])
        self.pending = [Pending(*entry) for entry in state["pending"]]
        self.curriculum.load_state_dict(state["curriculum"])
        self.size.load_state_dict(state["size"])

    def submit_pending(self) -> None:
        """After a restart: have the pending steps filled, by the journal or by an actor."""
        for pending in self.pending:
            self.filler.submit(self.orders(pending, first_slot=0))
