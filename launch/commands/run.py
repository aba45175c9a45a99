"""`run`: train a new run from a preset or a TOML file. `sft`: the same for a warm start on written answers.

`--prepare` makes the run directory and stops, for other ways to start the processes (containers, another machine). What
[compute] leaves open is then chosen where the run starts (shared/process/processor.py), and a `resume` that starts it
makes its plan. Without a plan (on Ray, or if the learner is started by hand) nothing is refused, and
`batch.recompute = "auto"` recomputes nothing.
`--dry-run` makes nothing: it prints what would be sampled, which processes would run, what they would write, and how
much memory and time the run would take; `--json` prints this last part for programs. A run that cannot fit into memory
is refused, before anything is made (launch/plan). On a CPU the machine is measured once, which takes a few seconds, and
the result is kept in the cache folder. On a card the memory is planned phase by phase, and the sizes that are left open
are chosen so that it fits.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from actor.engines.vllm_options import check_engine
from launch.card.command import NotPlanned, plan_here, with_choices
from launch.card.plan import CardPlan
from launch.card.text import card_lines, refusal, short_card_lines
from launch.card.work import CardWork, card_work
from launch.display.console import next_command
from launch.on_ray.placement import Machine, asked_for, capacity_on_ray, places_of
from launch.plan.cost import (
    NoPlan,
    Plan,
    chosen_work,
    dtype_of,
    find_shape,
    make_plan,
    plan_as_json,
    summary_line,
    table,
    work_of,
)
from launch.plan.machine import Speed, machine_speed, measure_elsewhere
from launch.plan.remedies import refuse_if_too_large
from launch.plan.shape import check_model
from launch.plan.work import Dtype, Work
from launch.presets.load import check_data, load_config
from launch.supervisor.topology import Process, Topology, arithmetic, topology
from launch.tracking.trackers import check_tracker
from learner.durable.find_adapter import given_adapter
from protocol.access.keys import create_keys
from shared.config.data import Advantage
from shared.config.load import check_together, config_to_json
from shared.config.model import LoraConfig, cache_root
from shared.config.named_rewards import rewards_in_words
from shared.config.processes import ComputeConfig, EvalConfig
from shared.config.training import BatchConfig, LossConfig
from shared.config.tree import Config, RolloutConfig, warm_start
from shared.errors import ConfigError
from shared.process.determinism import Blas
from shared.process.free_memory import free_memory
from shared.process.processor import cores_here, gains_by_packing, read_flags, settled_config
from shared.process.usable_cards import check_cards, cpu_instead, has_card, roles_here
from shared.run.forecast import write_prediction
from shared.run.run_dir import CPUINFO, RunDir, make_free_folder, refuse_if_taken

Cost = Plan | CardPlan | str
"""A plan, or the reason why there is none."""
NO_CARD: Mapping[str, str] = MappingProxyType({})
WRITTEN = {
    "config.json, run.json": "the configuration with every default; versions, processor, card, arithmetic",
    "plan.json": "memory and time as predicted; summary.json has them next to what was measured",
    "journal/, checkpoints/": "what resume and replay need; adapters in PEFT format",
    "metrics.jsonl": "one line for each step",
    "rollouts.jsonl": "sampled groups with every token, {rollouts_mb:.0f} MB at most",
    "eval/, summary.json, report.html": "held-out accuracy before and after; how the run ended; the run as a page",
    "logs/, keys/": "output of each process; the keys of the wire, readable by you alone",
}


def start_run(
    *,
    source: str,
    overrides: Sequence[str],
    out: Path | None,
    dry_run: bool,
    prepare: bool,
    on: Machine,
    verbose: bool,
    json_only: bool = False,
    trace: bool = False,
    warm: bool = False,
) -> int:
    if prepare and dry_run:
        raise ConfigError("--prepare makes the run directory and --dry-run writes nothing; give one of them.")
    if json_only and not dry_run:
        raise ConfigError("--json prints the plan of --dry-run, which was not given; add it, or omit --json.")
    config = load_config(source, overrides, here=on == "here" and not prepare)
    if warm:
        config = warm_start(config)
        check_together(config)
    refuse_without_answers(config.loss, warm=warm)
    folder = out or default_folder(source, datetime.now())
    # Before anything that takes time.
    if out:
        refuse_if_taken(RunDir(out))
    if prepare:
        folder = make_run(out or make_free_folder(folder), config).path
        print(f"{folder} is prepared; start it with: {next_command('resume', str(folder))}")
        return 0
    if on == "ray":
        config = settled_config(config, capacity_on_ray(config.compute, config.ray))
    else:
        check_model(config.model, config.lora.targets)
        check_data(config.tasks, config.sft, config.verifier.kind, warm=warm, evaluated=config.eval.problems > 0)
        warn_of_cpu(config.compute)
    if not warm:
        warn_of_idle_actors(config.compute, config.rollout, config.pipeline.max_lag, on)
    places = places_of(topology(folder, config), config.compute, config.ray, config.actor)
    # Without its card there is nothing to plan.
    card = {} if dry_run or on == "ray" else check_cards(config.compute, roles_here(config.actor))
    config, cost = planned(config) if on == "here" else (config, f"Ray chooses the machines; {asked_for(places)}")
    if dry_run:
        what = "" if json_only else describe(topology(folder, config), config)
        return show_plan(what, source, cost, config.model.path)
    if on == "here":
        check_engine(config.actor)
    check_tracker(config.tracking)
    refuse(cost, config.model.path)
    # Imported late, so that a mistake in the input is reported before the display is loaded.
    from launch.commands.watch_run import supervising, watch_run

    with supervising(on, places) as supervise:
        run = make_run(out or make_free_folder(folder), config, card)
        announce(run, source, cost)
        for line in rewards_in_words(config.verifier):
            print(line)
        watch_run(run, config, verbose=verbose, trace=trace, supervise=supervise)
    return 0


def refuse_without_answers(loss: LossConfig, *, warm: bool) -> None:
    if loss.kind == "sft" and not warm:
        raise ConfigError(
            "loss.kind = 'sft' learns written answers and samples nothing; use `python -m launch sft` instead of `run`,"
            " or choose another loss.kind."
        )


def warn_of_cpu(compute: ComputeConfig) -> None:
    """On stderr, since stdout may be for programs."""
    if said := cpu_instead(compute):
        print(f"warning: {said}", file=sys.stderr)


def warn_of_idle_actors(compute: ComputeConfig, rollout: RolloutConfig, max_lag: int, on: Machine) -> None:
    """If some of several actors can have no work at times."""
    size = rollout.groups_per_order or rollout.prompts
    orders, cores = -(-rollout.prompts // size) * (1 + max_lag), cores_here()
    if (groups := rollout.prompts * (1 + max_lag)) < compute.actors:
        print(
            f"warning: at most {groups} of {compute.actors} actors can have an order at a time, because rollout.prompts"
            f" is {rollout.prompts}; use more prompts, or fewer actors.",
            file=sys.stderr,
        )
    elif orders < compute.actors:
        most = max(1, rollout.prompts // (2 * compute.actors))
        print(
            f"warning: {orders} of {compute.actors} actors can have an order at a time, because an order has {size}"
            f" groups; rollout.groups_per_order={most} gives work to all. The sampled tokens depend on it.",
            file=sys.stderr,
        )
    if on == "here" and compute.actors > 1 and compute.threads > cores and not has_card():
        print(
            f"warning: learner and actors have {compute.threads} threads on {cores} cores, so they take turns; with"
            " fewer (compute.learner_threads, compute.actor_threads) they compute at once.",
            file=sys.stderr,
        )


def planned(config: Config) -> tuple[Config, Cost]:
    """With what the plan chooses; the plan, or why there is none."""
    compute = config.compute
    if compute.device == "cuda" or (compute.device == "auto" and has_card()):
        cost = plan_for_card(card_work(config))
        if isinstance(cost, CardPlan):
            return with_choices(config, cost), cost
    elif config.actor.engine == "vllm" and config.needs_actor:
        cost = "vLLM plans its memory itself"
    else:
        packs = gains_by_packing(read_flags(CPUINFO), config.compute)
        work = work_of(config, cores=cores_here(), packs=packs)
        cost = plan_of(work, config.lora.targets, compute, config.run.steps)
    if isinstance(cost, Plan):
        return structs.replace(config, batch=cost.work.batch, actor=cost.work.actor), cost
    return structs.replace(config, batch=without_auto_recompute(config.batch)), cost


def announce(run: RunDir, source: str, cost: Cost) -> None:
    """Write plan.json and print the prediction; nothing without a plan."""
    if not isinstance(cost, str):
        write_prediction(run, cost.figures)
        print(*([summary_line(cost)] if isinstance(cost, Plan) else short_card_lines(source, cost)), sep="\n")


def without_auto_recompute(batch: BatchConfig) -> BatchConfig:
    """Nothing is recomputed unless it was asked for."""
    return structs.replace(batch, recompute="never") if batch.recompute == "auto" else batch


def plan_for_card(work: CardWork) -> CardPlan | str:
    """Of what is free there, or the reason why there is no plan."""
    try:
        return plan_here(work)
    except NotPlanned as reason:
        return str(reason)


def refuse(cost: Cost, path: str) -> None:
    """ConfigError if the run cannot fit. path: of the model."""
    if isinstance(cost, Plan):
        refuse_if_too_large(cost.memory, cost.free, cost.remedies, path)
    elif isinstance(cost, CardPlan) and not cost.fits:
        raise ConfigError(refusal(cost))


def show_plan(what: str, source: str, cost: Cost, path: str) -> int:
    """what: the run in words; empty for JSON. Raises ConfigError in the end if the run cannot fit."""
    if what:
        print(what, "\n".join(plan_lines(source, cost)), sep="\n\n")
    else:
        print(json.dumps(plan_tree(cost), indent=2))
    refuse(cost, path)
    return 0


def plan_lines(source: str, cost: Cost) -> list[str]:
    if isinstance(cost, str):
        return [f"predicted memory and time: unknown, {cost}"]
    return table(cost) if isinstance(cost, Plan) else card_lines(source, cost)


def plan_tree(cost: Cost) -> Any:
    """For programs."""
    if isinstance(cost, str):
        return {"fits": None, "reason": cost}
    return plan_as_json(cost) if isinstance(cost, Plan) else msgspec.to_builtins(cost)


def plan_of(work: Work, targets: Sequence[str], compute: ComputeConfig, steps: int) -> Plan | str:
    """The plan of a run on this machine's CPU, or the reason why there is none."""
    try:
        shape = find_shape(work.model, targets)
    except NoPlan as reason:
        return str(reason)
    speeds = lambda: speeds_of(compute, cache_root(work.model))  # noqa: E731
    free = free_memory()
    return make_plan(shape, chosen_work(shape, work, free), free, steps=steps, speeds=speeds)


