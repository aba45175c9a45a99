"""Several turns as token ids: what a chat template puts between what the model writes.

    prompt    ... question | what reset says, the end of the message, the opening of the reply | turn 1 <end>
              | the tools' answers as the template shows them, the opening of the reply | turn 2 <end> | ...

The learner renders the prompt up to the question's end. What is between the bars is rendered here, with the template,
and tokenised by itself; sampled ids are never tokenised again. So the conversation is what the model saw, token by
token, whatever the template would make of the text of earlier turns. A template that would show an earlier turn in
another way once a later one is there is refused: the model would be asked about a conversation that it never had.

The form of a call is what the template itself writes for one: a JSON object with a name and arguments, between two
marks (`<tool_call>` in most). Text that does not parse is no call, nor is what the model writes in its thoughts. Left
out: templates with calls in another form.

For an agent the prompt is only the first token; the rest of its first messages takes the place of what `reset` says. An
agent may add any messages after a turn, so only then is it known whether the template would rewrite the turn.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.errors import ModelError
from shared.model.prompt import OBSERVED, THINKING, Message, Prompter

PROBE_NAME, PROBE_KEY, PROBE_VALUE = "tool_probe", "argument_probe", "value_probe"
QUESTION: Message = {"role": "user", "content": "A question."}
THOUGHT = "<think>\nA thought.\n</think>\n\nA reply."
CHECKED_TURNS = 4
Call = tuple[str, dict[str, Any]]
"""Name of a tool, arguments by name."""


def probe(name: str = PROBE_NAME) -> Message:
    """A call."""
    return {"type": "function", "function": {"name": name, "arguments": {PROBE_KEY: PROBE_VALUE}}}


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How the template writes a call."""

    opening: str
    """What stands before the JSON; may be empty."""
    name: str
    """Key of the tool's name."""
    arguments: str
    """Key of its arguments."""

    def calls(self, text: str) -> Iterator[Call]:
        """All calls of a turn, in order, from the end of its thoughts to where another one is opened."""
        place = end_of_thoughts(text)
        while (found := text.find(self.opening, place)) >= 0 and THINKING[0] not in text[place:found]:
            start = found + len(self.opening)
            start += len(text[start:]) - len(text[start:].lstrip())
            try:
                given, place = json.JSONDecoder().raw_decode(text, start)
                # Half a character, or a number of a hundred digits: JSON takes it, the message to the tool does not.
                msgspec.msgpack.encode(given)
            except (ValueError, OverflowError, RecursionError):
                given, place = None, start
            if isinstance(given, dict) and isinstance(given.get(self.name), str):
                arguments = given.get(self.arguments)
                yield given[self.name], arguments if isinstance(arguments, dict) else {}
            if not self.opening:
                return

    def before(self, text: str) -> str:
        """What a turn that calls says first, its thoughts included."""
        end = end_of_thoughts(text)
        return text[:end] + (text[end:].partition(self.opening)[0] if self.opening else "")


def end_of_thoughts(text: str) -> int:
    """Where the last thought ends. The prompt may have opened it, so only its end is looked for."""
    end = text.rfind(THINKING[1])
    return 0 if end < 0 else end + len(THINKING[1])


class Conversation:
    """Turns with one model."""

    def __init__(self, prompter: Prompter, max_turns: int) -> None:
        """ModelError if the template cannot be used for several turns."""
        self.prompter = prompter
        self.form = call_form(prompter)
        self.tail = prompter.rendered(
            [{"role": "user", "content": f"A question.{OBSERVED}"}], opens_reply=True
        ).partition(OBSERVED)[2]
        refuse_rewriting(prompter, min(max_turns, CHECKED_TURNS))

    def opening_ids(self, observation: str) -> list[int]:
        """What comes between the question and the first turn."""
        return self.prompter.ids(observation + self.tail)

    def calls(self, ids: Sequence[int]) -> list[Call]:
        """What a turn asks for."""
        return list(self.form.calls(self.spoken(ids)))

    def before_calls(self, ids: Sequence[int]) -> str:
        """What a turn that calls says first."""
        return self.form.before(self.spoken(ids))

    def spoken(self, ids: Sequence[int]) -> str:
        return self.prompter.as_the_model_sees([token for token in ids if token not in self.prompter.end_ids])

    def answer_ids(self, tools: Sequence[str], answers: Sequence[str]) -> list[int]:
        """What comes between a turn that called these tools and the next one."""
        said: list[Message] = [
            {"role": "tool", "name": name, "content": answer} for name, answer in zip(tools, answers, strict=True)
        ]
        return added_ids(self.prompter, said, calls=tools)


