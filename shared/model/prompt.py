"""Between text and token ids: the chat template as the model ships it, and the ids that end an answer.

The learner renders prompts once and sends ids; the actor decodes completions for the verifier alone. Text that was
decoded is never tokenised again for training: the round trip does not give the same ids.
A template that writes the day's date into every prompt (Llama 3 does) gets one fixed day, or a run that is resumed
tomorrow would ask other questions than its journal answers. A template is a program that came with the model: it runs
in transformers' sandbox, for a few seconds at most, and what goes wrong in it is said in a sentence. Other code that
comes with a model is never run.
"""

import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shared.errors import ModelError

Shots = Sequence[tuple[str, str]]
"""Questions with the answers they got, shown before the one that is asked."""
THINKING = ("<think>", "</think>")
CLOCK = "strftime_now"
CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")
EVERY_DAY = date(2024, 7, 26)
"""The day that Llama 3's own template falls back to."""
TEMPLATE_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Prompter:
    """A model's tokenizer with its template."""

    tokenizer: Any
    """transformers tokenizer."""
    end_ids: tuple[int, ...]
    """Ids that end an answer."""
    silent_ids: frozenset[int]
    """Special ids that are no part of what is said. Those around thinking are, even where they are special."""
    digest: str
    """sha256 over vocabulary, template and end ids; compared in the handshake."""
    limit_s: float = TEMPLATE_LIMIT_S
    """For the template to write one conversation; it takes less than a millisecond."""

    def prompt_ids(self, question: str, system_prompt: str = "", shots: Shots = ()) -> list[int]:
        """[Tp] the question as a user turn behind the examples, ready for the assistant to speak."""
        turns = [{"role": "system", "content": system_prompt}] if system_prompt else []
        for asked, answered in shots:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return self.turn_ids([*turns, {"role": "user", "content": question}])

    def turn_ids(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """[Tp] a conversation of {role, content}, ready for the assistant to speak."""
        try:
            with at_most(self.limit_s):
                text = self.tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=True)
        # Whatever a program that is not ours may raise.
        except Exception as error:
            raise ModelError(
                f"The model's chat template cannot be used ({in_words(error)}); mend it, or use another model."
            ) from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        """What the ids say, without special tokens but for those around thinking: what is thought does not count."""
        return self.as_the_model_sees([token for token in ids if token not in self.silent_ids])

    def as_the_model_sees(self, ids: list[int]) -> str:
        """What the ids say, with every token."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def load_prompter(folder: Path) -> Prompter:
    """From a checkpoint folder."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        raise ModelError(f"The tokenizer in {folder} has no chat template; use an instruct model or add one.")
    tokenizer.chat_template = undated(tokenizer.get_chat_template(), folder)
    end_ids = find_end_ids(folder, tokenizer)
    vocabulary = tokenizer.get_vocab()
    identity = [sorted(vocabulary.items()), tokenizer.chat_template, end_ids]
    return Prompter(
        tokenizer=tokenizer,
        end_ids=tuple(end_ids),
        silent_ids=special_ids(tokenizer) - {vocabulary.get(tag) for tag in THINKING},
        digest=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
    )


def load_tokenizer(folder: Path) -> Any:
    """transformers raises what it likes about files it cannot read, and recommends to run code that comes with them."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"The model in {folder} brings code of its own, which is never run; use a model that transformers"
                " supports by itself."
            ) from error
        raise ModelError(f"The tokenizer in {folder} cannot be loaded ({in_words(error)}); check its files.") from error


def in_words(error: Exception) -> str:
    """Its type and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:200].rstrip('.')}" if said else type(error).__name__


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """TimeoutError in the block once its time is up. Signals reach the main thread alone: elsewhere there is no limit.
    A timer that ran already goes on afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {limit_s:g} s")

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    before, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(before - (time.monotonic() - began), 0.001) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """What `skip_special_tokens` would skip."""
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return frozenset(tokenizer.all_special_ids) | added


def undated(template: str, folder: Path) -> str:
    """The template with every reading of the clock replaced by what it would read on one fixed day."""
    fixed = CLOCK_CALL.sub(lambda call: f"'{EVERY_DAY.strftime(call[2])}'", template)
    # `strftime_now is defined` may stay: it asks only whether there is a clock.
    if re.search(CLOCK + r"\s*\(", fixed):
        raise ModelError(
            f"The chat template in {folder} writes the current date into every prompt in a way that cannot be fixed, so"
            f" no run could be resumed on another day; replace {CLOCK}(...) there by a date of your choice."
        )
    return fixed


def find_end_ids(folder: Path, tokenizer: Any) -> list[int]:
    """The tokenizer's end id and those of generation_config.json, which chat models extend."""
    ids = {tokenizer.eos_token_id} - {None}
    file = folder / "generation_config.json"
    if file.is_file():
        extra = json.loads(file.read_text()).get("eos_token_id") or []
        ids |= set(extra) if isinstance(extra, list) else {extra}
    if not ids:
        raise ModelError(f"The checkpoint in {folder} names no end token; set eos_token_id in generation_config.json.")
    return sorted(ids)
