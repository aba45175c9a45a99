"""`plan`: how much of a card a run needs, phase by phase, before it starts. `run` and `doctor` use the same plan.

Exit code 0 if the run fits, 2 if not. The card's memory is `--gpu-gb`, or what is free on this machine's card. `--json`
prints the plan as launch/card/plan.py has it; an error is still one sentence on stderr.

The code of both processes is run over tensors without values, which needs torch. The launcher of a run and `doctor` do
not load torch, so another process makes the plan for them.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec
from msgspec import structs

from launch.card.cards import chosen_card, look_at_cards
from launch.card.plan import CardPlan, make_card_plan
from launch.card.published import Facts, facts_of
from launch.card.text import card_lines
from launch.card.work import CardWork, card_work
from launch.presets.load import load_config
from shared.config.processes import ActorConfig, ComputeConfig
from shared.config.tree import Config
from shared.errors import ConfigError, UserError
from shared.process.usable_cards import card_numbers, roles_here

GIB = 2**30
QUICK_IMPORT = {"TORCHDYNAMO_DISABLE": "1"}
"""bitsandbytes prepares to compile when it is imported, which takes a second. A plan compiles nothing."""
LIMIT_S = 120.0
"""Of the process that plans. Loading torch from a slow disk takes most of it."""


def run_plan(*, source: str, overrides: Sequence[str], gpu_gb: float | None, as_json: bool) -> int:
    """Returns the exit code."""
    config = load_config(source, overrides, here=False)
    work = card_work(config)
    budget = free_on_card(config.compute, config.actor) if gpu_gb is None else int(gpu_gb * GIB)
    if isinstance(budget, str):
        raise ConfigError(
            f"{budget}; give the memory of a card, for example: python -m launch plan {source} --gpu-gb 8."
        )
    os.environ.update(QUICK_IMPORT)
    plan = traced_plan(facts_of(work.model), work, budget)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    else:
        print("\n".join(card_lines(source, plan)))
    return 0 if plan.fits else 2


def free_on_card(compute: ComputeConfig, actor: ActorConfig) -> int | str:
    """Bytes that no process uses, of that card of the run with less; or the reason why they are not known."""
    cards = look_at_cards()
    if not cards.cards:
        return cards.trouble or "nvidia-smi lists no card here"
    numbers = card_numbers(compute, roles_here(actor)).values()
    chosen = [chosen_card(cards, number) for number in numbers]
    free = [card.free for card in chosen if card and card.free is not None]
    return min(free) if len(free) == len(chosen) else "nvidia-smi does not say how much memory of the card is free"


def traced_plan(facts: Facts, work: CardWork, budget: int) -> CardPlan:
    """For a card with so many bytes, by a trace of the run's phases on meta tensors."""
    # Imported here, because it loads torch.
    from launch.card.phases import MetaTracer

    return make_card_plan(facts, work, budget, MetaTracer(facts))


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What another process is asked to plan."""

    work: CardWork
    budget: int
    """Bytes."""


class NotPlanned(Exception):
    """The reason as one sentence."""


def plan_here(work: CardWork) -> CardPlan:
    """Of what is free on the cards of this machine."""
    free = free_on_card(work.compute, work.actor)
    if isinstance(free, str):
        raise NotPlanned(f"{free}; `plan --gpu-gb 8` plans a run for a card of 8 GiB")
    return plan_elsewhere(work, free)


def plan_elsewhere(work: CardWork, budget: int) -> CardPlan:
    try:
        done = subprocess.run(
            (sys.executable, "-m", "launch.card.command"),
            input=msgspec.json.encode(Request(work=work, budget=budget)),
            capture_output=True,
            timeout=LIMIT_S,
            # Kernels are not run, so nothing of it may touch the card.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | QUICK_IMPORT,
        )
    except subprocess.TimeoutExpired as error:
        raise NotPlanned(f"planning took more than {LIMIT_S:g} s") from error
    except OSError as error:
        raise NotPlanned(f"the process that plans cannot be started: {error.strerror}") from error
    try:
        return msgspec.json.decode(done.stdout, type=CardPlan)
    except ValueError as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotPlanned(f"planning failed: {lines[-1]}") from error


def with_choices(config: Config, plan: CardPlan) -> Config:
    """The configuration as it was planned."""
    for key, value in plan.choices.items():
        section, _, name = key.partition(".")
        config = structs.replace(config, **{section: structs.replace(getattr(config, section), **{name: value})})
    return config


def answer(data: bytes) -> int:
    """A request as JSON -> the plan on stdout."""
    request = msgspec.json.decode(data, type=Request)
    try:
        plan = traced_plan(facts_of(request.work.model), request.work, request.budget)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(msgspec.json.encode(plan).decode())
    return 0


if __name__ == "__main__":
    sys.exit(answer(sys.stdin.buffer.read()))
