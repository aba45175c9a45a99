"""From a config to the parts of a learner. Heavy imports are here, after arguments and config have been checked.

    load_model     base, tokenizer, tasks: what never changes
    build_trainer  collected groups to a batch to an update; alone where a quarantined batch is reproduced
    build_learner  a trainer and everything else with memory, at step 0; `Learner.parts` is what the loop calls
    build_audit    what checks the actors
    placement_on   who computes and steps what, where a learner has several ranks

Training, replay and tests use the same builder. It is given where filled orders come from (actors or a journal) and
where batches are quarantined; the report decides what is written of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from learner.continual.anchor import Anchor
from learner.curriculum.build import build_curriculum
from learner.curriculum.curriculum import CurriculumFigures
from learner.durable.state import LearnerState
from learner.evaluation.schedule import NO_EVALUATIONS, Schedule
from learner.loop import Parts
from learner.orders.audit import Audit, Check, Draws, LogprobCheck
from learner.orders.audited import AuditedOrders
from learner.orders.order_check import OrderCheck
from learner.orders.plan import OrderFiller, Recheck, StepPlan, nobody_lied
from learner.orders.second_scores import NoScoreCheck, ScoreCheck, SecondScores, can_score_again
from learner.quarantine.guard import Guard, Keep
from learner.reports.step_report import StepReport
from learner.tasks.tasks import Task, TaskSet, load_tasks, told_prompts
from learner.tasks.written_answers import load_written
from learner.update.batches import Batches
from learner.update.budget import NO_NOTES, Attempts, Budget, Notes
from learner.update.forward_pass import ForwardPass
from learner.update.gradient_check import Norms
from learner.update.mismatch import BF16, FP32, NF4_PLUGIN, Gate, Limits
from learner.update.optimizer import Optimizer
from learner.update.placement.divided import divide_base
from learner.update.placement.owned import Owned
from learner.update.placement.placement import ALONE, Placement
from learner.update.placement.ranks import RankGroup, Ranks
from learner.update.publisher import Publisher, canary_of_sent, loses_bits
from learner.update.rehearsal import Largest, Rehearsal
from learner.update.stage_end import StageEnd
from learner.update.teacher import Teacher, TeacherFacts
from learner.update.update import Update
from protocol.access.key_list import is_invited
from protocol.messages import Hello
from shared.base.cache import cached_base
from shared.base.load import Place, check_once, check_paths, load_policy, pick_device, pick_dtype
from shared.config.load import config_to_json, rules_digest
from shared.config.model import cache_root
from shared.config.processes import ActorConfig, Parallel, SentDtype, sent_dtype
from shared.config.tree import Config
from shared.model.adapter_file import adapter_config, install_adapter, layout_digest
from shared.model.canary import canary_ids
from shared.model.conversation import Conversation
from shared.model.given_adapter import NONE_GIVEN, GivenAdapters
from shared.model.kernels.choice import policy_with_kernels
from shared.model.policy import TORCH, Policy
from shared.model.prompt import Prompter, load_prompter
from shared.process.busy_cores.watch import watch_cores
from shared.process.card import driver_of
from shared.process.determinism import pin_torch
from shared.process.lease import ComputeLease
from shared.process.trace import NO_TRACE, Trace
from shared.run.run_dir import RunDir
from shared.seeding import derive


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is loaded once, before the learner listens."""

    config: Config
    """The resolved configuration."""
    policy: Policy
    """With the adapter as it is at step 0."""
    prompter: Prompter
    """Tokenizer and template."""
    tasks: TaskSet
    """Train and held-out tasks."""
    teacher: TeacherFacts | None = None
    """Whom a distillation follows."""

    def expected(self) -> Hello:
        """What every actor of this run must have loaded."""
        return Hello(
            actor_id="any",
            engine="any",
            base_digest=self.policy.base_digest,
            tokenizer_digest=self.prompter.digest,
            lora_digest=layout_digest(self.policy.adapter),
            rules_digest=rules_digest(self.config.verifier, self.config.rollout, self.config.environment),
            machine=None,
            mark=0,
            version=None,
            credits=1,
        )

    def order_check(self) -> OrderCheck:
        return OrderCheck.of(self.config.verifier, len(self.policy.head))


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """From collected groups to new parameters."""

    batches: Batches
    update: Update
    budget: Budget


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Everything that trains, but for what is reported of it."""

    state: LearnerState
    batches: Batches
    update: Update
    guard: Guard
    attempts: Attempts
    rehearsal: Rehearsal
    filler: OrderFiller

    def parts(self, report: StepReport, lease: ComputeLease, evaluations: Schedule = NO_EVALUATIONS) -> Parts:
        return Parts(
            plan=self.state.plan,
            filler=self.filler,
            batches=self.batches,
            guard=self.guard,
            attempts=self.attempts,
            publisher=self.state.publisher,
            report=report,
            lease=lease,
            evaluations=evaluations,
        )


def load_model(config: Config, given: GivenAdapters = NONE_GIVEN, place: Place | None = None) -> Model:
    """place: of the base, if another process uses it too."""
    policy = load_trained_policy(config, config.compute.device, given.start, place)
    environment = config.environment
    prompter = load_prompter(cached_base(config.model).folder, environment)
    if environment.is_used and not environment.is_agent:
        # Refuses a template that cannot be used, before anything is sampled.
        Conversation(prompter, environment.max_turns)
    kind, cap = config.verifier.kind, config.rollout.max_new_tokens
    if config.is_warm_start:
        evaluated = config.eval.problems > 0
        tasks = load_written(config.tasks, config.sft, kind, prompter, longest=cap, evaluated=evaluated)
    else:
        tasks = load_tasks(config.tasks, prompter, kind)
    # Before the first order: an actor would notice it too, but only with the first long prompt.
    longest_completion = max(cap, config.eval.longest_completion(cap))
    teacher = teacher_of(config, prompter, tasks.train, given.teacher)
    policy.refuse_if_too_long(max(longest_prompt(tasks), teacher.longest_prompt if teacher else 0), longest_completion)
    return Model(config=config, policy=policy, prompter=prompter, tasks=tasks, teacher=teacher)


def teacher_of(config: Config, prompter: Prompter, tasks: Sequence[Task], adapter: bytes) -> TeacherFacts | None:
    """None where nobody is followed, or where the actors ask somebody else. adapter: its file, if it has its own."""
    if config.loss.kind != "opd" or config.teacher.url:
        return None
    text = config.teacher.prompt
    prompts = told_prompts(tasks, text, config.tasks, prompter, config.verifier.kind) if text else {}
    return TeacherFacts(prompts=prompts, adapter=adapter)


def longest_prompt(tasks: TaskSet) -> int:
    return max(len(task.prompt_ids) for task in (*tasks.train, *tasks.held_out))


def load_trained_policy(config: Config, device: str, start: bytes = b"", place: Place | None = None) -> Policy:
    """The frozen base with the adapter of step 0, ready for gradients. start: the adapter file that the run starts
    from; without it, a new adapter. place: as for `load_model`."""
    pin_torch(config.compute.learner_threads)
    on = pick_device(device, config.compute.learner_card)
    dtype = pick_dtype(config.compute.dtype, on)
    base = cached_base(config.model)
    policy = load_policy(base, config.model, config.lora, on, dtype, place)
    policy = policy_with_kernels(policy, config.compute, cache_root(config.model))
    if policy.kernels is not TORCH:
        check_once(policy, base, "training", lambda: check_paths(policy))
    policy.adapter.initialise(derive(config.run.seed, "adapter"))
    if start:
        install_adapter(policy.adapter, start)
    policy.adapter.requires_grad()
    if config.batch.recomputes:
        policy.recompute_activations()
    watch_cores(config.compute.learner_threads, on)
    return policy


def build_trainer(
    policy: Policy,
    config: Config,
    progress: Callable[[], None],
    curriculum: Callable[[], CurriculumFigures] | None = None,
    trace: Trace = NO_TRACE,
    teacher: TeacherFacts | None = None,
    placement: Placement = ALONE,
) -> Trainer:
    """At step 0. curriculum: where it is, to notice the end of a stage; None where no stage can end. teacher: of a
    distillation. placement: who computes micro-batches."""
    budget = Budget.of(config.batch)
    forward_pass = ForwardPass(policy, config.rollout.temperature, budget, progress, placement)
    in_stages = config.curriculum.needs_stages
    anchor = Anchor(policy.adapter, config.curriculum) if config.curriculum.anchored else None
    home = torch.device("cpu") if config.compute.parallel == "zero2" else None
    update = Update(
        forward_pass,
        Optimizer(policy.adapter.parameters(), config.optimizer, config.run.steps, placement.owners, home),
        Norms(config.guard),
        loss=config.objective,
        constraint=config.constraint,
        gate=Gate(config.loss.max_mismatch, floor_of(policy, config.actor, sent_dtype(config.link, config.compute))),
        measures_noise=config.growth.max_prompts > 0,
        anchor=anchor,
    )
    batches = Batches(
        forward_pass,
        loss=config.objective,
        constraint=config.constraint,
        rollout=config.rollout,
        advantage=config.advantage,
        updates=config.batch.updates,
        stage_end=StageEnd(curriculum, forward_pass, anchor) if anchor and curriculum and in_stages else None,
        teacher=Teacher(forward_pass, teacher) if teacher else None,
        trace=trace,
    )
    return Trainer(batches=batches, update=update, budget=budget)


def placement_on(group: RankGroup, policy: Policy, parallel: Parallel) -> Ranks:
    """Of one of several ranks. All of them call this at the same time."""
    parameters = [*policy.adapter.parameters().values()]
    if parallel == "zero2":
        owned = Owned(group, parameters)
        return Ranks(group, parameters, owners=owned, add=owned.added)
    if parallel == "fsdp2":
        divide_base(policy, group)
    return Ranks(group, parameters, in_step=parallel == "fsdp2")


def floor_of(policy: Policy, actor: ActorConfig, sent: SentDtype) -> Limits:
    """What the mismatch gate lets through without a measurement."""
    if actor.engine != "hf" and actor.weights == "nf4":
        return NF4_PLUGIN
    return BF16 if policy.dtype == torch.bfloat16 or sent == "bf16" else FP32


def build_learner(
    model: Model,
    filler: OrderFiller,
    keep: Keep,
    trace: Trace = NO_TRACE,
    notes: Notes = NO_NOTES,
    recheck: Recheck = nobody_lied,
    placement: Placement = ALONE,
) -> Learner:
    """Everything with memory, at step 0. keep: where a batch goes that must not be applied. notes: of sizes. recheck:
    of a step whose log-probs are false. placement: who computes micro-batches."""
    config, policy = model.config, model.policy
    ids = canary_ids(config.run.seed, len(policy.head), config.guard.canary_tokens)
    sent = sent_dtype(config.link, config.compute)
    canary = partial(canary_of_sent, policy, ids, sent)
    publisher = Publisher(policy.adapter, canary, trace, sent, keeps_older=config.pipeline.max_lag > 0)
    publisher.snapshot(version=0)
    curriculum = build_curriculum(config, model.tasks.train, policy.base_digest, model.prompter.digest)
    trainer = build_trainer(policy, config, filler.pump, curriculum.metrics, trace, model.teacher, placement)
    update = trainer.update
    guard = Guard(update, config.guard, config_to_json(config), keep, trace)
    attempts = Attempts(trainer.budget, update, notes, driver_of(policy.device))
    state = LearnerState(
        config.run.seed,
        adapter_config(config.lora, config.model.path),
        publisher,
        update.optimizer,
        update.norms,
        # The end of a stage cannot be taken back.
        StepPlan(
            config,
            model.tasks.train,
            curriculum,
            filler,
            nobody_lied if config.curriculum.needs_stages else recheck,
        ),
        guard,
        update.gate,
        trainer.budget,
        policy.base_digest,
        update.anchor,
    )
    return Learner(
        state=state,
        batches=trainer.batches,
        update=update,
        guard=guard,
        attempts=attempts,
        rehearsal=Rehearsal(update, attempts, largest_step(config, model.tasks)),
        filler=filler,
    )


def build_audit(model: Model, run: RunDir, lease: ComputeLease, orders: AuditedOrders, gate: Gate) -> Audit | None:
    """None if nobody is checked. gate: the one of the steps."""
    config, policy, actor = model.config, model.policy, model.config.actor
    if actor.audit == actor.audit_invited == 0.0:
        return None
    differs = loses_bits(policy, sent_dtype(config.link, config.compute))
    check_logprobs = partial(
        LogprobCheck,
        ForwardPass(policy, config.rollout.temperature, Budget.of(config.batch), orders.pump),
        gate.copy,
        lease,
        driver_of(policy.device),
        newest=lambda: None if differs else max(orders.policies),
    )
    kind = config.verifier.kind
    scores: Check = (
        ScoreCheck(SecondScores(run.path, orders.pump))
        if can_score_again(kind, in_environment=config.environment.is_used)
        else NoScoreCheck(f"the verifier ({kind}) or an environment may answer differently each time")
    )

    def share(actor_id: str) -> float:
        return actor.audit_invited if is_invited(run.keys, actor_id) else actor.audit

    checks, checks_of_refused = [check_logprobs(), scores], [check_logprobs(together=True), scores]
    return Audit(Draws(cache(share)), checks, checks_of_refused)


def largest_step(config: Config, tasks: TaskSet) -> Largest:
    return Largest(
        prompt=max(len(task.prompt_ids) for task in tasks.train),
        completion=config.rollout.max_new_tokens,
        group=config.rollout.group,
        groups=config.most_prompts,
        tells_entropies=config.actor.engine == "hf" and not config.is_warm_start,
    )
