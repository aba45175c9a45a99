"""What the learner's connection monitor sees and does below the level of messages."""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from protocol import limits
from protocol.access.allowance import Allowances
from protocol.access.connection_monitor import (
    IDLE_POLL_MS,
    POLL_MS,
    Connection,
    ConnectionMonitor,
    is_short_of_descriptors,
)
from protocol.access.keys import create_keys, load_learner_keys
from protocol.access.sparse_log import SparseLog
from protocol.transport import ZmqLearnerPort
from tests.support.disk_faults import no_descriptor_free
from tests.support.live_run import live_run
from tests.support.runs import wait_until
from tests.support.unauthenticated import GREETING, HUGE_FRAME


def test_a_descriptor_that_became_a_file_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="non-socket"):
        Connection(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        Connection(10**6)


@contextmanager
def monitored(
    endpoint: str = "tcp://127.0.0.1:*", max_connections: int = limits.MAX_CONNECTIONS
) -> Iterator[tuple[zmq.Socket[bytes], ConnectionMonitor]]:
    """A ROUTER without keys, and its monitor."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        monitor = ConnectionMonitor(router, SparseLog(), max_connections=max_connections)
        router.bind(endpoint)
        try:
            yield router, monitor
        finally:
            router.disable_monitor()
            monitor.close()


def address(router: zmq.Socket[bytes]) -> tuple[str, int]:
    """Where it listens."""
    host, port = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").split(":")
    return host, int(port)


def test_a_new_connection_replaces_the_oldest_unauthenticated_one(caplog: pytest.LogCaptureFixture) -> None:
    with monitored() as (router, monitor), ExitStack() as stack:
        call = partial(socket.create_connection, address(router))
        links = [stack.enter_context(call()) for _ in range(limits.MAX_UNAUTHENTICATED + 3)]
        wait_until(lambda: monitor.sparse_log.counts["cut a connection"] >= 3, seconds=10)
        assert all(ends(link) for link in links[:3])
        assert not ends(links[3]) and not ends(links[-1])
        assert len(monitor.connections) == limits.MAX_UNAUTHENTICATED
        stack.close()
        wait_until(lambda: not monitor.connections and not monitor.unauthenticated, seconds=10)
        assert not monitor.cut_fds
    assert "newer connections are unauthenticated too" in caplog.text


def test_a_connection_beyond_the_limit_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Over a local socket, where every connection counts as authenticated."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _, monitor = stack.enter_context(monitored(f"ipc://{folder}/socket", max_connections=20))
        links = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(23)]
        for link in links:
            link.connect(f"{folder}/socket")
        wait_until(lambda: monitor.sparse_log.counts["cut a connection"] >= 3, seconds=10)
        assert ends(links[-1]) and not ends(links[0])
        assert len(monitor.connections) == 20
    assert "there are 20 already" in caplog.text


def test_an_unauthenticated_connection_that_sends_much_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And its bytes do not count against the others."""
    create_keys(tmp_path / "keys")
    learner = ZmqLearnerPort("tcp://127.0.0.1:*", load_learner_keys(tmp_path / "keys"))
    monitor = learner.monitor
    with closing(learner), socket.create_connection(address(learner.socket)) as link:
        link.sendall(GREETING + HUGE_FRAME + bytes(2 * limits.MAX_HANDSHAKE_BYTES))
        assert ends(link)
        wait_until(lambda: monitor.sparse_log.counts["cut a connection"] == 1, seconds=10)
        with monitor.lock:
            assert monitor.departed_bytes == 0 and not monitor.connections
    assert f"it sent more than {limits.MAX_HANDSHAKE_BYTES} bytes before it authenticated" in caplog.text


def test_an_authenticated_actor_stays_however_many_connect(tmp_path: Path) -> None:
    with live_run(tmp_path) as run:
        host, port = run.endpoint.removeprefix("tcp://").split(":")
        actors = {fd for fd, connection in run.port.monitor.connections.items() if connection.is_authenticated()}
        assert len(actors) == 1
        with ExitStack() as stack:
            for _ in range(2 * limits.MAX_UNAUTHENTICATED):
                stack.enter_context(socket.create_connection((host, int(port))))
            wait_until(lambda: run.port.sparse_log.counts["cut a connection"] >= limits.MAX_UNAUTHENTICATED, seconds=10)
            run.goes_on()
            assert actors <= set(run.port.monitor.connections)


def test_while_few_descriptors_are_free_no_connection_is_accepted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with monitored() as (router, monitor), zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        dealer.send(b"before")
        peer, _ = router.recv_multipart()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 8, hard))
        try:
            wait_until(lambda: monitor.is_paused, seconds=10)
            with pytest.raises(TimeoutError):
                socket.create_connection(address(router), timeout=0.3)
            router.send_multipart([peer, b"old connections work on"])
            assert dealer.recv() == b"old connections work on"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: not monitor.is_paused, seconds=10)
        socket.create_connection(address(router), timeout=5.0).close()


def test_it_looks_often_only_while_there_are_byte_counts_to_look_at() -> None:
    with monitored() as (router, monitor):
        assert monitor.poll_ms() == IDLE_POLL_MS
        with socket.create_connection(address(router)):
            wait_until(lambda: monitor.poll_ms() == POLL_MS, seconds=10)
        wait_until(lambda: monitor.poll_ms() == IDLE_POLL_MS, seconds=10)
    with (
        tempfile.TemporaryDirectory() as folder,
        monitored(f"ipc://{folder}/socket") as (_, monitor),
        socket.socket(socket.AF_UNIX) as link,
    ):
        link.connect(f"{folder}/socket")
        wait_until(lambda: bool(monitor.connections), seconds=10)
        assert monitor.poll_ms() == IDLE_POLL_MS


def test_no_free_descriptor_at_all_is_short_of_descriptors() -> None:
    assert not is_short_of_descriptors()
    with no_descriptor_free():
        assert is_short_of_descriptors()
    assert not is_short_of_descriptors()


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
    sparse_log = SparseLog()
    for _ in range(1000):
        sparse_log.note("refused a connection", "a reason")
    assert sparse_log.counts["refused a connection"] == 1000
    assert [record.message.split("(")[1] for record in caplog.records] == [f"{2**power} so far)" for power in range(10)]


def test_an_allowance_is_spent_by_number_and_by_bytes_and_comes_back() -> None:
    allowances = Allowances(burst=10)
    assert all(allowances.spend("a", 0) for _ in range(9))
    assert not allowances.spend("a", 2 * limits.COST_BYTES)
    assert allowances.is_banned("a")
    assert allowances.spend("b", 8 * limits.COST_BYTES) and not allowances.is_banned("b")
    time.sleep(10 / limits.ALLOWANCE_PER_S)
    assert allowances.spend("a", 0)


def test_refusals_are_counted_for_each_actor() -> None:
    allowances = Allowances()
    assert all(allowances.count_refusal("a") for _ in range(limits.MAX_REFUSALS - 1))
    assert not allowances.is_banned("a")
    assert not allowances.count_refusal("a")
    assert allowances.is_banned("a") and not allowances.is_banned("b")
    assert allowances.count_refusal("a"), "a new start when it comes back"


def test_after_a_ban_as_many_refusals_are_forgiven_as_before_it() -> None:
    allowances, forgiven = Allowances(), limits.MAX_REFUSALS - 1
    for _ in range(2):
        assert [allowances.count_refusal("a") for _ in range(forgiven + 1)] == [*[True] * forgiven, False]
        assert allowances.is_banned("a")
        allowances.of("a").banned_until = 0.0
