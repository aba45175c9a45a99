"""rollouts.jsonl: groups of each step, every token with its figures. The learner writes it, the reader decodes it.

    {"bytes":      4012,"step":5, ... ,"prompt": ... ,"samples":[ ... ]}        one group, one line

`bytes` is the length of the line, its newline included, so a reader goes from line to line without reading them. What
an index needs (`GroupHead`) comes before the prompt, so it is decoded from the first few hundred bytes.

Text of tokens is stored beside their ids. A run may be read on a machine that does not have its tokenizer, or years
later, and a piece takes as many bytes as a number. A character that is split between tokens has U+FFFD in each.

    logprob    log mu, of the actor            gap    log pi - log mu, of the learner before the update
    ratio      exp(gap)                        mismatch    |gap|

The gap is stored and not log pi, since it is small and its digits count. Only a warm start, whose answers no actor
wrote, has log pi itself, as `written`. Left out on purpose: prompts' token ids, and whatever follows from other files.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
import numpy as np

Fate = Literal["trained", "idle", "quarantined"]
"""What became of a group. `idle`: it taught nothing, because all its kept scores are equal."""
START = b'{"bytes":'
DIGITS = 10
"""Of the length, padded with spaces."""
OTHER_NEWLINES = "\x85\u2028\u2029"
"""JSON has them as they are, and Python's splitlines() ends a line at them."""
BEFORE_PROMPT, BEFORE_SAMPLES = b',"prompt":', b',"samples":'
"""End the head, and the head with prompt and answer. They cannot occur in a text, where quotes are escaped."""
Values = list[float | None]
Record = TypeVar("Record")


class GroupHead(msgspec.Struct, frozen=True, kw_only=True):
    """What can be told of a group without its texts. G samples."""

    step: int
    """As in metrics.jsonl, from 1."""
    group_id: str
    """Of the order: `train/000004/0003`."""
    task: str
    """16 hex digits, from the prompt's ids and the task's columns: the same in all steps."""
    version: int
    """Of the policy that sampled it."""
    fate: Fate
    """What became of it."""
    rewards: tuple[float, ...]
    """[G] all parts, weighted."""
    advantages: tuple[float | None, ...]
    """[G]; None where a sample was not trained on."""
    outcomes: tuple[str, ...]
    """[G] what the verifier found."""
    lengths: tuple[int, ...]
    """[G] sampled tokens."""

    @property
    def stale(self) -> int:
        """Updates between the policy that sampled it and the one that learned from it."""
        return max(0, self.step - 1 - self.version)

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards."""
        return float(np.std(self.rewards)) if self.rewards else 0.0


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a completion: the model's own, or what an environment put after it."""

    sampled: bool
    """Whether the model wrote it."""
    tokens: int
    """How many."""
    text: str
    """Without special tokens."""


class RolloutSample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of T tokens."""

    text: str
    """Without special tokens."""
    turns: tuple[Turn, ...] | None
    """None without an environment."""
    ids: list[int]
    """[T]"""
    pieces: list[str]
    """[T] text of each token, special ones too."""
    outcome: str
    """What the verifier found."""
    reward: float
    """All parts, weighted."""
    rewards: dict[str, float]
    """Each part, unweighted; empty if the score is the only one."""
    extras: dict[str, str] = {}
    """What reward functions gave to log_extra."""
    finish: str
    """Why it ended: `stop` or `length`."""
    advantage: float | None
    """None if it was not trained on."""
    kept: bool
    """Whether it counts in the means of its group."""
    logprob: Values
    """[T] of the actor; 0 where the token was not sampled, None in a warm start, whose answers no actor wrote."""
    gap: Values | None
    """[T] the learner's log-prob minus the actor's; None where the learner computed none, and in a warm start."""
    written: Values | None = None
    """[T] the learner's log-prob itself in a warm start; None where it computed none, and in other runs."""
    entropy: Values | None
    """[T] nats; None if the engine does not tell."""
    mask: list[int] | None
    """[T] 1 for a token that carried gradient; None if the sample was not trained on."""

    def sampled(self) -> list[bool]:
        """[T] the model's own tokens."""
        if self.turns is None:
            return [True] * len(self.ids)
        return [turn.sampled for turn in self.turns for _ in range(turn.tokens)]

    def own(self, values: Values | None) -> Values:
        """[T] the same, but None where an environment put the token: 0 there would read as probability 1."""
        pairs = zip(values or [None] * len(self.ids), self.sampled(), strict=False)
        return [value if sampled else None for value, sampled in pairs]

    def learner(self) -> Values:
        """[T] log-probs of the learner."""
        if self.written is not None:
            return self.written
        pairs = zip(self.logprob, self.gap or [None] * len(self.ids), strict=False)
        return [None if log is None or gap is None else log + gap for log, gap in pairs]

    def likelihood(self) -> Values:
        """[T] log-probs of the actor, or of the learner where no actor wrote the answer."""
        return self.logprob if self.written is None else self.written

    def ratio(self) -> Values:
        """[T] pi over mu."""
        return [None if gap is None else math.exp(min(gap, 700.0)) for gap in self.gap or [None] * len(self.ids)]

    def mismatch(self) -> Values:
        """[T] |log pi - log mu|."""
        return [None if gap is None else abs(gap) for gap in self.gap or [None] * len(self.ids)]

    def push(self) -> Values:
        """[T] the advantage where a token carried gradient, else 0: up or down, and how much."""
        if self.mask is None or self.advantage is None:
            return [None] * len(self.ids)
        return [self.advantage * carried for carried in self.mask]


class GroupTask(GroupHead, frozen=True, kw_only=True):
    """A group without its completions."""

    prompt: str
    """As the model saw it, without special tokens."""
    answer: str
    """The gold answer; empty if the task has none."""


class RolloutGroup(GroupTask, frozen=True, kw_only=True):
    """One group in full."""

    samples: tuple[RolloutSample, ...]
    """[G]"""


def task_key(prompt_ids: np.ndarray, columns: Mapping[str, str]) -> str:
    """What a task is known by. Its prompt is not enough: games begin with the same words, and an agent writes them all.

    prompt_ids: [Tp]"""
    whole = np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes() + msgspec.json.encode(sorted(columns.items()))
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def pack_group(group: RolloutGroup) -> bytes:
    """The line, with its newline."""
    body = msgspec.json.encode(group)
    for character in OTHER_NEWLINES:
        body = body.replace(character.encode(), rb"\u%04x" % ord(character))
    size = len(START) + DIGITS + 1 + len(body)
    return START + b"%*d," % (DIGITS, size) + body[1:] + b"\n"


def line_bytes(start: bytes) -> int:
    """From the first bytes of a line; 0 if it is not one of ours."""
    number = start[len(START) : len(START) + DIGITS]
    return int(number) if start.startswith(START) and number.strip().isdigit() else 0


def unpack_head(start: bytes) -> GroupHead | None:
    """From the first bytes of a line, as many as hold the head; None if they do not, or cannot be read."""
    end = start.find(BEFORE_PROMPT)
    return None if end < 0 else decoded(start[:end] + b"}", GroupHead)


def unpack_task(start: bytes) -> GroupTask | None:
    """The same with prompt and answer."""
    end = start.find(BEFORE_SAMPLES)
    return None if end < 0 else decoded(start[:end] + b"}", GroupTask)


def unpack_group(line: bytes) -> RolloutGroup | None:
    """None if the line cannot be read."""
    return decoded(line, RolloutGroup)


def decoded(data: bytes, record: type[Record]) -> Record | None:
    try:
        return msgspec.json.decode(data, type=record)
    except (ValueError, RecursionError):
        return None
