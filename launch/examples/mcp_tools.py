"""Gives the model the tools of an MCP server: all that it lists, with name, description and arguments.

    [environment]
    function = "launch/examples/mcp_tools.py:tools"
    variables = ["MCP_SERVER"]
    step_limit_s = 30.0

    MCP_SERVER="python my_server.py" python -m launch run my.toml

Each completion has its own server, which is started once for each process of the pool and called over its standard
input and output. A server that keeps state between calls keeps it between rollouts too: set RESTART. The types of JSON
become Python's, so that chat templates show them; what is inside of an array or an object is left out, and so is a tool
with arguments that Python cannot name. A tool's error is its answer. Needs `pip install mcp`.
"""
# mcp is in an extra; types are checked without it.
# pyright: reportMissingImports=false

import asyncio
import inspect
import keyword
import os
import re
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

RESTART = False
"""Whether every rollout begins with a new server."""
SECTION = re.compile(r"^[ \t]*(?:Args|Returns|Raises):", re.MULTILINE)
"""Of a docstring in Google's style."""
TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class Server:
    """A server's process, spoken to from a thread of its own."""

    def __init__(self, command: str) -> None:
        program, *words = shlex.split(command)
        self.parameters = StdioServerParameters(command=program, args=words, env=dict(os.environ))
        self.started: Future[list[Any]] = Future()
        self.loop = asyncio.new_event_loop()
        self.ended = asyncio.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self.serve(),), daemon=True)
        self.thread.start()
        self.listed = self.started.result()

    async def serve(self) -> None:
        """The whole life of the connection is in one task, as anyio wants it."""
        try:
            async with Client(stdio_client(self.parameters)) as self.client:
                self.started.set_result((await self.client.list_tools()).tools)
                await self.ended.wait()
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """ValueError with the tool's words if it says that it has failed."""
        result = asyncio.run_coroutine_threadsafe(self.client.call_tool(name, arguments), self.loop).result()
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ValueError(text)
        return text

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join()


class Tools:
    """An environment; `tools` gives it a method for each tool of the server."""

    def __init__(self) -> None:
        self.server = Server(os.environ["MCP_SERVER"])

    def reset(self, **columns: Any) -> None:
        if RESTART:
            self.server.close()
            self.server = Server(os.environ["MCP_SERVER"])


def tools() -> Tools:
    """The class is made for the server: methods are looked for on classes."""
    made = Tools()
    usable = [tool for tool in listed(made) if can_be_called(tool.name, tool.input_schema)]
    methods = {tool.name: method(tool.name, tool.description or tool.name, tool.input_schema) for tool in usable}
    made.__class__ = type("ServerTools", (Tools,), methods)
    return made


def listed(made: Tools) -> list[Any]:
    return made.server.listed


def can_be_called(name: str, schema: dict[str, Any]) -> bool:
    """Whether all arguments are names in Python. Says so if not."""
    given = schema.get("properties", {})
    wrong = [key for key in given if not key.isidentifier() or keyword.iskeyword(key) or key == "self"]
    if wrong:
        print(
            f"The tool {name} is left out: its arguments {wrong} cannot be named in Python; rename them in the server."
        )
    return not wrong


def type_of(of: dict[str, Any]) -> type:
    """Of an argument: of several types, the first that is not null."""
    given = [one.get("type") for one in of.get("anyOf", [of])]
    names = [name for one in given for name in (one if isinstance(one, list) else [one]) if name != "null"]
    return TYPES.get(str(names[0]), str) if names else str


def told(text: str) -> str:
    """A description as part of a docstring: on one line, without what is read there as choices or as a section."""
    line = " ".join(text.split())
    return re.sub(r"\b(choices|Args|Returns|Raises):", r"\1", line, flags=re.IGNORECASE)


def method(name: str, description: str, schema: dict[str, Any]) -> Callable[..., str]:
    """With the signature and the docstring that describe the tool."""

    def call(self: Tools, **arguments: Any) -> str:
        return self.server.call(name, arguments)

    given = schema.get("properties", {})
    required = schema.get("required", ())
    types = {key: type_of(of) for key, of in given.items()}
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=types[key],
            default=inspect.Parameter.empty if key in required else of.get("default"),
        )
        for key, of in given.items()
    ]
    shown = "\n".join(f"    {key}: {told(str(of.get('description', key)))}" for key, of in given.items())
    # Where the server's own docstring lists arguments, they are described a second time.
    says = SECTION.split(description.strip())[0].strip() or name
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__name__ = name
    call.__doc__ = f"{says}\n\nArgs:\n{shown}\n" if shown else f"{says}\n"
    call.__annotations__ = {**types, "return": str}
    call.__signature__ = inspect.Signature([own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    return call
