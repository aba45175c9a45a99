"""Peers who should not be there, at a run that goes on: none is told anything, none lands a group, all are logged."""

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq

from protocol.access.keys import ActorKey, create_actor_key, create_keys, load_actor_key
from protocol.codec import decode, encode
from protocol.limits import HIGH_WATER_MARK, MAX_REFUSALS, SEND_TIMEOUT_S
from protocol.messages import AnyMessage, Heartbeat, Hello, Refused, Welcome
from protocol.sockets import set_up_actor
from protocol.transport import ZmqActorPort, new_identity
from tests.support.fakes import filled, hello_of, scripted_identity, toy_orders, toy_policy
from tests.support.live_run import LiveRun, live_run
from tests.support.runs import wait_until
from tests.support.wire_examples import forge

LISTEN_S = 0.7
OLD_GREETINGS = {
    "ZMTP 1": b"\x01\x00",
    "ZMTP 2": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0",
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "nothing": b"",
    "noise": bytes(range(100)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """One run for all tests of this module."""
    with live_run(tmp_path_factory.mktemp("run")) as live:
        yield live


@dataclass(frozen=True, kw_only=True)
class Intruder:
    """A peer, and what it tries."""

    key: ActorKey | None
    identity: bytes
    hello: Hello
    version: int | None = None

    def try_at(self, endpoint: str) -> list[AnyMessage]:
        """Say Hello and deliver a group, as an actor would; returns what came back."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            if self.key:
                set_up_actor(dealer, self.key, HIGH_WATER_MARK, SEND_TIMEOUT_S, endpoint)
            dealer.linger = 0
            dealer.routing_id = self.identity
            dealer.connect(endpoint)
            for message in (self.hello, false_filled_order(), self.hello):
                self.send(dealer, message)
            return listen(dealer)

    def send(self, dealer: zmq.Socket[bytes], message: AnyMessage) -> None:
        """Nothing can be sent any more once the handshake has failed."""
        header, body, buffers = encode(message)
        if self.version is not None:
            header, body, buffers = forge(type(message).__name__, body, buffers, version=self.version)
        with suppress(zmq.Again):
            dealer.send_multipart([header, body, buffers], zmq.NOBLOCK)


def false_filled_order() -> AnyMessage:
    """A group that would be taken, if it were from an actor of the run: right but for its numbers, and too early."""
    (order,) = toy_orders(10_000, version=0)
    return filled(order, toy_policy(0))


def listen(dealer: "zmq.Socket[bytes]") -> list[AnyMessage]:
    """All that comes for a while."""
    found: list[AnyMessage] = []
    deadline = time.monotonic() + LISTEN_S
    while dealer.poll(max(0, round(1000 * (deadline - time.monotonic())))):
        found.append(decode(dealer.recv_multipart()))
    return found


def own(run: LiveRun, name: str = "other") -> ActorKey:
    """A key of the run."""
    return load_actor_key(run.keys / f"{name}.json")


def foreign(run: LiveRun) -> ActorKey:
    """The key of another run, under the same name."""
    keys = run.keys.parent / "another-run"
    if not keys.exists():
        create_keys(keys)
    return load_actor_key(keys / "actor0.json")


def intruder(key: ActorKey | None, name: str = "actor0") -> Intruder:
    """A peer that poses as this actor."""
    return Intruder(key=key, identity=new_identity(name), hello=hello_of(scripted_identity(), name))


OUTSIDERS: dict[str, tuple[Callable[[LiveRun], Intruder], str]] = {
    # Either end may notice first.
    "no key": (lambda run: intruder(None), "it left during the handshake|it does not offer CURVE encryption"),
    "wrong key": (
        lambda run: intruder(replace(foreign(run), learner_public=own(run).learner_public)),
        "its key is not in keys/allowed: public key ",
    ),
    "key of another run": (lambda run: intruder(foreign(run)), "its actor expects a learner with another key"),
    "wrong server key": (
        lambda run: intruder(replace(own(run), learner_public=foreign(run).learner_public)),
        "its actor expects a learner with another key",
    ),
    "another's id as routing id": (
        lambda run: intruder(own(run), "actor0"),
        "has the key of other",
    ),
}


@pytest.mark.parametrize("who", OUTSIDERS)
def test_who_has_no_business_here_gets_nothing(run: LiveRun, who: str, caplog: pytest.LogCaptureFixture) -> None:
    make, words = OUTSIDERS[who]
    run.port.sparse_log.counts.clear()
    assert make(run).try_at(run.endpoint) == []
    wait_until(lambda: re.search(words, caplog.text) is not None, seconds=10)
    run.goes_on()


@pytest.mark.parametrize("greeting", OLD_GREETINGS)
def test_older_and_other_programs_get_nothing_but_a_greeting(
    run: LiveRun, greeting: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.port.sparse_log.counts.clear()
    host, port = run.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as link:
        link.settimeout(LISTEN_S)
        link.sendall(OLD_GREETINGS[greeting])
        try:
            reply = link.recv(1000)
        except (TimeoutError, ConnectionResetError):
            reply = b""
    assert len(reply) <= 64, "a ZMTP greeting at most"
    wait_until(lambda: "refused a connection: it left" in caplog.text, seconds=10)
    run.goes_on()


def test_an_older_protocol_version_gets_refused_as_its_reply(run: LiveRun) -> None:
    replies = replace(intruder(own(run), "other"), version=1).try_at(run.endpoint)
    assert 1 <= len(replies) <= 3
    for reply in replies:
        assert isinstance(reply, Refused) and "speaks protocol version 1" in reply.reason
    run.goes_on()


def test_saying_hello_under_anothers_id_gets_refused_as_its_reply(run: LiveRun) -> None:
    """The right routing id for its key, and another actor's name in the Hello."""
    claim = replace(intruder(own(run), "other"), hello=hello_of(scripted_identity(), "actor0"))
    replies = claim.try_at(run.endpoint)
    assert replies
    for reply in replies:
        assert isinstance(reply, Refused)
        assert "A Hello from actor actor0 came with the key of actor other" in reply.reason
    run.goes_on()


def test_a_second_start_of_a_live_actor_is_refused_and_the_first_works_on(tmp_path: Path) -> None:
    with live_run(tmp_path, "ipc") as run:
        port = ZmqActorPort(run.endpoint, own(run, "actor0"))
        told = None
        for _ in range(100):
            port.send(hello_of(scripted_identity(), "actor0"))
            if told := port.receive(0.1):
                break
        port.close()
        assert isinstance(told, Refused) and "Actor actor0 is already connected" in told.reason


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_key_made_while_the_run_goes_on_works_until_it_is_removed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with live_run(tmp_path, kind) as run:
        port = ZmqActorPort(run.endpoint, load_actor_key(create_actor_key(run.keys, "late")))
        port.send(hello_of(scripted_identity(), "late"))
        assert isinstance(port.receive(10.0), Welcome)
        (run.keys / "allowed" / "late.json").unlink()
        with pytest.raises(Exception, match=r"late\.json: its public key is not in keys/allowed"):
            for _ in range(100):
                port.send(Heartbeat(phase="still here"))
                port.receive(0.1)
        port.close()
        assert "its key was removed from keys/allowed" in caplog.text


def test_a_spoilt_file_in_a_live_allow_list_is_ignored(run: LiveRun, caplog: pytest.LogCaptureFixture) -> None:
    spoilt = run.keys / "allowed" / "zz.json"
    spoilt.write_text("{")
    spoilt.chmod(0o600)
    wait_until(
        lambda: f"ignored a file of the allow-list: The key file {spoilt} has no valid key" in caplog.text,
        seconds=10,
    )
    spoilt.unlink()
    run.goes_on()


def test_who_is_refused_again_and_again_is_banned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with live_run(tmp_path) as run:
        key = own(run)
        port = ZmqActorPort(run.endpoint, key)
        with pytest.raises(Exception, match="is banned because it flooded or sent invalid messages"):
            for _ in range(100):
                port.socket.send_multipart([b"garbage"])
                port.receive(0.1)
        port.close()
        assert run.port.allowances.is_banned("other") and not run.port.allowances.is_banned("actor0")
        assert caplog.text.count("refused a peer") <= MAX_REFUSALS + 1
        again = intruder(key, "other").try_at(run.endpoint)
        assert again == []
        assert "its actor is banned for a while: other" in caplog.text
