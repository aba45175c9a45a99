"""Under which name an evaluation is kept: one of other tasks, draws or caps is never replaced."""

from pathlib import Path

from msgspec import structs

from shared.run.evaluation import Evaluation, label_for, write_evaluation
from tests.support.fakes import toy_evaluation


def of(tasks: int, draws: int = 1, long_cap: int = 0, label: str = "base") -> Evaluation:
    found = toy_evaluation([True] * tasks, label=label)
    long = structs.replace(found.greedy, cap=long_cap) if long_cap else None
    return structs.replace(found, sampled=structs.replace(found.sampled, draws=draws), long_greedy=long)


def test_the_same_evaluation_again_replaces_the_former(tmp_path: Path) -> None:
    assert label_for(tmp_path, of(256, 4), as_the_run=True) == "base"
    write_evaluation(tmp_path, of(256, 4))
    assert (
        label_for(tmp_path, structs.replace(of(256, 4), adapter_sha256="of another start"), as_the_run=True) == "base"
    )


def test_one_of_other_tasks_draws_or_caps_gets_a_label_of_its_own(tmp_path: Path) -> None:
    write_evaluation(tmp_path, of(256, 4))
    assert label_for(tmp_path, of(4, 4), as_the_run=True) == "base-n4x4"
    assert label_for(tmp_path, of(256, 1), as_the_run=True) == "base-n256x1"
    assert label_for(tmp_path, of(256, 4, long_cap=512), as_the_run=True) == "base-n256x4-cap512"
    write_evaluation(tmp_path, of(256, 4, label="step-000040-test"))
    assert label_for(tmp_path, of(5, 8, label="step-000040-test"), as_the_run=True) == "step-000040-test-n5x8"


def test_other_tasks_of_the_same_number_are_counted(tmp_path: Path) -> None:
    write_evaluation(tmp_path, of(256))
    write_evaluation(tmp_path, of(4, label="base-n4x1"))
    others = structs.replace(of(4), tasks_sha256="others")
    assert label_for(tmp_path, of(4), as_the_run=True) == "base-n4x1"
    assert label_for(tmp_path, others, as_the_run=True) == "base-n4x1-2"


def test_one_that_the_run_would_not_make_leaves_its_label_free(tmp_path: Path) -> None:
    """The run makes an evaluation under this label later, or would take what it finds there for its own."""
    found = of(256, 64, label="step-000040")
    assert label_for(tmp_path, found, as_the_run=False) == "step-000040-n256x64"
    write_evaluation(tmp_path, structs.replace(found, label="step-000040-n256x64"))
    assert label_for(tmp_path, found, as_the_run=False) == "step-000040-n256x64", "made again"
    assert label_for(tmp_path, found, as_the_run=True) == "step-000040"
