"""What the card of an export says of the configuration (test_export.py has what it says of files and evaluations)."""

from pathlib import Path
from typing import Any

import pytest

from launch.export.folders import CardFacts, cell, model_card, public_source
from shared.config.load import resolve
from shared.run.run_dir import RunInfo


def card_of(system: str | None = "", **sections: Any) -> str:
    """Of an adapter of the embedded model."""
    machine: dict[str, Any] = {"python": "3", "platform": "Linux", "cpu": "any", "cpu_count": 2}
    facts = CardFacts(
        system=system,
        form="peft",
        dtype="float32",
        config=resolve(sections),
        info=RunInfo(run_id="ab", created="today", packages={}, **machine),
        step=5,
        adapter_sha256="cd",
        base_digest="ef",
        evaluations=(),
        agreement="nothing differs",
    )
    return model_card(facts)


@pytest.mark.parametrize("kind", ["dapo", "gspo", "dr_grpo"])
def test_the_card_of_a_run_names_its_own_algorithm(kind: str) -> None:
    card = card_of(loss={"kind": kind})
    assert f"tags:\n- {kind.replace('_', '-')}\n- reinforcement-learning\n- lora\n---" in card
    assert "# embedded, trained by reinforcement learning" in card and f"| objective | {kind}, entropy" in card


def test_the_card_of_a_warm_start_says_that_it_learned_written_answers() -> None:
    rollout = {"prompts": 16, "group": 1, "max_new_tokens": 99}
    card = card_of(loss={"kind": "sft"}, rollout=rollout, tasks={"source": "openai/gsm8k"})
    assert "tags:\n- sft\n- lora\n---" in card and "# embedded, fine-tuned on written answers" in card
    assert "| answers | the solutions of openai/gsm8k |" in card
    assert "| a step | 16 answers of at most 99 tokens |" in card
    assert not any(word in card for word in ("reinforcement", "grpo", "completions", "temperature", "entropy fraction"))
    card = card_of(loss={"kind": "sft"}, rollout=rollout, sft={"source": "/home/me/chats.jsonl"})
    assert "| answers | chats.jsonl |" in card and "| held-out tasks | embedded, verifier " in card


@pytest.mark.parametrize(
    ("system", "shown"),
    [("Think.\nThen answer.", "Think.<br>Then answer."), ("", "none"), (None, "in the data, differs by row")],
)
def test_the_card_has_the_system_message_that_the_tasks_had(system: str | None, shown: str) -> None:
    assert f"| system prompt | {shown} |" in card_of(system, tasks={"system_prompt": "Not this one."})


@pytest.mark.parametrize(
    ("teacher", "shown"),
    [
        ({"prompt": "A secret"}, "the base with a prompt of its own"),
        ({"adapter": "/home/me/better", "prompt": "A secret"}, "the base with the adapter better and with a prompt"),
        ({"url": "http://host.internal:8000/v1"}, "a model behind a server"),
        ({"url": "http://host.internal:8000/v1", "model": "/home/me/large"}, "large"),
    ],
)
def test_the_card_of_a_distillation_names_the_teacher(teacher: dict[str, str], shown: str) -> None:
    card = card_of(loss={"kind": "opd"}, teacher=teacher)
    assert "tags:\n- distillation\n- lora\n---" in card and "trained by on-policy distillation" in card
    assert f"| teacher | {shown}" in card
    assert not any(word in card for word in ("reinforcement", "grpo", "/home", "internal", "secret"))


def test_no_text_of_the_run_breaks_the_table_of_the_card() -> None:
    prompt = "Think first | then\nanswer in <answer> tags.\n"
    assert cell(prompt) == r"Think first \| then<br>answer in \<answer> tags."


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("openai/gsm8k", "openai/gsm8k"),
        ("openai/gsm8k test", "openai/gsm8k test"),
        ("embedded", "embedded"),
        ("/home/me/secret/tasks.jsonl", "tasks.jsonl"),
        ("secret/tasks.jsonl", "tasks.jsonl"),
        ("secret/TASKS.JSONL", "TASKS.JSONL"),
        ("../secret/gsm8k test", "gsm8k test"),
        ("tests/support train", "support train"),
    ],
)
def test_a_source_is_named_without_folders_of_this_machine(
    source: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert public_source(source) == shown
