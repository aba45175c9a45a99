"""An engine of ours behind the addresses of `vllm serve`, with vLLM's own sentences where it refuses something.

It knows what actor/engines/server asks: /models, /load_lora_adapter, /unload_lora_adapter, and /completions with ids in
and out or with echo. Adapters are read from the folder that a request names, when it names it, as vLLM does.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np

from actor.engines.engine import Engine
from protocol.messages import GroupOrder, Sampling
from tests.support.fakes import unheard
from tests.support.local_server import LocalServer

BASE = "served"
TOP = 5


@dataclass(kw_only=True)
class Options:
    """How it was started, and what is wrong with it."""

    max_model_len: int = 64
    enable_lora: bool = True
    runtime_updates: bool = True
    max_lora_rank: int = 64
    processed: bool = True
    key: str = ""
    vocabulary: int = 1000
    stale: bytes | None = None
    """What it has, whatever adapter it is told to load."""
    dies_at: int | None = None
    """Number of a draw at which it is gone."""
    faults: list[int] = field(default_factory=list[int])
    """Statuses of the next draws."""
    delay_s: float = 0.0
    """Of each draw."""
    changed: Callable[[dict[str, Any]], None] = lambda choice: None
    """What is wrong with every choice."""


class Refusal(Exception):
    """A status and a body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def said(status: int, message: str) -> Refusal:
    """As vLLM says it."""
    return Refusal(status, {"error": {"message": message, "type": "planned", "param": None, "code": status}})


class ServedEngine:
    """Runs in threads of the test until it is closed."""

    def __init__(
        self,
        engine: Engine,
        spelling: Callable[[int], str],
        options: Options | None = None,
        *,
        base: bytes = b"",
        port: int = 0,
    ) -> None:
        """base: the adapter that stands for none."""
        self.engine = engine
        self.spelling = spelling
        self.options = options or Options()
        self.adapters = {BASE: base}
        self.installed: bytes | None = None
        self.lock = threading.Lock()
        self.drawn: list[dict[str, Any]] = []
        self.loads: list[tuple[str, str]] = []
        self.unloaded: list[str] = []
        self.gone = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                try:
                    if outer.options.key and self.headers.get("Authorization") != f"Bearer {outer.options.key}":
                        raise Refusal(401, {"error": "Unauthorized"})
                    status, reply = 200, outer.reply(self.path, body)
                except Refusal as refusal:
                    status, reply = refusal.status, refusal.body
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = LocalServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        """As if killed."""
        self.server.shutdown()
        self.server.server_close()
        self.gone.set()

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        if path == "/v1/models":
            adapters = [{"id": name, "parent": BASE} for name in self.adapters if name != BASE]
            return {"data": [{"id": BASE, "parent": None, "max_model_len": self.options.max_model_len}, *adapters]}
        if path == "/v1/load_lora_adapter" and self.options.runtime_updates:
            return self.load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter" and self.options.runtime_updates:
            return self.unload(body["lora_name"])
        if path == "/v1/completions":
            return {"choices": [self.echoed(body) if body.get("echo") else self.draw(body)]}
        raise Refusal(404, {"detail": "Not Found"})

    def load(self, name: str, path: str) -> str:
        if not self.options.enable_lora:
            raise said(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.")
        folder = Path(path)
        if not folder.is_dir():
            raise said(404, f"Loading lora {name} failed: No adapter found for {path}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.options.max_lora_rank:
            raise said(500, f"LoRA rank {rank} is greater than max_lora_rank {self.options.max_lora_rank}.")
        adapter = (folder / "adapter_model.safetensors").read_bytes()
        self.adapters[name] = adapter if self.options.stale is None else self.options.stale
        self.loads.append((name, path))
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        if self.adapters.pop(name, None) is None:
            raise said(404, f"The lora adapter '{name}' cannot be found.")
        self.unloaded.append(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def adapter_of(self, body: dict[str, Any]) -> bytes:
        name = body.get("model", BASE)
        if name not in self.adapters:
            raise said(404, f"The model `{name}` does not exist.")
        return self.adapters[name]

    def use(self, adapter: bytes) -> None:
        if adapter != self.installed:
            self.engine.install(0, adapter)
            self.installed = adapter

    def echoed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Log-probs of a text, with one sampled token behind it."""
        (ids,), adapter = body["prompt"], self.adapter_of(body)
        if over := [token for token in ids if token >= self.options.vocabulary]:
            raise said(400, f"Token id {over[0]} is out of vocabulary")
        with self.lock:
            self.use(adapter)
            found = self.engine.logprobs(np.array(ids, np.int32)).tolist()
        tokens = [self.spelling(token) for token in [*ids, ids[-1]]]
        return {"index": 0, "logprobs": {"tokens": tokens, "token_logprobs": [None, *found, -0.5]}}

    def draw(self, body: dict[str, Any]) -> dict[str, Any]:
        adapter = self.adapter_of(body)
        self.drawn.append(body)
        if self.options.dies_at is not None and len(self.drawn) >= self.options.dies_at:
            if len(self.drawn) == self.options.dies_at:
                threading.Thread(target=self.close, daemon=True).start()
            raise ConnectionAbortedError
        if self.options.faults:
            raise said(self.options.faults.pop(0), "as planned")
        time.sleep(self.options.delay_s)
        order = GroupOrder(
            group_id="served", prompt_ids=np.array(body["prompt"], np.int32), columns={}, seeds=(body["seed"],)
        )
        sampling = Sampling(temperature=body["temperature"], max_new_tokens=body["max_tokens"])
        with self.lock:
            self.use(adapter)
            ((one,),) = self.engine.generate((order,), sampling, unheard)
        ids = one.ids.tolist()
        if len(ids) < body["max_tokens"] and ids[-1] not in body["stop_token_ids"]:
            ids[-1] = body["stop_token_ids"][0]
        choice = {
            "index": 0,
            "finish_reason": "stop" if ids[-1] in body["stop_token_ids"] else "length",
            "token_ids": ids,
            "logprobs": {"token_logprobs": one.logprobs.tolist(), "top_logprobs": [self.top(body["temperature"])]},
        }
        self.options.changed(choice)
        return choice

    def top(self, temperature: float) -> dict[str, float]:
        """Of the first token; its scores differ by one each."""
        scale = temperature if self.options.processed and temperature else 1.0
        return {f"token_id:{token}": -1.0 - token / scale for token in range(TOP)}
