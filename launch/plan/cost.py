"""The plan of a run: its memory and its time, whether it fits, and what would make it fit; as text and as JSON.

`run` makes it before anything is started, from the configuration, the files of the model and this machine's measured
speed; `doctor` judges memory by the same figures. Runs on a card have a plan of their own (launch/card/plan.py); what
they take of the machine's memory is here. Left out: runs whose model has to be fetched first, which start without a
plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from launch.display.watch import seconds
from launch.plan.duration import StepTime, evaluation_s, step_time, total_s
from launch.plan.machine import NotMeasured, Speed
from launch.plan.memory import MIB, HostMemory, Items, host_memory, size, size_of
from launch.plan.remedies import Remedy, fewer_rows, fits, remedies
from launch.plan.shape import Lengths, ModelShape, Passes, adapter_bytes, local_folder, shape_of
from launch.plan.work import VALUE_BYTES, Dtype, Work
from shared.config.data import TasksConfig
from shared.config.model import ModelConfig, hub_cache_folder
from shared.config.processes import EvalConfig, Parallel, sent_dtype
from shared.config.training import LossConfig, TeacherConfig
from shared.config.tree import Config
from shared.errors import ModelError
from shared.run.forecast import Figures

QUESTION_TOKENS = 64
"""Length of a question with its chat template, about that of GSM8K's."""
SOLUTION_TOKENS = 100
"""Length of a solved example of GSM8K, about."""
CHARACTERS_PER_TOKEN = 4
CUDA_RUNTIME_BYTES = 1500 * MIB
"""What CUDA takes of the host's memory for a process that computes on a card."""
STEPPED_COPIES = 4
"""Copies of the adapter in host memory with compute.parallel = "zero2": values, gradient and two moments."""
FEWEST_AT_ONCE = 8
"""Completions decoded at once. A token step of fewer takes about as long, so an order would only take longer."""
EMBEDDED = Lengths(prompt=46, completion=22, longest=30)
"""Tokens of the embedded model on its own problems. `longest` is the longest completion of a usual step."""


class NoPlan(Exception):
    """The reason as one sentence."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will take."""

    work: Work
    """What was planned."""
    memory: HostMemory
    """Bytes by item."""
    free: int | None
    """Bytes that are free on this machine; None if unknown."""
    time: StepTime | None
    """None if the machine could not be measured."""
    total_s: float | None
    """The whole run, with the evaluations that it waits for."""
    no_time: str
    """Why there is no time."""
    busy: bool
    """Whether other processes computed while this machine was measured."""
    remedies: tuple[Remedy[Work], ...]
    """Empty if the run fits, or if nothing helps."""

    @property
    def fits(self) -> bool:
        return fits(self.memory.total, self.free)

    @property
    def figures(self) -> Figures:
        """What can be compared with the run."""
        time, samples = self.time, self.work.samples
        return Figures(
            learner_mb=round(self.memory.learner_peak / MIB),
            actor_mb=round(self.memory.actor_peak / MIB) if samples else None,
            all_mb=round(self.memory.total / MIB),
            rollout_s=round(time.rollout, 3) if time and samples else None,
            update_s=round(time.update, 3) if time else None,
            step_s=round(time.step, 3) if time else None,
            completion_tokens=self.work.lengths.completion,
        )


def work_of(config: Config, *, cores: int, packs: bool = True) -> Work:
    """What the keys say. cores: that this process may use. packs: whether its processor gains by packed weights."""
    compute, rollout = config.compute, config.rollout
    # As shared/process/lease.py decides.
    one_computes = compute.threads > cores and not config.actor.is_elsewhere
    actors = compute.actors if config.needs_actor else 0
    sent: dict[Dtype, int] = {
        dtype: VALUE_BYTES[sent_dtype(config.link, structs.replace(compute, dtype=dtype))] for dtype in VALUE_BYTES
    }
    return Work(
        model=config.model,
        actor=config.actor,
        rollout=rollout,
        batch=config.batch,
        passes=passes_of(config.loss, config.teacher, min(config.batch.updates, config.most_prompts)),
        eval=config.eval,
        lora_rank=config.lora.largest_rank,
        groups=config.most_prompts,
        workers=config.verifier.workers,
        dtype=dtype_of(compute.dtype, on_card=False),
        sent_value_bytes=sent,
        orders_ahead=config.pipeline.max_lag > 0,
        overlaps=not one_computes and config.pipeline.max_lag > 0,
        lengths=lengths_of(config.model.path, rollout.max_new_tokens, config.tasks, config.sft.source),
        samples=not config.is_warm_start,
        actors=actors,
        at_once=min(actors, 1) if one_computes else actors,
        ranks=compute.ranks,
        divides=compute.divides_base,
        divides_moments=compute.divides_moments,
        in_turns=config.environment.in_turns,
        canary_tokens=config.guard.canary_tokens,
        compiles=compute.compiles,
        packs=packs and config.actor.token_step != "compiled",
    )


