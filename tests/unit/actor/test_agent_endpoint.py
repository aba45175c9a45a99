"""The endpoint of an agent, over real sockets and processes: what is answered, what is refused, and how it fails."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from actor.environments.chat_api import Asked, ChatMessage, Refused, Said
from actor.environments.contract import ToolCall, describe_in_process
from actor.environments.endpoint import Endpoint
from actor.environments.pool import EnvironmentPool, fault_of
from actor.environments.worker import Act, Acted, Say
from protocol.outcome import Outcome
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError
from tests.support.runs import wait_until

SOURCE = '''
import http.client, json, os, sys, threading, time, urllib.error, urllib.request
from urllib.parse import urlsplit

def call(base_url, api_key, body=None, path="/chat/completions"):
    """Status and JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base_url + path, data, {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

def user(text, **more):
    return {"model": "any", "messages": [{"role": "user", "content": text}], **more}

def called(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}

def tell(base_url, api_key, say="Hello", **columns):
    """Sends what the task says, and writes what comes back where a test can read it."""
    found = call(base_url, api_key, user(say, **json.loads(columns.get("more", "{}"))))
    with open(columns["out"], "w") as file:
        json.dump(found, file)
    return 0.75

def places(base_url, api_key, out, **columns):
    """Where a request is no request."""
    found = [
        call(base_url, "wrong", user("x")),
        call(base_url, "", user("x")),
        call(base_url + "0", api_key, user("x")),
        call(base_url.rpartition("/")[0] + "/v2", api_key, user("x")),
        call(base_url, api_key, user("x"), path="/responses"),
        call(base_url, api_key, None, path="/models"),
        call(base_url, api_key, None),
        call(base_url, api_key, {"messages": []}),
        call(base_url, api_key, {"messages": "x"}),
        call(base_url, api_key, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}),
        call(base_url, api_key, {"messages": [{"role": "jester", "content": "x"}]}),
        call(base_url, api_key, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        call(base_url, api_key, {"messages": [called("{1}"), *user("x")["messages"]]}),
        call(base_url, api_key, {"messages": [called('{"a": %d}' % 10**30), *user("x")["messages"]]}),
    ]
    host = urlsplit(base_url)
    line = http.client.HTTPConnection(host.hostname, host.port)
    line.request("POST", host.path + "/chat/completions", b"x" * 10, {"Content-Length": "99999999"})
    found.append((line.getresponse().status, {}))
    with open(out, "w") as file:
        json.dump([host.hostname, found], file)
    return 1

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def busy(base_url, api_key, out, **columns):
    """Two requests at once, and one that nobody waits for."""
    first = []
    thread = threading.Thread(target=lambda: first.append(call(base_url, api_key, user("slow"))))
    thread.start()
    wait_for(out + ".asked")
    second = call(base_url, api_key, user("quick"))
    with open(out + ".second", "w") as file:
        json.dump(second, file)
    thread.join()
    threading.Thread(target=call, args=(base_url, api_key, user("left alone")), daemon=True).start()
    wait_for(out + ".left")
    return first[0][0]

def late(base_url, api_key, out, **columns):
    """A thread of the episode before asks with its key."""
    before = os.environ.get("BEFORE")
    os.environ["BEFORE"] = json.dumps([base_url, api_key])
    if before:
        with open(out, "w") as file:
            json.dump([call(*json.loads(before), user("x")), os.environ["OPENAI_BASE_URL"] == base_url], file)
    return None

def fail(base_url, api_key, at="", how="", **columns):
    for turn in ("first", "second", "end"):
        if at == turn:
            if how == "hang":
                time.sleep(600)
            if how == "spin":
                while True:
                    pass
            if how == "crash":
                os.kill(os.getpid(), 11)
            if how == "exit":
                sys.exit(0)
            if how == "leave":
                os._exit(3)
            if how == "raise":
                raise ValueError("on purpose")
            if how == "type":
                return "much"
            if how == "flood":
                for _ in range(100_000):
                    print("flood " * 20)
        if turn != "end":
            call(base_url, api_key, user("x"))
    return 0.5

class Twice:
    async def run(self, base_url):
        self.seen = base_url
        return "not a number, and not asked"

    def get_reward(self):
        return float(self.seen.startswith("http://127.0.0.1:"))

class NoRun:
    pass
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(SOURCE)
    return path


def config_of(file: Path, name: str, **changes: Any) -> EnvironmentConfig:
    fields: dict[str, Any] = {"step_limit_s": 20.0} | changes
    return EnvironmentConfig(kind="agent", function=f"{file}:{name}", **fields)


def opened(file: Path, name: str, **changes: Any) -> Any:
    return closing(EnvironmentPool(config_of(file, name, **changes)))


def ask(pool: EnvironmentPool, calls: dict[int, Any]) -> dict[int, Any]:
    return pool.ask(calls, lambda: None)


def act(**columns: str) -> Act:
    return Act(columns=columns, scores=True)


def said(text: str = "Good.", *calls: ToolCall, cut: bool = False) -> Say:
    return Say(reply=Said(number=1, text=text, calls=list(calls), is_cut=cut, read=7, written=3))


@pytest.fixture(scope="module")
def teller(file: Path) -> Iterator[EnvironmentPool]:
    with opened(file, "tell") as pool:
        yield pool


def told(pool: EnvironmentPool, out: Path, reply: Say | None, **columns: str) -> tuple[Any, Any]:
    """What the actor was asked, and what the agent got: status and body."""
    asked = ask(pool, {0: act(out=str(out), **columns)})[0]
    if reply is not None:
        assert ask(pool, {0: reply}) == {0: Acted(value=0.75)}
    return asked, json.loads(out.read_text())


def test_a_request_waits_for_the_turn_and_gets_it_as_openai_writes_it(teller: EnvironmentPool, tmp_path: Path) -> None:
    asked, (status, body) = told(teller, tmp_path / "out", said("Good."), say="How are you?")
    assert asked == Asked(messages=[ChatMessage(role="user", text="How are you?")], tools="", may_call=True)
    assert status == 200 and body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good."} and choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_calls_are_told_with_ids_and_arguments_as_json(teller: EnvironmentPool, tmp_path: Path) -> None:
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    reply = said("", ToolCall(name="add", arguments={"left": 1}), ToolCall(name="sub", arguments={}))
    asked, (_, body) = told(teller, tmp_path / "out", reply, more=f'{{"tools": {tools}, "temperature": 0.3}}')
    assert asked.tools == tools and asked.may_call
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["call_1_0", "call_1_1"]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"left": 1}'}


