"""Who gets in: the right token, from this machine, from our own page. Everything else is 403, whatever it asks for."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("starlette", reason="needs the extra `ui`")
pytest.importorskip("uvicorn", reason="needs the extra `ui`")

from shared.run.evaluation import write_evaluation
from tests.support.planted_runs import made_up
from tests.support.window import Answer, Window, window
from tests.support.window_runs import evaluation

SECRET = "what only a guest may see"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    folder = tmp_path_factory.mktemp("runs")
    made_up(folder / "first", steps=3)
    made_up(folder / "second", steps=3)
    (folder.parent / "outside").mkdir()
    write_evaluation(folder.parent / "outside", evaluation(SECRET, 3, [True, False]))
    made_up(folder.parent / "outside" / "secret", steps=3)
    (folder / "link").symlink_to(folder.parent / "outside" / "secret")
    (folder / "notes.txt").write_text(SECRET)
    with window(folder) as opened:
        yield opened


def test_the_address_lets_in_once_and_leaves_no_token_behind(page: Window) -> None:
    host = {"Host": f"127.0.0.1:{page.port}"}
    answer = page.send("GET", f"/?token={page.token}", host)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"tandem-{page.port}={page.token};")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    followed = page.send("GET", "/", host | {"Cookie": cookie.split(";")[0]})
    assert followed.status == 200 and b"<main" in followed.body
    again = page.send("GET", f"/?token={page.token}", host | {"Cookie": cookie.split(";")[0]})
    assert (again.status, again.headers["location"]) == (303, "/")


def clicked(page: Window, path: str, method: str = "GET", **headers: str) -> Answer:
    """On a page of another site, without our cookie. headers: more of them, or others."""
    sent = {"Host": f"127.0.0.1:{page.port}", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return page.send(method, path, sent | {"Sec-Fetch-Dest": "document"} | more)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_the_address_may_be_clicked_on_another_page(page: Window, site: str) -> None:
    answer = clicked(page, f"/?token={page.token}", Sec_Fetch_Site=site)
    assert answer.status == 200 and page.token.encode() not in answer.body
    assert answer.headers["set-cookie"].startswith(f"tandem-{page.port}={page.token};")
    assert b'content="0; url=/"' in answer.body and b"<main" not in answer.body


def test_a_click_on_another_page_does_nothing_but_let_in(page: Window) -> None:
    right = f"token={page.token}"
    for path in ("/", "/?token=wrong", "/api/runs"):
        refused = clicked(page, path, Cookie=page.guest["Cookie"])
        assert refused.status == 403 and "set-cookie" not in refused.headers
        assert b"paste the address that `python -m launch ui` printed" in refused.body
    assert b"first" not in clicked(page, f"/api/runs?{right}").body
    others: list[dict[str, str]] = [
        {"Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"},
        {"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"},
        {"Sec_Fetch_Dest": "iframe"},
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
    ]
    for headers in others:
        refused = clicked(page, f"/?{right}", **headers)
        assert refused.status == 403 and "set-cookie" not in refused.headers
    own = f"http://127.0.0.1:{page.port}"
    assert clicked(page, f"/?{right}", "POST", Origin=own).status == 403


@pytest.mark.parametrize("token", ["", "x", "A" * 43, "%00", "../", "\u00ff"])
def test_a_wrong_token_does_not(page: Window, token: str) -> None:
    quoted = token.encode("latin-1").decode("latin-1") if token.isascii() else "%FF"
    host = {"Host": f"127.0.0.1:{page.port}"}
    for path in (f"/?token={quoted}", f"/api/runs?token={quoted}", f"/static/app.js?token={quoted}"):
        assert page.send("GET", path, host).status == 403
    for cookie in (f"tandem-{page.port}={quoted}", f"tandem-1={page.token}", "=;;=", 'a="', "tandem"):
        assert page.send("GET", "/api/runs", host | {"Cookie": cookie}).status == 403


@pytest.mark.parametrize("other", ['prefs={"a":1}', "name=John Smith", "a,b=[1]", "x", '"', "caf\u00e9=1"])
def test_cookies_of_other_programs_lock_nobody_out(page: Window, other: str) -> None:
    ours = page.guest["Cookie"]
    for cookie in (f"{other}; {ours}", f"{ours}; {other}", f"{other};{ours};{other}"):
        assert page.get("/api/runs", Cookie=cookie).status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/first/overview", "/static/app.js", "/nothing"])
def test_nothing_is_told_without_the_token(page: Window, path: str) -> None:
    answer = page.send("GET", path, {"Host": f"127.0.0.1:{page.port}"})
    assert answer.status == 403
    assert answer.body == b"Refused: open the address that `python -m launch ui` printed; it has a token.\n"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": "127.0.0.1.evil.example:8420"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_name_or_site_is_refused_even_with_the_cookie(page: Window, headers: dict[str, str]) -> None:
    assert page.get("/api/runs", **headers).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "127.0.0.1"])
def test_a_forwarded_port_of_another_number_is_named(page: Window, host: str) -> None:
    answer = page.get("/", Host=host)
    assert answer.status == 403
    words = f"this page is at port {page.port} alone: forward the same port, ssh -L {page.port}:127.0.0.1:{page.port}"
    assert words in answer.body.decode()
    assert b"not at another name" in page.get("/", Host="evil.example:9000").body


def test_our_own_page_may_ask(page: Window) -> None:
    own = f"http://127.0.0.1:{page.port}"
    assert page.get("/api/runs", Origin=own, Sec_Fetch_Site="same-origin").status == 200
    name = f"localhost:{page.port}"
    assert page.get("/api/runs", Host=name, Origin=f"http://{name}").status == 200
    assert page.get("/api/runs", Host=name, Origin=own).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed_and_no_other_site_may_try(page: Window, method: str) -> None:
    own = {"Origin": f"http://127.0.0.1:{page.port}"}
    assert page.send(method, "/api/runs", page.guest).status == 403
    assert page.send(method, "/api/runs", page.guest | {"Origin": "http://evil.example"}).status == 403
    assert page.send(method, "/api/runs", page.guest | own).status == 405
    assert "access-control-allow-origin" not in page.send(method, "/api/runs", page.guest | own).headers


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/nothing", "/api/runs/nothing/overview"])
def test_every_answer_forbids_foreign_and_inline_script(page: Window, path: str) -> None:
    headers = page.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert re.search(r"https?:|\*", policy) is None
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers and "server" not in headers


TRICKS = (
    "..",
    "../outside/secret",
    "..%2foutside%2fsecret",
    "%2e%2e%2foutside%2fsecret",
    "%252e%252e%252f",
    "..%5coutside",
    "link",
    "notes.txt",
    ".",
    "%00",
    "first%00",
    "first/../first",
    "%2fetc",
    "first%2f..%2ffirst",
    "~",
    "%ff%fe",
    "a" * 5000,
)


@pytest.mark.parametrize("trick", TRICKS)
def test_a_name_cannot_leave_the_folder(page: Window, trick: str) -> None:
    for path in (f"/api/runs/{trick}/overview", f"/api/runs/{trick}/steps/1/0", f"/static/{trick}", f"/{trick}"):
        answer = page.get(path)
        assert answer.status in (400, 404), path
        assert SECRET.encode() not in answer.body and b"secret" not in answer.body.replace(b"outside/secret", b"")
    answer = page.get(f"/api/compare?runs=first/{trick}")
    assert answer.status in (400, 404)


@pytest.mark.parametrize("label", ["../../../outside/{}", "{}", "..", "a" * 5000, "%00", "%ff"])
def test_a_label_cannot_leave_the_folder(page: Window, label: str) -> None:
    answer = page.get(f"/api/compare?runs=first/second&label={label.format(quote(SECRET))}")
    assert answer.status == 200
    assert [pair["changed"] for pair in answer.json["pairs"]] == [[]] and not answer.json["pairs"][0]["ways"]
    assert "These runs have no evaluation" in answer.json["pairs"][0]["problem"]


def test_a_name_that_is_no_utf8_hides_no_other_run(tmp_path: Path) -> None:
    made_up(tmp_path / "first", steps=3)
    made_up(tmp_path / os.fsdecode(b"caf\xe9"), steps=3)
    (tmp_path / os.fsdecode(b"caf\xe9.toml")).touch()
    with window(tmp_path, control=True) as opened:
        assert [run["name"] for run in opened.ask("runs")["runs"]] == ["first"]
        assert opened.get("/api/runs/caf%e9/overview").status == 404
        assert "embedded" in opened.ask("form?source=embedded")["sources"]


@pytest.mark.parametrize("value", ["-1", "1e3", "x", "", "%00", "../..", "1" * 400, "\u0661".encode().hex(), "1;2"])
@pytest.mark.parametrize("name", ["first", "last", "points"])
def test_a_number_is_a_number(page: Window, name: str, value: str) -> None:
    answer = page.get(f"/api/runs/first/curves?{name}={value}")
    if value == "":
        assert answer.status == 200
        return
    assert answer.status == 400
    assert answer.problem.startswith(f"{name} got ") and "expected a whole number" in answer.problem


def test_only_the_given_run_is_shown_if_it_was_given(tmp_path: Path) -> None:
    made_up(tmp_path / "first", steps=3)
    made_up(tmp_path / "second", steps=3)
    with window(tmp_path / "first") as opened:
        assert [run["name"] for run in opened.ask("runs")["runs"]] == ["first"]
        assert opened.get("/api/runs/second/overview").status == 404
