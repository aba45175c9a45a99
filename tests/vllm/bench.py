"""vLLM beside the learner's policy, over the embedded base."""

from dataclasses import dataclass

import numpy as np
import torch

from actor.engines.hf_engine import HFEngine
from actor.engines.vllm_engine import VLLMEngine
from actor.engines.vllm_internals import VLLM
from actor.engines.vllm_options import vllm_options
from launch.presets.load import load_config
from protocol.messages import GroupOrder
from shared.base.cache import cached_base, dense_base
from shared.base.load import load_policy
from shared.config.processes import ActorConfig
from shared.config.tree import Config
from shared.model.adapter_file import adapter_bytes, read_layout
from shared.model.policy import Policy
from shared.model.prompt import Prompter, load_prompter
from shared.process.determinism import pin_torch
from shared.seeding import sample_seeds
from tests.support.fakes import CPU, shake


@dataclass(frozen=True, kw_only=True)
class Bench:
    """vLLM beside the learner's policy, over one base."""

    config: Config
    prompter: Prompter
    policy: Policy
    """The learner's side."""
    engine: VLLMEngine

    def hf(self) -> HFEngine:
        """Our own engine over the same policy."""
        # Without sums of base and adapter, which would stay in the policy when its adapter changes.
        return HFEngine(self.policy, self.prompter, ActorConfig(fold="never"))

    def adapter(self, seed: int) -> bytes:
        """Some adapter; the policy holds it from now on."""
        shake(self.policy, seed)
        return adapter_bytes(self.policy.adapter)

    def zero_adapter(self) -> bytes:
        """B = 0."""
        shake(self.policy, 0)
        with torch.no_grad():
            for layer in self.policy.adapter.layers.values():
                layer.lora_B.zero_()
        return adapter_bytes(self.policy.adapter)

    def groups(self, count: int, size: int, *, first_seed: int = 0) -> tuple[GroupOrder, ...]:
        """Problems like those that it was trained on."""
        return tuple(self.group(index, size, first_seed) for index in range(count))

    def group(self, index: int, size: int, run_seed: int = 0) -> GroupOrder:
        """One of them; prompts differ in length."""
        more = " Then he eats one." * (index % 3)
        question = f"Tom has {index + 2} apples and buys {2 * index + 1} more.{more} How many apples does he have now?"
        return GroupOrder(
            group_id=f"g{index}",
            prompt_ids=np.array(self.prompter.prompt_ids(question), dtype=np.int32),
            columns={},
            seeds=sample_seeds(run_seed, "test", 0, index, size),
        )


def make_bench(*overrides: str) -> Bench:
    """For the embedded preset with these changes."""
    config = load_config("embedded", overrides)
    pin_torch(config.compute.actor_threads)
    base = cached_base(config.model)
    prompter = load_prompter(base.folder)
    policy = load_policy(base, config.model, config.lora, CPU, torch.float32)
    options = vllm_options(
        config,
        base.folder if config.actor.weights == "nf4" else dense_base(base, torch.float32).folder,
        "cpu",
        "float32",
    )
    layout = read_layout(base.folder, config.lora)
    engine = VLLMEngine(VLLM(options), options, prompter, config.lora, layout, base.digest)
    return Bench(config=config, prompter=prompter, policy=policy, engine=engine)
