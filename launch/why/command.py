"""`why RUN`: what a run is doing, and what would help. When a run ends, its first verdict is printed and kept in
summary.json.

    files -> RunView -> rules -> verdicts, by sure * harm, the largest first

The fault that costs training the most comes first, so that is the one to look at. Without a fault the verdict says what
the run is doing: `learning`, `finished`, `steady`, `not started`, or that it is too early to say. That a run was
killed, stopped or failed is said last.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from launch.display.console import make_console
from launch.display.watch import goal, number
from launch.why import answers, updates
from launch.why.answers import NEARLY_ALL
from launch.why.view import REWARD, RunView, view_of
from shared.run.reader import Run
from shared.run.run_dir import RunDir
from shared.run.summary import RunVerdict, read_summary, with_error, write_summary

FEWEST = 5
"""Steps below which only a refused update is a finding: the shares of a few groups say little."""
VERDICT_SHARE = 0.002
"""Of the time, at most, goes into the verdicts of a run that goes on: with many steps they are made less often."""


def why(*, directory: Path, as_json: bool) -> int:
    found = verdicts(view_of(Run(directory)))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return 0
    console = make_console()
    for place, verdict in enumerate(found):
        console.print(("" if place == 0 else "also: ") + str(verdict), soft_wrap=True, markup=False, highlight=False)
    return 0


def add_verdict(run: RunDir, error: str = "") -> None:
    """Into summary.json, once the learner has ended; nothing if it wrote none. error: with which the run ended."""
    summary = read_summary(run)
    if error:
        summary = with_error(summary, error)
        with run.locked():
            write_summary(run, summary)
    if summary is not None:
        # Before the lock is taken: a run that somebody holds counts as running.
        first = verdicts(view_of(Run(run.path)))[0]
        with run.locked():
            write_summary(run, msgspec.structs.replace(summary, why=first))


def verdicts(view: RunView) -> list[RunVerdict]:
    """At least one; the first is what to look at."""
    if len(view.rows) < FEWEST:
        rules = (updates.refused,)
    else:
        rules = (*answers.RULES, *updates.RULES) if view.config.compares else updates.WITHOUT_REWARD
    faults = sorted((found for rule in rules for found in rule(view)), key=lambda found: -found.rank)
    return [*faults, *early_end(view)] or list(without_fault(view))


class KeptVerdicts:
    """The verdicts of a run that is looked at again and again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.stamp = ""
        self.again = 0.0
        """When the verdicts of a run that goes on may be made again."""
        self.found: list[RunVerdict] = []

    def of(self, stamp: str) -> list[RunVerdict]:
        """stamp: of the run. Raises UserError if a file of it is damaged."""
        began = time.monotonic()
        if self.stamp != stamp and not (stamp.startswith("running") and began < self.again):
            self.found = verdicts(view_of(self.run))
            ended = time.monotonic()
            self.stamp, self.again = stamp, ended + (ended - began) / VERDICT_SHARE
        return self.found


def early_end(view: RunView) -> Iterator[RunVerdict]:
    """That it was killed or stopped, or that a process failed. It costs no training, so it comes last."""
    done = f"after {len(view.rows)} of {view.config.run.steps} steps"
    told = f"{done}; {goal_change(view)}" if len(view.rows) >= FEWEST else done
    if view.error and not view.begun:
        remedy = (
            "Nothing was learned: put that right, then `resume` it; if its configuration is wrong, `run` again, which"
            " may have the same --out"
        )
        yield broken_off("the run failed at its start", view.error, remedy)
    elif view.error:
        yield broken_off("the run failed", f"{view.error} ({told})", "Put that right, then go on with `resume`")
    elif view.state == "dead":
        remedy = "Go on with `resume`; logs/learner.log and logs/supervisor.log may say why"
        yield broken_off("the run was killed", f"its learner is gone {told}", remedy)
    elif view.state == "failed":
        remedy = "Read the end of the logs in logs/, then `resume`"
        yield broken_off("a process failed", f"the run ended {told}", remedy)
    elif view.state == "stopped":
        yield fine("the run was stopped", told, "Go on with `resume`")


def goal_change(view: RunView) -> str:
    """How the metric that training is about has changed."""
    key = goal(view.rows)
    was, now = (number(amount, ".2f") for amount in (view.was(key), view.now(key)))
    return f"{key.removesuffix('/mean')} {was} at first, {now} now, {view.z(key):+.1f} standard errors"


def without_fault(view: RunView) -> Iterator[RunVerdict]:
    """What a run does that no rule objects to."""
    steps, key, reward = len(view.rows), goal(view.rows), goal_change(view)
    solved = key == REWARD and view.now(key) >= NEARLY_ALL
    if steps < FEWEST:
        yield of_few_steps(view)
    elif view.state == "done" and (view.rises or solved):
        yield fine("finished", reward, "`compare` and `export` come next")
    elif view.rises:
        yield fine("learning", f"{reward} in {steps} steps", "Let it train")
    elif solved:
        yield fine("steady", reward, "It solves these tasks; harder ones would teach more")
    else:
        yield fine("too early to say", f"{reward} in {steps} steps, no fault found", longer(view))


def of_few_steps(view: RunView) -> RunVerdict:
    steps = len(view.rows)
    if view.state == "new" and not view.in_use:
        return fine("not started", f"{steps} steps", "Start it with `resume`")
    remedy = longer(view) if view.state == "done" else "Let it train"
    return fine("too early to say", f"{steps} steps, at least {FEWEST} are needed", remedy)


def longer(view: RunView) -> str:
    return "Train further with `resume --steps`" if view.config.can_be_extended else "Begin a run of more steps"


def broken_off(name: str, evidence: str, remedy: str) -> RunVerdict:
    return RunVerdict(name=name, fault=True, evidence=evidence, remedy=remedy, sure=1.0, harm=0.0)


def fine(name: str, evidence: str, remedy: str) -> RunVerdict:
    return RunVerdict(name=name, fault=False, evidence=evidence, remedy=remedy, sure=0.0, harm=0.0)
