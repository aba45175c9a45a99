"""The only module that uses vLLM's interfaces: starting it, requests, their results, an adapter into its worker.

    versions  those that actor/engines/vllm_options.py allows, checked before anything is imported
    memory    bytes -> LoRAModel -> the worker's adapter manager -> read back and compared, bit for bit
    files     a folder -> LoRARequest -> vLLM reads it itself; uses the public interface only, nothing can be read back

The engine core runs in this process. There is no child process, so that killing the actor ends all of it. An adapter
gets a name, an id and a path that are never used again, because vLLM's prefix cache tells adapters apart by name and
path. Left out on purpose: vLLM's server, its structured output, more than one card.
"""

# vLLM is in an extra; types are checked without it.
# pyright: reportMissingImports=false

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from actor.engines.vllm_options import GiveBack, VLLMOptions, check_versions
from shared.errors import DamageError, ModelError

ENVIRONMENT = {
    # The engine core in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Threads are pinned already, and by the same rule as the learner's.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # It would set up logging for the whole process.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    # Nothing is fetched at run time: the model is a folder by now.
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An adapter inside vLLM."""

    name: str
    """Never used again."""
    number: int
    """vLLM's id, from 1 on, never used again."""
    path: str
    """Where vLLM would look for it; a folder with `files`, nothing with `memory`."""


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How one completion is drawn. Every token can be drawn: no top-k, no top-p."""

    seed: int
    """Of its own generator."""
    temperature: float
    """0 takes the most likely token."""
    max_new_tokens: int
    """Cap."""
    end_ids: tuple[int, ...]
    """Tokens that end it."""


@dataclass(frozen=True, kw_only=True)
class FinishedRequest:
    """One finished request."""

    request: str
    """Its name."""
    ids: list[int]
    """[T] drawn tokens, the end token included."""
    logprobs: list[float]
    """[T] of the drawn tokens, under the distribution they were drawn from."""
    prompt_logprobs: list[float]
    """[Tp - 1] of the prompt's tokens but the first, if they were asked for."""
    cached_tokens: int
    """Tokens of the prompt that were not computed, since another request had."""


class VLLM:
    """One vLLM engine in this process."""

    def __init__(self, options: VLLMOptions) -> None:
        check_versions(nf4=options.nf4)
        self.options = options
        self.used: set[str | int] = set()
        self.places = 0
        self.start()

    def start(self) -> None:
        """Build the engine, with no adapter in it."""
        os.environ.update(ENVIRONMENT)
        logging.getLogger("vllm").setLevel(logging.ERROR)
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        if current_platform.device_type != self.options.device:
            raise ModelError(
                f"compute.device is '{self.options.device}' and the vLLM installed here runs on"
                f" '{current_platform.device_type}'; install the other one, or set compute.device."
            )
        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(self.options)))
        self.adapter: Any = None

    def new_place(self, version: int, folder: str = "") -> Installed:
        """A name and an id that no adapter had before, in this folder or in none."""
        self.places += 1
        name = f"policy-{version}-install-{self.places}"
        # With an absolute path that does not exist, vLLM does not ask a hub for it.
        return Installed(name=name, number=self.places, path=folder or f"/nonexistent/{name}")

    def submit(self, request: str, prompt_ids: list[int], draw: DrawOptions) -> None:
        self.add(request, prompt_ids, draw, prompt_logprobs=None)

    def logprobs(self, ids: list[int]) -> list[float]:
        """[n + 1] ids -> [n] log-probs of all but the first at temperature 1; the token drawn next is not used."""
        self.add("logprobs", ids, DrawOptions(seed=0, temperature=0.0, max_new_tokens=1, end_ids=()), prompt_logprobs=0)
        (finished,) = [finished for finished in self.run() if finished.request == "logprobs"]
        return finished.prompt_logprobs

    def add(self, request: str, prompt_ids: list[int], draw: DrawOptions, prompt_logprobs: int | None) -> None:
        """Every value that vLLM or the model's files would have a default for is given."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            n=1,
            temperature=draw.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=draw.seed,
            max_tokens=draw.max_new_tokens,
            min_tokens=0,
            ignore_eos=True,
            stop_token_ids=list(draw.end_ids),
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(request, {"prompt_token_ids": prompt_ids}, params, lora_request=self.adapter)

    def run(self) -> Iterator[FinishedRequest]:
        """Decode what was queued; requests as they are finished."""
        while self.busy():
            yield from self.step()

    def busy(self) -> bool:
        """Whether something is queued or being decoded, or vLLM has not cleared away what it decoded. It does so in its
        next step, and gives no keys and values back before."""
        core = self.engine.engine_core.engine_core
        return self.engine.has_unfinished_requests() or core.scheduler.has_requests() or bool(core.batch_queue)

    def step(self) -> list[FinishedRequest]:
        return [finished_request(output) for output in self.engine.step() if output.finished]

    def forget_prefixes(self) -> None:
        """Every order starts without keys and values of an earlier one, so that it is decoded the same way again."""
        if not self.engine.reset_prefix_cache():
            raise DamageError("vLLM did not clear its prefix cache between two orders; start this actor again.")

    def take_bytes(self, adapter: Installed, tensors: dict[str, torch.Tensor], rank: int, scale: float) -> None:
        """Install from memory: tensors by layer.lora_A / layer.lora_B, fp32; they are not changed."""
        self.use(adapter)
        self.engine.collective_rpc("install_adapter", args=(adapter.number, tensors, rank, scale))
        self.adapter = lora_request(adapter)

    def take_files(self, adapter: Installed) -> None:
        """Install from the folder at its path; the one before leaves first."""
        self.use(adapter)
        for number in sorted(self.engine.list_loras()):
            self.engine.remove_lora(number)
        new = lora_request(adapter)
        self.engine.add_lora(new)
        self.adapter = new

    def use(self, adapter: Installed) -> None:
        """From here on until it is in, there is none; keys and values found under a used name would be another's."""
        self.adapter = None
        marks = {adapter.name, adapter.number, adapter.path}
        if again := sorted(map(str, marks & self.used)):
            raise DamageError(f"An adapter was to be installed under '{again[0]}', which another one had before.")
        self.used |= marks

    def give_back(self, part: GiveBack) -> None:
        """Between two orders, when nothing is queued."""
        if part == "weights":
            self.engine.sleep(level=1)
        elif part == "kv":
            self.engine.sleep(level=0)
            self.engine.release_kv_cache_memory()
        elif part == "stop":
            self.engine.engine_core.shutdown()
            del self.engine
            free_card()

    def take_again(self, part: GiveBack) -> None:
        """Undo `give_back`."""
        if part == "stop":
            self.start()
        elif part != "nothing":
            self.engine.wake_up()

    def weight_sums(self) -> dict[str, int]:
        """The frozen weights as integers; they must not change."""
        (sums,) = self.engine.collective_rpc("weight_sums")
        return sums


