"""One vLLM server: what it must be, an adapter into it, completions and log-probs out of it.

    check     model list, room, tokens, ids back, log-probs after temperature, adapters of this rank: one sentence each
    install   a folder that the server reads -> POST /load_lora_adapter under a new name -> the old name is unloaded
    draw      POST /completions: prompt ids and a seed there, token ids and their log-probs back
    logprobs  the same with echo: of a text, at temperature 1

This is the interface of `vllm serve` without any change to it. It takes an adapter only as a path on its own disk, so
adapters go through a folder that both machines have (adapter_files.py). Every value that the server or the model's
files would have a default for is given. `ignore_eos` with our own end ids keeps the model's generation_config.json out;
its other defaults can only end a completion early, and that is noticed.

A server that was restarted knows no adapter any more: NoReply, so that the engine installs it again and asks again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from actor.engines.engine import Completion
from actor.engines.server.adapter_files import AdapterFiles, Written
from actor.engines.server.completions import Completions, NoReply, Rejected, Spelling, plain_words
from protocol.messages import Finish
from shared.errors import ConfigError

LIKELIEST = 5
"""Tokens that are compared to find out whether log-probs are those after temperature."""
NOT_FOUND = 404
DENIED = (401, 403)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of every server."""

    serves: str
    """Folder of the model whose values the learner has."""
    dtype: str
    """What the learner computes in, by vLLM's name."""
    tokens: int
    """Of the longest sequence."""
    rank: int
    """Of the adapter, among those that vLLM makes room for."""
    temperature: float
    """Of training samples."""
    end_ids: tuple[int, ...]
    """Tokens that end a completion."""
    spelling: Spelling
    vocabulary: int
    """Number of tokens."""

    @property
    def command(self) -> str:
        """Starts a server that has all of it."""
        return (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {self.serves} --dtype {self.dtype}"
            f" --max-model-len {self.tokens} --enable-lora --max-lora-rank {self.rank}"
            " --logprobs-mode processed_logprobs --generation-config vllm"
        )


