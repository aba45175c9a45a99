"""Which matrices of a checkpoint are its decoder's linears: those that are quantised and may have an adapter.

    <...>.<number>.<...>.weight with two dimensions: `model.layers.0.mlp.fc1.weight`, `transformer.h.3.dense.weight`

The one definition, for files and for modules alike: a file's header is enough to apply it. Embeddings and head are in
no numbered layer; a norm with a row for each head says so in its name. Any other matrix in a layer that is not a linear
is refused (shared/model/architecture.py).
"""

import re

IN_LAYER = re.compile(r"\.\d+\.(.*\.)?(?![^.]*norm)[^.]+\.weight$")


def is_decoder_linear(weight: str, dims: int) -> bool:
    """By the name of a tensor and how many dimensions it has; NF4 codes have two as well."""
    return dims == 2 and IN_LAYER.search(weight) is not None
