"""What names tell about a model: which matrices are linears of its decoder, and whose layers we compute ourselves.

    <...>.<number>.<...>.weight with two dimensions: `model.layers.0.mlp.fc1.weight`, `transformer.h.3.dense.weight`

Linears are quantised and may have an adapter. This is the only definition, for files and for modules; the header of a
file is enough to apply it. Embeddings and head are in no numbered layer, and a norm with a row for each head has `norm`
in its name. A layer with any other matrix is refused (shared/base/architecture.py). No torch here: `doctor` and the
plan of a run use this without it.
"""

import re

OWN_LAYERS = frozenset({"llama", "qwen2", "qwen3"})
"""Model types whose layers are computed without their modules (shared/model/trained_layers.py)."""
IN_LAYER = re.compile(r"\.\d+\.(.*\.)?(?![^.]*norm)[^.]+\.weight$")


def is_decoder_linear(weight: str, dims: int) -> bool:
    """Judged by name and number of dimensions; NF4 codes have two as well."""
    return dims == 2 and IN_LAYER.search(weight) is not None
