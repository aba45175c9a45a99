"""The folders of a worker: an episode, or a call of a reward function, begins in an empty one; HOME is kept."""

from contextlib import closing
from pathlib import Path

from actor.environments.contract import ToolCall
from actor.environments.pool import EnvironmentPool
from actor.environments.worker import Act, Acted, Answered, Opened, Reset, Use
from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob
from shared.config.data import VerifierConfig
from shared.config.environment import EnvironmentConfig

SOURCE = '''
import os, shutil

def leave():
    """How many files are here and at home; then leaves more."""
    found = len(os.listdir()), len(os.listdir(os.environ["HOME"]))
    open("left", "w").close()
    os.symlink(os.environ["HOME"], "link")
    os.makedirs("folder/inside")
    open(os.path.join(os.environ["HOME"], str(found[1])), "w").close()
    return found

class Env:
    def reset(self, **columns):
        return str(leave())

    def look(self) -> str:
        """Lists the files."""
        return " ".join(sorted(os.listdir()))

    def remove(self) -> str:
        """Removes the folder."""
        shutil.rmtree(os.getcwd())
        return "removed"

def play(base_url, api_key, **columns):
    return float(leave()[0])

def reward(completions, log_extra, **columns):
    log_extra("found", [leave()])
    return [1.0]
'''


def written(folder: Path) -> Path:
    (folder / "file.py").write_text(SOURCE)
    return folder / "file.py"


def test_an_episode_begins_in_an_empty_folder(tmp_path: Path) -> None:
    config = EnvironmentConfig(function=f"{written(tmp_path)}:Env")
    look, remove = (Use(calls=[ToolCall(name=name, arguments={})]) for name in ("look", "remove"))
    with closing(EnvironmentPool(config)) as pool:
        for number in range(1, 4):
            assert pool.ask({0: Reset(columns={})}, lambda: None) == {0: Opened(text=f"(0, {number})")}
            assert pool.ask({0: look}, lambda: None) == {0: Answered(texts=["folder left link"])}
        assert pool.ask({0: remove}, lambda: None) == {0: Answered(texts=["removed"])}
        assert pool.ask({0: look}, lambda: None) == {0: Answered(texts=[""])}


def test_an_agent_begins_in_an_empty_folder(tmp_path: Path) -> None:
    config = EnvironmentConfig(kind="agent", function=f"{written(tmp_path)}:play")
    with closing(EnvironmentPool(config)) as pool:
        for _ in range(2):
            assert pool.ask({0: Act(columns={}, scores=True)}, lambda: None) == {0: Acted(value=0.0)}


def test_a_call_of_a_function_begins_in_an_empty_folder(tmp_path: Path) -> None:
    job = ScoreJob(prompt="", completion="", completion_ids=[], truncated=False, columns={})
    with closing(ScorePool(VerifierConfig(kind="callable", function=f"{written(tmp_path)}:reward"))) as pool:
        for number in range(1, 4):
            (found,) = pool.score([job], lambda: None)
            assert found.extras == {"found": f"(0, {number})"}
