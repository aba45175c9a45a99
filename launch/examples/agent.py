"""An agent on OpenAI's own client, in a loop with one tool. Copy this file, or use an agent that you have.

    [environment]
    kind = "agent"
    function = "launch/examples/agent.py:solve"
    max_turns = 4                       # requests in an episode
    step_limit_s = 30.0                 # for what the agent does itself between two requests

    [rollout]
    max_new_tokens = 512                # counts the agent's own messages too

    [verifier]
    kind = "environment"                # what `solve` returns is the reward

`base_url` and `api_key` are new in each episode, so the client is made in `solve`. They are also in OPENAI_BASE_URL and
OPENAI_API_KEY, which most frameworks read. A request waits until the agents of all episodes have asked, and until the
model has its turn. So set no time limit and no retries. Needs `pip install openai`.
"""
# openai is in an extra; types are checked without it.
# pyright: reportMissingImports=false

import json
import re
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TURNS = 4
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"left": {"type": "number"}, "right": {"type": "number"}},
                "required": ["left", "right"],
            },
        },
    }
]


def add(left: float, right: float) -> str:
    return f"{float(left) + float(right):g}"


def solve(base_url: str, api_key: str, question: str, gold_answer: str, **columns: Any) -> float:
    """One episode, and its reward: whether the last number of the last message is the gold answer."""
    client = OpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": question}]
    text = ""
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply)
        text = reply.content or ""
        if not reply.tool_calls:
            break
        messages += [answered(call) for call in reply.tool_calls]
    return reward(text, gold_answer)


def reward(text: str, gold_answer: str) -> float:
    return float(re.findall(r"-?[\d.,]*\d", text)[-1:] == [gold_answer])


def answered(call: Any) -> ChatCompletionMessageParam:
    """What the tool says; a call that it cannot take is told to the model."""
    try:
        said = add(**json.loads(call.function.arguments))
    except (TypeError, ValueError) as error:
        said = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": said}
