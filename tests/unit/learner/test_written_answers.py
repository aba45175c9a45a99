"""What a warm start learns: which rows become examples, their prompts, and exactly which tokens carry the loss."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from learner.orders.orders import NO_FRAMES, build_orders
from learner.orders.written import WrittenOrders
from learner.tasks.tasks import TaskSet, load_tasks
from learner.tasks.written_answers import load_written
from protocol.messages import FilledOrder, Order, Outcome, Policy, Sampling
from shared.config.load import resolve
from shared.config.tree import Config, warm_start
from shared.embedded import EMBEDDED_DIR
from shared.errors import DataError
from shared.model.prompt import Prompter, conversation, load_prompter
from tests.support.wire_examples import policy

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Five."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Six."},
]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return load_prompter(EMBEDDED_DIR)


def config_for(**sections: Any) -> Config:
    return warm_start(resolve({"eval": {"problems": 0}} | sections))


def load(config: Config, prompter: Prompter) -> TaskSet:
    cap, evaluated = config.rollout.max_new_tokens, config.eval.problems > 0
    return load_written(config.tasks, config.sft, config.verifier.kind, prompter, longest=cap, evaluated=evaluated)


def loaded(tmp_path: Path, prompter: Prompter, rows: Sequence[dict[str, Any]], **sections: Any) -> TaskSet:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    sft = {"source": str(file)} | sections.pop("sft", {})
    return load(config_for(sft=sft, **sections), prompter)


def texts(tasks: TaskSet, prompter: Prompter) -> set[tuple[str, str]]:
    """Prompt and answer as the model sees them."""
    see = prompter.as_the_model_sees
    pairs = zip(tasks.train, tasks.answers, strict=True)
    return {(see(task.prompt_ids.tolist()), see(answer.tolist())) for task, answer in pairs}


def prompt(prompter: Prompter, messages: list[dict[str, str]]) -> str:
    return prompter.as_the_model_sees(prompter.chat_ids(messages))


def test_every_answer_of_a_chat_is_an_example_after_what_came_before(tmp_path: Path, prompter: Prompter) -> None:
    tasks = loaded(tmp_path, prompter, [{"messages": CHAT}])
    end = prompter.as_the_model_sees([prompter.end_ids[0]])
    assert texts(tasks, prompter) == {
        (prompt(prompter, CHAT[:1]), f"Five.{end}"),
        (prompt(prompter, CHAT[:3]), f"Six.{end}"),
    }


def test_prompt_and_answer_are_the_rendered_conversation_cut_in_two(prompter: Prompter) -> None:
    """So what is learned is what the template writes, up to the end of the turn."""
    whole = prompter.tokenizer.apply_chat_template(CHAT[:2], tokenize=False)
    ids = prompter.chat_ids(CHAT[:1]) + prompter.reply_ids(CHAT[:1], "Five.")
    assert whole.startswith(prompter.as_the_model_sees(ids)) and ids[-1] in prompter.end_ids
    assert not set(ids[len(prompter.chat_ids(CHAT[:1])) : -1]) & set(prompter.end_ids)


def test_a_template_that_rewrites_the_prompt_gives_the_replys_own_text(prompter: Prompter) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    tokenizer.chat_template = "{% if not add_generation_prompt %}x{% endif %}" + prompter.tokenizer.chat_template
    changed = Prompter(tokenizer=tokenizer, end_ids=prompter.end_ids, silent_ids=frozenset(), digest="")
    assert changed.reply_ids(CHAT[:1], "Five.") == prompter.reply_ids(CHAT[:1], "Five.")


@pytest.mark.parametrize("as_messages", [False, True])
def test_columns_as_trl_names_them(tmp_path: Path, prompter: Prompter, as_messages: bool) -> None:
    row: dict[str, Any] = {"prompt": "How many?", "completion": "Five."}
    if as_messages:
        row = {"prompt": CHAT[:1], "completion": CHAT[1:2]}
    keys = {"question": "prompt", "solution": "completion"}
    tasks = loaded(tmp_path, prompter, [row], sft=keys, tasks={"system_prompt": "Be brief."})
    (asked, answer), *more = texts(tasks, prompter)
    assert not more and asked == prompt(prompter, [{"role": "system", "content": "Be brief."}, *CHAT[:1]])
    assert answer.startswith("Five.")


def test_a_chat_keeps_its_own_system_message(tmp_path: Path, prompter: Prompter) -> None:
    chat = [{"role": "system", "content": "Own."}, *CHAT[:2]]
    tasks = loaded(tmp_path, prompter, [{"messages": chat}], tasks={"system_prompt": "Other."})
    assert texts(tasks, prompter).pop()[0] == prompt(prompter, chat[:2])
    assert tasks.systems == ("Own.",)


def test_only_answers_that_are_learned_have_a_system_message_of_the_run(tmp_path: Path, prompter: Prompter) -> None:
    own = {"role": "system", "content": "Own."}
    rows = [{"messages": CHAT[:2]}, {"messages": [own, CHAT[0], {"role": "assistant", "content": ""}]}]
    assert loaded(tmp_path, prompter, rows, tasks={"system_prompt": "Other."}).systems == ("Other.",)
    assert sorted(loaded(tmp_path, prompter, [*rows, {"messages": [own, *CHAT[:2]]}]).systems) == ["", "Own."]


def test_without_a_source_a_question_keeps_its_system_message_too(tmp_path: Path, prompter: Prompter) -> None:
    chat = [{"role": "system", "content": "Own."}, CHAT[0]]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": chat, "answer": "5"}))
    tasks = {"source": str(tmp_path / "rows.jsonl"), "system_prompt": "Other."}
    assert texts(load(config_for(tasks=tasks), prompter), prompter).pop()[0] == prompt(prompter, chat)


def test_without_a_source_the_solutions_are_asked_as_a_run_asks_them(prompter: Prompter) -> None:
    tasks: dict[str, Any] = {"few_shot": 2, "limit": 20, "levels": [1], "system_prompt": "Add."}
    config = config_for(tasks=tasks | {"max_prompt_tokens": 512})
    found = load(config, prompter)
    asked = load_tasks(config.tasks, prompter, "gsm8k")
    prompts = {task.prompt_ids.tobytes(): task.columns["solution"] for task in asked.train}
    assert len(found.train) == len(asked.train) == 20 and not found.held_out
    for task, answer in zip(found.train, found.answers, strict=True):
        assert prompter.text(answer.tolist()) == prompts[task.prompt_ids.tobytes()]


def test_held_out_tasks_are_those_of_a_run_if_they_are_evaluated(prompter: Prompter) -> None:
    config = config_for(eval={"problems": 8})
    found, asked = load(config, prompter), load_tasks(config.tasks, prompter, "gsm8k")
    assert [task.columns for task in found.held_out] == [task.columns for task in asked.held_out]


def test_rows_that_cannot_be_learned_are_counted(tmp_path: Path, prompter: Prompter) -> None:
    rows = [
        {"question": "How many?", "solution": "Five."},
        {"question": "How many?", "solution": " "},
        {"question": "How many?" * 50, "solution": "Five."},
        {"question": "How many?", "solution": "Five." * 50},
    ]
    caps: dict[str, Any] = {"tasks": {"max_prompt_tokens": 40}, "rollout": {"max_new_tokens": 32}}
    tasks = loaded(tmp_path, prompter, rows, **caps)
    assert len(tasks.train) == 1 and tasks.dropped == {
        "without a question or an answer": 1,
        "with a prompt of more than tasks.max_prompt_tokens = 40": 1,
        "with an answer of more than rollout.max_new_tokens = 32": 1,
    }
    with pytest.raises(DataError, match=r"sft\.source = .* gave no answer to learn: 1 without"):
        loaded(tmp_path, prompter, rows[1:2], **caps)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, ("neither the column 'messages' nor 'question' and 'solution'", "it has text", "set sft.")),
        ({"messages": [{"role": "robot", "content": "x"}]}, ("'messages'", "user", "correct that row")),
        ({"messages": [{"role": "user", "content": ["x"]}]}, ("content as text",)),
    ],
)
def test_rows_of_another_form_are_refused(
    tmp_path: Path, prompter: Prompter, row: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as refusal:
        loaded(tmp_path, prompter, [row])
    assert all(word in str(refusal.value) for word in words)


class Link:
    """Notes what reaches the actors."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.submitted: list[Order] = []

    def publish(self, policy: Policy, oldest_needed: int) -> None:
        self.published.append(policy.version)

    def submit(self, orders: Iterable[Order]) -> None:
        self.submitted += orders

    def collect(self, order_ids: Sequence[str]) -> list[FilledOrder]:
        raise AssertionError("nothing of a warm start is sampled")

    def pump(self, timeout_s: float = 0.0) -> None:
        """Nothing waits."""


