"""The plan of a card: sums of both processes, what is chosen, refusals whose remedies help, and the command."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import transformers

from actor.engines.vllm_options import MARGIN_BYTES
from launch.card.items import Peak
from launch.card.phases import MetaTracer
from launch.card.plan import (
    CONTEXT_BYTES,
    CUBLAS_BYTES,
    CardPlan,
    Planner,
    changes,
    make_card_plan,
    smallest,
    turn,
)
from launch.card.published import PUBLISHED, QWEN_05B, QWEN_15B, facts_of
from launch.card.text import card_lines, refusal
from launch.card.vllm import vllm_peaks
from launch.card.work import CardWork, card_work, largest_micro_batch, largest_orders
from launch.commands.run import refuse
from launch.presets.load import load_config
from shared.base.architecture import architecture_of, decoder_linears, empty_model
from shared.config.load import resolve
from shared.config.model import ModelConfig
from shared.errors import ConfigError, ModelError
from tests.support.architectures import SHAPE, SUPPORTED

MIB, GIB = 2**20, 2**30
LAYERS = 28
FACTS = {**QWEN_15B, "num_hidden_layers": LAYERS}
BASE, LORA, KEPT = 40 * MIB, 2 * MIB, 3 * MIB
"""Of a layer, in the stand-in below."""
WIDTH = "actor.max_sequences"
AROUND = CONTEXT_BYTES + CUBLAS_BYTES


class Formula:
    """A stand-in for the code of both processes."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []

    def learner(self, work: CardWork, layers: int) -> list[Peak]:
        self.runs.append(("learner", layers))
        rows = work.batch.token_budget * 2048
        kept = rows * layers * (1 if work.batch.recompute == "always" else 4)
        held = {"NF4": BASE * layers, "LoRA": LORA * layers, "Adam": 2 * LORA * layers}
        update = held | {"activations": kept, "temporaries": 20 * rows, "head tiles": 16_384 * work.batch.head_rows}
        return [peak("load", held), peak("update backward", update), peak("waiting", held)]

    def actor(self, work: CardWork, layers: int) -> list[Peak]:
        self.runs.append(("actor", layers))
        held = {"NF4": BASE * layers, "LoRA": LORA * layers}
        width = work.actor.max_sequences or 128
        tokens = work.prompt + work.rollout.max_new_tokens
        decode = held | {"KV": width * tokens * layers * 1024}
        return [peak("load", held), peak("rollout decode", decode), peak("waiting", held)]


def peak(name: str, items: dict[str, int]) -> Peak:
    return Peak(name=name, items=items, reserved=sum(items.values()) + 8 * MIB)


def work_of(**sections: Mapping[str, object]) -> CardWork:
    return card_work(resolve({"model": {"path": "somewhere"}, **sections}))


def plan(budget: int, **sections: Mapping[str, object]) -> CardPlan:
    return make_card_plan(FACTS, work_of(**sections), budget, Formula())


SMALL = {
    "rollout": {"max_new_tokens": 256},
    "actor": {"max_sequences": 32},
    "batch": {"token_budget": 4096, "head_rows": 1024, "recompute": "always"},
}


# --- sums


def test_the_peak_is_a_phase_of_one_process_and_what_the_other_keeps() -> None:
    found = plan(100 * GIB, **SMALL)
    learner, actor = (found.processes[name] for name in ("learner", "actor"))
    base, adapter = BASE * LAYERS, LORA * LAYERS
    assert learner[-1].bytes == AROUND + base + 3 * adapter + 8 * MIB
    # CUDA graphs have a stream of their own.
    assert actor[-1].bytes == AROUND + CUBLAS_BYTES + base + adapter + 8 * MIB
    without = plan(100 * GIB, **{**SMALL, "actor": {**SMALL["actor"], "graphs": "never"}}).processes["actor"]
    assert actor[-1].bytes - without[-1].bytes == CUBLAS_BYTES
    update = 4096 * 2048 * (LAYERS + 20) + 16_384 * 1024
    assert learner[1].bytes == learner[-1].bytes + update + MARGIN_BYTES
    decode = 32 * 512 * LAYERS * 1024
    assert actor[1].bytes == actor[-1].bytes + decode + MARGIN_BYTES
    assert found.peak_bytes == max(learner[1].bytes + actor[-1].bytes, actor[1].bytes + learner[-1].bytes)
    assert all(phase.bytes == sum(phase.items.values()) for phases in (learner, actor) for phase in phases)


