"""The sections of the processes and of what they write: [pipeline], [link], [compute], [ray], [checkpoint], [journal],
[eval], [log], [actor] and [server]."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from protocol.endpoint import local_endpoint
from shared.config.model import ModelConfig
from shared.config.training import ConstraintConfig
from shared.config.types import NonNegative, Positive, PositiveFloat, Section, Share
from shared.errors import ConfigError

Fold = Literal["auto", "always", "never"]
Parallel = Literal["ddp", "fsdp2", "zero2"]
SentDtype = Literal["fp32", "bf16"]
"""Of an adapter on its way to actors."""
CardNumber = Annotated[int, Meta(ge=0, le=63)]
MAX_ACTORS = 64
"""Beside one learner."""
MAX_RANKS = 64


class PipelineConfig(Section, frozen=True, kw_only=True):
    """How far sampling runs ahead of learning."""

    max_lag: Annotated[int, Meta(ge=0, le=64)] = 0
    """Groups of step s are sampled from version max(0, s - max_lag), exactly. At most 64. Above 0, sampling and
    learning overlap on a CPU that has cores for the threads of both processes, and on two cards; else they take
    turns."""


class LinkConfig(Section, frozen=True, kw_only=True):
    """The connection between actors and learner."""

    endpoint: str = "ipc"
    """`ipc` (a socket in a private folder of this machine), or `tcp://host:port` as actors connect to it."""
    bind: str = ""
    """Address that the learner listens on, if it differs from `endpoint`. Example: `tcp://0.0.0.0:5757`."""
    heartbeat_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    """Seconds between two heartbeats, at most 3600."""
    silence_s: Annotated[float, Meta(gt=0.0, le=86_400.0)] = 120.0
    """A peer that is silent for more seconds than this counts as dead. Also the longest wait for a peer to appear. A
    process that makes no progress for this long writes its stacks to `logs/stacks-NAME.txt` and ends. Must be larger
    than `heartbeat_s`, at most 86,400."""
    credits: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Number of orders that an actor may have at once, from 1 to 1024."""
    adapter_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """How adapters are sent to actors. `auto` is the number type of [compute], in which both sides compute with them:
    in bf16 that halves the bytes and changes no value. (Several ranks send fp32, because they compare what they send.)
    `bf16` does so for a run in fp32 and a slow network: then actors sample from a rounded adapter, whose small
    difference the importance weight corrects. Checkpoints are fp32 all the same."""
    late_s: PositiveFloat = 300.0
    """An order that is not filled after this many seconds is also given to an idle actor. The first result counts."""


