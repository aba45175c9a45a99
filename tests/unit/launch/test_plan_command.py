"""`plan`: what it prints, how it ends, and that the presets for a card of 8 GB fit there."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.__main__ import main
from launch.card.command import Request, answer, free_on_card, traced_plan, with_choices
from launch.card.plan import CardPlan
from launch.card.published import facts_of
from launch.card.work import card_work
from launch.commands.run import planned, refuse
from launch.plan.memory import size
from launch.presets.load import load_config
from shared.config.processes import ActorConfig, ComputeConfig

README = Path(__file__).resolve().parents[3] / "launch" / "README.md"
MIB, GIB = 2**20, 2**30
WIDTH = "actor.max_sequences"
PHASES = {
    "actor": ["load", "evaluation prompts", "evaluation decode", "rollout prompts", "rollout decode", "waiting"],
    "learner": ["load", "update forward", "update head", "update backward", "optimizer", "waiting"],
}
MOST = {
    "gsm8k_8gb": 5 * GIB,
    "math_8gb": 6 * GIB,
    "r1_distill_8gb": 8 * GIB,
    "gsm8k_8gb_vllm": 8 * GIB,
    "qwen3b_8gb": 8 * GIB,
    "qwen7b_8gb": 8 * GIB,
}
"""Of both processes together, in every phase."""
QUICK = ("gsm8k_8gb", "qwen7b_8gb")
"""The others are long."""


def plan_of(preset: str, *overrides: str) -> CardPlan:
    config = load_config(preset, overrides, here=False)
    return traced_plan(facts_of(config.model), card_work(config), 8 * GIB)


def row_of(preset: str, plan: CardPlan) -> str:
    """In the table of launch/README.md."""
    sums = {
        phase.phase: phase.bytes + plan.processes[other][-1].bytes
        for name, other in (("actor", "learner"), ("learner", "actor"))
        for phase in plan.processes[name][:-1]
    }
    largest = max(sums, key=sums.__getitem__).partition(" ")[0]
    learner, actor = (size(max(phase.bytes for phase in plan.processes[name])) for name in ("learner", "actor"))
    return f"| `{preset}` | {size(plan.peak_bytes)}, {largest} | {learner} | {actor} | `{plan.residency}` |"


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [pytest.param(preset, marks=[] if preset in QUICK else pytest.mark.long) for preset in MOST]
)
def test_a_preset_for_8_gib_fits_there_as_it_is_written(preset: str) -> None:
    plan = plan_of(preset)
    assert plan.fits and plan.peak_bytes <= MOST[preset]
    config = load_config(preset, here=False)
    written = {
        key: getattr(getattr(config, section), name)
        for key in plan.choices
        for section, _, name in [key.partition(".")]
    }
    assert {key: value for key, value in plan.choices.items() if written[key] not in (value, "auto")} == {}
    for name, other in (("actor", "learner"), ("learner", "actor")):
        waits = plan.processes[other][-1].bytes
        assert all(phase.bytes + waits <= MOST[preset] for phase in plan.processes[name])
    assert row_of(preset, plan) in README.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.long
def test_7b_fits_only_if_the_base_of_the_other_process_waits_elsewhere() -> None:
    plan = plan_of("qwen7b_8gb", "compute.residency=release")
    assert not plan.fits
    assert plan.remedies[:2] == [{"compute.residency": "swap"}, {"compute.residency": "shared"}]
    assert plan_of("qwen7b_8gb", "compute.residency=shared").fits


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "embedded", "--gpu-gb", "8", "--json")
    tree = json.loads(out)
    assert code == 0 and tree["fits"] is True
    keys = ["fits", "budget_bytes", "peak_bytes", "residency", "processes", "choices", "remedies", "waiting"]
    assert list(tree) == keys
    assert tree["budget_bytes"] == 8 * GIB
    assert list(tree["processes"]) == ["actor", "learner"]
    for name, phases in tree["processes"].items():
        assert [phase["phase"] for phase in phases] == PHASES[name]
        for phase in phases:
            assert list(phase) == ["phase", "bytes", "items"]
            assert phase["bytes"] == sum(phase["items"].values())
    assert set(tree["choices"]) >= {"compute.residency", "batch.recompute", WIDTH}


def test_a_run_that_does_not_fit_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "embedded", "--gpu-gb", "0.5")
    assert code == 2
    assert "does not fit" in out and "smaller model" in out


def test_the_table_shows_every_phase_and_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "embedded", "--gpu-gb", "2", "--set", "compute.residency=swap")
    assert code == 0 and "chosen: compute.residency=swap" in out
    for name, phases in PHASES.items():
        for phase in phases[:-1]:
            (line,) = [line for line in out.splitlines() if f"{name} {phase} " in line]
            assert "|#" in line and line.rstrip().endswith("|")
    assert max(map(len, out.splitlines())) <= 120 + len("chosen: ")


def test_without_a_card_its_memory_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = run(capsys, "embedded", "--json")
    assert (code, out) == (2, "")
    assert (
        err.startswith("error: nvidia-smi lists no card here; give the memory of a card")
        and "--gpu-gb 8" in err
        and err.count("\n") == 1
    )


@pytest.mark.parametrize("amount", ["0", "-1", "eight", "nan"])
def test_an_amount_that_is_none_is_refused(amount: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "embedded", "--gpu-gb", amount)
    assert code == 2 and "expected GiB above 0" in err


def test_another_process_answers_with_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("embedded", here=False)
    assert answer(msgspec.json.encode(Request(work=card_work(config), budget=8 * GIB))) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=CardPlan)
    _, out, _ = run(capsys, "embedded", "--gpu-gb", "8", "--json")
    assert msgspec.to_builtins(found) == json.loads(out)
    chosen = with_choices(config, found)
    assert chosen.compute.residency == found.residency == "release"
    assert chosen.batch.recompute in ("never", "always") and config.batch.recompute == "auto"


def test_another_process_says_in_a_sentence_why_there_is_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("embedded", ["model.path=nobody/nothing"], here=False)
    assert answer(msgspec.json.encode(Request(work=card_work(config), budget=GIB))) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "not on this machine" in said.err


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("echo GPU-1, NVIDIA GB10, 580.95.05, [N/A], [N/A], Default", "does not say how much memory"),
        ("echo Unable to determine the device handle; exit 15", "Unable to determine the device handle; "),
    ],
    ids=["memory of the host", "trouble"],
)
def test_memory_that_is_not_known_is_a_run_without_a_plan(
    answer: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in --query-gpu=*) {answer};; esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load_config("gsm8k_8gb")
    found, cost = planned(config)
    assert found == config and isinstance(cost, str) and reason in cost and "There is no card" not in cost
    code, out, err = run(capsys, "embedded", "--json")
    assert (code, out) == (2, "") and reason in err and "--gpu-gb 8" in err and err.count("\n") == 1


def test_a_run_without_a_card_to_look_at_has_no_plan_and_keeps_its_sizes(monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    config = load_config("gsm8k_8gb")
    found, cost = planned(config)
    assert isinstance(cost, str) and "`plan --gpu-gb 8`" in cost
    assert found == config
    refuse(cost, config.model.path)


def test_the_plan_looks_at_the_cards_of_those_who_compute_here(tmp_path: Path, monkeypatch: Any) -> None:
    cards = "".join(f"GPU-{n}, RTX 3070, 580.95.05, 8192, {free}, Default\n" for n, free in enumerate((7000, 100)))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncase $1 in --query-gpu=*) printf '%s' '{cards}';; esac\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    compute = ComputeConfig(device="cuda", actor_card=1)
    assert free_on_card(compute, ActorConfig(engine="vllm_server")) == 7000 * MIB
    assert free_on_card(compute, ActorConfig()) == 100 * MIB
