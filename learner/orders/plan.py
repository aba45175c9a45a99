"""What is sampled, when, and from which version.

    step s is ordered from version max(0, s - max_lag), exactly

so a run is a function of config and seed at any lag: the lag is how many steps are ordered ahead, not how fast an actor
happens to be. Groups that teach nothing may be replaced within the step by orders for further tasks. What is pending is
part of the state, so that a resumed run orders the same tasks again. How many groups a step has may grow with the noise
of the gradient (learner/orders/plan.py); a step that is ordered keeps its number.

How many groups a step samples: a fixed number, or as many as the noise of the gradient asks for.

    smoothed  x <- memory x + (1 - memory) x_step           for spread and signal (learner/update/gradient_noise.py)
    wanted    factor * spread / signal, or max_prompts where signal <= 0
    next      the number now, or more: up to `wanted`, by at most `rate` a step, within max_prompts

It only grows: as a policy gets good its true gradient fades while the noise stays, so the scale rises over a run, and
a single quiet step should not undo that. Numbers follow from the updates alone, so a resumed or replayed run has the
same.
"""

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Protocol

from learner.curriculum.curriculum import Curriculum
from learner.objective.batch import flat, group_teaches
from learner.objective.pass_counts import observed
from learner.orders.orders import TRAIN_LANE, build_orders
from learner.tasks.tasks import Task
from learner.update.figures import Skipped, UpdateStats
from learner.update.gradient_noise import GradientNoise
from protocol.messages import FilledOrder, Order, Policy, Sampling
from shared.config.tree import Config, GrowthConfig


class BatchSize:
    """The number of groups, and what it follows from."""

    def __init__(self, prompts: int, config: GrowthConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.spread = 0.0
        self.signal = 0.0

    def observe(self, noise: GradientNoise) -> None:
        """What an update found."""
        memory = self.config.memory
        self.spread = memory * self.spread + (1 - memory) * noise.spread
        self.signal = memory * self.signal + (1 - memory) * noise.signal
        within_rate = math.ceil(self.prompts * self.config.rate)
        self.prompts = max(self.prompts, min(self.wanted(), within_rate, self.config.max_prompts))

    def wanted(self) -> int:
        """By the noise alone, within the bound."""
        most = self.config.max_prompts
        asked = self.config.factor * self.spread
        return math.ceil(asked / self.signal) if asked < most * self.signal else most

    def state_dict(self) -> dict[str, Any]:
        """As JSON values; a float's shortest form gives the same float back."""
        return {"prompts": self.prompts, "spread": self.spread, "signal": self.signal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.prompts = int(state["prompts"])
        self.spread = float(state["spread"])
        self.signal = float(state["signal"])


class Unfilled(Exception):
    """The learner was asked to stop, and nobody is there whose answer it could wait for."""


class OrderDesk(Protocol):
    """Where orders go and answers come from: the dispatcher, or a journal in a replay."""

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available to sample from."""
        ...

    def submit(self, orders: Iterable[Order]) -> None:
        """Have these filled."""
        ...

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        """Wait for these; Unfilled if that is no use."""
        ...

    def pump(self, timeout_s: float = 0.0) -> None:
        """Keep the link alive while working."""
        ...


class Pending:
    """One step that has been ordered and not yet collected."""

    def __init__(self, step: int, version: int, tasks: list[int]) -> None:
        self.step = step
        self.version = version
        self.tasks = tasks


class StepPlan:
    """Orders steps ahead and collects them in turn."""

    def __init__(self, config: Config, tasks: Sequence[Task], curriculum: Curriculum, desk: OrderDesk) -> None:
        self.config = config
        self.tasks = tasks
        self.curriculum = curriculum
        self.desk = desk
        self.size = BatchSize(config.rollout.prompts, config.growth)
        self.sampling = Sampling(temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)
        self.pending: list[Pending] = []
        self.next_step = 0

    def order_ahead(self, version: int) -> None:
        """Order every step that may be sampled from this version."""
        while self.next_step <= min(version + self.config.pipeline.max_lag, self.config.run.steps - 1):
            self.pending.append(Pending(self.next_step, version, self.curriculum.next(self.size.prompts)))
            self.desk.submit(self.orders(self.pending[-1], first_slot=0))
            self.next_step += 1

    def collect(self, step: int) -> list[FilledOrder]:
        """The answers of a step, replacements included, in slot order. Unfilled leaves the plan as it was."""
        pending = self.pending[0]
        assert pending.step == step
        answers = self.desk.collect([order.order_id for order in self.orders(pending, first_slot=0)])
        tasks, answers = self.replaced(pending, answers)
        self.pending.pop(0)
        self.curriculum.observe(observed(tasks, flat(answers), self.config))
        return answers

    def replaced(self, pending: Pending, answers: list[FilledOrder]) -> tuple[list[int], list[FilledOrder]]:
        """Tasks and answers of a step, with those of further groups for the ones that teach nothing."""
        before = deepcopy(self.curriculum.state_dict()) if self.config.rollout.replacement_rounds else {}
        tasks = pending.tasks
        for _ in range(self.config.rollout.replacement_rounds):
            missing = len(pending.tasks) - sum(group_teaches(g, self.config) for g in flat(answers))
            if missing == 0:
                break
            more = Pending(pending.step, pending.version, self.curriculum.next(missing))
            try:
                answers = answers + self.replace(more, first_slot=len(tasks))
            except Unfilled:
                self.curriculum.load_state_dict(before)
                raise
            tasks = tasks + more.tasks
        return tasks, answers

    def resize(self, stats: UpdateStats | Skipped | None) -> None:
        """After an update that measured the noise of its gradient: steps that are ordered from now on may be larger."""
        if isinstance(stats, UpdateStats) and stats.noise:
            self.size.observe(stats.noise)

    def replace(self, more: Pending, first_slot: int) -> list[FilledOrder]:
        """Further groups for a step, from the same version."""
        orders = self.orders(more, first_slot)
        self.desk.submit(orders)
        return self.desk.collect([order.order_id for order in orders])

    def orders(self, pending: Pending, first_slot: int) -> list[Order]:
        """The same orders whenever they are asked for."""
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
        )

    def oldest_needed(self) -> int:
        """The oldest version that an open order may name."""
        return min([pending.version for pending in self.pending], default=self.next_step)

    def state_dict(self) -> dict[str, Any]:
        """Curriculum, pending steps and their size, as JSON values."""
        pending = [[p.step, p.version, p.tasks] for p in self.pending]
        return {
            "next_step": self.next_step,
            "pending": pending,
            "curriculum": self.curriculum.state_dict(),
            "size": self.size.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; pending steps are submitted again."""
        self.next_step = int(state["next_step"])
        self.pending = [Pending(*entry) for entry in state["pending"]]
        self.curriculum.load_state_dict(state["curriculum"])
        self.size.load_state_dict(state["size"])

    def submit_pending(self) -> None:
        """After a restart: have the pending steps filled, by the journal or an actor."""
        for pending in self.pending:
            self.desk.submit(self.orders(pending, first_slot=0))
