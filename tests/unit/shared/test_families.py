"""Llama, Qwen2 and Qwen3 models as the hub holds them, heads tied and untied: trained, resumed, taken home.

The learner's and the actor's own parts, from `load_model` and `build_engine` on; only the verifier is the test's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actor.rollout import Rollout
from actor.wiring import build_engine
from launch.__main__ import main
from launch.commands.in_process import LocalFiller
from learner.durable.checkpoint import Checkpoint, CheckpointStore, UnsavedCheckpoint
from learner.durable.state import RunTotals
from learner.loop import train
from learner.reports.step_report import StepReport
from learner.wiring import build_learner, load_model
from shared.config.load import config_to_json, resolve
from shared.config.tree import Config
from shared.errors import ModelError
from shared.model.adapter_file import install_adapter
from shared.model.prompt import load_prompter
from shared.process.lease import NoLease
from shared.run.metrics import StepMetrics
from shared.run.run_dir import RunDir
from tests.support.fakes import FAMILIES, ScriptedScorer, dense_twin, hidden_of
from tests.support.hub_models import hub_model

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [(family, tied) for family in FAMILIES for tied in (True, False)]
STEPS = 4
IDS = torch.randint(0, 300, (3, 30), generator=torch.Generator().manual_seed(1))
QUESTION = "Tom has 3 apples. He buys 4. How many has he?"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the six."""
    family, tied = request.param
    return hub_model(tmp_path_factory.mktemp("hub"), family, tied=tied)


def config_for(source: Path, **sections: Any) -> Config:
    """A few small steps; everything about the model is left to the model's files."""
    small: dict[str, Any] = {
        "run": {"steps": STEPS, "seed": 2},
        "model": {"path": str(source), "cache_dir": str(source.parent / "cache")},
        "tasks": {"limit": 8},
        "rollout": {"prompts": 3, "group": 4, "max_new_tokens": 5, "groups_per_order": 1},
        "loss": {"entropy_fraction": 0.5, "max_mismatch": 1e-4},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every": 2},
        "compute": {"learner_threads": 1, "actor_threads": 1},
    }
    return resolve(small | sections)


class Kept:
    """Rows and checkpoints of one start."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []
        self.checkpoints: dict[int, Checkpoint] = {}
        self.save: Callable[[int, RunTotals], UnsavedCheckpoint] | None = None

    def step(self, step: int, metrics: StepMetrics, collected: object, batch: object, result: object) -> None:
        self.rows.append(metrics)

    def checkpoint(self, step: int, totals: RunTotals) -> None:
        assert self.save
        self.checkpoints[step] = self.save(step, totals).copied()


def never(batch: object) -> None:
    raise AssertionError("no update of these is to be refused")


def one_start(config: Config, folder: Path, start: Checkpoint | None = None, last: int = STEPS) -> tuple[str, Kept]:
    """Train from a checkpoint, or from the start; the adapter's digest and what was kept."""
    model, kept = load_model(config), Kept()
    engine, prompter = build_engine(config)
    # Even ids are right: with any vocabulary, some samples are and some are not.
    rollout = Rollout(engine, ScriptedScorer(lambda ids: ids[0] % 2 == 0), NoLease(), prompter.text)
    filler = LocalFiller(rollout)
    learner = build_learner(model, filler, never)
    state = learner.state
    kept.save = state.to_save
    totals = state.load(start) if start else RunTotals()
    for version in state.publisher.versions.values():
        filler.publish(version.message, oldest_needed=0)
    state.plan.submit_pending()
    report = StepReport(config, kept, totals, lambda: False, state.plan.curriculum.metrics)
    done = train(learner.parts(report, NoLease()), start.step if start else 0, last)
    return state.publisher.versions[done].sha256, kept


@pytest.fixture(scope="module")
def trained(source: Path) -> tuple[str, Kept]:
    """A whole run: the adapter's digest, rows and checkpoints."""
    return one_start(config_for(source), source.parent)


@pytest.mark.one_in(2)
def test_a_run_learns_the_same_whether_resumed_or_not(source: Path, trained: tuple[str, Kept], tmp_path: Path) -> None:
    config = config_for(source)
    digest, kept = trained
    _, first_half = one_start(config, tmp_path, last=2)
    resumed, rest = one_start(config, tmp_path, start=first_half.checkpoints[2])
    assert resumed == digest != one_start(config, tmp_path, last=1)[0]
    assert [row.reward_mean for row in rest.rows] == [row.reward_mean for row in kept.rows[2:]]
    updated = [row for row in kept.rows if row.groups_idle < row.groups_total]
    assert updated and min(row.grad_norm for row in updated) > 0
    assert max(row.mismatch_p99 for row in updated) < 1e-4


