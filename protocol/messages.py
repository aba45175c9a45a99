"""Every message of the wire protocol, as frozen typed records.

Contract: README.md beside this file describes each message for an implementer in another language; a test compares the
two. Long lists of numbers (token ids, log-probs, entropies, adapter bytes) are numpy arrays; `codec.py` sends them as
raw bytes beside the msgpack body. Completions are token ids; their text is never sent to the learner.

Left out on purpose: advantages and losses (the learner computes them) and references to files (a peer may be remote).
Shapes: G completions in a group, T tokens of one completion, S = sum of T over the group's completions.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from protocol.limits import (
    MAX_COUNT,
    MAX_CREDITS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_SCORE,
    MAX_SEED,
    MAX_TEXT_CHARS,
)
from protocol.outcome import Outcome

PROTOCOL_VERSION = 11

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Key = Annotated[str, Meta(min_length=40, max_length=40)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Mark = Annotated[int, Meta(ge=0, le=MAX_SEED)]
# Every float has a lower and an upper bound, which also excludes NaN and infinity.
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Megabytes = Annotated[float, Meta(ge=0.0, le=1e9)]
Score = Annotated[float, Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
Texts = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
Scores = Annotated[tuple[Score, ...], Meta(min_length=1, max_length=MAX_ITEMS)]


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, gc=False):
    """Base of all messages; the class name is the tag on the wire. gc: no message refers to itself, and a step has many
    thousands of records, which Python would look at again and again."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of the records inside messages."""


class NewKey(Message, frozen=True, kw_only=True):
    """Actor -> learner: I was invited; accept this key of mine instead. Repeated until KeyAdded or Refused comes."""

    public: Key
    """Public key of the pair that the actor has made for itself."""


class KeyAdded(Message, frozen=True, kw_only=True):
    """Learner -> actor: your key is accepted from now on, and the invitation no more. Connect with your key."""


class Hello(Message, frozen=True, kw_only=True):
    """Actor -> learner: who I am and what I have. Repeated until Welcome or Refused comes."""

    actor_id: Name
    """Name of the actor; a restarted actor keeps it."""
    engine: Name
    """Rollout engine, for people and logs."""
    base_digest: Digest
    """sha256 over the frozen quantised base."""
    tokenizer_digest: Digest
    """sha256 over vocabulary, chat template and end ids."""
    lora_digest: Digest
    """sha256 over the adapter layout: names, shapes, scales."""
    rules_digest: Digest
    """sha256 over the sections [verifier], [rollout], [environment] of config.json: how a run samples and scores."""
    machine: Name | None
    """Actors with the same one pass adapters on to each other; nil for an actor that gets each from the learner."""
    mark: Mark
    """Mark of the last Welcome: the actor has read everything sent before it; 0 before the first."""
    version: Count | None
    """Version of the last Policy; nil before the first."""
    credits: Annotated[int, Meta(ge=1, le=MAX_CREDITS)]
    """Orders the actor accepts at once."""


class Welcome(Message, frozen=True, kw_only=True):
    """Learner -> actor: you have joined."""

    run_id: Name
    """The run; an actor exits when a later Welcome names another one."""
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)]
    """How often either side shows progress."""
    silence_s: Annotated[float, Meta(gt=0, le=86_400)]
    """After this long without a message the peer counts as dead."""
    mark: Mark
    """For the next Hello; new after each Policy or Order, so only an actor that read them can repeat it."""


class Refused(Message, frozen=True, kw_only=True):
    """Learner -> actor: you cannot join or stay, and what to do about it."""

    reason: Text
    """One sentence a user can act on."""


class Policy(Message, frozen=True, kw_only=True, gc=True, weakref=True):
    """Learner -> actor: the whole adapter at a version. Self-contained, so a late joiner needs only the newest."""

    # transport.py keeps the encoded form for as long as this object lives. msgspec has weak references only with gc.

    version: Count
    """Number of steps that made this adapter."""
    adapter: NDArray[np.uint8]
    """[bytes] uint8, a safetensors file; empty if another actor with the same `machine` gets it and passes it on."""
    sha256: Digest
    """Digest of that file."""
    canary_ids: NDArray[np.int32]
    """[n + 1] int32, tokens whose log-probs are compared after installing; empty if none are."""
    canary_logprobs: NDArray[np.float32]
    """[n] float32, log-prob of each of its tokens except the first under this version, at temperature 1."""


class Sampling(Record, frozen=True, kw_only=True):
    """How completions are sampled. No top-k or top-p: they would bias the importance ratio."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    """Softmax temperature; 0 takes the most likely token (evaluation)."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Limit of one completion; one that reaches it has Finish.LENGTH."""


class GroupOrder(Record, frozen=True, kw_only=True):
    """One prompt to complete G times."""

    group_id: Name
    """Unique for the life of the run: lane/step/slot, for example `train/000012/003`."""
    prompt_ids: NDArray[np.int32]
    """[Tp] int32, the chat template applied, ready for the model."""
    columns: Annotated[dict[Name, Text], Meta(max_length=MAX_KEYS)]
    """The task's columns for the verifier: `answer`, `question`, and the other columns of the data set."""
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """[G] one independent sampling seed per completion."""


