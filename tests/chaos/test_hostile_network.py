"""A run through a line that loses, delays, doubles, swaps and damages messages ends as if it did not.

Learner and actor are real processes that are started once: nothing restarts them, so each recovers by itself or fails.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.commands.run import make_run
from launch.presets.load import load_config
from protocol.limits import MAX_HANDSHAKE_FAILURES
from tests.chaos.byte_proxy import ByteProxy, byte_proxy
from tests.chaos.message_proxy import FAULTS, message_proxy
from tests.chaos.prepared import CHAOS
from tests.chaos.trial import outcome
from tests.support.runs import ROOT, free_port, num_rows, wait_until

STEPS = 14
NETWORK = CHAOS | {"run.steps": STEPS, "checkpoint.every": 4, "link.silence_s": 40.0}


def prepared(folder: Path, learner_port: int) -> Path:
    settings = NETWORK | {"link.endpoint": f"tcp://127.0.0.1:{learner_port}"}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return make_run(folder, load_config("embedded", overrides)).path


@contextmanager
def processes(
    run: Path, port: int, before_learner: Callable[[], None] | None = None
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Learner and actor, the actor dialling this port; neither outlives the block. `before_learner` happens with
    the actor there and no learner."""
    files = ["--key", str(run / "keys" / "actor0.json"), "--config", str(run / "config.json")]
    argvs = [["learner", "--run", str(run)], ["actor", "--connect", f"tcp://127.0.0.1:{port}", *files]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for argv in reversed(argvs) if before_learner else argvs:
            if argv[0] == "learner" and before_learner:
                before_learner()
            with (run / "logs" / f"{argv[0]}.log").open("wb") as log:
                started.append(subprocess.Popen([sys.executable, "-m", *argv], cwd=ROOT, stdout=log, stderr=log))
        yield started[::-1] if before_learner else started
    finally:
        for process in started:
            process.kill()
            process.wait()


def check_end(run: Path, started: list["subprocess.Popen[bytes]"]) -> dict[str, Any]:
    """Both are done by themselves; what the run came to."""
    for name, process in zip(("learner", "actor"), started, strict=True):
        assert process.wait(150) == 0, (name, (run / "logs" / f"{name}.log").read_text()[-3000:])
    return outcome(run)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without a proxy."""
    port = free_port()
    run = prepared(tmp_path_factory.mktemp("network") / "run", port)
    with processes(run, port) as started:
        return check_end(run, started)


@pytest.mark.timeout(240)
def test_messages_lost_late_doubled_swapped_and_damaged_change_nothing(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    port = free_port()
    run = prepared(tmp_path / "run", port)
    with (
        message_proxy(f"tcp://127.0.0.1:{port}", run / "keys", seed=5) as proxy,
        processes(run, proxy.port) as started,
    ):
        assert check_end(run, started) == expected
    assert set(proxy.done) == set(FAULTS) and proxy.done.total() >= 30, proxy.done


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_line_that_stalls_breaks_and_flips_bits_changes_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    port = free_port()
    run = prepared(tmp_path / "run", port)
    with byte_proxy(port, seed=1) as proxy, processes(run, proxy.port) as started:
        for step, fault in enumerate(FAULTS_ON_THE_LINE, start=1):
            wait_until(lambda step=step: num_rows(run) >= step, f"step {step}", 60.0)
            fault(proxy)
            wait_until(lambda step=step: len(proxy.done) >= step, f"fault {step}", 30.0)
        assert check_end(run, started) == expected
    assert len(proxy.done) == len(FAULTS_ON_THE_LINE)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_forwarder_that_takes_calls_before_there_is_a_learner_changes_nothing(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    port = free_port()
    run = prepared(tmp_path / "run", port)

    def hang_up() -> None:
        with socket.create_server(("127.0.0.1", port)) as forwarder:
            forwarder.settimeout(60.0)
            for _ in range(5 * MAX_HANDSHAKE_FAILURES):
                forwarder.accept()[0].close()

    with processes(run, port, hang_up) as started:
        assert check_end(run, started) == expected


@pytest.mark.long
@pytest.mark.timeout(240)
def test_unauthenticated_peers_change_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    port = free_port()
    run = prepared(tmp_path / "run", port)
    with processes(run, port) as started:
        wait_until(lambda: num_rows(run) >= 1, "step 1", 60.0)
        argv = [sys.executable, "-m", "tests.support.unauthenticated", "all", "127.0.0.1", str(port), "5"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
        assert int(done.stdout) > 500
        assert check_end(run, started) == expected


def slow_down(proxy: ByteProxy) -> None:
    proxy.delay_s = 0.005
    proxy.done.append("delay")


FAULTS_ON_THE_LINE = (
    slow_down,
    lambda proxy: proxy.damage("corrupt", "to actor"),
    lambda proxy: proxy.damage("corrupt", "to learner"),
    lambda proxy: proxy.cut(1.5),
    lambda proxy: proxy.damage("truncate", "to learner"),
    lambda proxy: proxy.stall(1.5),
    lambda proxy: proxy.damage("truncate", "to actor"),
    lambda proxy: proxy.damage("corrupt", "to actor"),
)
"""One a step; the link is down for longer than any heartbeat, and for longer than three of them."""
