"""A teacher behind a URL: its log-probs at the right tokens, and what happens if it is down, slow, or another model."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from actor.rollout import Rollout
from actor.scoring.teacher import FIRST_PAUSE_S, RemoteTeacher
from protocol.limits import MIN_LOGPROB
from protocol.messages import Group
from protocol.validate import check_groups
from shared.config.training import TeacherConfig
from shared.errors import ConfigError, UserError
from shared.process.lease import NoLease
from tests.support.fakes import ScriptedEngine, ScriptedScorer, spelled, toy_orders, toy_policy
from tests.support.runs import free_port
from tests.support.teacher_server import TeacherServer
from tests.support.wire_examples import filled_order, group

VOCABULARY = 500


def word(token: int) -> str:
    return " " + "".join(chr(ord("a") + int(digit)) for digit in f"{token:03d}")


def values(ids: Sequence[int]) -> list[float]:
    """Of token t behind token s: - (s + t / 1000)."""
    return [-(before + token / 1000) for before, token in pairwise(ids)]


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    made = TeacherServer(values, word)
    yield made
    made.close()


def teacher(url: str, **keys: float | str) -> RemoteTeacher:
    return RemoteTeacher(TeacherConfig(url=url, **keys), word, VOCABULARY)  # pyright: ignore[reportArgumentType]


GROUPS = (group(), group(group_id="train/000012/004", prompt_ids=np.array([8], np.int32)))


def read(one: RemoteTeacher, groups: Sequence[Group] = GROUPS) -> tuple[Group, ...]:
    beats: list[str] = []
    found = one.read(tuple(groups), beats.append)
    assert set(beats) == {"waiting for the teacher"}
    check_groups(filled_order(*found))
    return found


def test_each_sampled_token_has_its_log_prob(server: TeacherServer) -> None:
    first, second = read(teacher(server.url))
    # Completions [5, 6], [] and [9], behind 1 7 and behind 8.
    assert first.teacher is not None and first.teacher.tolist() == pytest.approx([-7.005, -5.006, -7.009])
    assert second.teacher is not None and second.teacher.tolist() == pytest.approx([-8.005, -5.006, -8.009])
    probe, *asked = server.asked
    assert probe["path"] == "/v1/completions" and len(probe["prompt"][0]) >= 32
    prompts = sorted(body["prompt"] for body in asked)
    assert prompts == [[[1, 7, 5, 6], [1, 7], [1, 7, 9]], [[8, 5, 6], [8], [8, 9]]]
    assert all((body["echo"], body["max_tokens"]) == (True, 1) and "model" not in body for body in asked)


def test_the_server_is_told_model_and_key_and_probed_once(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    one = teacher(server.url, model="large", key_variable="TEACHER_KEY")
    read(one)
    read(one)
    assert {body["model"] for body in server.asked} == {"large"} and set(server.keys) == {"Bearer secret"}
    assert len(server.asked) == 5


def test_what_an_environment_wrote_has_none_and_what_is_impossible_has_a_bound(server: TeacherServer) -> None:
    server.logprobs = lambda ids: [-1e9 for _ in ids[1:]]
    played = group(
        trained=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([0.0, -1.0, -0.5], np.float32),
        entropies=None,
    )
    (found,) = read(teacher(server.url), [played])
    assert found.teacher is not None and found.teacher.tolist() == [0.0, MIN_LOGPROB, MIN_LOGPROB]


def test_a_server_that_fails_is_asked_again(server: TeacherServer) -> None:
    server.faults = [503, 429]
    first, _ = read(teacher(server.url))
    assert first.teacher is not None and len(server.asked) == 2 + 3


def test_a_server_that_does_not_come_ends_the_run_with_a_sentence() -> None:
    one = teacher(f"http://127.0.0.1:{free_port()}/v1", patience_s=0.5 * FIRST_PAUSE_S)
    with pytest.raises(UserError, match=r"has not replied for 1 s \(URLError.*nothing is lost"):
        read(one)


def test_a_server_that_hangs_counts_as_one_that_does_not_reply(server: TeacherServer) -> None:
    server.logprobs = lambda ids: time.sleep(1.0) or values(ids)
    with pytest.raises(UserError, match=r"has not replied for \d s \(TimeoutError"):
        read(teacher(server.url, limit_s=0.1, patience_s=0.1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": ["Hund"] * 65}, "has other tokens than the run: .* here and 'Hund' there"),
        ({"token_logprobs": [None, -1.0]}, "counted 2 tokens where 6[0-9] were sent"),
        ({"token_logprobs": None}, "replied without the log-probs of the prompt"),
    ],
)
def test_another_model_is_refused_before_anything_is_asked(
    server: TeacherServer, change: dict[str, object], sentence: str
) -> None:
    server.changed = lambda choice: choice["logprobs"].update(change)
    with pytest.raises(ConfigError, match=sentence):
        read(teacher(server.url))


def test_a_refused_request_is_not_repeated(server: TeacherServer) -> None:
    server.faults = [404]
    with pytest.raises(ConfigError, match=r"refused a request \(404 .*as planned.*check teacher\.model"):
        read(teacher(server.url))
    assert len(server.asked) == 1


def test_only_orders_that_ask_get_a_teacher(server: TeacherServer) -> None:
    (order,) = toy_orders()
    one = teacher(server.url)
    rollout = Rollout(ScriptedEngine(), ScriptedScorer(), NoLease(), spelled, teacher=one.read)
    (plain,) = rollout.fill(order, toy_policy(0), lambda phase: None).groups
    assert plain.teacher is None and server.asked == []
    (taught,) = rollout.fill(structs.replace(order, teacher=True), toy_policy(0), lambda phase: None).groups
    assert taught.teacher is not None and len(taught.teacher) == sum(taught.lengths)
    deaf = Rollout(ScriptedEngine(), ScriptedScorer(), NoLease(), spelled)
    with pytest.raises(ConfigError, match=r"there is no teacher\.url"):
        deaf.fill(structs.replace(order, teacher=True), toy_policy(0), lambda phase: None)
