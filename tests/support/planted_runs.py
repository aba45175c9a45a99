"""Runs with one planted fault: trained here in one process, or written with the real writer from made-up curves."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actor.scoring.scores import Scores, ScoresTogether
from actor.verifiers.verdict import ScoreJob, Verdict
from actor.verifiers.verifier import score_job
from benchmarks.local_run import run_here, verdict
from launch.presets.load import load_config
from protocol.outcome import Outcome
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.run.files import LineLog
from shared.run.metrics import MetricsLog, StepMetrics
from shared.run.run_dir import RunDir
from shared.run.summary import Status, Summary, write_summary

Judge = Callable[[int, ScoreJob], Verdict]
"""From the place of a completion in its order."""
SMALL = {
    "run.steps": 8,
    "rollout.prompts": 4,
    "rollout.group": 4,
    "rollout.max_new_tokens": 40,
    "eval.problems": 0,
    "compute.learner_threads": 1,
    "compute.actor_threads": 1,
}


class JudgedHere:
    """A scorer without processes."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def begin(self) -> Scores:
        return ScoresTogether(self.score)

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        return [self.judge(place, job) for place, job in enumerate(jobs)]


def built_in(config: Config) -> Judge:
    """The verifier of the configuration."""
    kind, strict = config.verifier.kind, config.verifier.strict
    return lambda place, job: score_job(kind, job, strict=strict)


def always(right: bool) -> Judge:
    return lambda place, job: verdict(right)


def every(count: int, outcome: Outcome) -> Judge:
    """Each `count`-th completion has this outcome, the others are right and wrong in turns."""

    def judge(place: int, job: ScoreJob) -> Verdict:
        if place % count == 0:
            return Verdict(outcome=outcome, score=0.0, final_answer=None, note="planted")
        return verdict(sum(job.completion_ids) % 2 == 0)

    return judge


def trained(path: Path, judge: Judge | None = None, preset: str = "embedded", **keys: Any) -> RunDir:
    """Train with the real engine, loss and update; its rows are in a run directory."""
    config = configured(preset, SMALL | dotted(keys))
    done = run_here(config, scorer=JudgedHere(judge or built_in(config)))
    return written(path, config, done.rows)


def made_up(path: Path, steps: int = 24, status: Status = "running", sets: Any = None, **curves: Any) -> RunDir:
    """curves: field of StepMetrics -> value, (first, last) of a straight line, or a function of the step. The rest is a
    run that learns."""
    config = configured("embedded", {"run.steps": steps} | (sets or {}))
    return written(path, config, [step_of(step, steps, curves) for step in range(1, steps + 1)], status)


def dotted(keys: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in keys.items()}


def configured(preset: str, keys: dict[str, Any]) -> Config:
    return load_config(preset, [f"{key}={value}" for key, value in keys.items()], here=False)


def written(path: Path, config: Config, rows: Sequence[StepMetrics], status: Status = "running") -> RunDir:
    run = RunDir.create(path, config_to_json(config), min_free_bytes=0)
    log = MetricsLog(LineLog(run.metrics))
    for row in rows:
        log.log(row)
    write_summary(run, Summary(status=status, steps=len(rows), wall_s=1.0, adapter_sha256="ab" * 32))
    return run


LEARNS: dict[str, Any] = {
    "reward_mean": (0.5, 0.9),
    "groups_idle": (2, 9),
    "groups_total": 16,
    "groups_quarantined": 0,
    "entropy_mean": (0.13, 0.1),
    "selected_fraction": 1.0,
    "importance_mean": 1.0,
    "importance_capped": 0.0,
    "importance_ess": 1.0,
    "mismatch_mean": 2e-7,
    "mismatch_p99": 3e-6,
    "grad_norm": 0.1,
    "lr": 2e-3,
    "length_mean": 21.0,
    "truncated": 0.0,
    "rollout_s": 0.5,
    "verify_s": 0.01,
    "update_s": 0.4,
    "idle_s": 0.02,
    "step_s": 0.93,
    "curriculum_effective_tasks": 2048.0,
}
"""A healthy run of the embedded preset, rounded."""


def step_of(step: int, steps: int, curves: dict[str, Any]) -> StepMetrics:
    """One row. The reward is that of right completions, and it wiggles as sampling makes it."""
    shares = {Outcome(name): curves[name] for name in Outcome if name in curves}
    values = {name: at(value, step, steps) for name, value in (LEARNS | curves).items() if name not in set(Outcome)}
    outcomes = {outcome: float(at(value, step, steps)) for outcome, value in shares.items()}
    if "correct" not in curves:
        outcomes[Outcome.CORRECT] = min(values["reward_mean"], 1.0 - sum(outcomes.values()))
    outcomes[Outcome.WRONG] = max(0.0, 1.0 - sum(outcomes.values()))
    values["reward_mean"] += 0.02 * math.sin(2.4 * step) * (0 < values["reward_mean"] < 1)
    values["reward_std"] = math.sqrt(max(0.0, outcomes[Outcome.CORRECT] * (1 - outcomes[Outcome.CORRECT])))
    names = {field.name for field in msgspec.structs.fields(StepMetrics)}
    rest: dict[str, Any] = dict.fromkeys(names - values.keys(), math.nan)
    whole: dict[str, Any] = {"step": step, "policy_version": step - 1, "curriculum_stage": 0, "time_s": 1.0 * step}
    named: dict[str, Any] = {
        "rewards": {},
        "logged": {},
        "card_mb": {},
        "evaluated": {},
        "energy": {},
        "actors": {},
        "limited": {},
        "outcomes": outcomes,
    }
    return StepMetrics(**(rest | named | values | whole))


def at(value: Any, step: int, steps: int) -> Any:
    if callable(value):
        return value(step)
    if not isinstance(value, tuple):
        return value
    first, last = value
    return type(first)(first + (last - first) * (step - 1) / (steps - 1))
