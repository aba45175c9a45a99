"""A bit that flips under CURVE: the learner hangs up, the actor goes deaf, and both speak again."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from protocol.access.keys import create_keys, load_actor_key, load_learner_keys
from protocol.messages import Hello, Welcome
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from tests.chaos.byte_proxy import ByteProxy, Direction, byte_proxy
from tests.support.fakes import hello_of, scripted_identity

DEADLINE_S = 60.0
WELCOME = Welcome(run_id="run-1", heartbeat_s=2.0, silence_s=60.0, mark=0)


class Line:
    """Both ends of a line and what is between them."""

    def __init__(self, learner: ZmqLearnerPort, actor: ZmqActorPort, proxy: ByteProxy) -> None:
        self.learner = learner
        self.actor = actor
        self.proxy = proxy

    def talk(self) -> None:
        """Hello until there is a Welcome."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.actor.send(hello_of(scripted_identity()))
            while (inbound := self.learner.receive(0.1)) is not None:
                assert isinstance(inbound[1], Hello)
                self.learner.send(inbound[0], WELCOME)
            if self.actor.receive(0.1) == WELCOME:
                return
        raise AssertionError("nothing was heard")

    def is_quiet(self) -> None:
        """Take in what is still on its way."""
        while self.actor.receive(0.3) is not None:
            pass


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    create_keys(tmp_path / "keys")
    with ExitStack() as stack:
        keys = load_learner_keys(tmp_path / "keys")
        learner = stack.enter_context(closing(ZmqLearnerPort("tcp://127.0.0.1:*", keys)))
        proxy = stack.enter_context(byte_proxy(int(learner.endpoint.rpartition(":")[2]), seed=3))
        key = load_actor_key(tmp_path / "keys" / "actor0.json")
        actor = stack.enter_context(closing(ZmqActorPort(f"tcp://127.0.0.1:{proxy.port}", key)))
        yield Line(learner, actor, proxy)


@pytest.mark.parametrize("direction", ["to actor", "to learner"])
def test_after_a_flipped_bit_both_ends_speak_again(line: Line, direction: Direction) -> None:
    line.talk()
    line.is_quiet()
    before = line.actor.socket
    line.proxy.damage("corrupt", direction)
    while not line.proxy.done:
        line.talk()
    line.talk()
    assert line.proxy.done == [f"corrupt {direction}"]
    assert (line.actor.socket is not before) == (direction == "to actor")
