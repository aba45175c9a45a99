"""What `auto` and 0 in [compute] become: by processor, model and container, from files made up for each case."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from launch.__main__ import main
from shared.config.load import config_from_json, resolve
from shared.config.model import ModelConfig
from shared.config.processes import EIGHT_BIT_TOKENS, ComputeConfig
from shared.errors import ConfigError
from shared.process.processor import (
    BUSY,
    LARGE_BYTES,
    Capacity,
    container_cores,
    cores_here,
    is_busy,
    is_large,
    is_open,
    look_at_capacity,
    others_running,
    settled,
    settled_config,
    start_config,
    usable_cores,
    weight_bytes,
)
from shared.run.run_dir import RunDir

EMBEDDED = ModelConfig()
HUB = ModelConfig(path="somebody/a-model-that-is-not-here")


def capacity(*flags: str, cores: int = 8, card: bool = False, others: float = 0.0) -> Capacity:
    return Capacity(flags=frozenset(flags), cores=cores, card=card, others=others)


@pytest.mark.parametrize(
    ("compute", "model", "found", "dtype"),
    [
        ({}, HUB, capacity("avx512_bf16"), "bf16"),
        ({}, HUB, capacity("amx_bf16"), "bf16"),
        ({}, HUB, capacity("bf16"), "bf16"),
        ({}, HUB, capacity("avx512f"), "fp32"),
        ({}, EMBEDDED, capacity("avx512_bf16"), "fp32"),
        ({}, EMBEDDED, capacity(card=True), "bf16"),
        ({"device": "cpu"}, EMBEDDED, capacity(card=True), "fp32"),
        ({"device": "cuda"}, EMBEDDED, capacity(), "bf16"),
        ({"blas": "portable"}, HUB, capacity("avx512_bf16"), "fp32"),
        ({"dtype": "bf16"}, EMBEDDED, capacity(), "bf16"),
        ({"dtype": "fp32"}, HUB, capacity("amx_bf16", card=True), "fp32"),
    ],
)
def test_the_number_type_follows_from_instructions_and_size(
    compute: dict[str, Any], model: ModelConfig, found: Capacity, dtype: str
) -> None:
    assert settled(ComputeConfig(**compute), model, 0, found).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "found", "weights"),
    [
        ({"compute.dtype": "bf16"}, capacity("avx512_bf16"), "nf4"),
        ({"compute.dtype": "bf16"}, capacity("amx_bf16"), "dense"),
        ({"compute.dtype": "bf16"}, capacity("avx512_bf16", "amx_bf16"), "dense"),
        ({"compute.dtype": "bf16", "actor.weights": "nf4"}, capacity("avx512_bf16", "amx_bf16"), "nf4"),
        ({"compute.dtype": "fp32"}, capacity("avx512_bf16"), "dense"),
        ({"compute.dtype": "bf16", "compute.blas": "portable"}, capacity("avx512_bf16"), "dense"),
        ({"compute.dtype": "bf16", "model.quantization": "none"}, capacity("avx512_bf16"), "dense"),
        ({"compute.dtype": "bf16", "model.dequantize": "each_call"}, capacity("avx512_bf16"), "dense"),
        ({"compute.dtype": "bf16", "actor.engine": "vllm"}, capacity("avx512_bf16"), "dense"),
        ({"compute.dtype": "bf16", "actor.weights": "dense"}, capacity("avx512_bf16"), "dense"),
        ({"compute.device": "cuda"}, capacity(card=True), "nf4"),
        ({"compute.device": "cuda", "model.dequantize": "once"}, capacity(card=True), "dense"),
    ],
)
def test_what_is_sampled_from_follows_from_type_and_processor(
    keys: dict[str, str], found: Capacity, weights: str
) -> None:
    sections: dict[str, dict[str, str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    assert settled_config(resolve(sections), found).actor.weights == weights


@pytest.mark.parametrize(
    ("sections", "found", "head"),
    [
        ({}, capacity("avx512_vnni"), "int8"),
        ({}, capacity("avx512_vnni", "amx_bf16"), "int8"),
        ({"rollout": {"max_new_tokens": EIGHT_BIT_TOKENS - 1}}, capacity("avx512_vnni"), "dense"),
        ({}, capacity("avx512_bf16"), "dense"),
        ({"actor": {"head": "dense"}}, capacity("avx512_vnni"), "dense"),
        ({"actor": {"head": "int8"}}, capacity(), "int8"),
        ({"compute": {"dtype": "fp32"}}, capacity("avx512_vnni"), "dense"),
        ({"compute": {"dtype": "bf16", "blas": "portable"}}, capacity("avx512_vnni"), "dense"),
        ({"compute": {"dtype": "bf16", "device": "cuda"}}, capacity("avx512_vnni", card=True), "dense"),
        ({"model": {"quantization": "none"}}, capacity("avx512_vnni"), "dense"),
        ({"model": {"dequantize": "each_call"}}, capacity("avx512_vnni"), "dense"),
        ({"actor": {"engine": "vllm"}}, capacity("avx512_vnni"), "dense"),
    ],
)
def test_what_logits_come_from_follows_from_cap_type_and_processor(
    sections: dict[str, dict[str, Any]], found: Capacity, head: str
) -> None:
    config = resolve({"compute": {"dtype": "bf16"}, "rollout": {"max_new_tokens": EIGHT_BIT_TOKENS}} | sections)
    assert settled_config(config, found).actor.head == head


@pytest.mark.parametrize(("keys", "left"), [({"weights": "dense"}, True), ({"weights": "nf4", "head": "dense"}, False)])
def test_a_run_whose_head_is_to_be_chosen_is_open(keys: dict[str, str], left: bool) -> None:
    compute, keys = {"dtype": "bf16", "learner_threads": 2, "actor_threads": 2}, keys | {"token_step": "torch"}
    assert is_open(resolve({"compute": compute, "actor": keys})) is left
    assert not is_open(resolve({"compute": compute | {"dtype": "fp32"}, "actor": keys}))


def test_a_run_whose_token_step_is_to_be_chosen_is_open() -> None:
    compute = {"dtype": "fp32", "learner_threads": 2, "actor_threads": 2}
    assert is_open(resolve({"compute": compute}))
    assert not is_open(resolve({"compute": compute, "actor": {"token_step": "compiled"}}))
    assert not is_open(resolve({"compute": compute, "actor": {"engine": "vllm"}})), "nothing of `hf` is used"


@pytest.mark.parametrize(
    ("compute", "flags", "compiler", "chosen"),
    [
        ({}, ("avx2",), True, "compiled"),
        ({}, ("avx2",), False, "torch"),
        ({}, (), True, "torch"),
        ({"dtype": "bf16"}, ("avx2",), True, "compiled"),
        ({"blas": "portable"}, ("avx2",), True, "torch"),
        ({"kernels": "torch"}, ("avx2",), True, "torch"),
        ({"kernels": "triton"}, ("avx2",), True, "triton"),
        ({"kernels": "compiled"}, (), False, "compiled"),
        ({"device": "cuda"}, ("avx2",), True, "auto"),
    ],
)
def test_what_computes_between_products_follows_from_processor_and_compiler(
    compute: dict[str, Any], flags: tuple[str, ...], compiler: bool, chosen: str
) -> None:
    found = replace(capacity(*flags), compiler=compiler)
    assert settled_config(resolve({"compute": compute}), found).compute.kernels == chosen
    on_card = replace(found, card=True)
    assert settled_config(resolve({"compute": compute}), on_card).compute.kernels == compute.get("kernels", "auto")


@pytest.mark.parametrize(
    ("sections", "flags", "compiler", "chosen"),
    [
        ({}, ("avx2",), True, "compiled"),
        ({}, ("avx2",), False, "torch"),
        ({}, (), True, "torch"),
        ({"compute": {"dtype": "bf16"}}, ("avx2", "amx_bf16"), True, "compiled"),
        ({"compute": {"dtype": "bf16"}}, ("avx2", "avx512_bf16"), True, "torch"),
        ({"compute": {"dtype": "bf16"}}, ("avx2", "avx512_bf16", "avx512vbmi"), True, "compiled"),
        ({"compute": {"dtype": "bf16"}}, ("avx2", "avx512_bf16", "avx512vbmi"), False, "torch"),
        ({"compute": {"dtype": "bf16"}, "actor": {"weights": "nf4"}}, ("avx2", "amx_bf16"), True, "compiled"),
        ({"compute": {"blas": "portable"}}, ("avx2",), True, "torch"),
        ({"compute": {"device": "cuda"}}, ("avx2",), True, "torch"),
        ({"model": {"dequantize": "each_call"}}, ("avx2",), True, "torch"),
        ({"model": {"quantization": "none"}}, ("avx2",), True, "compiled"),
        ({"actor": {"engine": "vllm"}}, ("avx2",), True, "torch"),
        ({"actor": {"token_step": "torch"}}, ("avx2",), True, "torch"),
        ({"actor": {"token_step": "compiled"}}, (), False, "compiled"),
        ({"actor": {"token_step": "compiled"}, "compute": {"dtype": "bf16"}}, ("avx512_bf16",), True, "compiled"),
    ],
)
def test_what_computes_a_token_follows_from_type_processor_and_compiler(
    sections: dict[str, dict[str, Any]], flags: tuple[str, ...], compiler: bool, chosen: str
) -> None:
    actor = settled_config(resolve(sections), replace(capacity(*flags), compiler=compiler)).actor
    assert actor.token_step == chosen


@pytest.mark.parametrize(
    ("sections", "flags", "weights"),
    [
        ({}, ("avx2", "avx512vbmi", "amx_bf16"), "nf4"),
        ({}, ("avx2", "amx_bf16"), "dense"),
        ({}, ("avx2", "avx512vbmi", "avx512_bf16"), "nf4"),
        ({"actor": {"weights": "dense"}}, ("avx2", "avx512vbmi", "amx_bf16"), "dense"),
        ({"actor": {"token_step": "torch"}}, ("avx2", "avx512vbmi", "amx_bf16"), "dense"),
        ({"compute": {"dtype": "fp32"}}, ("avx2", "avx512vbmi", "amx_bf16"), "dense"),
        ({"model": {"quantization": "none"}}, ("avx2", "avx512vbmi", "amx_bf16"), "dense"),
        ({"actor": {"token_step": "compiled"}}, ("avx512vbmi",), "nf4"),
        ({"actor": {"token_step": "compiled"}}, ("avx512_bf16",), "dense"),
    ],
)
def test_c_code_reads_codes_in_bf16(sections: dict[str, dict[str, Any]], flags: tuple[str, ...], weights: str) -> None:
    config = resolve({"compute": {"dtype": "bf16"}} | sections)
    assert settled_config(config, replace(capacity(*flags), compiler=True)).actor.weights == weights


def test_a_head_in_8_bits_needs_an_nf4_base() -> None:
    with pytest.raises(ConfigError, match=r"^actor.head is 'int8', which takes an NF4 base, but model.quantization is"):
        resolve({"actor": {"head": "int8"}, "model": {"quantization": "none"}})


def prepared(path: Path) -> RunDir:
    """A run with a model that is not here, prepared for any machine."""
    assert main(["run", "embedded", "--prepare", "--out", str(path), "--set", f"model.path={HUB.path}"]) == 0
    return RunDir(path)


def test_a_prepared_run_leaves_everything_open_until_it_starts(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    config = config_from_json(run.config.read_bytes())
    assert config.compute == ComputeConfig() and is_open(config)
    assert run.read_info().compute["dtype"] == "auto"


def test_the_first_start_of_a_prepared_run_chooses_and_keeps_what_a_plain_run_would_have_stored(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    made = run.read_info()
    here = capacity("amx_bf16", cores=6)
    expected = settled(ComputeConfig(), HUB, 0, here)
    assert (expected.dtype, expected.learner_threads, expected.actor_threads) == ("bf16", 6, 6)
    assert start_config(run, here).compute == expected
    assert config_from_json(run.config.read_bytes()).compute == expected
    info = run.read_info()
    assert info.compute == structs.asdict(expected)
    assert (info.run_id, info.created) == (made.run_id, made.created)
    files = run.config.read_bytes(), run.run_info.read_bytes()
    assert start_config(run, capacity(cores=2, card=True)).compute == expected, "once"
    assert (run.config.read_bytes(), run.run_info.read_bytes()) == files


def test_a_start_that_was_cut_off_before_the_configuration_chooses_again(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    run.write_info(structs.asdict(settled(ComputeConfig(), HUB, 0, capacity(cores=3))), {})
    assert start_config(run, capacity("bf16", cores=4)).compute.learner_threads == 4
    assert run.read_info().compute["learner_threads"] == 4


@pytest.mark.parametrize(
    ("model", "found", "max_lag", "threads"),
    [
        (HUB, capacity(), 0, 8),
        (HUB, capacity(), 1, 4),
        (HUB, capacity(cores=1), 1, 1),
        (HUB, capacity(card=True), 0, 2),
        (EMBEDDED, capacity(), 0, 2),
        (EMBEDDED, capacity(cores=2), 1, 1),
        (EMBEDDED, capacity(others=0.5), 0, 1),
        (EMBEDDED, capacity(others=0.4), 0, 2),
        (EMBEDDED, capacity(others=2.0, card=True), 0, 2),
        (HUB, capacity(others=2.0), 0, 8),
    ],
)
def test_threads_are_the_cores_divided_where_both_compute(
    model: ModelConfig, found: Capacity, max_lag: int, threads: int
) -> None:
    compute = settled(ComputeConfig(), model, max_lag, found)
    assert (compute.learner_threads, compute.actor_threads) == (threads, threads)
    given = settled(ComputeConfig(learner_threads=3, actor_threads=5), model, max_lag, found)
    assert (given.learner_threads, given.actor_threads) == (3, 5)


def test_the_others_that_compute_are_counted_without_the_one_that_looks(tmp_path: Path) -> None:
    loadavg = tmp_path / "loadavg"
    for running, others in ((1, 0.0), (0, 0.0), (4, 3.0)):
        loadavg.write_text(f"0.20 0.18 0.12 {running}/1207 11206\n")
        assert others_running(loadavg) == others
    with burning(2 * (os.cpu_count() or 1)):
        assert look_at_capacity().others >= BUSY and is_busy()


@contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes that compute."""
    forever = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
    argv = [sys.executable, "-c", forever, str(os.getpid())]
    processes = [subprocess.Popen(argv) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_what_was_settled_once_stays_on_any_machine() -> None:
    once = settled(ComputeConfig(), HUB, 0, capacity("amx_bf16", cores=6))
    assert settled(once, HUB, 0, capacity(cores=2, card=True)) == once


def test_a_model_is_large_by_its_weight_files(tmp_path: Path) -> None:
    assert is_large(ModelConfig(path=str(tmp_path)))
    for name in ("a.safetensors", "b.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(LARGE_BYTES // 2 - 1)
    assert not is_large(ModelConfig(path=str(tmp_path)))
    with (tmp_path / "c.safetensors").open("wb") as file:
        file.truncate(2)
    assert is_large(ModelConfig(path=str(tmp_path)))
    assert not is_large(ModelConfig(path=str(tmp_path / "c.safetensors"))) and not is_large(EMBEDDED)


def test_a_fetched_model_is_large_by_its_files_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert is_large(HUB) and is_large(ModelConfig(path="x" * 5000)) and is_large(ModelConfig(path="a\0b"))
    assert main(["run", "--dry-run", "--set", f"model.path={HUB.path}"]) == 0
    assert f"'{HUB.path}' is not on this machine yet and counts as large" in capsys.readouterr().out
    repository = tmp_path / f"models--{HUB.path.replace('/', '--')}"
    for folder in ("refs", "blobs", "snapshots/0123"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    weights = repository / "snapshots" / "0123" / "model.safetensors"
    weights.symlink_to(repository / "blobs" / "ab")
    assert is_large(HUB), "a fetch that was broken off"
    for size in (LARGE_BYTES - 1, LARGE_BYTES):
        with (repository / "blobs" / "ab").open("wb") as file:
            file.truncate(size)
        assert is_large(HUB) == (size == LARGE_BYTES)
        assert weight_bytes(HUB) == size
    assert settled(ComputeConfig(), HUB, 0, capacity("amx_bf16")).dtype == "bf16"
    assert main(["run", "--dry-run", "--set", f"model.path={HUB.path}"]) == 0
    assert "counts as large" not in capsys.readouterr().out


def test_siblings_are_one_core_and_a_container_may_allow_less(tmp_path: Path) -> None:
    for number in range(8):
        (folder := tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert usable_cores(range(8), tmp_path, None) == 4
    assert usable_cores({0, 4}, tmp_path, None) == 1
    assert usable_cores(range(8), tmp_path, 2.5) == 2
    assert usable_cores(range(8), tmp_path, 0.5) == 1
    assert usable_cores(range(3), tmp_path / "none", None) == 3


def test_processes_share_the_cores_that_the_container_allows(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert cores_here(tmp_path, tmp_path / "none") == 1
    (tmp_path / "cpu.max").write_text("max 100000")
    assert cores_here(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))


def test_the_smallest_limit_of_all_levels_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    for folder, text in ((root / "a", "150000 100000"), (root / "a" / "b", "max 100000")):
        (folder / "cpu.max").write_text(text)
    assert container_cores(root, own) == 1.5
    assert container_cores(tmp_path / "none", own) is None


def test_this_machine_has_a_core() -> None:
    assert look_at_capacity().cores >= 1
