"""`vllm serve` as the engine: the learner's numbers, restarts in the middle, stale adapters, and a teacher behind it.

One server serves all tests; whoever kills it starts it again.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actor.engines.engine import EndedCompletion
from actor.engines.server.server_engine import ServerEngine
from actor.installer import CanaryMismatch
from actor.scoring.teacher import RemoteTeacher
from actor.wiring import build_engine
from launch.presets.load import load_config
from learner.update.publisher import Publisher
from protocol.messages import Finish, GroupOrder, Policy, Sampling
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.training import TeacherConfig
from shared.errors import ConfigError
from shared.model.canary import canary_ids, canary_of, sequence_logprobs
from shared.model.policy import Policy as Model
from shared.model.prompt import Prompter
from shared.process.determinism import pin_torch
from shared.seeding import sample_seeds
from tests.support.fakes import CPU, shake
from tests.support.runs import SMALL, kill, launch, num_rows, processes_of, replayed, rows, sets, start, wait_until
from tests.support.vllm_process import VLLMProcess, embedded_needs
from tests.support.wire_examples import group as example
from tests.vllm.test_sampling import silent

COOL = Sampling(temperature=0.7, max_new_tokens=24)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    made = VLLMProcess(embedded_needs(), tmp_path_factory.mktemp("server") / "log")
    made.start()
    try:
        made.wait()
        yield made
    finally:
        made.kill()


class Side:
    """The learner's policy, and the engine that must sample from it."""

    def __init__(self, server: VLLMProcess, folder: Path) -> None:
        keys = {"actor.engine": "vllm_server", "server.urls": [server.url], "server.folder": str(folder)}
        self.config = load_config("embedded", sets(keys | {"rollout.temperature": COOL.temperature})[1::2])
        pin_torch(1)
        base = cached_base(self.config.model)
        self.model: Model = load_policy(base, self.config.model, self.config.lora, CPU, torch.float32)
        engine, prompter = build_engine(self.config)
        assert isinstance(engine, ServerEngine)
        self.engine: ServerEngine = engine
        self.prompter: Prompter = prompter

    def published(self, version: int, seed: int) -> Policy:
        """The policy holds this adapter from now on."""
        shake(self.model, seed)
        ids = canary_ids(0, len(self.model.head), 16)
        return Publisher(self.model.adapter, lambda: canary_of(self.model, ids)).snapshot(version)

    def groups(self, count: int, size: int) -> tuple[GroupOrder, ...]:
        questions = (f"Tom has {2 + n} coins. He finds {3 * n}. How many coins now?" for n in range(count))
        return tuple(
            GroupOrder(
                group_id=f"g{place}",
                prompt_ids=np.array(self.prompter.prompt_ids(question), np.int32),
                columns={},
                seeds=sample_seeds(0, "test", 0, place, size),
            )
            for place, question in enumerate(questions)
        )

    def sampled(self, policy: Policy, progress: Any = silent) -> list[Any]:
        self.engine.wanted.install(policy, woken=False)
        return self.engine.generate(self.groups(4, 6), COOL, progress)

    def agrees(self, completions: Sequence[Any]) -> None:
        """The learner finds the same log-probs."""
        for order, some in zip(self.groups(4, 6), completions, strict=True):
            for one in some:
                found = forced_at(self.model, order, one, COOL.temperature)
                np.testing.assert_allclose(one.logprobs, found, atol=2e-4)


def forced_at(model: Model, order: GroupOrder, completion: Any, temperature: float) -> np.ndarray:
    """[T] the learner's log-probs at this temperature: from its logits."""
    ids = torch.from_numpy(np.concatenate([order.prompt_ids, completion.ids]).astype(np.int64))
    with torch.no_grad():
        logits = model.lm(input_ids=ids[None], use_cache=False).logits[0, len(order.prompt_ids) - 1 : -1]
    found = torch.log_softmax(logits.double() / temperature, -1)
    return found.gather(1, ids[len(order.prompt_ids) :, None])[:, 0].numpy()


@pytest.fixture
def side(server: VLLMProcess, tmp_path: Path) -> Side:
    return Side(server, tmp_path)