@pytest.mark.one_in(2)
def test_recomputed_activations_change_nothing_but_rounding(source: Path, tmp_path: Path) -> None:
    plain = moments_after_two_steps(config_for(source), tmp_path)
    again = moments_after_two_steps(config_for(source, batch={"recompute": "always"}), tmp_path)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-3, atol=1e-5)


def moments_after_two_steps(config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """Adam divides the gradient's size away; so its moments are what is compared."""
    _, kept = one_start(config, folder, last=2)
    tensors = load(kept.checkpoints[2].files["optimizer.safetensors"])
    return {name: value for name, value in tensors.items() if value.numel() > 1}


@pytest.fixture
def run(source: Path, trained: tuple[str, Kept], tmp_path: Path) -> Path:
    """A run directory that holds what was trained."""
    run = RunDir.create(tmp_path / "run", config_to_json(config_for(source)))
    for checkpoint in trained[1].checkpoints.values():
        CheckpointStore(run.checkpoints, keep=3).save(checkpoint)
    return run.path


def expected_logprobs(source: Path, trained: tuple[str, Kept]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the test's tokens, by the policy and by its base."""
    model = load_model(config_for(source))
    install_adapter(model.policy.adapter, trained[1].checkpoints[STEPS].files["adapter_model.safetensors"])
    with torch.no_grad():
        own = chosen(hidden_of(model.policy, IDS) @ model.policy.head.t())
        with model.policy.adapter.switched_off():
            return own, chosen(hidden_of(model.policy, IDS) @ model.policy.head.t())


def chosen(logits: torch.Tensor) -> torch.Tensor:
    """[B, T, V] -> [B, T - 1] log-probs of the tokens that follow."""
    return torch.log_softmax(logits.float(), -1)[:, :-1].gather(2, IDS[:, 1:, None]).squeeze(2)


@pytest.mark.one_in(2)
def test_merged_loads_in_transformers_with_the_policys_numbers(
    source: Path, trained: tuple[str, Kept], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert main(["export", str(run), "--as", "merged", "--dtype", "fp32", "--out", str(out)]) == 0
    worst = re.search(r"differ from the policy's by at most (\S+) ", capfd.readouterr().out)
    assert worst and 0 < float(worst[1]) < 1e-3
    own, base = expected_logprobs(source, trained)
    with torch.no_grad():
        found = chosen(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(input_ids=IDS).logits)
    assert (found - own).abs().max() < 1e-3 < 1e-2 < (found - base).abs().max()
    assert AutoConfig.from_pretrained(out).tie_word_embeddings == source.name.endswith("-tied")
    # The tokenizer goes along, its template as the model shipped it and its end tokens too.
    theirs, ours = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert load_prompter(out).digest == load_prompter(source).digest
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


# PEFT asks transformers for a property that transformers has renamed.
@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_the_adapter_with_the_policys_numbers(
    source: Path, trained: tuple[str, Kept], run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adapter"
    assert main(["export", str(run), "--out", str(out)]) == 0
    worst = re.search(r"differ from the policy's by at most (\S+) ", capfd.readouterr().out)
    assert worst and 0 < float(worst[1]) < 1e-3
    config = PeftConfig.from_pretrained(str(out))
    assert config.base_model_name_or_path == str(source)
    own, base = expected_logprobs(source, trained)
    with torch.no_grad():
        model: Any = PeftModel.from_pretrained(dense_twin(source, dtype=torch.bfloat16), str(out))
        found = chosen(model(input_ids=IDS).logits)
    assert (found - own).abs().max() < 1e-3 < 1e-2 < (found - base).abs().max()
    assert (out / "tokenizer.json").is_file() and not (out / "config.json").exists()


def test_a_prompt_is_what_the_template_makes_of_it_today_and_tomorrow(source: Path) -> None:
    prompter = load_prompter(source)
    ids = prompter.prompt_ids(QUESTION, "Be brief.")
    spelt = prompter.tokenizer.decode(ids)
    assert QUESTION in spelt and "Be brief." in spelt and "assistant" in spelt
    assert prompter.text(ids).count(QUESTION) == 1 and "<|" not in prompter.text(ids)
    assert len(prompter.end_ids) == 2 and prompter.tokenizer.eos_token_id in prompter.end_ids
    if "llama" in source.name:
        assert spelt.count("<|begin_of_text|>") == 1 and ids[0] == prompter.tokenizer.bos_token_id
        assert "Today: 26 Jul 2024<|eot_id|>" in spelt


def test_a_template_whose_date_cannot_be_fixed_is_refused(tmp_path: Path) -> None:
    source = hub_model(tmp_path, "llama", tied=True)
    template = source / "chat_template.jinja"
    template.write_text(template.read_text().replace("strftime_now('%d %b %Y')", "strftime_now(date_form)"))
    with pytest.raises(ModelError, match="writes the current date"):
        load_prompter(source)
