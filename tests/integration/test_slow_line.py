"""Real sockets over a slow line: an adapter that takes longer than link.silence_s arrives, and a learner that hangs is
given up all the same."""

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

from actor.link import Link
from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.errors import PeerTimeout
from protocol.messages import Hello, Policy, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from tests.support.fakes import RULES, scripted_identity, toy_orders

SILENCE_S = 3.0
BYTES_A_S = 1_000_000
ADAPTER_BYTES = 12_000_000
BUFFER_BYTES = 65_536
"""Of the sockets on the line: larger ones would take much of the adapter at once."""


class SlowLine:
    """Takes connections for a port of this machine and passes on so many bytes a second to whoever connects."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.listener = small_socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.open = [self.listener]
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> None:
        # It ends when the listener is shut down.
        with suppress(OSError):
            while True:
                actor, _ = self.listener.accept()
                learner = small_socket()
                learner.connect(("127.0.0.1", self.port))
                self.open += [actor, learner]
                for pair in ((actor, learner, 0.0), (learner, actor, 1 / BYTES_A_S)):
                    self.threads.append(threading.Thread(target=pass_on, args=pair))
                    self.threads[-1].start()

    def close(self) -> None:
        for one in self.open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(30.0)
        for one in self.open:
            one.close()


def small_socket() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return made


def pass_on(source: socket.socket, to: socket.socket, seconds_a_byte: float) -> None:
    with suppress(OSError):
        while data := source.recv(32_768):
            to.sendall(data)
            time.sleep(len(data) * seconds_a_byte)


class Ends:
    """A learner and a link that has joined it, over a slow line."""

    def __init__(self, learner: ZmqLearnerPort, link: Link) -> None:
        self.learner = learner
        self.link = link
        welcomed = threading.Thread(target=self.welcome)
        welcomed.start()
        link.join(60.0)
        welcomed.join(60.0)

    def welcome(self) -> None:
        while (inbound := self.learner.receive(60.0)) is not None:
            self.peer = inbound.peer
            if isinstance(inbound.message, Hello):
                welcome = Welcome(run_id="run-1", heartbeat_s=1.0, silence_s=SILENCE_S, mark=1)
                self.learner.send(self.peer, welcome)
                return


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    create_keys(tmp_path / "keys")
    with ExitStack() as stack:
        keys = load_learner_keys(tmp_path / "keys")
        learner = stack.enter_context(closing(ZmqLearnerPort("tcp://127.0.0.1:*", keys)))
        line = stack.enter_context(closing(SlowLine(int(learner.endpoint.rpartition(":")[2]))))
        key = load_actor_key(tmp_path / "keys" / "actor0.json")
        actor = stack.enter_context(closing(ZmqActorPort(line.endpoint, key)))
        yield Ends(learner, Link(actor, line.endpoint, "actor0", scripted_identity(), 2, RULES))


@pytest.mark.slow
def test_an_adapter_that_takes_longer_than_the_silence_arrives(ends: Ends) -> None:
    adapter = np.random.default_rng(0).integers(0, 255, ADAPTER_BYTES, dtype=np.uint8)
    policy = Policy(
        version=0,
        adapter=adapter,
        sha256=hashlib.sha256(adapter.tobytes()).hexdigest(),
        canary_ids=np.zeros(0, np.int32),
        canary_logprobs=np.zeros(0, np.float32),
    )
    (order,) = toy_orders(0)
    began = time.monotonic()
    ends.learner.send(ends.peer, policy)
    ends.learner.send(ends.peer, order)
    found = ends.link.next_order()
    assert found and found[1].sha256 == policy.sha256
    assert time.monotonic() - began > 2 * SILENCE_S


@pytest.mark.slow
def test_a_learner_that_hangs_is_given_up_although_its_sockets_reply_to_pings(ends: Ends) -> None:
    with pytest.raises(PeerTimeout):
        ends.link.next_order()