def engine_arguments(options: VLLMOptions) -> dict[str, Any]:
    quantised = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"} if options.nf4 else {}
    return quantised | {
        "model": str(options.folder),
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_tokens,
        "max_num_seqs": options.max_sequences,
        "max_num_batched_tokens": options.batched_tokens,
        "block_size": options.block,
        "kv_cache_memory_bytes": options.kv_bytes,
        "enable_prefix_caching": True,
        # A prompt in several parts has vLLM take back what its completion drew after each, which it cannot do on a CPU.
        "enable_chunked_prefill": options.device != "cpu",
        "enforce_eager": True,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": options.rank,
        # `auto` would read temperature and top-p from the model's files.
        "generation_config": "vllm",
        # What a token is reported with is what it was drawn from: after temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{AdapterWorker.__module__}.{AdapterWorker.__qualname__}",
        # On a CPU vLLM refuses to start with it.
        "enable_sleep_mode": options.sleeps,
        # It checks that so much is free and then takes `kv_cache_memory_bytes`: the learner has its part already.
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def free_card() -> None:
    """What an engine leaves behind in this process's pools."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def lora_request(adapter: Installed) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, adapter.path)


def finished_request(output: Any) -> FinishedRequest:
    """From vLLM's record, which has the whole completion because of FINAL_ONLY."""
    (completion,) = output.outputs
    prompt = output.prompt_logprobs
    return FinishedRequest(
        request=output.request_id,
        ids=list(completion.token_ids),
        logprobs=list(completion.logprobs.logprobs),
        prompt_logprobs=[] if prompt is None else list(prompt.logprobs),
        cached_tokens=output.num_cached_tokens or 0,
    )


class AdapterWorker:
    """Mixed into vLLM's worker, which calls these by name; `model_runner` is the worker's."""

    model_runner: Any

    def install_adapter(self, number: int, tensors: dict[str, torch.Tensor], rank: int, scale: float) -> None:
        """Old ones out, this one in, and what arrived compared with what was sent."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        for old in sorted(manager.list_adapters()):
            manager.remove_adapter(old)
        # vLLM scales B in place, so it gets a copy; it reads PEFT's names.
        named = {f"base_model.model.{name}.weight": tensor.clone() for name, tensor in tensors.items()}
        helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank * scale, "target_modules": []})
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        model = LoRAModel.from_lora_tensors(
            number,
            named,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper else None,
        )
        manager.add_adapter(model)
        manager.activate_adapter(number)
        compare(loaded_adapter(manager, rank), sent_adapter(tensors, scale, manager.lora_config.lora_dtype))

    def weight_sums(self) -> dict[str, int]:
        """Sum of the words of every frozen tensor, as shared/base/checksum.py has it."""
        from shared.base.checksum import word_sum

        tensors = self.model_runner.get_model().state_dict()
        return {name: word_sum(tensor) for name, tensor in tensors.items() if "lora_" not in name}


def sent_adapter(tensors: dict[str, torch.Tensor], scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What vLLM must have: cast first, then B scaled once."""
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return {name: tensor * scale if name.endswith("lora_B") else tensor for name, tensor in cast.items()}


def loaded_adapter(manager: Any, rank: int) -> dict[str, torch.Tensor]:
    """What vLLM's layers multiply by, by our names; layers with zeros alone are left out."""
    loaded: dict[str, torch.Tensor] = {}
    for module_name, module in manager.modules.items():
        parts = manager.packed_modules.get(module_name, [module_name])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if bool(a.any()) or bool(b.any()):
                loaded |= {f"{part}.lora_A": a[0, 0, :rank].cpu(), f"{part}.lora_B": b[0, 0, :, :rank].cpu()}
    return loaded


def compare(loaded: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    """DamageError that names the first entry which is missing, surplus or of other bits."""
    alive = {name for name, tensor in sent.items() if bool(tensor.any())}
    if lost := sorted(alive - loaded.keys()):
        raise DamageError(f"vLLM did not take the adapter's entry '{lost[0]}': it has no such layer, or dropped it.")
    if surplus := sorted(loaded.keys() - sent.keys()):
        raise DamageError(f"vLLM has adapter values in '{surplus[0]}', which this adapter does not have.")
    for name, tensor in loaded.items():
        if not torch.equal(tensor, sent[name]):
            raise DamageError(
                f"vLLM has other values than were sent in the adapter's entry '{name}': scaled twice, not scaled, or"
                " left over from another version."
            )
