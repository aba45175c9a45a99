"""`eval`: accuracy of a run's checkpoint or base with its 95 % interval, in this process alone.

On the held-out tasks of the run, or with --test on the test set (`tasks.test`), which no run has read. Kept as
eval/<label>.json and .md, those of the test set as <label>-test; `compare` reads the former.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from launch.display.console import make_console
from launch.display.report import markdown, print_evaluation
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from shared.config.data import TasksConfig
from shared.config.load import config_from_json
from shared.config.processes import EvalConfig
from shared.config.tree import Config
from shared.errors import DataError
from shared.process.determinism import cpu_environment
from shared.run.evaluation import Evaluation, write_evaluation
from shared.run.files import write_whole
from shared.run.run_dir import RunDir

if TYPE_CHECKING:
    from learner.tasks.tasks import Task
    from shared.model.prompt import Prompter

PLAIN_WIDTH = 120


def run_command(
    *,
    directory: Path,
    checkpoint: str,
    base: bool,
    problems: int | None,
    samples: int | None,
    long_cap: int | None,
    test: bool,
) -> int:
    """Evaluate, print, keep in eval/."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    asked = {"problems": problems, "samples": samples, "long_cap": long_cap}
    config = structs.replace(config, eval=overridden(config.eval, asked))
    chosen = None if base else choose_checkpoint(run, config.checkpoint.keep, checkpoint)
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    found = evaluate(config, chosen, test=test)
    file = write_evaluation(run.eval, found)
    write_whole(file.with_suffix(".md"), markdown(found).encode())
    print_evaluation(make_console(PLAIN_WIDTH), found)
    print(f"kept in {file} and {file.with_suffix('.md').name}")
    return 0


def overridden(config: EvalConfig, asked: dict[str, int | None]) -> EvalConfig:
    """What the command line says, the run's own configuration elsewhere."""
    return structs.replace(config, **{key: value for key, value in asked.items() if value is not None})


def evaluate(config: Config, checkpoint: Checkpoint | None, *, test: bool) -> Evaluation:
    """The report of this checkpoint; of the base where there is none."""
    from launch.commands.in_process import LocalDesk, local_actor
    from learner.evaluation.evaluate import Evaluator
    from learner.update.publisher import policy_message

    with local_actor(config) as actor:
        tasks = tasks_for(config, actor.prompter, test=test)
        policy = policy_message(checkpoint.step if checkpoint else 0, adapter_of(config, checkpoint))
        desk = LocalDesk(actor.rollout)
        desk.publish(policy, oldest_needed=0)
        count = None if config.verifier.kind == "callable" else actor.ballots.count
        label = (f"step-{checkpoint.step:06d}" if checkpoint else "base") + ("-test" if test else "")
        evaluator = Evaluator(config, tasks, desk, actor.prompter.text, count)
        found = evaluator.run(label, policy.version, policy.sha256)
    return structs.replace(found, source=tested_name(config.tasks)) if test else found


def tasks_for(config: Config, prompter: "Prompter", *, test: bool) -> "tuple[Task, ...]":
    """What is answered."""
    from learner.tasks.tasks import load_tasks, load_test

    if test:
        tasks, _ = load_test(config.tasks, prompter, config.verifier.kind)
        if not tasks:
            raise DataError(
                f"tasks.source = '{config.tasks.source}' has no test set; name one with tasks.test in the next run, or"
                " evaluate on the held-out tasks without --test."
            )
    else:
        tasks = load_tasks(config.tasks, prompter, config.verifier.kind).held_out
    if not tasks or config.eval.problems == 0:
        raise DataError("There are no held-out tasks to evaluate on; set tasks.held_out and eval.problems.")
    return tasks


def tested_name(config: TasksConfig) -> str:
    """`gsm8k test`"""
    from learner.tasks.sources import place_of_test

    return " ".join(filter(None, place_of_test(config) or ()))


def adapter_of(config: Config, checkpoint: Checkpoint | None) -> bytes:
    """The checkpoint's file, or the run's adapter as it was before the first step."""
    from learner.state import ADAPTER
    from shared.model.adapter_file import adapter_bytes, read_layout
    from shared.model.base_cache import cached_base
    from shared.seeding import derive

    if checkpoint:
        return checkpoint.files[ADAPTER]
    adapter = read_layout(cached_base(config.model).folder, config.lora).adapter()
    adapter.initialise(derive(config.run.seed, "adapter"))
    return adapter_bytes(adapter)