class VLLMServer:
    """One of them. `base` is the name of its model, `adapter` what is installed there."""

    def __init__(self, api: Completions, needs: Needs, files: AdapterFiles, probe: Callable[[], bytes]) -> None:
        """probe: makes an adapter that changes nothing."""
        self.api = api
        self.name = api.name
        self.needs = needs
        self.files = files
        self.probe = probe
        self.base = ""
        self.adapter: Written | None = None

    def close(self) -> None:
        """No more is sampled here: its adapters go, also the last one on the server."""
        if self.adapter:
            # The server may be away, or another one by now, which then has nothing to unload.
            with suppress(NoReply, ConfigError):
                self.drop(self.adapter)
        self.files.close()

    # --- what it must be

    def check(self) -> None:
        """ConfigError unless the run can be sampled there. Called again after it was away: it may be another one."""
        self.base = self.served_model()
        if self.adapter:
            # A server that was only silent still has it.
            self.drop(self.adapter)
        self.adapter = None
        ids = plain_words(self.needs.spelling, self.needs.vocabulary)[: self.needs.tokens - 1]
        self.check_tokens(ids)
        if self.needs.temperature != 1.0:
            self.check_temperature(ids)
        self.drop(self.loaded(0, self.probe()))

    def served_model(self) -> str:
        """The name of its base, which must have room for the longest sequence."""
        reply = self.asked(lambda: self.api.get("/models"))
        models = reply.get("data") if isinstance(reply, dict) else None
        bases = [one for one in models or () if isinstance(one, dict) and not one.get("parent")]
        room = bases[0].get("max_model_len") if bases else None
        if not isinstance(room, int):
            raise ConfigError(f"{self.name} is not a vLLM server: it lists no model; give http://host:8000/v1.")
        if room < self.needs.tokens:
            raise ConfigError(
                f"{self.name} takes sequences of up to {room} tokens and this run may need {self.needs.tokens}; start"
                f" it with --max-model-len {self.needs.tokens}, or lower rollout.max_new_tokens or"
                " tasks.max_prompt_tokens."
            )
        return str(bases[0]["id"])

    def check_tokens(self, ids: Sequence[int]) -> None:
        try:
            (choice,) = self.api.texts([ids], self.base)
        except Rejected as error:
            raise ConfigError(
                f"{self.name} refuses the tokens of this run ({error.said}), so it serves another model; serve"
                f" {self.needs.serves} there."
            ) from error
        remedy = f"serve {self.needs.serves} there."
        self.api.check_tokens(choice, ids, self.needs.spelling, remedy)

    def check_temperature(self, ids: Sequence[int]) -> None:
        """Between two tokens, log-probs after temperature differ by 1 / temperature as much as before."""
        at_one, at_ours = (self.likeliest(ids, temperature) for temperature in (1.0, self.needs.temperature))
        both = sorted(at_one.keys() & at_ours.keys(), key=lambda token: at_one[token])
        if len(both) < 2:
            return
        before, after = (found[both[-1]] - found[both[0]] for found in (at_one, at_ours))
        if abs(after - before) < abs(after - before / self.needs.temperature):
            raise ConfigError(
                f"{self.name} reports log-probs before temperature, and this run samples at"
                f" {self.needs.temperature:g}; start it with --logprobs-mode processed_logprobs."
            )

    def likeliest(self, ids: Sequence[int], temperature: float) -> dict[str, float]:
        """The first tokens of a completion and their log-probs."""
        body = self.drawing(ids, 0, temperature, 1) | {"logprobs": LIKELIEST}
        (choice,) = self.asked(lambda: self.api.choices(body, 1))
        (found,) = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        return found

    # --- adapters

    def install(self, version: int, adapter: bytes) -> None:
        """This adapter from now on, under a new name; the one before is unloaded."""
        # Without a reply the old one stays here, and `check` drops it.
        old = self.adapter
        self.adapter = self.loaded(version, adapter)
        if old:
            self.drop(old)

    def loaded(self, version: int, adapter: bytes) -> Written:
        written = self.files.write(version, adapter)
        try:
            self.load(written)
        except NoReply:
            self.files.remove(written)
            raise
        return written

    def load(self, written: Written) -> None:
        """ConfigError if the server can never load it."""
        try:
            self.api.post("/load_lora_adapter", {"lora_name": written.name, "lora_path": written.path})
        except Rejected as error:
            # FastAPI's own words, if there is no such address.
            if error.status == NOT_FOUND and error.said == "Not Found":
                raise self.cannot_load("it was started without", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1") from error
            raise ConfigError(
                f"{self.name} cannot load {written.path} ({error.said}); server.folder and server.seen_as must name"
                " one folder, as this machine and as the server has it."
            ) from error
        except NoReply as error:
            if "max_lora_rank" in str(error):
                option = f"--max-lora-rank {self.needs.rank}"
                raise self.cannot_load("the adapter's rank is larger than it has room for", option) from error
            if "LoRA is not enabled" in str(error):
                raise self.cannot_load("it was started without", "--enable-lora") from error
            raise

    def cannot_load(self, why: str, option: str) -> ConfigError:
        return ConfigError(f"{self.name} cannot load this run's adapter: {why}; start it with {option}.")

    def drop(self, written: Written) -> None:
        """Unload it; a server that was restarted has forgotten it by itself."""
        try:
            self.api.tell("/unload_lora_adapter", {"lora_name": written.name})
        except Rejected as error:
            if error.status != NOT_FOUND:
                raise ConfigError(f"{self.name} does not unload an adapter ({error}).") from error
        self.files.remove(written)

    # --- completions

    def draw(self, prompt: Sequence[int], seed: int, temperature: float, room: int) -> Completion:
        """One completion of at most `room` tokens."""
        (choice,) = self.asked(lambda: self.api.choices(self.drawing(prompt, seed, temperature, room), 1))
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not isinstance(ids, list) or not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise ConfigError(
                f"{self.name} returned a completion without the ids and log-probs of its tokens; it must be vLLM's own"
                " server, 0.32 or newer."
            )
        has_ended = ids[-1] in self.needs.end_ids
        if not has_ended and len(ids) < room:
            if choice.get("finish_reason") not in ("stop", "length"):
                raise NoReply(f"a completion was given up after {len(ids)} tokens")
            raise ConfigError(
                f"{self.name} ended a completion after {len(ids)} of {room} tokens with token {ids[-1]}, which is"
                " not an end token; start it with --generation-config vllm."
            )
        return Completion(
            ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            entropies=None,
            finish=Finish.STOP if has_ended else Finish.LENGTH,
        )

    def drawing(self, prompt: Sequence[int], seed: int, temperature: float, room: int) -> dict[str, Any]:
        """The body of a request. Every token can be drawn: no top-k, no top-p."""
        return {
            "model": self.adapter.name if self.adapter else self.base,
            "prompt": list(prompt),
            "max_tokens": room,
            "n": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "min_tokens": 0,
            "ignore_eos": True,
            "stop_token_ids": list(self.needs.end_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[n + 1] ids -> [n] fp32 log-probs of all but the first, at temperature 1, under what is installed."""
        model = self.adapter.name if self.adapter else self.base
        (choice,) = self.asked(lambda: self.api.texts([ids.tolist()], model))
        return np.array(self.api.logprobs_of(choice, len(ids))[1:], dtype=np.float32)

    def asked(self, request: Callable[[], Any]) -> Any:
        """What it replies. NoReply if it does not know the adapter; ConfigError if it refuses for another reason."""
        try:
            return request()
        except Rejected as error:
            if error.status == NOT_FOUND and self.adapter:
                raise NoReply(f"it has forgotten the adapter: {error.said}") from error
            if error.status in DENIED:
                raise ConfigError(
                    f"{self.name} refuses the key ({error}); set the variable {self.api.key_variable}."
                ) from error
            raise ConfigError(f"{self.name} refused a request ({error}); give the address of vLLM's /v1.") from error