def added_ids(prompter: Prompter, said: Sequence[Message], *, calls: Sequence[str], turn: int = 1) -> list[int]:
    """What comes between a turn with these calls and the next one, if these messages are put between. ModelError if
    the template would then show the turn in another way."""
    spoken: Message = {"role": "assistant", "content": THOUGHT}
    asked = [QUESTION, spoken | ({"tool_calls": [probe(name) for name in calls]} if calls else {})]
    before = prompter.rendered(asked, opens_reply=False)
    after = prompter.rendered([*asked, *said], opens_reply=True)
    ends = [prompter.as_the_model_sees([token]) for token in prompter.end_ids]
    length = max((before.rfind(end) + len(end) for end in ends if end in before), default=len(before))
    if not after.startswith(before[:length]):
        raise ModelError(rewriting(prompter, turn, turn + 1))
    return prompter.ids(after[length:])


def call_form(prompter: Prompter) -> CallForm:
    """Found by having the template write a call."""
    asked = prompter.rendered([QUESTION], opens_reply=True)
    text = prompter.rendered(
        [QUESTION, {"role": "assistant", "content": "", "tool_calls": [probe()]}], opens_reply=False
    )
    first = len(asked) if text.startswith(asked) else 0
    for start in (place for place in range(first, len(text)) if text[place] == "{"):
        try:
            given = json.JSONDecoder().raw_decode(text, start)[0]
        except ValueError:
            continue
        keys = {
            PROBE_NAME if value == PROBE_NAME else "arguments": key for key, value in given.items() if is_probe(value)
        }
        if len(keys) == 2:
            # Some templates write an empty thought before the call; what the model thinks is no part of the form.
            opening = text[first:start].rpartition(THINKING[1])[2].strip()
            return CallForm(opening=opening, name=keys[PROBE_NAME], arguments=keys["arguments"])
    raise ModelError(
        f"The chat template of {prompter.name} shows no tool calls as JSON, so the model's calls cannot be read; use a"
        " model with a template for tools."
    )


def is_probe(value: object) -> bool:
    return value in (PROBE_NAME, {PROBE_KEY: PROBE_VALUE})


def refuse_rewriting(prompter: Prompter, max_turns: int) -> None:
    """ModelError unless the template shows every turn as it did when it was the last one."""
    messages: list[Message] = [QUESTION]
    shown = [prompter.rendered(messages, opens_reply=True)]
    for turn in range(1, max_turns + 1):
        thought = f"<think>\nThought {turn}.\n</think>\n\nTurn {turn}."
        messages = [*messages, {"role": "assistant", "content": thought, "tool_calls": [probe()]}]
        spoken = prompter.rendered(messages, opens_reply=False)
        messages = [*messages, {"role": "tool", "name": PROBE_NAME, "content": f"Answer {turn}."}]
        if turn < max_turns:
            shown.append(prompter.rendered(messages, opens_reply=True))
            if not shown[turn].startswith(spoken):
                raise ModelError(rewriting(prompter, turn, turn + 1))
        for earlier, text in enumerate(shown[:turn]):
            if not spoken.startswith(text):
                raise ModelError(rewriting(prompter, max(earlier, 1), turn))


def rewriting(prompter: Prompter, earlier: int, later: int) -> str:
    return (
        f"The chat template of {prompter.name} shows turn {earlier} in another way once turn {later} is there, so a"
        " conversation cannot be continued token by token; use a template that only adds to what is there, or set"
        " environment.max_turns to 1."
    )
