"""Who may talk to the page: programs of this user that know its address, and no other web page.

The process listens on 127.0.0.1, which every program of this machine can reach, and every web page that a browser of
this machine shows. So each request is checked, in this order:

    Host            127.0.0.1:PORT or localhost:PORT    a name that somebody points at 127.0.0.1 (DNS rebinding)
    Origin          our own, if it is sent; a POST must have one
    Sec-Fetch-Site  same-origin or none, if it is sent  another page that loads or posts something here
    token           256 random bits: once in the address, then in a cookie that no script and no other site can use

The address with the token sets the cookie and redirects to the same address without the token, so that it stays in no
history. It may be clicked on another page, such as a notebook or a chat. The name of the cookie has the port, because
browsers share cookies between the ports of a host.

Answers carry a policy under which the browser runs no script but our files and asks no other host for anything. There
are no CORS headers.
Left out on purpose: TLS, passwords and accounts. To see runs of another machine, forward the port with `ssh -L`.
"""

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
READING = ("GET", "HEAD")
OTHER_SITE = "another site asked for it; paste the address that `python -m launch ui` printed into the address bar"
ONWARD = (
    # With an icon of its own, or a browser asks for one that is not there.
    '<!doctype html><title>Tandem</title><link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0; url=/"><a href="/">Tandem</a>'
)
"""Goes on to `/` as a page of ours. To a browser, a redirect after a click on another site is that site's request, and
it is sent without the cookie."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


class AccessCheck:
    """Lets a request through to the application, or answers 403 with the reason."""

    def __init__(self, inside: ASGIApp, port: int, token: str) -> None:
        self.inside = inside
        self.port = port
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.cookie = f"tandem-{port}"
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self.refusal(scope, Headers(scope=scope)) or self.entry(scope)
        await (answer or self.inside)(scope, receive, with_headers(send))

    def refusal(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """For requests that another site may have caused; None for others. A click there on the address with the token
        is let in, and does no more than that."""
        host = headers.get("host", "")
        if host not in self.hosts:
            return refused(self.where(host))
        origin = headers.get("origin")
        if origin != f"http://{host}" and (origin is not None or scope["method"] not in READING):
            return refused(OTHER_SITE)
        if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
            return None
        if is_click(headers) and self.has_token(scope):
            return self.with_cookie(HTMLResponse(ONWARD))
        return refused(OTHER_SITE)

    def where(self, host: str) -> str:
        """The page is, for a browser that asked for another host. A forwarded port may have another number."""
        if host.partition(":")[0] in {ours.partition(":")[0] for ours in self.hosts}:
            port = self.port
            return f"this page is at port {port} alone: forward the same port, ssh -L {port}:127.0.0.1:{port} MACHINE"
        return "this page is only at 127.0.0.1, not at another name"

    def entry(self, scope: Scope) -> Response | None:
        """A redirect that sets the cookie if the address has the right token, and removes it there; None if
        the request has the cookie; else a refusal."""
        if self.has_token(scope):
            return self.with_cookie(RedirectResponse("/", status_code=303))
        # Not SimpleCookie, which loses ours behind a cookie of another local program that it cannot read.
        if self.is_right(HTTPConnection(scope).cookies.get(self.cookie, "")):
            return None
        return refused("open the address that `python -m launch ui` printed; it has a token")

    def has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return scope["method"] in READING and self.is_right(given)

    def with_cookie(self, answer: Response) -> Response:
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return answer

    def is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def is_click(headers: Mapping[str, str]) -> bool:
    """Whether a whole tab is to show it: a fetch, a frame or an image of another site does not say so."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def refused(why: str) -> Response:
    return PlainTextResponse(f"Refused: {why}.\n", status_code=403)


def with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return send_with_headers
