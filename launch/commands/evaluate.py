"""`eval`: accuracy of a checkpoint of a run, or of its base, with 95 % intervals. Runs in this process alone.

Uses the run's held-out tasks, or with --test the test set (`tasks.test`), which training never reads. Writes
eval/<label>.json and .md; the label of a test set ends in `-test`. `compare` reads the JSON.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from launch.commands.open_run import open_run
from launch.display.console import make_console
from launch.display.report import markdown, print_evaluation
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from learner.durable.find_adapter import adapters_of
from shared.config.data import TasksConfig, VerifierKind
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import EvalConfig
from shared.config.tree import Config
from shared.errors import DataError
from shared.process.entry_point import keep_to_itself
from shared.run.evaluation import Evaluation, write_evaluation
from shared.run.files import write_whole

if TYPE_CHECKING:
    from learner.tasks.tasks import Task
    from shared.model.prompt import Prompter


def evaluate_run(
    *,
    directory: Path,
    checkpoint: str,
    base: bool,
    problems: int | None,
    samples: int | None,
    long_cap: int | None,
    test: bool,
) -> int:
    """Evaluate, print, and write to eval/."""
    keep_to_itself()
    run, config = open_run(directory, compute_as="actor")
    given = {"problems": problems, "samples": samples, "long_cap": long_cap}
    config = structs.replace(config, eval=overridden(config.eval, given))
    chosen = None if base else choose_checkpoint(run, config.checkpoint.keep, checkpoint)
    found = evaluate(config, chosen, test=test, start=adapters_of(run, config.lora.start_from, "").start)
    file = write_evaluation(run.eval, found)
    write_whole(file.with_suffix(".md"), markdown(found).encode())
    print_evaluation(make_console(), found)
    print(f"written to {file} and {file.with_suffix('.md').name}")
    return 0


def overridden(config: EvalConfig, given: dict[str, int | None]) -> EvalConfig:
    """Options of the command line win over the run's configuration."""
    return structs.replace(config, **{key: value for key, value in given.items() if value is not None})


def evaluate(config: Config, checkpoint: Checkpoint | None, *, test: bool, start: bytes = b"") -> Evaluation:
    """Without a checkpoint: the base, or the adapter that the run started from."""
    from launch.commands.in_process import LocalFiller, local_actor
    from learner.durable.state import ADAPTER
    from learner.evaluation.evaluate import Evaluator
    from learner.update.publisher import policy_message

    with local_actor(config) as actor:
        tasks = tasks_for(config.tasks, config.verifier.kind, actor.prompter, test=test)
        if not tasks or config.eval.problems == 0:
            raise DataError("There are no held-out tasks to evaluate on; set tasks.held_out and eval.problems.")
        adapter = start or first_adapter(config.model, config.lora, config.run.seed)
        adapter = checkpoint.files[ADAPTER] if checkpoint else adapter
        policy = policy_message(checkpoint.step if checkpoint else 0, adapter)
        filler = LocalFiller(actor.rollout)
        filler.publish(policy, oldest_needed=0)
        # A user's own reward function reads no final answers, so there is nothing to vote with.
        count = None if config.verifier.kind in ("callable", "environment") else actor.votes.count
        label = (f"step-{checkpoint.step:06d}" if checkpoint else "base") + ("-test" if test else "")
        evaluator = Evaluator(config, tasks, filler, actor.prompter.text, count)
        found = evaluator.run(label, policy.version, policy.sha256)
    return structs.replace(found, source=name_of_test(config.tasks)) if test else found


def tasks_for(config: TasksConfig, kind: VerifierKind, prompter: "Prompter", *, test: bool) -> "tuple[Task, ...]":
    from learner.tasks.tasks import load_tasks, load_test

    if not test:
        return load_tasks(config, prompter, kind).held_out
    tasks, _ = load_test(config, prompter, kind)
    if not tasks:
        raise DataError(
            f"tasks.source = '{config.source}' has no test set; name one with tasks.test in the next run, or evaluate"
            " on the held-out tasks without --test."
        )
    return tasks


def name_of_test(config: TasksConfig) -> str:
    """`gsm8k test`"""
    from learner.tasks.sources import place_of_test

    return " ".join(filter(None, place_of_test(config) or ()))


def first_adapter(model: ModelConfig, lora: LoraConfig, seed: int) -> bytes:
    """The run's adapter before its first step; it changes nothing about the base."""
    from shared.base.cache import cached_base
    from shared.model.adapter_file import adapter_bytes, read_layout
    from shared.seeding import derive

    adapter = read_layout(cached_base(model).folder, lora).adapter()
    adapter.initialise(derive(seed, "adapter"))
    return adapter_bytes(adapter)
