"""`python -m launch ui` as a person starts it."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

pytest.importorskip("starlette", reason="needs the extra `ui`")
pytest.importorskip("uvicorn", reason="needs the extra `ui`")

from launch.ui.command import LOOK_EVERY_S
from tests.support.planted_runs import made_up
from tests.support.runs import ROOT, alive, launch, wait_until
from tests.support.window import Window

Started = tuple[subprocess.Popen[str], str]


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    """The process and its first line. The parameter: more options."""
    made_up(tmp_path / "first", steps=3)
    more: list[str] = getattr(request, "param", [])
    # The tests themselves may run under nohup, which has SIGHUP ignored.
    ui = [sys.executable, "-m", "launch", "ui", str(tmp_path), "--no-browser", "--port", "0", *more]
    argv = ["env", "--default-signal=HUP", *ui]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        yield process, process.stdout.readline().strip()
        process.kill()


def test_the_first_line_is_the_address_and_it_lets_in(started: Started) -> None:
    process, line = started
    address = urlsplit(line)
    assert (address.scheme, address.hostname, address.path) == ("http", "127.0.0.1", "/")
    assert address.query.startswith("token=") and len(address.query) > 40
    # The line comes before the page can answer; whoever is quicker waits.
    connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
    connection.request("GET", f"/?{address.query}")
    answer = connection.getresponse()
    assert answer.status == 303
    cookie = (answer.getheader("set-cookie") or "").split(";")[0]
    answer.read()
    connection.request("GET", "/api/runs", headers={"Cookie": cookie})
    assert b'"name":"first"' in connection.getresponse().read()
    connection.close()
    (listening,) = {one.laddr for one in psutil.Process(process.pid).net_connections("inet") if one.status == "LISTEN"}
    assert listening == ("127.0.0.1", address.port)


def test_ctrl_c_ends_the_page_and_says_that_no_run_ends(started: Started) -> None:
    process, line = started
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(line).port or 0, timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().status == 403
    connection.close()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.strip().endswith("the page has ended; no run was stopped")


@pytest.mark.parametrize("started", [["--control"]], indirect=True)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_an_evaluation_ends_with_its_page_however_it_ends_and_a_run_goes_on(started: Started, number: int) -> None:
    process, line = started
    address = urlsplit(line)
    page = Window(port=address.port or 0, token=parse_qs(address.query)["token"][0])
    assert page.tell("runs/first/evaluate", {"base": True, "samples": 1000}).status == 200
    assert page.tell("train", {"source": "embedded", "name": "new"}).status == 200
    evaluation, run = psutil.Process(process.pid).children()
    try:
        wait_until(lambda: "evaluated" in page.ask("jobs/1")["text"])
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
        if number != signal.SIGKILL:
            assert process.returncode == 0
            assert said.strip().endswith("the page has ended; no run was stopped; new goes on")
        wait_until(lambda: not alive(evaluation.pid))
        assert alive(run.pid)
    finally:
        os.killpg(run.pid, signal.SIGKILL)


def test_a_terminal_that_closes_ends_no_page_under_nohup(tmp_path: Path) -> None:
    made_up(tmp_path / "first", steps=3)
    argv = ["nohup", sys.executable, "-m", "launch", "ui", str(tmp_path), "--no-browser", "--port", "0"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = urlsplit(process.stdout.readline())
        page = Window(port=address.port or 0, token=parse_qs(address.query.strip())["token"][0])
        page.ask("runs")
        process.send_signal(signal.SIGHUP)
        time.sleep(4 * LOOK_EVERY_S)
        page.ask("runs")
        process.terminate()
        assert process.wait(30) == 0


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = launch("ui", tmp_path, "--no-browser", "--port", str(port))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: --port {port} cannot be used (Address already in use); choose another one, or leave it out.\n"
    )
    done = launch("ui", tmp_path / "nothing")
    assert done.returncode == 2 and "is not a folder; give the folder with the runs" in done.stderr
    done = launch("ui", "--port", "70000")
    assert done.returncode == 2 and "expected a port from 0" in done.stderr
