"""Independent random streams from one run seed.

    seed(name, ...) = first 63 bits of blake2b(run seed | name | ...)

A stream is named by its purpose and never by when it is used, so the order of work cannot change a result.
"""

import hashlib
import json

import numpy as np


def derive(run_seed: int, *name: str | int) -> int:
    return drawn(json.dumps([run_seed, *name]))


def drawn(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def sample_seeds(run_seed: int, lane: str, step: int, slot: int, count: int) -> tuple[int, ...]:
    """[G] one seed for each sample of a group: derive(run_seed, "sample", lane, step, slot, sample)."""
    # A learner makes them for all actors, so what they share is spelled once.
    shared = json.dumps([run_seed, "sample", lane, step, slot])[:-1]
    return tuple(drawn(f"{shared}, {sample}]") for sample in range(count))


def uniforms(seed: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): one draw for each token, independent of what else is decoded."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def permutation(run_seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=derive(run_seed, "tasks", epoch))).permutation(count)
