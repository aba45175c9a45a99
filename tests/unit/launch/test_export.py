"""What `export` writes beside the numbers (test_families.py has those): files, the card, refusals, and the hub."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PhiConfig

from launch.__main__ import main
from launch.export.agreement import Agreement, refuse_disagreement
from launch.export.command import push, run_export
from launch.export.folders import Form, older_keys
from launch.export.weights import Deltas, merged_weights, write_weights
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.load import config_to_json, resolve
from shared.config.tree import Config
from shared.errors import DamageError, RunDirError
from shared.model.adapter_file import adapter_bytes, digest
from shared.run.evaluation import write_evaluation
from shared.run.run_dir import RunDir
from tests.support.fakes import shake, toy_evaluation
from tests.support.hub_models import LLAMA3_ROPE, hub_model

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(source: Path, quantization: str = "nf4") -> Config:
    model = {"path": str(source), "cache_dir": str(source.parent / "cache"), "quantization": quantization}
    small = {"compute": {"learner_threads": 1, "actor_threads": 1}, "lora": {"rank": 4, "alpha": 8.0}}
    return resolve({"model": model, **small})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_model(tmp_path_factory.mktemp("hub"), "llama", tied=False)


def adapter_of(config: Config, factor: float = 1.0) -> bytes:
    """Random values in A and B."""
    policy = load_policy(cached_base(config.model), config.model, config.lora, torch.device("cpu"), torch.float32)
    shake(policy, 3)
    with torch.no_grad():
        for parameter in policy.adapter.parameters().values():
            parameter.mul_(factor)
    return adapter_bytes(policy.adapter)


def make_run(path: Path, config: Config, factor: float = 1.0) -> RunDir:
    """A run of one checkpoint."""
    run = RunDir.create(path, config_to_json(config))
    files = {"adapter_model.safetensors": adapter_of(config, factor)}
    CheckpointStore(run.checkpoints, keep=1).save(Checkpoint(step=5, files=files))
    return run


@pytest.fixture
def run(source: Path, tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", config_of(source))


def export(run: RunDir, *words: str) -> Path:
    """The folder, made by the command line."""
    out = run.path.parent / "out"
    assert main(["export", str(run.path), "--out", str(out), *words]) == 0
    return out


def test_merged_is_what_the_hub_has(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    out = export(run, "--as", "merged")
    assert "step 5 of" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    names = {path.name for path in out.iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert not names & {"DIGESTS.json", "model.safetensors.index.json"} and "README.md" in names
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [4, 1]


def test_the_merge_is_formed_in_fp32_on_the_dequantised_base(run: RunDir, source: Path) -> None:
    out = export(run, "--as", "merged", "--dtype", "fp32")
    config = config_of(source)
    policy = load_policy(cached_base(config.model), config.model, config.lora, torch.device("cpu"), torch.float32)
    shake(policy, 3)
    written = load_file(out / "model.safetensors")
    for name, layer in policy.adapter.layers.items():
        dense = layer.base.matmul.dense
        assert dense is not None
        expected = dense.double() + layer.scale * (layer.lora_B.double() @ layer.lora_A.double())
        torch.testing.assert_close(written[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-6)
        assert (written[f"{name}.weight"] - dense).abs().max() > 0.01


def test_gguf_ready_names_the_rotary_base_as_older_readers_do(run: RunDir) -> None:
    out = export(run, "--as", "gguf-ready")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == LLAMA3_ROPE["rope_theta"] and config["torch_dtype"] == "bfloat16"
    assert config["rope_scaling"]["factor"] == 8.0 and "rope_theta" not in config["rope_scaling"]
    assert AutoConfig.from_pretrained(out).rope_parameters["rope_theta"] == LLAMA3_ROPE["rope_theta"]
    assert "convert_hf_to_gguf.py" in (out / "README.md").read_text()


def test_the_next_command_can_be_pasted_also_for_a_folder_with_a_space(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my model"
    assert main(["export", str(run.path), "--out", str(out), "--as", "gguf-ready"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next: "))
    words = ["python", "convert_hf_to_gguf.py", str(out), "--outfile", f"{out}/model.gguf", "--outtype", "bf16"]
    assert shlex.split(line.removeprefix("next: ")) == words
    with pytest.raises(RunDirError, match=r"`hf upload me/model '.*/my model' --delete=adapter_config\.json .*`"):
        push(out, "me/model", "words", lambda: NotedHub(OSError("no route")))


def test_older_readers_learn_which_part_of_a_head_is_rotated() -> None:
    found = older_keys({**PhiConfig().to_dict(), "dtype": "bfloat16"})
    assert found == {"torch_dtype": "bfloat16", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def test_an_unquantised_base_is_merged_as_it_is(source: Path, tmp_path: Path) -> None:
    config = config_of(source, "none")
    out = export(make_run(tmp_path / "run", config), "--as", "merged", "--dtype", "fp32")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], model.model.norm.weight)
    assert not torch.equal(written["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)
    assert "unquantised" not in (out / "README.md").read_text()


def test_a_large_model_comes_in_several_files_that_transformers_reads(source: Path, tmp_path: Path) -> None:
    config = config_of(source)
    base, deltas = cached_base(config.model).folder, Deltas(adapter_of(config), lambda layer: 2.0)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, limit in ((whole, 1 << 30), (cut, 100_000)):
        folder.mkdir()
        write_weights(folder, merged_weights(base, deltas, torch.float32), limit)
        (folder / "config.json").write_text((source / "config.json").read_text())
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load_file(whole / "model.safetensors").values())
    for file in files:
        with safe_open(cut / file, framework="pt") as reader:
            assert {name for name, where in index["weight_map"].items() if where == file} == set(reader.keys())
    one, many = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, cut))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_weights_may_be_read_by_whom_the_umask_lets(run: RunDir, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        out = export(run, "--as", "merged")
        assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
        os.umask(0o027)
        write_weights(tmp_path, iter([("weight", torch.zeros(2))]))
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_an_adapter_of_another_model_is_refused(source: Path) -> None:
    config = config_of(source)
    deltas = Deltas(adapter_of(config), lambda layer: 2.0)
    deltas.layers.add("model.layers.9.mlp.up_proj")
    with pytest.raises(DamageError, match=r"no layer 'model\.layers\.9\.mlp\.up_proj'"):
        list(merged_weights(cached_base(config.model).folder, deltas, torch.float32))


# --- the card


def test_the_card_says_what_the_run_knows(run: RunDir, source: Path) -> None:
    sha256 = digest(CheckpointStore(run.checkpoints, 1).load(5).files["adapter_model.safetensors"])
    tasks = {"tasks_sha256": "same"}
    write_evaluation(run.eval, toy_evaluation([True, False] * 8, label="base", **tasks))
    write_evaluation(run.eval, toy_evaluation([True] * 15 + [False], version=5, adapter_sha256=sha256, **tasks))
    write_evaluation(run.eval, toy_evaluation([False] * 16, label="step-000004", version=4, **tasks))
    digests = {"train": 1, "train_sha256": "", "held_out": 0, "held_out_sha256": ""}
    run.tasks.write_text(json.dumps(digests | {"systems": ["Be brief."]}))
    card = (export(run) / "README.md").read_text()
    assert "| base | greedy | 50.0% | [28.0%, 72.0%] | 16 | 64 | 0 |" in card
    assert "| after 5 steps | greedy | 93.8% | [71.7%, 98.9%] | 16 | 64 | 0 |" in card
    assert "0.0%" not in card.replace("50.0%", "") and "after 4 steps" not in card
    assert f"`{sha256}`" in card and run.read_info().run_id in card and "rank 4, alpha 8" in card
    assert "log-probs of the export differ from the policy's by at most" in card
    assert "| system prompt | Be brief. |" in card, "as it is in the data"
    assert "library_name: peft" in card and "license" not in card.lower()
    # A folder of this machine is nobody's business.
    assert source.name in card and str(source.parent) not in card


def test_a_card_without_evaluations_has_no_accuracy(run: RunDir) -> None:
    write_evaluation(run.eval, toy_evaluation([True] * 4, version=3, adapter_sha256="of another step"))
    card = (export(run, "--as", "merged") / "README.md").read_text()
    assert "Not measured for this adapter" in card and "%" not in card.split("## Held-out accuracy")[1]


def test_a_damaged_evaluation_is_left_out_of_the_card(run: RunDir) -> None:
    sha256 = digest(CheckpointStore(run.checkpoints, 1).load(5).files["adapter_model.safetensors"])
    write_evaluation(run.eval, toy_evaluation([True] * 4, version=5, adapter_sha256=sha256))
    (run.eval / "base.json").write_text('{"label": ')
    assert "| after 5 steps | greedy | 100.0% |" in (export(run) / "README.md").read_text()


def test_a_card_shows_the_base_on_the_same_test_set(run: RunDir) -> None:
    sha256 = digest(CheckpointStore(run.checkpoints, 3).load(5).files["adapter_model.safetensors"])
    test = {"tasks_sha256": "test", "source": "gsm8k test"}
    write_evaluation(run.eval, toy_evaluation([False] * 4, label="base", tasks_sha256="held out"))
    write_evaluation(run.eval, toy_evaluation([True, False] * 8, label="base-test", **test))
    write_evaluation(
        run.eval, toy_evaluation([True] * 16, label="step-000005-test", version=5, adapter_sha256=sha256, **test)
    )
    card = (export(run) / "README.md").read_text()
    assert "| base | greedy | 50.0% |" in card and "| after 5 steps | greedy | 100.0% |" in card
    assert "Measured on the test set (gsm8k test) with the run's verifier." in card
    assert "| tasks | embedded |" in card


# --- refusals


def refused(run: RunDir, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """One sentence, exit 2, and nothing written."""
    before = sorted(run.path.parent.iterdir())
    assert main(["export", str(run.path), *words]) == 2
    assert sorted(run.path.parent.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["nf4", "int4", "4bit"])
def test_merging_into_four_bits_is_refused_with_the_reason(
    run: RunDir, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(run, capsys, "--as", "merged", "--dtype", dtype, "--out", str(run.path.parent / "out"))
    assert "is added to the dense base" in sentence and "one of 16 values" in sentence and "--as peft" in sentence


def test_what_cannot_be_is_said_before_anything_is_loaded(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(run.path.parent / "out")
    assert "expected bf16 or fp32" in refused(run, capsys, "--as", "merged", "--dtype", "fp16", "--out", out)
    assert "exists and is not empty" in refused(run, capsys, "--out", str(run.path))
    (here := run.path.parent / "empty").mkdir()
    monkeypatch.chdir(here)
    assert ". is the current folder" in refused(run, capsys, "--out", ".")
    assert "is the current folder" in refused(run, capsys, "--out", str(here))
    assert "choose a folder inside it" in refused(run, capsys, "--out", "/")
    assert "no checkpoint of step 9; there are: 5" in refused(run, capsys, "--checkpoint", "9", "--out", out)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "set HF_TOKEN in the environment" in refused(run, capsys, "--push", "me/model", "--out", out)


@pytest.mark.parametrize(
    ("worst", "dtype"), [(2e-3, torch.float32), (0.6, torch.bfloat16), (float("nan"), torch.float32)]
)
def test_an_export_that_is_not_the_policy_is_not_kept(worst: float, dtype: torch.dtype) -> None:
    with pytest.raises(DamageError, match="is not the policy"):
        refuse_disagreement(Agreement(worst=worst, mean=worst, tokens=10), dtype)
    refuse_disagreement(Agreement(worst=1e-4, mean=1e-5, tokens=10), dtype)


def test_a_model_whose_numbers_overflow_is_not_handed_over(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finite values whose products are not: the comparison is what finds it, and nothing stays behind."""
    run = make_run(tmp_path / "run", config_of(source), factor=1e19)
    for form in ("peft", "merged"):
        sentence = refused(run, capsys, "--as", form, "--out", str(tmp_path / "out"))
        assert "is not the policy" in sentence and "at most nan" in sentence


