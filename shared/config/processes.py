"""Which address a config means, for either side.

The section [actor]: which rollout engine, and its options.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from protocol.endpoint import local_endpoint
from shared.config.types import NonNegative, Positive, PositiveFloat, Section


class PipelineConfig(Section, frozen=True, kw_only=True):
    """How far sampling runs ahead of learning."""

    max_lag: Annotated[int, Meta(ge=0, le=64)] = 0
    """Groups of step s are sampled from version max(0, s - max_lag), exactly. On a CPU with cores for the threads of
    both processes, sampling and learning then overlap."""


class LinkConfig(Section, frozen=True, kw_only=True):
    """The wire."""

    endpoint: str = "ipc"
    """`ipc` (a socket in a private folder of this machine) or `tcp://host:port` as the actor dials it."""
    bind: str = ""
    """What the learner binds if it differs from `endpoint`, for example `tcp://0.0.0.0:5757`."""
    heartbeat_s: PositiveFloat = 2.0
    """Progress is shown this often."""
    silence_s: PositiveFloat = 120.0
    """A peer silent for longer is dead; also the limit of any wait for one to come. A process that makes no progress
    for so long writes its stacks to `logs/stacks-NAME.txt` and ends."""
    credits: Annotated[int, Meta(ge=1, le=1024)] = 2
    """Orders an actor holds at once."""
    late_s: PositiveFloat = 300.0
    """An order unanswered for longer is given to an actor without work as well; the first answer counts."""


class ComputeConfig(Section, frozen=True, kw_only=True):
    """What the processes run on. On CPU the thread counts are part of the result's last bit."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the card if there is one."""
    learner_threads: Annotated[int, Meta(ge=1, le=256)] = 2
    """CPU threads of the learner."""
    actor_threads: Annotated[int, Meta(ge=1, le=256)] = 2
    """CPU threads of an actor."""
    blas: Literal["fast", "portable"] = "fast"
    """`fast`: the widest vector units here. `portable`: AVX2 kernels only, the same bits on more machines."""


class CheckpointConfig(Section, frozen=True, kw_only=True):
    """When the learner's state is written."""

    every: Positive = 10
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 3
    """Newest checkpoints kept; the best one (`eval.every`) is kept besides."""


class JournalConfig(Section, frozen=True, kw_only=True):
    """What stays of the actors' answers once the adapter has learned from them."""

    keep: Literal["all", "checkpoints"] = "all"
    """`all`: `replay` goes from step 0; some 12 bytes a sampled token (42 kB a step of the embedded preset).
    `checkpoints`: only what the newest `checkpoint.keep` checkpoints need; `replay` goes from the oldest of them."""


class EvalConfig(Section, frozen=True, kw_only=True):
    """Held-out evaluation before the first and after the last step, and in between if asked for."""

    problems: NonNegative = 256
    """At most this many held-out problems, a sample by `tasks.seed`; 0 turns evaluation off."""
    every: NonNegative = 0
    """Steps from one evaluation during training to the next; 0 for none. Training goes on as if there were none. Each
    is made of a checkpoint, and the best of these checkpoints is kept: without this there is no best one."""
    max_new_tokens: NonNegative = 0
    """Cap; 0 takes the training cap."""
    long_cap: NonNegative = 0
    """Evaluate a second time with this cap, which shows what the first one costs; 0 for no second time."""
    samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Answers drawn for each problem at the training temperature, besides the greedy one; several give pass@k."""

    def is_due(self, done: int) -> bool:
        """Whether an evaluation follows so many steps."""
        return bool(self.problems and self.every) and done % self.every == 0


class LogConfig(Section, frozen=True, kw_only=True):
    """What is written for people."""

    rollouts_per_step: NonNegative = 2
    """Groups of each step written to rollouts.jsonl."""


def dial_address(link: LinkConfig, run_dir: Path) -> str:
    """What an actor connects to."""
    return local_endpoint(run_dir) if link.endpoint == "ipc" else link.endpoint


def bind_address(link: LinkConfig, run_dir: Path) -> str:
    """What the learner listens on."""
    return link.bind or dial_address(link, run_dir)


class ActorConfig(Section, frozen=True, kw_only=True):
    """The rollout engine. All but `engine` are options of `vllm`, which the extra `vllm` installs."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: our own decode loop. `vllm`: vLLM within the actor's process."""
    weights: Literal["bf16_of_nf4", "nf4"] = "bf16_of_nf4"
    """`bf16_of_nf4`: the values that the learner's NF4 codes stand for, in the checkpoint's own type, served plain.
    `nf4`: the codes themselves, through vllm-bnb-plugin; a quarter of the memory, and further from the learner."""
    install: Literal["memory", "files"] = "memory"
    """How an adapter goes in: `memory`, from the bytes that came over the wire; `files`, through a folder in shared
    memory and vLLM's public interface alone, for when a version of vLLM has moved its insides."""
    kv_mb: NonNegative = 0
    """Memory for keys and values; 0 takes what `max_sequences` of full length need, 1024 at most."""
    give_back: Literal["auto", "nothing", "kv", "weights", "stop"] = "auto"
    """What of a card is given back between two orders: `kv` the keys and values, `weights` the weights too (they wait
    in host memory), `stop` all of it. `auto` takes the least that leaves the learner room. A CPU gives back nothing."""
    max_sequences: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Samples decoded at once; 0 takes rollout.prompts x rollout.group, 256 at most. Part of what makes tokens
    repeatable."""
