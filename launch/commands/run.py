"""`run`: a new run from a preset or a file.

`--prepare` stops after the run directory is made: other ways to start the processes (containers, another machine)
take it from there. `--dry-run` does not even make that.

The plan that `--dry-run` prints: what would run, where, and what would be written.
"""

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from actor.engines.vllm_options import check_engine
from launch.display.next_command import next_command
from launch.preset import load_config
from launch.supervisor.topology import Process, Topology, topology
from protocol.access.keys import create_keys
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.run.run_dir import RunDir

WRITTEN = {
    "config.json, run.json": "the configuration below with every default, versions, CPU, threads",
    "journal/, checkpoints/": "what resume and replay need; adapters in PEFT format",
    "metrics.jsonl, rollouts.jsonl": "one line a step; sampled completions",
    "eval/, summary.json": "held-out accuracy before and after; how the run ended",
    "logs/, keys/": "output of each process; the keys of the wire (yours alone)",
}


def describe(plan: Topology, config: Config) -> str:
    """The whole plan as text."""
    blocks = [amount(plan, config), changed_block(config), process_block(plan), written_block()]
    return "\n\n".join("\n".join(block) for block in blocks)


def amount(plan: Topology, config: Config) -> list[str]:
    """How much is sampled, and where it goes."""
    rollout, steps = config.rollout, config.run.steps
    prompts = sorted({rollout.prompts, config.most_prompts})
    totals = [steps * count * rollout.group for count in prompts]
    return [
        f"run directory  {plan.run_dir}",
        f"model          {config.model.path} ({config.model.quantization}, LoRA rank {config.lora.rank})",
        f"tasks          {config.tasks.source}",
        f"objective      {objective(config)}",
        f"amount         {steps} steps x {span(prompts)} prompts x {rollout.group} samples"
        f" = {span(totals)} completions of at most {rollout.max_new_tokens} tokens",
        f"evaluation     {config.eval.problems} held-out problems before and after"
        if config.eval.problems
        else "evaluation     none",
        f"endpoint       {plan.endpoint}",
    ]


def objective(config: Config) -> str:
    """The kind of loss, with what it brings where a key is not given."""
    lowest, highest = config.loss.ratio_bounds
    advantage = "over the group's standard deviation" if config.divides_by_std else "not divided"
    return f"{config.loss.kind}, ratio from {lowest:g} to {highest:g}, advantage {advantage}"


def span(bounds: list[int]) -> str:
    """`16`, or `16 to 64` where steps may grow."""
    return " to ".join(map(str, bounds))


def changed_block(config: Config) -> list[str]:
    """Every value that is not the default."""
    changed = [f"  {key} = {value}  (default {default})" for key, value, default in differences(config)]
    return ["configuration, where it differs from the defaults", *(changed or ["  nowhere"])]


def differences(config: Config) -> Iterator[tuple[str, str, str]]:
    """(section.key, value, default) as JSON text."""
    default = Config()
    for section in config.__struct_fields__:
        ours, theirs = getattr(config, section), getattr(default, section)
        for key in ours.__struct_fields__:
            value, usual = getattr(ours, key), getattr(theirs, key)
            if value != usual:
                yield f"{section}.{key}", as_json(value), as_json(usual)


def as_json(value: object) -> str:
    """A value as it would stand in config.json."""
    return msgspec.json.encode(value).decode()


def process_block(plan: Topology) -> list[str]:
    """Command, threads and environment of each process."""
    return ["processes", *(line for process in plan.processes for line in process_lines(process))]


def process_lines(process: Process) -> list[str]:
    """One process."""
    environment = " ".join(f"{key}={value}" for key, value in process.environment.items())
    return [
        f"  {process.name}: {process.threads} threads, log {process.log}",
        f"    {shlex.join(process.argv)}",
        f"    {environment}",
    ]


def written_block() -> list[str]:
    """Which files appear in the run directory."""
    return ["what will be written there", *(f"  {name:<31}{what}" for name, what in WRITTEN.items())]


def run_command(
    *, source: str, overrides: Sequence[str], out: Path | None, dry_run: bool, prepare: bool, verbose: bool
) -> int:
    """Make the run directory, train, report."""
    config = load_config(source, overrides)
    folder = out or default_folder(source, datetime.now())
    if dry_run:
        print(describe(topology(folder, config), config))
        return 0
    if not prepare:
        check_engine(config.actor)
    run = make_run(folder, config)
    if prepare:
        print(f"{folder} is prepared; start it with: {next_command('resume', str(folder))}")
        return 0
    # Late, so that whatever is wrong with the input is said before the display is loaded.
    from launch.commands.watch_run import attend

    attend(run, config, verbose=verbose)
    return 0


def default_folder(source: str, now: datetime) -> Path:
    """runs/<preset>-<time>"""
    return Path("runs") / f"{Path(source).stem}-{now:%Y%m%d-%H%M%S}"


def make_run(folder: Path, config: Config) -> RunDir:
    """The directory with configuration and keys."""
    actor_ids = [actor.name for actor in topology(folder, config).actors]
    return RunDir.create(folder, config_to_json(config), create_keys=lambda keys: create_keys(keys, actor_ids))
