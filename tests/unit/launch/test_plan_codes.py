"""The plan of a run whose token steps read codes, and of the time that layers take besides their products."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from launch.plan.cost import chosen_work, work_of
from launch.plan.duration import (
    BETWEEN_S,
    HASHED_BYTE_S,
    IN_A_RUN,
    decode_s,
    install_s,
    micro_batch_s,
    publish_s,
    step_time,
    update_s,
)
from launch.plan.machine import CompiledTimes, CompiledUpdate, OtherTimes, Speed
from launch.plan.memory import NF4_BYTES, host_memory, size_of, update_items
from launch.plan.remedies import REFUSAL_MARGIN
from launch.plan.shape import Lengths
from launch.plan.work import Work
from shared.config.load import resolve
from shared.process.processor import gains_by_packing
from tests.support.machines import HALF, RATES, SPEED
from tests.unit.launch.test_plan import LENGTHS, work

CODES = {"weights": "nf4", "head": "int8"}


def test_with_codes_nothing_is_packed_and_the_head_is_in_8_bits() -> None:
    bf16, head, linears = {"dtype": "bf16"}, 151_936 * 896, HALF.linear
    dense = host_memory(HALF, work(compute=bf16)).rollout
    assert dense["packed weights"] == (2 * linears + 2 * head) // 2
    assert "codes" not in dense and "head in 8 bits" not in dense
    nf4 = host_memory(HALF, work(compute=bf16, actor=CODES)).rollout
    assert nf4["packed weights"] == 0
    assert nf4["codes"] == int(NF4_BYTES * linears) and nf4["head in 8 bits"] == head
    short = work(compute=bf16, actor={"weights": "nf4"})
    found = host_memory(HALF, short).rollout
    assert found["packed weights"] == 2 * head and "head in 8 bits" not in found
    alone = host_memory(HALF, work(compute=bf16, actor={"head": "int8"})).rollout
    assert alone["packed weights"] == linears and alone["head in 8 bits"] == head and "codes" not in alone
    little = replace(short, actor=structs.replace(short.actor, packed=0.2))
    assert host_memory(HALF, little).rollout["packed weights"] == 0, "a part of the head is of no use"
    many = work(compute=bf16, actor=CODES, rollout={"prompts": 5})
    forty = host_memory(HALF, many).rollout
    assert forty["packed weights"] == linears and "codes" in forty, "its last rows are few"
    wide = host_memory(HALF, work(actor=CODES)).rollout
    assert "codes" not in wide, "in fp32 nothing multiplies by them"


def test_a_token_step_has_the_adapter_in_blocks() -> None:
    rank, hidden, inner = 16, 896, 4864
    in_a = rank * (3 * hidden + hidden + 2 * hidden + inner)
    in_b = 3 * rank * (896 + 128 + 128) + rank * hidden + 2 * rank * 2 * inner + rank * hidden
    bf16, item = {"dtype": "bf16"}, "adapter of token steps"
    dense, coded = (host_memory(HALF, work(compute=bf16, actor=actor)).actor for actor in ({"weights": "dense"}, CODES))
    assert dense[item] == pytest.approx(2 * 24 * (in_a + in_b), rel=0.03)
    assert coded[item] == pytest.approx(3 * 24 * (in_a + in_b), rel=0.03), "in bf16, and in 8 bits"
    assert item not in host_memory(HALF, work(actor={"fold": "always"})).actor, "in fp32 both are summed up"
    elsewhere = host_memory(replace(HALF, own_layers=False), work(compute=bf16)).actor
    assert item not in elsewhere, "modules multiply by the adapter itself"


def test_an_adapter_is_counted_as_it_is_sent() -> None:
    """Two messages, and at the learner two files where these have other bytes and orders may name older versions."""
    bf16, ahead = {"dtype": "bf16"}, {"max_lag": 1}
    same = host_memory(HALF, work(compute=bf16))
    wide = host_memory(HALF, work(compute=bf16, link={"adapter_dtype": "fp32"}))
    halved = host_memory(HALF, work(link={"adapter_dtype": "bf16"}))
    file = 4 * 16 * HALF.adapter
    assert [one.actor["adapter as messages"] for one in (same, wide, halved)] == [file, 2 * file, file]
    assert [one.learner["adapter as messages"] for one in (same, wide, halved)] == [file, 2 * file, file]
    assert [one.actor["adapter"] for one in (same, wide, halved)] == [file // 2, file // 2, file], "as it is computed"
    assert "adapter as files" not in same.learner
    assert host_memory(HALF, work(compute=bf16, pipeline=ahead)).learner["adapter as files"] == 2 * file
    assert "adapter as files" not in host_memory(HALF, work(pipeline=ahead)).learner


def test_codes_take_a_quarter_of_the_time_of_what_they_are_read_for() -> None:
    quick = structs.replace(RATES, coded=(25e-11, 25e-11, 5e-10), eight_bit=(5e-10,) * 5)
    speed = structs.replace(SPEED, rates=quick)
    one = work(compute={"dtype": "bf16"}, actor=CODES)
    found = decode_s(HALF, one, speed, groups=1, rows=8, lengths=LENGTHS)
    head, linears, prompt = 151_936 * 896, HALF.linear, HALF.linear * SPEED.product_s(64)
    weights = 64 * (25e-11 * linears + 5e-10 * head)
    assert prompt + weights < found < prompt + 1.4 * weights
    no_codes = structs.replace(quick, coded=())
    slow = structs.replace(SPEED, rates=no_codes)
    assert decode_s(HALF, one, slow, groups=1, rows=8, lengths=LENGTHS) > 1.5 * found, "a machine that reads none"


def compiled_speed(**times: Any) -> Speed:
    """A machine with C code."""
    other = OtherTimes(calls=1e-5, per_value=1e-10)
    usual = {"product": (1e-9,) * 5, "coded": (25e-11,) * 5, "head": (1e-10,) * 5, "sampler": 1e-10}
    usual |= {"token_step": other, "folded_token_step": other, "update": CompiledUpdate(layer=other, head=1e-12)}
    compiled = CompiledTimes(**usual | times)
    return structs.replace(SPEED, rates=structs.replace(RATES, compiled=compiled))


def test_c_code_reads_codes_for_any_number_of_rows_and_has_scales_of_its_own() -> None:
    in_c = CODES | {"token_step": "compiled"}
    sections: dict[str, Any] = {"compute": {"dtype": "bf16"}, "rollout": {"prompts": 5}}
    found = host_memory(HALF, work(actor=in_c, **sections))
    assert found.actor["scales of codes"] == HALF.linear // 16
    assert "scales of codes" not in host_memory(HALF, work(actor=CODES, **sections)).actor
    dense = host_memory(HALF, work(actor=in_c | {"weights": "dense"}, **sections))
    assert "codes" in found.rollout and "codes" not in dense.rollout
    item, speed = "adapter of token steps", compiled_speed()
    assert found.actor[item] == dense.actor[item], "in bf16 only"
    for rows in (8, 40):
        coded, other = (
            decode_s(HALF, work(actor=actor, **sections), speed, groups=rows // 8, rows=rows, lengths=LENGTHS)
            for actor in (in_c, in_c | {"weights": "dense"})
        )
        assert other - coded == pytest.approx(64 * (1e-9 - 25e-11) * HALF.linear, rel=0.01)


def test_c_code_has_a_head_of_its_own() -> None:
    one = work(compute={"dtype": "bf16"}, actor=CODES | {"token_step": "compiled"})
    quick, slow = (
        decode_s(HALF, one, compiled_speed(head=(t,) * 5), groups=1, rows=8, lengths=LENGTHS) for t in (1e-10, 5e-10)
    )
    assert slow - quick == pytest.approx(64 * 4e-10 * 151_936 * 896, rel=0.01)


def test_an_update_takes_the_time_of_c_code_unless_pytorch_is_asked_for() -> None:
    in_c, plain = work(), work(compute={"kernels": "torch"})
    assert update_s(HALF, in_c, SPEED) == update_s(HALF, plain, compiled_speed()) == update_s(HALF, plain, SPEED)
    found = update_s(HALF, in_c, compiled_speed())
    usual = OtherTimes(calls=1e-5, per_value=1e-10)
    slower_head = update_s(HALF, in_c, compiled_speed(update=CompiledUpdate(layer=usual, head=2e-12)))
    assert slower_head - found == pytest.approx(1e-12 * 151_936 * 896 * 8 * 64, rel=0.01)
    more_calls = CompiledUpdate(layer=OtherTimes(calls=1e-3 + 1e-5, per_value=1e-10), head=1e-12)
    assert update_s(HALF, in_c, compiled_speed(update=None)) == update_s(HALF, plain, SPEED)
    slower_layers = update_s(HALF, in_c, compiled_speed(update=more_calls))
    assert slower_layers - found == pytest.approx(1e-3 * HALF.layers, rel=0.01)
    modules = replace(HALF, own_layers=False)
    assert update_s(modules, in_c, compiled_speed(update=more_calls)) == update_s(modules, in_c, compiled_speed())


def test_micro_batches_take_the_time_of_their_sizes() -> None:
    """Two prompts of 8 completions of 64 tokens are 1152 tokens."""
    whole, cut = work(rollout={"prompts": 2}), work(rollout={"prompts": 2}, batch={"token_budget": 1024})
    more = update_s(HALF, cut, SPEED) - update_s(HALF, whole, SPEED)
    parts = [micro_batch_s(HALF, cut, SPEED, tokens) for tokens in (1024, 128, 1152)]
    assert more == pytest.approx(parts[0] + parts[1] - parts[2] + fresh_s(cut) - fresh_s(whole))
    assert parts[0] + parts[1] > parts[2], "each has the calls of all layers"


def fresh_s(one: Work) -> float:
    return SPEED.fresh * size_of(update_items(HALF, one))


def test_each_new_adapter_is_published_and_installed() -> None:
    one, silent = work(), work(guard={"canary_tokens": 0})
    file = 4 * 16 * HALF.adapter * HASHED_BYTE_S
    assert publish_s(HALF, silent, SPEED) == pytest.approx(2 * file), "a checkpoint's and the actors'"
    assert install_s(HALF, silent, SPEED) == pytest.approx(file)
    canary = publish_s(HALF, one, SPEED) - 2 * file
    weights = HALF.linear + 151_936 * 896
    assert canary == pytest.approx(weights * SPEED.product_s(16) + HALF.layers * RATES.layer.update.calls / 2)
    assert install_s(HALF, one, SPEED) == pytest.approx(file + canary)
    bf16 = work(compute={"dtype": "bf16"})
    assert install_s(HALF, bf16, SPEED) == pytest.approx(file / 2 + 2 * canary), "and how much rounding changes"
    time = step_time(HALF, one, SPEED, SPEED)
    assert time.step == pytest.approx(BETWEEN_S + time.install + time.rollout + time.update)
    assert time.install == install_s(HALF, one, SPEED)
    assert time.update == IN_A_RUN * update_s(HALF, one, SPEED)
    overlapping = replace(time, overlaps=True)
    assert overlapping.step == pytest.approx(BETWEEN_S + max(time.install + time.rollout, time.update))


def test_actors_share_the_files_with_codes() -> None:
    one = host_memory(HALF, work(compute={"dtype": "bf16"}, actor=CODES))
    codes = one.rollout["codes"] + one.rollout["head in 8 bits"]
    assert one.mapped == codes
    alone, three = (replace(one, actors=3, at_once=count, overlaps=True) for count in (1, 3))
    assert three.total - alone.total == 2 * (size_of(one.rollout) - codes)


def test_a_quick_8_bit_head_makes_a_token_step_shorter() -> None:
    bf16, head = {"dtype": "bf16"}, 151_936 * 896
    one = work(compute=bf16, actor=CODES, rollout={"max_new_tokens": 128})
    lengths = Lengths(prompt=64, completion=128, longest=128)
    slow, quick = (
        structs.replace(SPEED, rates=structs.replace(RATES, coded=(1e-10,) * 3, eight_bit=(t,) * 5))
        for t in (10e-10, 2e-10)
    )
    before, now = (decode_s(HALF, one, speed, groups=1, rows=8, lengths=lengths) for speed in (slow, quick))
    assert before - now == pytest.approx(128 * head * (10e-10 - 2e-10), rel=0.01)


def test_where_there_is_no_room_for_packed_weights_the_plan_leaves_them_out() -> None:
    sections: dict[str, Any] = {"batch": {"recompute": "always"}, "rollout": {"max_new_tokens": 128}}
    one = work(compute={"dtype": "bf16"}, actor={"weights": "dense"}, **sections)
    need = host_memory(HALF, one).total
    assert chosen_work(HALF, one, 2 * need).packs
    assert not chosen_work(HALF, one, int(REFUSAL_MARGIN * (need - 100 * 2**20))).packs


def slower(part: str, calls: float = 0.0, per_value: float = 0.0) -> Speed:
    """A machine whose layers take so many seconds more in this part."""
    layer = SPEED.rates.layer
    before: OtherTimes = getattr(layer, part)
    more = OtherTimes(calls=before.calls + calls, per_value=before.per_value + per_value)
    return structs.replace(SPEED, rates=structs.replace(RATES, layer=structs.replace(layer, **{part: more})))


def test_a_layers_own_time_counts_once_for_each_token() -> None:
    speed = slower("token_step", calls=1e-3)
    found, longer = (decode_s(HALF, work(), one, groups=1, rows=8, lengths=LENGTHS) for one in (SPEED, speed))
    # A pass of the prompt, and 64 token steps.
    assert longer - found == pytest.approx(65 * HALF.layers * 1e-3)
    update = slower("update", calls=10e-3)
    assert step_time(HALF, work(), SPEED, update).update > step_time(HALF, work(), SPEED, SPEED).update + 0.2


def test_what_is_done_with_each_value_counts_by_values() -> None:
    step, folded, update = (slower(part, per_value=1e-9) for part in ("token_step", "folded_token_step", "update"))
    # A prompt, and 8 tokens in each of 64 steps.
    for fold, other, tokens in (("never", step, 64 + 64 * 8), ("always", folded, 64 + 64 * 8), ("never", folded, 0)):
        one = work(actor={"fold": fold})
        found, longer = (decode_s(HALF, one, each, groups=1, rows=8, lengths=LENGTHS) for each in (SPEED, other))
        assert longer - found == pytest.approx(tokens * HALF.outputs * 1e-9)
    # What is computed again is half of it.
    for recompute, share in (("never", 1.0), ("always", 1.5)):
        one = work(batch={"recompute": recompute})
        found, longer = (update_s(HALF, one, learner) for learner in (SPEED, update))
        assert longer - found == pytest.approx(share * (64 + 8 * 64) * HALF.outputs * 1e-9)


def test_with_amx_nothing_is_packed() -> None:
    config = resolve({"compute": {"dtype": "bf16"}, "rollout": {"max_new_tokens": 64}})
    usual, amx = (
        work_of(config, cores=2, packs=gains_by_packing(frozenset(flags), config.compute))
        for flags in ({"avx512_bf16"}, {"amx_bf16"})
    )
    assert host_memory(HALF, usual).rollout["packed weights"] > 0
    plan = chosen_work(HALF, amx, None)
    assert not plan.packs and "packed weights" not in host_memory(HALF, plan).rollout
