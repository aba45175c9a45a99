"""The section [actor]: which rollout engine, and its options."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.config_section import NonNegative, Section


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
