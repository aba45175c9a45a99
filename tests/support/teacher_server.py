"""A server of OpenAI's first completions interface that knows one thing: how likely each token of a prompt is."""

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from learner.objective.batch import Sample
from learner.update.forward_pass import ForwardPass, whole
from tests.support.local_server import LocalServer

Logprobs = Callable[[Sequence[int]], Sequence[float]]
"""From the ids of a text to the log-prob of each but the first."""


def logprobs_of(forward_pass: ForwardPass) -> Logprobs:
    """What the policy says, one text at a time. Its first token stands for the prompt, wherever a run ends it."""
    lock = threading.Lock()

    def found(ids: Sequence[int]) -> list[float]:
        tokens = np.array(ids, np.int32)
        sample = Sample(
            name="text[0]",
            prompt_ids=tokens[:1],
            completion_ids=tokens[1:],
            trained=np.ones(len(ids) - 1, bool),
            actor_logprobs=np.zeros(len(ids) - 1, np.float32),
            entropies=None,
            advantage=0.0,
        )
        with lock:
            return forward_pass.per_sample([whole(sample)], 1.0)["text[0]"].tolist()

    return found


class TeacherServer:
    """Runs in threads of the test until it is closed. `faults`: statuses with which the next requests are refused."""

    def __init__(self, logprobs: Logprobs, spelling: Callable[[int], str], port: int = 0) -> None:
        self.logprobs = logprobs
        self.spelling = spelling
        self.faults: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.changed: Callable[[dict[str, Any]], None] = lambda choice: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body | {"path": self.path})
                outer.keys.append(self.headers.get("Authorization"))
                status = outer.faults.pop(0) if outer.faults else 200
                reply = {"choices": outer.choices(body["prompt"])} if status == 200 else {"error": "as planned"}
                data = json.dumps(reply).encode()
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

    def choices(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """In no order, with one sampled token behind the prompt, as servers have it."""
        found = [self.choice(index, ids) for index, ids in enumerate(prompts)]
        return found[::-1]

    def choice(self, index: int, ids: list[int]) -> dict[str, Any]:
        values = [None, *self.logprobs(ids), -0.5]
        tokens = [self.spelling(token) for token in [*ids, ids[-1]]]
        choice = {"index": index, "text": "", "logprobs": {"tokens": tokens, "token_logprobs": values}}
        self.changed(choice)
        return choice

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
