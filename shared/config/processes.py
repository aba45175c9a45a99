"""The sections of the processes and of what they write: [pipeline], [link], [compute], [checkpoint], [journal], [eval],
[log] and [actor]."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from protocol.endpoint import local_endpoint
from shared.config.types import NonNegative, Positive, PositiveFloat, Section

Fold = Literal["auto", "always", "never"]
CardNumber = Annotated[int, Meta(ge=0, le=63)]
MAX_ACTORS = 64
"""Beside one learner."""


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
    above 0; at most two for a small model or on a card. The choice is made and kept as that of `dtype`."""
    actor_threads: Annotated[int, Meta(ge=0, le=256)] = 0
    """CPU threads of an actor, chosen in the same way."""
    actors: Annotated[int, Meta(ge=1, le=MAX_ACTORS)] = 1
    """Actors that are started beside the learner, at most 64. It changes no token: which one fills an order does not
    matter. On a CPU they compute at once if it has cores for the threads of all processes, else they take turns."""
    learner_card: CardNumber = 0
    """Which card the learner computes on, by the number that CUDA gives it, from 0 to 63. Processes on the same card
    take turns, also those of other runs."""
    actor_card: CardNumber = 0
    """The same for an actor. On another card than the learner's nobody waits, and with `pipeline.max_lag` above 0 both
    compute at once."""
    residency: Literal["auto", "release", "swap", "shared"] = "auto"
    """Where the frozen base is while the other process has its turn on the same card. `release`: it stays there, and
    only caches are given back. `swap`: it waits in host memory. `shared`: there is one for both processes; where the
    driver or the container does not allow that, `swap`. `auto` takes `release` if the run fits so, else `swap`; `run`
    chooses when it makes a run, and keeps the choice. Where nothing is planned `auto` means `release`."""
    blas: Literal["fast", "portable"] = "fast"
    """`fast`: the widest vector units of this machine. `portable`: AVX2 kernels only, which give the same bits on more
    machines."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """What draws tokens, goes over the vocabulary and adds adapters on a card. `torch`: PyTorch's own operations.
    `triton`: our kernels. `auto` measures each kernel when a process first starts on a card, takes it where it is
    quicker, and keeps the choice in the cache folder (`model.cache_dir`). Where Triton cannot start, and on a CPU,
    PyTorch computes."""

    @property
    def threads(self) -> int:
        """CPU threads of all processes together."""
        return self.learner_threads + self.actors * self.actor_threads


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the state of the learner is saved."""

    every: Positive = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: Positive = 3
    """Number of newest checkpoints to keep. The best one (see `eval.every`) is kept as well."""


class JournalConfig(Section, frozen=True, kw_only=True):
    """Which of the actors' groups are kept after the learner has used them."""

    keep: Literal["all", "checkpoints"] = "all"
    """`all`: `replay` can start at step 0; about 12 bytes per sampled token (42 kB per step with the embedded preset).
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
    """The rollout engine. `max_sequences` is for both engines, `fold` and `graphs` are for `hf`; all others are options
    of `vllm`, which the extra `vllm` installs."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: our own decode loop. `vllm`: vLLM inside the process of the actor."""
    weights: Literal["dense", "nf4"] = "dense"
    """What `vllm` serves. `dense`: the dequantised values in the type of `compute.dtype`. `nf4`: the codes themselves,
    through vllm-bnb-plugin; a quarter of the memory, and a larger difference from the learner."""
    install: Literal["memory", "files"] = "memory"
    """How an adapter is installed. `memory`: from the bytes that came over the wire. `files`: through a folder in
    shared memory and vLLM's public interface only, for versions of vLLM whose internals have changed."""
    kv_mb: NonNegative = 0
    """Memory in MB for keys and values. 0 takes what `max_sequences` of full length need, at most 1024."""
    give_back: Literal["auto", "nothing", "kv", "weights", "stop"] = "auto"
    """Which memory of a card is freed between two orders. `kv`: keys and values. `weights`: these and the weights,
    which wait in host memory. `stop`: everything. `nothing`: none. `auto` frees the least that leaves the learner
    enough. On a CPU nothing is freed."""
    max_sequences: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Number of completions of an order that are decoded at once, at most 4096; the others wait until one has ended. 0
    takes 256, or fewer: with `hf`, as many as need 512 MiB for keys, values and logits (2 GiB on a card); with `vllm`,
    rollout.prompts x rollout.group. The sampled tokens depend on it."""
    fold: Fold = "auto"
    """Whether `hf` samples from the sum of base and adapter, which takes one product instead of three and a second copy
    of the linears in this process. Only dense fp32 weights can be summed. `auto` does so up to 64 MiB of weights, where
    the number of products counts and the copy is small."""
    graphs: Literal["auto", "never"] = "auto"
    """Whether `hf` on a card repeats its token step as a CUDA graph. `auto` does so if the step can be captured. The
    tokens do not depend on it."""


MOST_ROWS = 256
CPU_ROOM_BYTES, CARD_ROOM_BYTES = 512 * 2**20, 2048 * 2**20
"""For keys, values and logits of all rows. Constants, because the numbers depend on the width in the last bit."""
LOGIT_BYTES = 8
"""For each entry of the vocabulary and each row: the logits, and the weights that are drawn from."""
FOLDED_BYTES = 64 * 2**20
"""At the 3 MiB of the embedded model folding saves a tenth of a step of 128 rows and a quarter of one of 8; beyond this
size the second copy is what counts."""
PACKED_TOKENS = 32
"""From this cap on `hf` packs the weights for an order (actor/engines/packed.py)."""


def rows_at_once(max_sequences: int, cached_bytes: int, vocabulary: int, *, on_card: bool) -> int:
    """How many completions `hf` decodes at once. cached_bytes: keys and values of one completion at full length."""
    room = CARD_ROOM_BYTES if on_card else CPU_ROOM_BYTES
    return max_sequences or max(1, min(MOST_ROWS, room // (cached_bytes + LOGIT_BYTES * vocabulary)))


def is_folded(fold: Fold, dense_bytes: int) -> bool:
    """Whether `hf` samples from sums of base and adapter. dense_bytes: of the linears that can be summed."""
    return fold == "always" or (fold == "auto" and dense_bytes <= FOLDED_BYTES)


def dial_address(link: LinkConfig, run_dir: Path) -> str:
    """The address that an actor connects to."""
    return local_endpoint(run_dir) if link.endpoint == "ipc" else link.endpoint


def bind_address(link: LinkConfig, run_dir: Path) -> str:
    """The address that the learner listens on."""
    return link.bind or dial_address(link, run_dir)
