"""`generate --chat`: a conversation in the terminal, with base and trained policy side by side.

    /new    start over          /quit, Ctrl-D    leave          Ctrl-C    cut a reply short

Each policy sees the same questions and remembers its own replies. On a terminal of at least 80 columns both replies
grow at the same time in two columns; elsewhere they come one after the other as plain text. A reply may contain
escape codes; they are printed as text, so that they cannot control the terminal.

Always uses our own engine, even if the run samples with vLLM: base and trained policy are then one model in memory,
with its adapter off or on.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actor.engines.hf_engine import stream
from launch.commands.generate import open_policy, opening_of
from protocol.messages import Sampling
from protocol.plain_text import for_terminal
from shared.config.processes import is_folded
from shared.config.tree import Config
from shared.errors import ConfigError, DataError
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.seeding import derive

if TYPE_CHECKING:
    from learner.durable.checkpoint import Checkpoint

ChatMessages = list[dict[str, str]]
"""Chat messages, as the model's template takes them."""
Replies = Mapping[str, Generator[str, None, None]]
"""Name of a policy -> its reply so far, again after every token."""
Show = Callable[[Replies], None]

TWO_COLUMNS = 80
"""Columns of the terminal from which two replies fit side by side."""
REFRESH_S = 0.05
HELP = "/new starts over, /quit or Ctrl-D leaves, Ctrl-C cuts a reply short"
PARTIAL_CHARACTER = "\ufffd"
"""What a tokenizer shows for a character of which only the first bytes have been sampled."""


