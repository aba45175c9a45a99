"""The planner against arithmetic by hand: five models, three lengths, every phase, within 3 %.

The formulas below follow from what the code keeps, not from how the planner counts it. T rows of a micro-batch go
through L layers of widths H and I; u of them meet the head. Small things (norms, tables, positions) are left out.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import pytest
from msgspec import structs

from actor.engines.vllm_options import vllm_options
from launch.card.items import LORA, NF4, WAITING, Peak
from launch.card.phases import MetaTracer
from launch.card.plan import Phase, Planner, Process, phases_of
from launch.card.published import QWEN_05B, QWEN_3B, QWEN_7B, QWEN_15B, R1_DISTILL_15B, Facts
from launch.card.vllm import vllm_peaks
from launch.card.work import CardWork, card_work, largest_micro_batch
from launch.evaluator.follow import beside
from shared.config.load import resolve
from shared.config.processes import ComputeConfig

MODELS = {"0.5B": QWEN_05B, "1.5B": QWEN_15B, "R1-Distill": R1_DISTILL_15B, "3B": QWEN_3B, "7B": QWEN_7B}
LENGTHS = ((64, 128), (256, 512), (448, 1536))
RANK, TWO, FOUR = 16, 2, 4
MIB, GIB = 2**20, 2**30
OUTSIDE = {"context", "cuBLAS", "cached", "margin"}
"""Not tensors; see the other tests."""
TOLERANCE = 0.03


@dataclass(frozen=True)
class Model:
    """Its widths."""

    layers: int
    hidden: int
    inner: int
    keys: int
    """Width of a token's keys."""
    vocabulary: int
    tied: bool

    @staticmethod
    def of(facts: Facts) -> "Model":
        size = facts["hidden_size"] // facts["num_attention_heads"]
        return Model(
            layers=facts["num_hidden_layers"],
            hidden=facts["hidden_size"],
            inner=facts["intermediate_size"],
            keys=size * facts["num_key_value_heads"],
            vocabulary=facts["vocab_size"],
            tied=facts["tie_word_embeddings"],
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(out, in) of one layer."""
        h, i, k = self.hidden, self.inner, self.keys
        return [(h, h), (k, h), (k, h), (h, h), (i, h), (i, h), (h, i)]

    @property
    def base(self) -> float:
        """4 bits a value; a byte for 64 of them; 4 bytes for 256 of these; embedding and head in bf16."""
        values = self.layers * sum(out * into for out, into in self.matrices)
        ends = (1 if self.tied else 2) * self.vocabulary * self.hidden * TWO
        return values * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + ends

    @property
    def adapter(self) -> int:
        """In fp32."""
        return FOUR * RANK * self.layers * sum(out + into for out, into in self.matrices)

    @property
    def token(self) -> int:
        """Keys and values of all layers in bf16."""
        return 2 * self.layers * self.keys * TWO

    @property
    def widest(self) -> int:
        """Values of the largest matrix."""
        return self.inner * self.hidden


def work_of(facts: Facts, prompt: int, completion: int, **batch: object) -> CardWork:
    """16 groups of 8, four in an order, of which all are decoded at once; 16 problems in an evaluation."""
    return card_work(
        resolve(
            {
                "tasks": {"max_prompt_tokens": prompt},
                "rollout": {"prompts": 16, "group": 8, "max_new_tokens": completion, "groups_per_order": 4},
                "actor": {"max_sequences": 32},
                "batch": {"token_budget": 4096, "head_rows": 512, "recompute": "always", **batch},
                "eval": {"problems": 16},
            }
        )
    )


def tensors(phases: list[Phase]) -> dict[str, int]:
    """Bytes of each phase in tensors."""
    return {p.phase: sum(amount for item, amount in p.items.items() if item not in OUTSIDE) for p in phases}


def learner_by_hand(model: Model, work: CardWork) -> dict[str, float]:
    part = largest_micro_batch(work)
    rows = part.prompts * part.prompt + part.completions * part.fed
    used = part.completions * part.completion
    columns = part.prompts * part.prompt + part.completions * (part.prompt + part.fed)
    masks = part.prompts * part.prompt**2 + part.completions * part.fed * (part.prompt + part.fed)
    hidden, inner = TWO * rows * model.hidden, TWO * rows * model.inner
    # Adapter and two moments; gradients from the first micro-batch to the optimizer's step.
    kept = model.base + 3 * model.adapter
    held = kept + model.adapter
    inputs = model.layers * hidden
    # Both sides of the gate and their product; seven times the width: the layer's input, queries before and after they
    # are turned, what attention gives, the layer's middle and its norm, the result; the dense values and their scales.
    forward = 3 * inner + 7 * hidden + 2.125 * model.widest
    # The rows that are used, and the directions of their gradients in fp32, once in parts and once joined; three tiles.
    head = used * model.hidden * (TWO + 2 * FOUR) + 3 * FOUR * 512 * 2048
    # Kept of a layer: seven times its width, both sides of the gate, keys and values for each head, the mask. Computed:
    # three times the inner width, and a few gradients of the hidden one.
    layer = 7 * hidden + 2 * inner + 2 * TWO * columns * model.hidden + TWO * masks
    backward = layer + 3 * inner + 4 * hidden + 2.0625 * model.widest
    return {
        "load": kept,
        "update forward": held + inputs + forward,
        "update head": held + inputs + hidden + head,
        "update backward": held + inputs + backward,
        "optimizer": held + model.adapter,
        "waiting": kept,
    }


def actor_by_hand(model: Model, work: CardWork) -> dict[str, float]:
    # In bf16, and once more for the products.
    held = model.base + model.adapter
    prompt, cap, group = work.prompt, work.rollout.max_new_tokens, work.rollout.group
    width = -(-prompt // 64) * 64
    found = {"load": held, "waiting": held}
    for name, prompts, rows in (("evaluation", 16, 16), ("rollout", 4, 4 * group)):
        cache = model.token * (prompts * width + rows * cap)
        piece = min(prompts, 2048 // width) * prompt
        run = TWO * piece * (3 * model.inner + 4 * model.hidden) + 2.125 * model.widest + model.token * piece
        # Logits and what is drawn from, in fp32, or else the dense values of a product; a graph has them once more.
        step = max(2 * FOUR * rows * model.vocabulary, 2.125 * model.widest)
        found |= {f"{name} prompts": held + cache + run, f"{name} decode": held + cache + 2 * step}
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_phase_of_both_processes_is_what_it_is_by_hand(name: str, lengths: tuple[int, int]) -> None:
    facts = MODELS[name]
    model, work = Model.of(facts), work_of(facts, *lengths)
    planner = Planner(model.layers, 2**40, MetaTracer(facts))
    for found, by_hand in (
        (tensors(planner.quick("learner", work)), learner_by_hand(model, work)),
        (tensors(planner.quick("actor", work)), actor_by_hand(model, work)),
    ):
        assert found.keys() == by_hand.keys()
        off = {phase: found[phase] / by_hand[phase] - 1 for phase in found}
        assert {phase: share for phase, share in off.items() if abs(share) > TOLERANCE} == {}


def test_moments_on_the_host_are_not_on_the_card() -> None:
    """compute.parallel = "zero2", also with one rank."""
    facts = QWEN_05B
    model, work = Model.of(facts), work_of(facts, 64, 128)
    divided = replace(work, compute=structs.replace(work.compute, parallel="zero2"))
    planners = (Planner(model.layers, 2**40, MetaTracer(facts)) for _ in range(2))
    whole, found = (tensors(next(planners).quick("learner", one)) for one in (work, divided))
    assert whole.keys() - found.keys() == {"optimizer"}
    assert {whole[phase] - bytes_then for phase, bytes_then in found.items()} == {2 * model.adapter}


def test_activations_that_are_kept_are_those_of_every_layer() -> None:
    facts = QWEN_05B
    model, work = Model.of(facts), work_of(facts, 256, 512, recompute="never")
    phases = Planner(model.layers, 2**40, MetaTracer(facts)).quick("learner", work)
    part = largest_micro_batch(work)
    rows = part.prompts * part.prompt + part.completions * part.fed
    columns = part.prompts * part.prompt + part.completions * (part.prompt + part.fed)
    masks = part.prompts * part.prompt**2 + part.completions * part.fed * (part.prompt + part.fed)
    layer = TWO * (5 * rows * model.hidden + 2 * rows * model.inner + 2 * columns * model.hidden + masks)
    forward = next(phase for phase in phases if phase.phase == "update forward")
    assert forward.items["activations"] == pytest.approx(model.layers * layer, rel=0.05)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["0.5B", "R1-Distill"])
def test_two_numbers_of_layers_tell_what_all_of_them_take(name: str) -> None:
    """The choice of sizes rests on it; the plan that is shown has run them all."""
    facts = MODELS[name]
    planner, work = Planner(facts["num_hidden_layers"], 2**40, MetaTracer(facts)), work_of(facts, 64, 128)
    for process in ("learner", "actor"):
        assert tensors(planner.quick(process, work)) == tensors(planner.whole(process, work))


@pytest.mark.parametrize("residency", ["release", "swap", "shared"])
@pytest.mark.parametrize("actor_card", [0, 1])
@pytest.mark.parametrize("actors", [1, 3])
@pytest.mark.parametrize("role", get_args(Process))
def test_a_waiting_base_is_counted_where_the_process_keeps_it(
    residency: str, actor_card: int, actors: int, role: Process
) -> None:
    work = card_work(
        resolve(
            {
                "model": {"path": "somewhere"},
                "compute": {"residency": residency, "actor_card": actor_card, "actors": actors},
            }
        )
    )
    peaks = [Peak(name=name, items={NF4: GIB, LORA: 1}, reserved=GIB + 1) for name in ("load", WAITING)]
    shares = actor_card == 0 or (role == "actor" and actors > 1)
    borrows = residency == "shared" and actor_card == 0
    assert work.compute.swaps_base(role) == (shares and residency != "release")
    keeps = shares and residency == "release" if not borrows else role == "learner"
    assert (NF4 in phases_of(role, peaks, work)[-1].items) == keeps


def test_an_evaluator_gives_way_to_the_actors_of_its_card() -> None:
    for compute in (ComputeConfig(), ComputeConfig(actor_card=1), ComputeConfig(learner_card=2, residency="shared")):
        assert beside(compute).swaps_base("actor")


@pytest.mark.parametrize(
    ("dtype", "weights", "size"), [("fp32", "dense", 4), ("bf16", "dense", 2), ("auto", "dense", 2), ("fp32", "nf4", 2)]
)
def test_vllm_is_planned_in_the_type_that_it_is_started_with(
    tmp_path: Path, dtype: Literal["fp32", "bf16", "auto"], weights: str, size: int
) -> None:
    given = {"model": {"path": "somewhere"}, "actor": {"engine": "vllm", "weights": weights}}
    config = resolve(given | {"rollout": {"prompts": 4, "group": 4}, "compute": {"dtype": dtype}})
    (tmp_path / "config.json").write_text(json.dumps(QWEN_15B))
    ours = 4 if dtype == "fp32" else 2
    held = {"NF4": 100 * MIB, "embedding": 25 * MIB * ours, "LoRA": 8 * MIB}
    load = vllm_peaks(held, card_work(config), QWEN_15B)[0].items
    assert load["KV"] == vllm_options(config, tmp_path, "cuda", "float32" if ours == 4 else "bfloat16").kv_bytes
    assert load["LoRA"] == 2 * MIB * size
    linears = 200 * MIB * 9 // 16 if weights == "nf4" else 200 * MIB * size
    assert load["vLLM weights"] == linears + 25 * MIB * size
