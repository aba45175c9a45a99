"""The library of the compiled token step, and its functions (shared/model/compiled/build.py says how it is made).

Where the library cannot be built, PyTorch's operations compute, and the log says why.
"""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.model.compiled.build import ADDRESS, INTEGER, CannotCompile, Source, built, opened

SOURCE = Source(name="token-step", main=Path(__file__).with_name("token_step.c"))

FIGURES = ("most_rows", "rank_step", "largest_head", "slice_bytes", "draw_slice", "head_bytes", "head_slice")
"""Functions that take nothing, and the fields that have what they return."""

log = logging.getLogger("token step")


@dataclass(frozen=True, kw_only=True)
class Library:
    """What a token step calls."""

    name: str
    """Of its file; another library has another name."""
    token_step: Any
    """Takes the address of a `Step`."""
    score_floats: Any
    """Takes the same; the floats of scores that each thread needs room for."""
    draw: Any
    """Takes logits, rows, vocabulary, uniforms, threads, sums, ids, log-probs, entropies."""
    head_logits: Any
    """Takes the address of a `Head`."""
    structure_bytes: tuple[int, int]
    """Sizes of `Step` and `Layer` in C."""
    most_rows: int
    """That go through the layers together; `scratch` is for the activations of so many."""
    rank_step: int
    """Inputs of B are filled up to a multiple of it."""
    largest_head: int
    """Numbers of a key."""
    slice_bytes: int
    """Bytes that a thread needs for each slice of the vocabulary."""
    draw_slice: int
    """Tokens in such a slice."""
    head_bytes: int
    """Size of `Head` in C."""
    head_slice: int
    """Tokens in a slice of `head_logits`."""


def library_for(dtype: torch.dtype, cache: Path) -> Library | None:
    """None if there cannot be one here; the log says why."""
    try:
        return load(built(SOURCE, dtype, cache))
    except (CannotCompile, OSError) as error:
        log.warning("PyTorch's operations compute the token step, because %s", error)
        return None


def load(file: Path) -> Library:
    library = opened(file)
    library.token_step.argtypes, library.token_step.restype = [ADDRESS], None
    library.score_floats.argtypes, library.score_floats.restype = [ADDRESS], INTEGER
    library.draw.argtypes, library.draw.restype = [ADDRESS, INTEGER, INTEGER, ADDRESS, INTEGER, *[ADDRESS] * 4], None
    library.head_logits.argtypes, library.head_logits.restype = [ADDRESS], None
    structures = [figure(library, name) for name in ("step_bytes", "layer_bytes")]
    return Library(
        name=file.stem,
        token_step=library.token_step,
        score_floats=library.score_floats,
        draw=library.draw,
        head_logits=library.head_logits,
        structure_bytes=(structures[0], structures[1]),
        **{name: figure(library, name) for name in FIGURES},
    )


def figure(library: ctypes.CDLL, name: str) -> int:
    function = getattr(library, name)
    function.restype = INTEGER
    return function()