class Conversation:
    """One policy and what it remembers."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        prompter: Prompter,
        opening: ChatMessages,
        adapter: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """opening: what the run shows before a question. adapter: switches it as this policy needs it."""
        self.name = name
        self.policy = policy
        self.prompter = prompter
        self.opening = opening
        self.adapter = adapter
        self.messages: ChatMessages = [*opening]

    def start_over(self) -> None:
        self.messages = [*self.opening]

    def reply(self, question: str, sampling: Sampling, seed: int) -> Generator[str, None, None]:
        """The reply so far, after every token. The question is remembered at once, and the reply as far as it went."""
        prompt = self.prompt_ids(question, sampling)
        tokens = stream(self.policy, prompt, self.prompter.end_ids, sampling, derive(seed, "chat", len(self.messages)))
        message = {"role": "assistant", "content": ""}
        self.messages += [{"role": "user", "content": question}, message]
        return self.grow(message, tokens)

    def grow(self, message: dict[str, str], tokens: Iterator[int]) -> Generator[str, None, None]:
        ids: list[int] = []
        while (token := self.next(tokens)) is not None:
            ids.append(token)
            message["content"] = self.prompter.text(ids).rstrip(PARTIAL_CHARACTER)
            yield message["content"]

    def next(self, tokens: Iterator[int]) -> int | None:
        """The adapter is switched for each token, since the other policy may compute in between."""
        with self.adapter():
            return next(tokens, None)

    def prompt_ids(self, question: str, sampling: Sampling) -> list[int]:
        """All that was said, and the question. Refused if the model has no room for them and the reply."""
        ids = self.prompter.chat_ids([*self.messages, {"role": "user", "content": question}])
        needed, room = len(ids) + sampling.max_new_tokens, self.policy.room
        if not room.holds(needed):
            raise DataError(
                f"This conversation needs {needed} tokens, with the cap on the reply, and the model has room for"
                f" {room.positions}{room.beyond}; start over with /new, or set a smaller --max-new-tokens."
            )
        return ids


def chat(
    *,
    directory: Path | None,
    base: bool,
    checkpoint: str | None,
    system: str | None,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    out: Path | None,
) -> int:
    """Until the user leaves."""
    if out is not None:
        raise ConfigError("--out does not go with --chat; use --in FILE --out FILE to have completions written.")
    config, chosen = open_policy(directory, base, checkpoint, system)
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens or config.rollout.max_new_tokens)
    conversations = open_conversations(config, chosen)
    print(f"{' and '.join(each.name for each in conversations)}; {HELP}", file=sys.stderr)
    converse(conversations, questions(), sampling, seed)
    return 0


def open_conversations(config: Config, checkpoint: "Checkpoint | None") -> list[Conversation]:
    """With the base, and with the trained policy if there is a checkpoint."""
    from actor.engines.token_step.stacks import dense_bytes
    from learner.durable.state import ADAPTER
    from shared.base.cache import cached_base
    from shared.base.load import load_policy, pick_device, pick_dtype
    from shared.model.adapter_file import install_adapter
    from shared.model.prompt import load_prompter
    from shared.process.determinism import pin_torch

    pin_torch(config.compute.actor_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder, config.environment)
    device = pick_device(config.compute.device, config.compute.actor_card)
    dtype = pick_dtype(config.compute.dtype, device)
    policy = load_policy(base, config.model, config.lora, device, dtype)
    opening = opening_of(config.tasks, config.verifier.kind)
    conversations = [Conversation("base", policy, prompter, opening, policy.adapter.switched_off)]
    if checkpoint is not None:
        install_adapter(policy.adapter, checkpoint.files[ADAPTER])
        if is_folded(config.actor.fold, dense_bytes(policy.adapter)):
            policy.adapter.fold()
        conversations.append(Conversation(f"step {checkpoint.step}", policy, prompter, opening, nullcontext))
    return conversations


def questions() -> Iterator[str]:
    """Typed at a prompt, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from map(decoded, count(1), sys.stdin.buffer)
        return
    # Gives `input` arrow keys and a history. Some Pythons are built without it.
    with suppress(ImportError):
        import readline  # noqa: F401

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def decoded(number: int, line: bytes) -> str:
    """DataError if it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"--chat got input that is not UTF-8 in line {number}; save it as UTF-8.") from error


def converse(conversations: Sequence[Conversation], lines: Iterable[str], sampling: Sampling, seed: int) -> None:
    wide = sys.stdout.isatty() and os.get_terminal_size().columns >= TWO_COLUMNS
    show = show_in_columns if wide and len(conversations) > 1 else print_in_turn
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/new":
                for conversation in conversations:
                    conversation.start_over()
            case question:
                ask(conversations, question, sampling, seed, show)


def ask(conversations: Sequence[Conversation], question: str, sampling: Sampling, seed: int, show: Show) -> None:
    """One question to all. Ctrl-C cuts the replies short; a question that does not fit is refused."""
    try:
        show(start_replies(conversations, question, sampling, seed))
    except KeyboardInterrupt:
        print("\n(cut short)")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)


def start_replies(
    conversations: Sequence[Conversation], question: str, sampling: Sampling, seed: int
) -> dict[str, Generator[str, None, None]]:
    """By name. All policies remember the question before the first token; none does if it does not fit one of them."""
    for each in conversations:
        each.prompt_ids(question, sampling)
    return {each.name: each.reply(question, sampling, seed) for each in conversations}


def print_in_turn(replies: Replies) -> None:
    for name, texts in replies.items():
        print(f"{name}: " if len(replies) > 1 else "", end="", flush=True)
        shown = ""
        for text in map(for_terminal, texts):
            # The end of a text may change once more, when the last bytes of a character arrive; wait until it grows.
            if text.startswith(shown):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print()


def show_in_columns(replies: Replies, console: Console | None = None) -> None:
    """One token of each, one after another, until the last has ended."""
    so_far = dict.fromkeys(replies, "")
    growing, drawn_at = dict(replies), 0.0
    with Live(table_of(so_far), console=console or Console(highlight=False), auto_refresh=False) as live:
        while growing:
            for name, texts in list(growing.items()):
                text = next(texts, None)
                if text is None:
                    del growing[name]
                else:
                    so_far[name] = for_terminal(text)
            if not growing or time.monotonic() - drawn_at > REFRESH_S:
                drawn_at = time.monotonic()
                live.update(table_of(so_far), refresh=True)


def table_of(so_far: Mapping[str, str]) -> RenderableType:
    table = Table(expand=True)
    for name in so_far:
        table.add_column(name, ratio=1)
    # As Text, since rich would read brackets in a plain string as markup.
    table.add_row(*(Text(text) for text in so_far.values()))
    return table
