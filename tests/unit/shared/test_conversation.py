"""What a template puts between turns, the form of its calls, and templates that would rewrite a conversation."""

import json
import shutil
from pathlib import Path

import pytest

from shared.config.environment import EnvironmentConfig
from shared.embedded import EMBEDDED_DIR
from shared.errors import ModelError
from shared.model.conversation import Conversation
from shared.model.prompt import Prompter, load_prompter

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {}}}])
SHOWN = "{%- if tools %}{{ '<|im_start|>system\\n' ~ tools|length ~ ' tools<|im_end|>\\n' }}{%- endif %}"
CALLS = (
    '{%- for call in message.tool_calls %}{{ \'<tool_call>\\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~'
    " (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}{%- endfor %}"
)
HERMES = (
    SHOWN + "{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}"
    "{%- if message.tool_calls %}" + CALLS + "{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As most models have it."""
FORGETFUL = HERMES.replace(
    "~ message.content }}", "~ (message.content if loop.last or message.role == 'user' else '-') }}"
)
"""Shows only the last message in full."""
QWEN3 = (
    "{%- set asked = namespace(last=-1) %}"
    "{%- for message in messages if message.role == 'user' and not message.content.startswith('<tool_response>') %}"
    "{%- set asked.last = messages.index(message) %}{%- endfor %}"
    + SHOWN
    + "{%- for message in messages %}{%- set said = message.content %}{%- if message.role == 'tool' %}"
    "{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' ~ said ~ '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- else %}{{ '<|im_start|>' ~ message.role ~ '\\n' }}{%- if message.role == 'assistant' %}"
    "{%- set thought = '' %}{%- if '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > asked.last and (loop.last or thought) %}"
    "{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif %}{{ said }}"
    "{%- if message.tool_calls %}{%- if said %}{{ '\\n' }}{%- endif %}"
    + CALLS.replace("}{%- endfor", "}{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor")
    + "{%- endif %}{%- else %}{{ said }}{%- endif %}{{ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
"""Writes a thought, even an empty one, in the last message, and answers of tools as a user's, as Qwen3 does."""
NAMED = HERMES.replace("~ message.content }}", "~ (message.name ~ ': ' if message.name else '') ~ message.content }}")
"""Shows who answers."""
ASKED_BEFORE = HERMES.replace(
    "~ message.content }}",
    "~ (messages[loop.index0 - 1].tool_calls[0].function.name ~ ': ' if message.role == 'tool' else '')"
    " ~ message.content }}",
)
"""Shows who was asked in the turn before."""
PLAIN_JSON = HERMES.replace("<tool_call>\\n", "").replace("\\n</tool_call>", "").replace('"arguments"', '"parameters"')


def prompter(tmp_path: Path, template: str = HERMES) -> Prompter:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_DIR, folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_prompter(folder, EnvironmentConfig(described=TOOLS))


def test_the_parts_of_a_conversation_are_those_of_the_template(tmp_path: Path) -> None:
    """Put together they are what the template shows."""
    model = prompter(tmp_path)
    talk = Conversation(model, 8)
    prompt = model.as_the_model_sees(model.prompt_ids("How many?"))
    opening = model.as_the_model_sees(talk.opening_ids(" Now."))
    answers = model.as_the_model_sees(talk.answer_ids(["add", "sub"], ["5", "7"]))
    assert prompt == "<|im_start|>system\n1 tools<|im_end|>\n<|im_start|>user\nHow many?"
    assert opening == " Now.<|im_end|>\n<|im_start|>assistant\n"
    assert answers == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [NAMED, ASKED_BEFORE])
def test_an_answer_has_the_name_of_its_tool(tmp_path: Path, template: str) -> None:
    model = prompter(tmp_path, template)
    answer = model.as_the_model_sees(Conversation(model, 8).answer_ids(["add"], ["5"]))
    assert answer == "\n<|im_start|>tool\nadd: 5<|im_end|>\n<|im_start|>assistant\n"


def test_without_tools_a_prompt_is_what_it_was(tmp_path: Path) -> None:
    prompter(tmp_path)
    plain = load_prompter(tmp_path / "model")
    assert plain.as_the_model_sees(plain.prompt_ids("How many?")).endswith(
        "How many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert plain.digest != load_prompter(tmp_path / "model", EnvironmentConfig(described=TOOLS)).digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', [("add", {"a": 1})]),
        (
            'First.<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "b"}',
            [("add", {}), ("b", {})],
        ),
        ('<tool_call>{"name": "add", "arguments": 7}', [("add", {})]),
        ('<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "add", "argu', []),
        ('<tool_call><tool_call>{"name": "add"}', [("add", {})]),
        ("[[" * 9000, []),
        ('<tool_call>{"name": "add", "arguments": {"a": 123456789012345678901234567890}}', []),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}', []),
        ('{"name": "add", "arguments": {}}', []),
        ('<think>Not <tool_call>{"name": "add"}</tool_call></think>The answer is 42.', []),
        ('Not <tool_call>{"name": "add"}</tool_call></think><tool_call>{"name": "b"}', [("b", {})]),
        ('<tool_call>{"name": "add"}</tool_call><think><tool_call>{"name": "b"}', [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": "<think>"}}', [("add", {"a": "<think>"})]),
        ("#### 18", []),
    ],
)
def test_calls_are_read_where_they_parse(tmp_path: Path, text: str, expected: list[tuple[str, object]]) -> None:
    model = prompter(tmp_path)
    assert Conversation(model, 2).calls(model.ids(text)) == expected


THOUGHTS = ["", "<think>\n\n</think>\n\n", "<think>\nI add.\n</think>\n\n", "I add.\n", "<tool_call>?\n</think>\n\n"]


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("template", [QWEN3, QWEN3.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")])
def test_a_call_is_read_whatever_the_model_has_thought(tmp_path: Path, thought: str, template: str) -> None:
    """Though the template writes an empty thought before a call, or opens it in the prompt."""
    model = prompter(tmp_path, template)
    talk = Conversation(model, 8)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert talk.calls(model.ids(f"{thought}{call}\n{call}<|im_end|>")) == [("add", {"a": 1})] * 2
    assert talk.form.before(thought + call) == thought


def test_the_form_of_calls_is_the_templates_own(tmp_path: Path) -> None:
    talk = Conversation(prompter(tmp_path, PLAIN_JSON), 2)
    assert (talk.form.opening, talk.form.name, talk.form.arguments) == ("", "name", "parameters")
    assert list(talk.form.calls(' {"name": "add", "parameters": {"a": 1}}')) == [("add", {"a": 1})]
    assert list(talk.form.calls('I say {"name": "add", "parameters": {"a": 1}}')) == []
    assert list(talk.form.calls('I add.</think> {"name": "add", "parameters": {"a": 1}}')) == [("add", {"a": 1})]
    assert talk.form.before('I add.</think> {"name": "add", "parameters": {"a": 1}}') == "I add.</think>"


def test_a_template_that_rewrites_turns_is_refused_with_the_turn(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat template of .*model shows turn 1 in another way once turn 2 is there"):
        Conversation(prompter(tmp_path, FORGETFUL), 8)


def test_thoughts_that_are_dropped_later_are_a_rewriting(tmp_path: Path) -> None:
    dropping = HERMES.replace(
        "~ message.content }}", "~ (message.content if loop.last else message.content.split('</think>')[-1]) }}"
    )
    with pytest.raises(ModelError, match="shows turn 1 in another way once turn 2 is there"):
        Conversation(prompter(tmp_path, dropping), 8)


def test_a_template_without_calls_is_refused() -> None:
    with pytest.raises(ModelError, match="shows no tool calls as JSON"):
        Conversation(load_prompter(EMBEDDED_DIR, EnvironmentConfig(described=TOOLS)), 8)
