"""Chat: streamed tokens are those of the engine, each policy remembers its own replies, and what the screen shows. Also
the prompts of a file."""

import io
import json
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from actor.engines.hf_engine import HFEngine, stream
from launch.__main__ import main
from launch.commands.chat import (
    PARTIAL_CHARACTER,
    Conversation,
    Replies,
    ask,
    converse,
    open_conversations,
    print_in_turn,
    questions,
    show_in_columns,
)
from launch.commands.generate import open_policy, opening_of, read_prompts
from launch.presets.load import load_config
from launch.ui import chat_process
from learner.durable.checkpoint import Checkpoint, CheckpointStore
from learner.durable.state import write_task_digests
from learner.tasks.tasks import TaskDigests
from protocol.messages import GroupOrder, Sampling
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.load import config_to_json, resolve
from shared.config.model import LoraConfig, ModelConfig
from shared.config.tree import Config
from shared.errors import DataError
from shared.model.adapter_file import adapter_bytes
from shared.model.policy import Policy
from shared.model.prompt import Prompter, load_prompter
from shared.run.run_dir import RunDir
from tests.support.fakes import FAMILIES, Family, shake, tiny_model, tiny_policy, tiny_prompter, unheard
from tests.support.hub_models import hub_model

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_tokens_are_those_of_the_engine(tmp_path: Path, family: Family, temperature: float) -> None:
    policy, ends = tiny_policy(tiny_model(tmp_path, family)), tuple(range(4))
    sampling = Sampling(temperature=temperature, max_new_tokens=20)
    for seed in range(4):
        prompt = np.arange(10 + seed, 19, dtype=np.int32)
        order = GroupOrder(group_id="g", prompt_ids=prompt, columns={}, seeds=(seed,))
        expected = HFEngine(policy, tiny_prompter(*ends)).generate((order,), sampling, unheard)[0][0].ids
        assert list(stream(policy, prompt.tolist(), ends, sampling, seed)) == expected.tolist()


