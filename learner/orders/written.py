"""Orders of a warm start: filled at once with answers that somebody wrote, so that the loop is that of a run.

    submit(order) -> journal's record of it, or its answers -> journal -> fsync -> collect()

An answer stands in for a completion: one in each group, its outcome is `correct`, its log-probs are 0 (who wrote it was
sure). Journal, checkpoints, resume, replay, guard and quarantine see no difference. The objective (loss.kind = "sft")
reads neither outcome nor log-probs. Versions and evaluations go to the actors, if the run has any.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from learner.orders.orders import Recorder
from learner.orders.plan import OrderFiller
from learner.tasks.written_answers import EXAMPLE
from protocol.messages import FilledOrder, Finish, Group, GroupOrder, Order, Outcome, Policy, Timings
from shared.config.named_rewards import name_of

NO_TIME = Timings(
    wait_s=0.0,
    swap_s=0.0,
    rollout_s=0.0,
    verify_s=0.0,
    memory_mb=0.0,
    card_allocated_mb=0.0,
    card_reserved_mb=0.0,
    card_driver_mb=0.0,
)


class WrittenOrders:
    """An OrderFiller for training; `link` is the one for evaluations."""

    def __init__(
        self, answers: Sequence[np.ndarray], rewards: Iterable[str], link: OrderFiller, recorder: Recorder
    ) -> None:
        """answers: [T] int32 each, by the number of the example. rewards: those of the configuration; every
        group has a value for each."""
        self.answers = answers
        self.rewards = {name_of(reward): (0.0,) for reward in rewards}
        self.link = link
        self.recorder = recorder
        self.digests: dict[int, str] = {}
        self.filled: dict[str, FilledOrder] = {}

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        self.digests[policy.version] = policy.sha256
        self.link.publish(policy, oldest_needed)

    def submit(self, orders: Iterable[Order]) -> None:
        for order in orders:
            recorded = self.recorder.find(order)
            if recorded is None:
                recorded = self.written(order)
                self.recorder.record([recorded])
            self.filled[order.order_id] = recorded

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        return [self.filled.pop(order_id) for order_id in order_ids]

    def pump(self, timeout_s: float = 0.0) -> None:
        self.link.pump(timeout_s)

    def written(self, order: Order) -> FilledOrder:
        return FilledOrder(
            order_id=order.order_id,
            policy_version=order.policy_version,
            adapter_sha256=self.digests[order.policy_version],
            groups=tuple(self.group(group) for group in order.groups),
            timings=NO_TIME,
        )

    def group(self, order: GroupOrder) -> Group:
        answer = self.answers[int(order.columns[EXAMPLE])]
        return Group(
            group_id=order.group_id,
            prompt_ids=order.prompt_ids,
            completion_ids=answer,
            lengths=(len(answer),),
            trained=None,
            logprobs=np.zeros(len(answer), np.float32),
            entropies=None,
            finishes=(Finish.STOP,),
            outcomes=(Outcome.CORRECT,),
            scores=(1.0,),
            rewards=self.rewards,
        )
