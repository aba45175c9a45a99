"""Which kernels are used: those that agree and are quicker, the same in every process; none without Triton."""

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.config.processes import ComputeConfig
from shared.model.compiled.head import CompiledSumsOf
from shared.model.compiled.kernels import CompiledMath
from shared.model.kernels.choice import Trials, chosen_kernels, facts_of, policy_with_kernels
from shared.model.kernels.toolchain import (
    Toolchain,
    cache_folder,
    can_load_from,
    look_at_toolchain,
    missing,
    python_header,
)
from shared.model.kernels.trial import TRIALS, Tensors, Trial, judge
from shared.model.policy import TORCH, Kernels, Policy
from shared.process.card import CardFacts
from shared.process.processor import C_CODE_COMPILERS, find_compiler
from tests.support.fakes import tiny_policy
from tests.support.processor_kinds import needs_compiler

pytestmark = pytest.mark.usefixtures("one_thread")

ONES = (torch.ones(3), torch.arange(3))
TOOLS = Toolchain(
    triton="3.7.1", compiler="/usr/bin/cc", header=Path("Python.h"), has_header=True, cache=Path("c"), cache_serves=True
)
CARD = CardFacts(name="a card", uuid="GPU-a", capability=(8, 6), driver="580.65.06", total_bytes=2**33)


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return tiny_policy(checkpoint)


def kernel(*_: Any, **__: Any) -> Any:
    """Stands for one that draws."""


def trial(ours: Tensors = ONES, theirs: Tensors = ONES) -> Trial:
    return Trial(
        kernel=kernel,
        example=tuple,
        by_torch=lambda: theirs,
        by_triton=lambda: ours,
        tolerance=1e-4,
        bytes_moved=0,
        in_graph=True,
    )


def broken(policy: Policy) -> Trial:
    raise RuntimeError("gcc failed\nwith many lines")


def taking(*seconds: float) -> Callable[[Callable[[], object], bool], float]:
    """A clock that says this of one work after the other, the kernel's first."""
    left = list(seconds)

    def clock(work: Callable[[], object], in_graph: bool) -> float:
        work()
        return left.pop(0)

    return clock


def choose(
    policy: Policy, cache: Path, trials: Trials, *seconds: float, setting: str = "auto", card: str = "a card"
) -> Kernels:
    return chosen_kernels(policy, {"setting": setting, "card": card}, cache, trials, taking(*seconds))


DRAW: Trials = {"draw": lambda policy: trial()}


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("kernels-*.json"))


@pytest.mark.parametrize(("ours", "theirs", "used"), [(0.5, 1.0, True), (0.95, 1.0, False), (2.0, 1.0, False)])
def test_a_kernel_is_used_where_it_is_clearly_quicker(
    policy: Policy, tmp_path: Path, ours: float, theirs: float, used: bool
) -> None:
    found = choose(policy, tmp_path, DRAW, ours, theirs)
    assert (found.draw is kernel) is used
    assert (found.sums, found.add_low_rank) == (TORCH.sums, TORCH.add_low_rank)


def test_each_kernel_is_judged_for_itself(policy: Policy, tmp_path: Path) -> None:
    both: Trials = {"draw": lambda policy: trial(), "add_low_rank": lambda policy: trial()}
    found = choose(policy, tmp_path, both, 2.0, 1.0, 1.0, 2.0)
    assert found.draw is TORCH.draw and found.add_low_rank is kernel


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_kernel_is_timed_as_it_is_used(in_graph: bool) -> None:
    asked: list[bool] = []

    def clock(work: Callable[[], object], in_graph: bool) -> float:
        asked.append(in_graph)
        return 1.0

    judge(lambda: replace(trial(), in_graph=in_graph), forced=False, seconds=clock)
    assert asked == [in_graph, in_graph]


def test_the_setting_triton_asks_for_agreement_alone(policy: Policy, tmp_path: Path) -> None:
    assert choose(policy, tmp_path, DRAW, setting="triton").draw is kernel


