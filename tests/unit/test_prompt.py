"""What a prompter renders and reads: examples as turns, and thinking that stays visible to the verifier."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from actor.final_answer import counted
from shared.embedded import EMBEDDED_DIR
from shared.prompt import load_prompter


@pytest.mark.parametrize("special", [True, False])
def test_thinking_is_seen_whether_or_not_its_tokens_are_special(tmp_path: Path, special: bool) -> None:
    shutil.copytree(EMBEDDED_DIR, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "model")
    prompter = load_prompter(tmp_path / "model")
    ids = prompter.tokenizer("<think>12</think>#### 13<|im_end|>", add_special_tokens=False)["input_ids"]
    think = prompter.tokenizer.convert_tokens_to_ids("<think>")
    assert think in ids and prompter.tokenizer.added_tokens_decoder[think].special is special
    text = prompter.text(ids)
    assert text.replace(" ", "") == "<think>12</think>####13"
    assert counted(text).strip() == "#### 13"


def test_without_such_tokens_all_special_ones_are_silent() -> None:
    prompter = load_prompter(EMBEDDED_DIR)
    ids = prompter.prompt_ids("How many?")
    assert prompter.text(ids) == prompter.tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|im_start|>" in prompter.as_the_model_sees(ids)


def test_examples_stand_between_system_turn_and_question() -> None:
    prompter = load_prompter(EMBEDDED_DIR)
    seen = prompter.as_the_model_sees(prompter.prompt_ids("c?", "S", [("a?", "A"), ("b?", "B")]))
    places = [seen.index(text) for text in ("S", "a?", "A", "b?", "B", "c?")]
    assert places == sorted(places) and seen.endswith(prompter.as_the_model_sees(prompter.prompt_ids("c?"))[-12:])
