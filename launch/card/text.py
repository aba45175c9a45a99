"""The plan of a card as text: a bar for each phase, a table of what each one takes, and what would make it fit.

    phase                     computes    waits       sum
    learner update backward    2.8 GiB  1.6 GiB   4.4 GiB  |##############========..                 |

A bar is the whole card: `#` the process that computes, `=` those that wait, `.` the margin.
"""

from collections.abc import Iterator, Sequence

from launch.card.items import MARGIN
from launch.card.plan import CardPlan, Phase
from launch.plan.memory import size

MIB = 2**20
WIDTH = 40
"""Characters of a bar."""
COLUMN = 12


def card_lines(name: str, plan: CardPlan) -> list[str]:
    """All of it."""
    parts = [bars(name, plan)]
    parts += [items_table(process, phases) for process, phases in plan.processes.items()]
    return [line for part in (*parts, ends(plan)) for line in (*part, "")][:-1]


def short_card_lines(name: str, plan: CardPlan) -> list[str]:
    """Without the items."""
    return [*bars(name, plan), *ends(plan)]


def headline(name: str, plan: CardPlan) -> str:
    verdict = "it fits" if plan.fits else "it does not fit"
    return f"{name} needs {size(plan.peak_bytes)} of a card with {size(plan.budget_bytes)}: {verdict}"


def bars(name: str, plan: CardPlan) -> list[str]:
    rows = [f"  {'phase':<27}{'computes':>10}{'waits':>10}{'sum':>10}"]
    for process, phases in plan.processes.items():
        rows += [bar(process, phase, plan.waiting[process], plan.budget_bytes) for phase in phases[:-1]]
    return [headline(name, plan), *rows]


def bar(process: str, phase: Phase, waits: int, budget: int) -> str:
    margin = phase.items.get(MARGIN, 0)
    own, total = phase.bytes - margin, phase.bytes + waits
    places = [round(WIDTH * amount / budget) for amount in (own, own + waits, total)]
    first, second, third = (min(place, WIDTH) for place in places)
    drawn = "#" * first + "=" * (second - first) + "." * (third - second)
    end = ">" if total > budget else "|"
    named = f"{process} {phase.phase}"
    return f"  {named:<27}{size(own):>10}{size(waits):>10}{size(total):>10}  |{drawn:<{WIDTH}}{end}"


def items_table(process: str, phases: Sequence[Phase]) -> list[str]:
    """MiB of each item in each phase, the largest items first."""
    most: dict[str, int] = {}
    for phase in phases:
        for item, amount in phase.items.items():
            most[item] = max(amount, most.get(item, 0))
    rows = [f"  {process + ', MiB':<17}{''.join(column(word) for word in first_words(phases))}"]
    rows += [f"  {'':<17}{''.join(column(word) for word in last_words(phases))}"]
    for item in sorted((item for item, amount in most.items() if in_mib(amount)), key=lambda one: -most[one]):
        rows.append(f"  {item:<17}{''.join(column(in_mib(phase.items.get(item, 0))) for phase in phases)}")
    return [*rows, f"  {'sum':<17}{''.join(column(in_mib(phase.bytes)) for phase in phases)}"]


def column(word: str) -> str:
    return f"{word:>{COLUMN}}"


def first_words(phases: Sequence[Phase]) -> Iterator[str]:
    """Of names with two words."""
    yield from (phase.phase.rpartition(" ")[0] for phase in phases)


def last_words(phases: Sequence[Phase]) -> Iterator[str]:
    yield from (phase.phase.rpartition(" ")[2] for phase in phases)


def in_mib(amount: int) -> str:
    return f"{amount / MIB:,.0f}" if amount >= MIB / 2 else ""


def ends(plan: CardPlan) -> list[str]:
    """What was chosen, or what would help."""
    if plan.fits:
        return [f"chosen: {' '.join(f'{key}={value}' for key, value in plan.choices.items())}"]
    return [refusal(plan)]


def refusal(plan: CardPlan) -> str:
    """One sentence."""
    found = f"The run needs {size(plan.peak_bytes)} of the card and has {size(plan.budget_bytes)}"
    return f"{found}; {'it would fit with ' if plan.remedies else 'no change of its sizes is enough: '}{ways(plan)}."


def ways(plan: CardPlan) -> str:
    """To make it fit."""
    if not plan.remedies:
        return "take a smaller model, or a card with more memory"
    found = (" ".join(f"--set {key}={value}" for key, value in remedy.items()) for remedy in plan.remedies)
    return "; or ".join(found)
