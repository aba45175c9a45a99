"""The benchmark of the data sets' own solutions, on a few rows."""

from benchmarks.gold_answers import differently, figures

GOLDS = [str(n % 7) for n in range(200)]


def test_nobody_gets_an_answer_written_like_its_own_and_none_is_lost() -> None:
    shuffled = differently(GOLDS)
    assert all(own != other for own, other in zip(GOLDS, shuffled, strict=True))
    assert sorted(shuffled) == sorted(GOLDS)
    assert differently(GOLDS) == shuffled


def test_what_is_not_correct_is_listed_with_its_reason() -> None:
    rows = [("#### 1", "1"), ("The answer is 2", "2"), ("#### 3 or 4", "3"), ("none", "4"), ("#### 4", "4")]
    found = figures(rows, "gsm8k")
    assert (found["lenient"]["own_correct"], found["strict"]["own_correct"]) == (0.6, 0.4)
    rest = found["lenient"]["rest"]
    assert [(case["gold"], case["outcome"]) for case in rest] == [("3", "wrong"), ("4", "unparsable")]
    assert "2 different numbers" in rest[0]["note"]
    assert found["lenient"]["shuffled_correct"] == 0.0
