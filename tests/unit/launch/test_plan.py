"""The plan of a run: items computed by hand, refusals whose remedies help, and what is shown."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.commands.resume import config_to_resume
from launch.plan.cost import Plan, make_plan, plan_as_json, work_of
from launch.plan.duration import START_S, decode_s, evaluation_s, step_time
from launch.plan.memory import (
    HEAD_COLUMNS,
    HEAD_ROWS,
    HEAD_TILES,
    LONG_TURN_WEIGHTS,
    OWN_VALUES_PER_OUTPUT,
    UNRETURNED_BYTES,
    WORKING_LAYERS,
    host_memory,
    micro_batch_tokens,
    size_of,
    used_tokens,
)
from launch.plan.remedies import Remedy, changes, fits, refuse_if_too_large
from launch.plan.shape import Lengths, ModelShape, Passes, shape_of
from launch.plan.work import Work
from shared.config.load import config_from_json, resolve
from shared.config.model import hub_cache_folder
from shared.config.processes import LOGIT_BYTES, PIECE_TOKENS
from shared.embedded import EMBEDDED_DIR
from shared.errors import ConfigError, ModelError
from shared.model.head import CPU_COLUMNS
from shared.run.forecast import read_prediction
from shared.run.run_dir import RunDir
from tests.support.machines import GIB, HALF, QWEN_15B, SPEED, write_model

LENGTHS = Lengths(prompt=64, completion=64, longest=64)


def work(lengths: Lengths = LENGTHS, **sections: Mapping[str, object]) -> Work:
    """One prompt, 8 completions of 64 tokens, unless the sections say otherwise."""
    given = {**sections, "rollout": {"prompts": 1, "group": 8, "max_new_tokens": 64, **sections.get("rollout", {})}}
    config = resolve({"model": {"path": "somewhere"}, "eval": {"problems": 0}, **given})
    return replace(work_of(config, cores=2), lengths=lengths)


def plan(shape: ModelShape, one: Work, free: int | None) -> Plan:
    return make_plan(shape, one, free, steps=10, speeds=lambda: (SPEED, SPEED))


def test_the_whole_run_waits_for_every_evaluation_unless_another_process_makes_them() -> None:
    for beside, waited_for in ((False, 6), (True, 1)):
        one = work(eval={"problems": 30, "every": 2, "beside": beside})
        found = plan(HALF, one, None)
        assert found.time and found.total_s
        assert found.total_s == pytest.approx(
            START_S + 10 * found.time.step + waited_for * evaluation_s(HALF, one, SPEED)
        )


# --- memory


def test_the_items_of_half_a_billion_parameters_by_hand() -> None:
    found = host_memory(HALF, work(batch={"recompute": "always", "token_budget": 1024, "head_rows": 256}))
    parameters = 357_826_560 + 136_206_720
    assert found.shared["base"] == 4 * parameters
    adapter = 4 * 16 * HALF.adapter
    assert (found.learner["adapter"], found.learner["gradient"]) == (adapter, adapter)
    assert found.learner["Adam's moments"] == 2 * adapter
    assert found.actor["adapter"] == adapter
    # Two arrays, 24 layers, 2 heads of 64, fp32: one prompt, and 8 completions with room for 64 tokens.
    assert found.rollout["keys and values"] == 2 * 24 * 128 * 4 * (64 + 8 * 64)
    assert found.rollout["sampler"] == 8 * 151_936 * LOGIT_BYTES
    # What the products of a layer give, and keys and values of all layers.
    assert found.rollout["prompts"] == 64 * 4 * ((3 * 896 + 2 * 128 + 2 * 4864) + 24 * 2 * 128)
    # One prompt and its 8 completions are all there is.
    layer = OWN_VALUES_PER_OUTPUT * (3 * 896 + 2 * 128 + 2 * 4864) * 4 + 14 * 128 * 8
    assert found.update["activations"] == pytest.approx(576 * (24 * 896 * 4 + layer))
    assert found.update["a layer's backward pass"] == pytest.approx(WORKING_LAYERS * 576 * layer)
    assert found.update["head"] == 4 * (HEAD_TILES * 256 * HEAD_COLUMNS + HEAD_ROWS * 512 * 896)


def test_layers_that_go_through_their_modules_keep_more() -> None:
    through_modules = replace(HALF, own_layers=False)
    found, more = (host_memory(shape, work()).update["activations"] for shape in (HALF, through_modules))
    assert more > 1.3 * found


def test_the_heads_tiles_are_those_of_the_head() -> None:
    assert HEAD_COLUMNS == CPU_COLUMNS


def test_half_the_bytes_in_bf16_and_no_sums_in_the_actor() -> None:
    folded = {"fold": "always"}
    fp32, bf16 = (host_memory(HALF, work(actor=folded, compute={"dtype": name})) for name in ("fp32", "bf16"))
    assert bf16.shared["base"] * 2 == fp32.shared["base"]
    assert bf16.rollout["keys and values"] == fp32.rollout["keys and values"], "both are fp32 on a CPU"
    assert fp32.actor["base + adapter"] == 4 * HALF.linear
    assert "base + adapter" not in bf16.actor
    assert "base + adapter" not in host_memory(HALF, work()).actor, "only small models are folded by default"
    assert bf16.learner["adapter"] == fp32.learner["adapter"], "always fp32"


def test_only_the_larger_peak_counts_where_processes_take_turns() -> None:
    turns = host_memory(HALF, work())
    update, rollout = size_of(turns.update), size_of(turns.rollout)
    assert turns.total == turns.lasting + max(update, rollout), "after long turns all that is freed goes back"
    short = replace(turns, unreturned=UNRETURNED_BYTES).total
    assert short == turns.lasting + update + min(rollout, UNRETURNED_BYTES) and turns.unreturned == 0
    assert host_memory(replace(HALF, linear=LONG_TURN_WEIGHTS - 1), work()).unreturned == UNRETURNED_BYTES
    both = work(compute={"learner_threads": 1, "actor_threads": 1}, pipeline={"max_lag": 1})
    assert both.overlaps
    assert host_memory(HALF, both).total == turns.lasting + update + rollout


def test_prompts_need_memory_piece_by_piece() -> None:
    many = {"max_new_tokens": 1, "group": 2}
    half, whole, more = (
        host_memory(HALF, work(rollout={"prompts": count} | many)).rollout["prompts"]
        for count in (PIECE_TOKENS // 128, PIECE_TOKENS // 64, PIECE_TOKENS // 16)
    )
    assert 2 * half == whole == more
    long = work(replace(LENGTHS, prompt=2 * PIECE_TOKENS))
    assert host_memory(HALF, long).rollout["prompts"] == 2 * whole, "one prompt is never cut"


def test_an_evaluation_has_a_prompt_for_each_row() -> None:
    without, with_one = host_memory(HALF, work()), host_memory(HALF, work(eval={"problems": 100, "long_cap": 512}))
    assert without.evaluation == {}
    assert with_one.evaluation["keys and values"] == 2 * 24 * 128 * 4 * (8 * 64 + 8 * 512)
    assert with_one.actor_peak > without.actor_peak
    beside = host_memory(HALF, work(eval={"problems": 100, "long_cap": 512, "every": 5, "beside": True}))
    assert beside.evaluation == {} and beside.evaluator.items() > with_one.evaluation.items()
    assert beside.lasting - without.lasting == size_of(beside.evaluator)


@pytest.mark.parametrize(("samples", "rows"), [(4, 8), (16, 16)])
def test_an_evaluation_with_many_draws_has_a_few_prompts_and_many_rows(samples: int, rows: int) -> None:
    found = host_memory(HALF, work(eval={"problems": 3, "samples": samples, "long_cap": 512})).evaluation
    assert found["keys and values"] == 2 * 24 * 128 * 4 * (rows // samples * 64 + rows * 512)
    assert found["sampler"] == rows * 151_936 * LOGIT_BYTES


def test_what_is_kept_of_conversations_is_an_item() -> None:
    found = host_memory(HALF, work(environment={"tools": ["tools.py:search"]})).rollout
    token = 2 * 24 * 128 * 4
    assert found["earlier turns"] == 8 * 128 * token
    assert found["keys and values"] == 8 * (128 + 64) * token, "each has a prompt of its own"


def test_micro_batches_are_filled_as_the_learner_fills_them() -> None:
    def tokens(budget: int, *, recompute: str, prompts: int = 2) -> int:
        batch = {"token_budget": budget, "recompute": recompute}
        return micro_batch_tokens(work(batch=batch, rollout={"prompts": prompts}))

    whole_group = 64 + 8 * 64
    assert tokens(8192, recompute="never") == 2 * whole_group, "all there is"
    assert tokens(600, recompute="never") == whole_group
    assert tokens(whole_group + 64 + 128, recompute="never") == whole_group + 64 + 128
    assert tokens(1, recompute="never") == 128, "one sample is always computed"
    assert tokens(600, recompute="always") == whole_group, "prompts are shared there too"
    assert used_tokens(work(), whole_group) == 8 * 64


# --- what cannot run


@pytest.mark.parametrize("share", [0.97, 0.85, 0.6, 0.45, 0.3])
def test_a_run_that_does_not_fit_is_refused_with_changes_that_make_it_fit(share: float) -> None:
    one = work(replace(LENGTHS, longest=512), rollout={"prompts": 16, "group": 8, "max_new_tokens": 512})
    free = int(share * 0.9 * host_memory(QWEN_15B, one).total)
    found = plan(QWEN_15B, one, free)
    assert not found.fits and found.time is None and found.remedies
    for remedy in found.remedies:
        changed = one
        for change in remedy.changes:
            changed = change.apply(changed)
        assert host_memory(QWEN_15B, changed).total == remedy.total
        assert plan(QWEN_15B, changed, free).fits, str(remedy)
        for left_out in remedy.changes:
            fewer = one
            for change in remedy.changes:
                fewer = fewer if change is left_out else change.apply(fewer)
            assert not plan(QWEN_15B, fewer, free).fits, f"{left_out} is not needed in {remedy}"
    with pytest.raises(ConfigError, match="would fit with --set") as refusal:
        refuse_if_too_large(found.memory, found.free, found.remedies, "a model")
    assert all(str(change) in str(refusal.value) for remedy in found.remedies for change in remedy.changes)


@pytest.mark.parametrize("most_prompts", [0, 64])
def test_what_a_remedy_says_can_be_typed(most_prompts: int) -> None:
    """Its words are overrides that `run` takes, and the run that they make is the one that was planned."""
    sections: dict[str, dict[str, object]] = {
        "rollout": {"prompts": 16, "group": 8, "max_new_tokens": 64, "groups_per_order": 0},
        "growth": {"max_prompts": most_prompts},
    }
    one = work(LENGTHS, **sections)
    remedies = plan(QWEN_15B, one, 7 * GIB).remedies
    fewer = [change for ladder in changes(one) for change in ladder if "prompts" in change.key]
    assert {change.key for change in fewer} == {"growth.max_prompts" if most_prompts else "rollout.prompts"}
    single = [Remedy(changes=(each,), total=host_memory(QWEN_15B, each.apply(one)).total) for each in fewer]
    for remedy in [*remedies, *single]:
        typed: dict[str, dict[str, object]] = {name: dict(keys) for name, keys in sections.items()}
        for change in remedy.changes:
            section, key = change.key.split(".")
            text = change.value
            value: object = text if not text.isdigit() else json.loads(text)
            typed.setdefault(section, {})[key] = value
        assert host_memory(QWEN_15B, work(LENGTHS, **typed)).total == remedy.total


def test_a_model_that_nothing_makes_fit_is_refused_too() -> None:
    found = plan(QWEN_15B, work(), GIB // 2)
    assert found.remedies == ()
    with pytest.raises(ConfigError, match=r"the largest part is both processes: .*take a smaller model"):
        refuse_if_too_large(found.memory, found.free, found.remedies, "a model")
    # The learner and the actor each have an item of this name, and the larger one counts.
    memory = replace(found.memory, shared={}, learner={"adapter": 30 * GIB}, actor={"adapter": 2 * GIB})
    with pytest.raises(ConfigError, match=r"the largest part is learner: adapter, 30\.0 GiB"):
        refuse_if_too_large(memory, GIB, (), "a model")


def test_what_fits_is_not_refused_and_neither_is_what_may_fit() -> None:
    total = host_memory(HALF, work()).total
    for free in (2 * total, total, int(0.91 * total), None):
        found = plan(HALF, work(), free)
        assert found.fits and not found.remedies and fits(total, free)
        refuse_if_too_large(found.memory, free, (), "a model")


def huge_model(folder: Path) -> str:
    """A key that no machine has the memory for."""
    facts = {"num_attention_heads": 8, "hidden_size": 200_000, "num_hidden_layers": 100, "vocab_size": 1000}
    (folder / "huge").mkdir()
    matrix = [200_000, 200_000]
    write_model(folder / "huge", facts, {f"model.layers.{i}.mlp.up_proj.weight": matrix for i in range(100)})
    return f"model.path={folder / 'huge'}"


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_run_refuses_before_it_makes_anything(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = huge_model(tmp_path), str(tmp_path / "run")
    keys = [word for key in ("compute.device=cpu", 'lora.targets=["up_proj"]', path) for word in ("--set", key)]
    assert main(["run", *keys, "--out", out, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: The run needs about ") and said.count("\n") == 1 and "smaller model" in said
    assert not (tmp_path / "run").exists()


def test_a_prepared_run_is_refused_at_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    keys = [word for key in ("compute.device=cpu", huge_model(tmp_path)) for word in ("--set", key)]
    assert main(["run", "--prepare", "--out", str(out), *keys]) == 0
    before = {file: file.read_bytes() for file in (out / "config.json", out / "run.json")}
    assert main(["resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: The run needs about ") and said.count("\n") == 1
    assert said.endswith("prepare the run again with these keys, in another folder.\n")
    assert {file: file.read_bytes() for file in before} == before, "another machine may still start it"
    assert read_prediction(RunDir(out)) is None


def test_a_prepared_run_gets_its_plan_at_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "embedded", "--prepare", "--out", out, "--set", "compute.device=cpu"]) == 0
    run = RunDir.open(Path(out))
    with run.locked():
        config = config_to_resume(run, "here")
        assert config.batch.recompute == "never" and config_from_json(run.config.read_bytes()) == config
        predicted = read_prediction(run)
        assert predicted is not None and predicted.all_mb and "predicted: " in capsys.readouterr().out
        run.plan.unlink()
        assert config_to_resume(run, "here") == config
    assert read_prediction(run) is None and capsys.readouterr().out == "", "it has one plan, at its start"


def test_files_that_do_not_tell_sizes_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 0, "hidden_size": 4}')
    with pytest.raises(ModelError, match="cannot be read"):
        shape_of(tmp_path, ["q_proj"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="num_attention_heads"):
        shape_of(tmp_path, ["q_proj"])


def test_the_hubs_cache_is_where_its_library_looks(tmp_path: Path) -> None:
    for environment in (
        {},
        {"HF_HOME": str(tmp_path)},
        {"HF_HUB_CACHE": str(tmp_path / "x")},
        {"XDG_CACHE_HOME": "/y"},
    ):
        code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
        home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", code], env=home | environment, capture_output=True, text=True)
        ours = hub_cache_folder(environment)
        expected = Path(done.stdout.strip())
        if environment:
            assert ours == expected
        else:
            assert ours.parts[-3:] == expected.parts[-3:]


# --- time


def test_decoding_costs_what_reading_the_weights_costs() -> None:
    one = work()
    found = decode_s(HALF, one, SPEED, groups=1, rows=8, lengths=LENGTHS)
    products = 64 * (HALF.linear + 151_936 * 896) * 1e-9
    assert products < found < 1.4 * products
    longer = decode_s(HALF, one, SPEED, groups=1, rows=8, lengths=Lengths(prompt=64, completion=128, longest=128))
    assert longer == pytest.approx(2 * found, rel=0.05)
    ended_early = decode_s(HALF, one, SPEED, groups=1, rows=8, lengths=replace(LENGTHS, completion=32))
    assert ended_early < found


def test_a_step_has_its_parts_after_one_another_or_at_the_same_time() -> None:
    found = step_time(HALF, work(), SPEED, SPEED)
    assert found.step == pytest.approx(found.rollout + found.update, rel=0.05)
    together = replace(found, overlaps=True)
    assert together.step < found.step
    recomputed = step_time(HALF, work(batch={"recompute": "always"}), SPEED, SPEED)
    assert recomputed.update > 1.3 * found.update, "a product more"


def test_an_evaluation_decodes_greedy_orders_and_sampled_ones() -> None:
    one = work(eval={"problems": 30, "samples": 32}, rollout={"prompts": 16})
    greedy = decode_s(HALF, one, SPEED, groups=30, rows=30, lengths=LENGTHS)
    sampled = decode_s(HALF, one, SPEED, groups=4, rows=4 * 32, lengths=LENGTHS)
    assert evaluation_s(HALF, one, SPEED) == pytest.approx(greedy + 30 / 4 * sampled)


@pytest.mark.parametrize(
    ("sections", "gradient", "forward", "updates"),
    [
        ({}, 1, 0, 1),
        ({"loss": {"passes": 4}}, 4, 1, 4),
        ({"loss": {"passes": 2, "kl_beta": 0.1}}, 2, 3, 2),
        ({"batch": {"updates": 2}, "rollout": {"prompts": 4}}, 1, 1, 2),
        ({"batch": {"updates": 2}}, 1, 0, 1),
        ({"loss": {"kind": "opd"}, "teacher": {"adapter": "folder"}}, 1, 1, 1),
        ({"loss": {"kind": "opd"}, "teacher": {"url": "http://box/v1"}}, 1, 0, 1),
    ],
)
def test_every_pass_over_the_batch_takes_its_time(
    sections: dict[str, dict[str, object]], gradient: int, forward: int, updates: int
) -> None:
    one, plain = work(LENGTHS, **sections), Passes(gradient=1, forward=0, updates=1)
    assert one.passes == Passes(gradient=gradient, forward=forward, updates=updates)
    found, once = (step_time(HALF, replace(one, passes=each), SPEED, SPEED).update for each in (one.passes, plain))
    assert (gradient + 0.3 * forward) * once <= found <= (gradient + 0.5 * forward + 0.1 * (updates - 1)) * once


# --- what is shown


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["run", "embedded", "--dry-run", "--set", "compute.device=cpu", *words]) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys)
    assert "predicted memory: " in text and "are free" in text
    for words in ("shared", "launcher", "learner", "an update", "actor", "an order", "an evaluation"):
        assert words in text
    assert "predicted time: " in text and "per step (decoding " in text and "in total" in text


def test_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(dry_run(capsys, "--json"))
    assert found["fits"] is True and found["remedies"] == []
    assert found["peak_bytes"] < found["budget_bytes"]
    (update,) = found["processes"]["learner"]
    assert update["phase"] == "update" and update["bytes"] == sum(update["items"].values())
    assert found["time"]["step_s"] > 0 and found["time"]["total_s"] > 40 * found["time"]["step_s"]
    refused = plan_as_json(plan(QWEN_15B, work(), 8 * GIB))
    assert refused["fits"] is False and refused["time"] is None
    assert {"compute.dtype": "bf16"} in refused["remedies"]


def test_a_model_that_is_not_here_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "--set", "model.path=owner/name")
    assert "predicted memory and time: unknown, 'owner/name' is not on this machine yet" in text
    found = json.loads(dry_run(capsys, "--json", "--set", "model.path=owner/name"))
    assert found["fits"] is None


def test_the_embedded_model_is_read_in_no_time() -> None:
    shape = shape_of(EMBEDDED_DIR, ["q_proj"])
    assert (shape.heads, shape.outputs) == (4, 4 * (3 * 128 + 2 * 64 + 2 * 384))
