"""From a config to a learner's parts. Heavy imports live here, after arguments and config have been checked.

`load_model` reads what never changes (base, tokenizer, tasks), `build_state` makes what a checkpoint holds, and
`build_parts` what the loop calls. Training and replay use all three; where answers come from (actors or a journal) and
where results go (files or nowhere) is handed in.
"""

from dataclasses import dataclass
from pathlib import Path

from learner.continual.anchor import Anchor
from learner.curriculum.build import build_curriculum
from learner.evaluation.schedule import NO_EVALUATIONS, Schedule
from learner.loop import Parts
from learner.orders.order_check import OrderCheck
from learner.orders.plan import OrderDesk, StepPlan
from learner.quarantine.guard import Guard
from learner.reports.step_report import Ledger
from learner.state import LearnerState
from learner.tasks.tasks import TaskSet, load_tasks
from learner.update.batches import Batches
from learner.update.gradient_check import Norms
from learner.update.optimizer import Optimizer
from learner.update.publisher import Publisher
from learner.update.stage_end import StageEnd
from learner.update.update import Update
from protocol.messages import Hello
from shared.config.load import rules_digest
from shared.config.tree import Config
from shared.model.adapter_file import layout_digest
from shared.model.base_cache import cached_base
from shared.model.canary import canary_ids, canary_of
from shared.model.load import load_policy, pick_device
from shared.model.policy import Policy
from shared.model.prompt import Prompter, load_prompter
from shared.process.determinism import pin_torch
from shared.process.lease import lease_for
from shared.seeding import derive


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is loaded once, before anybody is spoken to."""

    config: Config
    """The resolved configuration."""
    policy: Policy
    """With the adapter as it is at step 0."""
    prompter: Prompter
    """Tokenizer and template."""
    tasks: TaskSet
    """Train and held-out tasks."""

    def expected(self) -> Hello:
        """What every actor of this run must hold."""
        return Hello(
            actor_id="any",
            engine="any",
            base_digest=self.policy.base_digest,
            tokenizer_digest=self.prompter.digest,
            lora_digest=layout_digest(self.policy.adapter),
            rules_digest=rules_digest(self.config.verifier, self.config.rollout),
            mark=0,
            version=None,
            credits=1,
        )

    def order_check(self) -> OrderCheck:
        """What every answer must fit."""
        return OrderCheck.of(self.config.verifier, len(self.policy.head))


def load_model(config: Config) -> Model:
    """Base, tokenizer, tasks, fresh adapter."""
    pin_torch(config.compute.learner_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder)
    policy = load_policy(base, config.model, config.lora, pick_device(config.compute.device))
    policy.adapter.initialise(derive(config.run.seed, "adapter"))
    policy.adapter.requires_grad()
    if config.batch.checkpointing:
        policy.checkpoint_activations()
    tasks = load_tasks(config.tasks, prompter, config.verifier.kind)
    return Model(config=config, policy=policy, prompter=prompter, tasks=tasks)


def build_state(model: Model, desk: OrderDesk) -> LearnerState:
    """Everything with memory, at step 0."""
    config, adapter = model.config, model.policy.adapter
    ids = canary_ids(config.run.seed, len(model.policy.head), config.guard.canary_tokens)
    publisher = Publisher(adapter, lambda: canary_of(model.policy, ids))
    publisher.snapshot(version=0)
    curriculum = build_curriculum(config, model.tasks.train, model.policy.base_digest, model.prompter.digest)
    return LearnerState(
        config,
        publisher,
        Optimizer(adapter.parameters(), config.optimizer, config.run.steps),
        Norms(config.guard),
        StepPlan(config, model.tasks.train, curriculum, desk),
        model.policy.base_digest,
        Anchor(adapter, config.curriculum) if config.curriculum.anchored else None,
    )


def build_parts(
    model: Model,
    state: LearnerState,
    desk: OrderDesk,
    ledger: Ledger,
    lease: Path,
    evaluations: Schedule = NO_EVALUATIONS,
) -> Parts:
    """The loop's parts."""
    anchor = state.anchor
    update = Update(model.policy, state.optimizer, state.norms, model.config, desk.pump, anchor)
    stage_end = StageEnd(state.plan.curriculum.metrics, update, anchor) if anchor else None
    return Parts(
        plan=state.plan,
        desk=desk,
        batches=Batches(model.config, update, stage_end),
        guard=Guard(update, ledger.books, model.config),
        publisher=state.publisher,
        ledger=ledger,
        lease=lease_for(model.config.compute, model.policy.device.type, lease),
        evaluations=evaluations,
    )
