"""The examples for MCP and OpenEnv, as a run uses them: in processes of the pool, against real servers."""

import importlib.util
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from actor.environments.contract import ToolCall, describe_in_process
from actor.environments.pool import EnvironmentPool
from actor.environments.worker import Answered, GetReward, Opened, Reset, Rewarded, Use
from actor.verifiers.reward_function import import_file
from shared.config.environment import EnvironmentConfig
from tests.support.runs import free_port, wait_until

EXAMPLES = Path(__file__).resolve().parents[3] / "launch/examples"
needs_mcp = pytest.mark.skipif(not importlib.util.find_spec("mcp"), reason="mcp is not installed; it is an extra")
needs_openenv = pytest.mark.skipif(
    not importlib.util.find_spec("openenv"), reason="openenv is not installed; it is an extra"
)

MCP_SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
total = 0

@server.tool()
def add(left: int, right: int = 1) -> int:
    """Adds two numbers."""
    global total
    total += left + right
    return total

@server.tool()
def divide(left: float, right: float) -> float:
    """Divides."""
    return left / right

server.run()
'''
OPENENV_SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.steps = 0
        return Heard(text="Say something.", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **options):
        self.steps += 1
        return Heard(text=action.message.upper(), reward=0.5, done=self.steps == 2)

    @property
    def state(self):
        return State(step_count=self.steps)

uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


def config_of(example: str, *variables: str) -> EnvironmentConfig:
    return EnvironmentConfig(
        function=f"{EXAMPLES}/{example}", variables=variables, step_limit_s=60.0, memory_mb=0, at_once=2
    )


def ask(pool: EnvironmentPool, calls: dict[int, Any]) -> dict[int, Any]:
    return pool.ask(calls, lambda: None)


def use(name: str, **arguments: object) -> Use:
    return Use(calls=[ToolCall(name=name, arguments=arguments)])


@pytest.mark.long
@needs_mcp
@pytest.mark.timeout(600)
def test_the_tools_of_an_mcp_server_are_described_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode has a server of its own, so a total of its own."""
    (tmp_path / "server.py").write_text(MCP_SERVER)
    monkeypatch.setenv("MCP_SERVER", f"{sys.executable} {tmp_path}/server.py")
    config = config_of("mcp_tools.py:tools", "MCP_SERVER")
    tools = {
        tool["function"]["name"]: tool["function"] for tool in json.loads(describe_in_process(config, scores=False))
    }
    assert tools["add"]["description"] == "Adds two numbers."
    add = tools["add"]["parameters"]
    assert {name: of["type"] for name, of in add["properties"].items()} == {"left": "integer", "right": "integer"}
    assert add["required"] == ["left"] and tools["divide"]["parameters"]["required"] == ["left", "right"]
    with closing(EnvironmentPool(config)) as pool:
        assert ask(pool, {0: Reset(columns={}), 1: Reset(columns={})}) == dict.fromkeys(range(2), Opened(text=""))
        assert ask(pool, {0: use("add", left=2, right=3), 1: use("add", left=1)}) == {
            0: Answered(texts=["5"]),
            1: Answered(texts=["2"]),
        }
        assert ask(pool, {0: use("add", left=10)}) == {0: Answered(texts=["16"])}
        (failed,) = ask(pool, {1: use("divide", left=1, right=0)})[1].texts
        assert failed == "{'error': 'Error executing tool divide'}"


@needs_mcp
def test_a_tool_of_an_mcp_server_is_described_whatever_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    tools: Any = import_file(EXAMPLES / "mcp_tools.py")
    given = {
        "a": {
            "anyOf": [{"type": "null"}, {"type": "integer"}],
            "description": 'Which. Returns: it (choices: ["x, "y"])',
        },
        "b": {"type": ["null", "number"]},
        "c": {"type": "boolean"},
    }
    text = "Adds.\n\nArgs:\n    a: One of them.\n\nReturns:\n    The sum."
    made: Any = type("Made", (), {"add": tools.method("add", text, {"properties": given, "required": ["a"]})})()
    described: Any = get_json_schema(made.add)["function"]
    assert described["description"] == "Adds."
    found = {name: (of["type"], of["description"]) for name, of in described["parameters"]["properties"].items()}
    assert found == {
        "a": ("integer", 'Which. Returns it (choices ["x, "y"])'),
        "b": ("number", "b"),
        "c": ("boolean", "c"),
    }
    assert "return" not in described or "a:" not in described["return"].get("description", "")
    for key in ("from", "file-path", "self"):
        assert not tools.can_be_called("open", {"properties": {key: {}}})
        assert f"The tool open is left out: its arguments ['{key}']" in capsys.readouterr().out
    assert tools.can_be_called("open", {"properties": {"path": {}}}) and tools.can_be_called("ping", {})


@pytest.mark.parametrize(
    ("file", "name"), [("README.md", "right"), ("actor/verifiers/README.md", "correct"), ("agent", "reward")]
)
def test_a_reward_to_copy_judges_the_whole_number(tmp_path: Path, file: str, name: str) -> None:
    source = EXAMPLES / "agent.py" if file == "agent" else EXAMPLES.parents[1] / file
    (code,) = re.findall(rf"^def {name}\(.*?(?=\n\n|\n```|\Z)", source.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "copied.py").write_text(f"import re\n\n{code}\n")
    function = getattr(import_file(tmp_path / "copied.py"), name)

    def judged(text: str) -> float:
        if file == "agent":
            return function(text, "18")
        return function(prompts=[], completions=[[{"content": text}]], gold_answer=["18"])[0]

    assert [judged(f"So 7\n#### {said}") for said in ("18", "118", "0.18", "")] == [1.0, 0.0, 0.0, 0.0]


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """URL of a server."""
    (tmp_path / "server.py").write_text(OPENENV_SERVER)
    port = free_port()
    server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])
    wait_until(lambda: listens(port) or server.poll() is not None, "a server of OpenEnv", seconds=400)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@needs_openenv
@pytest.mark.timeout(600)
def test_an_environment_of_openenv_is_played(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", echo)
    config = config_of("openenv_client.py:Env", "OPENENV_URL")
    assert '"name": "act"' in describe_in_process(config, scores=True)
    with closing(EnvironmentPool(config)) as pool:
        opened = ask(pool, {0: Reset(columns={}), 1: Reset(columns={})})
        assert all(isinstance(one, Opened) and "Say something." in one.text for one in opened.values())
        said = ask(pool, {0: use("act", message="hello"), 1: use("act", message="bye")})
        assert "HELLO" in said[0].texts[0] and "BYE" in said[1].texts[0]
        assert "AGAIN" in ask(pool, {0: use("act", message="again")})[0].texts[0]
        assert ask(pool, {0: use("act", message="more")}) == {0: Answered(texts=["The episode has ended."])}
        rewards = ask(pool, {0: GetReward(), 1: GetReward()})
        assert rewards == {0: Rewarded(value=1.0), 1: Rewarded(value=0.5)}
