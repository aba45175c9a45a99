"""A chat with base and trained policy for the page, in a process that can be killed: JSON lines in, JSON lines out.

    in     {"text": "What is 3 + 4?"}        a question; an empty text starts over
    out    {"names": ["base", "step 40"]}    once, when the models are loaded
           {"question": "What is 3 + 4?"}    as it was asked; empty: what was said before is forgotten
           {"name": "base", "text": "7"}     a reply so far, several times a second, and whole at the end
           {"problem": "..."}                why there is no reply
           {"done": true}                    the next question may come

Its output so far is the whole conversation, so a reloaded page shows it again. Both replies grow at the same time, one
token of each after another, as those of `generate --chat` do. It ends with its input.
Usage: python -m launch.ui.chat_process RUN CHECKPOINT MAX_NEW_TOKENS TEMPERATURE      (0 tokens: as in training)
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.commands.chat import Conversation, open_conversations, start_replies
from launch.commands.generate import open_policy
from protocol.messages import Sampling
from shared.errors import UserError
from shared.process.entry_point import keep_to_itself
from shared.process.parent_death import die_with_parent

SHOW_S = 0.1
SEED = 0


def main(run: str, checkpoint: str, cap: str, temperature: str) -> int:
    die_with_parent()
    keep_to_itself()
    try:
        config, chosen = open_policy(Path(run), False, checkpoint)
        conversations = open_conversations(config, chosen)
    except UserError as error:
        tell(problem=str(error))
        return 2
    most = int(cap) or config.rollout.max_new_tokens
    chat(conversations, sys.stdin, Sampling(temperature=float(temperature), max_new_tokens=most))
    return 0


def chat(conversations: Sequence[Conversation], lines: Iterable[str], sampling: Sampling) -> None:
    tell(names=[each.name for each in conversations])
    for line in lines:
        question = json.loads(line)["text"].strip()
        tell(question=question)
        if question:
            answer(conversations, question, sampling)
        else:
            for each in conversations:
                each.start_over()
        tell(done=True)


def answer(conversations: Sequence[Conversation], question: str, sampling: Sampling) -> None:
    try:
        growing = start_replies(conversations, question, sampling, SEED)
        replies, shown = dict.fromkeys(growing, ""), time.monotonic()
        while growing:
            for name, texts in list(growing.items()):
                text = next(texts, None)
                if text is None:
                    del growing[name]
                    tell(name=name, text=replies[name])
                else:
                    replies[name] = text
            if time.monotonic() - shown > SHOW_S:
                shown = time.monotonic()
                for name in growing:
                    tell(name=name, text=replies[name])
    except UserError as error:
        tell(problem=str(error))


def tell(**row: Any) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
