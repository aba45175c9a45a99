"""The suite of a card: its runner on sections of our own, and what it makes of a run."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu.measured import Note, Peaks, Place
from benchmarks.gpu.others import for_transformers, trl_words
from benchmarks.gpu.runs import of_steps, phases
from benchmarks.gpu.sections import SECTIONS, Section, function_of, run
from benchmarks.gpu.shapes import QWEN_3B, R1, Size, config_of, keys_of, order_of, question, write_config
from benchmarks.gpu_suite import Suite, chosen, in_group
from launch.presets.load import load_config
from shared.base.cache import cached_base
from shared.model.prompt import load_prompter
from tests.support.fakes import CPU

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_FILES = 8
"""That a borrowed machine gives back."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(work=tmp_path_factory.mktemp("work"), device=CPU, small=True)


def section(name: str, part: Any = "A", limit_s: int = 30) -> Section:
    return Section(name=name, part=part, limit_s=limit_s, function=f"{name}.{name}")


def suite(tmp_path: Path, budget_s: float = 60.0) -> Suite:
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    return Suite(work=work, out=out, dry=False, ends_at=time.monotonic() + budget_s)


def scripted(monkey: dict[str, str]) -> Any:
    """Commands that stand in for sections: Python that knows its result file as `out`."""

    def command(names: list[str], work: Path, *, dry: bool) -> list[str]:
        (name,) = names
        code = f"import json, os, sys, time; from pathlib import Path; out = Path({str(work / name)!r} + '.json')\n"
        return [sys.executable, "-c", code + monkey[name]]

    return command


WHOLE = "out.write_text(json.dumps({'figure': 7, 'seconds': 0.1})); print('hello')"
CRASHED = "out.write_text(json.dumps({'figure': 8})); os.abort()"
REFUSED = "out.write_text(json.dumps({'error': 'Traceback\\nOops: no', 'seconds': 0.1})); sys.exit(1)"
ENDLESS = "out.write_text(json.dumps({'figure': 9})); os.fork(); time.sleep(600)"


def test_a_section_that_fails_loses_itself_alone(tmp_path: Path) -> None:
    found = suite(tmp_path)
    found.command = scripted({"one": CRASHED, "two": REFUSED, "three": WHOLE})
    found.run([section("one"), section("two"), section("three")])
    summary = json.loads((found.out / "summary.json").read_bytes())
    assert list(summary) == ["one", "two", "three"]
    assert summary["one"] == {"figure": 8, "error": "ended with -6"}
    assert summary["two"]["error"].endswith("Oops: no")
    assert summary["three"] == {"figure": 7, "seconds": 0.1}
    lines = (found.out / "table.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["one", "two", "three"]
    assert lines[1].endswith("Oops: no") and lines[2].endswith("done")
    assert "hello" in (found.out / "log").read_text()
    assert len(list(found.out.iterdir())) <= MOST_FILES


def test_at_its_limit_a_section_is_killed_with_what_it_started(tmp_path: Path) -> None:
    found = suite(tmp_path)
    found.command = scripted({"endless": ENDLESS, "after": WHOLE})
    began = time.monotonic()
    found.run([section("endless", limit_s=2), section("after")])
    assert time.monotonic() - began < 30
    assert found.found["endless"] == {"figure": 9, "error": "killed after 2 s"}
    assert "error" not in found.found["after"]
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or ())]
    assert left == []


def test_sections_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    found = suite(tmp_path, budget_s=gpu_suite.LEAST_S - 1)
    found.command = scripted({"one": WHOLE})
    found.run([section("one")])
    assert found.found == {"one": {"error": "not started: no time was left"}}


def test_a_command_that_ignores_a_request_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with (tmp_path / "log").open("wb") as log:
        assert in_group([sys.executable, "-c", code], {}, 0.5, log.fileno()) == -9


def test_parts_begin_with_what_matters() -> None:
    assert [one.name for one in SECTIONS if one.part == "A"][:2] == ["facts", "tests"]
    assert [one.name for one in SECTIONS if one.part == "B"][:3] == ["learner_phases", "actor_phases", "step_graph"]
    assert {one.name for one in SECTIONS if one.free_gib} >= {"step_graph", "step_eager", "step_3b", "learner_phases"}
    assert all(callable(function_of(one)) for one in SECTIONS)


def test_sections_are_chosen_by_part_and_name() -> None:
    assert {one.part for one in chosen("B", None)} == {"B"}
    assert [one.name for one in chosen(None, ["trl", "facts"])] == ["facts", "trl"]
    with pytest.raises(SystemExit, match="there is no section 'trl'"):
        chosen("A", ["trl"])


