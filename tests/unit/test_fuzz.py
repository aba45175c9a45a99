"""Damaged inputs, a few of the many that benchmarks/fuzz.py tries: only typed errors, no hang, memory bounded."""

from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz import Fuzzer
from benchmarks.fuzz_dispatcher import converse
from benchmarks.fuzz_targets import Target, targets
from benchmarks.mutate import mutate_bytes, mutate_tree
from learner.orders.order_check import OrderCheck
from protocol.messages import FilledOrder, Order, Policy


@pytest.mark.parametrize("inputs", [3_000, pytest.param(12_000, marks=pytest.mark.long)])
def test_no_mutated_input_does_more_than_be_refused(tmp_path: Path, inputs: int) -> None:
    fuzzer = Fuzzer(20, tmp_path)
    fuzzer.run(0, inputs)
    assert fuzzer.findings == []
    for name, record in fuzzer.records.items():
        assert record.inputs > inputs / 120, name
        assert 0 < record.peak_of_bound < 1
    refused = {name: record.refused / record.inputs for name, record in fuzzer.records.items()}
    assert 0.5 < refused["message"] < 1.0, "most inputs are wrong, and some get through the first gate"


FOUND = [
    ("json", b'{"run": {"\xc6": 1}}'),
    ("json", b"[" * 100_000),
    ("toml", b"a = " + b"[" * 5000),
    ("override", b"run.steps=" + b"[" * 5000),
    ("manifest", b'{"step": "\xdd"}'),
    ("summary", b'{"status": "\xdd"}'),
    ("metrics", b"[1]"),
    ("metrics", b'{"reward/mean": "x"}'),
    ("metrics", b"[" * 100_000),
    ("key", b"[" * 4000),
    ("adapter", b"noise"),
]
"""What it found, when it was new."""


@pytest.mark.parametrize(("name", "data"), FOUND, ids=range(len(FOUND)))
def test_what_was_found_once(tmp_path: Path, name: str, data: bytes) -> None:
    fuzzer = Fuzzer(0, tmp_path)
    (target,) = (target for target in fuzzer.targets if target.name == name)
    assert fuzzer.fault(target, data, fuzzer.records[name]) == ""


def test_every_seed_is_good(tmp_path: Path) -> None:
    for target in targets(tmp_path):
        for seed in target.seeds:
            target.run(seed)
            if target.split and target.join:
                target.run(target.join(target.split(seed), Random(3)))


def test_an_input_depends_on_its_seed_and_number_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = Fuzzer(5, tmp_path / "a"), Fuzzer(5, tmp_path / "b")
    one.run(0, 50)
    for index in (0, 17, 49):
        (left, data), (right, again) = one.input(index), other.input(index)
        if left.name not in ("key", "allowed", "invited"):  # their seeds are new keys each time
            assert (left.name, data) == (right.name, again)
    assert Fuzzer(6, fresh(tmp_path)).input(0)[1] != one.input(0)[1]


def fresh(folder: Path) -> Path:
    (folder / "c").mkdir()
    return folder / "c"


class Lenient(OrderCheck):
    """Takes everything."""

    def fault(self, order: Order, policy: Policy, filled: FilledOrder) -> str:
        return ""


def test_a_dispatcher_that_takes_nonsense_is_found(tmp_path: Path) -> None:
    """It was so once."""
    with pytest.raises(AssertionError, match=r"recorded though wrong|another order"):
        for number in range(200):
            converse(b"%d" % number, check=Lenient(vocabulary=2**31, rewards=frozenset(), built_in=True))


def spin() -> None:
    """For ever."""
    while True:
        pass


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda data: data[10**6], "IndexError"),
        (lambda data: [bytearray(500) for _ in range(5000)], "used"),
        (lambda data: spin(), "Hang"),
    ],
    ids=["exception", "memory", "hang"],
)
def test_a_reader_that_misbehaves_is_found(tmp_path: Path, fault: object, words: str) -> None:
    fuzzer = Fuzzer(1, tmp_path, hang_s=0.2)
    bad = Target(name="message", seeds=(b"seed",), run=fault, allowed=(ValueError,))  # type: ignore[arg-type]
    fuzzer.targets, fuzzer.weights = (bad,), [1]
    fuzzer.run(0, 3)
    assert len(fuzzer.findings) == 3
    assert all(words in finding.what for finding in fuzzer.findings)


def test_mutations_change_something_and_repeat() -> None:
    assert sum(mutate_bytes(b"some bytes", Random(seed)) != b"some bytes" for seed in range(100)) > 90
    trees = [mutate_tree({"a": [1, 2], "b": {"c": "x"}}, Random(seed)) for seed in range(200)]
    assert [str(mutate_tree({"a": [1, 2], "b": {"c": "x"}}, Random(seed))) for seed in range(200)] == list(
        map(str, trees)
    )
    assert sum(tree != {"a": [1, 2], "b": {"c": "x"}} for tree in trees) > 180