def passes_of(loss: LossConfig, teacher: TeacherConfig, minibatches: int) -> Passes:
    """As learner/update/update.py makes them: before several updates once for pi_old, in each pass for the KL's
    reference; and once for a teacher that is the base as another policy (teacher.py)."""
    updates = loss.passes * minibatches
    references = loss.passes if loss.kl_beta > 0.0 else 0
    return Passes(
        gradient=loss.passes,
        forward=(updates > 1) + references + bool(teacher.prompt or teacher.adapter),
        updates=updates,
    )


def dtype_of(name: str, *, on_card: bool) -> Dtype:
    """As shared/base/load.py resolves it, without torch."""
    if name == "auto":
        return "bf16" if on_card else "fp32"
    return "bf16" if name == "bf16" else "fp32"


def lengths_of(path: str, cap: int, tasks: TasksConfig, answers: str) -> Lengths:
    """Before anything was sampled or read: completions and answers are as long as they may be. answers: sft.source."""
    if path == "embedded" and tasks.source == "embedded" and not answers:
        return replace(EMBEDDED, completion=min(EMBEDDED.completion, cap), longest=min(EMBEDDED.longest, cap))
    examples = tasks.few_shot * (QUESTION_TOKENS + SOLUTION_TOKENS)
    prompt = QUESTION_TOKENS + examples + len(tasks.system_prompt) // CHARACTERS_PER_TOKEN
    return Lengths(prompt=min(prompt, tasks.max_prompt_tokens), completion=cap, longest=cap)


def find_shape(model: ModelConfig, targets: Sequence[str]) -> ModelShape:
    """NoPlan if the model has to be fetched first, or if its files do not tell its sizes."""
    folder = local_folder(model, hub_cache_folder())
    if folder is None:
        raise NoPlan(f"'{model.path}' is not on this machine yet")
    try:
        return shape_of(folder, targets)
    except ModelError as error:
        raise NoPlan(str(error)) from error


def make_plan(
    shape: ModelShape,
    work: Work,
    free: int | None,
    *,
    steps: int,
    speeds: Callable[[], tuple[Speed, Speed]],
) -> Plan:
    """speeds: of actor and learner; asked for only if the run fits, because measuring takes seconds."""
    memory = host_memory(shape, work)
    time, total, why, busy = None, None, "", False
    if not fits(memory.total, free):
        why = "the run does not fit"
    elif work.actor.is_elsewhere:
        why = "how fast its servers are is not known here"
    else:
        try:
            actor, learner = speeds()
            busy = actor.busy or learner.busy
            time = step_time(shape, work, actor, learner)
            evaluation = evaluation_s(shape, work, actor)
            total = total_s(time, evaluation, steps=steps, evaluations=waited_for(work.eval, steps))
        except NotMeasured as error:
            why = str(error)
    return Plan(
        work=work,
        memory=memory,
        free=free,
        time=time,
        total_s=total,
        no_time=why,
        busy=busy,
        remedies=tuple(remedies(shape, work, free)),
    )


