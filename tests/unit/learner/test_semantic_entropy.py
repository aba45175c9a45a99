"""Entropies, the stages they make, and a cache that is refused for anything it was not measured with."""

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from learner.curriculum.semantic_entropy import (
    Part,
    PartOf,
    SemanticEntropies,
    TaskMeanings,
    cache_file,
    entropy_stages,
    measured_with,
    part_of,
    read_entropies,
    remove_part,
)
from learner.tasks.tasks import Task, digest_of_tasks
from shared.config.data import CurriculumConfig, VerifierConfig
from shared.config.model import ModelConfig
from shared.config.tree import Config, RolloutConfig
from shared.errors import DataError
from tests.reference import semantic_entropy
from tests.support.fakes import toy_tasks

TASKS = toy_tasks(3)
CONFIG = Config(curriculum=CurriculumConfig(kind="sent", samples=4))


def wanted(config: Config = CONFIG, tasks: list[Task] = TASKS, base: str = "b" * 64, template: str = "t" * 64):
    return measured_with(config.rollout, config.verifier, config.curriculum.samples, tasks, base, template)


def written(folder: Path) -> Path:
    file = folder / "se.json"
    found = SemanticEntropies(measured_with=wanted(), tasks=(TaskMeanings(clusters=(2, 1, 1), right=2),) * 3)
    file.write_bytes(msgspec.json.encode(found))
    return file


@pytest.mark.parametrize("meanings", ["aaaa", "aabb", "abcd", "aaab", "aabc"])
def test_the_entropy_is_that_of_the_paper(meanings: str) -> None:
    clusters = tuple(Counter(meanings).values())
    assert TaskMeanings(clusters=clusters, right=1).entropy == pytest.approx(semantic_entropy(meanings), abs=1e-12)


def test_stages_rise_and_leave_out_what_cannot_teach() -> None:
    found = [
        TaskMeanings(clusters=(8,), right=8),
        TaskMeanings(clusters=(4, 4), right=4),
        TaskMeanings(clusters=(8,), right=0),
        TaskMeanings(clusters=(7, 1), right=7),
        TaskMeanings(clusters=(1,) * 8, right=1),
        TaskMeanings(clusters=(4, 4), right=4),
    ]
    assert entropy_stages(found, 2) == [[3, 1], [5, 4]]
    assert entropy_stages(found, 3) == [[3, 1], [5], [4]]
    with pytest.raises(DataError, match=r"Only 4 of 6 tasks are neither always nor never right.*curriculum.stages = 5"):
        entropy_stages(found, 5)


def test_a_cache_that_fits_comes_back(tmp_path: Path) -> None:
    assert len(read_entropies(written(tmp_path), wanted()).tasks) == 3


def replaced(**sections: object) -> Config:
    return msgspec.structs.replace(CONFIG, **sections)


@pytest.mark.parametrize(
    ("needed", "words"),
    [
        (wanted(base="c" * 64), "another model (bbb"),
        (wanted(template="u" * 64), "another template (ttt"),
        (
            wanted(replaced(curriculum=CurriculumConfig(samples=8))),
            "another sampling (4 completions, temperature 1, at most",
        ),
        (wanted(replaced(rollout=RolloutConfig(temperature=0.7))), "another sampling"),
        (
            wanted(replaced(rollout=RolloutConfig(max_new_tokens=9))),
            "not 4 completions, temperature 1, at most 9 tokens",
        ),
        (wanted(replaced(verifier=VerifierConfig(kind="exact"))), "another verifier (gsm8k, not exact)"),
        (wanted(replaced(verifier=VerifierConfig(strict=True))), "another verifier (gsm8k, not gsm8k, strict)"),
        (
            wanted(replaced(verifier=VerifierConfig(kind="math", rounded_digits=3))),
            "not math, decimals from 3 digits on)",
        ),
        (wanted(tasks=TASKS[::-1]), "another data ("),
        (wanted(base="c" * 64, tasks=toy_tasks(2)), "another model (bbb"),
    ],
)
def test_a_cache_of_anything_else_is_refused_in_words(tmp_path: Path, needed: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_entropies(written(tmp_path), needed)  # pyright: ignore[reportArgumentType]
    assert words in str(caught.value)
    assert "python -m launch curriculum" in str(caught.value)


def test_answers_that_are_read_otherwise_are_another_verifier() -> None:
    configs = [
        VerifierConfig(kind="math"),
        VerifierConfig(kind="math", strict=True),
        VerifierConfig(kind="math", rounded_digits=3),
        VerifierConfig(kind="math", rounded_digits=4),
    ]
    assert len({wanted(replaced(verifier=verifier)).verifier for verifier in configs}) == 4
    unused = VerifierConfig(kind="math", strict=True, rounded_digits=3)
    assert wanted(replaced(verifier=unused)) == wanted(replaced(verifier=configs[1])), (
        "the strict form has no use for it"
    )


def test_a_cache_that_is_not_there_or_none_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which is not there"):
        read_entropies(tmp_path / "absent.json", wanted())
    (tmp_path / "damaged.json").write_bytes(b'{"tasks": "\xff"}')
    with pytest.raises(DataError, match="has no semantic entropies"):
        read_entropies(tmp_path / "damaged.json", wanted())
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="has no semantic entropies"):
        read_entropies(tmp_path / "other.json", wanted())


