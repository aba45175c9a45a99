"""Rules about the update and the two processes: refused updates, adapter, learning rate, entropy, mismatch, importance
weights, gradient, and who waits for whom.

As in answers.py, a rule is a pure function of a RunView, and its threshold is a constant with where it comes from.
"""

import math
from collections.abc import Iterator

from launch.display.watch import known, mean, phase_seconds, steps_done
from launch.why.answers import NEARLY_ALL, percent
from launch.why.view import REWARD, SURE_Z, RunView, ratio
from shared.embedded import EMBEDDED
from shared.run.summary import RunVerdict

COLLAPSED, EXPLODED = 0.1, 2.0
"""Entropy now over entropy at first. Entropy is what reward is bought with (2505.22617), so a fall by ten with tasks
unsolved is a policy that has nothing left to try; our own healthy runs end at 0.6 to 0.9 of their first. A policy that
gets twice as unsure while it earns no more is drifting."""
NATS = 0.3
"""And at least this much more: a hundredth of a nat doubles by chance."""
LEFT_BEHIND, LEFT_BY = 1.5, 0.05
"""A loss, or the distance to a teacher, now over that at first, and at least how much more. A small one moves by half
of itself; one that diverges grows many times."""
SETTLED = 5
"""Steps in a window before a loss is judged: of three, one batch of hard answers makes a rise."""
LOST = 0.1
"""Share of its first right completions that a broken policy still gets. Chance and harder tasks cost far less."""
FEW_UPDATES = 8
"""Updates after the warm-up before a learning rate is judged."""
USUAL_LR, EMBEDDED_LR = 1e-4, 2e-3
"""For LoRA and a model of a billion parameters, and for the embedded one of a million."""
FAR_TOO_SMALL = 0.1
"""Of the usual rate. LoRA wants ten times the rate of full fine-tuning, which is 1e-6 in DAPO (LoRA without regret;
TRL's reproduction has 1e-5 against 1e-6)."""
GROWN = 3.0
"""Growth of the mean mismatch: rounding depends on the policy, but not that much (learner/update/mismatch.py)."""
MISMATCH = {"fp32": 1e-3, "other": 5e-3, "lag": 0.05}
"""Means below are rounding: the gate's own limits. With a lag the policies differ, and the weights correct that."""
CAPPED = 0.1
"""Share of importance weights at the cap. Truncated importance sampling (fengyao.notion.site/off-policy-rl) is biased
in those tokens; one in ten is no longer a correction of rounding."""
EFFECTIVE = 0.5
"""Effective sample size: half of the batch is lost."""
ALWAYS = 10
"""Steps in a row whose gradient is scaled down, by ten or more: then max_grad_norm is what sets the size of a step."""
REFUSED = 0.1
"""Share of steps whose update was refused. The guard's limit is 1000 times the median, so one is an accident."""
WAITS = 0.5
"""Share of a step in which a process waits, where both could work. TRL's LoRA on HF Jobs got its largest gains from
looking at exactly these two figures."""
HARDLY_WAITS = 0.25
"""Largest share in which the other one waits: if both wait as long, they take turns and neither holds up the other."""
ALONE = 0.9
"""Share of a step that one process takes where they take turns: the other one could be hidden behind it."""


def refused(view: RunView) -> Iterator[RunVerdict]:
    steps = sum(bool(count) for count in known(view.rows, "groups/quarantined"))
    # An older batch is of a step that went on without it.
    stopped = view.state == "failed" and max(view.refused, default=0) == steps_done(view.rows) + 1
    if stopped or steps >= max(1, REFUSED * len(view.rows)):
        yield RunVerdict(
            name="updates are refused",
            fault=True,
            evidence=f"{max(steps, len(view.refused))} updates in {len(view.rows)} steps had a gradient that is not"
            " finite or far too large; their batches are in quarantine/",
            remedy="`replay --batch` repeats one and names the cause; then try --set"
            f" optimizer.lr={view.config.optimizer.lr / 10:.2g}, or `resume --on-fault skip`",
            sure=1.0,
            harm=1.0,
        )


