"""Stand-ins of our own for the tests: tiny random models, policies over them, groups of made-up numbers."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from actor.engines.engine import Completion, EndedCompletion, Identity, Progress
from actor.scoring.scores import Scores, ScoresTogether
from actor.verifiers.verdict import ScoreJob, Verdict
from learner.orders.order_check import OrderCheck
from learner.orders.orders import build_orders
from learner.reports.rollout_log import Words
from learner.tasks.tasks import Task
from learner.update.publisher import policy_message
from protocol.messages import FilledOrder, Finish, Group, GroupOrder, Hello, Order, Outcome, Sampling
from protocol.messages import Policy as PolicyMessage
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.model import LoraConfig, ModelConfig
from shared.model.layers.sequences import Sequences
from shared.model.policy import Policy
from shared.model.prompt import Prompter
from shared.run.evaluation import Decoded, Evaluation, TaskResult, share_of
from tests.support.wire_examples import timings

Family = Literal["qwen2", "qwen3", "llama"]

FAMILIES: tuple[Family, ...] = ("qwen2", "qwen3", "llama")
VOCAB = 97
RANK = 4
RULES = "d" * 64
"""Digest of how a scripted run draws and judges."""
CHECK = OrderCheck(vocabulary=VOCAB, rewards=frozenset(), built_in=True)
"""What filled orders of a scripted run must fit."""
CPU = torch.device("cpu")


def tiny_model(
    folder: Path, family: Family = "qwen2", *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """A random model of two layers, spread widely enough that entropies differ."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[family](**shape)
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise)
    path = folder / f"{family}-{'tied' if tied else 'untied'}"
    model.to(dtype).save_pretrained(path)
    return path