def test_the_data_s_digest_sees_prompts_columns_and_order() -> None:
    other = [Task(prompt_ids=task.prompt_ids, columns=task.columns | {"answer": "x"}) for task in TASKS]
    digests = {digest_of_tasks(tasks) for tasks in (TASKS, TASKS[::-1], TASKS[:2], other)}
    assert len(digests) == 4


def test_where_it_is_kept() -> None:
    model = ModelConfig(path="org/Some-Model", cache_dir="/c")
    source, other = "data/train.jsonl", wanted(replaced(rollout=RolloutConfig(temperature=0.7)))
    file = cache_file(CurriculumConfig(), model, source, wanted())
    assert file.parent == Path("/c/curricula")
    assert re.fullmatch(r"Some-Model-train\.jsonl-[0-9a-f]{12}\.json", file.name)
    assert file == cache_file(CurriculumConfig(), model, source, wanted())
    assert file != cache_file(CurriculumConfig(), model, source, other), "neither replaces the other"
    assert cache_file(CurriculumConfig(cache="mine.json"), model, source, wanted()) == Path("mine.json")


MEASURED = [[TaskMeanings(clusters=(3, 1), right=1)] * 2, [TaskMeanings(clusters=(4,), right=4)]]
WHAT = PartOf(measured_with=wanted(), batch=2)


def measured(cache: Path, what: PartOf = WHAT) -> tuple[int, bytes]:
    """How many tasks are there already, and the cache after the rest has been measured."""
    part = Part(cache, what)
    known = len(part.tasks)
    for batch in MEASURED if known == 0 else MEASURED[1:] if known == 2 else []:
        part.add(batch)
    part.finish()
    part.close()
    return known, cache.read_bytes()


def test_a_measurement_that_ends_anywhere_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "se.json"
    assert measured(cache)[0] == 0
    data, expected = part_of(cache).read_bytes(), cache.read_bytes()
    lines = data.splitlines(keepends=True)
    ends = [len(b"".join(lines[:count])) for count in (2, 3)]
    for size in range(len(data) + 1):
        for torn in (data[:size], data[:size] + bytes(len(data) - size)):
            part_of(cache).write_bytes(torn)
            assert measured(cache) == (2 * (size >= ends[0]) + (size >= ends[1]), expected)
    assert read_entropies(cache, wanted()).tasks == tuple(MEASURED[0] + MEASURED[1])
    remove_part(cache)
    remove_part(cache)
    assert not part_of(cache).exists()


def test_a_part_of_something_else_is_begun_anew(tmp_path: Path) -> None:
    cache = tmp_path / "se.json"
    measured(cache)
    assert measured(cache)[0] == 3
    assert measured(cache, PartOf(measured_with=wanted(), batch=1))[0] == 0
    assert measured(cache, PartOf(measured_with=wanted(base="c" * 64), batch=1))[0] == 0
