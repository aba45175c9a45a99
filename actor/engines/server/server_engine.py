"""The engine over vLLM servers: the completions of an order are shared among them, and none is lost with a server.

    order -> rows, one for each completion -> whichever server has room -> completions
    a server has the order's policy before it gets a row: check, install, canary against the learner's log-probs
    a server that does not reply loses its rows to the others, is asked again after a pause, and starts over

A server is in one of three states: not ready (nobody knows what it has), being prepared, or ready for one policy. It
falls back to the first when a request has no reply, or when it does not know its adapter any more, as after a restart.
All of that is decided in one thread; other threads only wait for replies. They are daemons, so that a process that ends
does not wait for them.

    patience   with no server ready for server.patience_s, the actor ends with one sentence
    repeated   a row has its own seed, and is asked for again with it
    progress   is told several times a second, also while servers are away: heartbeats go out meanwhile

The same order may get other tokens when it is asked again: a server computes what has come together, and rounding
depends on it. The journal keeps what was sampled, so that a replay does not ask.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec import structs

from actor.engines.engine import Completion, EndedCompletion, Identity, Progress, in_order
from actor.engines.server.completions import NoReply
from actor.engines.server.vllm_server import VLLMServer
from protocol.messages import GroupOrder, Policy, Sampling
from shared.errors import ModelError, UserError
from shared.model.adapter_file import digest
from shared.seeding import derive

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
BEAT_S = 0.1

log = logging.getLogger("actor")


class PolicyInstaller(Protocol):
    """Puts a policy into one server and compares its canary (actor/installer.py)."""

    def install(self, policy: Policy, *, woken: bool) -> None: ...

    def forget(self) -> None:
        """Whatever was installed is gone."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One completion to sample."""

    group: int
    index: int
    prompt: list[int]
    seed: int
    room: int
    """Most tokens."""


class Line:
    """A server, and what it was given."""

    def __init__(self, server: VLLMServer, installer: PolicyInstaller, width: int) -> None:
        """width: rows at once."""
        self.server = server
        self.installer = installer
        self.width = width
        self.is_checked = False
        self.ready_for: str | None = None
        """sha256 of a policy, empty for the base."""
        self.preparing: Future[str] | None = None
        self.rows: dict[Future[Completion], Row] = {}
        self.pause_s = self.not_before = 0.0
        self.failing_since: float | None = None
        self.why = ""

    @property
    def futures(self) -> list[Future[Any]]:
        return [*self.rows, *([self.preparing] if self.preparing else [])]

    def prepare(self, policy: Policy | None) -> str:
        """Whatever a policy needs there; the slow part of getting ready."""
        if not self.is_checked:
            self.server.check()
            self.is_checked = True
        if policy:
            self.installer.install(policy, woken=False)
        return policy.sha256 if policy else ""

    def give(self, waiting: deque[Row], policy: Policy | None, temperature: float) -> None:
        """Rows while there is room, or what it needs before it can have some."""
        wanted = policy.sha256 if policy else ""
        if self.ready_for != wanted:
            if self.preparing is None and time.monotonic() >= self.not_before:
                self.preparing = in_thread(lambda: self.prepare(policy))
            return
        while waiting and len(self.rows) < self.width:
            self.ask(waiting.popleft(), temperature)

    def ask(self, row: Row, temperature: float) -> None:
        self.rows[in_thread(lambda: self.server.draw(row.prompt, row.seed, temperature, row.room))] = row

    def take(self, waiting: deque[Row]) -> Iterator[EndedCompletion]:
        """What has come; a row without a reply waits again."""
        if self.preparing and self.preparing.done():
            done, self.preparing = self.preparing, None
            try:
                self.ready_for = done.result()
            except NoReply as fault:
                self.lose(fault)
        for future in [future for future in self.rows if future.done()]:
            row = self.rows.pop(future)
            try:
                completion = future.result()
            except NoReply as fault:
                waiting.appendleft(row)
                if self.ready_for is not None:
                    self.lose(fault)
            else:
                self.pause_s, self.failing_since = 0.0, None
                yield EndedCompletion(group=row.group, index=row.index, completion=completion)

    def lose(self, fault: NoReply) -> None:
        """From here on nobody knows what it has."""
        now = time.monotonic()
        self.installer.forget()
        self.is_checked, self.ready_for = False, None
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        self.not_before, self.why = now + self.pause_s, str(fault)
        log.warning("%s does not reply (%s); asks again in %.1f s", self.server.name, fault, self.pause_s)


class Wanted:
    """The policy that all servers must have before they sample. They install and verify it when they get work, since
    only then heartbeats go out while one has to be waited for."""

    def __init__(self) -> None:
        self.policy: Policy | None = None

    def install(self, policy: Policy, *, woken: bool) -> None:
        self.policy = policy