def still_zero(view: RunView) -> Iterator[RunVerdict]:
    saved = view.saved
    if saved and saved.zero == saved.matrices and (updates := view.updates_until(saved.step)):
        yield RunVerdict(
            name="the adapter is still zero",
            fault=True,
            evidence=f"all {saved.matrices} LoRA-B matrices are exactly 0 after {updates} updates",
            remedy=f"The updates are too small to count: look at optimizer.lr ({view.config.optimizer.lr:g}) and"
            " grad_norm in metrics.jsonl",
            sure=1.0,
            harm=0.99,
        )


def rate_too_small(view: RunView) -> Iterator[RunVerdict]:
    usual = EMBEDDED_LR if view.config.model.path in EMBEDDED else USUAL_LR
    rate = view.config.optimizer.lr
    updates = view.updates - view.updates_until(view.config.optimizer.warmup_steps)
    if rate < FAR_TOO_SMALL * usual and updates >= FEW_UPDATES and not view.rises:
        yield RunVerdict(
            name="the learning rate is meant for full fine-tuning",
            fault=True,
            evidence=f"optimizer.lr is {rate:g} and the reward has not moved in {updates} updates"
            f" ({view.was(REWARD):.2f}, {view.now(REWARD):.2f}); LoRA needs about ten times the rate",
            remedy=f"Try --set optimizer.lr={usual:g}",
            sure=0.95,
            harm=0.9,
        )


def entropy(view: RunView) -> Iterator[RunVerdict]:
    was, now = view.was("entropy/mean"), view.now("entropy/mean")
    if len(view.rows) < 2 * view.window or math.isnan(was) or math.isnan(now):
        return
    evidence = f"entropy went from {was:.3f} to {now:.3f} nats a token, the reward from {view.was(REWARD):.2f} to"
    evidence += f" {view.now(REWARD):.2f}"
    if now <= COLLAPSED * was and view.now("outcome/correct") < NEARLY_ALL:
        yield RunVerdict(
            name="entropy collapses",
            fault=True,
            evidence=evidence,
            remedy=f"Try --set optimizer.lr={view.config.optimizer.lr / 3:.2g}, --set loss.clip_high=0.28, or"
            " --set constraint.beta=1.0, which holds the tokens that lose entropy fastest",
            sure=0.98,
            harm=0.995,
        )
    elif now >= EXPLODED * was and now >= was + NATS and not view.rises:
        yield RunVerdict(
            name="entropy explodes",
            fault=True,
            evidence=evidence,
            remedy=f"Try --set optimizer.lr={view.config.optimizer.lr / 10:.2g}, or --set loss.kl_beta=0.05",
            sure=0.99,
            harm=0.99,
        )


def broken(view: RunView) -> Iterator[RunVerdict]:
    """It solved some of the tasks, and now it solves none: what it writes is cut off, or makes no sense."""
    best, now = max(known(view.early, "outcome/correct"), default=0.0), view.now("outcome/correct")
    if best >= LOST and now <= LOST * best and view.updates and not view.rises:
        yield RunVerdict(
            name="the policy broke",
            fault=True,
            evidence=f"{percent(best)} of the completions were right in one of the first {view.window} steps, now"
            f" {percent(now)}; optimizer.lr is {view.config.optimizer.lr:g}",
            remedy=f"Begin again with --set optimizer.lr={view.config.optimizer.lr / 10:.2g}",
            sure=0.985,
            harm=0.985,
        )


def mismatch(view: RunView) -> Iterator[RunVerdict]:
    was, now = view.was("mismatch/mean"), view.now("mismatch/mean")
    lag, dtype = view.config.pipeline.max_lag, view.config.compute.dtype
    floor = MISMATCH["lag"] if lag else MISMATCH.get(dtype, MISMATCH["other"])
    if now >= floor and now >= GROWN * was:
        growth = f"{now / was:.0f} times as much as at first" if was else "and not at all at first"
        yield RunVerdict(
            name="mismatch grows",
            fault=True,
            evidence=f"actor and learner differ by {now:.2g} nats a token, {growth}",
            remedy="Try --set pipeline.max_lag=0 and a smaller optimizer.lr"
            if lag
            else "Try --set compute.dtype=fp32, or the engine `hf` in place of vllm; `doctor` checks both",
            sure=0.95,
            harm=0.9,
        )