def speeds_of(
    compute: ComputeConfig, cache: Path, *, measure: Callable[[int, Blas, Dtype], Speed] = measure_elsewhere
) -> tuple[Speed, Speed]:
    """Of actor and learner. The same number of threads is measured once, even if nothing can be kept."""
    counts = {compute.actor_threads, compute.learner_threads}
    dtype = dtype_of(compute.dtype, on_card=False)
    speeds = {
        threads: machine_speed(cache, threads, compute.blas, dtype, measure=measure) for threads in sorted(counts)
    }
    return speeds[compute.actor_threads], speeds[compute.learner_threads]


def default_folder(source: str, now: datetime) -> Path:
    """runs/<preset>-<time>"""
    return Path("runs") / f"{Path(source).stem}-{now:%Y%m%d-%H%M%S}"


def make_run(folder: Path, config: Config, card: Mapping[str, str] = NO_CARD) -> RunDir:
    """The run directory, with its configuration and keys. card: as in run.json."""
    actor_ids = [actor.name for actor in topology(folder, config).actors]
    if RunDir(folder).failed_at_start():
        print(f"{folder} has a run that failed at its start and learned nothing; it is replaced, and so are its keys")
    return RunDir.create(
        folder,
        config_to_json(config),
        compute=structs.asdict(config.compute),
        card=card,
        create_keys=lambda keys: create_keys(keys, actor_ids),
        start=given_adapter("lora.start_from", config.lora.start_from, config.lora, config.model),
        teacher=given_adapter("teacher.adapter", config.teacher.adapter, config.lora, config.model),
    )


