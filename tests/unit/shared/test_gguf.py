"""A .gguf file as a model: values, tokenizer, end tokens, the cache, and every file that must be refused."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launch.doctor import run_checks
from launch.doctor.model import ModelShape, look_at_model
from launch.export.folders import base_name, is_local
from shared.base.cache import CachedBase, cached_base, dense_base, existing_base, find_model
from shared.config.model import ModelConfig
from shared.errors import ModelError
from shared.model.layers.nf4 import WEIGHTS
from shared.model.prompt import load_prompter
from tests.support.fakes import Family, tiny_policy
from tests.support.gguf_files import Written, write_gguf
from tests.support.machines import config, sound

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("gguf", reason="the extra `gguf` is not installed here")
pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
QUESTION = "Tom has 312 apples,  and\nbuys 4 more. \u00e9\U0001f980"


def base_of(path: Path, quantization: Literal["nf4", "none"] = "none") -> CachedBase:
    return cached_base(ModelConfig(path=str(path), cache_dir=str(path.parent / "cache"), quantization=quantization))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_the_models_own(tmp_path: Path, family: Family, tied: bool) -> None:
    model, _ = write_gguf(tmp_path / "tiny.gguf", family, tied=tied)
    found = load_file(base_of(tmp_path / "tiny.gguf").folder / WEIGHTS)
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# transformers' own reader takes 128 as the size of every Qwen3 head.
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_four_and_eight_bits_are_read_as_transformers_reads_them(tmp_path: Path, family: Family) -> None:
    for kind in ("Q8_0", "Q4_0", "Q5_1", "F16"):
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, family, written=Written(kind=kind))
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
        found = load_file(base_of(path).folder / WEIGHTS)
        expected = dict(theirs.named_parameters())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name].float(), value.to(found[name].dtype).float()), (kind, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_end_tokens_are_those_of_the_models_tokenizer(tmp_path: Path, family: Family) -> None:
    _, tokenizer = write_gguf(tmp_path / "tiny.gguf", family)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").write_text("{}")
    expected = load_prompter(tmp_path / "tokenizer")
    found = load_prompter(base_of(tmp_path / "tiny.gguf").folder)
    assert found.prompt_ids(QUESTION, "Be brief.") == expected.prompt_ids(QUESTION, "Be brief.")
    assert found.text(found.prompt_ids(QUESTION)) == expected.text(expected.prompt_ids(QUESTION))
    assert found.tokenizer.eos_token_id == tokenizer.eos_token_id in found.end_ids
    # llama.cpp ends a reply at these too, whatever the one end token of the metadata is.
    others = ("<|end_of_text|>",) if family == "llama" else ("<|endoftext|>",)
    assert max(found.tokenizer.get_vocab().values()) < len(tokenizer)
    assert set(found.end_ids) == {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(others))}


def test_digits_are_cut_as_the_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", written=Written(keys={"tokenizer.ggml.pre": "smollm"}))
    cut = load_prompter(base_of(tmp_path / "tiny.gguf").folder).tokenizer.backend_tokenizer.pre_tokenizer
    # With GPT-2's rule alone, two spaces before a number would be ' ' and ' 12'.
    assert [word for word, _ in cut.pre_tokenize_str("has  12")] == ["has", "\u0120\u0120", "1", "2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_of_the_file_is_loaded_checked_and_quantised(tmp_path: Path, family: Family) -> None:
    path = tmp_path / "tiny.gguf"
    model, _ = write_gguf(path, family, written=Written(kind="Q8_0"))
    policy = tiny_policy(path)
    assert len(policy.head) == model.config.vocab_size
    base = base_of(path, "nf4")
    assert any(name.endswith("nf4") for name in load_file(base.folder / WEIGHTS))
    dense = load_file(dense_base(base, torch.bfloat16).folder / WEIGHTS)
    name = "model.layers.1.self_attn.q_proj.weight"
    difference = (dense[name].float() - dict(model.named_parameters())[name]).abs().mean()
    assert difference < 0.2 * dict(model.named_parameters())[name].abs().mean()


def test_the_cache_follows_the_content_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2")
    first = base_of(path)
    os.utime(path, ns=(1, 1))
    assert base_of(path) == first
    write_gguf(path, "qwen2", written=Written(kind="Q8_0"))
    assert base_of(path).digest != first.digest
    # A damaged base is made again from the file.
    shutil.rmtree(first.folder)
    write_gguf(path, "qwen2")
    assert base_of(path) == first


REFUSED: dict[str, tuple[Written, str]] = {
    "architecture": (Written(architecture="mamba"), "its architecture is 'mamba', and only llama, qwen2, qwen3"),
    "experts": (Written(keys={"llama.expert_count": 8}), "it sets llama.expert_count = 8, which is not computed here"),
    "rotary scale": (Written(keys={"llama.rope.scaling.type": "yarn"}), r"it sets llama.rope.scaling.type = yarn"),
    "rotary factors": (
        Written(tensors={"rope_freqs.weight": np.ones(8, np.float32)}),
        "it has a tensor 'rope_freqs.weight', which is not read here",
    ),
    "head size": (Written(keys={"llama.rope.dimension_count": 8}), "rope.dimension_count = 8, and .* means 16"),
    "a missing key": (Written(keys={"llama.block_count": None}), "has no llama.block_count"),
    "a missing tensor": (
        Written(tensors={"blk.1.ffn_up.weight": None}),
        r"for 'model.layers.1.mlp.up_proj.weight' it has nothing and the model needs \[128, 64\]",
    ),
    "a wrong shape": (
        Written(tensors={"blk.1.attn_q.weight": np.ones((32, 64), np.float32)}),
        r"it has \[32, 64\] and the model needs \[64, 64\]",
    ),
    "no template": (Written(keys={"tokenizer.chat_template": None}), "it has no chat template"),
    "no first token": (Written(keys={"tokenizer.ggml.bos_token_id": None}), "its template begins with a token that"),
    "other words": (Written(keys={"tokenizer.ggml.pre": "tekken"}), "cuts text into words as 'tekken' does"),
    "parts": (Written(keys={"split.count": 3}), "it is one of 3 parts; join them with"),
    "no numbers": (
        Written(tensors={"blk.0.ffn_up.weight": np.full((128, 64), np.nan, np.float32)}),
        "is damaged: 'blk.0.ffn_up.weight' has values that are not numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    written, sentence = REFUSED[name]
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", written=written)
    with pytest.raises(ModelError, match=sentence) as refused:
        base_of(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=f"{path} cannot be read as GGUF .* get it again"):
        base_of(path)


def test_another_kind_of_file_and_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with pytest.raises(ModelError, match=f"model.path = '{path}' is not a file; check the name"):
        find_model(ModelConfig(path=str(path), cache_dir=str(tmp_path)))
    path.write_bytes(b"PK" * 5000)
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        base_of(path)


@pytest.mark.long
def test_without_the_package_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen2")
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from launch.__main__ import main\n"
        f"sys.exit(main(['data', 'embedded', '--set', 'model.path={path}', '--set', 'model.cache_dir={tmp_path}/c']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "the package gguf" in line and "extra `gguf`" in line


def test_doctor_knows_the_size_of_a_file_and_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    planned = config(model={"path": str(path)})

    def look() -> Any:
        return look_at_model(planned.model, planned.lora.targets, planned.tasks, planned.verifier.kind)

    machine = replace(sound(), config=planned)
    none = run_checks.present(replace(machine, model=look()))
    assert (none.level, none.found) == ("error", f"there is no file {path}")
    model, _ = write_gguf(path, "qwen3", written=Written(kind="Q8_0"))
    seen = look()
    assert (seen.kind, seen.folder) == ("gguf", path) and isinstance(seen.shape, ModelShape)
    assert (seen.shape.linear + seen.shape.rest) == sum(value.numel() for value in model.parameters())
    assert (seen.shape.layers, seen.shape.hidden, seen.shape.key_value) == (2, 64, 64)
    assert run_checks.present(replace(machine, model=seen)).level == "ok"
    path.write_bytes(b"no")
    damaged = run_checks.present(replace(machine, model=look()))
    assert damaged.level == "error" and "cannot be read as GGUF" in damaged.found


def test_a_file_is_no_hub_id() -> None:
    assert is_local("models/tiny.gguf") and base_name("models/tiny.gguf") == str(Path("models/tiny.gguf").resolve())


def test_its_base_is_present_while_it_is_the_only_one_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = ModelConfig(path=str(path), cache_dir=str(tmp_path / "cache"), quantization="none")
    write_gguf(path, "qwen2")
    assert existing_base(model) is None
    made = base_of(path)
    assert existing_base(model) == made.folder
    write_gguf(path, "qwen2", written=Written(kind="Q8_0"))
    base_of(path)
    assert existing_base(model) is None
