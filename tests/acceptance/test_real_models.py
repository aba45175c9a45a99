"""The commands that a user types, with a real pretrained model: SmolLM2-135M-Instruct.

TANDEM_MODELS names a folder that has it as `smollm2-135m`, in Hugging Face format. Under two minutes on two cores.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shared.model.prompt import load_prompter
from tests.support.runs import launch, replayed, rows, summary

MODEL = Path(os.environ.get("TANDEM_MODELS", "")) / "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not (os.environ.get("TANDEM_MODELS") and MODEL.is_dir()),
        reason="TANDEM_MODELS names no folder with smollm2-135m",
    ),
]
CONFIG = """
[run]
steps = 3

[model]
path = "{model}"
cache_dir = "{cache}"

[tasks]
source = "{source}"
system_prompt = "Answer with a number."
few_shot = 1

[verifier]
kind = "exact"

[rollout]
prompts = 2
group = 4
max_new_tokens = 16

[reward]
length = -0.2
shaped_groups = "train"

[optimizer]
lr = 1e-4

[checkpoint]
every = 1

[eval]
problems = 2

[compute]
learner_threads = 1
actor_threads = 1
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the configuration, beside its tasks."""
    folder = tmp_path_factory.mktemp("real")
    tasks = [{"question": f"What is {n} plus {n % 4}? \u4f60\u597d", "answer": str(n + n % 4)} for n in range(1, 41)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    path = folder / "my.toml"
    path.write_text(CONFIG.format(model=MODEL, cache=folder / "cache", source=folder / "sums.jsonl"))
    return path


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    out = config.parent / "run"
    done = launch("run", config, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(out)["steps"] == 3
    return out


def samples(run: Path) -> list[dict[str, Any]]:
    groups = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [sample for group in groups for sample in group["samples"]]


def test_prompts_are_those_of_the_models_own_template() -> None:
    prompter = load_prompter(MODEL)
    for question in ("What is 2 + 2?", " two  spaces \n", "\u4f60\u597d \U0001f980 <|im_end|>"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        expected = prompter.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompter.prompt_ids(question, "Be brief.") == expected
    assert prompter.end_ids == (prompter.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_completions_end_where_the_model_ends_them(run: Path) -> None:
    ends = load_prompter(MODEL).end_ids
    found = samples(run)
    assert {sample["finish"] for sample in found} <= {"stop", "length"}
    for sample in found:
        assert (sample["ids"][-1] in ends) == (sample["finish"] == "stop")
        assert not set(sample["ids"][:-1]) & set(ends)
        assert "<|im_" not in sample["text"]


def test_actor_and_learner_agree_on_real_weights(run: Path) -> None:
    # In bf16 both sides round. A run with other weights is stopped by its own gate.
    assert max(row["mismatch/p99"] or 0.0 for row in rows(run)) < 0.3
    assert any(row["grad_norm"] for row in rows(run))


def test_the_run_is_continued_and_replayed_to_the_same_bits(run: Path) -> None:
    done = launch("resume", run, "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(run)["steps"] == 4
    assert replayed(run)["adapter_sha256"] == summary(run)["adapter_sha256"]


def test_eval_and_generate(run: Path) -> None:
    done = launch("eval", run, "--problems", "2")
    assert done.returncode == 0 and "written to" in done.stdout, done.stdout + done.stderr
    done = launch("generate", run, "--prompt", "What is 3 plus 4?", "--max-new-tokens", "12")
    assert done.returncode == 0 and done.stdout.strip() and "<|im_" not in done.stdout, done.stdout + done.stderr


def test_the_export_is_the_policy(run: Path, tmp_path: Path) -> None:
    done = launch("export", run, "--as", "merged", "--dtype", "fp32", "--out", tmp_path / "merged")
    assert done.returncode == 0, done.stdout + done.stderr
    worst = re.search(r"by at most (\S+) ", done.stdout)
    assert worst and float(worst[1]) < 1e-3
    assert load_prompter(tmp_path / "merged").digest == load_prompter(MODEL).digest


def test_doctor_finds_the_model(config: Path) -> None:
    done = launch("doctor", config, "--json")
    findings = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert findings["model.present"]["level"] == "ok", done.stdout
