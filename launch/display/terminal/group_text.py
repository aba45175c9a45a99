"""What `watch` shows, as texts of rich: a title, rows of groups, and an answer with its tokens coloured.

Texts of models have their control characters escaped, and are never read as markup.
"""

from collections.abc import Callable, Mapping

from rich.text import Text

from launch.display.page.tokens import answer
from protocol.plain_text import for_log, for_terminal
from shared.run.reader import Run
from shared.run.rollouts import GroupHead, RolloutGroup
from shared.run.summary import RunVerdict

WARM, COLD, UP, DOWN = ("#fff3d6", "#ffd98a", "#ffb84d", "#ff9326"), "#9cc4ff", "#9fe0b5", "#ffb0a8"
COLOURS: Mapping[str, Mapping[str, str]] = {
    "entropy": {f"e{place + 1}": f"black on {shade}" for place, shade in enumerate((*WARM, "#ff6a00"))},
    "advantage": {"a0": f"bold black on {DOWN}", "a1": f"black on {DOWN}", "a2": "red", "a4": "green"}
    | {"a5": f"black on {UP}", "a6": f"bold black on {UP}"},
    "mask": {"k1": f"black on {COLD}"},
    "ratio": {"r0": f"black on {COLD}", "r1": "blue", "r3": "red", "r4": f"black on {DOWN}"},
    "mismatch": {f"m{place + 1}": f"black on {shade}" for place, shade in enumerate(WARM)},
}
"""What a bin of a token's figure looks like (launch/display/page/tokens.py)."""
ORDERS: Mapping[str, Callable[[GroupHead], float]] = {
    "as sampled": lambda head: 0.0,
    "those that differ most": lambda head: -head.spread,
    "those that taught nothing": lambda head: float(head.fate == "trained"),
    "the longest": lambda head: -max(head.lengths, default=0),
    "the best paid": lambda head: -max(head.rewards, default=0.0),
}
COLUMNS = ("#", "fate", "reward", "spread", "length", "outcomes")


def title(run: Run, step: int, first: RunVerdict) -> Text:
    """Name and state of the run, and its first verdict."""
    state = f"{run.path.name}  step {step} of {run.config().run.steps}  {run.state()}  "
    return Text.assemble((for_log(state), "bold"), for_terminal(f"{first.name}: {first.evidence}"))


def group_row(number: int, head: GroupHead) -> tuple[str, ...]:
    counted = (f"{for_log(name)} {head.outcomes.count(name)}" for name in dict.fromkeys(head.outcomes))
    mean = sum(head.rewards) / max(1, len(head.rewards))
    length = sum(head.lengths) / max(1, len(head.lengths))
    return str(number), head.fate, f"{mean:.2f}", f"{head.spread:.2f}", f"{length:.0f}", " ".join(counted)


def group_text(group: RolloutGroup, sample: int, colour: str) -> Text:
    """Prompt, gold answer and one answer with its tokens coloured."""
    one = group.samples[sample]
    parts = "".join(f", {for_log(name)} {value:g}" for name, value in one.rewards.items())
    taught = "not trained on" if one.advantage is None else f"advantage {one.advantage:+.3g}"
    said = (
        f"answer {sample + 1} of {len(group.samples)}: {for_log(one.outcome)}, reward {one.reward:g}{parts}, {taught}"
    )
    text = Text.assemble(
        (for_terminal(group.prompt.strip()), "dim"),
        (f"\ngold answer: {for_terminal(group.answer)}\n\n", "dim"),
        (f"{said}, {len(one.ids)} tokens, {for_log(one.finish)}; by {colour}\n\n", "bold"),
    )
    styles = COLOURS[colour]
    for cell in answer(sample, one).cells:
        style = next((styles[name] for name in cell.classes.split() if name in styles), "")
        text.append(for_terminal(cell.text), style)
    return text


def ordered(heads: Mapping[int, GroupHead], order: str) -> list[int]:
    """Numbers of the groups in the order that is asked for."""
    return sorted(heads, key=lambda number: ORDERS[order](heads[number]))