# --- conversations


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_model(tmp_path_factory.mktemp("hub"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def loaded(source: Path) -> tuple[Policy, Prompter]:
    model = ModelConfig(path=str(source), cache_dir=str(source.parent / "cache"))
    base = cached_base(model)
    policy = load_policy(base, model, LoraConfig(rank=4, alpha=8.0), torch.device("cpu"), torch.float32)
    shake(policy, 3)
    policy.adapter.fold()
    return policy, load_prompter(base.folder)


def two_conversations(policy: Policy, prompter: Prompter) -> list[Conversation]:
    opening = [{"role": "system", "content": "Be brief."}]
    return [
        Conversation("base", policy, prompter, opening, policy.adapter.switched_off),
        Conversation("step 5", policy, prompter, opening, nullcontext),
    ]


def said(conversation: Conversation, question: str) -> str:
    return list(conversation.reply(question, GREEDY, 0))[-1]


def test_taking_turns_changes_no_reply(loaded: tuple[Policy, Prompter]) -> None:
    alone = [said(conversation, "3 + 4?") for conversation in two_conversations(*loaded)]
    base, trained = two_conversations(*loaded)
    together = list(zip(base.reply("3 + 4?", GREEDY, 0), trained.reply("3 + 4?", GREEDY, 0), strict=True))
    assert list(together[-1]) == alone and alone[0] != alone[1]
    policy, prompter = loaded
    prompt = prompter.prompt_ids("3 + 4?", "Be brief.")
    with policy.adapter.switched_off():
        ids = list(stream(policy, prompt, prompter.end_ids, GREEDY, 0))
    assert alone[0] == prompter.text(ids).rstrip(PARTIAL_CHARACTER)


def test_each_policy_remembers_its_own_replies(loaded: tuple[Policy, Prompter]) -> None:
    for conversation in two_conversations(*loaded):
        first = said(conversation, "3 + 4?")
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
        assert conversation.messages[-1]["content"] == first
        second = said(conversation, "3 + 4?")
        assert second != first and len(conversation.messages) == 5
        conversation.start_over()
        assert said(conversation, "3 + 4?") == first and conversation.messages[0]["content"] == "Be brief."


def test_a_reply_that_is_cut_short_is_remembered_as_far_as_it_went(loaded: tuple[Policy, Prompter]) -> None:
    conversation = two_conversations(*loaded)[0]
    texts = conversation.reply("3 + 4?", GREEDY, 0)
    heard = [next(texts), next(texts)]
    texts.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": heard[-1]}


def test_a_conversation_that_does_not_fit_is_refused_and_stays_as_it_was(loaded: tuple[Policy, Prompter]) -> None:
    conversation = two_conversations(*loaded)[0]
    with pytest.raises(DataError, match=r"has room for 256; start over with /new"):
        list(conversation.reply("x" * 300, GREEDY, 0))
    assert len(conversation.messages) == 1


def test_each_policy_has_the_question_though_ctrl_c_came_in_the_first_reply(
    loaded: tuple[Policy, Prompter], capsys: pytest.CaptureFixture[str]
) -> None:
    conversations = two_conversations(*loaded)
    heard: list[str] = []

    def interrupted(replies: Replies) -> None:
        heard.append(next(replies["base"]))
        raise KeyboardInterrupt

    ask(conversations, "3 + 4?", GREEDY, 0, interrupted)
    assert capsys.readouterr().out == "\n(cut short)\n"
    asked = {"role": "user", "content": "3 + 4?"}
    assert [each.messages[1:] for each in conversations] == [
        [asked, {"role": "assistant", "content": heard[0]}],
        [asked, {"role": "assistant", "content": ""}],
    ]


def test_a_question_that_does_not_fit_one_policy_is_put_to_none(
    loaded: tuple[Policy, Prompter], capsys: pytest.CaptureFixture[str]
) -> None:
    base, trained = two_conversations(*loaded)
    trained.messages.append({"role": "assistant", "content": "x" * 300})
    ask([base, trained], "3 + 4?", GREEDY, 0, print_in_turn)
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("error: This conversation needs")
    assert (len(base.messages), len(trained.messages)) == (1, 2)


# --- the page


def test_the_page_is_told_the_whole_conversation(
    loaded: tuple[Policy, Prompter], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"text": text} for text in ("3 + 4?", "3 + 4?", " ", "3 + 4?", "x" * 300)]
    chat_process.chat(two_conversations(*loaded), map(json.dumps, asked), GREEDY)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {"names": ["base", "step 5"]}
    assert [row["question"] for row in rows if "question" in row] == ["3 + 4?", "3 + 4?", "", "3 + 4?", "x" * 300]
    assert sum("done" in row for row in rows) == 5 and rows[-1] == {"done": True}
    alone = {each.name: said(each, "3 + 4?") for each in two_conversations(*loaded)}
    first, second, again, refused = spoken(rows)
    assert first == again == alone and second != first
    assert refused == {} and "has room for 256" in rows[-2]["problem"]


def spoken(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The last text of each name after each question that is not empty."""
    found: list[dict[str, str]] = []
    for row in rows:
        if row.get("question"):
            found.append({})
        elif "name" in row:
            found[-1][row["name"]] = row["text"]
    return found


# --- the screen


def growing(*texts: str) -> Generator[str, None, None]:
    yield from texts


def test_plain_text_prints_each_part_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_in_turn({"base": growing("So", "So 3", "So 3 + 4"), "step 5": growing("7")})
    assert capsys.readouterr().out == "base: So 3 + 4\nstep 5: 7\n"
    print_in_turn({"base": growing("alone")})
    assert capsys.readouterr().out == "alone\n"


HOSTILE = "\x1b[2J\x1b]0;mine\x07 4"


def test_a_reply_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_in_turn({"base": growing(HOSTILE)})
    assert capsys.readouterr().out == "\\x1b[2J\\x1b]0;mine\\x07 4\n"
    out = io.StringIO()
    show_in_columns({"base": growing(HOSTILE)}, Console(file=out, width=60, force_terminal=True, highlight=False))
    assert "\\x1b[2J" in out.getvalue() and "\x1b[2J" not in out.getvalue() and "\x1b]0;" not in out.getvalue()


def test_columns_grow_together_and_brackets_are_no_markup() -> None:
    order: list[str] = []

    def noted(name: str, texts: Iterator[str]) -> Generator[str, None, None]:
        for text in texts:
            order.append(name)
            yield text

    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, highlight=False)
    spoken = {"base": noted("base", growing("a", "ab", "ab [red]c")), "step 5": noted("step 5", growing("x"))}
    show_in_columns(spoken, console)
    assert order == ["base", "step 5", "base", "base"]
    last = out.getvalue().splitlines()
    assert any("ab [red]c" in line and "x" in line for line in last) and any("base" in line for line in last)


# --- the command


def test_converse_knows_its_commands(loaded: tuple[Policy, Prompter], capsys: pytest.CaptureFixture[str]) -> None:
    conversations = two_conversations(*loaded)
    converse(conversations, ["3 + 4?\n", "\n", "x" * 300, "/new\n", "3 + 4?\n", "/quit\n", "never\n"], GREEDY, 0)
    told = capsys.readouterr()
    replies = told.out.split("base: ")[1:]
    assert len(replies) == 2 and replies[0] == replies[1] and "step 5: " in replies[0]
    assert told.err.startswith("error: This conversation needs")
    assert [len(conversation.messages) for conversation in conversations] == [3, 3]


def config_of(source: Path) -> Config:
    model = {"path": str(source), "cache_dir": str(source.parent / "cache")}
    compute = {"learner_threads": 1, "actor_threads": 1}
    shapes = {"lora": {"rank": 4, "alpha": 8.0}, "rollout": {"max_new_tokens": 6}}
    return resolve({"model": model, "compute": compute, **shapes})


def test_chat_from_a_pipe(
    source: Path,
    loaded: tuple[Policy, Prompter],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(config_of(source)))
    files = {"adapter_model.safetensors": adapter_bytes(loaded[0].adapter)}
    CheckpointStore(run.checkpoints, keep=1).save(Checkpoint(step=5, files=files))
    monkeypatch.setattr("sys.stdin", piped(b"3 + 4?\n"))
    assert main(["generate", str(run.path), "--chat"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("base and step 5; /new starts over")
    assert told.out.startswith("base: ") and "\nstep 5: " in told.out
    monkeypatch.setattr("sys.stdin", piped(b"3 + 4?\n"))
    assert main(["generate", str(run.path), "--chat", "--base"]) == 0
    alone = capsys.readouterr()
    assert alone.err.startswith("base; ") and told.out.startswith(f"base: {alone.out}")


def test_a_chat_and_a_prompt_begin_with_the_system_message_that_is_given(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = RunDir.create(tmp_path / "run", config_to_json(config_of(source))), list[str]()
    for words in (["--chat"], ["--chat", "--system", "Be odd."], ["--prompt", "3 + 4?", "--system", "Be odd."]):
        monkeypatch.setattr("sys.stdin", piped(b"3 + 4?\n"))
        assert main(["generate", str(run.path), "--base", *words]) == 0
        told += [capsys.readouterr().out.strip()]
    assert told[0] != told[1] == told[2]


def test_a_system_message_in_the_data_is_that_of_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", config_to_json(resolve({"tasks": {"system_prompt": "Be kind."}})))

    def opening(*systems: str, given: str | None = None) -> list[str]:
        tasks = TaskDigests(train=1, train_sha256="", held_out=0, held_out_sha256="", systems=systems)
        write_task_digests(run, tasks)
        config, _ = open_policy(run.path, base=True, which=None, system=given)
        return [message["content"] for message in opening_of(config.tasks, config.verifier.kind)]

    assert opening() == ["Be kind."] and opening("Of the data.") == ["Of the data."]
    assert opening("Of the data.", given="Given.") == ["Given."] and opening("", "A", given="") == []
    assert capsys.readouterr().err == ""
    assert opening("A", "B") == ["Be kind."]
    differ = "note: system messages differ by row of the data, so that of tasks.system_prompt is used"
    assert capsys.readouterr().err == f"{differ}; give one with --system\n"


def piped(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_python_without_readline_can_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr("sys.stdin", Terminal("3 + 4?\n"))
    assert list(questions()) == ["3 + 4?"]
    assert capsys.readouterr().out == "> > \n"


def test_a_pipe_that_is_not_utf8_is_refused_from_that_line_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", piped("3 + 4?\nWie gro\u00df?\n".encode("latin-1")))
    lines = questions()
    assert next(lines) == "3 + 4?\n"
    with pytest.raises(DataError, match="--chat got input that is not UTF-8 in line 2; save it as UTF-8"):
        next(lines)


# --- a file of prompts


def test_a_prompt_is_a_line_whatever_characters_it_has(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    prompts = ["How\u2028many?", "Two\u0085words", "a\x0cb", "3 + 4?"]
    file.write_bytes(("\ufeff" + "\r\n\r\n".join(prompts) + "\n").encode())
    assert read_prompts(file) == prompts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("3 + 4?\nWie gro\u00df?\n".encode("latin-1"), "which is not UTF-8 in line 2; save it as UTF-8."),
        ("3 + 4?\n".encode("utf-16"), "which is not UTF-8 in line 1; save it as UTF-8."),
        (b"", "which has no prompts; give a text file with one prompt a line."),
        (b"\xef\xbb\xbf \r\n\n", "which has no prompts; give a text file with one prompt a line."),
    ],
)
def test_a_file_that_has_no_prompts_to_read_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    assert str(caught.value) == f"--in got {file}, {words}"


@pytest.mark.long
def test_a_chat_shows_the_tools_of_the_run() -> None:
    (base,) = open_conversations(load_config("calculator"), None)
    shown = base.prompter.as_the_model_sees(base.prompt_ids("What is 3 + 4?", GREEDY))
    assert json.loads(base.prompter.tools)[0]["function"]["name"] in shown


def test_a_chat_and_a_prompt_come_after_the_examples_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("embedded", ["tasks.few_shot=2"])
    (base,) = open_conversations(config, None)
    assert [message["role"] for message in base.opening[-4:]] == ["user", "assistant"] * 2
    assert opening_of(config.tasks, config.verifier.kind) == base.opening
    gone = load_config("embedded", ["tasks.few_shot=2", "tasks.source=gone.jsonl"])
    plain = load_config("embedded")
    assert opening_of(gone.tasks, gone.verifier.kind) == opening_of(plain.tasks, plain.verifier.kind)
    assert "the examples of tasks.few_shot are left out: " in capsys.readouterr().err
