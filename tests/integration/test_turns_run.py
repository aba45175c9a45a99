"""Runs of several turns with a model that calls tools: an agent on OpenAI's client that is killed in mid-turn, and
environments that fail in any turn and any way. Both replay to the same bits without the files that they played with."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Outcome
from tests.support.runs import SMALL, kill, launch, processes_of, replayed, rows, sets, start, summary, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
needs_openai = pytest.mark.skipif(
    not importlib.util.find_spec("openai"), reason="openai is not installed; it is an extra"
)

AGENT = '''
import json, time
from pathlib import Path
from openai import OpenAI

HERE = Path(__file__).parent
TYPES = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "calculate", "description": "Computes.", "parameters": TYPES}}

def killed_in_mid_turn():
    """The first time, until it happens."""
    while not (HERE / "was killed").exists():
        (HERE / "in mid-turn").touch()
        time.sleep(0.05)

def solve(base_url, api_key, question, answer, **columns):
    client = OpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
    assert client.models.list().data[0].id == "policy"
    ask = dict(model="policy", tools=[TOOL], temperature=0.2, max_tokens=5)
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(messages=messages, **ask).choices[0]
    messages.append(first.message)
    killed_in_mid_turn()
    for call in first.message.tool_calls or ():
        said = answer if json.loads(call.function.arguments).get("expression") else "nothing"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    if not first.message.tool_calls:
        messages.append({"role": "user", "content": "Use the tool."})
    text = ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **ask):
        text += chunk.choices[0].delta.content or ""
    return 0.5 * text.strip().endswith(answer) + 0.5 * (first.finish_reason == "tool_calls")
'''
ENVIRONMENT = '''
import os, random, sys, time
from pathlib import Path

HERE = Path(__file__).parent
HOW = ("crash", "exit", "leave", "raise", "type", "flood")
PLANNED = [(at, how) for at in ("reset", "tool", "reward") for how in HOW]
PLANNED += [("tool", "hang"), ("reward", "spin")]

class Env:
    def reset(self, question, **columns):
        self.at, self.how = self._planned()
        self.right = False
        return self._fail("reset")

    def _planned(self):
        """The next fault of the plan for one rollout in three; each is taken once."""
        if random.random() < 0.4:
            for number in random.sample(range(len(PLANNED)), len(PLANNED)):
                try:
                    (HERE / f"taken{number}").touch(exist_ok=False)
                    return PLANNED[number]
                except FileExistsError:
                    pass
        return "", ""

    def _fail(self, here):
        if here != self.at:
            return None
        with open(HERE / "faults", "a") as file:
            file.write(f"{self.at} {self.how}\\n")
        if self.how in ("hang", "spin"):
            while True:
                time.sleep(0.1 if self.how == "hang" else 0)
        if self.how == "crash":
            os.kill(os.getpid(), 11)
        if self.how == "exit":
            sys.exit(0)
        if self.how == "leave":
            os._exit(3)
        if self.how == "raise":
            raise ValueError("on purpose")
        if self.how == "flood":
            for _ in range(100_000):
                print("flood " * 20)
        return object() if self.how == "type" else None

    def calculate(self, expression: str) -> str:
        """
        Computes.

        Args:
            expression: What to compute.
        """
        self.right = True
        said = self._fail("tool")
        return "12" if said is None else said

    def get_reward(self):
        said = self._fail("reward")
        return float(self.right and random.random() < 0.5) if said is None else said
'''
HARMLESS = {"tool raise", "tool type", "tool exit", "reset flood", "tool flood", "reward flood"}
"""A tool that raises, calls sys.exit or says something odd has answered, and who prints is read."""
LATE = {"tool hang", "reward spin"}
GROUP, PROMPTS, STEPS = 4, 4, 4


def words(out: Path, keys: dict[str, Any]) -> list[str]:
    """Of a run with the model that calls a calculator."""
    return ["calculator", "--out", str(out), *sets(SMALL | {"verifier.kind": "environment"} | keys)]


def agent_words(folder: Path, out: Path) -> list[str]:
    keys = {
        "run.steps": 3,
        "rollout.prompts": 3,
        "rollout.max_new_tokens": 200,
        "environment.kind": "agent",
        "environment.function": f"{folder}/agent.py:solve",
        "environment.max_turns": 2,
        "environment.step_limit_s": 300.0,
    }
    return words(out, keys)


@pytest.mark.long
@needs_openai
def test_an_agent_killed_in_mid_turn_ends_in_the_same_bits_and_replays_without_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    begun = start("run", *agent_words(tmp_path, killed))
    wait_until((tmp_path / "in mid-turn").exists, "a second turn", seconds=400)
    kill(processes_of(killed, "actor"))
    (tmp_path / "was killed").touch()
    said, _ = begun.communicate(timeout=400)
    assert begun.returncode == 0, said
    done = launch("run", *agent_words(tmp_path, whole), wait_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "agent.py").unlink()
    assert summary(killed)["adapter_sha256"] == summary(whole)["adapter_sha256"]
    for row in rows(killed):
        assert row["turns/mean"] > 1.5 and (row["mismatch/max"] or 0.0) < 1e-3
        assert row[f"outcome/{Outcome.ERROR}"] == row[f"outcome/{Outcome.TIMEOUT}"] == 0
    assert any(0.0 < row["reward/mean"] < 1.0 for row in rows(killed)), "calls and right sums, of some"
    assert any(row["grad_norm"] > 0 for row in rows(killed)), "trained"
    assert replayed(killed)["match"]
    assert "The agent asks for temperature = 0.2, which is ignored" in (killed / "logs/actor0.log").read_text()


@needs_openai
def test_an_agent_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class solve:\n    pass\n")
    done = launch("run", *agent_words(tmp_path, tmp_path / "run"))
    assert done.returncode == 2 and "has no method `run`" in done.stderr and "Traceback" not in done.stderr


def test_faults_at_random_turns_cost_their_own_rollouts_and_replay_matches(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    out = tmp_path / "run"
    keys: dict[str, Any] = {
        "run.steps": STEPS,
        "rollout.prompts": PROMPTS,
        "rollout.group": GROUP,
        "rollout.max_new_tokens": 160,
        "environment.function": f"{tmp_path}/env.py:Env",
        "environment.step_limit_s": 8.0,
        "verifier.on_error": "drop",
    }
    done = launch("run", *words(out, keys), wait_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "env.py").unlink()
    happened = Counter((tmp_path / "faults").read_text().splitlines())
    late = sum(happened[one] for one in LATE)
    bad = happened.total() - late - sum(happened[one] for one in HARMLESS)
    rollouts = GROUP * PROMPTS
    counted = {name: sum(row[f"outcome/{name}"] for row in rows(out)) * rollouts for name in Outcome}
    assert bad >= 3, happened
    assert counted[Outcome.ERROR] == pytest.approx(bad) and counted[Outcome.TIMEOUT] == pytest.approx(late), happened
    assert sum(counted.values()) == pytest.approx(rollouts * STEPS)
    assert max(row["turns/mean"] for row in rows(out)) > 1.0, "tools were called"
    assert 0.0 < max(row["mismatch/max"] or 0.0 for row in rows(out)) < 1e-3, "None where nothing was trained on"
    assert replayed(out)["match"]
