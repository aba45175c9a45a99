"""The page of `ui` on a port of its own, with requests as a browser, or as an attacker, would send them."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.ui.access import new_token
from launch.ui.app import build_app
from launch.ui.command import listening, make_server
from launch.ui.control import Control
from launch.ui.control_routes import control_routes
from launch.ui.runs_folder import RunsFolder

WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one request."""

    status: int
    headers: Mapping[str, str]
    """Names in small letters."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        return self.json["problem"]


@dataclass(frozen=True, kw_only=True)
class Window:
    """A page that is being served."""

    port: int
    token: str

    @property
    def address(self) -> str:
        """As the command prints it."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    @property
    def guest(self) -> dict[str, str]:
        """The headers of a browser that was let in."""
        return {"Host": f"127.0.0.1:{self.port}", "Cookie": f"tandem-{self.port}={self.token}"}

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """Exactly these headers, and the path as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(status=answer.status, headers=found, body=answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """As a guest. headers: more of them, or others; `Sec_Fetch_Site` for `Sec-Fetch-Site`."""
        return self.send("GET", path, self.guest | {name.replace("_", "-"): value for name, value in headers.items()})

    def tell(self, path: str, body: Any) -> Answer:
        """As our own page does it."""
        own = self.guest | {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        return self.send("POST", f"/api/{path}", own, json.dumps(body).encode())

    def ask(self, path: str) -> Any:
        """The content of an answer that must be good."""
        answer = self.get(f"/api/{path}")
        assert answer.status == 200, answer.body
        return answer.json


@contextmanager
def window(folder: Path, *, control: bool = False) -> Iterator[Window]:
    """control: configuration files may be in this folder, too."""
    runs = RunsFolder(folder)
    allowed = Control(runs, folder) if control else None
    with listening(0) as listener:
        port, token = listener.getsockname()[1], new_token()
        server = make_server(build_app(runs, port, token, control_routes(allowed) if allowed else ()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Window(port=port, token=token)
        finally:
            if allowed:
                allowed.jobs.end()
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()
            for job in allowed.jobs.known.values() if allowed else ():
                job.waiting.join(WAIT_S)
                job.output.close()
