"""`eval`: accuracy of a checkpoint of a run, or of its base, with 95 % intervals. Runs in this process alone.

Uses the run's held-out tasks, or with --test the test set (`tasks.test`), which training never reads. Writes
eval/<label>.json and .md; the label of a test set ends in `-test`. It replaces no evaluation of other tasks, draws or
caps: the new one then has a longer label such as `base-n4x8`. `compare` reads the JSON. Progress goes to stderr.
On a card it takes turns with the processes of runs. `--follow` evaluates while a run trains (launch/evaluator).
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from msgspec import structs

from launch.commands.open_run import open_run
from launch.display.console import make_console
from launch.display.report import markdown, print_evaluation
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from learner.durable.find_adapter import adapters_of
from shared.config.data import TasksConfig, VerifierKind
from shared.config.load import check_together
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig, ComputeConfig, EvalConfig, sent_dtype
from shared.config.tree import Config
from shared.errors import DataError
from shared.process.entry_point import keep_to_itself
from shared.run.evaluation import Evaluation, label_for, write_evaluation
from shared.run.files import disk_errors, make_folder, write_whole
from shared.run.run_dir import RUN_DIR, RunDir

if TYPE_CHECKING:
    from actor.rollout import Beat
    from launch.commands.in_process import Filled, LocalFiller
    from learner.evaluation.evaluate import Evaluator
    from learner.tasks.tasks import Task
    from shared.model.prompt import Prompter
    from shared.process.lease import ComputeLease

PROBE_BYTES = 64 * 1024
"""About what an evaluation takes of a disk."""


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
    refuse_unwritable(run.eval)
    own = config.eval
    given = {"problems": problems, "samples": samples, "long_cap": long_cap}
    config = structs.replace(config, eval=overridden(own, given))
    check_together(config)
    chosen = None if base else choose_checkpoint(run, config.checkpoint.keep, checkpoint)
    with adapter_evaluator(config, run, test=test, on_filled=say_how_far) as evaluator:
        adapter = base_adapter(run, config.model, config.lora, config.run.seed) if base else b""
        found = evaluate(evaluator, chosen, adapter, of="-test" if test else "")
    found = structs.replace(found, source=name_of_test(config.tasks)) if test else found
    # Before it is written: the disk may be full by now.
    print_evaluation(make_console(), found)
    # The run never evaluates on the test set, nor at all without problems.
    label = label_for(run.eval, found, as_the_run=test or own.problems == 0 or config.eval == own)
    if label != found.label:
        print(f"'{found.label}' is for other tasks, draws or caps; this one is '{label}'")
        found = structs.replace(found, label=label)
    file = write_evaluation(run.eval, found)
    write_whole(file.with_suffix(".md"), markdown(found).encode(), place=RUN_DIR)
    print(f"written to {file} and {file.with_suffix('.md').name}")
    return 0


def refuse_unwritable(folder: Path) -> None:
    """Nothing is computed whose result could not be kept."""
    make_folder(folder, place=RUN_DIR)
    with disk_errors(folder, RUN_DIR), TemporaryFile(dir=folder) as probe:
        probe.write(bytes(PROBE_BYTES))
        probe.flush()


def say_how_far(filled: int, wanted: int) -> None:
    """Each way to decode begins at the first task again."""
    print(f"evaluated {filled} of {wanted} tasks", file=sys.stderr, flush=True)


def overridden(config: EvalConfig, given: dict[str, int | None]) -> EvalConfig:
    """Options of the command line win over the run's configuration."""
    return structs.replace(config, **{key: value for key, value in given.items() if value is not None})


class AdapterEvaluator:
    """Evaluates one adapter after the other with the same actor."""

    def __init__(self, evaluator: "Evaluator", filler: "LocalFiller", *, rounded: bool = False) -> None:
        """rounded: to bf16, as the run sends its adapters, so that `eval` finds what the run's own evaluations find."""
        self.evaluator = evaluator
        self.filler = filler
        self.rounded = rounded

    @property
    def tasks_sha256(self) -> str:
        return self.evaluator.tasks_sha256

    def run(self, label: str, version: int, adapter: bytes) -> Evaluation:
        """adapter: its file."""
        from learner.update.publisher import policy_message
        from shared.model.adapter_file import digest, rounded_file

        policy = policy_message(version, rounded_file(adapter) if self.rounded else adapter)
        self.filler.publish(policy, oldest_needed=version)
        return self.evaluator.run(label, version, digest(adapter))


def evaluate(evaluator: AdapterEvaluator, checkpoint: Checkpoint | None, base: bytes, *, of: str) -> Evaluation:
    """base: the adapter that the run began with, for no checkpoint. of: the end of the label."""
    from learner.durable.state import ADAPTER

    if checkpoint is None:
        return evaluator.run(f"base{of}", 0, base)
    return evaluator.run(f"step-{checkpoint.step:06d}{of}", checkpoint.step, checkpoint.files[ADAPTER])


@contextmanager
def adapter_evaluator(
    config: Config,
    run: RunDir,
    *,
    test: bool = False,
    beat: "Beat" = lambda phase: None,
    on_filled: "Filled" = lambda filled, wanted: None,
) -> "Iterator[AdapterEvaluator]":
    """On a card all of it is done in turns. beat: called while it waits, loads and decodes; it may raise."""
    from launch.commands.in_process import LocalFiller, local_actor
    from learner.evaluation.evaluate import Evaluator

    lease = evaluators_lease(config.actor, config.compute, run)
    with ExitStack() as opened:
        with lease.hold("evaluator", lambda: beat("waiting for its turn")):
            actor = opened.enter_context(local_actor(config, lease))
            actor.engine.sleep()
        tasks = tasks_for(config.tasks, config.verifier.kind, actor.prompter, test=test)
        if not tasks or config.eval.problems == 0:
            raise DataError("There are no held-out tasks to evaluate on; set tasks.held_out and eval.problems.")
        filler = LocalFiller(actor.rollout, beat, on_filled)
        evaluator = Evaluator(config, tasks, filler, actor.prompter.text)
        yield AdapterEvaluator(evaluator, filler, rounded=sent_dtype(config.link, config.compute) == "bf16")


def evaluators_lease(actor: ActorConfig, compute: ComputeConfig, run: RunDir) -> "ComputeLease":
    """Of the actor's card. None is needed on a CPU, or if servers compute."""
    from launch.commands.in_process import NO_LEASE
    from shared.base.load import pick_device
    from shared.process.lease import lease_for
    from shared.run.forecast import planned_on_card

    if actor.is_elsewhere:
        return NO_LEASE
    device = pick_device(compute.device, compute.actor_card)
    if device.type == "cpu":
        return NO_LEASE
    return lease_for(compute, device, run.lease, planned=planned_on_card(run, "actor"))


def base_adapter(run: RunDir, model: ModelConfig, lora: LoraConfig, seed: int) -> bytes:
    """What the run begins with."""
    return adapters_of(run, lora.start_from, "").start or first_adapter(model, lora, seed)


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
