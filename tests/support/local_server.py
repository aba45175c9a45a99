"""The HTTP server of the tests. Its threads outlive a client that was killed, and may outlive the test: what they would
print of it then would be in another test's output."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no fault."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
