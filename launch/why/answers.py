"""Rules about completions and what they earn: groups without a difference, cut off, not parsed, faults of the verifier,
reward against outcome, length, curriculum, and whether the reward moves.

A rule is a pure function of a RunView. It answers with a verdict or with nothing. Its threshold is a constant here,
with where it comes from.
"""

from collections.abc import Iterator, Sequence

from launch.display.watch import mean
from launch.why.view import REWARD, SURE_Z, RunView
from shared.run.evaluation import Evaluation, right
from shared.run.summary import RunVerdict
from shared.statistics import paired

ALIKE = 0.9
"""Share of groups without a difference. A step then learns from a tenth of what it sampled. TRL reports the share
(frac_reward_zero_std) and DAPO (2503.14476) samples until it is 0. Our own healthy runs end at 0.6 to 0.9."""
NEARLY_ALL = 0.9
"""Share of right or wrong completions that is called `all`."""
MOST = 0.5
"""Share of completions that are cut off or not parsed. Beyond a half, the verdict on most completions is about their
form. Healthy runs have below 0.1; miles' advisory looks at cut-off answers before anything else."""
FAULTY = 0.05
"""Share of completions on which the verifier failed. A sound one has 0; math-verify's timeouts that became zeros (TRL
PR 5281, verl PR 5635) were a few in a hundred."""
LONGER = 1.5
"""Growth of the mean length. Reasoning models grow with their reward (DeepSeek-R1, 2501.12948); length that grows
without it is the bias that Dr. GRPO (2503.20783) describes."""
MANY_STEPS = 20
"""Steps after which a reward that does not move is a finding: our own runs rise within 5 to 10, SmolLM2 within 20."""


def verifier_fails(view: RunView) -> Iterator[RunVerdict]:
    limits = {"timeout": FAULTY, "error": FAULTY, "abstain": MOST}
    shares = {name: view.now(f"outcome/{name}") for name in limits}
    remedies = {
        "timeout": f"Raise it with --set verifier.limit_s={3 * view.config.verifier.limit_s:g}, or make the reward"
        " function faster",
        "error": "Read logs/actor0.log and repair the reward function; `verify` scores completions without a run",
        "abstain": "The verifier returned None for them, or an environment's first words are longer than"
        " rollout.max_new_tokens; let it judge these completions, raise the cap, or change the data",
    }
    # NaN is below any limit.
    if too_many := [name for name, limit in limits.items() if shares[name] >= limit]:
        name = max(too_many, key=lambda each: shares[each])
        yield RunVerdict(
            name=f"the verifier fails: {name}",
            fault=True,
            evidence=f"{percent(shares[name])} of the completions had the outcome '{name}'",
            remedy=remedies[name],
            sure=1.0,
            harm=0.95,
        )


def cut_off(view: RunView) -> Iterator[RunVerdict]:
    share, cap = view.now("outcome/truncated"), view.config.rollout.max_new_tokens
    if share >= MOST:
        yield RunVerdict(
            name="answers are cut off",
            fault=True,
            evidence=f"{percent(share)} of the completions reached the cap of {cap} tokens before a final answer",
            remedy=f"Try --set rollout.max_new_tokens={4 * cap}, or ask for shorter answers in tasks.system_prompt",
            sure=0.98,
            harm=0.98,
        )


def not_parsed(view: RunView) -> Iterator[RunVerdict]:
    share, strict = view.now("outcome/unparsable"), view.config.verifier.strict
    if share >= MOST:
        looser = "Try --set verifier.strict=false, or say" if strict else "Say"
        yield RunVerdict(
            name="nothing is parsed",
            fault=True,
            evidence=f"in {percent(share)} of the completions the verifier '{view.config.verifier.kind}' found no final"
            " answer",
            remedy=f"{looser} in tasks.system_prompt how to end an answer; rollouts.jsonl shows what was written",
            sure=0.98,
            harm=0.97,
        )


def alike(view: RunView) -> Iterator[RunVerdict]:
    """Groups in which all completions got the same score, and which score it was."""
    if not view.idle >= ALIKE:
        return
    correct = view.now("outcome/correct")
    evidence = f"{percent(view.idle)} of the groups taught nothing, {percent(correct)} of the completions were right"
    if correct <= 1 - NEARLY_ALL:
        name, remedy = (
            "all groups alike, all wrong",
            (
                "Choose easier tasks (tasks.levels), show examples (--set tasks.few_shot=2), or a stronger model;"
                " check the gold answers with `data`"
            ),
        )
    elif correct < NEARLY_ALL:
        group = view.config.rollout.group
        name, remedy = (
            "all groups alike, each in its own way",
            (
                f"The completions of a prompt hardly differ: try --set rollout.temperature=1.0 and"
                f" --set rollout.group={2 * group}"
            ),
        )
    elif view.rises or (view.config.curriculum.kind != "shuffled" and not all_right_early(view)):
        name, remedy = (
            "the curriculum is exhausted",
            (
                "The policy solves what these tasks ask: add harder ones (tasks.levels, tasks.source), or stop here and"
                " `export`"
            ),
        )
    else:
        name, remedy = (
            "all groups alike, all right",
            (
                "The tasks are too easy for this model: choose harder ones (tasks.levels, tasks.source), or"
                " --set curriculum.kind=pass_rate"
            ),
        )
    yield RunVerdict(name=name, fault=True, evidence=evidence, remedy=remedy, sure=0.97, harm=0.96)


