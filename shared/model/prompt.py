"""Between text and token ids: the model's chat template, and the ids that end a completion.

The learner renders prompts once and sends ids. The actor decodes completions for the verifier only. Decoded text is
never tokenised again for training, because that does not give the same ids.

A template that writes the current date into every prompt (Llama 3 does) gets one fixed date; otherwise a run that is
resumed tomorrow would have other prompts than its journal. A template is a program that comes with the model: it runs
in transformers' sandbox for a few seconds at most, and its errors become one sentence. Other code of a model
is never run.
"""

import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from shared.config.environment import NO_ENVIRONMENT, EnvironmentConfig
from shared.errors import ModelError, in_words

Message = dict[str, Any]
"""role, content, and what else the template reads."""
OBSERVED = "@@observation@@"
"""Where an environment's first words belong, while a prompt is rendered."""
Shots = Sequence[tuple[str, str]]
"""(question, solution) pairs that are shown before the question."""
THINKING = ("<think>", "</think>")
CLOCK = "strftime_now"
CLOCK_CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")
REPLY = "A reply."
EVERY_DAY = date(2024, 7, 26)
"""The date that Llama 3's own template uses by default."""
TEMPLATE_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Prompter:
    """A model's tokenizer with its template."""

    tokenizer: Any
    """transformers tokenizer."""
    end_ids: tuple[int, ...]
    """Ids that end a completion."""
    silent_ids: frozenset[int]
    """Special ids that are left out of the text. Those around thinking are kept, even if they are special."""
    digest: str
    """sha256 over vocabulary, template and end ids; compared in the handshake."""
    name: str = "the model"
    """Its folder, for messages."""
    tools: str = ""
    """JSON of the tools that the template shows; empty without an environment."""
    begins: tuple[int, ...] = ()
    """What every conversation begins with, of which an agent writes the rest; empty without an agent."""
    limit_s: float = TEMPLATE_LIMIT_S
    """Time limit for the template to render one conversation, which normally takes less than a millisecond."""

    def prompt_ids(
        self, question: str, system_prompt: str = "", shots: Shots = (), earlier: Sequence[Message] = ()
    ) -> list[int]:
        """[Tp] the examples, earlier messages and the question as a user message, followed by the opening of the
        assistant's reply. With tools it ends after the question: what follows depends on the environment
        (conversation.py). With an agent it is only what all conversations begin with."""
        if self.begins:
            return list(self.begins)
        if not self.tools:
            return self.chat_ids(conversation(question, system_prompt, shots, earlier))
        text = self.rendered(conversation(question + OBSERVED, system_prompt, shots, earlier), opens_reply=True)
        if OBSERVED not in text:
            raise ModelError(
                f"The chat template of {self.name} does not show the end of a question; use another model."
            )
        return self.ids(text.partition(OBSERVED)[0])

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """[Tp] a conversation of {role, content}, followed by the opening of the assistant's reply."""
        return self.ids(self.rendered(messages, opens_reply=True))

    def reply_ids(self, messages: Sequence[Message], reply: str) -> list[int]:
        """[T] what the model would have to sample after `chat_ids` to reply this: the rest of what the template writes,
        up to the token that ends the turn. Where the template changes what was before it (some remove reasoning), the
        reply's own text and that token."""
        before = self.rendered(messages, opens_reply=True)
        whole = self.rendered([*messages, {"role": "assistant", "content": reply}], opens_reply=False)
        ids = self.ids(whole.removeprefix(before) if whole.startswith(before) else reply)
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        end = turn_end(self.tokenizer) if not ends else None
        return ids[: ends[0] + 1] if ends else [*ids, self.tokenizer.eos_token_id if end is None else end]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def rendered(self, messages: Sequence[Message], *, opens_reply: bool) -> str:
        """A conversation as the template shows it."""
        options = {"tools": json.loads(self.tools)} if self.tools else {}
        try:
            with at_most(self.limit_s):
                return self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=opens_reply, **options
                )
        # The template is a foreign program and may raise anything.
        except Exception as error:
            raise ModelError(
                f"The model's chat template cannot be used ({in_words(error)}); fix it, or use another model."
            ) from error

    def text(self, ids: list[int]) -> str:
        """The text of the ids, without special tokens except those around thinking, which the verifier needs."""
        return self.as_the_model_sees([token for token in ids if token not in self.silent_ids])

    def as_the_model_sees(self, ids: list[int]) -> str:
        """The text of the ids, with all special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def conversation(
    question: str, system_prompt: str = "", shots: Shots = (), earlier: Sequence[Message] = ()
) -> list[Message]:
    """How a run asks a question."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for asked, solution in shots:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": solution}]
    return [*messages, *earlier, {"role": "user", "content": question}]


