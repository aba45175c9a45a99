"""A model as a judge: two rewards that ask an OpenAI-compatible server. Copy this file and change the questions.

    [verifier]
    kind = "callable"
    function = "launch/examples/judge.py:ScoreEach"     # or RankGroup
    environment = ["JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY", "JUDGE_LIMIT_S"]
    limit_s = 60.0                                      # more than JUDGE_LIMIT_S

    JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=qwen3-8b python -m launch run my.toml

    ScoreEach    one question for each answer: a number from 0 to 10, divided by 10
    RankGroup    one question for all answers to a prompt: their order, best first; 1 for the best, 0 for the worst.
                 A worker is always given whole groups, unless another answer of the group makes its call fail

A worker makes one object and keeps it, so a question that was asked before is answered from memory: the same answer to
the same prompt costs one call. JUDGE_LIMIT_S (20 if it is not set) is the time for all questions of a step. An answer
without a usable reply by then gets None, so its outcome is `abstain`, which verifier.on_abstain drops from its group by
default. log_metric counts the questions that were asked and those without an answer. The column `answer`, if there is
one, is shown to the judge as the reference. Uses the standard library alone.
"""

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

Messages = list[dict[str, str]]
Log = Callable[[str, float], None]
Read = Callable[[str], Any]
"""From the text of a reply to what is remembered; raises if it cannot be used."""

SCORE = """Rate the answer to the question from 0 (useless) to 10 (excellent).

Question: {question}{reference}

Answer: {answer}

Reply with JSON only: {{"score": 7}}"""
RANK = """Rank the answers to the question from best to worst.

Question: {question}{reference}

{answers}

Reply with JSON only, the numbers of all answers, best first: {{"ranking": [2, 1]}}"""
AT_ONCE = 8
MAX_REPLY_BYTES = 1 << 20


class Server:
    """Asks questions within a time limit and remembers the replies."""

    def __init__(self) -> None:
        base = os.environ.get("JUDGE_URL")
        if not base:
            raise ValueError("JUDGE_URL is not set; set it, and name it in verifier.environment")
        self.url = base.rstrip("/") + "/chat/completions"
        self.model = os.environ.get("JUDGE_MODEL", "default")
        self.key = os.environ.get("JUDGE_KEY", "none")
        self.limit_s = float(os.environ.get("JUDGE_LIMIT_S", "20"))
        self.replies: dict[str, Any] = {}

    def ask_all(self, questions: Mapping[str, Read], log: Log) -> dict[str, Any]:
        """What its Read makes of the reply to each question; without those that have no usable reply in time."""
        new = [question for question in questions if question not in self.replies]
        deadline = time.monotonic() + self.limit_s
        # Not as a with block, which would wait for the slow ones.
        threads = ThreadPoolExecutor(AT_ONCE)
        asked = {question: threads.submit(self.ask, question, questions[question], deadline) for question in new}
        for question, reply in asked.items():
            try:
                self.replies[question] = reply.result(timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:
                # Not remembered: the next step asks again.
                print(f"judge: no usable reply: {type(error).__name__}: {error}")
        threads.shutdown(wait=False, cancel_futures=True)
        log("judge_asked", float(len(new)))
        log("judge_silent", float(sum(question not in self.replies for question in new)))
        return {question: self.replies[question] for question in questions if question in self.replies}

    def ask(self, question: str, read: Read, deadline: float) -> Any:
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            self.url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
        )
        with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as response:
            reply = json.loads(response.read(MAX_REPLY_BYTES))
        return read(reply["choices"][0]["message"]["content"])


class ScoreEach:
    """Each answer by itself."""

    def __init__(self) -> None:
        self.server = Server()

    def __call__(
        self, prompts: list[Messages], completions: list[Messages], log_metric: Log, answer: Any = None, **columns: Any
    ) -> list[float | None]:
        questions = [
            SCORE.format(question=question, reference=gold, answer=completion[0]["content"])
            for question, gold, completion in zip(*asked(prompts, answer), completions, strict=True)
        ]
        found = self.server.ask_all(dict.fromkeys(questions, score), log_metric)
        return [found.get(question) for question in questions]


class RankGroup:
    """The answers to one prompt against each other. Equal texts are shown once and get the same score."""

    def __init__(self) -> None:
        self.server = Server()

    def __call__(
        self, prompts: list[Messages], completions: list[Messages], log_metric: Log, answer: Any = None, **columns: Any
    ) -> list[float | None]:
        tasks = list(zip(*asked(prompts, answer), strict=True))
        texts: dict[tuple[str, str], list[str]] = {}
        for task, completion in zip(tasks, completions, strict=True):
            # In a fixed order, so that the same answers are the same question again.
            texts[task] = sorted({*texts.get(task, []), completion[0]["content"]})
        questions = {task: rank_question(*task, texts[task]) for task in texts if len(texts[task]) > 1}
        read = {questions[task]: partial(places, len(texts[task])) for task in questions}
        found = self.server.ask_all(read, log_metric)
        ranked = {task: found.get(questions[task]) for task in questions}
        return [
            place_score(ranked.get(task), texts[task].index(completion[0]["content"]))
            for task, completion in zip(tasks, completions, strict=True)
        ]


def asked(prompts: Sequence[Messages], golds: Sequence[Any] | None) -> tuple[list[str], list[str]]:
    """The questions, and the references that belong to them."""
    references = [f"\nReference answer: {gold}" for gold in golds] if golds else [""] * len(prompts)
    return [prompt[-1]["content"] for prompt in prompts], references


def rank_question(question: str, gold: str, texts: Sequence[str]) -> str:
    answers = "\n\n".join(f"Answer {number}: {text}" for number, text in enumerate(texts, start=1))
    return RANK.format(question=question, reference=gold, answers=answers)


def place_score(places: list[int] | None, text: int) -> float | None:
    """1 for the first, 0 for the last."""
    return None if places is None else 1.0 - places[text] / (len(places) - 1)


def places(count: int, reply: str) -> list[int]:
    """The place of each text, from 0; ValueError if the ranking is not one of these texts."""
    order = [int(number) - 1 for number in found_json(reply)["ranking"]]
    if sorted(order) != list(range(count)):
        raise ValueError(f"a ranking {order} of {count} answers")
    return [order.index(text) for text in range(count)]


def score(reply: str) -> float:
    """0 to 1; ValueError if the judge's number is not on its scale."""
    value = float(found_json(reply)["score"])
    if not 0.0 <= value <= 10.0:
        raise ValueError(f"a score of {value}")
    return value / 10.0


def found_json(reply: str) -> Any:
    """Judges put words or a fence around their JSON."""
    found = re.search(r"\{.*\}", reply.rpartition("</think>")[2], re.DOTALL)
    if not found:
        raise ValueError(f"no JSON in {reply[:80]!r}")
    return json.loads(found[0])