class ComputeConfig(Section, frozen=True, kw_only=True):
    """What the processes compute with. On a CPU the numbers of threads decide the last bit of a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the graphics card if there is one, else the CPU."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number type of the base, the activations and their products; all else is fp32. `auto` takes bf16 on a card, and
    on a CPU that has instructions for it if the weight files have 40 MB or more, or are not there yet; else fp32. The
    choice is made when a run is made, or where a prepared run first starts, and kept."""
    learner_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    """CPU threads of the learner, at most 256. 0 takes all physical cores, or half of them if `pipeline.max_lag` is
    above 0; at most two for a small model or on a card, one for a small model beside busy processes. The choice is made
    and kept as that of `dtype`."""
    actor_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    """CPU threads of an actor, chosen in the same way."""
    actors: Annotated[int, Meta(ge=1, le=MAX_ACTORS)] = 1
    """Actors that are started beside the learner, at most 64. It changes no token: which one fills an order does not
    matter. On a CPU they compute at once if it has cores for the threads of all processes, else they take turns."""
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    """Processes that share the learner's work, at most 64. Each has `learner_threads` and a copy of all but the base,
    and computes its part of the micro-batches; the number decides the last bits of a result."""
    parallel: Parallel = "ddp"
    """What each of several ranks has. `ddp`: all of the frozen base and of AdamW's moments. `fsdp2`: a part of every
    linear of the base, and for each product the ranks gather the whole one; on CPUs only as yet. `zero2`: the moments
    and the gradient's sum of some tensors of the adapter, which this rank steps; on a card, with one rank too, they
    are in host memory. On CPUs the results are the same to the bit."""
    learner_card: CardNumber = 0
    """Which card the learner computes on, by the number that CUDA gives it, from 0 to 63. Processes on the same card
    take turns, also those of other runs. Further ranks have the cards that follow, and wait for nobody there."""
    actor_card: CardNumber = 0
    """The same for an actor. On another card than the learner's nobody waits, and with `pipeline.max_lag` above 0 both
    compute at once."""
    residency: Literal["auto", "release", "swap", "shared"] = "auto"
    """Where the frozen base is while the other process has its turn on the same card. `release`: it stays there, and
    only caches are given back. `swap`: it waits in host memory. `shared`: there is one for both processes; where the
    driver or the container does not allow that, `swap`. `auto` takes `release` if the run fits so, else `swap`; `run`
    chooses when it makes a run, and keeps the choice. Where nothing is planned `auto` means `release`."""
    blas: Literal["fast", "portable"] = "fast"
    """`fast`: the widest vector units of this machine. `portable`: PyTorch's AVX2 kernels only, which give the same
    bits on more machines."""
    kernels: Literal["auto", "triton", "compiled", "torch"] = "auto"
    """`torch`: PyTorch's operations. `triton`: on a card, our kernels draw tokens, go over the vocabulary and add
    adapters. `compiled`: on a CPU, C code computes what is between the products of an update. `auto`: on a card each
    kernel that a first start finds quicker (kept in `model.cache_dir`), on a CPU with AVX2 and GCC C code."""

    @property
    def compiles(self) -> bool:
        """Whether C code may compute on a CPU."""
        return self.kernels == "compiled" or (self.kernels == "auto" and self.blas == "fast")

    @property
    def threads(self) -> int:
        """CPU threads of all processes together."""
        return self.ranks * self.learner_threads + self.actors * self.actor_threads

    def shares_card(self, role: Literal["learner", "actor"]) -> bool:
        """Whether other processes of the run take turns with this one on its card."""
        return self.learner_card == self.actor_card or (role == "actor" and self.actors > 1)

    def swaps_base(self, role: Literal["learner", "actor"]) -> bool:
        """Whether its own base waits in host memory between turns. With `shared`: if it cannot be shared."""
        return self.residency in ("swap", "shared") and self.shares_card(role)

    @property
    def divides_base(self) -> bool:
        """Whether each rank has a part of the base only."""
        return self.parallel == "fsdp2" and self.ranks > 1

    @property
    def divides_moments(self) -> bool:
        """Whether each rank has AdamW's moments of some parameters only."""
        return self.parallel == "zero2" and self.ranks > 1


class RayConfig(Section, frozen=True, kw_only=True):
    """What `--on ray` asks of a cluster, besides as many CPUs for a process as it has threads."""

    learner_gpus: Share = 0.0
    """Share of a card for the learner, from 0 to 1. 0 takes half a card where `compute.device` is `cuda`, else none."""
    actor_gpus: Share = 0.0
    """The same for each actor. 0 divides half a card among all actors where `compute.device` is `cuda`."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the state of the learner is saved."""

    every: Positive = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: Positive = 3
    """Number of newest checkpoints to keep. The best one (see `eval.every`) is kept as well."""


