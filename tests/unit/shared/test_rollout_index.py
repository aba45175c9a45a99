"""Groups are found by their place in rollouts.jsonl, which grows, is replaced, and may be damaged."""

import os
from pathlib import Path

import msgspec
import pytest

from shared.run.files import LineLog
from shared.run.rollout_index import HEAD_BYTES, LOOKED_AT, RolloutIndex
from shared.run.rollouts import RolloutGroup, line_bytes, pack_group, unpack_group, unpack_head, unpack_task
from tests.support.rollouts import rollout_group, write_groups

FIRST = rollout_group(1, ["it is 4", "it is 5"], rewards=[1.0, 0.0])
SECOND = rollout_group(1, ["no", "no"], slot=1, prompt="another", rewards=[0.0, 0.0])
THIRD = rollout_group(3, ['He said "x" \\ \n \u00e9'], rewards=[1.0])
GROUPS = [FIRST, SECOND, THIRD]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_groups(tmp_path / "rollouts.jsonl", GROUPS)
    return tmp_path / "rollouts.jsonl"


def test_a_group_is_found_by_step_and_number(file: Path) -> None:
    index = RolloutIndex(file)
    assert index.steps() == [1, 3] and len(index) == 3
    assert [index.group(1, 0), index.group(1, 1), index.group(3, 0)] == GROUPS
    assert [index.group(*place) for place in ((1, 2), (2, 0), (1, -1))] == [None] * 3
    assert {number: head.group_id for number, head in index.heads(1).items()} == {
        0: FIRST.group_id,
        1: SECOND.group_id,
    }
    assert index.groups(1) == {0: FIRST, 1: SECOND} and index.groups(2) == {}
    assert (index.find(SECOND.group_id), index.find("train/000000/0009"), index.find("x")) == ((1, 1), None, None)
    assert index.size == file.stat().st_size and index.damaged == 0


def test_a_head_has_no_texts_and_all_figures(file: Path) -> None:
    index = RolloutIndex(file)
    head, task = index.heads(1)[0], index.tasks_of(1)[0]
    for found in (head, task):
        assert not isinstance(found, RolloutGroup)
        assert all(getattr(found, name) == getattr(FIRST, name) for name in found.__struct_fields__)
    assert (head.spread, head.stale) == (0.5, 0) and (task.prompt, task.answer) == ("question", "42")


def test_a_prompt_of_any_length_is_found_without_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_groups(path, [rollout_group(1, ["a"], prompt="long " * HEAD_BYTES), SECOND])
    tasks = RolloutIndex(path).tasks_of(1)
    assert (len(tasks[0].prompt), tasks[1].prompt) == (5 * HEAD_BYTES, "another")


def test_a_prompt_that_looks_like_a_row_changes_nothing() -> None:
    tricky = rollout_group(2, ["a"], prompt='","prompt":"{"bytes": 3,"step":9,"samples":[\n\r\x0b\x85\u2028\u2029')
    line = pack_group(tricky)
    assert len(line.decode().splitlines()) == 1 and line_bytes(line) == len(line)
    assert unpack_group(line) == tricky
    head, task = unpack_head(line), unpack_task(line)
    assert head and task and (head.group_id, task.prompt) == (tricky.group_id, tricky.prompt)


def test_the_history_of_a_task_goes_over_all_steps(file: Path) -> None:
    index = RolloutIndex(file)
    assert [(head.step, number) for number, head in index.history(FIRST.task)] == [(1, 0), (3, 0)]
    assert [(head.group_id, number) for number, head in index.history(SECOND.task)] == [(SECOND.group_id, 1)]
    assert [head.step for _, head in index.history(FIRST.task, most=1)] == [3]
    assert index.history("0" * 16) == index.history("../../etc") == []


def test_lines_that_are_added_are_found_and_a_torn_one_waits(file: Path) -> None:
    index = RolloutIndex(file)
    assert len(index) == 3
    line = pack_group(rollout_group(4, ["late"]))
    with file.open("ab") as growing:
        growing.write(line[:100])
        growing.flush()
        assert index.steps() == [1, 3]
        growing.write(line[100:])
        growing.flush()
        assert index.steps() == [1, 3, 4]
    assert index.damaged == 0


def test_rows_that_a_resumed_run_dropped_are_gone(file: Path) -> None:
    index = RolloutIndex(file)
    assert index.steps() == [1, 3]
    log = LineLog(file)
    log.truncate_from(2)
    assert index.steps() == [1] and index.group(3, 0) is None
    log.append_line(pack_group(rollout_group(2, ["again"])))
    assert index.steps() == [1, 2]
    file.unlink()
    assert index.steps() == [] and index.size == 0 and index.group(1, 0) is None


