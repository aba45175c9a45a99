"""What `eval` shows: every figure beside its interval, n, draws and cap, the same in the terminal and as Markdown."""

import io

from msgspec import structs
from rich.console import Console

from launch.display.report import markdown, print_evaluation
from shared.run.evaluation import Evaluation, share_of
from tests.support.fakes import toy_evaluation


def report() -> Evaluation:
    found = toy_evaluation([True, True, False, True], seed=7)
    half = share_of([1.0, 0.5, 0.0, 0.5])
    drawn = structs.replace(
        found.sampled,
        draws=2,
        truncation_rate=0.125,
        pass_at={1: half, 2: share_of([1.0, 1.0, 0.0, 1.0])},
        maj_at={1: half, 2: half},
        by_level={"1": share_of([1.0, 0.5]), "2": share_of([0.0, 0.5])},
        by_subject={"algebra": half},
    )
    return structs.replace(found, sampled=drawn)


def printed(evaluation: Evaluation, width: int = 120) -> str:
    out = io.StringIO()
    print_evaluation(Console(file=out, width=width, highlight=False), evaluation)
    return out.getvalue()


def test_the_title_says_what_was_evaluated() -> None:
    for text in (printed(report()), markdown(report())):
        first = text.splitlines()[0].removeprefix("# ")
        assert first == "final: n = 4 tasks of embedded, seed 7, verifier gsm8k, adapter abababababab"


def test_brackets_in_a_title_are_text() -> None:
    title = printed(structs.replace(report(), source="data[v2].jsonl\x1b [/x]")).splitlines()[0]
    assert "4 tasks of data[v2].jsonl\\x1b [/x], seed 7" in title


def test_every_row_has_its_interval_and_n() -> None:
    lines = [line.split() for line in printed(report()).splitlines()[4:] if line.strip()]
    assert lines[0] == ["greedy", "75.0%", "[30.1%,", "95.4%]", "4", "1", "64", "100.0%", "0.0%", "20", "(31)"]
    assert lines[1][:3] == ["sampled", "at", "1"] and "12.5%" in lines[1]
    assert [line[0] for line in lines[2:]] == ["pass@2", "maj@2", "level", "level", "algebra"]
    assert [line[:3] for line in lines[4:6]] == [["level", "1", "75.0%"], ["level", "2", "25.0%"]]
    assert lines[4][-3:] == ["2", "2", "64"] and lines[6][-3:] == ["4", "2", "64"]


def test_markdown_is_one_table_of_the_same_cells() -> None:
    rows = [line for line in markdown(report()).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 7 and len({row.count("|") for row in rows}) == 1
    assert "| greedy | 75.0% | [30.1%, 95.4%] | 4 | 1 | 64 | 100.0% | 0.0% | 20 (31) |" in rows
    assert any(row.startswith("| pass@2 | 75.0% |") for row in rows)


def test_a_second_cap_has_rows_of_its_own() -> None:
    found = report()
    long = structs.replace(found.greedy, cap=512)
    text = printed(structs.replace(found, long_greedy=long))
    assert "greedy, long cap" in text and "512" in text


def test_eighty_columns_have_every_interval_n_and_cap_whole() -> None:
    found = report()
    found = structs.replace(found, long_greedy=found.greedy, long_sampled=structs.replace(found.sampled, cap=4096))
    long = structs.replace(found, sampled=structs.replace(found.sampled, by_subject={"counting & " * 9: found.greedy}))
    for evaluation in (found, long):
        text = printed(evaluation, width=80)
        lines = text.splitlines()[1:]
        assert max(map(len, lines)) <= 80 and "\u2026" not in text
        head = next(line.split() for line in lines if "accuracy" in line)
        assert head[:4] == ["accuracy", "95", "%", "n"] and "cap" in head
        assert sum("%]" in line and "[" in line for line in lines) == 14
    assert "left out, as the terminal is narrow: length" in text and "left out" not in printed(found)
    assert "4096" in printed(found, width=60)


def test_mean_rewards_have_rows_below_their_way_to_decode() -> None:
    found = report()
    found = structs.replace(found, sampled=structs.replace(found.sampled, rewards={"mean": 0.75, "right": 0.25}))
    lines = [line.split() for line in printed(found).splitlines()[4:] if line.strip()]
    assert lines[2:4] == [["reward/mean", "0.750", "4", "2", "64"], ["reward/right", "0.250", "4", "2", "64"]]
    assert "| reward/mean | 0.750 |" in markdown(found)
