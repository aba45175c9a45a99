"""OpenAI's chat completions as our records: what an agent may ask, and how an answer is written.

    request    messages, tools, tool_choice "auto" or "none", stream, stream_options; text only
    ignored    temperature, top_p, max_tokens, penalties, logit_bias, seed: an episode is sampled as [rollout] says, and
               the worker prints once that they were given
    refused    n above 1, stop, logprobs, a response_format, a tool_choice that forces a call, functions, images: an
               answer without them would not be what was asked for

A refusal is an error of status 400, which clients raise and do not try again. All of it runs in the agent's own worker.
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from actor.environments.contract import ToolCall

MODEL = "policy"
"""The name under which the model is listed; requests may use any."""
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SAMPLING = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
Role = Literal["system", "user", "assistant", "tool"]
Json = dict[str, Any]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Role
    """Who speaks."""
    text: str
    """What is said; may be empty where tools are called."""
    calls: list[ToolCall] = []
    """Of an assistant's message."""
    name: str = ""
    """Of the tool that answers, in a tool's message."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent waits for the model's next turn."""

    messages: list[ChatMessage]
    """The whole conversation."""
    tools: str
    """JSON of the tools, as chat templates want them; empty without."""
    may_call: bool
    """Whether calls are read from the turn."""


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's turn."""

    number: int
    """Of the turn, from 1 on."""
    text: str
    """Before its calls, or all of it."""
    calls: list[ToolCall]
    """In order."""
    is_cut: bool
    """Whether the cap ended it."""
    read: int
    """Tokens before it."""
    written: int
    """Tokens of it."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no turn."""

    reason: str
    """One sentence for the agent's author."""
    code: str
    """The same in a word, for programs."""


class BadRequest(Exception):
    """A request that has no answer; the message is one sentence."""


class GivenFunction(msgspec.Struct):
    name: str
    arguments: str | None = None


class GivenCall(msgspec.Struct):
    function: GivenFunction
    id: str = ""


class GivenPart(msgspec.Struct):
    type: str
    text: str = ""


class GivenMessage(msgspec.Struct):
    role: str
    content: str | list[GivenPart] | None = None
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GivenRequest(msgspec.Struct):
    """What we read of a request."""

    messages: list[GivenMessage]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    functions: list[Json] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    response_format: Json | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Any = None
    top_p: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    seed: Any = None

    @property
    def ignored(self) -> list[str]:
        """The settings of sampling that were given."""
        return [f"{name} = {value}" for name in SAMPLING if (value := getattr(self, name)) is not None]

    def asked(self) -> Asked:
        """BadRequest where a part of it cannot be answered."""
        refusals = {
            f"n = {self.n}: an episode is one conversation": self.n not in (None, 1),
            "stop: the model ends its turns itself": bool(self.stop),
            "logprobs: they are recorded for training and not sent": bool(self.logprobs),
            "functions: use tools": bool(self.functions),
            "response_format: the model writes freely": (self.response_format or {}).get("type", "text") != "text",
            "tool_choice: only 'auto' and 'none' leave the model free": self.tool_choice not in (None, "auto", "none"),
        }
        if found := [reason for reason, given in refusals.items() if given]:
            raise BadRequest(f"This endpoint has no {found[0]}; remove it from the request.")
        return Asked(
            messages=messages(self.messages),
            tools=json.dumps(self.tools) if self.tools else "",
            may_call=self.tool_choice != "none",
        )


def read_request(body: bytes) -> GivenRequest:
    try:
        return msgspec.json.decode(body, type=GivenRequest)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The request is no chat completion of text ({error}).") from error


def messages(given: Sequence[GivenMessage]) -> list[ChatMessage]:
    if not given or given[-1].role == "assistant":
        raise BadRequest("The last message must be of a user, a tool or the system: the model's turn comes after it.")
    tools: dict[str, str] = {}
    found: list[ChatMessage] = []
    for one in given:
        if one.role not in ROLES:
            raise BadRequest(f"A message has the role {one.role!r}; there are {', '.join(ROLES)}.")
        tools |= {call.id: call.function.name for call in one.tool_calls or ()}
        role: Any = ROLES[one.role]
        name = tools.get(one.tool_call_id or "", "") if role == "tool" else ""
        calls = [ToolCall(name=call.function.name, arguments=arguments(call)) for call in one.tool_calls or ()]
        found.append(ChatMessage(role=role, text=text_of(one), calls=calls, name=name))
    return found


def text_of(message: GivenMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if other := [part.type for part in message.content if part.type != "text"]:
        raise BadRequest(f"A message has a part of the type {other[0]!r}; the model reads text only.")
    return "".join(part.text for part in message.content)


def arguments(call: GivenCall) -> Json:
    try:
        found: Json = msgspec.json.decode(call.function.arguments or "{}", type=Json)
        # A number of a hundred digits cannot go to the actor.
        msgspec.msgpack.encode(found)
        return found
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"The arguments of a call of {call.function.name} are no JSON object ({error}).") from error


def message_json(said: Said) -> Json:
    """As a client may send it back."""
    calls = [
        {
            "id": f"call_{said.number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(said.calls)
    ]
    text = None if calls and not said.text else said.text
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def finish_reason(said: Said) -> str:
    return "length" if said.is_cut else "tool_calls" if said.calls else "stop"


def usage(said: Said) -> Json:
    return {"prompt_tokens": said.read, "completion_tokens": said.written, "total_tokens": said.read + said.written}


def head(said: Said, kind: str) -> Json:
    return {"id": f"chatcmpl-{said.number}", "object": kind, "created": int(time.time()), "model": MODEL}


def completion_json(said: Said) -> Json:
    choice = {"index": 0, "message": message_json(said), "logprobs": None, "finish_reason": finish_reason(said)}
    return head(said, "chat.completion") | {"choices": [choice], "usage": usage(said)}


def chunks(said: Said, options: StreamOptions | None) -> Iterator[Json]:
    """The turn in one piece and its end: it was sampled with those of the other episodes before anything is sent."""
    top, message = head(said, "chat.completion.chunk"), message_json(said)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    yield top | {"choices": [{"index": 0, "delta": message, "finish_reason": None}]}
    yield top | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(said)}]}
    if options and options.include_usage:
        yield top | {"choices": [], "usage": usage(said)}


def models_json() -> Json:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "this run"}]}


def error_json(reason: str, code: str) -> Json:
    return {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": code}}
