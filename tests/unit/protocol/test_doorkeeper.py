"""What the learner's doorkeeper sees and does that no well-formed message shows."""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from protocol import limits
from protocol.access.allowance import Conduct
from protocol.access.connection_monitor import Connection, Doorkeeper
from protocol.access.keys import create_keys, load_learner_keys
from protocol.access.sparse_log import Tally
from protocol.transport import ZmqLearnerPort
from tests.support.live_run import live_run
from tests.support.stranger import GREETING, HUGE_FRAME


def wait_for(condition: Callable[[], bool]) -> None:
    """What another thread will do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_descriptor_that_became_a_file_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="non-socket"):
        Connection(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        Connection(10**6)


@contextmanager
def guarded(endpoint: str = "tcp://127.0.0.1:*") -> Iterator[tuple[zmq.Socket[bytes], Doorkeeper]]:
    """A ROUTER that takes anybody, and its doorkeeper."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        doorkeeper = Doorkeeper(router, Tally())
        router.bind(endpoint)
        try:
            yield router, doorkeeper
        finally:
            router.disable_monitor()
            doorkeeper.close()


def address(router: zmq.Socket[bytes]) -> tuple[str, int]:
    """Where it listens."""
    host, port = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").split(":")
    return host, int(port)


def test_whoever_has_waited_longest_at_the_door_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    with guarded() as (router, doorkeeper), ExitStack() as stack:
        call = partial(socket.create_connection, address(router))
        links = [stack.enter_context(call()) for _ in range(limits.MAX_AT_DOOR + 3)]
        wait_for(lambda: doorkeeper.tally.counts["cut a connection"] >= 3)
        assert all(ends(link) for link in links[:3])
        assert not ends(links[3]) and not ends(links[-1])
        assert len(doorkeeper.connections) == limits.MAX_AT_DOOR
        stack.close()
        wait_for(lambda: not doorkeeper.connections and not doorkeeper.at_door)
        assert not doorkeeper.cut_off
    assert "others have come that have not proved a key either" in caplog.text


def test_nobody_comes_in_beyond_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Over a local socket, where nobody waits at the door."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _, doorkeeper = stack.enter_context(guarded(f"ipc://{folder}/socket"))
        links = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(limits.MAX_CONNECTIONS + 3)]
        for link in links:
            link.connect(f"{folder}/socket")
        wait_for(lambda: doorkeeper.tally.counts["cut a connection"] >= 3)
        assert ends(links[-1]) and not ends(links[0])
        assert len(doorkeeper.connections) == limits.MAX_CONNECTIONS
    assert f"there are {limits.MAX_CONNECTIONS} already" in caplog.text


def test_nobody_sends_much_before_he_has_proved_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And what he sent does not count against those who are in."""
    create_keys(tmp_path / "keys")
    learner = ZmqLearnerPort("tcp://127.0.0.1:*", load_learner_keys(tmp_path / "keys"))
    doorkeeper = learner.doorkeeper
    with closing(learner), socket.create_connection(address(learner.socket)) as link:
        link.sendall(GREETING + HUGE_FRAME + bytes(2 * limits.MAX_HANDSHAKE_BYTES))
        assert ends(link)
        wait_for(lambda: doorkeeper.tally.counts["cut a connection"] == 1)
        assert doorkeeper.left_behind == 0 and not doorkeeper.connections
    assert f"it sent more than {limits.MAX_HANDSHAKE_BYTES} bytes before it had proved a key" in caplog.text


def test_an_actor_that_is_in_stays_in_however_many_call(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        host, port = run.endpoint.removeprefix("tcp://").split(":")
        actors = {fd for fd, connection in run.port.doorkeeper.connections.items() if connection.has_proved_a_key()}
        assert len(actors) == 1
        with ExitStack() as stack:
            for _ in range(2 * limits.MAX_AT_DOOR):
                stack.enter_context(socket.create_connection((host, int(port))))
            wait_for(lambda: run.port.tally.counts["cut a connection"] >= limits.MAX_AT_DOOR)
            run.goes_on()
            assert actors <= set(run.port.doorkeeper.connections)


def test_while_few_descriptors_are_free_nobody_new_is_heard() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with guarded() as (router, doorkeeper), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        dealer.send(b"before")
        peer, _ = router.recv_multipart()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 8, hard))
        try:
            wait_for(lambda: doorkeeper.is_shut)
            with pytest.raises(TimeoutError):
                socket.create_connection(address(router), timeout=0.3)
            router.send_multipart([peer, b"old connections work on"])
            assert dealer.recv() == b"old connections work on"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_for(lambda: not doorkeeper.is_shut)
        socket.create_connection(address(router), timeout=5.0).close()


def ends(link: socket.socket) -> bool:
    """Whether the other side has hung up, after the greeting it may have sent."""
    link.settimeout(1.0)
    try:
        while link.recv(100):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_warnings_grow_with_the_logarithm(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    for _ in range(1000):
        tally.note("refused a connection", "a reason")
    assert tally.counts["refused a connection"] == 1000
    assert [record.message.split("(")[1] for record in caplog.records] == [f"{2**power} so far)" for power in range(10)]


def test_an_allowance_is_spent_by_number_and_by_bytes_and_comes_back() -> None:
    conduct = Conduct(burst=10)
    assert all(conduct.spend("a", 0) for _ in range(9))
    assert not conduct.spend("a", 2 * limits.COST_BYTES)
    assert conduct.is_shut_out("a")
    assert conduct.spend("b", 8 * limits.COST_BYTES) and not conduct.is_shut_out("b")
    time.sleep(10 / limits.ALLOWANCE_PER_S)
    assert conduct.spend("a", 0)


def test_refusals_are_counted_for_each_actor() -> None:
    conduct = Conduct()
    assert all(conduct.refused("a") for _ in range(limits.MAX_REFUSALS - 1))
    assert not conduct.is_shut_out("a")
    assert not conduct.refused("a")
    assert conduct.is_shut_out("a") and not conduct.is_shut_out("b")
    assert conduct.refused("a"), "a new start when it comes back"