def waited_for(evaluation: EvalConfig, steps: int) -> int:
    """Evaluations that delay the run. Of those that a process of its own makes, the last is waited for at the end."""
    if evaluation.beside:
        return 1
    return 2 + ((steps - 1) // evaluation.every if evaluation.every else 0)


def chosen_work(shape: ModelShape, work: Work, free: int | None, *, started: bool = False) -> Work:
    """The first variant of this work that fits, or the one with the least memory. A run that has started keeps its
    `batch.recompute` and `actor.max_sequences`, and packs weights if there is memory for them."""
    found = packing_variants(work) if started else variants_of(work)
    variants = [(host_memory(shape, one).total, one) for one in found]
    return next((one for total, one in variants if fits(total, free)), min(variants, key=lambda pair: pair[0])[1])


def variants_of(work: Work) -> Iterator[Work]:
    """First those that sample the same tokens, the fastest first; then the same with fewer completions at once."""
    for width in (work.actor.max_sequences, *fewer_rows(work.actor, work.groups * work.rollout.group, FEWEST_AT_ONCE)):
        actor = structs.replace(work.actor, max_sequences=width)
        for recompute in ("never", "always") if work.batch.recompute == "auto" else (work.batch.recompute,):
            batch = structs.replace(work.batch, recompute=recompute)
            yield from packing_variants(replace(work, actor=actor, batch=batch))


def packing_variants(work: Work) -> Iterator[Work]:
    """With memory for packed weights, if they help, and without."""
    yield work
    if work.packs:
        yield replace(work, packs=False)


def table(plan: Plan) -> list[str]:
    """The plan in a dozen lines."""
    memory, free = plan.memory, "" if plan.free is None else f", {size(plan.free)} are free"
    actor = "actor" if memory.actors < 2 else f"each of {memory.actors} actors"
    parts = {
        "shared": memory.shared,
        "launcher": memory.launcher,
        "learner" if memory.ranks == 1 else f"each of {memory.ranks} ranks": memory.learner,
        "  an update": memory.update,
        actor: memory.actor,
        "  an order": memory.rollout,
        "  an evaluation": memory.evaluation,
        "evaluator": memory.evaluator,
    }
    rows = [f"  {name:<17}{size(size_of(items)):>9}  {itemised(items)}" for name, items in parts.items() if items]
    return [f"predicted memory: {size(memory.total)} at the peak{free}", *rows, *time_lines(plan)]


def itemised(items: Items) -> str:
    """The largest three."""
    largest = sorted(items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {size(amount)}" for name, amount in largest if amount >= MIB)


def time_lines(plan: Plan) -> list[str]:
    if plan.time is None or plan.total_s is None:
        return [f"predicted time: unknown, {plan.no_time}"]
    tokens, time = plan.work.lengths.completion, plan.time
    parts = f"decoding {seconds(time.rollout)}, update {seconds(time.update)}"
    what = f"({parts})" if plan.work.samples else "of updates"
    answer = "a completion" if plan.work.samples else "an answer"
    busy = "; less if nothing else computes, as other processes did when this was measured" if plan.busy else ""
    return [
        f"predicted time: {seconds(time.step)} per step {what}, {seconds(plan.total_s)} in total, if {answer} has"
        f" {tokens} tokens{busy}"
    ]


def summary_line(plan: Plan) -> str:
    """One line, for the start of a run."""
    memory, time = size(plan.memory.total), time_lines(plan)[0].removeprefix("predicted time: ")
    return f"predicted: {memory} of memory{savings_in_words(plan.work)}; {time}"


def savings_in_words(work: Work) -> str:
    """How the run saves memory, chosen or given."""
    width = work.actor.max_sequences
    found = ["activations computed twice"] if work.batch.recomputes else []
    if work.actor.engine == "hf" and 0 < width < work.order_groups * work.rollout.group:
        found.append(f"{width} completions decoded at once")
    return f" ({', '.join(found)})" if found else ""


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """For programs. Bytes and seconds."""
    memory = plan.memory
    return {
        "fits": plan.fits,
        "budget_bytes": plan.free,
        "peak_bytes": memory.total,
        "shared": memory.shared,
        "launcher": memory.launcher,
        "processes": {
            "actor": phases({"decode": decoding(memory), "evaluation": evaluating(memory)}),
            "learner": phases({"update": {**memory.learner, **memory.update}}),
            **({"evaluator": phases({"evaluation": memory.evaluator})} if memory.evaluator else {}),
        },
        "choices": {
            "dtype": plan.work.dtype,
            "overlaps": plan.work.overlaps,
            "recompute": plan.work.batch.recompute,
            "max_sequences": plan.work.actor.max_sequences,
        },
        "actors": memory.actors,
        "ranks": memory.ranks,
        "time": None if plan.time is None else {"step_s": plan.time.step, "total_s": plan.total_s} | times(plan.time),
        "measured_while_busy": plan.busy,
        "remedies": [remedy.settings for remedy in plan.remedies],
    }


def decoding(memory: HostMemory) -> Items:
    return {**memory.actor, **memory.rollout} if memory.rollout else {}


def evaluating(memory: HostMemory) -> Items:
    return {**memory.actor, **memory.evaluation} if memory.evaluation else {}


def phases(parts: Mapping[str, Items]) -> list[dict[str, Any]]:
    return [{"phase": name, "bytes": size_of(items), "items": items} for name, items in parts.items() if items]


def times(time: StepTime) -> dict[str, float]:
    return {"rollout_s": time.rollout, "update_s": time.update}


@dataclass(frozen=True, kw_only=True)
class MemoryBesideCard:
    """Of both processes."""

    started: int
    """From their start to their end. With less, a run cannot start."""
    total: int
    """At the peak."""


def memory_beside_card(shape: ModelShape, lora_rank: int, parallel: Parallel, waiting: int = 0) -> MemoryBesideCard:
    """waiting: bytes of the bases that wait in host memory between turns."""
    stepped = STEPPED_COPIES * adapter_bytes(lora_rank, shape) if parallel == "zero2" else 0
    started = 2 * CUDA_RUNTIME_BYTES + stepped + waiting
    return MemoryBesideCard(started=started, total=started + shape.file_bytes)