def test_a_base_that_waits_in_host_memory_is_not_on_the_card() -> None:
    kept, gone = (plan(100 * GIB, **SMALL, compute={"residency": way}) for way in ("release", "swap"))
    for name in ("learner", "actor"):
        before, after = kept.processes[name], gone.processes[name]
        assert before[:-1] == after[:-1], "while it computes, all of it is there"
        assert "NF4" not in after[-1].items and after[-1].items["LoRA"] == before[-1].items["LoRA"]
    assert kept.peak_bytes - gone.peak_bytes == BASE * LAYERS + 8 * MIB


def test_one_base_for_both_processes_is_the_learners() -> None:
    each, one = (plan(100 * GIB, **SMALL, compute={"residency": way}) for way in ("release", "shared"))
    assert one.processes["learner"] == each.processes["learner"]
    for before, after in zip(each.processes["actor"], one.processes["actor"], strict=True):
        assert before.bytes - after.bytes == BASE * LAYERS and "NF4" not in after.items
    assert each.peak_bytes - one.peak_bytes == BASE * LAYERS
    two = plan(100 * GIB, **SMALL, compute={"residency": "shared", "actor_card": 1})
    assert two.processes["actor"][1].items["NF4"] == BASE * LAYERS, "on a card of its own it has one"


def test_on_two_cards_nobody_is_in_the_way() -> None:
    two = plan(100 * GIB, **SMALL, compute={"learner_card": 0, "actor_card": 1})
    assert [two.processes[name][-1].bytes for name in ("learner", "actor")] == [0, 0]
    assert two.peak_bytes == max(phase.bytes for phases in two.processes.values() for phase in phases)


def test_actors_that_wait_are_in_the_way_of_the_one_that_computes() -> None:
    three = plan(100 * GIB, **SMALL, compute={"actors": 3})
    learner, actor = (three.processes[name] for name in ("learner", "actor"))
    assert three.waiting == {"actor": learner[-1].bytes + 2 * actor[-1].bytes, "learner": 3 * actor[-1].bytes}
    assert three.peak_bytes == max(learner[1].bytes + 3 * actor[-1].bytes, actor[1].bytes + three.waiting["actor"])
    apart = plan(100 * GIB, **SMALL, compute={"actors": 3, "actor_card": 1})
    assert apart.waiting == {"actor": 2 * actor[-1].bytes, "learner": 0}, "the learner has a card of its own"
    cramped = plan(5 * GIB, **SMALL, compute={"actors": 3, "residency": "release"})
    assert {"compute.actors": "1"} in cramped.remedies


def test_the_figures_of_a_run_are_those_that_it_measures() -> None:
    found = plan(100 * GIB, **SMALL)
    learner, actor = (found.processes[name] for name in ("learner", "actor"))
    tensors = sum(amount for item, amount in learner[1].items.items() if item not in ("context", "margin", "cached"))
    figures = found.figures
    assert figures.learner_allocated_mb == round(tensors / MIB)
    assert figures.learner_reserved_mb == round((tensors + 8 * MIB) / MIB)
    assert figures.learner_driver_mb == round((learner[1].bytes - MARGIN_BYTES + actor[-1].bytes) / MIB)


# --- the largest parts


def test_a_micro_batch_is_filled_as_the_learner_fills_it() -> None:
    def part(budget: int, prompts: int = 16) -> tuple[int, int, bool]:
        rollout = {"prompts": prompts, "group": 8, "max_new_tokens": 65}
        found = largest_micro_batch(
            work_of(rollout=rollout, tasks={"max_prompt_tokens": 64}, batch={"token_budget": budget})
        )
        assert (found.prompt, found.fed) == (64, 64), "the last token is not fed"
        return found.prompts, found.completions, found.is_whole

    group = 64 + 8 * 64
    assert part(10 * group, prompts=2) == (2, 16, True), "all there is"
    assert part(2 * group) == (2, 16, False)
    assert part(2 * group + 64 + 3 * 64) == (3, 19, False)
    assert part(group - 1) == (1, 7, False)
    assert part(1) == (1, 1, False), "one sample is always computed"


