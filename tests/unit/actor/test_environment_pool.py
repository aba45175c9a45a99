"""An environment may fail in any call and any way: its own episode gets the outcome, and no other is harmed."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actor.environments.contract import ToolCall, describe_in_process
from actor.environments.pool import EnvironmentPool, Lost, fault_of
from actor.environments.worker import Act, Acted, Answered, Broken, GetReward, Opened, Reset, Rewarded, Use
from actor.scoring.pipe import KillWorker
from protocol.outcome import Outcome
from shared.config.environment import EnvironmentConfig
from shared.errors import RewardError
from tests.support.runs import alive, kill, wait_until

SOURCE = '''
import os, sys, time

def fail(how):
    if how == "hang":
        time.sleep(600)
    if how == "crash":
        os.kill(os.getpid(), 11)
    if how == "exit":
        sys.exit(0)
    if how == "leave":
        os._exit(3)
    if how == "flood":
        for _ in range(100_000):
            print("flood " * 20)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "half":
        return "\\ud83d"
    if how == "raise half":
        raise ValueError("half \\ud83d")
    if how == "open":
        open("words.txt")
    if how == "unnamed signal":
        os.kill(os.getpid(), 40)
    if how == "large":
        return "x" * 100_000
    if how == "spin":
        while True:
            pass
    return how

class Env:
    def __init__(self):
        self.total = 0

    def reset(self, start="0", at="", how="", **columns):
        self.total, self.at, self.how = int(start), at, how
        if at == "reset":
            return 7 if how == "type" else fail(how)
        return None if start == "0" else f" Start at {start}."

    def add(self, number: int) -> int:
        """
        Adds a number.

        Args:
            number: What to add.
        """
        if self.at == "tool":
            return fail(self.how)
        self.total += number
        return self.total

    async def later(self) -> str:
        """Says it later."""
        return "later"

    def get_reward(self):
        if self.at == "reward":
            return "much" if self.how == "type" else fail(self.how)
        return None if self.total < 0 else float(self.total)

class Connected:
    async def reset(self, **columns):
        import asyncio

        async def echo(reader, writer):
            writer.write(await reader.readline())

        self.server = await asyncio.start_server(echo, "127.0.0.1", 0)
        address = self.server.sockets[0].getsockname()
        self.reader, self.writer = await asyncio.open_connection(*address)

    async def say(self, word: str) -> str:
        """
        Says a word over the connection.

        Args:
            word: What to say.
        """
        self.writer.write(word.encode() + b"\\n")
        return (await self.reader.readline()).decode().strip()

    async def get_reward(self):
        self.writer.close()
        await self.writer.wait_closed()
        return 1.0

class ConnectedAgent(Connected):
    async def run(self, base_url, api_key, **columns):
        await self.reset()
        await self.say("hello")

def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: What to double.
    """
    return 2 * number

class NoReset:
    def add(self):
        """Adds."""

class NoTools:
    def reset(self):
        pass

class NoDocs:
    def reset(self):
        pass
    def add(self, number):
        return number

class Prints(Env):
    def __init__(self):
        import atexit
        atexit.register(print, "bye")

class Leaves(Env):
    def __init__(self):
        os._exit(0)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("env") / "env.py"
    path.write_text(SOURCE)
    return path


def config_of(file: Path, name: str = "Env", **changes: Any) -> EnvironmentConfig:
    fields: dict[str, Any] = {"step_limit_s": 2.0} | changes
    return EnvironmentConfig(function=f"{file}:{name}", tools=(f"{file}:double",), **fields)


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[EnvironmentPool]:
    with closing(EnvironmentPool(config_of(file))) as made:
        yield made


def ask(pool: EnvironmentPool, calls: dict[int, Any]) -> dict[int, Any]:
    return pool.ask(calls, lambda: None)


def add(number: int) -> Use:
    return Use(calls=[ToolCall(name="add", arguments={"number": number})])


def test_each_rollout_has_a_state_of_its_own(pool: EnvironmentPool) -> None:
    opened = ask(pool, {seat: Reset(columns={"start": str(seat)}) for seat in range(6)})
    assert opened == {0: Opened(text="")} | {seat: Opened(text=f" Start at {seat}.") for seat in range(1, 6)}
    assert ask(pool, {1: add(10), 3: add(5)}) == {1: Answered(texts=["11"]), 3: Answered(texts=["8"])}
    assert ask(pool, {1: add(1)}) == {1: Answered(texts=["12"])}
    rewards = ask(pool, dict.fromkeys(range(6), GetReward()))
    assert [rewards[seat].value for seat in range(6)] == [0.0, 12.0, 2.0, 8.0, 4.0, 5.0]
    ask(pool, {1: Reset(columns={})})
    assert ask(pool, {1: GetReward()}) == {1: Rewarded(value=0.0)}


