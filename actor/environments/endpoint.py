"""An agent and the OpenAI-compatible endpoint that it calls, in a worker that can be killed.

    POST /NUMBER/v1/chat/completions     the model's next turn, whole or streamed
    GET  /NUMBER/v1/models               its name

The endpoint listens on 127.0.0.1, on a port of the worker's own. Each episode has its number and a random key, which
are worth nothing once it has ended. A request goes through the worker's pipe to the actor as `Asked`, and waits there
until the agents of all other episodes of the order wait too, or have ended; then all turns are decoded together. The
actor itself listens nowhere, and what an agent or another program sends to a port harms one worker.

One request at a time: an episode is one conversation. A client that gives up on a request and sends it again is told
so.
"""

import hmac
import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import msgspec

from actor.environments.chat_api import (
    Asked,
    BadRequest,
    Refused,
    Said,
    StreamOptions,
    chunks,
    completion_json,
    error_json,
    models_json,
    read_request,
)
from actor.environments.contract import Program, result_of
from actor.verifiers.reward_arguments import accepted, as_in_the_data
from actor.verifiers.reward_function import EventLoop

MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 64
READ_LIMIT_S = 60.0
PATH = re.compile(r"/(\d{1,9})/v1/(chat/completions|models)/?")
Ask = Callable[[Asked], Said | Refused]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request gets."""

    status: int
    """Of HTTP."""
    body: dict[str, Any] | Said
    """A turn where it is streamed."""
    options: StreamOptions | None = None
    """Of the stream."""


class Endpoint(ThreadingHTTPServer):
    """Serves one episode after the other."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, ask: Ask) -> None:
        """ask: waits for the model's turn."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.ask = ask
        self.numbers = itertools.count(1)
        self.number, self.key = 0, ""
        self.asking = threading.Lock()
        self.told: set[str] = set()
        self.connections: set[socket.socket] = set()

    def server_bind(self) -> None:
        """Without asking for the name of the address, which may take a resolver."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def begin(self) -> tuple[str, str]:
        """Base URL and key of the next episode."""
        self.number, self.key = next(self.numbers), secrets.token_urlsafe(32)
        return f"http://127.0.0.1:{self.server_port}/{self.number}/v1", self.key

    def end(self) -> None:
        """Waits for a request that nobody waits for any more: its turn is being decoded. Clients keep connections open
        that are of no use to the next episode."""
        with self.asking:
            self.key = ""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """At most so many connections at a time."""
        if len(self.connections) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self.connections.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left, or is too slow, is no fault."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def answer(self, path: str, key: str, body: bytes | None) -> Answer:
        """body: None for a GET."""
        found = PATH.fullmatch(path.partition("?")[0])
        if not found or (found[2] == "models") != (body is None):
            reason = "Here are POST .../v1/chat/completions and GET .../v1/models; use the base URL of the episode."
            return Answer(status=404, body=error_json(reason, "not_found"))
        if not self.knows(int(found[1]), key):
            reason = "This is not the key of the episode that is running; use the api_key that came with its base URL."
            return Answer(status=401, body=error_json(reason, "invalid_api_key"))
        return Answer(status=200, body=models_json()) if body is None else self.turn(int(found[1]), key, body)

    def knows(self, number: int, key: str) -> bool:
        return bool(self.key) and number == self.number and hmac.compare_digest(key.encode(), self.key.encode())

    def turn(self, number: int, key: str, body: bytes) -> Answer:
        try:
            given = read_request(body)
            asked = given.asked()
        except BadRequest as error:
            return Answer(status=400, body=error_json(str(error), "unsupported"))
        if not self.asking.acquire(blocking=False):
            reason = "A request of this episode is being answered; send the next one after it, and set no time limit."
            return Answer(status=400, body=error_json(reason, "busy"))
        try:
            if not self.knows(number, key):
                return Answer(status=401, body=error_json("The episode has ended.", "invalid_api_key"))
            self.tell_once(given.ignored)
            said = self.ask(asked)
        finally:
            self.asking.release()
        if isinstance(said, Refused):
            return Answer(status=400, body=error_json(said.reason, said.code))
        return Answer(status=200, body=said if given.stream else completion_json(said), options=given.stream_options)

    def tell_once(self, ignored: list[str]) -> None:
        for one in ignored:
            if one not in self.told:
                self.told.add(one)
                print(f"The agent asks for {one}, which is ignored: turns are sampled as [rollout] says.", flush=True)


class Handler(BaseHTTPRequestHandler):
    """HTTP around `Endpoint.answer`."""

    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = READ_LIMIT_S

    def do_GET(self) -> None:
        self.reply(self.server.answer(self.path, self.key(), None))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            reason = f"A request needs a Content-Length, of at most {MAX_BODY_BYTES} bytes."
            self.reply(Answer(status=413, body=error_json(reason, "too_large")))
            return
        self.reply(self.server.answer(self.path, self.key(), self.rfile.read(int(length))))

    def key(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ").strip()

    def reply(self, answer: Answer) -> None:
        """A client that has left is no fault."""
        try:
            if isinstance(answer.body, Said):
                self.send_events(chunks(answer.body, answer.options))
            else:
                self.send(answer.status, "application/json", json.dumps(answer.body).encode())
        except OSError:
            self.close_connection = True

    def send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_events(self, pieces: Iterator[Mapping[str, Any]]) -> None:
        events = [*(json.dumps(piece) for piece in pieces), "[DONE]"]
        self.send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the agent's own words are the log."""


class Agent:
    """The user's program and its endpoint."""

    def __init__(self, program: Program, ask: Ask) -> None:
        self.program, self.loop = program, EventLoop()
        self.endpoint = Endpoint(ask)
        threading.Thread(target=self.endpoint.serve_forever, daemon=True).start()

    def play(self, columns: Mapping[str, str], *, scores: bool) -> object:
        """An episode; its reward, if one is wanted."""
        url, key = self.endpoint.begin()
        # For clients that are made without arguments.
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        try:
            given = as_in_the_data(columns) | {"base_url": url, "api_key": key}
            value = result_of(self.program.run, accepted(self.program.run, given), self.loop)
        finally:
            self.endpoint.end()
        if self.program.get_reward is None or not scores:
            return value
        return result_of(self.program.get_reward, {}, self.loop)
