"""A Llama as the hub holds it, through the real processes: trained by a user's own reward, replayed, taken home."""

import re
from pathlib import Path

import pytest

from tests.support.gguf_files import Written, write_gguf
from tests.support.hub_models import hub_model
from tests.support.runs import launch, replayed, rows, summary

CONFIG = """
[run]
steps = 3

[model]
path = "{source}"

[tasks]
limit = 16

[rollout]
prompts = 4
group = 4
max_new_tokens = 8

[verifier]
kind = "callable"
function = "{reward}:even"

[eval]
problems = 8
samples = 2

[optimizer]
lr = 1e-2

[compute]
learner_threads = 1
actor_threads = 1
"""
REWARD = """
def even(prompts, completions, completion_ids, **columns):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""


@pytest.mark.parametrize("form", ["folder", pytest.param("gguf", marks=pytest.mark.long)])
def test_a_llama_is_trained_replayed_and_taken_home(tmp_path: Path, form: str) -> None:
    source, reward = tmp_path / "tiny.gguf", tmp_path / "reward.py"
    if form == "folder":
        source = hub_model(tmp_path, "llama", tied=False)
    else:
        pytest.importorskip("gguf", reason="the extra `gguf` is not installed here")
        write_gguf(source, "llama", tied=False, written=Written(kind="Q8_0"))
    reward.write_text(REWARD)
    (tmp_path / "my.toml").write_text(CONFIG.format(source=source, reward=reward))
    out = tmp_path / "run"
    done = launch("run", tmp_path / "my.toml", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(row["mismatch/p99"] or 0.0 for row in rows(out)) < 1e-4
    assert any(row["grad_norm"] for row in rows(out))
    final = summary(out)["eval"]["final"]
    # A user's own function says nothing that could be voted on.
    assert set(final["sampled"]["pass_at"]) == {"1", "2"} and final["sampled"]["maj_at"] == {}
    assert replayed(out)["adapter_sha256"] == summary(out)["adapter_sha256"]
    exported = launch("export", out, "--as", "merged", "--dtype", "fp32", "--out", tmp_path / "merged")
    assert exported.returncode == 0, exported.stderr
    worst = re.search(r"by at most (\S+) ", exported.stdout)
    assert worst and float(worst[1]) < 1e-3
