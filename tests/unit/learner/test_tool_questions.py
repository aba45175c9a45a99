"""Questions for a model with tools, and the conversations that the embedded tool model was made from."""

import itertools
import json
import random
import re

import pytest

from actor.environments.contract import describe_in_process
from benchmarks.embedded.tool_corpus import (
    GIVES_UP,
    Said,
    draw_calculation_talk,
    draw_game_talk,
    to_text,
)
from launch.examples.games import MAX_GUESSES, Calculator, GuessingGame
from launch.presets.load import load_config
from learner.tasks.number_questions import LARGEST_SECRET, THINGS, calculations, games
from learner.tasks.tasks import GENERATED, load_rows
from learner.tasks.word_problems import Split, split_of
from shared.config.data import TasksConfig
from shared.embedded import EMBEDDED
from shared.errors import DataError
from shared.model.conversation import Conversation
from shared.model.prompt import load_prompter

FORMS = {
    "*": re.compile(r"(\d\d) boxes hold (\d\d) (\w+) each\. How many \3\?"),
    "+": re.compile(r"A shop has (\d{3}) (\w+) and buys (\d{3})\. How many \2\?"),
    "-": re.compile(r"A shop has (\d{3}) (\w+) and sells (\d{3})\. How many \2\?"),
}
CALLED = re.compile(r"<tool_call>(.*)</tool_call><\|im_end\|>")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_answer_of_a_calculation_can_be_read_off_its_text(split: Split) -> None:
    found = calculations(split, 300, seed=1)
    assert len({one.question for one in found}) == 300
    for one in found:
        asked = FORMS[one.op].fullmatch(one.question)
        assert asked
        left, right = (int(part) for part in asked.groups() if part.isdigit())
        assert one.answer == {"*": left * right, "+": left + right, "-": left - right}[one.op] >= 0


def test_the_same_seed_gives_the_same_questions_and_the_splits_share_none() -> None:
    train, held_out = calculations("train", 2000, seed=0), calculations("held_out", 300, seed=0)
    assert calculations("train", 50, seed=0) == train[:50] != calculations("train", 50, seed=1)
    assert not {one.question for one in train} & {one.question for one in held_out}
    played, kept_back = set(games("train", 2000, seed=0)), set(games("held_out", 500, seed=0))
    assert not played & kept_back and games("train", 9, seed=0) == games("train", 9, seed=0)
    assert {game.secret for game in played} == set(range(1, LARGEST_SECRET + 1))


def test_asking_for_more_calculations_than_there_are_says_so() -> None:
    """They take turns, so it is three times the number of products, the kind with the fewest."""
    with pytest.raises(DataError, match=r"asked for 20000 different questions \(held_out\), but has") as caught:
        calculations("held_out", 20_000, seed=0)
    told = re.search(r"little more than (\d+); set a smaller tasks\.limit", str(caught.value))
    products = itertools.product(range(12, 100), range(12, 100), THINGS)
    texts = (f"{left} boxes hold {right} {thing} each. How many {thing}?" for left, right, thing in products)
    there = 3 * sum(split_of(text) == "held_out" for text in texts)
    assert told and 0.98 * there < int(told[1]) <= there


@pytest.mark.parametrize("source", ["calculations", "guessing"])
def test_they_are_sources_of_tasks(source: str) -> None:
    assert source in GENERATED
    train, held_out, _ = load_rows(TasksConfig(source=source, limit=40), "exact")
    assert len(train) == 40 and len(held_out) == 512
    assert all(row["answer"].isdigit() and row["question"].endswith("?") for row in (*train, *held_out))


def test_a_calculator_computes_what_it_is_told() -> None:
    tool = Calculator()
    assert [tool.calculate(text) for text in ("12 * 13", "7+8", " 9 - 10 ")] == [156, 15, -1]
    with pytest.raises(ValueError, match=r"expected two numbers with \+, - or \* between them, got 2 \*\* 9"):
        tool.calculate("2 ** 9")


def test_a_game_is_won_within_five_guesses_or_lost() -> None:
    game = GuessingGame()
    game.reset(answer="20", question="")
    assert [game.guess(number) for number in (16, 24, 20, 3)] == ["higher", "lower", "yes", "higher"]
    assert game.get_reward() == 1.0
    game.reset(answer="20")
    assert [game.guess(number) for number in (10, 25, 3, 30, 22, 20)] == [
        *("higher", "lower", "higher", "lower", "lower"),
        "no more guesses",
    ]
    assert game.get_reward() == pytest.approx(0.3), "3 and 30 were known to be wrong"


@pytest.mark.parametrize("secret", range(1, LARGEST_SECRET + 1))
def test_halving_wins_every_game(secret: int) -> None:
    game, low, high = GuessingGame(), 1, LARGEST_SECRET
    game.reset(answer=str(secret))
    for _ in range(MAX_GUESSES):
        told = game.guess((low + high) // 2)
        low, high = ((low + high) // 2 + 1, high) if told == "higher" else (low, (low + high) // 2 - 1)
    assert game.get_reward() == 1.0


@pytest.mark.parametrize("preset", ["calculator", pytest.param("guessing_game", marks=pytest.mark.long)])
def test_a_conversation_of_the_corpus_is_token_by_token_one_of_a_run(preset: str) -> None:
    """What the template, the tools' descriptions and the parts of a conversation make of the same words."""
    config = load_config(preset)
    prompter = load_prompter(EMBEDDED["embedded-tools"], config.environment)
    talk = Conversation(prompter, config.environment.max_turns)
    rng = random.Random(3)
    for _ in range(20):
        asked, *turns = draw_calculation_talk(rng) if preset == "calculator" else draw_game_talk(rng)
        question = asked.text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        ids = [*prompter.prompt_ids(question), *talk.opening_ids("")]
        called: list[str] = []
        for said in turns:
            told = re.fullmatch(r"\n<\|im_start\|>tool\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", said.text)
            ids += talk.answer_ids(called, [told[1]]) if told else prompter.ids(said.text)
            called = [name for name, _ in calls_of(said)]
        assert to_text(prompter.tokenizer, [asked, *turns]).ids == ids
        assert all(talk.calls(prompter.ids(said.text)) == calls_of(said) for said in turns)


def calls_of(said: Said) -> list[tuple[str, dict[str, object]]]:
    called = CALLED.fullmatch(said.text)
    given = json.loads(called[1]) if called else None
    return [(given["name"], given["arguments"])] if given else []


def test_the_corpus_is_right_sometimes_and_wrong_sometimes() -> None:
    """Or there would be nothing to learn, or nothing to learn from."""
    rng = random.Random(0)
    talks = [draw_calculation_talk(rng) for _ in range(600)]
    assert 0.3 < sum(len(talk) == 4 for talk in talks) / 600 < 0.55, "shares with a call"
    games_played = [draw_game_talk(rng) for _ in range(600)]
    won = sum(talk[-1].text.startswith("####") for talk in games_played) / 600
    assert 0.2 < won < 0.6 and sum(talk[-1].text.startswith(GIVES_UP) for talk in games_played) == 600 - won * 600
    assert all(said.weight == (1.0 if said.text.endswith("<|im_end|>") else said.weight) for said in talks[0])


@pytest.mark.long
def test_the_tools_are_described_from_the_example_file() -> None:
    config = load_config("calculator").environment
    (tool,) = json.loads(describe_in_process(config, scores=False))
    assert tool["function"]["name"] == "calculate" and list(tool["function"]["parameters"]["properties"]) == [
        "expression"
    ]
