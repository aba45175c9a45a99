"""What an actor needs of a rollout engine. Implementations: hf_engine.py, vllm_engine.py,
server/server_engine.py, a fake in the tests."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from protocol.messages import Finish, GroupOrder, Sampling


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token sequence."""

    ids: np.ndarray
    """[T] int32, end token included."""
    logprobs: np.ndarray
    """[T] float32 under the distribution the tokens were drawn from."""
    entropies: np.ndarray | None
    """[T] float32 entropy of that distribution in nats, if the engine computes it."""
    trained: np.ndarray | None = None
    """[T] uint8, 1 for a sampled token, 0 for one that an environment put between two turns; None if all are 1."""
    finish: Finish
    """Whether it ended itself or ran into the cap."""


class EndedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion whose decoding has ended; others of its order may still be decoded."""

    group: int
    """Its group's place in the order."""
    index: int
    """Its place in the group."""
    completion: Completion
    """What was sampled."""


Progress = Callable[[Sequence[EndedCompletion]], None]
"""Called every few tokens, with the completions that have ended since."""


def in_order(groups: Sequence[GroupOrder], ended: Iterable[EndedCompletion]) -> list[list[Completion]]:
    """Completions in the order in which they ended -> groups x G."""
    found = {(one.group, one.index): one.completion for one in ended}
    return [[found[group, index] for index in range(len(order.seeds))] for group, order in enumerate(groups)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner compares in the handshake."""

    engine: str
    """`hf`, `vllm` or `vllm_server`."""
    base_digest: str
    """sha256 of the frozen base."""
    tokenizer_digest: str
    """sha256 of the tokenizer."""
    lora_digest: str
    """sha256 of the adapter layout."""


class Engine(Protocol):
    """Samples completions from the base with the adapter that was installed last."""

    @property
    def identity(self) -> Identity: ...

    def install(self, version: int, adapter: bytes) -> None:
        """Sample from this adapter (a safetensors file) from now on."""
        ...

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """Decode the groups together: groups x G completions, a function of the arguments and the adapter alone."""
        ...

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """One turn of conversations, each named by group id and seed. As `generate`; but what was computed of the turns
        before is used again, and draws go on where they ended. From the second turn on a group has one seed, and its
        prompt is all that comes before the turn. `sleep` ends all conversations."""
        ...

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[n + 1] ids -> [n] fp32 log-probs of all but the first, at temperature 1, under what is installed."""
        ...

    def sleep(self) -> None:
        """Free memory of the card for the learner; keep what is needed to go on."""
        ...

    def wake(self) -> bool:
        """Take the memory again; True if weights had left the card, so that the canary must check them again."""
        ...
