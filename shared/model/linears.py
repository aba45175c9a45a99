"""Which matrices of a model are linears of its decoder: those that are quantised and may have an adapter.

    <...>.<number>.<...>.weight with two dimensions: `model.layers.0.mlp.fc1.weight`, `transformer.h.3.dense.weight`

This is the only definition, for files and for modules; the header of a file is enough to apply it. Embeddings and head
are in no numbered layer, and a norm with a row for each head has `norm` in its name. A layer with any other
matrix is refused (shared/base/architecture.py). No torch here: `doctor` uses this without it.
"""

import re

IN_LAYER = re.compile(r"\.\d+\.(.*\.)?(?![^.]*norm)[^.]+\.weight$")


def is_decoder_linear(weight: str, dims: int) -> bool:
    """Judged by name and number of dimensions; NF4 codes have two as well."""
    return dims == 2 and IN_LAYER.search(weight) is not None
