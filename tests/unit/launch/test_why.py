"""`why`: planted faults, each the first verdict of its run; healthy runs, in which nothing is found."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.commands.evaluate import first_adapter
from launch.presets.load import PRESETS_DIR, load_config
from launch.why.command import KeptVerdicts, add_verdict, verdicts, why
from launch.why.updates import rate_too_small
from launch.why.view import REWARD, RunView, view_of
from protocol.outcome import Outcome
from shared.config.load import read_config
from shared.config.model import LoraConfig, ModelConfig
from shared.config.tree import warm_start
from shared.run.evaluation import Decoded, Evaluation, TaskResult, share_of, write_evaluation
from shared.run.reader import Run
from shared.run.run_dir import RunDir
from shared.run.summary import RunVerdict, Status, read_summary
from tests.support.planted_runs import always, every, made_up, step_of, trained, written

pytestmark = pytest.mark.usefixtures("one_thread")

Maker = Callable[[Path], RunDir]
FLAT: dict[str, Any] = {"reward_mean": 0.5}
LOW_RATE = {"optimizer.lr": 1e-6, "model.path": "Qwen/Qwen2.5-0.5B"}
LAGGED = {"pipeline.max_lag": 4}
DISTILLED = {"loss.kind": "opd", "teacher.prompt": '"Think."'}
FOUR_AT_WORK = {f"box-{place}/waiting": 0.2 for place in range(4)} | {"gone/waiting": 1.0}


def trains(judge: Any = None, **keys: Any) -> Maker:
    return lambda path: trained(path, judge, **keys)


def says(**curves: Any) -> Maker:
    return lambda path: made_up(path, **curves)


def zero_adapter(path: Path) -> RunDir:
    """With the adapter of the first step in its checkpoint."""
    run = made_up(path, **FLAT)
    folder = run.checkpoints / "step-000024"
    folder.mkdir()
    adapter = first_adapter(ModelConfig(), LoraConfig(), seed=0)
    (folder / "adapter_model.safetensors").write_bytes(adapter)
    return run


def zero_at_first(path: Path) -> RunDir:
    """Its newest checkpoint is of steps in which no group taught anything."""
    run = made_up(path, grad_norm=lambda step: math.nan if step <= 2 else 0.1)
    folder = run.checkpoints / "step-000002"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(first_adapter(ModelConfig(), LoraConfig(), seed=0))
    return run


def refused_at(path: Path, step: int, steps: int, **curves: Any) -> RunDir:
    """A failed run with one batch in quarantine."""
    run = made_up(path, steps=steps, status="failed", **curves)
    run.quarantine.mkdir()
    (run.quarantine / f"step-{step:06d}.safetensors").write_bytes(b"")
    return run


def evaluated(run: RunDir, accuracies: dict[str, float], *, tasks: bool = True) -> RunDir:
    for version, (label, accuracy) in enumerate(accuracies.items()):
        right = [float(index < 100 * accuracy) for index in range(100)]
        share = share_of(right)
        whole = {"correct": share.correct, "accuracy": share.accuracy, "low": share.low, "high": share.high, "n": 100}
        results = [
            TaskResult(question="", answer="", greedy="correct" if each else "wrong", sampled=each, last_words="")
            for each in right
        ]
        decoded = Decoded(**whole)
        found = Evaluation(
            label=label,
            version=version,
            n=100,
            seed=0,
            adapter_sha256="",
            tasks_sha256="",
            source="embedded",
            verifier="gsm8k",
            greedy=decoded,
            sampled=decoded,
            task_results=tuple(results) * tasks,
        )
        write_evaluation(run.eval, found)
    return run


def held_out_falls(path: Path, *, tasks: bool = True) -> RunDir:
    return evaluated(made_up(path), {"base": 0.7, "step-000010": 0.72, "final": 0.4}, tasks=tasks)


def warm(path: Path, loss: Any = (2.0, 0.5), steps: int = 24) -> RunDir:
    """A warm start has a loss and no rewards."""
    nothing = dict.fromkeys(("reward_mean", "mismatch_mean", "importance_ess"), math.nan)
    config = warm_start(load_config("embedded", here=False))
    rows = [step_of(step, steps, nothing | {"loss": loss}) for step in range(1, steps + 1)]
    return written(path, config, rows)


LR = "the learning rate is meant for full fine-tuning"
KILLED, FLAT_REWARD = "the run was killed", "the reward does not move"
WRONG, RIGHT = "all groups alike, all wrong", "all groups alike, all right"
EXHAUSTED, REFUSED = "the curriculum is exhausted", "updates are refused"
DISAGREE, CAPPED = "reward and outcome disagree", "importance weights are at the cap"
TRAINED: dict[str, tuple[str, Maker]] = {
    "cut": ("answers are cut off", trains(rollout__max_new_tokens=6)),
    "boxed": ("nothing is parsed", trains(verifier__kind="math", verifier__strict="true")),
    "all wrong": (WRONG, trains(always(False))),
    "all right": (RIGHT, trains(always(True))),
    "cold": ("all groups alike, each in its own way", trains(rollout__temperature=0.001)),
    "full fine-tuning": (LR, trains(run__steps=10, optimizer__lr=1e-6)),
    "far too large a rate": ("the policy broke", trains(optimizer__lr=0.3, run__steps=6)),
    "timeouts": ("the verifier fails: timeout", trains(every(6, Outcome.TIMEOUT))),
    "errors": ("the verifier fails: error", trains(every(6, Outcome.ERROR), verifier__on_error="drop")),
    "abstains": ("the verifier fails: abstain", trains(every(1, Outcome.ABSTAIN))),
    "all refused": (
        REFUSED,
        trains(guard__on_fault="skip", guard__grad_norm_limit=1e-9, guard__skips_in_a_row=100),
    ),
}
WRITTEN: dict[str, tuple[str, Maker]] = {
    "errors beside abstentions": ("the verifier fails: error", says(error=0.3, abstain=0.4)),
    "one refused, stopped": (REFUSED, lambda path: refused_at(path, 4, steps=3)),
    "adapter zero": ("the adapter is still zero", zero_adapter),
    "rate of another model": (LR, says(**FLAT, sets=LOW_RATE)),
    "collapse": ("entropy collapses", says(reward_mean=(0.5, 0.45), entropy_mean=lambda step: 0.5 * 0.8**step)),
    "explosion": ("entropy explodes", says(reward_mean=(0.5, 0.1), entropy_mean=(0.3, 3.0))),
    "explosion, flat": ("entropy explodes", says(**FLAT, entropy_mean=(0.3, 2.0))),
    "mismatch in fp32": ("mismatch grows", says(mismatch_mean=(1e-6, 8e-3), sets={"compute.dtype": "fp32"})),
    "mismatch in bf16": ("mismatch grows", says(mismatch_mean=(1e-3, 5e-2), sets={"compute.dtype": "bf16"})),
    "mismatch at a lag": ("mismatch grows", says(mismatch_mean=(0.01, 0.4), sets=LAGGED)),
    "capped": (CAPPED, says(importance_capped=(0.0, 0.4), importance_ess=0.7, sets=LAGGED)),
    "few effective": (CAPPED, says(importance_ess=(1.0, 0.2), sets=LAGGED)),
    "scaled down": ("every gradient is scaled down", says(**FLAT, grad_norm=40.0)),
    "actor is slow": (
        "the learner waits for the actor",
        says(rollout_s=3.0, update_s=0.5, step_s=3.1, sets={"pipeline.max_lag": 1}),
    ),
    "learner is slow": (
        "the actor waits for the learner",
        says(rollout_s=0.5, update_s=3.0, step_s=3.1, sets={"pipeline.max_lag": 1}),
    ),
    "actor is slow, in turns": ("the learner waits for the actor", says(rollout_s=9.5, update_s=0.4, step_s=10.0)),
    "verifier is slow": ("both wait for the verifier", says(verify_s=4.0, step_s=5.0)),
    "nobody computes": ("both processes wait", says(idle_s=4.0, step_s=5.0)),
    "longer": ("answers grow without more reward", says(**FLAT, length_mean=(20.0, 60.0))),
    "few tasks left": (
        EXHAUSTED,
        says(curriculum_effective_tasks=(12.0, 3.0), sets={"curriculum.kind": "pass_rate"}),
    ),
    "last level solved": (
        EXHAUSTED,
        says(reward_mean=(0.4, 1.0), groups_idle=(4, 20), sets={"curriculum.kind": "levels"}),
    ),
    "held-out falls": (DISAGREE, held_out_falls),
    "held-out falls, in intervals": (DISAGREE, lambda path: held_out_falls(path, tasks=False)),
    "right ones fall": (DISAGREE, says(reward_mean=(0.3, 0.9), correct=(0.6, 0.2))),
    "flat": (FLAT_REWARD, says(**FLAT)),
    "flat while the rate rises": (FLAT_REWARD, says(**FLAT, sets=LOW_RATE | {"optimizer.warmup_steps": 20})),
    "falls": ("the reward falls", says(reward_mean=(0.6, 0.3))),
    "cut, made up": ("answers are cut off", says(reward_mean=0.05, truncated=0.9)),
    "no cause": ("a process failed", says(status="failed")),
    "one refused long before": ("a process failed", lambda path: refused_at(path, 3, steps=24)),
    "a mismatch from none": ("mismatch grows", says(mismatch_mean=lambda step: 0.0 if step <= 10 else 1.0)),
    "a warm start diverges": ("the loss rises", lambda path: warm(path, loss=(1.2, 13.0))),
    "a distillation diverges": (
        "the teacher is left",
        says(teacher_kl=(0.1, 3.0), sets=DISTILLED),
    ),
    "verifier is slow, of several actors": (
        "both wait for the verifier",
        says(rollout_s=2.0, verify_s=16.0, step_s=5.0, actors=FOUR_AT_WORK),
    ),
}
HEALTHY: dict[str, tuple[str, Maker]] = {
    "goes on": ("learning", says()),
    "ended": ("finished", says(status="done")),
    "solved from the start": ("steady", says(reward_mean=0.93)),
    "short": ("too early to say", says(steps=4)),
    "shorter than a finding": ("too early to say", says(steps=10, **FLAT)),
    "reasons longer": ("learning", says(length_mean=(20.0, 90.0))),
    "grows sure": ("learning", says(entropy_mean=(0.5, 0.1))),
    "a lag": ("learning", says(mismatch_mean=0.02, importance_ess=0.95, sets=LAGGED)),
    "evaluated": ("learning", lambda path: evaluated(made_up(path), {"base": 0.7, "final": 0.68})),
    "a warm start": ("learning", warm),
    "a warm start whose loss rises a little": ("too early to say", lambda path: warm(path, loss=(1.0, 1.4))),
    "a warm start of few steps": ("too early to say", lambda path: warm(path, loss=(1.2, 13.0), steps=14)),
    "a teacher that is copied": ("learning", says(teacher_kl=(0.001, 0.0018), sets=DISTILLED)),
    "a large gradient": ("learning", says(grad_norm=40.0)),
    "several actors": ("learning", says(rollout_s=12.0, verify_s=4.0, update_s=1.4, step_s=5.6, actors=FOUR_AT_WORK)),
    "zero before its first update": ("learning", zero_at_first),
}

REAL: dict[str, Maker] = {
    "seed 1": trains(run__steps=10, run__seed=1, rollout__group=8),
    "seed 2": trains(run__steps=10, run__seed=2, rollout__group=8),
    "gsm8k": trains(preset="gsm8k_8gb_embedded", rollout__prompts=6),
    "math": trains(preset="math_8gb_embedded", rollout__prompts=6),
    "levels": trains(preset="continual_3stage_embedded", rollout__prompts=6),
}


def told(run: RunDir) -> list[RunVerdict]:
    """As of a run that goes on, unless its summary says that it has ended."""
    with run.locked():
        return verdicts(view_of(Run(run.path)))


def first(run: RunDir) -> RunVerdict:
    return told(run)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*TRAINED, *WRITTEN])
def test_a_planted_fault_is_the_first_verdict(name: str, run_path: Path) -> None:
    expected, make = (TRAINED | WRITTEN)[name]
    found = told(make(run_path))
    assert found[0].name == expected, found
    assert found[0].fault and found[0].evidence and found[0].remedy
    for each in found:
        # A remedy that `run` refuses would be no help.
        keys = [key.rstrip(".,;)") for key in re.findall(r"--set (\S+)", each.remedy)]
        assert all(load_config("embedded", [key], here=False) for key in keys)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name: str, run_path: Path) -> None:
    expected, make = HEALTHY[name]
    found = told(make(run_path))
    assert [(each.name, each.fault) for each in found] == [(expected, False)], found


def test_no_preset_has_a_rate_that_is_called_too_small() -> None:
    rows = [{"step": float(step), "grad_norm": 0.1, REWARD: 0.5} for step in range(1, 61)]
    views = {path.stem: RunView(config=read_config(path), rows=rows) for path in PRESETS_DIR.glob("*.toml")}
    assert [name for name, view in views.items() if list(rate_too_small(view))] == []


SLOW = {"gsm8k", "math", "seed 2"}
REAL_RUNS = [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in REAL]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", REAL_RUNS)
def test_nothing_is_found_in_a_short_run_of_a_preset(name: str, run_path: Path) -> None:
    found = told(REAL[name](run_path))
    assert not any(each.fault for each in found), found
    assert found[0].name in ("learning", "too early to say", "steady")


@pytest.mark.parametrize(("status", "ending"), [("running", KILLED), ("stopped", "the run was stopped")])
@pytest.mark.parametrize(("steps", "curves", "faults"), [(4, {}, []), (24, {}, []), (24, FLAT, [FLAT_REWARD])])
def test_a_run_that_was_killed_or_stopped_is_to_be_resumed(
    status: Status, ending: str, steps: int, curves: dict[str, Any], faults: list[str], run_path: Path
) -> None:
    run = made_up(run_path, steps=steps, status=status, **curves)
    found = verdicts(view_of(Run(run.path)))
    assert [each.name for each in found] == [*faults, ending]
    assert f"after {steps} of {steps} steps" in found[-1].evidence and "`resume`" in found[-1].remedy
    add_verdict(run)
    summary = read_summary(run)
    assert summary and summary.why == found[0]


def test_that_a_process_failed_is_said_beside_another_fault(run_path: Path) -> None:
    found = verdicts(view_of(Run(made_up(run_path, status="failed", **FLAT).path)))
    assert [each.name for each in found] == [FLAT_REWARD, "a process failed"]
    assert found[-1].evidence.startswith("the run ended after 24 of 24 steps; reward 0.5")
    assert "the logs in logs/" in found[-1].remedy, "a warm start has no actor's log"


def test_the_verdicts_of_a_long_run_that_goes_on_are_made_again_less_often(run_path: Path) -> None:
    run = made_up(run_path, steps=2000)
    with run.locked():
        reader = Run(run.path)
        kept = KeptVerdicts(reader)
        first = kept.of(reader.stamp())
        run.metrics.write_bytes(run.metrics.read_bytes() * 2)
        assert kept.of(reader.stamp()) is first
    assert kept.of(reader.stamp())[-1].name == KILLED


def test_there_are_thirty_planted_runs() -> None:
    assert len(TRAINED | WRITTEN) >= 30


def test_the_command_prints_the_first_and_the_others(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(run_path, status="done", **FLAT, length_mean=(20.0, 60.0))
    assert why(directory=run_path, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("answers grow without more reward: the mean length grew from")
    assert lines[1].startswith("also: the reward does not move:")
    assert why(directory=run_path, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told] == ["answers grow without more reward", "the reward does not move"]
    assert told[0].keys() == {"name", "fault", "evidence", "remedy", "sure", "harm"}


def test_the_summary_gets_the_first_verdict(run_path: Path) -> None:
    run = made_up(run_path, **FLAT)
    add_verdict(run)
    summary = read_summary(run)
    assert summary and summary.why == first(run) and summary.steps == 24


def test_a_run_without_rows_or_summary_has_not_started_or_is_too_young(run_path: Path) -> None:
    run = made_up(run_path, steps=2)
    run.metrics.unlink()
    run.summary.unlink()
    (found,) = verdicts(view_of(Run(run.path)))
    assert (found.name, found.remedy) == ("not started", "Start it with `resume`")
    with run.locked():
        (found,) = verdicts(view_of(Run(run.path)))
        assert (found.name, found.remedy) == ("too early to say", "Let it train")
    add_verdict(run)
    assert not run.summary.exists()


def test_a_short_run_that_is_done_is_not_told_to_go_on_training(run_path: Path) -> None:
    found = first(made_up(run_path, steps=2, status="done"))
    assert found.evidence == "2 steps, at least 5 are needed"
    assert found.remedy == "Train further with `resume --steps`"


def test_a_loss_that_was_not_measured_in_the_first_steps_is_a_dash(run_path: Path) -> None:
    run = warm(run_path, loss=lambda step: math.nan if step <= 4 else 1.0, steps=12)
    assert first(run).evidence.startswith("loss - at first, 1.00 now, +0.0 standard errors")


def test_rows_that_cannot_be_read_do_not_count(run_path: Path) -> None:
    run = made_up(run_path)
    with run.metrics.open("ab") as file:
        file.write(b"\0\0\0\n")
    assert first(run).name == "learning"