def all_right_early(view: RunView) -> bool:
    return view.was("outcome/correct") >= NEARLY_ALL


def few_tasks(view: RunView) -> Iterator[RunVerdict]:
    """A curriculum that has fewer tasks left than a step asks for."""
    left, prompts = view.now("curriculum/effective_tasks"), view.config.rollout.prompts
    if view.config.curriculum.kind == "pass_rate" and left < prompts:
        yield RunVerdict(
            name="the curriculum is exhausted",
            fault=True,
            evidence=f"it effectively chooses among {left:.1f} tasks, and a step asks for {prompts}",
            remedy="Add tasks, or spread the draws with --set curriculum.explore=0.5",
            sure=0.9,
            harm=0.8,
        )


def disagree(view: RunView) -> Iterator[RunVerdict]:
    """The reward goes up, and what it stands for goes down."""
    if not view.rises:
        return
    reward = f"the reward rose from {view.was(REWARD):.2f} to {view.now(REWARD):.2f}"
    fallen = held_out_fell(view.evaluations)
    if not fallen and view.z("outcome/correct") <= -SURE_Z:
        right_was, right_now = view.was("outcome/correct"), view.now("outcome/correct")
        fallen = f"right completions fell from {percent(right_was)} to {percent(right_now)}"
    if fallen:
        yield RunVerdict(
            name="reward and outcome disagree",
            fault=True,
            evidence=f"{reward}, and {fallen}",
            remedy="Read the completions with the highest reward in rollouts.jsonl; lower the weights of"
            " verifier.rewards, and keep close to the base with --set loss.kl_beta=0.05;"
            " `eval --checkpoint best` has the better policy if eval.every is set",
            sure=0.95,
            harm=0.95,
        )


def held_out_fell(evaluations: Sequence[Evaluation]) -> str:
    """In words, if the newest policy is worse than the first beyond chance: in pairs where the tasks are known."""
    if len(evaluations) < 2:
        return ""
    first, last = evaluations[0], evaluations[-1]
    if first.task_results and len(first.task_results) == len(last.task_results):
        difference = paired(right(last), right(first))
        fell = difference.high < 0
    else:
        fell = last.greedy.high < first.greedy.low
    if not fell:
        return ""
    return f"held-out accuracy fell from {percent(first.greedy.accuracy)} to {percent(last.greedy.accuracy)}"


def longer(view: RunView) -> Iterator[RunVerdict]:
    was, now = view.was("length/mean"), view.now("length/mean")
    if len(view.rows) >= 2 * view.window and now >= LONGER * was and not view.rises:
        yield RunVerdict(
            name="answers grow without more reward",
            fault=True,
            evidence=f"the mean length grew from {was:.0f} to {now:.0f} tokens while the reward went from"
            f" {view.was(REWARD):.2f} to {view.now(REWARD):.2f}",
            remedy="Try --set reward.length=-0.1, or --set loss.kind=dr_grpo, which does not favour long wrong answers",
            sure=0.85,
            harm=0.8,
        )


def does_not_move(view: RunView) -> Iterator[RunVerdict]:
    """What is left if no cause was found."""
    if view.falls:
        yield RunVerdict(
            name="the reward falls",
            fault=True,
            evidence=f"from {view.was(REWARD):.2f} to {view.now(REWARD):.2f} in {len(view.rows)} steps",
            remedy=f"Try --set optimizer.lr={view.config.optimizer.lr / 3:.2g}, and read rollouts.jsonl",
            sure=0.7,
            harm=0.8,
        )
    elif len(view.rows) >= MANY_STEPS and not view.rises and mean(view.rows, "outcome/correct") < NEARLY_ALL:
        yield RunVerdict(
            name="the reward does not move",
            fault=True,
            evidence=f"{view.was(REWARD):.2f} and {view.now(REWARD):.2f}, {abs(view.z()):.1f} standard errors apart,"
            f" in {len(view.rows)} steps",
            remedy=f"Try --set optimizer.lr={3 * view.config.optimizer.lr:.2g} or more groups in a step"
            f" (--set rollout.prompts={2 * view.config.rollout.prompts})",
            sure=0.5,
            harm=0.6,
        )


def percent(share: float) -> str:
    """`38 %`"""
    return f"{100 * share:.0f} %"


RULES = (verifier_fails, cut_off, not_parsed, alike, few_tasks, disagree, longer, does_not_move)
