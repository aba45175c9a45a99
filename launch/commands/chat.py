"""`generate --chat`: a conversation in the terminal, base and trained policy side by side, as they speak.

    /new    begin anew          /quit, Ctrl-D    leave          Ctrl-C    cut an answer short

Our own policy speaks, whatever engine the run samples with: base and adapter are then one model in memory.
On a terminal that is wide enough both answer at once, in two columns; elsewhere one after the other, as plain text.

Answers as they grow: in columns that grow together, or one after the other as plain text.

An answer may hold escape codes, which a terminal must not obey.

Voices that are asked the same questions and each remember what they themselves answered.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actor.engines.stream import stream
from launch.commands.generate import open_policy
from protocol.messages import Sampling
from protocol.plain_text import for_terminal
from shared.config.tree import Config
from shared.errors import ConfigError, DataError
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.process.determinism import cpu_environment
from shared.seeding import derive

Spoken = Mapping[str, Generator[str, None, None]]
"""Who speaks -> the answer so far, again and again."""
Show = Callable[[Spoken], None]

REFRESH_S = 0.05


def one_by_one(spoken: Spoken) -> None:
    """Only what is new is printed. A text may also change behind its end, when a character becomes whole."""
    for name, texts in spoken.items():
        print(f"{name}: " if len(spoken) > 1 else "", end="", flush=True)
        shown = ""
        for text in map(for_terminal, texts):
            if text.startswith(shown):
                print(text[len(shown) :], end="", flush=True)
                shown = text
        print()


def columns_of(spoken: Spoken, console: Console | None = None) -> None:
    """All speak in turn, a token each, until the last has ended. console: the terminal, if none is given."""
    so_far = dict.fromkeys(spoken, "")
    going, drawn = dict(spoken), 0.0
    with Live(table_of(so_far), console=console or Console(highlight=False), auto_refresh=False) as live:
        while going:
            for name, texts in list(going.items()):
                text = next(texts, None)
                if text is None:
                    del going[name]
                else:
                    so_far[name] = for_terminal(text)
            if not going or time.monotonic() - drawn > REFRESH_S:
                drawn = time.monotonic()
                live.update(table_of(so_far), refresh=True)


def table_of(so_far: Mapping[str, str]) -> RenderableType:
    """Side by side; brackets in an answer are no markup."""
    table = Table(expand=True)
    for name in so_far:
        table.add_column(name, ratio=1)
    table.add_row(*(Text(text) for text in so_far.values()))
    return table


if TYPE_CHECKING:
    from launch.commands.chat import Voice
    from learner.durable.checkpoint import Checkpoint

WIDE = 80
HELP = "/new begins anew, /quit or Ctrl-D leaves, Ctrl-C cuts an answer short"


def run_command(
    *,
    directory: Path | None,
    base: bool,
    checkpoint: str,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    out: Path | None,
) -> int:
    """Until the user leaves."""
    if out is not None:
        raise ConfigError("--out does not go with --chat; use --in FILE --out FILE to have answers written.")
    config, chosen = open_policy(directory, base, checkpoint)
    os.environ.update(cpu_environment(config.compute.actor_threads, config.compute.blas))
    sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens or config.rollout.max_new_tokens)
    found = voices(config, chosen)
    print(f"{' and '.join(voice.name for voice in found)}; {HELP}", file=sys.stderr)
    converse(found, questions(), sampling, seed)
    return 0


def voices(config: Config, checkpoint: "Checkpoint | None") -> list["Voice"]:
    """The base, and the trained policy if there is one: one model, its adapter on or off."""
    from launch.commands.chat import Voice
    from learner.state import ADAPTER
    from shared.model.adapter_file import install_adapter
    from shared.model.base_cache import cached_base
    from shared.model.policy import load_policy, pick_device
    from shared.model.prompt import load_prompter
    from shared.process.determinism import pin_torch

    pin_torch(config.compute.actor_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder)
    policy = load_policy(base, config.model, config.lora, pick_device(config.compute.device))
    system = config.tasks.system_prompt
    opening = [{"role": "system", "content": system}] if system else []
    found = [Voice("base", policy, prompter, opening, policy.adapter.switched_off)]
    if checkpoint is not None:
        install_adapter(policy.adapter, checkpoint.files[ADAPTER])
        policy.adapter.fold()
        found.append(Voice(f"step {checkpoint.step}", policy, prompter, opening, nullcontext))
    return found


def questions() -> Iterator[str]:
    """Typed, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    # Arrow keys and a history, where the system has them.
    import readline  # noqa: F401

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def converse(found: Sequence["Voice"], asked: Iterable[str], sampling: Sampling, seed: int) -> None:
    """Question by question."""
    wide = sys.stdout.isatty() and os.get_terminal_size().columns >= WIDE
    show = columns_of if wide and len(found) > 1 else one_by_one
    for line in asked:
        match line.strip():
            case "":
                continue
            case "/quit" | "/exit":
                return
            case "/new":
                for voice in found:
                    voice.begin_anew()
            case question:
                answer(found, question, sampling, seed, show)


def answer(found: Sequence["Voice"], question: str, sampling: Sampling, seed: int, show: Show) -> None:
    """One question to all; cut short by Ctrl-C, refused if it does not fit."""
    spoken = {voice.name: voice.answer(question, sampling, seed) for voice in found}
    try:
        show(spoken)
    except KeyboardInterrupt:
        print("\n(cut short)")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        for texts in spoken.values():
            texts.close()


UNFINISHED = "\ufffd"
"""What a decoder shows of a character of which only the first bytes are there."""
Turns = list[dict[str, str]]


class Voice:
    """One policy in one conversation."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        prompter: Prompter,
        opening: Turns,
        speaking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """opening: the system prompt, if there is one. speaking: holds the adapter as this voice wants it."""
        self.name = name
        self.policy = policy
        self.prompter = prompter
        self.opening = opening
        self.speaking = speaking
        self.turns: Turns = [*opening]

    def begin_anew(self) -> None:
        """Forget the conversation."""
        self.turns = [*self.opening]

    def answer(self, question: str, sampling: Sampling, seed: int) -> Generator[str, None, None]:
        """The answer so far, after every token. What was said is remembered, also if it was cut short."""
        prompt = self.prompter.turn_ids([*self.turns, {"role": "user", "content": question}])
        self.refuse_if_full(len(prompt) + sampling.max_new_tokens)
        tokens = stream(self.policy, prompt, self.prompter.end_ids, sampling, derive(seed, "chat", len(self.turns)))
        ids: list[int] = []
        try:
            while (token := self.next(tokens)) is not None:
                ids.append(token)
                yield self.prompter.text(ids).rstrip(UNFINISHED)
        finally:
            said = self.prompter.text(ids).rstrip(UNFINISHED)
            self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": said}]

    def next(self, tokens: Iterator[int]) -> int | None:
        """Other voices may speak between two tokens of this one."""
        with self.speaking():
            return next(tokens, None)

    def refuse_if_full(self, needed: int) -> None:
        """What does not fit is not cut in silence."""
        room = self.policy.config.max_position_embeddings
        if needed > room:
            raise DataError(
                f"This conversation needs {needed} tokens, the answer's cap included, and the model has room for"
                f" {room}; begin anew with /new, or start with a smaller --max-new-tokens."
            )