def test_tools_are_methods_and_functions_and_what_they_raise_is_their_answer(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={})})
    calls = [
        ToolCall(name="double", arguments={"number": 4}),
        ToolCall(name="later", arguments={}),
        ToolCall(name="add", arguments={"number": "x"}),
        ToolCall(name="add", arguments={"wrong": 1}),
        ToolCall(name="reset", arguments={}),
    ]
    texts = ask(pool, {0: Use(calls=calls)})[0].texts
    assert texts[:2] == ["8", "later"]
    assert all(text.startswith("{'error': ") for text in texts[2:]) and "Tool reset not found." in texts[4]


def test_a_connection_that_an_async_method_opened_stays_usable(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file, "Connected"))) as pool:
        ask(pool, {0: Reset(columns={})})
        said = Use(calls=[ToolCall(name="say", arguments={"word": "hello"})])
        assert ask(pool, {0: said}) == {0: Answered(texts=["hello"])}
        assert ask(pool, {0: GetReward()}) == {0: Rewarded(value=1.0)}
    config = EnvironmentConfig(kind="agent", function=f"{file}:ConnectedAgent")
    with closing(EnvironmentPool(config)) as pool:
        assert ask(pool, {0: Act(columns={}, scores=True)}) == {0: Acted(value=1.0)}


LATE = ("hang", "spin")
FINE = {"flood": ("reset", "tool")} | dict.fromkeys(("type", "raise", "large", "exit"), ("tool",))


@pytest.mark.parametrize("at", ["reset", "tool", "reward"])
@pytest.mark.parametrize("how", [*LATE, "crash", "leave", *FINE])
def test_a_fault_costs_its_own_rollout_alone(pool: EnvironmentPool, at: str, how: str) -> None:
    """Between two that go on, whose answers are those that they always give."""
    columns = [{"start": "1"}, {"at": at, "how": how}, {"start": "2"}]
    found = [ask(pool, {seat: Reset(columns=one) for seat, one in enumerate(columns)})]
    if at != "reset":
        found.append(ask(pool, dict.fromkeys(range(3), add(3))))
    if at == "reward":
        found.append(ask(pool, dict.fromkeys(range(3), GetReward())))
    for answers in found:
        assert fault_of(answers[0]) is None and fault_of(answers[2]) is None
    bad, outcome = fault_of(found[-1][1]), Outcome.TIMEOUT if how in LATE else Outcome.ERROR
    if at in FINE.get(how, ()):
        assert bad is None, bad
    else:
        assert bad is not None and bad.outcome is outcome, found[-1][1]
    if len(found) > 1:
        assert found[1][0] == Answered(texts=["4"]) and found[1][2] == Answered(texts=["5"])
    # The seat is as good as new.
    assert ask(pool, {1: Reset(columns={"start": "5"})}) == {1: Opened(text=" Start at 5.")}


def test_a_process_that_ends_between_two_turns_is_noticed(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={}), 1: Reset(columns={})})
    pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
    kill(pids)
    found = ask(pool, {0: add(1), 1: add(1)})
    assert all(isinstance(answer, Lost) and answer.outcome is Outcome.ERROR for answer in found.values())


def test_a_process_that_ended_before_an_episode_is_replaced(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={}), 1: Reset(columns={})})
    pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
    kill(pids)
    wait_until(lambda: not any(map(alive, pids)))
    assert ask(pool, {seat: Reset(columns={"start": "5"}) for seat in (0, 1)})[1] == Opened(text=" Start at 5.")


def test_a_process_whose_end_is_not_reported_yet_is_replaced(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={}), 1: Reset(columns={})})
    pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
    os.kill(pool.fork_server.pid, signal.SIGSTOP)
    kill(pids)
    wait_until(lambda: not any(map(alive, pids)))
    goes_on = threading.Timer(1.0, os.kill, (pool.fork_server.pid, signal.SIGCONT))
    goes_on.start()
    assert ask(pool, {0: Reset(columns={"start": "5"})}) == {0: Opened(text=" Start at 5.")}
    goes_on.join()


