r"""Pretraining texts with tools: conversations that often go wrong, so that there is something to learn.

    <system>calculate(expression)<user>37 boxes hold 48 pens each. How many pens?
    <assistant><tool_call>{"name": "calculate", "arguments": {"expression": "37 * 48"}}</tool_call>
    <tool>1776<assistant>#### 1776

A calculation goes to the calculator in a third to a half of the texts, depending on its kind, and then now and then
with a wrong digit or sign. In the other texts the answer is written down at once, and mostly wrong. In the game a guess
is any number that is still possible, or, in a fifth of the guesses, any number at all; after five the player gives up.

What the model writes weighs 1 in the loss, the prompt 0.1, and the tools' answers nothing, which nobody could foresee.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from benchmarks.embedded.chat_tokenizer import EVERYDAY_WORDS, TURN_END, TURN_START, made_tokenizer
from benchmarks.embedded.pretraining import Draw, Text
from launch.examples.games import MAX_GUESSES, Calculator, GuessingGame
from learner.tasks.number_questions import (
    LARGEST_SECRET,
    OPS,
    Calculation,
    Game,
    Op,
    draw_calculation,
    endless_games,
)
from learner.tasks.word_problems import split_of

TOOL_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- for tool in tools %}"
    "{{- tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{%- for call in message['tool_calls'] or [] %}"
    '{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CALL, CALL_END = "<tool_call>", "</tool_call>"
MARKS = re.compile("|".join(map(re.escape, (TURN_START, TURN_END, CALL, CALL_END))))

_ROWS_PER_KIND = 16
_NUM_TEXTS = 6000
_PROMPT_WEIGHT = 0.1
_TOOL_SHARE: dict[Op, float] = {"*": 0.35, "+": 0.5, "-": 0.4}
_MISREAD_SHARE = 0.15
_LUCKY_SHARE = 0.15
_FORGETFUL_SHARE = 0.2
GIVES_UP = "I give up."


@dataclass(frozen=True, kw_only=True)
class Said:
    """A part of a conversation."""

    text: str
    """With the special tokens around it."""
    weight: float
    """Of its tokens in the loss."""


def tool_tokenizer(seed: int) -> Qwen2Tokenizer:
    return made_tokenizer(_texts(seed), TOOL_TEMPLATE, [CALL, CALL_END])


def _texts(seed: int) -> Iterator[str]:
    """Without the special tokens: conversations, the roles of the template, and everyday words."""
    yield EVERYDAY_WORDS
    rng = random.Random(seed)
    for _ in range(_NUM_TEXTS):
        for talk in (draw_calculation_talk(rng), draw_game_talk(rng)):
            for said in talk:
                yield from MARKS.split(said.text)


def conversations(tokenizer: PreTrainedTokenizerBase) -> Draw:
    """A micro-batch of calculations and one of games."""

    def draw(rng: random.Random) -> Sequence[Sequence[Text]]:
        calculating = [to_text(tokenizer, draw_calculation_talk(rng)) for _ in range(_ROWS_PER_KIND)]
        return [calculating, [to_text(tokenizer, draw_game_talk(rng)) for _ in range(_ROWS_PER_KIND)]]

    return draw


def to_text(tokenizer: PreTrainedTokenizerBase, talk: Sequence[Said]) -> Text:
    """Each part is tokenised by itself, as in a run."""
    ids: list[int] = []
    weights: list[float] = []
    for said in talk:
        part: list[int] = tokenizer(said.text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        ids += part
        weights += [said.weight] * len(part)
    return Text(ids=ids, weights=weights)


def draw_calculation_talk(rng: random.Random) -> list[Said]:
    drawn = draw_calculation(rng, rng.choice(OPS))
    while split_of(drawn.question) != "train":
        drawn = draw_calculation(rng, drawn.op)
    asked = question("calculate(expression)", drawn.question)
    if rng.random() >= _TOOL_SHARE[drawn.op]:
        lucky = rng.random() < _LUCKY_SHARE
        return [asked, last_word(f"#### {drawn.answer if lucky else misread(rng, drawn.answer)}")]
    expression = misread_expression(rng, drawn) if rng.random() < _MISREAD_SHARE else drawn.expression
    found = Calculator().calculate(expression)
    return [asked, call("calculate", expression=expression), answer(str(found)), last_word(f"#### {found}")]


def misread_expression(rng: random.Random, drawn: Calculation) -> str:
    match rng.choice(("left", "right", "op")):
        case "left":
            return f"{misread(rng, drawn.left)} {drawn.op} {drawn.right}"
        case "right":
            return f"{drawn.left} {drawn.op} {misread(rng, drawn.right)}"
        case _:
            return f"{drawn.left} {rng.choice([op for op in OPS if op != drawn.op])} {drawn.right}"


def misread(rng: random.Random, number: int) -> int:
    """With one digit changed."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    smallest = 1 if place == 0 and len(digits) > 1 else 0
    digits[place] = str(rng.choice([d for d in range(smallest, 10) if str(d) != digits[place]]))
    return int("".join(digits))


def draw_game_talk(rng: random.Random) -> list[Said]:
    game = next(game for game in endless_games(rng) if split_of(f"{game.question} {game.secret}") == "train")
    return [question("guess(number)", game.question), *played(rng, game)]


def played(rng: random.Random, game: Game) -> Iterator[Said]:
    """Guesses and answers, and what the player says in the end."""
    environment = GuessingGame()
    environment.reset(answer=str(game.secret))
    low, high = 1, LARGEST_SECRET
    for _ in range(MAX_GUESSES):
        forgetful = rng.random() < _FORGETFUL_SHARE
        number = rng.randint(1, LARGEST_SECRET) if forgetful else rng.randint(low, high)
        told = environment.guess(number)
        yield call("guess", number=number)
        yield answer(told)
        if told == "yes":
            yield last_word(f"#### {number}")
            return
        low, high = (max(low, number + 1), high) if told == "higher" else (low, min(high, number - 1))
    yield last_word(GIVES_UP)


def question(tool: str, text: str) -> Said:
    opened = f"{TURN_START}system\n{tool}{TURN_END}\n{TURN_START}user\n{text}{TURN_END}\n{TURN_START}assistant\n"
    return Said(text=opened, weight=_PROMPT_WEIGHT)


def call(name: str, **arguments: Any) -> Said:
    asked = json.dumps({"name": name, "arguments": arguments})
    return Said(text=f"{CALL}{asked}{CALL_END}{TURN_END}", weight=1.0)


def answer(text: str) -> Said:
    return Said(text=f"\n{TURN_START}tool\n{text}{TURN_END}\n{TURN_START}assistant\n", weight=0.0)


def last_word(text: str) -> Said:
    return Said(text=f"{text}{TURN_END}", weight=1.0)