def test_the_lines_before_a_step_end_where_its_first_one_begins(tmp_path: Path) -> None:
    """Without reading more than the beginning of a line. Damage between them stays, damage at the end does not."""
    path, zeros = tmp_path / "rollouts.jsonl", b"\0" * 700 + b"\n"
    first, second, third = pack_group(FIRST), pack_group(SECOND), pack_group(THIRD)
    path.write_bytes(zeros + first + zeros + second + zeros + third + zeros)
    ends = [RolloutIndex(path).end_before(step) for step in range(1, 5)]
    after_second = len(zeros + first + zeros + second)
    assert ends == [0, after_second, after_second, len(zeros + first + zeros + second + zeros + third)]
    path.write_bytes(first.replace(b"prompt", b"pr\0mpt"))
    assert RolloutIndex(path).end_before(2) == len(first)
    assert RolloutIndex(tmp_path / "none").end_before(2) == 0


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 700 + b"\n",
        b"\xff\xfe no JSON\n",
        b"\n",
        b'{"bytes":         5,"step":7,"group_id":"x","task":"0123456789abcdef","prompt":"cut\n',
        b'{"bytes":9999999999,"step":7,"group_id":"x","task":"0123456789abcdef","prompt":"never ends\n',
        b'{"step":7,"group_id":"of another release","samples":[]}\n',
    ],
    ids=["zeros", "garbage", "empty", "too short", "too long", "other row"],
)
def test_a_damaged_line_is_skipped_and_counted(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(pack_group(FIRST) + damage + pack_group(SECOND) + damage + pack_group(THIRD))
    index = RolloutIndex(path)
    assert [index.group(1, 0), index.group(1, 1), index.group(3, 0)] == GROUPS
    assert index.damaged == 2 and len(index) == 3


def test_bytes_that_changed_within_a_line_are_noticed_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    line = bytearray(pack_group(SECOND))
    line[line.index(b'"samples"') + 12] = 0
    path.write_bytes(pack_group(FIRST) + bytes(line) + pack_group(THIRD))
    index = RolloutIndex(path)
    assert index.damaged == 0 and index.group(1, 1) is None and index.group(3, 0) == THIRD
    assert index.group(1, 1) is None and index.damaged == 1
    assert index.groups(1) == {0: FIRST}


def test_a_group_that_cannot_be_read_keeps_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    line = bytearray(pack_group(FIRST))
    line[line.index(b'"version"') + 2] = 0
    again = rollout_group(1, ["it is 6"], slot=2)
    path.write_bytes(bytes(line) + pack_group(SECOND) + pack_group(again))
    index = RolloutIndex(path)
    assert {number: head.group_id for number, head in index.heads(1).items()} == {1: SECOND.group_id, 2: again.group_id}
    assert index.find(again.group_id) == (1, 2)
    assert [(number, head.group_id) for number, head in index.history(again.task)] == [(2, again.group_id)]
    assert [found.number for found in index.search("it is 6")] == [2]


def test_a_search_finds_texts_of_any_case_one_after_another(file: Path) -> None:
    index = RolloutIndex(file)
    found = [(one.step, one.number, one.sample) for one in index.search("IT IS")]
    assert found == [(1, 0, 0), (1, 0, 1)]
    assert [(one.step, one.sample) for one in index.search("question")] == [(1, None), (3, None)]
    assert [one.text for one in index.search('"X" \\ \n \u00c9')] == ['He said "x" \\ \n \u00e9']
    assert list(index.search("it is", first=2)) == list(index.search("it is", last=0)) == []
    assert list(index.search(".*")) == []
    assert [one.step for one in index.search("IT IS", first=1, last=1)] == [1, 1]


def test_a_look_reads_little_of_a_large_file(tmp_path: Path) -> None:
    """What is between the beginnings of the lines is a hole here, so that reading it would give zeros."""
    path, size = tmp_path / "rollouts.jsonl", 50 * 2**20
    line = pack_group(FIRST)
    start = line[: line.index(b',"prompt"')]
    with path.open("wb") as file:
        for number in range(20):
            file.seek(number * size)
            file.write(start.replace(b"%10d" % len(line), b"%10d" % size))
            file.seek((number + 1) * size - 1)
            file.write(b"\n")
    before = os.times()
    index = RolloutIndex(path)
    assert len(index) == 20 and index.damaged == 0
    assert os.times().user - before.user < 5 and len(start) < LOOKED_AT


def test_old_groups_are_decoded_without_what_came_later(file: Path) -> None:
    row = msgspec.json.decode(file.read_bytes().splitlines()[0])
    assert unpack_group(msgspec.json.encode(row | {"later": 1})) == FIRST
    assert unpack_group(msgspec.json.encode({key: row[key] for key in ("step", "group_id")})) is None