class Order(Message, frozen=True, kw_only=True):
    """Learner -> actor: groups that are decoded together, so that decoding them again gives the same tokens."""

    order_id: Name
    """Unique for the life of the run: lane/step/u-number, for example `train/000012/u0000`."""
    policy_version: Count
    """The policy version to sample with, exactly."""
    sampling: Sampling
    """How to sample."""
    groups: Annotated[tuple[GroupOrder, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """The groups, in batch order."""
    votes: bool
    """Whether to compare the wrong final answers of each group, as maj@k needs it."""
    teacher: bool
    """Whether to ask the run's teacher how likely each sampled token is."""


class Group(Record, frozen=True, kw_only=True):
    """The scored completions of one prompt."""

    group_id: Name
    """As ordered."""
    prompt_ids: NDArray[np.int32]
    """[Tp] int32, as ordered."""
    completion_ids: NDArray[np.int32]
    """[S] int32, the completions one after another, end token included."""
    trained: NDArray[np.uint8] | None
    """[S] uint8, 1 for a sampled token, 0 for one that an environment put between two turns; None if all are 1."""
    lengths: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """[G] tokens of each completion; their sum is S."""
    logprobs: NDArray[np.float32]
    """[S] float32, log-prob of each token under the distribution it was sampled from; 0 where trained is 0."""
    entropies: NDArray[np.float32] | None
    """[S] float32, entropy of that distribution in nats, 0 where trained is 0; None if the engine reports none."""
    finishes: Annotated[tuple[Finish, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """[G] why each completion ended."""
    outcomes: Annotated[tuple[Outcome, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """[G] what the verifier found."""
    scores: Annotated[tuple[Score, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """[G] the verifier's score; 0.0 where the outcome is a fault (timeout, error, abstain)."""
    rewards: Annotated[dict[Name, Scores], Meta(max_length=MAX_KEYS)]
    """[G] by name, the additional rewards that the run configures, unweighted; 0.0 in a fault."""
    metrics: Annotated[dict[Name, Score], Meta(max_length=MAX_KEYS)] = msgspec.field(default_factory=dict[str, float])
    """What reward functions measured besides, as means over the completions; the metrics show it."""
    extras: Annotated[dict[Name, Texts], Meta(max_length=MAX_KEYS)] = msgspec.field(
        default_factory=dict[str, tuple[str, ...]]
    )
    """[G] by name, what reward functions wrote about each completion; the rollout log shows it."""
    votes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_ITEMS)] | None = None
    """[G] number of the wrong final answer that each completion gives, from 1 as they first appear; 0 if it is right or
    gives none. None if the order did not ask, or nothing can be compared."""
    teacher: NDArray[np.float32] | None = None
    """[S] float32, the teacher's log-prob of each token, 0 where trained is 0; None if the order did not ask."""


class Timings(Record, frozen=True, kw_only=True):
    """Time an actor spent on one order, and its memory."""

    wait_s: Seconds
    """Waiting for the lease."""
    swap_s: Seconds
    """Installing the adapter, and moving the base between card and host memory."""
    rollout_s: Seconds
    """Decoding."""
    verify_s: Seconds
    """Scoring."""
    memory_mb: Megabytes
    """Peak resident memory of the actor so far, in MiB."""
    card_allocated_mb: Megabytes
    """Peak of the order, in MiB of its card: tensors of the actor; 0 on a CPU."""
    card_reserved_mb: Megabytes
    """The same with what the actor keeps for later tensors."""
    card_driver_mb: Megabytes
    """What all processes use of that card at the end of the order, by its driver's count."""


class FilledOrder(Message, frozen=True, kw_only=True):
    """Actor -> learner: one order, filled."""

    order_id: Name
    """The order that is filled."""
    policy_version: Count
    """The policy version that was sampled with."""
    adapter_sha256: Digest
    """Digest of the adapter that was installed while sampling."""
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    """As ordered, in order."""
    timings: Timings
    """For the metrics."""


class Ack(Message, frozen=True, kw_only=True):
    """Learner -> actor: these groups are durable; drop them, and the credit is free again."""

    order_id: Name
    """The order whose groups are in the journal."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Either way: there was progress since the last one. A process that hangs does not send it."""

    phase: Name
    """What the sender is doing, for the peer's error message."""


class Drain(Message, frozen=True, kw_only=True):
    """Learner -> actor: no more orders will come; finish and leave."""


class Bye(Message, frozen=True, kw_only=True):
    """Either way: I am leaving on purpose."""

    reason: Text
    """Why."""


AnyMessage = (
    Hello | Welcome | Refused | Policy | Order | FilledOrder | Ack | Heartbeat | Drain | Bye | NewKey | KeyAdded
)
