"""The library of the compiled token step is built once, and where it cannot be built PyTorch computes and the log says
why."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from actor.engines.forms import compiled_for
from actor.engines.hf_engine import HFEngine
from actor.engines.token_step.compiled.library import SOURCE, library_for, load
from actor.engines.token_step.layers import Layers
from shared.config.model import ModelConfig
from shared.config.processes import ActorConfig
from shared.config.tree import Config
from shared.model.compiled.build import CannotCompile, built, openmp_of_torch
from shared.process.processor import find_compiler
from tests.support.fakes import tiny_prompter
from tests.support.processor_kinds import needs_compiler
from tests.unit.actor.test_layers import ADAPTED, policy_of

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]
FP32 = torch.float32


def fake_compiler(folder: Path, script: str) -> Path:
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def test_it_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built(SOURCE, FP32, tmp_path)
    made = first.stat().st_ino
    # A compiler that can say what it is, but not compile.
    real = find_compiler(os.environ)
    compiler = fake_compiler(tmp_path, f'case "$*" in *-c*) exit 1;; esac; exec {real} "$@"')
    monkeypatch.setenv("CC", str(compiler))
    assert built(SOURCE, FP32, tmp_path) == first and first.stat().st_ino == made


def test_each_type_and_compiler_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {built(SOURCE, dtype, tmp_path).name for dtype in (FP32, torch.bfloat16)}
    real = find_compiler(os.environ)
    compiler = fake_compiler(tmp_path, f'case "$*" in *--version*) echo another;; *) exec {real} "$@";; esac')
    monkeypatch.setenv("CC", str(compiler))
    names.add(built(SOURCE, FP32, tmp_path).name)
    assert len(names) == 3


def test_threads_are_those_of_pytorch(tmp_path: Path) -> None:
    """A second OpenMP would have threads of its own, which wait for the cores of the first."""
    code = (
        "import sys; from pathlib import Path; import torch\n"
        "from actor.engines.token_step.compiled.library import library_for\n"
        "torch.set_num_threads(2); torch.ones(10**6).sum()\n"
        "assert library_for(torch.float32, Path(sys.argv[1]))\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}\n"
        "print(len(files))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1"], done.stderr


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "failed: status 1"),
        ("echo 'cc: error: no sources' >&2; exit 1", "failed: cc: error: no sources"),
    ],
)
def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, why: str
) -> None:
    compiler = fake_compiler(tmp_path, script)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert library_for(FP32, tmp_path / "cache") is None
    assert caplog.messages == [f"PyTorch's operations compute the token step, because '{compiler}' {why}"]


def test_without_a_compiler_pytorch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    policy = policy_of(tmp_path, "Llama", FP32, ADAPTED[0])
    config = Config(
        model=ModelConfig(path="x", cache_dir=str(tmp_path / "cache")), actor=ActorConfig(token_step="compiled")
    )
    with caplog.at_level(logging.WARNING):
        found = compiled_for(config, policy)
    assert found is None and "because there is no C compiler" in caplog.text
    assert isinstance(HFEngine(policy, tiny_prompter(0), compiled=found).layers, Layers)


def test_torch_is_not_replaced_where_it_was_settled(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "Llama", FP32, ADAPTED[0])
    model = ModelConfig(path="x", cache_dir=str(tmp_path / "cache"))
    assert compiled_for(Config(model=model, actor=ActorConfig(token_step="torch")), policy) is None
    found = compiled_for(Config(model=model, actor=ActorConfig(token_step="compiled")), policy)
    assert found and found.name in HFEngine(policy, tiny_prompter(0), compiled=found).loop


def test_models_of_other_kinds_are_not_covered(tmp_path: Path) -> None:
    model = ModelConfig(path="x", cache_dir=str(tmp_path / "cache"))
    config = Config(model=model, actor=ActorConfig(token_step="compiled"))
    assert compiled_for(config, policy_of(tmp_path / "a", "Gemma", FP32, ADAPTED[0])) is None
    codes_only = policy_of(tmp_path / "b", "Llama", FP32, ADAPTED[0], dequantize="each_call")
    assert compiled_for(config, codes_only) is None


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    file = built(SOURCE, FP32, tmp_path)
    file.chmod(0o666)
    with pytest.raises(CannotCompile, match="belongs to another user, or others may write it; remove it"):
        load(file)


def test_a_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "token-step-0.so"
    file.write_bytes(b"no library")
    file.chmod(0o644)
    with pytest.raises(CannotCompile, match="cannot be loaded"):
        load(file)


def test_pytorch_without_libgomp(tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match="this build of PyTorch has no libgomp"):
        openmp_of_torch(tmp_path / "torch" / "lib")