def test_orders_are_those_of_a_step_and_of_an_evaluation() -> None:
    rollout = {"prompts": 16, "group": 8, "max_new_tokens": 100, "groups_per_order": 4}
    work = work_of(rollout=rollout, actor={"max_sequences": 24}, eval={"problems": 500, "long_cap": 300})
    evaluation, training = largest_orders(work, QWEN_15B)
    assert (evaluation.name, evaluation.groups, evaluation.samples, evaluation.cap, evaluation.width) == (
        "evaluation",
        128,
        1,
        300,
        24,
    )
    assert (training.name, training.groups, training.samples, training.cap, training.width) == (
        "rollout",
        4,
        8,
        100,
        24,
    )
    few = work_of(rollout=rollout, actor={"max_sequences": 200}, eval={"problems": 30, "samples": 32, "long_cap": 300})
    drawn = largest_orders(few, QWEN_15B)[0]
    assert (drawn.groups, drawn.samples, drawn.width) == (4, 32, 128), "more than one greedy completion of each"
    only = largest_orders(work_of(rollout=rollout, eval={"problems": 0}), QWEN_15B)
    assert [order.name for order in only] == ["rollout"] and only[0].width == 32


# --- what is chosen


def test_what_is_asked_for_is_taken_if_it_fits_and_each_process_is_run_once() -> None:
    tracer = Formula()
    found = make_card_plan(FACTS, work_of(**SMALL), 100 * GIB, tracer)
    assert found.fits and not found.remedies
    assert found.choices == {
        "compute.residency": "release",
        "batch.recompute": "always",
        "batch.token_budget": 4096,
        "batch.head_rows": 1024,
        "actor.max_sequences": 32,
    }
    assert sorted(tracer.runs) == [("actor", LAYERS), ("learner", LAYERS)]


def test_sizes_are_halved_until_they_fit_and_no_further() -> None:
    whole = plan(100 * GIB, **SMALL).peak_bytes
    seen: set[tuple[object, ...]] = set()
    for budget in range(whole - 500 * MIB, whole, 50 * MIB):
        found = plan(budget, **SMALL)
        assert found.fits and found.peak_bytes <= budget
        tokens, rows, width = (int(found.choices[key]) for key in ("batch.token_budget", "batch.head_rows", WIDTH))
        seen.add((tokens, rows, width))
        planner, work = Planner(LAYERS, budget, Formula()), work_of(**SMALL)
        actor, learner = planner.quick("actor", work), planner.quick("learner", work)
        if tokens < 4096:
            larger = work_of(**{**SMALL, "batch": {**SMALL["batch"], "token_budget": 2 * tokens, "head_rows": rows}})
            assert turn(planner.quick("learner", larger), actor[-1].bytes) > budget
        if width < 32:
            larger = work_of(**{**SMALL, "actor": {"max_sequences": 2 * width}})
            assert turn(planner.quick("actor", larger), learner[-1].bytes) > budget
    assert len(seen) > 3


def test_activations_are_kept_where_they_fit_and_the_base_stays_where_it_can() -> None:
    open_keys = {**SMALL, "batch": {"token_budget": 4096, "head_rows": 256}}
    order = [("never", "release"), ("always", "release"), ("never", "swap"), ("always", "swap")]
    plans = [plan(budget, **open_keys) for budget in range(6 * GIB, 2 * GIB, -16 * MIB)]
    chosen = [order.index((str(one.choices["batch.recompute"]), one.residency)) for one in plans if one.fits]
    assert chosen == sorted(chosen) and {0, 1} <= set(chosen) and max(chosen) >= 2