def test_a_turn_that_the_cap_has_ended_says_so(teller: EnvironmentPool, tmp_path: Path) -> None:
    _, (_, body) = told(teller, tmp_path / "out", said("Goo", cut=True), more='{"tool_choice": "none"}')
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ('{"n": 2}', "n = 2: an episode is one conversation"),
        ('{"stop": ["x"]}', "stop: "),
        ('{"logprobs": true}', "logprobs: "),
        ('{"response_format": {"type": "json_object"}}', "response_format: "),
        ('{"tool_choice": "required"}', "tool_choice: only"),
        ('{"functions": [{}]}', "functions: use tools"),
    ],
)
def test_what_would_change_the_answer_is_refused(teller: EnvironmentPool, tmp_path: Path, more: str, part: str) -> None:
    """Without a turn of the model."""
    ended, (status, body) = told(teller, tmp_path / "out", None, more=more)
    assert ended == Acted(value=0.75) and status == 400
    assert part in body["error"]["message"] and body["error"]["code"] == "unsupported"


def test_what_changes_nothing_is_taken(teller: EnvironmentPool, tmp_path: Path) -> None:
    more = '{"n": 1, "stop": [], "logprobs": false, "response_format": {"type": "text"}, "tool_choice": "auto"}'
    _, (status, _) = told(teller, tmp_path / "out", said(), more=more)
    assert status == 200


def test_a_refusal_of_the_actor_is_an_error_of_the_request(teller: EnvironmentPool, tmp_path: Path) -> None:
    refused = Say(reply=Refused(reason="No room.", code="cap"))
    _, (status, body) = told(teller, tmp_path / "out", refused)
    assert status == 400 and body["error"]["message"] == "No room." and body["error"]["code"] == "cap"


def test_only_the_rollouts_own_place_and_key_are_answered(file: Path, tmp_path: Path) -> None:
    with opened(file, "places") as pool:
        assert ask(pool, {0: act(out=str(tmp_path / "out"))}) == {0: Acted(value=1.0)}
    host, found = json.loads((tmp_path / "out").read_text())
    assert host == "127.0.0.1"
    statuses = [status for status, _ in found]
    assert statuses == [401, 401, 404, 404, 404, 200, 404, 400, 400, 400, 400, 400, 400, 400, 413]
    assert found[5][1]["data"][0]["id"] == "policy"


