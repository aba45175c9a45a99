"""Whether activations are kept or recomputed, layers packed or not, and how many completions are decoded at once, as
`run` chooses it and `doctor` expects it."""

from dataclasses import replace
from pathlib import Path

from msgspec import structs

from launch.commands.run import without_auto_recompute
from launch.doctor.command import read_config
from launch.doctor.hardware_checks import available, container_limit
from launch.plan.cost import Plan, chosen_work, make_plan, savings_in_words, work_of
from launch.plan.machine import NotMeasured, Speed
from launch.plan.memory import host_memory, size
from launch.plan.remedies import fewer_rows, remedies
from launch.plan.work import Work
from shared.config.load import config_to_json, resolve
from shared.config.tree import Config
from shared.process.processor import settled_config
from tests.support.machines import GIB, QWEN_15B, both, but, configured, sound

CONFIG = resolve({"model": {"path": "somewhere"}, "rollout": {"prompts": 2, "group": 8, "max_new_tokens": 256}})

CHOICES = ("auto", "never", "always")


def not_measured() -> tuple[Speed, Speed]:
    raise NotMeasured("no time is needed here")


def work_with(recompute: str) -> Work:
    return work_of(
        structs.replace(CONFIG, batch=structs.replace(CONFIG.batch, recompute=recompute)), cores=2, packs=False
    )


def plan(work: Work, free: int | None) -> Plan:
    return make_plan(QWEN_15B, work, free, steps=10, speeds=not_measured)


def chosen(recompute: str, free: int | None) -> tuple[str, Plan]:
    cost = plan(chosen_work(QWEN_15B, work_with(recompute), free), free)
    return cost.work.batch.recompute, cost