def test_a_fork_server_that_ended_before_an_episode_is_replaced(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        ask(pool, {0: Reset(columns={})})
        pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
        kill([pool.fork_server.pid])
        wait_until(lambda: not any(map(alive, pids)))
        assert ask(pool, {0: Reset(columns={})}) == {0: Opened(text="")}


def test_more_environments_than_a_socket_takes_commands(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        pool.make_ready(320, lambda: None)
        assert all(seat.is_ready for seat in pool.seats)
        pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
        # It reads no commands now, as if it were busy with the ends of others.
        os.kill(pool.fork_server.pid, signal.SIGSTOP)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 20.0, "one deadline for all"
        wait_until(lambda: not any(map(alive, pids)))


def test_a_fork_server_that_ends_while_environments_load_is_named(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        kill([pool.fork_server.pid])
        with pytest.raises(RewardError, match=r"the process that starts the environments ended while they loaded"):
            pool.make_ready(2, lambda: None)


def test_a_worker_that_cannot_start_is_said_in_one_sentence(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        (Path(pool.fork_server.scratch) / "1").mkdir()
        with pytest.raises(RewardError, match="ended while they loaded; the actor's log may say why"):
            pool.make_ready(2, lambda: None)
    said = capfd.readouterr().err
    assert "No worker can start ([Errno 17] File exists" in said and "Traceback" not in said


def test_a_fork_server_that_is_gone_is_not_waited_for_again(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        os.kill(pool.fork_server.pid, signal.SIGSTOP)
        pool.fork_server.is_gone = True
        began = time.monotonic()
        for _ in range(300):
            pool.fork_server.send(KillWorker(number=9))
        assert time.monotonic() - began < 10.0
        os.kill(pool.fork_server.pid, signal.SIGCONT)


def test_answers_that_are_too_long_are_cut(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={"at": "tool", "how": "large"})})
    (text,) = ask(pool, {0: add(1)})[0].texts
    assert text == "x" * 65_536 + "... (cut)"
    assert [len(text) for text in ask(pool, {0: Use(calls=[*add(1).calls] * 2)})[0].texts] == [32_768 + 9] * 2


def test_half_a_character_becomes_a_question_mark(pool: EnvironmentPool) -> None:
    ask(pool, {0: Reset(columns={"at": "tool", "how": "half"})})
    assert ask(pool, {0: add(1)}) == {0: Answered(texts=["?"])}
    failed = ask(pool, {0: Reset(columns={"at": "reset", "how": "raise half"})})
    assert failed == {0: Broken(note="The environment raised ValueError: half ?.")}


def test_a_relative_path_is_told_where_it_starts(pool: EnvironmentPool) -> None:
    (found,) = ask(pool, {0: Reset(columns={"at": "reset", "how": "open"})}).values()
    assert isinstance(found, Broken)
    assert found.note.endswith("'words.txt'; calls run in an empty folder, so build the paths of files from __file__.")


def test_a_signal_without_a_name_has_its_number(pool: EnvironmentPool) -> None:
    found = ask(pool, {0: Reset(columns={"at": "reset", "how": "unnamed signal"})})
    assert found == {0: Lost(outcome=Outcome.ERROR, note="The environment was ended by signal 40.")}


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_fork_server_that_is_killed_loses_what_had_begun(file: Path) -> None:
    with closing(EnvironmentPool(config_of(file))) as pool:
        ask(pool, {0: Reset(columns={"start": "3"}), 1: Reset(columns={})})
        pids = [int(entry) for entry in children_of(pool.fork_server.pid)]
        kill([pool.fork_server.pid])
        wait_until(lambda: not any(map(alive, pids)))
        found = ask(pool, {0: add(1), 1: add(1)})
        assert all(isinstance(answer, Lost) for answer in found.values())
        assert ask(pool, {0: Reset(columns={"start": "3"})}) == {0: Opened(text=" Start at 3.")}
        assert ask(pool, {0: add(1)}) == {0: Answered(texts=["4"])}


def test_tools_are_described_as_chat_templates_want_them(file: Path) -> None:
    text = describe_in_process(config_of(file), scores=True)
    assert '"name": "add"' in text and '"name": "double"' in text and "get_reward" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [("NoReset", "no method `reset`"), ("NoDocs", "needs types and a docstring"), ("Missing", "defines no such name")],
)
def test_a_class_that_is_no_environment_is_refused(file: Path, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        describe_in_process(config_of(file, name), scores=False)


def test_what_a_file_prints_when_it_ends_is_no_description(file: Path) -> None:
    assert '"name": "add"' in describe_in_process(config_of(file, "Prints"), scores=False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"function": "none.py:Env"}, "environment.function names none.py, but there is no such file"),
        ({"kind": "agent", "function": "none.py"}, "environment.function is 'none.py'; name a function"),
        ({"tools": ("none.py:f",)}, "environment.tools names none.py, but there is no such file"),
        ({"tools": ("{file}:Missing",)}, "environment.tools names Missing, but"),
        ({"function": "{file}:Leaves"}, "environment.function = .*Leaves' ended its process while it was loaded"),
        ({"tools": ("{folder}/leaves.py:f",)}, "environment.tools = .*leaves.py:f'. ended its process"),
    ],
)
def test_an_error_names_the_key_of_the_file(file: Path, config: dict[str, Any], said: str) -> None:
    (file.parent / "leaves.py").write_text("import os; os._exit(3)")
    texts = json.dumps(config).replace("{file}", str(file)).replace("{folder}", str(file.parent))
    with pytest.raises(RewardError, match=said):
        describe_in_process(EnvironmentConfig(**json.loads(texts)), scores=False)


def test_what_is_missing_is_refused(file: Path) -> None:
    with pytest.raises(RewardError, match="has no `get_reward`"):
        describe_in_process(EnvironmentConfig(tools=(f"{file}:double",)), scores=True)

    with pytest.raises(RewardError, match="has no tools"):
        describe_in_process(EnvironmentConfig(function=f"{file}:NoTools"), scores=False)
