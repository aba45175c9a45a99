"""Duplicates and leaks: what is found, what is not, and in which time."""

import time
import tracemalloc

import pytest

from learner.tasks.overlap import find_overlap, gram_index, largest_share, words

LONG = "A farmer has 12 brown hens and 7 white hens and sells 5 of them at the market on Friday. How many are left?"


def rows(*questions: str, answer: str = "1") -> list[dict[str, str]]:
    return [{"question": question, "answer": answer} for question in questions]


def test_the_same_words_are_a_duplicate_with_anything_between_them() -> None:
    found = find_overlap(rows("How many?", "how  MANY", "How many more?", "How-many!"), [])
    assert (found.duplicates, found.conflicts) == ((1, 3), ())


def test_duplicates_with_another_answer_are_conflicts() -> None:
    train = rows("a b") + rows("a b", answer="2") + rows("a b")
    found = find_overlap(train, [])
    assert (found.duplicates, found.conflicts) == ((1, 2), (1,))


def test_what_is_held_out_and_trained_on_is_found_word_by_word_and_nearly() -> None:
    nearly = LONG.replace("Friday", "Sunday") + " " + "And that is all there is to say about this farmer, really."
    trained = LONG + " And that is all there is to say about this farmer, really."
    found = find_overlap(rows(trained, "x"), rows("other", trained.upper(), nearly))
    assert (found.leaked, found.near) == ((1,), ())
    assert largest_share(words(nearly), gram_index([words(trained)])) == pytest.approx(21 / 29)
    at_the_end = trained.removesuffix("really.") + "truly."
    assert find_overlap(rows(trained), rows(at_the_end)).near == (0,)


def test_other_numbers_make_another_question() -> None:
    other = LONG.replace("12", "31").replace("7", "9")
    found = find_overlap(rows(LONG), rows(other))
    assert (found.leaked, found.near) == ((), ())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 5 + 3?", "What is 5 * 3?"),
        ("5+3", "5-3"),
        ("5 - 3", "5, 3"),
        ("y = -x", "y = x"),
        ("2 - (a + b)", "2 (a + b)"),
        ("2^3", "2/3"),
        ("a < b", "a > b"),
        ("20 % of 50", "20 of 50"),
        ("2 - \\sin x", "2 \\sin x"),
    ],
)
def test_another_operator_makes_another_question(one: str, other: str) -> None:
    assert find_overlap(rows(one), rows(other)).leaked == ()
    longer = [f"{LONG} And {text}" for text in (one, other)]
    assert find_overlap(rows(longer[0]), rows(longer[1])).leaked == ()


@pytest.mark.parametrize(("one", "other"), [("5 \u00d7 3", "5*3"), ("8 \u00f7 2", "8 / 2"), ("5 \u2212 3", "5-3")])
def test_an_operator_may_be_written_in_two_ways(one: str, other: str) -> None:
    assert find_overlap(rows(one), rows(other)).leaked == (0,)


def test_a_dash_in_a_sentence_is_no_operator() -> None:
    assert find_overlap(rows("A well-known man - Tom - left"), rows("A well known man, Tom, left")).leaked == (0,)
    assert find_overlap(rows("He left - a pity"), rows("He left, a pity")).leaked == (0,)


def test_bold_type_of_markdown_is_no_operator() -> None:
    assert find_overlap(rows("**What** is 5 * 3?"), rows("What is 5 * 3?")).leaked == (0,)


def test_the_index_takes_few_bytes_for_each_gram() -> None:
    texts = [words(f"{LONG} {n} {LONG}") for n in range(2000)]
    tracemalloc.start()
    index = gram_index(texts)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20 * len(index.grams) and most < 60 * len(index.grams)


def test_a_short_question_is_only_ever_found_whole() -> None:
    found = find_overlap(rows("1 plus 2", "2 plus 3"), rows("1 plus 3", "2 plus 3"))
    assert (found.leaked, found.near) == ((1,), ())


def test_pieces_of_many_questions_are_no_leak() -> None:
    halves = LONG.split(" and ")
    train = rows(*(half + " and then something else happens to him " + str(n) for n, half in enumerate(halves)))
    assert find_overlap(train, rows(LONG)).near == ()


def test_it_says_what_it_found_and_nothing_else() -> None:
    assert find_overlap(rows("a"), rows("b")).in_words() == []
    sentences = find_overlap(rows("a", "a"), rows("a")).in_words()
    assert [sentence.split(" ")[0] for sentence in sentences] == ["1", "1"]
    assert "more than once" in sentences[0] and "trained on too" in sentences[1]


def test_time_grows_with_the_words_even_if_all_questions_are_alike() -> None:
    start = time.process_time()
    find_overlap(rows(*[LONG] * 5000), rows(*(f"{LONG} {n}" for n in range(5000))))
    assert time.process_time() - start < 8.0
