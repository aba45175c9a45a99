"""What a run computes on a card, in its largest parts: a micro-batch of the learner, and the orders of the actor.

    completions  as long as they may be         prompts  as long as tasks.max_prompt_tokens allows
    micro-batch  filled as learner/update/microbatch.py fills it
    order        `groups` prompts with `samples` completions each, of which `width` are decoded at once

With an environment, a completion is a conversation. In a later turn each is a prompt of its own: one may be as long as
all that a conversation may have, while another has its whole cap before it. Keys and values of all of them are kept
(actor/engines/turns.py).

No torch here. The parts are run in launch/card/phases.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from actor.engines.vllm_options import token_bytes
from shared.config.data import TasksConfig
from shared.config.environment import EnvironmentConfig
from shared.config.model import LoraConfig, ModelConfig
from shared.config.processes import ActorConfig, ComputeConfig, EvalConfig, rows_at_once
from shared.config.training import BatchConfig
from shared.config.tree import Config, RolloutConfig

VALUE_BYTES = {"fp32": 4}
"""Of one value in the number type of a run; two in every other type."""


@dataclass(frozen=True, kw_only=True)
class CardWork:
    """The sections of the configuration that decide about memory."""

    model: ModelConfig
    lora: LoraConfig
    tasks: TasksConfig
    rollout: RolloutConfig
    actor: ActorConfig
    batch: BatchConfig
    compute: ComputeConfig
    eval: EvalConfig
    environment: EnvironmentConfig
    groups: int
    """Most groups of a step."""

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self.tasks.max_prompt_tokens

    @property
    def shares_card(self) -> bool:
        """Whether both processes are on one card."""
        return self.compute.learner_card == self.compute.actor_card


def card_work(config: Config) -> CardWork:
    compute = config.compute
    return CardWork(
        model=config.model,
        lora=config.lora,
        tasks=config.tasks,
        rollout=config.rollout,
        actor=config.actor,
        batch=config.batch,
        compute=structs.replace(compute, dtype="bf16" if compute.dtype == "auto" else compute.dtype),
        eval=config.eval,
        environment=config.environment,
        groups=config.most_prompts,
    )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The largest one of a step."""

    prompts: int
    prompt: int
    """Tokens of each."""
    completions: int
    completion: int
    """Tokens of each; all but the last are fed."""
    is_whole: bool
    """Whether it is the whole step."""

    @property
    def fed(self) -> int:
        return max(1, self.completion - 1)


def largest_micro_batch(work: CardWork) -> MicroBatch:
    group, cap = work.rollout.group, work.rollout.max_new_tokens
    fed = max(1, cap - 1)
    whole, left = divmod(work.batch.token_budget, work.prompt + group * fed)
    more = max(0, left - work.prompt) // fed
    if whole >= work.groups:
        prompts, completions = work.groups, work.groups * group
    else:
        prompts, completions = whole + (more > 0), whole * group + more
    return MicroBatch(
        prompts=max(1, prompts),
        prompt=work.prompt,
        completions=max(1, completions),
        completion=cap,
        is_whole=whole >= work.groups,
    )


@dataclass(frozen=True, kw_only=True)
class LargestOrder:
    """What the actor is asked for at once."""

    name: str
    """`rollout` or `evaluation`."""
    groups: int
    samples: int
    """Completions of each."""
    prompt: int
    """Tokens of each."""
    cap: int
    """Tokens of a completion."""
    width: int
    """Completions that are decoded at once, at most."""
    kept: int = 0
    """Conversations whose keys and values are kept, each as long as `prompt`."""
    known: int = 0
    """Tokens at the beginning of a prompt that were computed in an earlier turn."""

    @property
    def tokens(self) -> int:
        """With keys and values in memory. A prompt counts once if all its completions are decoded at once."""
        prompts = self.groups if self.groups * self.samples <= self.width else self.width
        return (prompts + self.kept) * self.prompt + self.width * self.cap


def largest_orders(work: CardWork, facts: Mapping[str, Any]) -> list[LargestOrder]:
    """The larger one of an evaluation, if there is one, and that of a step. facts: the model's config.json."""
    rollout, evaluation = work.rollout, work.eval
    groups = min(rollout.groups_per_order or work.groups, work.groups)
    found = [order(work, facts, "rollout", groups, rollout.group, rollout.max_new_tokens)]
    if evaluation.problems:
        cap = evaluation.longest_completion(rollout.max_new_tokens)
        sizes = evaluation.largest_orders(rollout.prompts * rollout.group)
        both = [order(work, facts, "evaluation", count, samples, cap) for count, samples in sizes]
        found.insert(0, max(both, key=lambda one: one.tokens))
    return found


def order(work: CardWork, facts: Mapping[str, Any], name: str, groups: int, samples: int, cap: int) -> LargestOrder:
    in_turns = work.environment.in_turns
    prompt, count = work.prompt + cap if in_turns else work.prompt, groups * samples
    cached = (prompt + cap) * token_bytes(dict(facts), VALUE_BYTES.get(work.compute.dtype, 2))
    width = rows_at_once(work.actor.max_sequences, cached, facts["vocab_size"], on_card=True)
    return LargestOrder(
        name=name,
        groups=count if in_turns else groups,
        samples=1 if in_turns else samples,
        prompt=prompt,
        cap=cap,
        width=min(width, count),
        kept=count if in_turns else 0,
        # Half of what follows the question is an environment's last answer.
        known=work.prompt + cap // 2 if in_turns else 0,
    )