def load_prompter(folder: Path, environment: EnvironmentConfig = NO_ENVIRONMENT) -> Prompter:
    """environment: that of the run, whose tools the template shows, or whose agent writes the conversations."""
    tools = environment.described
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        raise ModelError(f"The tokenizer in {folder} has no chat template; use an instruct model or add one.")
    tokenizer.chat_template = undated(tokenizer.get_chat_template(), folder)
    end_ids = find_end_ids(folder, tokenizer)
    vocabulary = tokenizer.get_vocab()
    identity = [sorted(vocabulary.items()), tokenizer.chat_template, end_ids, *filter(None, [tools])]
    found = Prompter(
        tokenizer=tokenizer,
        end_ids=tuple(end_ids),
        silent_ids=special_ids(tokenizer) - {vocabulary.get(tag) for tag in THINKING},
        digest=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        name=str(folder),
        tools=tools,
    )
    return replace(found, begins=(beginning(found),)) if environment.is_agent else found


def beginning(prompter: Prompter) -> int:
    """The token that every conversation begins with, whoever speaks first."""
    asked: list[Message] = [{"role": "user", "content": "Hello"}]
    first = prompter.chat_ids(asked)[0]
    try:
        told = prompter.chat_ids([{"role": "system", "content": "Be kind."}, *asked])[0]
    except ModelError:  # some templates have no such role
        told = first
    if first != told or first not in special_ids(prompter.tokenizer):
        raise ModelError(
            f"The chat template of {prompter.name} does not begin every conversation with the same special token, which"
            " environment.kind = 'agent' needs; use another model, or let the template begin with one."
        )
    return first


@lru_cache(maxsize=1)
def load_tokenizer(folder: Path) -> Any:
    """One object for all callers, which only `load_prompter` may change. The fork server of a run loads it before it
    forks, so that learner and actor share it: a hundred megabytes if the vocabulary is large.
    transformers may raise anything about files that it cannot read, or propose to run code of the model."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"The model in {folder} needs code of its own, which is never run; use a model that transformers"
                " supports by itself."
            ) from error
        raise ModelError(f"The tokenizer in {folder} cannot be loaded ({in_words(error)}); check its files.") from error


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """TimeoutError in the block after limit_s. Signals reach only the main thread: elsewhere there is no limit.
    A timer that was already running continues afterwards."""
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
    """The ids that `skip_special_tokens` would skip."""
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return frozenset(tokenizer.all_special_ids) | added


def undated(template: str, folder: Path) -> str:
    """The template with one fixed date in place of every call of the clock."""
    fixed = CLOCK_CALL.sub(lambda call: f"'{EVERY_DAY.strftime(call[2])}'", template)
    # `strftime_now is defined` may stay: it only tests whether there is a clock.
    if re.search(CLOCK + r"\s*\(", fixed):
        raise ModelError(
            f"The chat template in {folder} writes the current date into every prompt in a way that cannot be fixed, so"
            f" no run could be resumed on another day; replace {CLOCK}(...) there by a date of your choice."
        )
    return fixed


def find_end_ids(folder: Path, tokenizer: Any) -> list[int]:
    """The tokenizer's end id, those of the model's files, and the one that the template writes after a reply: the base
    models of some families have another end token than their template."""
    ids = {tokenizer.eos_token_id, turn_end(tokenizer)} - {None}
    files = (folder / "generation_config.json", folder / "config.json")
    if file := next((file for file in files if file.is_file()), None):
        extra = json.loads(file.read_text()).get("eos_token_id") or []
        ids |= set(extra) if isinstance(extra, list) else {extra}
    if not ids:
        raise ModelError(f"The model in {folder} names no end token; set eos_token_id in generation_config.json.")
    return sorted(ids)


def turn_end(tokenizer: Any) -> int | None:
    """The special token right after an assistant's message; None if there is none, or the template takes no reply."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": REPLY}]
    try:
        with at_most(TEMPLATE_LIMIT_S):
            text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:
        return None
    after = text.rpartition(REPLY)[2].lstrip()
    special = {entry.content: token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return next((token for content, token in special.items() if after.startswith(content)), None)