def test_a_rollout_is_one_conversation_at_a_time(file: Path, tmp_path: Path) -> None:
    """The request that nobody waits for gets its turn before the episode ends, so that the next one is not confused."""
    out = tmp_path / "out"
    with opened(file, "busy") as pool:
        assert ask(pool, {0: act(out=str(out))})[0].messages[0].text == "slow"
        out.with_suffix(".asked").touch()
        wait_until(out.with_suffix(".second").exists)
        assert ask(pool, {0: said()})[0].messages[0].text == "left alone"
        out.with_suffix(".left").touch()
        assert ask(pool, {0: said()}) == {0: Acted(value=200.0)}
    status, body = json.loads(out.with_suffix(".second").read_text())
    assert status == 400 and "is being answered" in body["error"]["message"]


def test_a_key_ends_with_its_rollout(file: Path, tmp_path: Path) -> None:
    with opened(file, "late") as pool:
        for _ in range(2):
            assert ask(pool, {0: act(out=str(tmp_path / "out"))}) == {0: Acted(value=None)}
    (status, _), in_the_environment = json.loads((tmp_path / "out").read_text())
    assert status == 401 and in_the_environment


def test_a_class_is_made_once_and_may_say_its_own_reward(file: Path) -> None:
    with opened(file, "Twice") as pool:
        assert ask(pool, {0: act(), 1: act()}) == {0: Acted(value=1.0), 1: Acted(value=1.0)}
        assert ask(pool, {0: Act(columns={}, scores=False)}) == {0: Acted(value=None)}


OUTCOMES = {"hang": Outcome.TIMEOUT, "spin": Outcome.TIMEOUT}
TURNS = ("first", "second", "end")
FAULTS = [(at, how) for at in TURNS for how in ("hang", "crash", "exit", "leave", "raise", "flood")]


@pytest.fixture(scope="module")
def failing(file: Path) -> Iterator[EnvironmentPool]:
    with opened(file, "fail", step_limit_s=3.0) as pool:
        yield pool


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("at", "how"), [*FAULTS, ("second", "spin"), ("end", "type")])
def test_a_fault_costs_its_own_rollout_alone(failing: EnvironmentPool, at: str, how: str) -> None:
    """Between two that go on."""
    found = [ask(failing, {0: act(), 1: act(at=at, how=how), 2: act()})]
    for _ in range(TURNS.index(at)):
        found.append(ask(failing, {seat: said() for seat in range(3)}))
    bad = fault_of(found[-1][1])
    if how == "flood":
        assert bad is None
    else:
        assert bad is not None and bad.outcome is OUTCOMES.get(how, Outcome.ERROR), found[-1][1]
    while not isinstance(found[-1][0], Acted):
        found.append(ask(failing, {seat: said() for seat in (0, 2)}))
    assert found[-1][0] == found[-1][2] == Acted(value=0.5) and len(found) == 3
    if how == "flood" and at != "end":
        failing.end(1)
    # The seat is as good as new.
    assert isinstance(ask(failing, {1: act()})[1], Asked)
    failing.end(1)


def test_the_endpoint_listens_on_loopback_alone_and_ends_with_its_process(file: Path) -> None:
    with opened(file, "fail") as pool:
        assert isinstance(ask(pool, {0: act()})[0], Asked)
        (address,) = listening(pool)
        assert address.ip == "127.0.0.1"
        pool.end(0)
        assert isinstance(ask(pool, {0: act()})[0], Asked)
        wait_until(lambda: not connects(address.port))
        (again,) = listening(pool)
    wait_until(lambda: not connects(again.port))


def listening(pool: EnvironmentPool) -> list[Any]:
    """Addresses of all workers."""
    workers = psutil.Process(pool.fork_server.pid).children()
    return [line.laddr for worker in workers for line in worker.net_connections() if line.status == "LISTEN"]


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(("name", "said"), [("NoRun", "has no method `run`"), ("Missing", "defines no such name")])
def test_a_file_without_an_agent_is_refused(file: Path, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        describe_in_process(config_of(file, name), scores=True)


def test_an_agent_has_nothing_to_describe(file: Path) -> None:
    assert describe_in_process(config_of(file, "tell"), scores=True) == ""


def test_a_client_that_is_killed_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with Endpoint(lambda asked: Refused(reason="", code="")) as endpoint:
        threading.Thread(target=endpoint.serve_forever, args=(0.01,), daemon=True).start()
        client = socket.create_connection(("127.0.0.1", endpoint.server_port))
        client.sendall(b"POST /1/v1/chat/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
        wait_until(lambda: bool(endpoint.connections))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        wait_until(lambda: not endpoint.connections)
        endpoint.shutdown()
    assert capsys.readouterr().err == ""
