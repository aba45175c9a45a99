"""Voices that are asked the same questions and each remember what they themselves answered."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager

from actor.engines.stream import stream
from protocol.messages import Sampling
from shared.errors import DataError
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.seeding import derive

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