# --- the hub


class NotedHub:
    """Takes everything; notes what it was given."""

    def __init__(self, fault: Exception | None = None, *, private: bool = True) -> None:
        """private: as its repositories are already."""
        self.fault = fault
        self.private = private
        self.calls: list[tuple[Any, ...]] = []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", repo_id, private, exist_ok))

    def model_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(id=repo_id, private=self.private)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> None:
        if self.fault:
            raise self.fault
        names = sorted(path.name for path in folder_path.iterdir())
        self.calls.append(("upload", repo_id, names, commit_message, delete_patterns))


def test_a_push_makes_a_private_repository_of_the_whole_folder(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub, tokens = NotedHub(), []

    def connect(token: str) -> NotedHub:
        tokens.append(token)
        return hub

    out = run.path.parent / "out"
    code = run_export(
        directory=run.path, form="peft", out=out, checkpoint="latest", dtype="bf16", repo="me/model", connect=connect
    )
    assert code == 0 and tokens == ["hf_secret"]
    assert hub.calls[0] == ("create", "me/model", True, True)
    assert hub.calls[1][2] == sorted(path.name for path in out.iterdir()) and "README.md" in hub.calls[1][2]
    told = capsys.readouterr()
    assert "https://huggingface.co/me/model (private)" in told.out and "hf_secret" not in told.out + told.err


def test_a_push_leaves_no_file_that_another_form_is_loaded_from(tmp_path: Path) -> None:
    """Chosen as the hub's library chooses; other files of the repository are the user's."""
    hub = NotedHub()
    push(tmp_path, "me/model", "words", lambda: hub)
    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    whole = ["config.json", "generation_config.json", "model.safetensors"]
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = [".gitattributes", "LICENSE", "model.gguf", "other/model.safetensors", "other/config.json", "img.png"]
    there = [*adapter, *whole, *parts, *others]
    assert list(filter_repo_objects(there, allow_patterns=hub.calls[-1][-1])) == [*adapter, *whole, *parts]


def test_a_pushed_adapter_names_its_base_without_folders(
    run: RunDir, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def pushed(form: Form, folder: str) -> Path:
        out = run.path.parent / folder
        ways: Any = {"checkpoint": "latest", "dtype": "bf16", "repo": "me/model", "connect": lambda token: NotedHub()}
        assert run_export(directory=run.path, form=form, out=out, **ways) == 0
        return out

    out = pushed("peft", "out")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == source.name
    assert not any(str(source.parent) in path.read_text("utf-8", "replace") for path in out.iterdir())
    assert f"names the base '{source.name}' without its folder" in capsys.readouterr().out
    pushed("merged", "merged")
    assert "names the base" not in capsys.readouterr().out
    kept = run.path.parent / "kept"
    assert main(["export", str(run.path), "--out", str(kept)]) == 0
    config = json.loads((kept / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)


def test_a_repository_that_is_public_already_is_called_public(tmp_path: Path) -> None:
    told = push(tmp_path, "me/model", "words", lambda: NotedHub(private=False))
    assert told == "https://huggingface.co/me/model (public)"


@pytest.mark.parametrize("kind", [OSError, RuntimeError, HTTPError])
def test_a_hub_that_refuses_leaves_the_export_and_says_how_to_try_again(kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=rf"did not accept me/model: {kind.__name__}: no route;.*hf upload me/model"):
        push(tmp_path, "me/model", "words", lambda: NotedHub(kind("no route\nto host")))
