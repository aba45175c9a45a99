"""vLLM as the rollout engine: orders become its requests, and what it finishes becomes completions.

    install    fp32 bytes checked -> into vLLM under a name that is never used again
    generate   prefix cache empty -> G requests a prompt, group by group -> steps until all are finished

The result is a function of order and adapter: each completion has its own seed, requests enter in a fixed order, and
every order starts from an empty prefix cache. Within an order a prompt is computed once except for its last
block: later requests find its keys and values. vLLM reports no entropy over the whole vocabulary, so `entropies` is
None and the learner computes them in a pass of its own.
"""

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs

from actor.engines.engine import Completion, EndedCompletion, Identity, Progress, in_order
from actor.engines.vllm_internals import VLLM, DrawOptions, FinishedRequest
from actor.engines.vllm_options import GiveBack, VLLMOptions
from protocol.messages import Finish, GroupOrder, Sampling
from shared.base.checksum import BaseChecksum
from shared.config.model import LoraConfig
from shared.errors import ModelError
from shared.model.adapter_file import LoraLayout, adapter_config, read_adapter
from shared.model.prompt import Prompter
from shared.seeding import derive

SHARED_MEMORY = Path("/dev/shm")


class VLLMEngine:
    """Engine over vLLM in this process."""

    def __init__(
        self,
        vllm: VLLM,
        options: VLLMOptions,
        prompter: Prompter,
        lora: LoraConfig,
        layout: LoraLayout,
        base_digest: str,
        install: Literal["memory", "files"] = "memory",
        give_back: GiveBack = "nothing",
    ) -> None:
        self.options = options
        self.end_ids = prompter.end_ids
        self.layout = layout
        self.lora = lora
        self.how = install
        self.vllm = vllm
        self.part: GiveBack = give_back
        self.asleep = self.talking = False
        self.installed: tuple[int, bytes] | None = None
        self.base = BaseChecksum(vllm.weight_sums)
        self.identity = Identity(
            engine="vllm",
            base_digest=base_digest,
            tokenizer_digest=prompter.digest,
            lora_digest=layout.digest,
        )

    def install(self, version: int, adapter: bytes) -> None:
        """A new adapter; the base must be what was loaded."""
        self.base.check()
        self.put_in(version, adapter)
        self.installed = (version, adapter)

    def put_in(self, version: int, adapter: bytes) -> None:
        """From memory or through files, as configured."""
        tensors = {name: value.float() for name, value in read_adapter(adapter, self.layout.shapes).items()}
        if self.how == "memory":
            self.vllm.take_bytes(self.vllm.new_place(version), tensors, self.layout.rank, self.layout.scale)
        else:
            self.install_files(version, adapter)

    def install_files(self, version: int, adapter: bytes) -> None:
        """vLLM reads a folder in PEFT's format once; then the folder is deleted."""
        with tempfile.TemporaryDirectory(prefix="tandem-policy-", dir=SHARED_MEMORY) as name:
            folder = Path(name)
            (folder / "adapter_model.safetensors").write_bytes(adapter)
            (folder / "adapter_config.json").write_bytes(adapter_config(self.lora, str(self.options.folder)))
            self.vllm.take_files(self.vllm.new_place(version, name))

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """All completions of all groups together."""
        self.refuse_longer(groups, sampling)
        self.vllm.forget_prefixes()
        return self.generate_all(groups, sampling, progress)

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """vLLM finds the keys and values of earlier turns by their tokens. A turn's seed follows from where it is."""
        if not self.talking:
            self.vllm.forget_prefixes()
        self.talking = True
        here = (
            structs.replace(order, seeds=tuple(derive(seed, "turn", len(order.prompt_ids)) for seed in order.seeds))
            for order in groups
        )
        return self.generate_all(tuple(here), sampling, progress)

    def generate_all(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        for group, order in enumerate(groups):
            for index, seed in enumerate(order.seeds):
                room = min(sampling.max_new_tokens, self.options.max_tokens - len(order.prompt_ids))
                draw = self.draw(seed, structs.replace(sampling, max_new_tokens=room))
                self.vllm.submit(f"{group}/{index}", order.prompt_ids.tolist(), draw)
        done: list[EndedCompletion] = []
        while self.vllm.busy():
            ended = [self.ended(finished) for finished in self.vllm.step()]
            done += ended
            progress(ended)
        return in_order(groups, done)

    def draw(self, seed: int, sampling: Sampling) -> DrawOptions:
        return DrawOptions(
            seed=seed,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            end_ids=self.end_ids,
        )

    def refuse_longer(self, groups: tuple[GroupOrder, ...], sampling: Sampling) -> None:
        """vLLM would cut a completion short where its room ends."""
        prompt, room = max(len(group.prompt_ids) for group in groups), self.options.max_tokens
        if prompt + sampling.max_new_tokens > room:
            raise ModelError(
                f"A prompt of {prompt} tokens and a completion of up to {sampling.max_new_tokens} do not fit the"
                f" {room} that vLLM was started for; raise tasks.max_prompt_tokens, rollout.max_new_tokens"
                " or the caps of [eval] in the run's configuration."
            )

    def ended(self, finished: FinishedRequest) -> EndedCompletion:
        """As a completion of our own."""
        group, index = map(int, finished.request.split("/"))
        completion = Completion(
            ids=np.array(finished.ids, dtype=np.int32),
            logprobs=np.array(finished.logprobs, dtype=np.float32),
            entropies=None,
            finish=Finish.STOP if finished.ids[-1] in self.end_ids else Finish.LENGTH,
        )
        return EndedCompletion(group=group, index=index, completion=completion)

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        return np.array(self.vllm.logprobs(ids.tolist()), dtype=np.float32)

    def sleep(self) -> None:
        """Give back what was planned; an engine that stopped has lost its adapter."""
        self.talking = False
        self.vllm.give_back(self.part)
        self.asleep = self.part != "nothing"

    def wake(self) -> bool:
        """Take it again; the weights may have been away, and the base must be what was loaded."""
        if not self.asleep:
            return False
        self.vllm.take_again(self.part)
        self.asleep = False
        self.base.check()
        if self.part == "stop" and self.installed:
            self.put_in(*self.installed)
        return True
