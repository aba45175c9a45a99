"""A run whose completions come from a server: our own engine behind vLLM's addresses, which goes away and returns."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actor.engines.hf_engine import HFEngine
from launch.presets.load import load_config
from shared.base.cache import cached_base
from shared.base.load import load_policy
from shared.config.processes import ActorConfig
from shared.model.adapter_file import read_layout
from shared.model.prompt import load_prompter
from tests.support.fakes import CPU
from tests.support.runs import SMALL, launch, num_rows, replayed, rows, sets, start, wait_until
from tests.support.served_engine import BASE, Options, ServedEngine

STEPS = 4


class Servers:
    """The embedded base behind one address, in one life after the other."""

    def __init__(self) -> None:
        config = load_config("embedded", [])
        base = cached_base(config.model)
        self.prompter = load_prompter(base.folder)
        policy = load_policy(base, config.model, config.lora, CPU, torch.float32)
        self.engine = HFEngine(policy, self.prompter, ActorConfig(fold="never"))
        self.zeros = read_layout(base.folder, config.lora).zeros()
        self.now = self.started(0)

    def started(self, port: int) -> ServedEngine:
        return ServedEngine(
            self.engine,
            lambda token: self.prompter.as_the_model_sees([token]),
            Options(max_model_len=384),
            base=self.zeros,
            port=port,
        )

    def again(self) -> None:
        self.now = self.started(self.now.port)


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    if not made.now.gone.is_set():
        made.now.close()


def keys(servers: Servers, **more: Any) -> list[str]:
    chosen = {"actor.engine": "vllm_server", "server.urls": [servers.now.url], "run.steps": STEPS}
    return sets(SMALL | chosen | more)


@pytest.mark.long
def test_a_run_goes_on_when_its_server_is_killed_and_started_again(servers: Servers, tmp_path: Any) -> None:
    out = tmp_path / "run"
    adapters = tmp_path / "adapters"
    launcher = start("run", "embedded", "--out", out, *keys(servers, **{"server.folder": str(adapters)}))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    servers.now.close()
    first = servers.now
    servers.again()
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert max(row["mismatch/p99"] for row in found if row["mismatch/p99"] is not None) <= 1e-4
    names = [name for name, _ in [*first.loads, *servers.now.loads]]
    assert len(set(names)) == len(names)
    assert set(servers.now.adapters) == {BASE} and list(adapters.iterdir()) == []
    # What looks at a run afterwards leaves as little as the run.
    for words in (("eval", out, "--problems", "2"), ("generate", out, "--prompt", "2 + 2 =", "--max-new-tokens", "2")):
        used = len(servers.now.loads)
        done = launch(*words)
        assert done.returncode == 0, done.stderr
        assert len(servers.now.loads) > used + 1
        assert set(servers.now.adapters) == {BASE} and list(adapters.iterdir()) == []


@pytest.mark.long
def test_a_run_without_its_server_ends_with_a_sentence_and_resumes(servers: Servers, tmp_path: Any) -> None:
    out = tmp_path / "run"
    patience = {"server.patience_s": 1.0}
    launcher = start("run", "embedded", "--out", out, *keys(servers, **patience))
    wait_until(lambda: num_rows(out) >= 2, "the second step")
    servers.now.close()
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 2 and "Traceback" not in output, output
    assert "did not reply for" in output and "start it again with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in output
    servers.again()
    done = launch("resume", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))
    assert replayed(out)["match"] is True


def test_a_dry_run_needs_no_server_and_plans_an_actor_without_a_model(servers: Servers) -> None:
    servers.now.close()
    done = launch("run", "embedded", "--dry-run", *keys(servers))
    assert done.returncode == 0, done.stderr
    assert "how fast its servers are is not known here" in done.stdout
