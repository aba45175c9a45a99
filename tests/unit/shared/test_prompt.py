"""What a prompter renders and reads: examples as chat messages, and thinking that stays visible to the verifier."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from actor.verifiers.final_answer import counted
from shared.embedded import EMBEDDED_DIR
from shared.errors import ModelError, in_words
from shared.model.prompt import at_most, load_prompter


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


def ending_with(folder: Path, **files: object) -> tuple[int, ...]:
    """End ids of the embedded model when its tokenizer names <|endoftext|> as the end, and these files say more."""
    shutil.copytree(EMBEDDED_DIR, folder)
    (folder / "generation_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_prompter(folder).end_ids


def test_the_token_that_the_template_writes_after_a_reply_ends_it_too(tmp_path: Path) -> None:
    # As in the base models of Qwen2.5: the tokenizer's own end token is not the one of the template.
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert ending_with(tmp_path / "model", config={}) == tuple(sorted({end, turn}))


def test_end_tokens_of_the_configuration_count_where_there_is_no_other_list(tmp_path: Path) -> None:
    assert set(ending_with(tmp_path / "one", config={"eos_token_id": [7, 8]})) >= {7, 8}
    more = ending_with(tmp_path / "two", config={"eos_token_id": [7, 8]}, generation_config={"eos_token_id": 9})
    assert 9 in more and not {7, 8} & set(more)


def test_a_template_that_takes_no_reply_adds_no_end_token(tmp_path: Path) -> None:
    fussy = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
    assert load_prompter(model_with(tmp_path / "model", fussy)).end_ids == load_prompter(EMBEDDED_DIR).end_ids


def model_with(folder: Path, template: str) -> Path:
    """The embedded model with another chat template."""
    shutil.copytree(EMBEDDED_DIR, folder)
    for file in folder.glob("*.jinja"):
        file.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_is_one_sentence(tmp_path: Path, template: str, said: str) -> None:
    prompter = load_prompter(model_with(tmp_path / "model", template))
    with pytest.raises(ModelError, match=rf"^The model's chat template cannot be used .*{said}.*\.$") as caught:
        prompter.prompt_ids("How many?")
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_template_without_end_is_given_up(tmp_path: Path) -> None:
    loops = "".join(f"{{% for a{i} in range(99999) %}}" for i in range(4)) + "{% endfor %}" * 4
    prompter = replace(load_prompter(model_with(tmp_path / "model", loops)), limit_s=0.2)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"took more than 0\.2 s"):
        prompter.prompt_ids("How many?")
    assert time.monotonic() - started < 5.0


@pytest.fixture
def no_timer() -> Iterator[None]:
    """None but those of the test; then again that of pytest, which ends what hangs."""
    handler, (left, _) = signal.signal(signal.SIGALRM, lambda *_: None), signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_a_block_is_given_up_at_its_limit_and_a_timer_before_it_goes_on(no_timer: None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    with pytest.raises(TimeoutError, match=r"it took more than 0\.05 s"), at_most(0.05):
        time.sleep(5.0)
    assert 30.0 < signal.setitimer(signal.ITIMER_REAL, 0.0)[0] < 60.0
    with at_most(0.05):
        pass
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0, "there was none before"


def test_code_of_the_models_own_is_never_recommended(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_DIR, tmp_path / "model")
    for name in ("tokenizer_config.json", "config.json"):
        file = tmp_path / "model" / name
        foreign = {"auto_map": {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own"}, "model_type": "own"}
        file.write_text(json.dumps(json.loads(file.read_text()) | foreign | {"tokenizer_class": "Own"}))
    with pytest.raises(ModelError, match="code of its own, which is never run") as caught:
        load_prompter(tmp_path / "model")
    assert "trust_remote_code" not in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_DIR, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"^The tokenizer in .* cannot be loaded \(.*\); .*\.$") as caught:
        load_prompter(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_an_exception_in_words_is_its_type_and_the_first_line_of_what_it_says() -> None:
    assert in_words(ValueError("\n  not like this.\nmore")) == "ValueError: not like this"
    assert in_words(KeyError("x")) == "KeyError: 'x'" and in_words(AssertionError()) == "AssertionError"
    assert in_words(OSError("x" * 999)) == "OSError: " + 200 * "x"