def describe(plan: Topology, config: Config) -> str:
    """The whole plan as text."""
    most = config.run.steps * config.log.rollouts_kb / 1000
    blocks = [
        [
            f"run directory  {plan.run_dir}",
            f"model          {config.model.path} ({config.model.quantization}, {adapter(config.lora)})",
            f"examples       {config.sft.source or f'solutions of {config.tasks.source}'}"
            if config.is_warm_start
            else f"tasks          {config.tasks.source}",
            *(f"rewards        {line}" for line in rewards_in_words(config.verifier)),
            f"objective      {objective(config.objective, config.advantage)}",
            f"amount         {amount(config.rollout, config.run.steps, config.most_prompts)}",
            f"evaluation     {evaluation(config.eval, config.tasks.held_out or config.tasks.source)}",
            f"endpoint       {plan.endpoint}",
            f"arithmetic     {arithmetic(config.compute, config.model, config.actor)}",
        ],
        changed_block(config, Config()),
        process_block(plan),
        [
            "what will be written there",
            *(f"  {name:<34}{what.format(rollouts_mb=most)}" for name, what in WRITTEN.items()),
        ],
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


ADVANTAGES: dict[Advantage, str] = {
    "mean": "not divided",
    "std": "over the group's standard deviation",
    "rloo": "to the mean of the others",
    "maxrl": "over the group's mean",
    "batch": "over the step's standard deviation",
    "gdpo": "of each reward over its standard deviation, then over the step's",
}


def adapter(lora: LoraConfig) -> str:
    ranks = "".join(f", {target} {rank}" for target, rank in lora.ranks.items())
    return f"LoRA rank {lora.rank}{ranks}" + (f", starts from {lora.start_from}" if lora.start_from else "")


def objective(loss: LossConfig, advantage: Advantage) -> str:
    """The kind of loss, and the values that it brings for keys that are not given."""
    if loss.kind == "sft":
        return "sft, the likelihood of written answers"
    lowest, highest = loss.ratio_bounds
    what = "change of probability" if loss.kind == "dppo" else "ratio"
    lowest, highest = (lowest - 1, highest - 1) if loss.kind == "dppo" else (lowest, highest)
    stale = f", stale_limit {loss.stale_limit:g}" if loss.stale_limit else ""
    return f"{loss.kind}, {what} from {lowest:g} to {highest:g}, advantage {ADVANTAGES[advantage]}{stale}"


def amount(rollout: RolloutConfig, steps: int, most_prompts: int) -> str:
    """How much is sampled. A step may grow from `rollout.prompts` to `most_prompts`."""
    prompts = sorted({rollout.prompts, most_prompts})
    totals = [steps * count * rollout.group for count in prompts]
    return (
        f"{steps} steps x {span(prompts)} prompts x {rollout.group} samples"
        f" = {span(totals)} completions of at most {rollout.max_new_tokens} tokens"
    )


def span(bounds: list[int]) -> str:
    """`16`, or `16 to 64`."""
    return " to ".join(map(str, bounds))


def evaluation(config: EvalConfig, source: str) -> str:
    return f"{config.problems} held-out problems of {source} before and after" if config.problems else "none"


def changed_block(config: msgspec.Struct, default: msgspec.Struct) -> list[str]:
    """Every key with another value than the default."""
    changed = [f"  {key} = {value}  (default {usual})" for key, value, usual in differences(config, default)]
    return ["configuration, where it differs from the defaults", *(changed or ["  nowhere"])]


def differences(config: msgspec.Struct, default: msgspec.Struct) -> Iterator[tuple[str, str, str]]:
    """(section.key, value, default) as JSON text."""
    for section in config.__struct_fields__:
        ours, theirs = getattr(config, section), getattr(default, section)
        for key in ours.__struct_fields__:
            value, usual = getattr(ours, key), getattr(theirs, key)
            if value != usual:
                yield f"{section}.{key}", as_json(value), as_json(usual)


def as_json(value: object) -> str:
    """A value as config.json has it."""
    return msgspec.json.encode(value).decode()


def process_block(plan: Topology) -> list[str]:
    return ["processes", *(line for process in plan.processes for line in process_lines(process))]


def process_lines(process: Process) -> list[str]:
    """Threads and log, command, environment."""
    environment = " ".join(f"{key}={value}" for key, value in process.environment.items())
    return [
        f"  {process.name}: {process.threads} threads, log {process.log}",
        f"    {shlex.join(process.argv)}",
        f"    {environment}",
    ]