def test_activations_are_recomputed_only_if_they_do_not_fit() -> None:
    large, small = (plan(work_with(choice), None).memory.total for choice in ("never", "always"))
    assert small < large
    recompute, cost = chosen("auto", 2 * large)
    assert recompute == "never" and cost.memory.total == large
    # Between both: what needs less fits.
    recompute, cost = chosen("auto", (small + large) // 2)
    assert recompute == "always" and cost.fits and cost.memory.total == small
    # If neither fits, the plan that is refused is the smaller one.
    recompute, cost = chosen("auto", small // 2)
    assert recompute == "always" and not cost.fits and cost.memory.total == small


def test_a_choice_of_the_user_is_kept() -> None:
    assert [chosen(choice, 1)[0] for choice in ("never", "always")] == ["never", "always"]


def test_where_nothing_is_planned_nothing_is_recomputed() -> None:
    found = [without_auto_recompute(structs.replace(CONFIG.batch, recompute=choice)).recompute for choice in CHOICES]
    assert found == ["never", "never", "always"]


def test_layers_are_packed_unless_the_run_only_fits_without() -> None:
    bf16 = resolve(
        {
            "model": {"path": "somewhere"},
            "rollout": {"prompts": 1, "group": 8, "max_new_tokens": 64},
            "compute": {"dtype": "bf16"},
            "batch": {"recompute": "always"},
        }
    )
    work = work_of(bf16, cores=2)
    packed, plain = (plan(replace(work, packs=packs), None).memory.total for packs in (True, False))
    assert plain < packed
    for free, packs in ((2 * packed, True), ((plain + packed) // 2, False), (plain // 2, False)):
        cost = plan(chosen_work(QWEN_15B, work, free), free)
        assert cost.work.packs == packs and cost.fits == (free > plain)


def test_doctor_judges_memory_by_what_run_would_choose() -> None:
    machine = but("model", shape=QWEN_15B)(sound())
    again, kept = (size(host_memory(QWEN_15B, one).total) for one in bare_choices())
    found = available(machine)
    assert found.level == "ok" and f"a run needs about {again}" in found.found
    refused = available(configured(batch={"recompute": "never"})(machine))
    assert refused.level == "error" and f"a run needs about {kept}" in refused.found
    # `run` goes by what is left in the container, so both checks do.
    limited = both(but("memory", available=26 * GIB), but("cgroup", memory_limit=16 * GIB, memory_left=12 * GIB))
    assert available(limited(machine)).level == container_limit(limited(machine)).level == "ok"


def bare_choices() -> list[Work]:
    work = work_of(Config(), cores=4)
    return [replace(work, batch=structs.replace(work.batch, recompute=one)) for one in ("always", "never")]


def test_doctor_judges_a_prepared_run_by_what_resume_would_choose(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(config_to_json(CONFIG))
    assert CONFIG.batch.recompute == read_config(file, ()).batch.recompute == "auto"
    # Its learner was started by hand.
    file.write_bytes(config_to_json(settled_config(CONFIG)))
    assert read_config(file, ()).batch.recompute == "never"


def test_a_run_that_has_started_keeps_its_sizes() -> None:
    rollout, batch = {"prompts": 64, "max_new_tokens": 256}, {"token_budget": 512, "recompute": "never"}
    sized = configured(model={"path": "somewhere"}, rollout=rollout, batch=batch, actor={"max_sequences": 256})
    machine = both(but("model", shape=QWEN_15B), sized)(sound())
    work = work_of(machine.config, cores=4)
    kept, narrow = chosen_work(QWEN_15B, work, 1, started=True), chosen_work(QWEN_15B, work, 1)
    assert (kept.actor, kept.batch) == (work.actor, work.batch)
    assert needed(narrow) < 0.9 * needed(kept)
    for started, level in ((False, "warning"), (True, "error")):
        limited = both(but("memory", available=needed(narrow)), but("run", state="run", started=started))
        assert available(limited(machine)).level == level


def test_the_variant_with_the_least_memory_may_be_that_with_the_usual_width() -> None:
    """Usually as many as need 512 MiB are decoded at once, which may be fewer than eight."""
    long = replace(wide(0), lengths=replace(wide(0).lengths, prompt=16_000))
    least = chosen_work(QWEN_15B, long, 1)
    assert least.actor.max_sequences == 0 and least.batch.recompute == "always"


def wide(width: int) -> Work:
    """Where decoding takes more than an update."""
    config = structs.replace(
        CONFIG,
        rollout=structs.replace(CONFIG.rollout, prompts=64),
        actor=structs.replace(CONFIG.actor, max_sequences=width),
        batch=structs.replace(CONFIG.batch, token_budget=512),
    )
    return work_of(config, cores=2, packs=False)


def needed(work: Work) -> int:
    return host_memory(QWEN_15B, work).total


def test_fewer_completions_are_decoded_at_once_if_they_do_not_fit() -> None:
    assert chosen_work(QWEN_15B, wide(0), None).actor.max_sequences == 0
    all_at_once, half, few = (needed(wide(width)) for width in (256, 128, 8))
    assert few < half < all_at_once
    # The number that is asked for is the largest, and a run is refused only 10 % below what it needs.
    for free, width in ((all_at_once, 256), (0.9 * all_at_once - 1, 128), (0.9 * half - 1, 64)):
        cost = plan(chosen_work(QWEN_15B, wide(256), int(free)), int(free))
        assert cost.fits and cost.work.actor.max_sequences == width
        assert cost.work.batch.recompute == "never" and cost.memory.total < all_at_once + 1
    least = chosen_work(QWEN_15B, wide(0), 1)
    assert (least.actor.max_sequences, least.batch.recompute) == (8, "always")


def test_the_start_of_a_run_says_how_it_saves_memory() -> None:
    found = [savings_in_words(chosen_work(QWEN_15B, wide(0), free)) for free in (None, 1)]
    assert found == ["", " (activations computed twice, 8 completions decoded at once)"]
    assert savings_in_words(wide(4096)) == "", "an order has fewer"


def test_still_fewer_at_once_are_a_remedy() -> None:
    least = chosen_work(QWEN_15B, wide(0), 1)
    fewer = [needed(replace(least, actor=structs.replace(least.actor, max_sequences=width))) for width in (4, 8)]
    assert fewer[0] < fewer[1]
    found = [remedy.settings for remedy in remedies(QWEN_15B, least, int(0.9 * fewer[0]) + 1)]
    assert {"actor.max_sequences": "4"} in found


def test_servers_have_no_width_to_choose() -> None:
    assert not list(fewer_rows(structs.replace(CONFIG.actor, engine="vllm_server"), 64, 1))
