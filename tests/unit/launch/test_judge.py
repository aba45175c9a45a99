"""The judge of launch/examples, in scoring workers, against a server of ours: slow, wrong, silent."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import Context, ScoreJob
from protocol.messages import Outcome
from shared.config.data import VerifierConfig
from tests.support.local_server import LocalServer

JUDGE = Path(__file__).resolve().parents[3] / "launch/examples/judge.py"
VARIABLES = ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY", "JUDGE_LIMIT_S")
Reply = Callable[[str], str]


class JudgeServer(LocalServer):
    """Answers /v1/chat/completions with what `reply` says of the question, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Reply = lambda question: '{"score": 5}'
        self.asked: list[str] = []
        self.headers_seen: list[str | None] = []
        self.closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        judge = self.server
        assert isinstance(judge, JudgeServer)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        judge.asked.append(question)
        judge.headers_seen.append(self.headers["Authorization"])
        found = self.path == "/v1/chat/completions" and body["model"] == "a-judge"
        text = json.dumps({"choices": [{"message": {"role": "assistant", "content": judge.reply(question)}}]})
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as judge:
        thread = threading.Thread(target=judge.serve_forever, daemon=True)
        thread.start()
        yield judge
        judge.closing.set()
        judge.shutdown()
        thread.join()


@pytest.fixture
def pool(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ScorePool]]:
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1/")
    monkeypatch.setenv("JUDGE_MODEL", "a-judge")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("JUDGE_LIMIT_S", "2")
    with contextlib.ExitStack() as stack:

        def open_pool(name: str) -> ScorePool:
            verifier = VerifierConfig(
                kind="callable", function=f"{JUDGE}:{name}", environment=VARIABLES, workers=1, limit_s=60.0
            )
            return stack.enter_context(contextlib.closing(ScorePool(verifier)))

        yield open_pool


def job(text: str, question: str = "2 + 2?", answer: str = "4") -> ScoreJob:
    columns = {"question": question, "answer": answer}
    return ScoreJob(
        prompt="", completion=text, completion_ids=[1], truncated=False, columns=columns, context=Context(chat=True)
    )


def scores(pool: ScorePool, *texts: str) -> list[float | None]:
    found = pool.score([job(text) for text in texts], lambda: None)
    assert all(one.outcome in (Outcome.CORRECT, Outcome.WRONG, Outcome.ABSTAIN) for one in found), found
    return [None if one.outcome is Outcome.ABSTAIN else one.score for one in found]


def answer_in(question: str) -> str:
    found = re.search(r"^Answer: (.*)$", question, re.MULTILINE)
    assert found
    return found[1]


def test_each_answer_gets_the_judges_number(server: JudgeServer, pool: Callable[[str], ScorePool]) -> None:
    server.reply = lambda question: f'<think>{{}}</think>```json\n{{"score": {len(answer_in(question))}}}\n```'
    assert scores(pool("ScoreEach"), "four", "4", "seventy") == [0.4, 0.1, 0.7]
    assert all("Question: 2 + 2?\nReference answer: 4\n" in question for question in server.asked)
    assert set(server.headers_seen) == {"Bearer secret"}


def test_a_question_that_was_asked_before_is_not_asked_again(
    server: JudgeServer, pool: Callable[[str], ScorePool]
) -> None:
    judge = pool("ScoreEach")
    assert scores(judge, "a", "b", "a") == [0.5] * 3 and len(server.asked) == 2
    found = judge.score([job("b"), job("c")], lambda: None)
    assert len(server.asked) == 3
    assert found[0].metrics == {"judge_asked": 1.0, "judge_silent": 0.0}


def test_what_is_slow_abstains_and_is_asked_again(server: JudgeServer, pool: Callable[[str], ScorePool]) -> None:
    judge, slow = pool("ScoreEach"), threading.Event()

    def reply(question: str) -> str:
        if answer_in(question) == "slow" and not slow.is_set():
            slow.set()
            server.closing.wait(30)
        return '{"score": 8}'

    server.reply = reply
    assert scores(judge, "quick", "slow") == [0.8, None]
    assert scores(judge, "quick", "slow") == [0.8, 0.8]


@pytest.mark.parametrize("text", ["eight", '{"score": }', '{"score": 80}', '{"grade": 8}', '{"score": "good"}', "[8]"])
def test_what_is_no_score_abstains(server: JudgeServer, pool: Callable[[str], ScorePool], text: str) -> None:
    server.reply = lambda question: text if answer_in(question) == "odd" else '{"score": 8}'
    assert scores(pool("ScoreEach"), "odd", "even") == [None, 0.8]


def test_a_server_that_refuses_abstains(
    server: JudgeServer, pool: Callable[[str], ScorePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_MODEL", "unknown to the server")
    assert scores(pool("ScoreEach"), "a") == [None]


def test_without_a_url_it_says_what_to_set(pool: Callable[[str], ScorePool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_URL")
    with pytest.raises(Exception, match=r"JUDGE_URL is not set; set it, and name it in verifier.environment"):
        pool("ScoreEach")


def ranked_by_length(question: str) -> str:
    answers = re.findall(r"^Answer (\d+): (.*)$", question, re.MULTILINE)
    return json.dumps({"ranking": [int(number) for number, text in sorted(answers, key=lambda one: -len(one[1]))]})


def test_a_group_is_ranked(server: JudgeServer, pool: Callable[[str], ScorePool]) -> None:
    server.reply = ranked_by_length
    judge = pool("RankGroup")
    assert scores(judge, "bb", "a", "ccc", "bb") == [0.5, 0.0, 1.0, 0.5]
    assert scores(judge, "ccc", "bb", "a") == [1.0, 0.5, 0.0] and len(server.asked) == 1, "the order does not matter"
    found = judge.score(
        [job("x\ny", "first"), job("y", "second"), job("zzz", "second"), job("y", "first")], lambda: None
    )
    assert [one.score for one in found] == [1.0, 0.0, 1.0, 0.0] and len(server.asked) == 3


@pytest.mark.parametrize("text", ["[1, 2]", '{"ranking": [1]}', '{"ranking": [1, 1]}', '{"ranking": [0, 1]}'])
def test_what_is_no_ranking_of_these_answers_abstains(
    server: JudgeServer, pool: Callable[[str], ScorePool], text: str
) -> None:
    server.reply = lambda question: text
    judge = pool("RankGroup")
    assert scores(judge, "a", "bb") == [None, None]
    server.reply = ranked_by_length
    assert scores(judge, "a", "bb") == [0.0, 1.0], "nothing wrong was remembered"


def test_a_group_of_equal_answers_cannot_be_ranked(server: JudgeServer, pool: Callable[[str], ScorePool]) -> None:
    assert scores(pool("RankGroup"), "a", "a") == [None, None] and server.asked == []