class ServerEngine:
    """Engine over one or more servers."""

    def __init__(self, lines: Sequence[Line], identity: Identity, patience_s: float, max_tokens: int) -> None:
        """max_tokens: of the longest sequence that the servers have room for."""
        self.lines = lines
        self.identity = identity
        self.patience_s = patience_s
        self.max_tokens = max_tokens
        self.wanted = Wanted()

    def check(self, patience_s: float) -> None:
        """Before the first order: every server is there and is what the run needs."""
        until = time.monotonic() + patience_s
        for line in self.lines:
            while not line.is_checked:
                try:
                    line.prepare(None)
                except NoReply as fault:
                    if time.monotonic() > until:
                        raise UserError(
                            f"{line.server.name} does not reply ({fault}); start it there with:"
                            f" {line.server.needs.command}"
                        ) from fault
                    time.sleep(FIRST_PAUSE_S)

    def close(self) -> None:
        for line in self.lines:
            line.server.close()

    def install(self, version: int, adapter: bytes) -> None:
        """Without a canary; a policy that has one goes to `wanted`."""
        self.wanted.policy = Policy(
            version=version,
            adapter=np.frombuffer(adapter, np.uint8),
            sha256=digest(adapter),
            canary_ids=np.zeros(0, np.int32),
            canary_logprobs=np.zeros(0, np.float32),
        )

    def generate(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """All completions of all groups together."""
        longest = max(len(group.prompt_ids) for group in groups)
        if longest + sampling.max_new_tokens > self.max_tokens:
            raise ModelError(
                f"A prompt of {longest} tokens and a completion of up to {sampling.max_new_tokens} do not fit the"
                f" {self.max_tokens} that the servers were started for; raise tasks.max_prompt_tokens,"
                " rollout.max_new_tokens or the caps of [eval] in the run's configuration."
            )
        return self.generate_all(groups, sampling, progress)

    def take_turn(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        """A server finds the keys and values of earlier turns by their tokens. A turn's seed follows from where it
        is."""
        here = (
            structs.replace(order, seeds=tuple(derive(seed, "turn", len(order.prompt_ids)) for seed in order.seeds))
            for order in groups
        )
        return self.generate_all(tuple(here), sampling, progress)

    def generate_all(
        self, groups: tuple[GroupOrder, ...], sampling: Sampling, progress: Progress
    ) -> list[list[Completion]]:
        waiting = deque(rows_of(groups, sampling.max_new_tokens, self.max_tokens))
        wanted, done = len(waiting), list[EndedCompletion]()
        while len(done) < wanted:
            for line in self.lines:
                line.give(waiting, self.wanted.policy, sampling.temperature)
            wait_any([future for line in self.lines for future in line.futures])
            ended = [one for line in self.lines for one in line.take(waiting)]
            done += ended
            progress(ended)
            self.refuse_silence()
        return in_order(groups, done)

    def refuse_silence(self) -> None:
        """UserError if no server has replied for as long as is waited."""
        now = time.monotonic()
        away = [line.failing_since for line in self.lines if line.ready_for is None and line.failing_since is not None]
        if len(away) == len(self.lines) and (silent := now - max(away)) > self.patience_s:
            names, last = " and ".join(line.server.name for line in self.lines), self.lines[-1]
            raise UserError(
                f"{names} did not reply for {silent:.0f} s ({last.why}); start it again with"
                f" `{last.server.needs.command}`, then use `resume`: nothing is lost."
            )

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Of the first server."""
        line = self.lines[0]
        try:
            line.prepare(self.wanted.policy)
            return line.server.logprobs(ids)
        except NoReply as fault:
            raise UserError(f"{line.server.name} does not reply ({fault}); start it again.") from fault

    def sleep(self) -> None:
        """It has no memory here."""

    def wake(self) -> bool:
        """What the servers have is known from their replies."""
        return False


def rows_of(groups: Sequence[GroupOrder], cap: int, max_tokens: int) -> Iterator[Row]:
    for group, order in enumerate(groups):
        prompt = order.prompt_ids.tolist()
        for index, seed in enumerate(order.seeds):
            yield Row(group=group, index=index, prompt=prompt, seed=seed, room=min(cap, max_tokens - len(prompt)))


def in_thread(work: Callable[[], T]) -> Future[T]:
    """In a daemon thread of its own, which ends with the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        # Raised again where the result is taken.
        except BaseException as fault:
            future.set_exception(fault)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_any(futures: Sequence[Future[Any]]) -> None:
    """For the first that ends, not longer than a heartbeat may."""
    if futures:
        wait(futures, timeout=BEAT_S, return_when=FIRST_COMPLETED)
    else:
        time.sleep(BEAT_S)