def test_a_key_that_is_given_is_not_chosen() -> None:
    given = {**SMALL, "compute": {"residency": "release"}, "batch": {**SMALL["batch"], "recompute": "never"}}
    found = plan(3 * GIB, **given)
    assert not found.fits
    assert (found.residency, found.choices["batch.recompute"]) == ("release", "never")


# --- what does not fit


def test_a_refusal_names_the_cheapest_change_first_and_each_one_helps() -> None:
    given = {**SMALL, "compute": {"residency": "release"}}
    budget = 3 * GIB
    found = plan(budget, **given)
    assert not found.fits and found.peak_bytes > budget
    assert found.remedies[0] == {"compute.residency": "swap"}
    for remedy in found.remedies:
        tree: dict[str, dict[str, object]] = {name: dict(keys) for name, keys in given.items()}
        for key, value in remedy.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = int(value) if value.isdigit() else value
        assert plan(budget, **tree).fits, remedy
    assert "--set compute.residency=swap" in refusal(found)
    with pytest.raises(ConfigError, match=r"would fit with --set compute\.residency=swap"):
        refuse(found, "a model")


def test_a_card_on_which_nothing_helps() -> None:
    found = plan(GIB, **SMALL)
    assert not found.fits and found.remedies == []
    with pytest.raises(ConfigError, match="take a smaller model, or a card with more memory"):
        refuse(found, "a model")
    work = smallest(work_of(**SMALL))
    assert (work.batch.token_budget, work.actor.max_sequences) == (256, 1)


def test_the_lines_of_a_plan_that_does_not_fit_end_with_what_helps() -> None:
    lines = card_lines("x", plan(3 * GIB, **SMALL, compute={"residency": "release"}))
    assert lines[0].endswith("it does not fit") and lines[-1].startswith("The run needs")
    assert any(line.endswith(">") for line in lines), "a bar that leaves the card"


# --- vLLM


def test_vllm_takes_what_it_is_given_and_keeps_what_it_is_told_to() -> None:
    held = {"NF4": 100 * MIB, "scales": 3 * MIB, "embedding": 50 * MIB, "norms and biases": MIB, "LoRA": 8 * MIB}
    rollout = {"prompts": 8, "group": 8, "max_new_tokens": 320}

    def peaks(**actor: object) -> dict[str, Peak]:
        work = work_of(rollout=rollout, actor={"engine": "vllm", "kv_mb": 512, **actor})
        return {one.name: one for one in vllm_peaks(held, work, QWEN_15B)}

    dense, codes = peaks(), peaks(weights="nf4")
    # Two values a byte of codes; two bytes a value, or half of one and an fp32 scale for 64.
    assert dense["load"].items["vLLM weights"] == 2 * 200 * MIB + 51 * MIB
    assert codes["load"].items["vLLM weights"] == 200 * MIB * 9 // 16 + 51 * MIB
    assert dense["load"].items["LoRA"] == 4 * MIB and dense["load"].items["KV"] == 512 * MIB
    kept = {way: sum(peaks(give_back=way)["waiting"].items.values()) for way in ("nothing", "kv", "weights", "stop")}
    assert kept["nothing"] - kept["kv"] == 512 * MIB
    assert kept["kv"] - kept["weights"] == 2 * 200 * MIB + 55 * MIB
    assert kept["stop"] == 0 < kept["weights"]