def test_a_section_keeps_what_it_noted_before_it_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Section(name="x", part="A", limit_s=1, function="nowhere.x"), tmp_path, "cpu", small=True) == 1
    noted = json.loads((tmp_path / "x.json").read_bytes())
    assert "No module named 'benchmarks.gpu.nowhere'" in noted["error"] and noted["seconds"] >= 0
    note = Note(tmp_path / "y.json")
    note(first=1)
    note(second={"a": 2}, first=3)
    assert json.loads((tmp_path / "y.json").read_bytes()) == {"first": 3, "second": {"a": 2}}


def test_peaks_have_a_phase_of_every_name() -> None:
    peaks = Peaks(torch.device("cpu"))
    peaks("loaded")
    peaks("decoding")
    peaks.add("decoding", "allocated", 3 * 2**20)
    peaks.add("decoding", "allocated", 2**20)
    assert peaks.phases == {"loaded": {}, "decoding": {"allocated": 3.0}}


@pytest.mark.parametrize("tokens", [16, 40, 128])
def test_prompts_have_exactly_the_tokens_that_were_asked_for(place: Place, tokens: int) -> None:
    size = Size(model="tiny", prompts=3, group=2, prompt=tokens, tokens=4)
    prompter = load_prompter(cached_base(config_of(keys_of(place, size)).model).folder)
    groups = order_of(prompter, size)
    assert [len(group.prompt_ids) for group in groups] == [tokens] * 3
    assert len({group.prompt_ids.tobytes() for group in groups}) == 3
    assert question(prompter, tokens, 0) != question(prompter, tokens, 1)


def test_a_file_says_what_the_keys_say(place: Place, tmp_path: Path) -> None:
    keys = keys_of(place, R1.at(place), steps=3, actor__graphs="never")
    assert load_config(str(write_config(keys, tmp_path / "run.toml"))) == config_of(keys)
    assert keys["actor.graphs"] == "never" and keys["compute.dtype"] == "bf16"
    assert (R1.group, R1.prompt, R1.tokens) == (8, 128, 512) and (QWEN_3B.group, QWEN_3B.tokens) == (8, 200)


def test_trl_gets_our_sizes_and_the_type_to_compute_in(place: Place, tmp_path: Path) -> None:
    words = trl_words(place, R1.at(place), tmp_path / "rows.json")
    given = dict(zip(words[3::2], words[4::2], strict=True))
    ours = config_of(keys_of(place, R1.at(place)))
    assert (given["--group"], given["--tokens"], given["--rank"]) == ("2", "6", str(ours.lora.rank))
    assert (given["--device"], given["--dtype"], given["--tasks"]) == ("cpu", "bf16", ours.tasks.source)
    config = json.loads((Path(given["--model"]) / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_compute_dtype"] == "bfloat16"
    base = cached_base(ours.model).folder
    assert for_transformers(base, Path(given["--model"])) == Path(given["--model"]), "a second call is no error"


def test_the_first_step_does_not_count() -> None:
    rows = [
        {"step": n, "time/step_s": s, "time/update_s": 1.0, "mem/actor_allocated": None, "reward/mean": 1.0}
        for n, s in enumerate((9.0, 2.0, 4.0, 3.0))
    ]
    found = of_steps(rows)
    assert found == {"number": 3, "step_s": [9.0, 2.0, 4.0, 3.0], "time/step_s": 3.0, "time/update_s": 1.0}
    assert of_steps(rows[:1])["time/step_s"] == 9.0
    assert of_steps([]) == {"number": 0, "step_s": []}


def event(kind: str, name: str, pid: int, seconds: float) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": pid, "ts": seconds * 1e6}


def test_phases_are_added_up_for_each_process() -> None:
    events = [
        {**event("M", "process_name", 1, 0), "args": {"name": "learner"}},
        {**event("M", "process_name", 2, 0), "args": {"name": "actor0"}},
        *(event("B", "turn", 1, 1), event("B", "passes", 1, 2), event("B", "decode", 2, 2.5)),
        *(event("E", "passes", 1, 4), event("E", "decode", 2, 5), event("E", "turn", 1, 6)),
        *(event("B", "turn", 1, 7), event("E", "turn", 1, 8), event("B", "turn", 1, 9)),
    ]
    assert phases(events) == {
        "learner: passes": {"number": 1, "median_s": 2.0, "sum_s": 2.0},
        "actor0: decode": {"number": 1, "median_s": 2.5, "sum_s": 2.5},
        "learner: turn": {"number": 2, "median_s": 3.0, "sum_s": 6.0},
    }