@pytest.mark.parametrize(
    "wrong",
    [
        (torch.tensor([1.0, 1.0, 1.001]), torch.arange(3)),
        (torch.tensor([1.0, 1.0, torch.nan]), torch.arange(3)),
        (torch.ones(3), torch.tensor([0, 1, 3])),
    ],
    ids=["too far", "no number", "another token"],
)
@pytest.mark.parametrize("setting", ["auto", "triton"])
def test_a_kernel_that_does_not_agree_is_never_used(
    policy: Policy, tmp_path: Path, wrong: Tensors, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kernels"):
        found = choose(policy, tmp_path, {"draw": lambda policy: trial(wrong)}, 0.1, 1.0, setting=setting)
    assert found == TORCH
    assert "draw is computed by torch: differs from PyTorch by" in caplog.text


def test_the_choice_is_kept_for_all_processes_on_this_card(policy: Policy, tmp_path: Path) -> None:
    first = choose(policy, tmp_path, DRAW, 1.0, 2.0)
    # A clock without a time left would fail.
    again = choose(policy, tmp_path, DRAW)
    assert first == again and first.draw is kernel
    (file,) = files(tmp_path)
    written = json.loads(file.read_bytes())
    assert written["facts"] == {"setting": "auto", "card": "a card"}
    assert written["kernels"]["draw"]["why"] == "Triton 1000.000 ms, PyTorch 2000.000 ms"


def test_another_card_makes_its_own_choice(policy: Policy, tmp_path: Path) -> None:
    choose(policy, tmp_path, DRAW, 1.0, 2.0)
    assert choose(policy, tmp_path, DRAW, 2.0, 1.0, card="another").draw is TORCH.draw
    assert choose(policy, tmp_path, DRAW).draw is kernel


@pytest.mark.parametrize("content", [b"", b"{}", b'{"facts": {}, "kernels": {"draw": {"use": "metal", "why": ""}}}'])
def test_a_file_that_cannot_be_read_is_replaced(policy: Policy, tmp_path: Path, content: bytes) -> None:
    choose(policy, tmp_path, DRAW, 1.0, 2.0)
    (file,) = files(tmp_path)
    file.write_bytes(content)
    assert choose(policy, tmp_path, DRAW, 2.0, 1.0).draw is TORCH.draw
    assert choose(policy, tmp_path, DRAW).draw is TORCH.draw


def test_a_kernel_that_fails_is_no_crash_and_is_tried_again_another_time(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials: Trials = {"draw": broken, "add_low_rank": lambda policy: trial()}
    found = choose(policy, tmp_path, trials, 1.0, 2.0)
    assert found.draw is TORCH.draw and found.add_low_rank is kernel
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage() == ("draw is computed by torch: the kernel cannot be used (RuntimeError: gcc failed)")
    assert files(tmp_path) == []
    assert choose(policy, tmp_path, DRAW, 1.0, 2.0).draw is kernel


@pytest.mark.parametrize("compute", [{"kernels": "torch"}, {"kernels": "triton"}, {"blas": "portable"}])
def test_a_cpu_computes_with_pytorch_where_it_is_asked_for(
    policy: Policy, tmp_path: Path, compute: dict[str, Any]
) -> None:
    assert policy_with_kernels(policy, ComputeConfig(**compute), tmp_path) is policy
    assert list(tmp_path.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("compute", [{}, {"kernels": "compiled"}, {"kernels": "compiled", "blas": "portable"}])
def test_a_cpu_takes_c_code(
    policy: Policy, tmp_path: Path, compute: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = policy_with_kernels(policy, ComputeConfig(**compute), tmp_path)
    assert isinstance(found.kernels.math, CompiledMath) and isinstance(found.kernels.sums, CompiledSumsOf)
    assert found.layers and all(layer.math is found.kernels.math for layer in found.layers.layers)
    assert [file.suffix for file in sorted(tmp_path.iterdir())] == [".lock", ".so"]
    assert "computes what an update needs between its products" in caplog.text


@needs_compiler
def test_without_a_compiler_a_cpu_computes_with_pytorch_and_says_why(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert policy_with_kernels(policy, ComputeConfig(), tmp_path).kernels is TORCH
    assert "because there is no C compiler; install a C compiler" in caplog.text


@needs_compiler
def test_a_compiler_that_fails_is_named(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cc: error: no sources' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert policy_with_kernels(policy, ComputeConfig(), tmp_path / "cache").kernels is TORCH
    (message,) = caplog.messages
    assert message.endswith(f"needs between its products, because '{compiler}' failed: cc: error: no sources")


def test_the_linears_are_told(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    told = policy.with_kernels(Kernels(add_low_rank=kernel))
    assert told.kernels.add_low_rank is kernel and policy.kernels == TORCH
    assert all(layer.add_low_rank is kernel for layer in policy.adapter.layers.values())


def test_the_choice_depends_on_card_versions_code_setting_and_shapes(policy: Policy) -> None:
    def key(policy: Policy = policy, setting: Any = "auto", tools: Toolchain = TOOLS, **card: Any) -> str:
        return msgspec.json.encode(facts_of(policy, setting, tools, replace(CARD, **card)), order="sorted").decode()

    taller = replace(policy, head=torch.zeros(98, policy.head.shape[1]))
    keys = [
        key(),
        key(setting="triton"),
        key(tools=replace(TOOLS, triton="3.7.0")),
        key(driver="570.1"),
        key(name="another card"),
        key(taller),
        key(replace(policy, dtype=torch.bfloat16)),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0] == key(uuid="GPU-b"), "another card of the same kind makes the same choice"
    facts = json.loads(keys[0])
    assert facts["torch"] == torch.__version__ and len(facts["code"]) == 64


@pytest.mark.parametrize("name", TRIALS)
def test_every_kernel_agrees_with_pytorch_on_the_shapes_of_a_policy(policy: Policy, name: str) -> None:
    """As it is tried on a card."""
    pytest.importorskip("triton", reason="the extra `kernels` is not installed here")
    made = TRIALS[name](policy)
    ours, theirs = made.by_triton(*made.example()), made.by_torch(*made.example())
    known = replace(made, by_triton=lambda *_: ours, by_torch=lambda *_: theirs)
    assert judge(lambda: known, forced=True, seconds=taking()).use == "triton"
    spoiled = replace(known, by_triton=lambda *_: tuple(2 * one for one in ours))
    assert judge(lambda: spoiled, forced=True, seconds=taking()).use == "torch"
    assert made.bytes_moved > 0
    assert made.in_graph is (name != "sums"), "an update is no graph"


# --- what Triton needs


def test_the_compiler_is_the_one_that_triton_takes(tmp_path: Path) -> None:
    for name in ("clang", "gcc", "my-cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert find_compiler(path) == str(tmp_path / "gcc")
    assert find_compiler(path | {"CC": "my-cc"}) == str(tmp_path / "my-cc")
    assert find_compiler(path | {"CC": "absent"}) is None
    (tmp_path / "gcc").unlink()
    assert find_compiler(path) == str(tmp_path / "clang")
    assert find_compiler(path, C_CODE_COMPILERS) is None, "the token step in C takes no clang"
    assert find_compiler({"PATH": str(tmp_path / "nowhere")}) is None


def test_the_header_is_that_of_this_python() -> None:
    header = python_header()
    assert header.name == "Python.h"
    assert f"python{sys.version_info.major}.{sys.version_info.minor}" in str(header)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"TRITON_CACHE_DIR": "/cache/triton"}, "/cache/triton"),
        ({"TRITON_HOME": "/home/other"}, "/home/other/.triton/cache"),
        ({}, f"{os.path.expanduser('~')}/.triton/cache"),
    ],
)
def test_the_cache_folder_is_the_one_that_triton_takes(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder)


def test_libraries_can_be_loaded_from_a_folder_that_may_be_made(tmp_path: Path) -> None:
    assert can_load_from(tmp_path / "not" / "yet")
    (tmp_path / "file").write_text("")
    assert not can_load_from(tmp_path / "file")
    assert not can_load_from(Path("/proc/self")), "its file system forbids it"


def test_what_is_missing_is_named_and_nothing_else() -> None:
    assert missing(TOOLS) == []
    nothing = replace(TOOLS, triton=None, compiler=None, has_header=False, cache_serves=False)
    lacks = missing(nothing)
    assert len(lacks) == 4 and all(lack.found and lack.remedy for lack in lacks)
    (only,) = missing(replace(TOOLS, has_header=False))
    assert (only.found, "python3-dev" in only.remedy) == ("there is no Python.h", True)


def test_this_machine_can_be_looked_at() -> None:
    found = look_at_toolchain({"PATH": "", "TRITON_CACHE_DIR": "/proc/self"})
    assert found.compiler is None and not found.cache_serves
    assert found.has_header == found.header.is_file()
