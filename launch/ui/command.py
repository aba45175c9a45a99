"""`ui`: a web page of the runs in a folder, on this machine alone.

The first line of output is the address with its token, printed as soon as the port is taken. The rest is imported after
that, and a browser that is quicker waits. Unless it was given --control, the process writes nothing. It keeps nothing,
so it may be killed at any time.
"""

import asyncio
import importlib.util
import os
import signal
import socket
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigError, DataError

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn import Server

HOST = "127.0.0.1"
NICE = 10
LOOK_EVERY_S = 0.5
"""Whether it should end."""
PORT = 8420
"""Where it listens unless that is taken; then any free port."""


def show_window(*, folder: Path, port: int | None, browser: bool, control: bool) -> int:
    """Until Ctrl-C, a kill, or the end of the terminal."""
    refuse_without_extra()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder with the runs, or one run.")
    with listening(port) as listener:
        from launch.ui.access import new_token

        token = new_token()
        address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
        print(address, flush=True)
        print("this address lets you in; Ctrl-C ends the page, not the runs", flush=True)
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        going = serve(listener, folder, token, control=control)
    print("\nthe page has ended; no run was stopped", *(f"{name} goes on" for name in going), sep="; ", flush=True)
    return 0


def refuse_without_extra() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`ui` needs {' and '.join(missing)}; install with: pip install -e '.[ui]'")


def listening(port: int | None) -> socket.socket:
    """A socket that takes connections from this machine."""
    refused = OSError()
    for wanted in [port] if port is not None else [PORT, 0]:
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HOST, wanted))
        except OSError as error:
            found.close()
            refused = error
            continue
        found.listen(64)
        return found
    raise ConfigError(f"--port {port} cannot be used ({refused.strerror}); choose another one, or leave it out.")


def serve(listener: socket.socket, folder: Path, token: str, *, control: bool) -> list[str]:
    """Until it is asked to end. Returns the names of the runs that it started and that go on."""
    from launch.ui.app import build_app
    from launch.ui.runs_folder import RunsFolder

    runs, port = RunsFolder(folder), listener.getsockname()[1]
    if not control:
        # What only looks starts no process, which would have the low priority too, and takes no time from a run.
        os.nice(NICE)
        serve_until_stopped(build_app(runs, port, token), listener)
        return []
    from launch.ui.control import Control
    from launch.ui.control_routes import control_routes

    allowed = Control(runs, Path.cwd())
    try:
        serve_until_stopped(build_app(runs, port, token, control_routes(allowed)), listener)
    finally:
        going = allowed.jobs.end()
    return going


def serve_until_stopped(app: "ASGIApp", listener: socket.socket) -> None:
    with suppress(KeyboardInterrupt):
        as_ctrl_c()
        make_server(app).run(sockets=[listener])


def as_ctrl_c() -> None:
    """Take a kill and the end of the terminal for Ctrl-C."""
    # The server shuts down cleanly at SIGTERM, then raises it again. It does not handle SIGHUP.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Under `nohup` the end of the terminal is ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def make_server(app: "ASGIApp") -> "Server":
    from uvicorn import Config, Server

    class QuietServer(Server):
        """Its own loop looks ten times a second whether it should end, which a run that is watched would pay for."""

        async def main_loop(self) -> None:
            # 0: bring the date of the answers up to date as well.
            while not await self.on_tick(0):
                await asyncio.sleep(LOOK_EVERY_S)

    # Without lifespan, websockets and the parsers in C: nothing here needs them.
    config = Config(app, log_level="warning", lifespan="off", ws="none", http="h11", server_header=False)
    return QuietServer(config)