def tiny_policy(
    checkpoint: Path,
    *,
    quantization: Literal["nf4", "none"] = "nf4",
    dequantize: Literal["auto", "once", "each_call"] = "auto",
    lora: LoraConfig | None = None,
    shaken: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """A policy over a model folder, its quantised base cached beside it; `shaken` gives A and B random values."""
    cache = str(checkpoint.parent / "cache")
    model = ModelConfig(path=str(checkpoint), cache_dir=cache, quantization=quantization, dequantize=dequantize)
    lora = lora or LoraConfig(rank=RANK, alpha=2.0 * RANK)
    policy = load_policy(cached_base(model), model, lora, CPU, dtype)
    policy.adapter.initialise(1)
    policy.adapter.requires_grad()
    if shaken:
        shake(policy, 1)
    return policy


def hidden_of(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    """[B, T] whole sequences of equal length -> [B, T, H]"""
    none = torch.zeros(0, dtype=torch.int64)
    sequences = Sequences(prompts=ids, lengths=torch.full((len(ids),), ids.shape[1]), completions=None, owner=none)
    return policy.hidden(sequences).unflatten(0, ids.shape)


def shake(policy: Policy, seed: int) -> None:
    """Move A and B to random values, so that every LoRA gradient is alive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.adapter.parameters().values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def dense_twin(
    checkpoint: Path, *, nf4: bool = True, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> Any:
    """The model in transformers' own code, all linears but the head rounded to NF4 by bitsandbytes and back.

    dtype: the model's own, which the values are rounded to; then all is computed in fp32.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention).eval()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for parameter in [linear.weight for linear in linears if linear is not model.get_output_embeddings()]:
            if nf4:
                codes = quantize_4bit(parameter.data, blocksize=64, quant_type="nf4", compress_statistics=True)
                parameter.copy_(dequantize_4bit(*codes))
    return model.float().requires_grad_(False)


def tiny_prompter(*end_ids: int) -> Prompter:
    """End ids without a tokenizer: engines need no text."""
    return Prompter(tokenizer=None, end_ids=end_ids, silent_ids=frozenset(), digest="0" * 64)


def tiny_group(
    scores: Sequence[float],
    lengths: Sequence[int],
    *,
    group_id: str = "train/000000/000",
    seed: int = 0,
    outcomes: Sequence[Outcome] | None = None,
    finishes: Sequence[Finish] | None = None,
    entropies: bool = True,
    rewards: Mapping[str, Sequence[float]] = MappingProxyType({}),
    trained: Sequence[int] | None = None,
) -> Group:
    """A scored group of random tokens with plausible log-probs and entropies, zero where a token was not sampled."""
    rng, total = np.random.default_rng(seed), sum(lengths)
    found = tuple(Outcome.CORRECT if score else Outcome.WRONG for score in scores)
    mask = np.ones(total, np.uint8) if trained is None else np.array(trained, np.uint8)
    return Group(
        group_id=group_id,
        prompt_ids=rng.integers(0, VOCAB, rng.integers(2, 10)).astype(np.int32),
        completion_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        trained=None if trained is None else mask,
        lengths=tuple(lengths),
        logprobs=-rng.exponential(3.0, total).astype(np.float32) * mask,
        entropies=rng.random(total).astype(np.float32) * mask if entropies else None,
        finishes=tuple(finishes or [Finish.STOP] * len(scores)),
        outcomes=tuple(outcomes or found),
        scores=tuple(scores),
        rewards={name: tuple(values) for name, values in rewards.items()},
    )


class CrampedBackbone(nn.Module):
    """A decoder on too small a card: after `grace` calls, one of more than `limit` padded tokens does not fit."""

    def __init__(self, backbone: nn.Module, limit: int, grace: int = 0) -> None:
        super().__init__()
        self.backbone = backbone
        self.limit = limit
        self.grace = grace
        self.refused: list[int] = []

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Refuses what is too large, before anything is computed."""
        self.grace -= 1
        if self.grace < 0 and input_ids.numel() > self.limit:
            self.refused.append(input_ids.numel())
            raise torch.OutOfMemoryError("too many tokens for this test's card")
        return self.backbone(input_ids=input_ids, **options)


class OverflowOnTheWayBack(nn.Module):
    """A decoder whose output is right and whose gradient is infinite."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **inputs: Any) -> Any:
        """The decoder's own output, with a gradient that overflows behind it."""
        output = self.backbone(**inputs)
        output.last_hidden_state.register_hook(lambda grad: grad * torch.inf)
        return output


class ScriptedEngine:
    """An engine whose completions follow from seed, prompt and adapter bytes alone; it notes what it was told to do."""

    def __init__(self, identity: Identity | None = None, *, entropies: bool = True) -> None:
        self.identity = identity or scripted_identity()
        self.entropies = entropies
        self.adapter = b""
        self.installed: list[int] = []
        self.filled: list[str] = []

    def install(self, version: int, adapter: bytes) -> None:
        """Remember it."""
        self.installed.append(version)
        self.adapter = adapter

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """One completion a seed; they end backwards."""
        self.filled += [group.group_id for group in groups]
        completions = [[self.completion(group, seed, sampling) for seed in group.seeds] for group in groups]
        progress(ended(completions)[::-1])
        return completions

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """As `generate`: a completion follows from its prompt."""
        return self.generate(groups, sampling, progress)

    def completion(self, group: GroupOrder, seed: int, sampling: Sampling) -> Completion:
        """Made-up tokens and numbers."""
        prompt = zlib.crc32(group.prompt_ids.tobytes())
        rng = np.random.default_rng([seed if sampling.temperature else 0, prompt, zlib.crc32(self.adapter)])
        length = int(rng.integers(1, sampling.max_new_tokens + 1))
        return Completion(
            ids=rng.integers(0, 10, length).astype(np.int32),
            logprobs=-rng.exponential(1.0, length).astype(np.float32),
            entropies=rng.random(length).astype(np.float32) if self.entropies else None,
            finish=Finish.LENGTH if length == sampling.max_new_tokens else Finish.STOP,
        )

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[n + 1] ids -> [n]"""
        rng = np.random.default_rng([zlib.crc32(ids.tobytes()), zlib.crc32(self.adapter)])
        return -rng.exponential(1.0, len(ids) - 1).astype(np.float32)

    def sleep(self) -> None:
        """Holds nothing."""

    def wake(self) -> bool:
        """Never left."""
        return False


def unheard(ended: Sequence[EndedCompletion]) -> None:
    """Progress that nobody watches."""


def ended(completions: list[list[Completion]], first_group: int = 0) -> list[EndedCompletion]:
    """All of them."""
    return [
        EndedCompletion(group=group, index=index, completion=completion)
        for group, samples in enumerate(completions, first_group)
        for index, completion in enumerate(samples)
    ]


class ScriptedScorer:
    """Right is what `rule` says of the completion's tokens; without one, what contains token 7."""

    def __init__(self, rule: Callable[[list[int]], bool] = lambda ids: 7 in ids) -> None:
        self.rule = rule

    def begin(self) -> Scores:
        """Scored when all are there."""
        return ScoresTogether(self.score)

    def score(self, jobs: Sequence[ScoreJob], on_progress: Callable[[], None]) -> list[Verdict]:
        """1 for right, 0 for wrong."""
        on_progress()
        found = [self.rule(job.completion_ids) for job in jobs]
        return [
            Verdict(outcome=Outcome.CORRECT if f else Outcome.WRONG, score=float(f), final_answer=None, note="")
            for f in found
        ]


def spelled(ids: list[int]) -> str:
    """Token ids as text, where there is no tokenizer."""
    return " ".join(map(str, ids))


def spelled_words() -> Words:
    return Words(text=spelled, spelled=spelled)


def scripted_identity(**changes: str) -> Identity:
    """What a scripted engine says it holds."""
    fields = {"engine": "scripted", "base_digest": "a" * 64, "tokenizer_digest": "b" * 64, "lora_digest": "c" * 64}
    return Identity(**fields | changes)


def hello_of(identity: Identity, actor_id: str = "actor0", num_credits: int = 2, **changes: Any) -> Hello:
    """How an actor that holds this greets a learner."""
    hello = Hello(
        actor_id=actor_id,
        **msgspec.structs.asdict(identity),
        rules_digest=RULES,
        machine=None,
        mark=0,
        version=None,
        credits=num_credits,
    )
    return msgspec.structs.replace(hello, **changes)


def toy_policy(version: int, data: bytes | None = None) -> PolicyMessage:
    """A published version whose bytes are no adapter; each version has others."""
    return policy_message(version, data if data is not None else f"adapter of version {version}".encode())


def toy_tasks(count: int, first: int = 0) -> list[Task]:
    """Tasks with prompts of different lengths, told apart by their tokens."""
    return [
        Task(
            prompt_ids=np.array([10 + index % 40, *range(1, 2 + index % 3)], np.int32),
            columns={"question": f"What is {index}?", "answer": str(index)},
        )
        for index in range(first, first + count)
    ]


def toy_orders(step: int = 0, *, count: int = 1, version: int = 0, lane: str = "train") -> list[Order]:
    """Orders of one group of two samples each."""
    return build_orders(
        toy_tasks(count),
        seed=0,
        lane=lane,
        step=step,
        first_slot=0,
        samples=2,
        version=version,
        sampling=Sampling(temperature=1.0, max_new_tokens=4),
        groups_per_order=1,
    )


def toy_evaluation(right: Sequence[bool], **changes: Any) -> Evaluation:
    """A report in which greedy and sampled completions are right on these tasks."""
    whole = msgspec.structs.asdict(share_of([float(r) for r in right]))
    task_results = tuple(
        TaskResult(
            question=f"What is {index}?",
            answer=str(index),
            greedy=Outcome.CORRECT if r else Outcome.WRONG,
            sampled=float(r),
            last_words=f"It is {index if r else -1}",
        )
        for index, r in enumerate(right)
    )
    fields: dict[str, Any] = {
        "label": "final",
        "version": 0,
        "n": len(right),
        "seed": 0,
        "adapter_sha256": "ab" * 32,
        "tasks_sha256": f"tasks of {len(right)}",
        "source": "embedded",
        "verifier": "gsm8k",
        "greedy": Decoded(**whole, cap=64, format_rate=1.0, length_mean=20.5, length_max=31),
        "sampled": Decoded(**whole, cap=64, temperature=1.0, format_rate=1.0, length_mean=21.5, length_max=33),
        "task_results": task_results,
    }
    return Evaluation(**fields | changes)


def filled(order: Order, policy: PolicyMessage, engine: ScriptedEngine | None = None) -> FilledOrder:
    """The filled order that a faultless actor sends."""
    engine = engine or ScriptedEngine()
    engine.install(policy.version, policy.adapter.tobytes())
    completions = engine.generate(order.groups, order.sampling, unheard)
    found = [[len(c.ids) % 2 for c in samples] for samples in completions]
    return FilledOrder(
        order_id=order.order_id,
        policy_version=policy.version,
        adapter_sha256=policy.sha256,
        groups=tuple(
            Group(
                group_id=group.group_id,
                prompt_ids=group.prompt_ids,
                completion_ids=np.concatenate([c.ids for c in samples]),
                trained=None,
                lengths=tuple(len(c.ids) for c in samples),
                logprobs=np.concatenate([c.logprobs for c in samples]),
                entropies=None,
                finishes=tuple(c.finish for c in samples),
                outcomes=tuple(Outcome.CORRECT if score else Outcome.WRONG for score in scores),
                scores=tuple(map(float, scores)),
                rewards={},
            )
            for group, samples, scores in zip(order.groups, completions, found, strict=True)
        ),
        timings=timings(rollout_s=0.5, verify_s=0.25, memory_mb=100.0),
    )
