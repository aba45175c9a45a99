"""A model for tests of several turns: the embedded one, taught to call a tool first and to answer then.

It is trained for a few seconds, all its weights, on conversations in the form of HERMES. At temperature 1 nearly all
its first turns are calls that parse; its sums are often wrong, so rewards differ.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from shared.embedded import EMBEDDED_DIR
from shared.model.prompt import load_prompter
from tests.unit.shared.test_conversation import HERMES

STEPS = 100
ROWS = 4
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
        },
    },
}


def taught_model(folder: Path) -> Path:
    """A model folder."""
    path = folder / "taught"
    shutil.copytree(EMBEDDED_DIR, path)
    (path / "chat_template.jinja").write_text(HERMES)
    prompter = load_prompter(path, json.dumps([ADD]))
    rows = [row(prompter, left, right) for left in range(2, 8) for right in range(1, 7)]
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([wanted + [-100] * (width - len(wanted)) for _, wanted in rows])
    generator = torch.Generator().manual_seed(3)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):
        some = torch.randperm(len(rows), generator=generator)[:ROWS]
        model(input_ids=tokens[some], labels=labels[some]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def row(prompter: Any, left: int, right: int) -> tuple[list[int], list[int]]:
    """Ids of one conversation, and what to learn of them: -100 where nothing."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {left} plus {right}?"}]
    ids: list[int] = []
    wanted: list[int] = []
    call = {"function": {"name": "add", "arguments": {"left": left, "right": right}}}
    for said in ({"content": "", "tool_calls": [call]}, {"content": f"#### {left + right}"}):
        before = prompter.chat_ids(messages)
        messages = [*messages, {"role": "assistant", **said}]
        whole = prompter.ids(prompter.rendered(messages, opens_reply=False).rstrip("\n"))
        wanted += [-100] * (len(before) - len(wanted)) + whole[len(before) :]
        ids = whole
        messages.append({"role": "tool", "name": "add", "content": str(left + right)})
    return ids, wanted