def weights(view: RunView) -> Iterator[RunVerdict]:
    capped, effective = view.now("importance/capped"), view.now("importance/ess")
    if capped >= CAPPED or effective <= EFFECTIVE:
        share = f"{percent(capped)} of them are at loss.importance_cap, and " * (capped > 0)
        lag = view.config.pipeline.max_lag
        yield RunVerdict(
            name="importance weights are at the cap",
            fault=True,
            evidence=f"{share}the step counts as {percent(effective)} of its tokens",
            remedy=f"The samples are too old: try --set pipeline.max_lag={lag // 2}"
            if lag
            else "Actor and learner disagree though no step is ordered ahead; `doctor`, and a smaller optimizer.lr",
            sure=0.9,
            harm=0.85,
        )


def loss_rises(view: RunView) -> Iterator[RunVerdict]:
    """What a warm start, or a distillation, should lower."""
    key, name = ("loss", "the loss rises") if view.config.is_warm_start else ("teacher/kl", "the teacher is left")
    was, now = view.was(key), view.now(key)
    grown = view.z(key) >= SURE_Z and now >= LEFT_BEHIND * was and now >= was + LEFT_BY
    if view.window >= SETTLED and grown:
        yield RunVerdict(
            name=name,
            fault=True,
            evidence=f"{key} went from {was:.3g} to {now:.3g} in {len(view.rows)} steps",
            remedy=f"Begin again with --set optimizer.lr={view.config.optimizer.lr / 3:.2g}",
            sure=0.9,
            harm=0.95,
        )


def always_clipped(view: RunView) -> Iterator[RunVerdict]:
    norms, limit = known(view.rows, "grad_norm")[-ALWAYS:], view.config.optimizer.max_grad_norm
    if len(norms) == ALWAYS and min(norms) >= 10 * limit and not view.rises:
        yield RunVerdict(
            name="every gradient is scaled down",
            fault=True,
            evidence=f"the smallest of the last {ALWAYS} norms was {min(norms):.2g}, optimizer.max_grad_norm is"
            f" {limit:g}, and the reward does not rise",
            remedy=f"Try --set optimizer.lr={view.config.optimizer.lr / 3:.2g}; if norms were always so, --set"
            f" optimizer.max_grad_norm={min(norms):.2g}",
            sure=0.8,
            harm=0.65,
        )


def waits(view: RunView) -> Iterator[RunVerdict]:
    """Which process waits, and how much. At a lag both may work at the same time; else they take turns."""
    times, step = [phase_seconds(row) for row in view.late], view.now("time/step_s")
    decode, verify, update, idle_s = (mean(times, phase) for phase in ("rollout", "verify", "update", "idle"))
    acts, idle, scoring = decode + verify, ratio(idle_s, step), ratio(verify, step)
    lag = view.config.pipeline.max_lag
    learner, actor, most = 1 - ratio(update, step), 1 - ratio(acts, step), WAITS if lag else ALONE
    if scoring >= WAITS:
        name, share, whole = "both wait for the verifier", scoring, "the step is scoring"
        remedy = f"Try --set verifier.workers={2 * view.config.verifier.workers}, or a faster reward function"
    elif idle >= WAITS:
        name, share, whole = "both processes wait", idle, "the step neither decoded, scored nor updated"
        remedy = "Look for other programs on this machine, a slow link or evaluations; `run --trace` shows the gaps"
    elif learner >= most and actor <= HARDLY_WAITS:
        name, share, whole = "the learner waits for the actor", learner, "the step is waiting"
        remedy = (
            "Add an actor (`key`), more actor.max_sequences, or a smaller rollout.max_new_tokens"
            if lag
            else "Add an actor (`key`), or --set pipeline.max_lag=1 where both can compute at the same time"
        )
    elif actor >= most and learner <= HARDLY_WAITS:
        name, share, whole = "the actor waits for the learner", actor, "the step is waiting"
        remedy = "Try --set loss.entropy_fraction=0.2, --set batch.recompute=never, or fewer loss.passes"
    else:
        return
    evidence = (
        f"{percent(share)} of {whole}: {step:.1f} s a step, {acts:.1f} s decoding and scoring, {update:.1f} s update"
    )
    yield RunVerdict(name=name, fault=True, evidence=evidence, remedy=remedy, sure=0.9, harm=0.4)


RULES = (refused, still_zero, rate_too_small, entropy, broken, mismatch, weights, always_clipped, waits)
WITHOUT_REWARD = (refused, still_zero, loss_rises, mismatch, weights)
"""For a warm start and for distillation, which do not learn from rewards."""