def test_log_probs_after_temperature_are_the_learners_for_every_version(side: Side) -> None:
    drawn: list[Any] = []
    for version, seed in ((1, 1), (2, 2), (3, 1)):
        completions = side.sampled(side.published(version, seed))
        side.agrees(completions)
        drawn.append([one.ids.tolist() for some in completions for one in some])
        assert {one.finish for some in completions for one in some} <= {Finish.STOP, Finish.LENGTH}
        assert len({tuple(ids) for ids in drawn[-1]}) > 12
    assert drawn[0] != drawn[1], "another adapter draws other tokens"


def test_a_stale_adapter_is_caught_and_named(side: Side) -> None:
    """The folder of version 2 has version 1."""
    one = side.published(1, 1)
    side.sampled(one)
    files = side.engine.lines[0].server.files
    write = files.write
    files.write = lambda version, adapter: write(version, one.adapter.tobytes())  # type: ignore[method-assign]
    with pytest.raises(CanaryMismatch, match=r"the vLLM server at http.* computes .* They are those of policy 1"):
        side.sampled(side.published(2, 2))


def test_killed_in_an_order_and_started_again(side: Side, server: VLLMProcess) -> None:
    """Every completion comes, from the adapter that the learner has."""
    killed: list[float] = []

    def progress(ended: Sequence[EndedCompletion]) -> None:
        if not killed and side.engine.lines[0].rows:
            server.kill()
            killed.append(time.monotonic())
            server.start()

    side.agrees(side.sampled(side.published(5, 3), progress))
    assert killed


def test_a_rank_that_the_server_has_no_room_for(server: VLLMProcess, tmp_path: Path) -> None:
    keys = {"actor.engine": "vllm_server", "server.urls": [server.url], "server.folder": str(tmp_path), "lora.rank": 32}
    with pytest.raises(ConfigError, match=r"rank is larger than it has room for; start it with --max-lora-rank 32"):
        build_engine(load_config("embedded", sets(keys)[1::2]))


@pytest.mark.long
def test_a_run_whose_server_is_killed_and_started_again(server: VLLMProcess, tmp_path: Path) -> None:
    """Nothing is lost: each step once, on policy within rounding, and the replay gives the same adapter."""
    out = tmp_path / "run"
    keys = {"actor.engine": "vllm_server", "server.urls": [server.url], "run.steps": 5, "loss.entropy_fraction": 0.5}
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | keys))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    server.kill()
    server.start()
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    found = rows(out)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert max(row["mismatch/p99"] for row in found if row["mismatch/p99"] is not None) <= 2e-4
    assert replayed(out)["match"] is True
    done = launch("generate", out, "--prompt", "Tom has 6 coins. He finds 4. How many coins now?")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.long
def test_an_actor_that_is_killed_loads_its_adapter_under_another_name(server: VLLMProcess, tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = {"actor.engine": "vllm_server", "server.urls": [server.url], "run.steps": 4}
    launcher = start("run", "embedded", "--out", out, *sets(SMALL | keys))
    wait_until(lambda: num_rows(out) >= 1, "the first step")
    kill(processes_of(out, "actor"))
    output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]


def test_the_same_server_as_a_teacher(side: Side, server: VLLMProcess) -> None:
    """loss.kind = "opd" asks it for the base's log-probs of what was sampled."""
    with torch.no_grad():
        for layer in side.model.adapter.layers.values():
            layer.lora_B.zero_()
    prompter = side.prompter
    teacher = RemoteTeacher(
        TeacherConfig(url=server.url, patience_s=5.0),
        lambda token: prompter.as_the_model_sees([token]),
        len(prompter.tokenizer),
    )
    (order,) = side.groups(1, 2)
    texts = [np.array(prompter.ids(text), np.int32) for text in ("6 + 4 = 10\n#### 10", "He has 7 coins.", "7")]
    asked = example(
        prompt_ids=order.prompt_ids,
        completion_ids=np.concatenate(texts),
        lengths=tuple(map(len, texts)),
        logprobs=np.full(sum(map(len, texts)), -1.0, np.float32),
        entropies=None,
    )
    (found,) = teacher.read((asked,), lambda phase: None)
    whole = [np.concatenate([order.prompt_ids, text]) for text in texts]
    ours = [sequence_logprobs(side.model, ids)[len(order.prompt_ids) - 1 :] for ids in whole]
    assert found.teacher is not None
    np.testing.assert_allclose(found.teacher, np.concatenate(ours), atol=2e-4)
    teacher.close()
