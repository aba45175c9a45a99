"""`watch`: the answers of a run in a terminal, with keys, while it grows."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from launch.display.terminal.command import watch
from launch.display.terminal.group_text import COLOURS, ORDERS, group_row, group_text, ordered
from shared.config.load import config_to_json
from shared.config.tree import Config
from shared.errors import UserError
from shared.run import Run
from shared.run.run_dir import RunDir
from tests.support.rollouts import rollout_group, write_groups

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "[red]no[/red] \x1b[2J markup"
EARLY = rollout_group(1, ["it is 4", HOSTILE], rewards=[1.0, 0.0])
FLAT = rollout_group(2, ["no no no no", "no"], rewards=[0.0, 0.0])
MIXED = rollout_group(2, ["seven", "eight"], slot=1, rewards=[1.0, 0.0])
installed = pytest.mark.skipif(importlib.util.find_spec("textual") is None, reason="textual is not installed")


@pytest.fixture
def made(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)
    write_groups(run.rollouts, [EARLY, FLAT, MIXED])
    return run


def test_an_answer_is_coloured_and_never_read_as_markup() -> None:
    text = group_text(EARLY, 1, "advantage")
    assert "[red]no[/red] \\x1b[2J markup" in text.plain and "\x1b" not in text.plain
    assert "answer 2 of 2: wrong, reward 0, advantage -0.5" in text.plain and "gold answer: 42" in text.plain
    assert {span.style for span in text.spans} >= {COLOURS["advantage"]["a1"]}
    assert {span.style for span in group_text(EARLY, 0, "entropy").spans} >= {COLOURS["entropy"]["e2"]}


def test_groups_are_ordered_as_asked() -> None:
    heads = {0: FLAT, 1: MIXED}
    found = {name: ordered(heads, name) for name in ORDERS}
    assert found["as sampled"] == [0, 1] and found["those that differ most"] == [1, 0]
    assert found["those that taught nothing"] == [0, 1] and found["the longest"] == [0, 1]
    assert found["the best paid"] == [1, 0]
    assert group_row(1, MIXED) == ("1", "trained", "0.50", "0.50", "1", "correct 1 wrong 1")


def test_without_textual_a_sentence_says_so(made: RunDir) -> None:
    if importlib.util.find_spec("textual") is not None:
        pytest.skip("textual is installed")
    with pytest.raises(UserError, match=r"`watch` needs textual.*\[watch\]"):
        watch(directory=made.path)


@installed
def test_without_a_terminal_nothing_is_drawn(made: RunDir) -> None:
    words = [sys.executable, "-m", "launch", "watch", str(made.path)]
    done = subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: `watch` needs a terminal, and got a file or a pipe; use `show`, which prints text.\n"


def driven(made: RunDir, script: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
    """Run the application without a terminal. script: gets it and its pilot."""

    from launch.display.terminal.app import Watcher

    async def drive() -> None:
        app: Any = Watcher(Run(made.path))
        async with app.run_test(size=(140, 40)) as pilot:
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(drive())


@installed
def test_a_look_after_the_widgets_have_gone_is_none(made: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        await app.query("*").remove()
        app.look()

    driven(made, script)


@installed
def test_keys_go_through_steps_groups_and_answers(made: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        assert (app.step, app.number, app.sample) == (2, 0, 0) and app.follows
        await pilot.press("down")
        await pilot.pause()
        assert (app.number, app.sample) == (1, 0)
        await pilot.press("l")
        assert app.sample == 1
        await pilot.press("l")
        assert app.sample == 0
        await pilot.press("k")
        await pilot.pause()
        assert (app.step, app.number, app.follows) == (1, 0, False)
        await pilot.press("k", "j", "j", "j")
        assert app.step == 2 and app.follows
        await pilot.press("c")
        assert app.colours[0] == "advantage"
        await pilot.press("o")
        await pilot.pause()
        assert app.orders[0] == "those that differ most" and app.number == 0

    driven(made, script)


@installed
def test_new_steps_are_followed_and_a_search_leaves_them(made: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        write_groups(made.rollouts, [rollout_group(3, ["newest"])])
        app.look()
        assert app.step == 3
        await pilot.press("slash", *"4", "enter")
        await pilot.pause()
        assert (app.step, app.number, app.sample, app.follows) == (1, 0, 0, False)
        write_groups(made.rollouts, [rollout_group(4, ["later"])])
        app.look()
        assert app.step == 1

    driven(made, script)


@installed
def test_a_key_does_not_judge_the_run_again(made: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        before = app.verdicts.found
        await pilot.press("c", "j", "down")
        await pilot.pause()
        assert before and app.verdicts.found is before

    driven(made, script)


@installed
def test_an_answer_that_was_found_stays_chosen(made: RunDir) -> None:
    async def script(app: Any, pilot: Any) -> None:
        await pilot.press("slash", *"eight", "enter")
        await pilot.pause()
        assert (app.step, app.number, app.sample) == (2, 1, 1)
        await pilot.press("o")
        await pilot.pause()
        assert (app.step, app.number, app.sample) == (2, 1, 1)

    driven(made, script)


@installed
def test_a_group_that_cannot_be_read_is_passed_over(made: RunDir) -> None:
    lines = made.rollouts.read_bytes().splitlines(keepends=True)
    # The first group of step 2; its beginning is whole.
    lines[1] = lines[1][:150] + b"\x00" * (len(lines[1]) - 151) + b"\n"
    made.rollouts.write_bytes(b"".join(lines))

    async def script(app: Any, pilot: Any) -> None:
        assert (app.step, app.number, app.sample) == (2, 1, 0)

    driven(made, script)


@installed
def test_a_run_without_groups_waits_for_them(tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "run", config_to_json(Config()), min_free_bytes=0)

    async def script(app: Any, pilot: Any) -> None:
        await pilot.press("j", "l", "c", "o", "k")
        assert app.step == 0
        write_groups(made.rollouts, [EARLY])
        app.look()
        assert app.step == 1

    driven(made, script)
