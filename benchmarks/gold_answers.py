"""Whether the verifiers accept every solution for its own task, and for no other task.

    python -m benchmarks.gold_answers [--data ../shared/data]

own        each published solution against its own answer; all that are not correct are in the result, with outcome and
           note
shuffled   each solution against the answer of another row that is written differently, from a seeded permutation; a
           plain permutation would sometimes give a row its own answer (18 is the answer to many questions)

For each data set with the lenient and the strict form. GSM8K's solutions end in `#### n`, MATH-500's contain a box.
"""

import argparse
import contextlib
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actor.scoring.pool import ScorePool
from actor.verifiers.verdict import ScoreJob
from benchmarks.machine import write_result
from protocol.outcome import Outcome
from shared.config.data import VerifierConfig, VerifierKind

SEED = 0
SETS: list[tuple[str, str, VerifierKind, str]] = [
    ("gsm8k_train", "gsm8k/train.jsonl", "gsm8k", "answer"),
    ("gsm8k_test", "gsm8k/test.jsonl", "gsm8k", "answer"),
    ("math500", "math500/test.jsonl", "math", "solution"),
]


def read(file: Path, solution: str) -> list[tuple[str, str]]:
    """Solution and gold answer of each row; GSM8K's answer is what follows `####`."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(row[solution], row["answer"].rpartition("####")[2].strip()) for row in rows]


def differently(golds: list[str]) -> list[str]:
    """The gold answers in another order, none in a place where an equal one was: swaps until that is so."""
    stream, order = random.Random(SEED), list(range(len(golds)))
    stream.shuffle(order)
    while same := [place for place, other in enumerate(order) if golds[place] == golds[other]]:
        for place in same:
            other = stream.randrange(len(order))
            order[place], order[other] = order[other], order[place]
    return [golds[place] for place in order]


def score(verifier: VerifierConfig, texts: list[str], golds: list[str]) -> tuple[int, list[dict[str, str]]]:
    """How many are correct, and the rest."""
    jobs = [
        ScoreJob(prompt="", completion=text, completion_ids=[], truncated=False, columns={"answer": gold})
        for text, gold in zip(texts, golds, strict=True)
    ]
    with contextlib.closing(ScorePool(verifier)) as pool:
        verdicts = pool.score(jobs, lambda: None)
    rest = [
        {"gold": gold, "read": verdict.final_answer or "", "outcome": verdict.outcome, "note": verdict.note}
        for gold, verdict in zip(golds, verdicts, strict=True)
        if verdict.outcome is not Outcome.CORRECT
    ]
    return len(jobs) - len(rest), rest


def figures(rows: list[tuple[str, str]], kind: VerifierKind) -> dict[str, Any]:
    """Of one data set."""
    texts, golds = [text for text, _ in rows], [gold for _, gold in rows]
    found: dict[str, Any] = {"rows": len(rows)}
    for name, strict in (("lenient", False), ("strict", True)):
        verifier = VerifierConfig(kind=kind, strict=strict, workers=2)
        own, rest = score(verifier, texts, golds)
        others, _ = score(verifier, texts, differently(golds))
        found[name] = {"own_correct": own / len(rows), "rest": rest, "shuffled_correct": others / len(rows)}
    return found


def main() -> None:
    """Score and write."""
    parser = argparse.ArgumentParser(description="Verifiers on the data sets' own solutions.")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with gsm8k/ and math500/")
    data = parser.parse_args().data
    found = {name: figures(read(data / file, solution), kind) for name, file, kind, solution in SETS}
    readers = {package: version(package) for package in ("math-verify", "sympy", "mpmath")}
    print(write_result("gold_answers", {"readers": readers, "seed": SEED, **found}).read_text())


if __name__ == "__main__":
    main()
