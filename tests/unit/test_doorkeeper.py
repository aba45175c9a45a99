"""What the learner's doorkeeper sees and does that no well-formed message shows."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from protocol import limits
from protocol.conduct import Conduct
from protocol.doorkeeper import Connection, Doorkeeper
from protocol.tally import Tally


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


def test_connections_beyond_the_limit_are_cut() -> None:
    tally, links = Tally(), list[socket.socket]()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        doorkeeper = Doorkeeper(router, tally)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(limits.MAX_CONNECTIONS + 3):
            links.append(socket.create_connection(("127.0.0.1", port)))
        wait_for(lambda: tally.counts["cut a connection"] >= 3)
        assert ends(links[-1])
        assert not ends(links[0])
        for link in links:
            link.close()
        wait_for(lambda: not doorkeeper.connections)
        router.disable_monitor()
        doorkeeper.close()


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
