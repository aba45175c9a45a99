"""Llama, Qwen2 and Qwen3 checkpoints as the hub holds them, heads tied and untied: read, trained, resumed.

The learner's and the actor's own parts, from `load_model` and `build_engine` on; only the verifier is the test's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from actor.rollout import Rollout
from actor.wiring import build_engine
from launch.local_desk import LocalDesk
from learner.checkpoint import Checkpoint
from learner.ledger import Ledger
from learner.loop import train
from learner.past import Past
from learner.wiring import build_parts, build_state, load_model
from shared.config import Config
from shared.config_load import resolve
from shared.errors import ModelError
from shared.metrics import StepMetrics
from shared.prompt import load_prompter
from shared.turns import NoTurns
from tests.fakes import FAMILIES, ScriptedScorer
from tests.hub_checkpoints import hub_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [(family, tied) for family in FAMILIES for tied in (True, False)]
STEPS = 4
QUESTION = "Tom has 3 apples. He buys 4. How many has he?"


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the six."""
    family, tied = request.param
    return hub_checkpoint(tmp_path_factory.mktemp("hub"), family, tied=tied)


def config_for(source: Path, **sections: Any) -> Config:
    """A few small steps; everything about the model is left to the checkpoint."""
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
    """Rows and checkpoints of one life."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []
        self.checkpoints: dict[int, Checkpoint] = {}
        self.save: Callable[[int, Past], Checkpoint] | None = None

    def step(self, step: int, metrics: StepMetrics, answers: object, batch: object) -> None:
        self.rows.append(metrics)

    def checkpoint(self, step: int, past: Past) -> None:
        assert self.save
        self.checkpoints[step] = self.save(step, past)

    def quarantine(self, batch: object) -> None:
        raise AssertionError("no update of these is to be refused")


def one_life(config: Config, folder: Path, start: Checkpoint | None = None, last: int = STEPS) -> tuple[str, Kept]:
    """Train from a checkpoint, or from the start; the adapter's digest and what was kept."""
    model, kept = load_model(config), Kept()
    engine, prompter = build_engine(config)
    # Even ids are right: whatever the vocabulary, some samples are and some are not.
    rollout = Rollout(engine, ScriptedScorer(lambda ids: ids[0] % 2 == 0), NoTurns(), prompter.text)
    desk = LocalDesk(rollout)
    state = build_state(model, desk)
    kept.save = state.save
    past = state.load(start) if start else Past()
    for version in state.publisher.versions.values():
        desk.publish(version, oldest_needed=0)
    state.sampler.submit_pending()
    ledger = Ledger(config, kept, past, lambda: False, state.sampler.curriculum.metrics)
    done = train(build_parts(model, state, desk, ledger, folder / "lease"), start.step if start else 0, last)
    return state.publisher.versions[done].sha256, kept


def test_a_run_learns_the_same_whether_resumed_or_not(source: Path, tmp_path: Path) -> None:
    config = config_for(source)
    digest, kept = one_life(config, tmp_path)
    _, first_half = one_life(config, tmp_path, last=2)
    resumed, rest = one_life(config, tmp_path, start=first_half.checkpoints[2])
    assert resumed == digest != one_life(config, tmp_path, last=1)[0]
    assert [row.reward_mean for row in rest.rows] == [row.reward_mean for row in kept.rows[2:]]
    trained = [row for row in kept.rows if row.groups_dropped < row.groups_total]
    assert trained and min(row.grad_norm for row in trained) > 0
    assert max(row.mismatch_p99 for row in trained) < 1e-4


def test_recomputed_activations_change_nothing_but_rounding(source: Path, tmp_path: Path) -> None:
    plain = moments_after_two_steps(config_for(source), tmp_path)
    again = moments_after_two_steps(config_for(source, batch={"checkpointing": True}), tmp_path)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-3, atol=1e-5)


def moments_after_two_steps(config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """Adam divides the gradient's size away; so its moments are what is compared."""
    _, kept = one_life(config, folder, last=2)
    tensors = load(kept.checkpoints[2].files["optimizer.safetensors"])
    return {name: value for name, value in tensors.items() if value.numel() > 1}


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
    source = hub_checkpoint(tmp_path, "llama", tied=True)
    template = source / "chat_template.jinja"
    template.write_text(template.read_text().replace("strftime_now('%d %b %Y')", "strftime_now(date_form)"))
    with pytest.raises(ModelError, match="writes the current date"):
        load_prompter(source)
