"""What is sampled, when, and from which version.

    step s is ordered from version max(0, s - max_lag), exactly

so a run is a function of config and seed at any lag: the lag is how many steps are ordered ahead, not how fast an actor
happens to be. Groups that teach nothing may be replaced within the step by orders for further tasks. What is pending is
part of the state, so that a resumed run orders the same tasks again. How many groups a step has may grow with the noise
of the gradient (learner/batch_size.py); a step that is ordered keeps its number.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Protocol

from learner.batch import group_teaches
from learner.batch_size import BatchSize
from learner.curriculum import Curriculum
from learner.guard import Skipped
from learner.observed import observed
from learner.orders import build_orders
from learner.recorder import TRAIN_LANE
from learner.tasks import Task
from learner.update_figures import UpdateStats
from protocol.messages import Group, Groups, Order, Policy, Sampling
from shared.config.tree import Config


class Unanswered(Exception):
    """The learner was asked to stop, and nobody is there whose answer it could wait for."""


class OrderDesk(Protocol):
    """Where orders go and answers come from: the dispatcher, or a journal in a replay."""

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        """Make a version available to sample from."""
        ...

    def submit(self, orders: Iterable[Order]) -> None:
        """Have these filled."""
        ...

    def collect(self, order_ids: Sequence[str]) -> list[Groups]:
        """Wait for these; Unanswered if that is no use."""
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


class Sampler:
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

    def collect(self, step: int) -> list[Groups]:
        """The answers of a step, replacements included, in slot order. Unanswered leaves the sampler as it was."""
        pending = self.pending[0]
        assert pending.step == step
        answers = self.desk.collect([order.order_id for order in self.orders(pending, first_slot=0)])
        tasks, answers = self.replaced(pending, answers)
        self.pending.pop(0)
        self.curriculum.observe(observed(tasks, flat(answers), self.config))
        return answers

    def replaced(self, pending: Pending, answers: list[Groups]) -> tuple[list[int], list[Groups]]:
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
            except Unanswered:
                self.curriculum.load_state_dict(before)
                raise
            tasks = tasks + more.tasks
        return tasks, answers

    def resize(self, stats: UpdateStats | Skipped | None) -> None:
        """After an update that measured the noise of its gradient: steps that are ordered from now on may be larger."""
        if isinstance(stats, UpdateStats) and stats.noise:
            self.size.observe(stats.noise)

    def replace(self, more: Pending, first_slot: int) -> list[Groups]:
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


def flat(answers: Iterable[Groups]) -> list[Group]:
    """All groups, in order."""
    return [group for answer in answers for group in answer.groups]
