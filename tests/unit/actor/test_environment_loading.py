"""Environments load a few at a time, and one that cannot be loaded in mid-run costs its own episode alone."""

import re
from contextlib import closing
from pathlib import Path

import pytest

from actor.environments.contract import ToolCall
from actor.environments.pool import EnvironmentPool, Lost
from actor.environments.worker import Answered, Opened, Reset, Use
from protocol.outcome import Outcome
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError
from tests.unit.actor.test_environment_pool import ask

SOURCE = '''
import os, time

FOLDER = os.path.dirname(__file__)

class Moody:
    def __init__(self):
        """Reads how from a file."""
        path = f"{FOLDER}/mood"
        how = open(path).read() if os.path.exists(path) else ""
        if how == "hang":
            time.sleep(600)
        if how == "leave":
            os._exit(3)
        if how == "raise":
            raise ValueError("on purpose")

    def reset(self, **columns):
        return "Begin."

    def say(self) -> str:
        """Says a word."""
        return "word"

class Slow(Moody):
    def __init__(self):
        """Writes when it began and ended to load."""
        began = time.monotonic()
        time.sleep(1)
        with open(f"{FOLDER}/loaded", "a") as file:
            file.write(f"{began} {time.monotonic()}\\n")
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "env.py"
    path.write_text(SOURCE)
    return path


def config_of(file: Path, name: str) -> EnvironmentConfig:
    return EnvironmentConfig(function=f"{file}:{name}", at_once=2)


def test_only_so_many_load_at_once_each_with_its_own_time(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file, "Slow"), start_limit_s=4.0)) as pool:
        pool.make_ready(5 * pool.loading_at_once + 1, lambda: None)
        times = [tuple(map(float, line.split())) for line in (file.parent / "loaded").read_text().splitlines()]
    assert len(times) == 5 * pool.loading_at_once + 1
    assert max(sum(began <= at < ended for began, ended in times) for at, _ in times) <= pool.loading_at_once
    assert max(ended for _, ended in times) - min(began for began, _ in times) > 4.0


@pytest.mark.parametrize(
    ("how", "outcome", "said"),
    [
        ("raise", Outcome.ERROR, r"Moody' cannot be made \(ValueError: on purpose\)"),
        ("leave", Outcome.ERROR, "Moody', while it loaded: The environment ended with exit code 3"),
        ("hang", Outcome.TIMEOUT, "Moody', while it loaded: The environment was stopped after 4 s"),
    ],
)
def test_one_that_cannot_be_loaded_in_mid_run_costs_its_own_episode(
    file: Path, caplog: pytest.LogCaptureFixture, how: str, outcome: Outcome, said: str
) -> None:
    mood, resets = file.parent / "mood", {seat: Reset(columns={}) for seat in range(3)}
    with closing(EnvironmentPool(config_of(file, "Moody"), start_limit_s=4.0)) as pool:
        mood.write_text(how)
        found = ask(pool, resets)
        assert found[0] == Opened(text="Begin.")
        assert isinstance(found[1], Lost) and found[1].outcome is found[2].outcome is outcome
        assert re.search(said, found[1].note) and re.search(said, caplog.text)
        mood.unlink()
        say = Use(calls=[ToolCall(name="say", arguments={})])
        assert ask(pool, {0: say}) == {0: Answered(texts=["word"])}
        assert ask(pool, resets) == dict.fromkeys(resets, Opened(text="Begin."))


def test_one_that_cannot_be_loaded_at_the_start_is_refused(file: Path) -> None:
    mood = file.parent / "mood"
    mood.write_text("raise")
    with pytest.raises(RewardError, match="cannot be made"):
        EnvironmentPool(config_of(file, "Moody"))
    mood.write_text("leave")
    with pytest.raises(RewardError, match="Moody', while it loaded: The environment ended"):
        EnvironmentPool(config_of(file, "Moody"))
