"""Gives the model the tools of an MCP server: all that it lists, with name, description and arguments.

    [environment]
    function = "launch/examples/mcp_tools.py:tools"
    variables = ["MCP_SERVER"]
    step_limit_s = 30.0

    MCP_SERVER="python my_server.py" python -m launch run my.toml

Each completion has its own server, which is started once for each process of the pool and called over its standard
input and output. A server that keeps state between calls keeps it between rollouts too: set RESTART. The types of JSON
become Python's, so that chat templates show them; what is inside of an array or an object is left out. A tool's error
is its answer. Needs `pip install mcp`.
"""
# mcp is in an extra; types are checked without it.
# pyright: reportMissingImports=false

import asyncio
import inspect
import os
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

RESTART = False
"""Whether every rollout begins with a new server."""
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
    methods = {tool.name: method(tool.name, tool.description or tool.name, tool.input_schema) for tool in listed(made)}
    made.__class__ = type("ServerTools", (Tools,), methods)
    return made


def listed(made: Tools) -> list[Any]:
    return made.server.listed


def method(name: str, description: str, schema: dict[str, Any]) -> Callable[..., str]:
    """With the signature and the docstring that describe the tool."""

    def call(self: Tools, **arguments: Any) -> str:
        return self.server.call(name, arguments)

    given = schema.get("properties", {})
    required = schema.get("required", ())
    types = {key: TYPES.get(str(of.get("type")), str) for key, of in given.items()}
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=types[key],
            default=inspect.Parameter.empty if key in required else of.get("default"),
        )
        for key, of in given.items()
    ]
    told = "\n".join(f"    {key}: {' '.join(str(of.get('description', key)).split())}" for key, of in given.items())
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__name__ = name
    call.__doc__ = f"{description.strip()}\n\nArgs:\n{told}\n" if told else f"{description.strip()}\n"
    call.__annotations__ = {**types, "return": str}
    call.__signature__ = inspect.Signature([own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    return call
