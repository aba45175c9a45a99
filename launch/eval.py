"""`eval`: held-out accuracy of a run's checkpoint or base with its 95 % interval, in this process alone.

Kept as eval/<label>.json and .md; `compare` reads the former.
"""

import os
from pathlib import Path

from msgspec import structs

from launch.checkpoint_choice import choose_checkpoint
from launch.console import make_console
from launch.eval_table import markdown, print_evaluation
from learner.checkpoint import Checkpoint
from shared.config import Config, EvalConfig
from shared.config_load import config_from_json
from shared.determinism import cpu_environment
from shared.errors import DataError
from shared.evaluation import Evaluation, write_evaluation
from shared.files import write_whole
from shared.run_dir import RunDir

PLAIN_WIDTH = 120


def run_command(
    *,
    directory: Path,
    checkpoint: str,
    base: bool,
    problems: int | None,
    samples: int | None,
    long_cap: int | None,
) -> int:
    """Evaluate, print, keep in eval/."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    asked = {"problems": problems, "samples": samples, "long_cap": long_cap}
    config = structs.replace(config, eval=overridden(config.eval, asked))
    chosen = None if base else choose_checkpoint(run, config, checkpoint)
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    found = evaluate(config, chosen)
    file = write_evaluation(run.eval, found)
    write_whole(file.with_suffix(".md"), markdown(found).encode())
    print_evaluation(make_console(PLAIN_WIDTH), found)
    print(f"kept in {file} and {file.with_suffix('.md').name}")
    return 0


def overridden(config: EvalConfig, asked: dict[str, int | None]) -> EvalConfig:
    """What the command line says, the run's own configuration elsewhere."""
    return structs.replace(config, **{key: value for key, value in asked.items() if value is not None})


def evaluate(config: Config, checkpoint: Checkpoint | None) -> Evaluation:
    """The report of this checkpoint; of the base where there is none."""
    from launch.local_actor import local_actor
    from launch.local_desk import LocalDesk
    from learner.evaluate import Evaluator
    from learner.publisher import policy_message
    from learner.tasks import load_tasks

    with local_actor(config) as actor:
        held_out = load_tasks(config.tasks, actor.prompter, config.verifier.kind).held_out
        if not held_out or config.eval.problems == 0:
            raise DataError("There are no held-out tasks to evaluate on; set tasks.held_out and eval.problems.")
        policy = policy_message(checkpoint.step if checkpoint else 0, adapter_of(config, checkpoint))
        desk = LocalDesk(actor.rollout)
        desk.publish(policy, oldest_needed=0)
        count = None if config.verifier.kind == "callable" else actor.ballots.count
        label = f"step-{checkpoint.step:06d}" if checkpoint else "base"
        evaluator = Evaluator(config, held_out, desk, actor.prompter.text, count)
        return evaluator.run(label, policy.version, policy.sha256)


def adapter_of(config: Config, checkpoint: Checkpoint | None) -> bytes:
    """The checkpoint's file, or the run's adapter as it was before the first step."""
    from learner.state import ADAPTER
    from shared.adapter_file import adapter_bytes
    from shared.base_cache import cached_base
    from shared.lora_layout import read_layout
    from shared.seeding import derive

    if checkpoint:
        return checkpoint.files[ADAPTER]
    adapter = read_layout(cached_base(config.model).folder, config.lora).adapter()
    adapter.initialise(derive(config.run.seed, "adapter"))
    return adapter_bytes(adapter)
