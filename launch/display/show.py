"""`show RUN --step N`: the groups of a step, one group with its answers, or the tokens of one answer.

    show RUN                                 groups of the newest step: rewards, outcomes, what became of them
    show RUN --step 12 --group 3             its prompt, gold answer and all answers
    show RUN --step 12 --group 3 --sample 0  one answer, token by token
    ... --json                               the same as a record of rollouts.jsonl (shared/run/rollouts.py)

Groups and samples are counted from 0. Texts come from a model and are escaped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from launch.display.console import make_console
from launch.display.watch import number
from protocol.plain_text import for_log, for_terminal
from shared.errors import RunDirError, UserError
from shared.run.reader import Run
from shared.run.rollouts import GroupHead, RolloutGroup, RolloutSample

PROMPT_CHARS = 50
HEADS = "group  fate         spread  reward  length  stale  outcomes"
TOKENS = "token                  logprob   learner    ratio  mismatch  entropy  mask"
PIECE_CHARS = 20


def show(*, directory: Path, step: int | None, group: int | None, sample: int | None, as_json: bool) -> int:
    run = Run(directory)
    chosen = chosen_step(run, step)
    if group is None:
        if sample is not None:
            raise UserError(f"--sample got {sample} without a group; give --group as well, from 0.")
        heads = run.rollouts.heads(chosen)
        print_lines([as_record(list(heads.values()))] if as_json else head_lines(chosen, heads))
        return 0
    found = chosen_group(run, chosen, group)
    if sample is None:
        print_lines([as_record(found)] if as_json else group_lines(found))
        return 0
    if not 0 <= sample < len(found.samples):
        raise UserError(f"--sample got {sample}, but group {group} of step {chosen} has {len(found.samples)}, from 0.")
    one = found.samples[sample]
    print_lines([as_record(one)] if as_json else token_lines(one))
    return 0


def chosen_step(run: Run, step: int | None) -> int:
    steps = run.rollouts.steps()
    if not steps:
        raise RunDirError(
            f"{run.path} has no groups in rollouts.jsonl: no step has ended yet, or log.rollouts_per_step is 0."
        )
    if step is not None and step not in steps:
        raise RunDirError(
            f"--step got {step}, but {run.path} has no groups of it; it has some of {len(steps)} steps, {steps[0]} to"
            f" {steps[-1]}."
        )
    return steps[-1] if step is None else step


def chosen_group(run: Run, step: int, number: int) -> RolloutGroup:
    found = run.rollouts.group(step, number)
    if found is None:
        count = len(run.rollouts.heads(step))
        raise RunDirError(
            f"--group got {number}, but step {step} of {run.path} has {count} groups that can be read, from 0."
        )
    return found


def print_lines(lines: Iterable[str]) -> None:
    console = make_console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def as_record(record: GroupHead | RolloutSample | Sequence[GroupHead]) -> str:
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def head_lines(step: int, heads: Mapping[int, GroupHead]) -> Iterator[str]:
    yield f"step {step}: {len(heads)} groups"
    yield HEADS
    for place, head in heads.items():
        outcomes = " ".join(f"{outcome} {head.outcomes.count(outcome)}" for outcome in dict.fromkeys(head.outcomes))
        length = sum(head.lengths) / max(1, len(head.lengths))
        reward = sum(head.rewards) / max(1, len(head.rewards))
        yield (
            f"{place:5d}  {head.fate:11s}  {head.spread:6.2f}  {reward:6.2f}  {length:6.0f}  {head.stale:5d}"
            f"  {for_log(outcomes)}"
        )


def group_lines(group: RolloutGroup) -> Iterator[str]:
    facts = f"step {group.step}, {group.fate}, sampled by version {group.version}, task {for_log(group.task)}"
    yield f"{for_log(group.group_id)}  {facts}"
    yield f"prompt | {indented(group.prompt)}"
    yield f"gold   | {indented(group.answer)}"
    for place, sample in enumerate(group.samples):
        advantage = "no advantage" if sample.advantage is None else f"advantage {sample.advantage:+.2f}"
        parts = "".join(f", {for_log(name)} {value:g}" for name, value in sample.rewards.items())
        extras = "".join(f", {for_log(name)}: {for_log(text)}" for name, text in sample.extras.items())
        yield ""
        yield (
            f"{place}: {for_log(sample.outcome)}, reward {sample.reward:g}{parts}, {advantage},"
            f" {len(sample.ids)} tokens, {for_log(sample.finish)}{extras}"
        )
        yield f"       | {indented(sample.text)}"


def token_lines(sample: RolloutSample) -> Iterator[str]:
    measured = (sample.logprob, sample.learner(), sample.ratio(), sample.mismatch(), sample.entropy)
    figures = [sample.own(values) for values in measured]
    yield TOKENS
    for place, piece in enumerate(sample.pieces):
        shown = [shape(column[place], form) for column, form in zip(figures, FORMS, strict=True)]
        carried = "-" if sample.mask is None else str(sample.mask[place])
        yield f"{for_log(piece, PIECE_CHARS):20s}  " + "  ".join(shown) + f"  {carried:>4s}"


FORMS = ("8.4f", "8.4f", "7.4f", "8.1e", "7.3f")


def shape(value: float | None, form: str) -> str:
    """A dash of the same width where it is not known."""
    return number(float("nan"), form).rjust(int(form.partition(".")[0])) if value is None else format(value, form)


def indented(text: str) -> str:
    return for_terminal(text.strip()).replace("\n", "\n       | ")