def test_vllm_gives_back_the_least_that_makes_room() -> None:
    class WithVllm(Formula):
        def actor(self, work: CardWork, layers: int) -> list[Peak]:
            held = {"NF4": 600 * MIB, "LoRA": 8 * MIB, "embedding": 400 * MIB}
            return vllm_peaks(held, work, FACTS)

    def give_back(budget: int) -> str | int:
        asked = {**SMALL, "actor": {"engine": "vllm", "max_sequences": 32}}
        return make_card_plan(FACTS, work_of(**asked), budget, WithVllm()).choices["actor.give_back"]

    found = [give_back(budget) for budget in range(9 * GIB, 5 * GIB, -GIB // 4)]
    assert found[0] == "nothing" and {"nothing", "kv"} <= set(found)
    order = ["nothing", "kv", "weights", "stop"]
    assert [order.index(str(way)) for way in found] == sorted(order.index(str(way)) for way in found)


# --- models of all kinds


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SUPPORTED)
def test_every_architecture_that_is_supported_has_a_plan(name: str) -> None:
    """Also those whose layers go through transformers' modules."""
    facts = getattr(transformers, f"{name.split()[0]}Config")(**(SHAPE | SUPPORTED[name])).to_dict()
    rollout, tasks = {"prompts": 2, "group": 4, "max_new_tokens": 24}, {"max_prompt_tokens": 16}
    targets = sorted({module for _, module in linears_of(facts)})
    work = work_of(rollout=rollout, tasks=tasks, lora={"rank": 2, "targets": targets}, batch={"recompute": "always"})
    found = make_card_plan(facts, work, 2 * GIB, MetaTracer(facts))
    assert found.fits
    (decode,) = (phase for phase in found.processes["actor"] if phase.phase == "rollout decode")
    assert decode.items["KV"] > 0


def linears_of(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Layer and last part of the name of every linear."""
    names = (name.rpartition(".") for name in decoder_linears(empty_model(architecture_of(facts))))
    return [(layer, module) for layer, _, module in names]


# --- conversations

PAIR = 2 * 2 * 64 * 2
"""Keys and values of a token in one layer of QWEN_05B: two heads of 64, in bf16."""


@pytest.mark.parametrize("model_type", ["qwen2", "olmo2"], ids=["our layers", "transformers' layers"])
def test_what_is_kept_of_conversations_is_an_item(model_type: str) -> None:
    facts = {**QWEN_05B, "model_type": model_type, "vocab_size": 2048}
    sizes = {
        "rollout": {"prompts": 2, "group": 4, "max_new_tokens": 64},
        "tasks": {"max_prompt_tokens": 32},
        "eval": {"problems": 6},
        "actor": {"max_sequences": 4},
    }
    one, many = work_of(**sizes), work_of(**sizes, environment={"tools": ["tools.py:search"], "max_turns": 4})
    plain, turns = ({peak.name: peak for peak in MetaTracer(facts).actor(work, 2)} for work in (one, many))
    assert not any("earlier turns" in peak.items for peak in plain.values())
    for name, conversations in (("rollout", 8), ("evaluation", 6)):
        kept = conversations * (32 + 64) * 2 * PAIR
        assert {turns[f"{name} {part}"].items["earlier turns"] for part in ("prompts", "decode")} == {kept}
        assert turns[f"{name} decode"].items["KV"] > plain[f"{name} decode"].items["KV"], "prompts have grown"
    assert "earlier turns" not in turns["waiting"].items
    once = work_of(**sizes, environment={"tools": ["tools.py:search"], "max_turns": 1})
    assert largest_orders(once, facts) == largest_orders(one, facts)


def test_smaller_orders_help_where_conversations_are_kept() -> None:
    with_tools = {**SMALL, "environment": {"tools": ["tools.py:search"]}}
    keys = [[change.key for change in ladder] for ladder in changes(work_of(**with_tools))]
    assert ["rollout.groups_per_order"] * 4 in keys, "of 16 groups: 8, 4, 2, 1"


# --- models that are not here


def test_a_published_model_is_known_and_another_is_asked_for() -> None:
    assert facts_of(ModelConfig(path="Qwen/Qwen2.5-7B-Instruct"))["tie_word_embeddings"] is False
    assert facts_of(ModelConfig(path="embedded"))["num_hidden_layers"] > 0
    assert {load_config(name, here=False).model.path for name in ("r1_distill_8gb", "qwen3b_8gb")} <= PUBLISHED.keys()
    with pytest.raises(ModelError, match=r"hf download nobody/nothing config\.json"):
        facts_of(ModelConfig(path="nobody/nothing"))


def test_files_come_before_the_table_and_are_read_with_care(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_15B))
    assert facts_of(ModelConfig(path=str(tmp_path))) == QWEN_15B
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="has no 'num_hidden_layers'"):
        facts_of(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not a model's configuration"):
        facts_of(ModelConfig(path=str(tmp_path)))