class Notes:
    """A journal in memory."""

    def __init__(self) -> None:
        self.recorded: dict[str, FilledOrder] = {}
        self.count = 0

    def find(self, order: Order) -> FilledOrder | None:
        return self.recorded.get(order.order_id)

    def record(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]] = NO_FRAMES) -> None:
        self.count += len(filled)
        self.recorded |= {one.order_id: one for one in filled}

    def begin(self, filled: Sequence[FilledOrder], frames: Mapping[str, Sequence[bytes]]) -> None:
        self.record(filled, frames)

    def is_durable(self, order_id: str) -> bool:
        return order_id in self.recorded


def test_orders_are_filled_with_their_own_answers_and_recorded_once(tmp_path: Path, prompter: Prompter) -> None:
    """A later start takes them from the journal, as every run does."""
    rows = [{"question": f"What is {n}?", "solution": f"It is {n}."} for n in range(4)]
    tasks, link, notes = loaded(tmp_path, prompter, rows), Link(), Notes()
    orders = build_orders(
        [tasks.train[place] for place in (2, 0, 2)],
        seed=0,
        lane="train",
        step=0,
        first_slot=0,
        samples=1,
        version=7,
        sampling=Sampling(temperature=1.0, max_new_tokens=32),
        groups_per_order=2,
    )
    answers = [*tasks.answers]
    for _ in range(2):
        filler = WrittenOrders(answers, ("answer_tags", "rewards.py:brevity"), link, notes)
        filler.publish(policy(version=7), oldest_needed=0)
        filler.submit(orders)
        groups = [group for order in filler.collect([o.order_id for o in orders]) for group in order.groups]
        for place, group in zip((2, 0, 2), groups, strict=True):
            assert group.completion_ids.tolist() == tasks.answers[place].tolist()
            assert group.prompt_ids.tolist() == tasks.train[place].prompt_ids.tolist()
            assert group.outcomes == (Outcome.CORRECT,)
            assert group.rewards == {"answer_tags": (0.0,), "brevity": (0.0,)}
        answers = [np.zeros(1, np.int32) for _ in answers]
    assert notes.count == len(orders) == 2 and link.published == [7, 7] and not link.submitted


def test_a_question_is_asked_as_a_conversation() -> None:
    assert conversation("Q", "S", [("q", "a")]) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "Q"},
    ]
