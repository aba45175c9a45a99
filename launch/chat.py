"""`generate --chat`: a conversation in the terminal, base and trained policy side by side, as they speak.

    /new    begin anew          /quit, Ctrl-D    leave          Ctrl-C    cut an answer short

Our own policy speaks, whatever engine the run samples with: base and adapter are then one model in memory.
On a terminal that is wide enough both answer at once, in two columns; elsewhere one after the other, as plain text.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from launch.chat_screen import Show, columns_of, one_by_one
from launch.generate import open_policy
from protocol.messages import Sampling
from shared.config.tree import Config
from shared.errors import ConfigError, DataError
from shared.process.determinism import cpu_environment

if TYPE_CHECKING:
    from launch.conversation import Voice
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
    from launch.conversation import Voice
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
