"""Orders over vLLM servers: shared rows, new names, a canary after each load, and servers that die, return or lie."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from actor.engines.engine import EndedCompletion, Identity
from actor.engines.server.adapter_files import AdapterFiles
from actor.engines.server.completions import Completions, NoReply
from actor.engines.server.server_engine import FIRST_PAUSE_S, Line, ServerEngine
from actor.engines.server.vllm_server import Needs, VLLMServer
from actor.installer import EXACT, CanaryMismatch, Installer
from actor.rollout import Rollout
from protocol.messages import GroupOrder, Policy, Sampling
from shared.config.model import LoraConfig
from shared.errors import ModelError, UserError
from shared.model.adapter_file import adapter_config
from shared.process.lease import NoLease
from tests.support.fakes import ScriptedEngine, ScriptedScorer, scripted_identity, spelled, toy_orders, toy_policy
from tests.support.runs import free_port
from tests.support.served_engine import BASE, Options, ServedEngine

END = 77
T1 = Sampling(temperature=1.0, max_new_tokens=8)
IDS = np.array([3, 1, 4, 1, 5], np.int32)
Progress = Callable[[Sequence[EndedCompletion]], None]


def word(token: int) -> str:
    return " " + "".join(chr(ord("a") + int(digit)) for digit in f"{token:03d}")


def published(version: int) -> Policy:
    """A version with the canary that a faultless engine finds."""
    policy, engine = toy_policy(version), ScriptedEngine()
    engine.install(version, policy.adapter.tobytes())
    return structs.replace(policy, canary_ids=IDS, canary_logprobs=engine.logprobs(IDS))


def order(count: int = 2, size: int = 4) -> tuple[GroupOrder, ...]:
    return tuple(
        GroupOrder(
            group_id=f"g{index}",
            prompt_ids=np.array([10 + index, 1], np.int32),
            columns={},
            seeds=tuple(range(100 * index, 100 * index + size)),
        )
        for index in range(count)
    )


def needs(**changes: Any) -> Needs:
    fields: dict[str, Any] = {
        "serves": "/models/base",
        "dtype": "float32",
        "tokens": 64,
        "rank": 16,
        "temperature": 1.0,
        "end_ids": (END, 78),
        "spelling": word,
        "vocabulary": 1000,
    }
    return Needs(**fields | changes)


def line_to(url: str, folder: Path, wanted: Needs, *, limit_s: float = 20.0, width: int = 4) -> Line:
    name = f"The vLLM server at {url}"
    files = AdapterFiles(folder, "", adapter_config(LoraConfig(rank=wanted.rank), "base"))
    files.open()
    server = VLLMServer(Completions(name, url, "TEST_SERVER_KEY", limit_s), wanted, files, lambda: b"nothing")
    return Line(server, Installer(server, EXACT, name, "Serve the run's base there."), width)


def engine_over(folder: Path, *urls: str, patience_s: float = 20.0, **options: Any) -> ServerEngine:
    lines = [line_to(url, folder, needs(), **options) for url in urls]
    return ServerEngine(lines, scripted_identity(), patience_s, max_tokens=64)


@contextmanager
def served(options: Options | None = None, port: int = 0) -> Iterator[ServedEngine]:
    made = ServedEngine(ScriptedEngine(), word, options, port=port)
    try:
        yield made
    finally:
        if not made.gone.is_set():
            made.close()


@pytest.fixture
def server() -> Iterator[ServedEngine]:
    with served() as made:
        yield made


def unheard(ended: Sequence[EndedCompletion]) -> None: ...


def drawn(engine: ServerEngine, policy: Policy, progress: Progress = unheard, count: int = 2) -> list[Any]:
    """[groups x G] ids and log-probs under this policy."""
    engine.wanted.install(policy, woken=False)
    return numbers(engine.generate(order(count), T1, progress))


def numbers(completions: Any) -> list[Any]:
    return [[(one.ids.tolist(), one.logprobs.tolist(), one.finish) for one in group] for group in completions]


def expected(policy: Policy, count: int = 2) -> list[Any]:
    """From the same engine without a server; what ends itself ends in a token that does so."""
    engine = ScriptedEngine()
    engine.install(policy.version, policy.adapter.tobytes())
    found = engine.generate(order(count), T1, lambda ended: None)
    for one in (one for group in found for one in group if len(one.ids) < T1.max_new_tokens):
        one.ids[-1] = END
    return numbers(found)


def test_ids_go_there_and_ids_log_probs_and_ends_come_back(server: ServedEngine, tmp_path: Path) -> None:
    engine, ended = engine_over(tmp_path, server.url), list[EndedCompletion]()
    assert drawn(engine, published(1), ended.extend) == expected(published(1))
    assert sorted((one.group, one.index) for one in ended) == [(g, i) for g in range(2) for i in range(4)]
    assert sorted(body["seed"] for body in server.drawn) == [0, 1, 2, 3, 100, 101, 102, 103]
    name = server.loads[-1][0]
    for body in server.drawn:
        assert body["prompt"] in ([10, 1], [11, 1]) and body["model"] == name and body["stop_token_ids"] == [END, 78]
        assert (body["temperature"], body["max_tokens"], body["top_p"], body["top_k"]) == (1.0, 8, 1.0, 0)
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0


def test_each_version_has_a_new_name_and_folder_and_the_old_one_is_unloaded(
    server: ServedEngine, tmp_path: Path
) -> None:
    engine = engine_over(tmp_path, server.url)
    for version in (1, 2, 2, 1):
        assert drawn(engine, published(version)) == expected(published(version))
    probe, one, two, again = server.loads
    assert len({name for name, _ in server.loads}) == len({path for _, path in server.loads}) == 4
    assert server.unloaded == [probe[0], one[0], two[0]] and set(server.adapters) == {BASE, again[0]}
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == [again[0]]
    # Another actor beside the same server has other names.
    other = engine_over(tmp_path, server.url)
    drawn(other, published(1))
    assert len({name for name, _ in server.loads}) == 6


def test_servers_share_the_rows_of_an_order(tmp_path: Path) -> None:
    with served(Options(delay_s=0.02)) as one, served(Options(delay_s=0.02)) as two:
        engine = engine_over(tmp_path, one.url, two.url, width=2)
        engine.check(1.0)
        assert drawn(engine, published(3), count=4) == expected(published(3), count=4)
        assert one.drawn and two.drawn and len(one.drawn) + len(two.drawn) == 16


def test_a_server_that_dies_in_an_order_gives_its_rows_to_the_other(tmp_path: Path) -> None:
    with served(Options(dies_at=3, delay_s=0.01)) as dying, served(Options(delay_s=0.01)) as other:
        engine = engine_over(tmp_path, dying.url, other.url)
        engine.check(1.0)
        assert drawn(engine, published(1), count=4) == expected(published(1), count=4)
        assert dying.gone.wait(5.0)
        # And in the next order it is not waited for.
        assert drawn(engine, published(2)) == expected(published(2))


def test_a_server_that_is_started_again_gets_the_adapter_and_the_rows_that_were_lost(tmp_path: Path) -> None:
    """Nobody told the engine; the new server has no adapter and other names."""
    revived: list[ServedEngine] = []
    beats: list[int] = []
    with served(Options(dies_at=4)) as dying:
        engine = engine_over(tmp_path, dying.url)

        def progress(ended: Sequence[EndedCompletion]) -> None:
            beats.append(len(ended))
            if dying.gone.is_set() and not revived:
                revived.append(ServedEngine(ScriptedEngine(), word, port=dying.port))

        assert drawn(engine, published(1), progress) == expected(published(1))
    (again,) = revived
    assert sum(beats) == 8 and beats.count(0) >= 2, "heartbeats go out while it is away"
    # The probe and the policy, in both lives; what was sampled before is not sampled again.
    assert len(dying.loads) == len(again.loads) == 2
    assert len({body["seed"] for body in again.drawn}) == len(again.drawn) < 8
    again.close()


def test_a_server_that_dies_before_it_has_the_next_adapter_leaves_no_folder_of_the_old_one(tmp_path: Path) -> None:
    with served() as dying:
        server = line_to(dying.url, tmp_path, needs()).server
        server.check()
        server.install(1, b"one")
    with pytest.raises(NoReply):
        server.install(2, b"two")
    with served(port=dying.port):
        server.check()
        assert [*next(tmp_path.iterdir()).iterdir()] == []


def test_a_server_that_forgets_its_adapter_gets_it_again(server: ServedEngine, tmp_path: Path) -> None:
    engine = engine_over(tmp_path, server.url)
    drawn(engine, published(1))
    del server.adapters[server.loads[-1][0]]
    assert drawn(engine, published(1)) == expected(published(1))


def test_what_a_server_cannot_do_at_once_is_asked_again(server: ServedEngine, tmp_path: Path) -> None:
    server.options.faults = [503, 429, 500]
    assert drawn(engine_over(tmp_path, server.url), published(1)) == expected(published(1))
    assert len(server.drawn) == 8 + 3


def test_a_server_that_does_not_return_ends_the_actor_with_one_sentence(tmp_path: Path) -> None:
    with served(Options(dies_at=2)) as dying:
        engine = engine_over(tmp_path, dying.url, patience_s=0.5 * FIRST_PAUSE_S)
        with pytest.raises(UserError, match=r"did not reply for \d s \(.*start it again with `VLLM_.*nothing is lost"):
            drawn(engine, published(1))


def test_a_server_that_hangs_counts_as_one_that_is_gone(server: ServedEngine, tmp_path: Path) -> None:
    engine = engine_over(tmp_path, server.url, patience_s=0.1, limit_s=0.2)
    engine.check(1.0)
    server.options.delay_s = 1.0
    with pytest.raises(UserError, match=r"did not reply for \d s \(TimeoutError"):
        drawn(engine, published(1))


def test_a_stale_adapter_is_caught_and_named(server: ServedEngine, tmp_path: Path) -> None:
    engine = engine_over(tmp_path, server.url)
    drawn(engine, published(1))
    server.options.stale = published(1).adapter.tobytes()
    sentence = rf"Policy 2 was installed, but The vLLM server at {server.url} computes .* They are those of policy 1"
    with pytest.raises(CanaryMismatch, match=sentence):
        drawn(engine, published(2))
    assert len(server.drawn) == 8, "nothing was sampled from it"


def test_a_stale_adapter_after_a_restart_is_caught_too(tmp_path: Path) -> None:
    revived: list[ServedEngine] = []
    with served(Options(dies_at=6)) as dying:
        engine = engine_over(tmp_path, dying.url)

        def progress(ended: Sequence[EndedCompletion]) -> None:
            if dying.gone.is_set() and not revived:
                stale = Options(stale=b"of another run")
                revived.append(ServedEngine(ScriptedEngine(), word, stale, port=dying.port))

        with pytest.raises(CanaryMismatch, match=r"Policy 1 was installed.*Serve the run's base there"):
            drawn(engine, published(1), progress)
    assert revived[0].drawn == []
    revived[0].close()


def test_one_of_two_servers_with_another_base_is_named(tmp_path: Path) -> None:
    with (
        # So slow that it cannot fill the order alone before the other one has answered.
        served(Options(delay_s=0.2)) as good,
        served(Options(stale=b"other")) as bad,
        pytest.raises(CanaryMismatch, match=rf"The vLLM server at {bad.url} computes other values"),
    ):
        drawn(engine_over(tmp_path, good.url, bad.url), published(0))


def test_a_rollout_leaves_verifying_to_the_servers_and_fills_the_order(server: ServedEngine, tmp_path: Path) -> None:
    engine = engine_over(tmp_path, server.url)
    rollout = Rollout(engine, ScriptedScorer(), NoLease(), spelled, installer=engine.wanted)
    (wanted,) = toy_orders()
    filled = rollout.fill(structs.replace(wanted, policy_version=4), published(4), lambda phase: None)
    assert filled.policy_version == 4 and sum(filled.groups[0].lengths) == len(filled.groups[0].logprobs)
    assert engine.wake() is False


def test_without_a_policy_the_base_is_sampled_and_without_a_canary_nothing_is_compared(
    server: ServedEngine, tmp_path: Path
) -> None:
    engine = engine_over(tmp_path, server.url)
    engine.generate(order(1), T1, unheard)
    assert {body["model"] for body in server.drawn} == {BASE}
    engine.install(5, b"adapter of version 5")
    assert numbers(engine.generate(order(), T1, unheard)) == expected(toy_policy(5))
    scripted = ScriptedEngine()
    scripted.install(5, b"adapter of version 5")
    assert engine.logprobs(IDS).tolist() == pytest.approx(scripted.logprobs(IDS).tolist())


def test_a_turn_has_its_own_seeds_and_the_room_that_is_left(server: ServedEngine, tmp_path: Path) -> None:
    engine = engine_over(tmp_path, server.url)
    long = GroupOrder(group_id="g", prompt_ids=np.arange(60, dtype=np.int32), columns={}, seeds=(7,))
    engine.take_turn((long,), T1, unheard)
    (first,) = server.drawn
    assert first["max_tokens"] == 4 and first["seed"] != 7
    with pytest.raises(ModelError, match="do not fit the 64 that the servers were started for"):
        engine.generate((long,), T1, unheard)


def test_an_engine_says_at_once_that_a_server_is_not_there(tmp_path: Path) -> None:
    engine = engine_over(tmp_path, f"http://127.0.0.1:{free_port()}/v1")
    with pytest.raises(
        UserError, match=r"does not reply \(URLError.*start it there with: VLLM_ALLOW_RUNTIME.* vllm serv"
    ):
        engine.check(0.0)
    assert isinstance(engine.identity, Identity)