class JournalConfig(Section, frozen=True, kw_only=True):
    """Which of the actors' groups are kept after the learner has used them."""

    keep: Literal["all", "checkpoints"] = "all"
    """`all`: `replay` can start at step 0; about 13 bytes per sampled token (42 kB per step with the embedded preset).
    `checkpoints`: only what the newest `checkpoint.keep` checkpoints need; `replay` starts at the oldest of them."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out evaluation before the first step, after the last one, and in between if configured."""

    problems: NonNegative = 256
    """Largest number of held-out tasks, sampled by `tasks.seed`. 0 turns evaluation off."""
    every: NonNegative = 0
    """Steps between evaluations during training; 0 turns them off. They do not change the training. Each one evaluates
    a checkpoint, and the best of these checkpoints is kept; without them there is no best one."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Cap on a completion in tokens, at most 1,000,000. 0 takes the cap of training."""
    long_cap: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Evaluate again with this larger cap, at most 1,000,000, to see how much the normal cap costs. 0 turns this
    off."""
    samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Completions per task at the temperature of training, besides the greedy one. From 1 to 4096; more than one gives
    pass@k and, where the verifier reads final answers, maj@k."""
    beside: bool = False
    """Whether a process of its own evaluates while training goes on. Results count when they come; the end of the run
    waits for the last ones. It takes the memory of an actor besides, and on a card turns like one. Needs `every`."""

    def longest_completion(self, training_cap: int) -> int:
        """The largest cap of all passes; 0 without an evaluation."""
        return max(self.max_new_tokens or training_cap, self.long_cap) if self.problems else 0

    def largest_orders(self, rows: int) -> list[tuple[int, int]]:
        """Groups, and completions of each: of the greedy order and of the sampled one, if a message takes so many
        (learner/evaluation/evaluate.py). rows: completions of a step of training."""
        return [(min(max(1, rows // samples), self.problems), samples) for samples in (1, self.samples)]

    def is_due(self, done: int) -> bool:
        return bool(self.problems and self.every) and done % self.every == 0


class LogConfig(Section, frozen=True, kw_only=True):
    """What is written for people to read."""

    rollouts_per_step: NonNegative = 4
    """Number of groups of each step that are written to rollouts.jsonl, every token with its figures. A number larger
    than the groups of a step means all of them."""
    rollouts_kb: Positive = 256
    """Mean size of a step in rollouts.jsonl at most, in kB; groups beyond it are left out. The file has at most
    run.steps times as much."""

    @property
    def rollouts_bytes(self) -> int:
        return 1000 * self.rollouts_kb


class TrackingConfig(Section, frozen=True, kw_only=True):
    """Where the metrics of the run are shown besides its folder. A process of its own sends them and can neither stop
    nor slow the run."""

    kind: Literal["none", "trackio", "wandb", "tensorboard"] = "none"
    """`trackio`: on this machine, with the rollouts as traces. `wandb`: Weights & Biases, online or as WANDB_MODE says.
    `tensorboard`: event files in the run directory. Each needs the extra of its name."""
    project: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")] = "tandem"
    """Project of the tracked run: letters, digits, `-`, `_` and `.`."""
    name: str = ""
    """Name of the tracked run. Empty: the name of the run directory and the first digits of the run's id."""


class ActorConfig(Section, frozen=True, kw_only=True):
    """The rollout engine, and how far actors are trusted. `audit` and `audit_invited` are for the learner,
    `max_sequences` and `weights` are for all engines, `head`, `token_step`, `fold`, `packed` and `graphs` are for `hf`;
    all others are options of `vllm`, which the extra `vllm` installs."""

    audit: Share = 0.0
    """Share of the groups of an actor that the learner checks, from 0 to 1: it computes their log-probs and scores
    itself, and expels an actor whose numbers are false (learner/orders/audit.py). For actors that did not join by an
    invitation. Needs the time of a forward pass over these groups."""
    audit_invited: Share = 0.1
    """The same for actors that joined by an invitation (`python -m launch invite`). Above 0, the first eight groups of
    each are checked as well."""
    engine: Literal["hf", "vllm", "vllm_server"] = "hf"
    """`hf`: our own decode loop. `vllm`: vLLM inside the process of the actor. `vllm_server`: servers that somebody
    else has started, here or on other machines; see [server]."""
    weights: Literal["auto", "dense", "nf4"] = "auto"
    """What completions are sampled from. `dense`: the dequantised values in the type of `compute.dtype`. `nf4`: the
    codes themselves. With `vllm` or a server, codes are read through vllm-bnb-plugin; they take a quarter of the memory
    and differ more from the learner, so `auto` takes dense values. With `hf` on a CPU, codes take less time in bf16.
    C code (`token_step`) reads them and has the numbers of dense values; `auto` takes them with AVX512-VBMI. PyTorch's
    operations read them with AVX512-BF16, for at most 32 rows; with 16 rows or fewer, the adapter is then rounded to 8
    bits. `auto` takes them there without AMX. Where neither can be used, dense values are read in place of codes. On a
    card, `hf` reads what `model.dequantize` leaves in memory."""
    head: Literal["auto", "dense", "int8"] = "auto"
    """What logits come from while `hf` decodes Llama, Qwen2 or Qwen3 in bf16 on a CPU. `dense`: the values of the head.
    `int8`: a copy in 8 bits, made from an NF4 base; the 64 largest logits are computed again from the values. It needs
    VNNI; another processor reads the values. `auto` is `int8` if the processor has VNNI and rollout.max_new_tokens is
    64 or more."""
    token_step: Literal["auto", "torch", "compiled"] = "auto"
    """What computes a token of Llama, Qwen2 or Qwen3 in `hf` on a CPU. `torch`: PyTorch's operations. `compiled`: C
    code, which GCC compiles on the first start; it takes less than two thirds of the time where it was measured. `auto`
    is `compiled` where GCC is there and the processor has AVX2 (fp32), or AMX or both AVX512-BF16 and AVX512-VBMI
    (bf16), with compute.blas = "fast". A model whose sizes it does not cover takes `torch`. The tokens depend on it."""
    install: Literal["memory", "files"] = "memory"
    """How an adapter is installed. `memory`: from the bytes that came over the wire. `files`: through a folder in
    shared memory and vLLM's public interface only, for versions of vLLM whose internals have changed."""
    kv_mb: NonNegative = 0
    """Memory in MB for keys and values. 0 takes what `max_sequences` of full length need, at most 1024."""
    give_back: Literal["auto", "nothing", "kv", "weights", "stop"] = "auto"
    """Which memory of a card is freed between two orders. `kv`: keys and values. `weights`: these and the weights,
    which wait in host memory. `stop`: everything. `nothing`: none. `auto` frees the least that leaves the learner
    enough, or the other actors of the card where the learner is on another one. On a CPU nothing is freed."""
    max_sequences: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Number of completions of an order that are decoded at once, at most 4096; the others wait until one has ended. 0
    takes 256, or fewer: with `hf`, as many as need 512 MiB for keys, values and logits (2 GiB on a card); with `vllm`
    and on each server, rollout.prompts x rollout.group. Where memory is short, the start of a run lowers it
    for `hf`, also a value that was given (on a CPU to 8 at least). The sampled tokens depend on it."""
    fold: Fold = "auto"
    """Whether `hf` samples from the sum of base and adapter, which takes one product instead of three and a second copy
    of the linears in this process. Only dense fp32 weights can be summed. `auto` does so up to 64 MiB of weights, where
    the number of products counts and the copy is small."""
    packed: Share = 0.5
    """Largest share of the base, from 0 to 1, that `hf` on a CPU keeps a second time, in a layout of oneDNN, while it
    decodes an order whose completions may have 32 tokens or more: in bf16, and in fp32 without AVX-512 or with
    compute.blas = "portable", where that is faster, and if twice that memory is free. Weights that are read as codes
    are not packed. 0.5 usually leaves the peak of a run whose processes take turns as it is with 0. The tokens do not
    depend on it."""
    graphs: Literal["auto", "never"] = "auto"
    """Whether `hf` on a card repeats its token step as a CUDA graph. `auto` does so if the step can be captured. The
    tokens do not depend on it."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether servers sample, so that an actor has no model."""
        return self.engine == "vllm_server"


class ServerConfig(Section, frozen=True, kw_only=True):
    """The vLLM servers of `actor.engine = "vllm_server"`. actor/engines/README.md says how one is started."""

    urls: tuple[str, ...] = ()
    """Their addresses, such as `http://host:8000/v1`. They share the completions of an order."""
    folder: str = "/dev/shm"
    """A folder in which the actor leaves each adapter and the servers find it: of this machine if they run on it, else
    one that all of them have, by sshfs or NFS."""
    seen_as: str = ""
    """Name of that folder on the servers. Empty: the same."""
    key_variable: str = "VLLM_API_KEY"
    """Environment variable of the actor with the servers' key; it need not be set."""
    limit_s: PositiveFloat = 600.0
    """Longest wait for one reply, which is a whole completion, in seconds."""
    patience_s: PositiveFloat = 600.0
    """If no server has replied for so many seconds, the run ends, and `resume` continues it. Before the first order it
    waits for at most half of `link.silence_s`."""


def check_servers(engine: str, urls: Sequence[str]) -> None:
    """ConfigError unless there are servers exactly where they are used."""
    if (engine == "vllm_server") != bool(urls):
        found = "server.urls is empty" if not urls else f"server.urls is given and actor.engine is '{engine}'"
        raise ConfigError(
            f"actor.engine = 'vllm_server' samples with the servers in server.urls, but {found}; set both, or neither."
        )
    for url in urls:
        if not url.startswith(("http://", "https://")) or urls.count(url) > 1:
            raise ConfigError(
                f"server.urls has '{url}'; expected addresses such as http://host:8000/v1, each of them once."
            )


def check_parallel(
    compute: ComputeConfig, model: ModelConfig, actor: ActorConfig, constraint: ConstraintConfig
) -> None:
    """With a divided base every product is one of all ranks: refuse what has no weights to divide, and passes that some
    of the ranks make and others do not."""
    if compute.parallel != "fsdp2":
        return
    if compute.device == "cuda":
        raise ConfigError(
            "compute.parallel = 'fsdp2' computes on CPUs only as yet, but compute.device is 'cuda'; set it to 'cpu', or"
            " compute.parallel to 'ddp'."
        )
    if model.quantization != "none" and model.dequantize == "each_call":
        raise ConfigError(
            "compute.parallel = 'fsdp2' divides dense weights, but with model.dequantize = 'each_call' only NF4 codes"
            " are in memory, which cannot be divided so; set that to 'once', or compute.parallel to 'ddp'."
        )
    if actor.audit or actor.audit_invited:
        raise ConfigError(
            "compute.parallel = 'fsdp2' needs all ranks for every product, but the first one alone checks actors"
            f" (actor.audit = {actor.audit:g}, actor.audit_invited = {actor.audit_invited:g}); set both to 0, or"
            " compute.parallel to 'ddp'."
        )
    if constraint.beta and constraint.reference == "base":
        raise ConfigError(
            "compute.parallel = 'fsdp2' needs as many passes of every rank, but constraint.reference = 'base' makes one"
            " more only where tokens are penalised; set it to 'old', or compute.parallel to 'ddp'."
        )


PIECE_TOKENS = 2048
"""Of prompts that run together, padding included. At a hidden size of 1536 a layer's activations then take 150 MB."""
DEFAULT_MOST_ROWS = 256
CPU_ROOM_BYTES, CARD_ROOM_BYTES = 512 * 2**20, 2048 * 2**20
"""For keys, values and logits of all rows. Constants, because the numbers depend on the width in the last bit. Where it
has to be smaller, config.json says so."""
LOGIT_BYTES = 8
"""For each entry of the vocabulary and each row: the logits, and the weights that are drawn from."""
FOLDED_BYTES = 64 * 2**20
"""At the 3 MiB of the embedded model folding saves a tenth of a step of 128 rows and a quarter of one of 8; beyond this
size the second copy is what counts."""
CODED_ROWS = 32
"""Up to this number of rows PyTorch reads codes in a token step (actor/engines/token_step/coded.py). With more, dense
weights are faster."""
CODED_ADAPTER_ROWS = 16
"""Up to this number of rows the adapter is read as codes too, beside those of the base. A token step in bf16 has a
multiple of 8 rows."""
ONEDNN_VALUES = 3 * 2**19
"""A weight in fp32 is for oneDNN only if it has at least this many values (shared/model/layers/products.py)."""
PACKED_TOKENS = 32
"""From this cap on `hf` packs the weights for an order (actor/engines/token_step/packed.py)."""
EIGHT_BIT_TOKENS = 64
"""From this cap on, `actor.head = "auto"` is the head in 8 bits (actor/engines/token_step/eight_bit.py)."""


def rows_at_once(max_sequences: int, cached_bytes: int, vocabulary: int, *, on_card: bool) -> int:
    """How many completions `hf` decodes at once. cached_bytes: keys and values of one completion at full length."""
    room = CARD_ROOM_BYTES if on_card else CPU_ROOM_BYTES
    return max_sequences or max(1, min(DEFAULT_MOST_ROWS, room // (cached_bytes + LOGIT_BYTES * vocabulary)))


def is_folded(fold: Fold, dense_bytes: int) -> bool:
    """Whether `hf` samples from sums of base and adapter. dense_bytes: of the linears that can be summed."""
    return fold == "always" or (fold == "auto" and dense_bytes <= FOLDED_BYTES)


def sent_dtype(link: LinkConfig, compute: ComputeConfig) -> SentDtype:
    """How adapters are sent."""
    if link.adapter_dtype != "auto":
        return link.adapter_dtype
    return "bf16" if compute.dtype == "bf16" and compute.ranks == 1 else "fp32"


def dial_address(link: LinkConfig, run_dir: Path) -> str:
    """The address that an actor connects to."""
    return local_endpoint(run_dir) if link.endpoint == "ipc" else link.endpoint


def bind_address(link: LinkConfig, run_dir: Path) -> str:
    """The address that the learner listens on."""
    return link.bind or dial_address(link, run_dir)
