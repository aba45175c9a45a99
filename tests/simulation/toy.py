"""Training as one exact function of what was consumed, in the shape of the real parts around it.

    value(s + 1) = sha256(value(s), step, each group's id, tokens and scores, in order)

The 32 bytes of the value are the adapter: 16 numbers of 16 bits in fp32. So one group too many, too few, changed, or
in another place gives another final adapter, and the real publisher, checkpoint state and wire carry it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from actor.engines.engine import Completion, Identity, Progress
from learner.objective.batch import Sample, TrainSample, flat
from learner.objective.judged import Collected
from learner.orders.order_check import OrderCheck
from learner.tasks.tasks import Task
from learner.update.mismatch import Mismatch
from protocol.messages import FilledOrder, Finish, GroupOrder, Sampling
from shared.model.adapter_file import digest
from shared.run.files import FileParts
from tests.support.fakes import ended

IDENTITY = Identity(engine="toy", base_digest="a" * 64, tokenizer_digest="b" * 64, lora_digest="c" * 64)
RULES = "d" * 64
CHECK = OrderCheck(vocabulary=256, rewards=frozenset(), built_in=True)
STALE_LOGPROB = -50.0
TASKS = tuple(
    Task(prompt_ids=np.array([10 + index, 1, 2], np.int32), columns={"answer": str(index)}) for index in range(12)
)
NOTHING = np.empty(0, np.float32)
SOMETHING = TrainSample(
    sample=Sample(
        name="toy",
        prompt_ids=np.empty(0, np.int32),
        completion_ids=np.empty(0, np.int32),
        trained=NOTHING > 0,
        actor_logprobs=NOTHING,
        entropies=None,
        advantage=0.0,
    ),
    selected=NOTHING > 0,
    weight=0.0,
    penalties=NOTHING,
    in_kl=False,
)


class ToyAdapter:
    """An adapter of one layer without its model: A [1, 8] and B [8, 1]."""

    def __init__(self) -> None:
        self.pair = {"toy.lora_A": nn.Parameter(torch.zeros(1, 8)), "toy.lora_B": nn.Parameter(torch.zeros(8, 1))}

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name."""
        return self.pair


class ToyBase:
    """Frozen weights that are always whole: there are none."""

    def check(self) -> None:
        """Before a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ToyBatch:
    """The fields that the step report reads, and the filled orders themselves."""

    filled: Sequence[FilledOrder]
    """Of the step, in slot order."""
    samples: tuple[()] = ()
    """None is trained on by the real loss."""
    used: tuple[TrainSample, ...] = (SOMETHING,)
    """So that there is an update."""
    idle_groups: int = 0
    """Not counted."""
    response_tokens: int = 0
    """Not counted."""


class ToyBatches:
    """Hands the filled orders on."""

    def build(self, step: int, collected: Collected) -> ToyBatch:
        """As they came."""
        return ToyBatch(filled=collected.filled)


class ToyOptimizer:
    """Remembers what was consumed, and rides in the checkpoint as the real one's moments do."""

    def __init__(self) -> None:
        self.consumed: list[str] = []

    def state_parts(self) -> FileParts:
        """As JSON."""
        return (json.dumps(self.consumed).encode(),)

    def load_state_bytes(self, data: bytes) -> None:
        """The inverse."""
        self.consumed = json.loads(data)


class ToyUpdate:
    """Applies a batch to the adapter."""

    def __init__(self, adapter: ToyAdapter, optimizer: ToyOptimizer, work: Callable[[], None]) -> None:
        """work: lets an update's time pass."""
        self.adapter = adapter
        self.optimizer = optimizer
        self.work = work

    def apply(self, step: int, batch: ToyBatch) -> None:
        """Always None: there are no statistics of a real loss. The gate knows a stale adapter by its log-probs."""
        self.work()
        if any(group.logprobs.min() <= STALE_LOGPROB for group in flat(batch.filled)):
            raise Mismatch(f"Step {step + 1}: actor and learner differ.")
        chain = hashlib.sha256(value_of(self.adapter) + str(step).encode())
        for group in flat(batch.filled):
            self.optimizer.consumed.append(group.group_id)
            chain.update(group.group_id.encode() + group.completion_ids.tobytes() + repr(group.scores).encode())
        set_value(self.adapter, chain.digest())


def value_of(adapter: ToyAdapter) -> bytes:
    """The 32 bytes."""
    numbers = np.concatenate([p.detach().numpy().ravel() for p in adapter.parameters().values()])
    return numbers.astype("<u2").tobytes()


def set_value(adapter: ToyAdapter, value: bytes) -> None:
    """The inverse."""
    numbers = torch.from_numpy(np.frombuffer(value, "<u2").astype(np.float32))
    with torch.no_grad():
        for part, parameter in zip(numbers.split(8), adapter.parameters().values(), strict=True):
            parameter.copy_(part.view(parameter.shape))


class ToyEngine:
    """Tokens are a hash of seed, prompt and the adapter that is in place."""

    def __init__(self, work: Callable[[Callable[[], None]], None], stale: Callable[[], bool]) -> None:
        """work: lets a group's decoding time pass, with a word of progress in it. stale: whether the next order is
        filled from another adapter than it says."""
        self.work = work
        self.stale = stale
        self.identity = IDENTITY
        self.installed_sha256 = ""

    def install(self, version: int, adapter: bytes) -> None:
        """Its digest is all there is to know of it."""
        self.installed_sha256 = digest(adapter)

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """One completion a seed."""
        filled: list[list[Completion]] = []
        stale = self.stale()
        for row, group in enumerate(groups):
            samples = [self.completion(group, seed, sampling, stale) for seed in group.seeds]
            self.work(partial(progress, ended([samples], row)))
            filled.append(samples)
        return filled

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """Never asked: its completions have one turn."""
        raise NotImplementedError

    def completion(self, group: GroupOrder, seed: int, sampling: Sampling, stale: bool) -> Completion:
        """Made-up tokens."""
        adapter = "stale" if stale else self.installed_sha256
        drawn = hashlib.sha256(f"{seed} {adapter}".encode() + group.prompt_ids.tobytes()).digest()
        length = 1 + drawn[0] % sampling.max_new_tokens
        return Completion(
            ids=np.frombuffer(drawn, np.uint8, length, 1).astype(np.int32),
            logprobs=np.full(length, STALE_LOGPROB, np.float32)
            if stale
            else np.frombuffer(drawn, np.uint8, length, 9).astype(np.float32) * np.float32(-0.01),
            entropies=None,
            finish=Finish.LENGTH if length == sampling.max_new_tokens else Finish.STOP,
        )

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Never asked: the toy's policies have no canary."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Holds nothing."""

    def wake(self) -> bool:
        """Never left."""
        return False

    def memory(self) -> dict[str, Any]:
        """Holds nothing."""
        return {}


def begins_even(ids: list[int]) -> bool:
    """Right is an even first token; so half of the groups of two teach nothing."""
    return ids[0] % 2 == 0
