"""What names tell about a model: which matrices are linears of its decoder, and whose layers we compute ourselves. And
what its config.json tells of the longest sequence.

    <...>.<number>.<...>.weight with two dimensions: `model.layers.0.mlp.fc1.weight`, `transformer.h.3.dense.weight`

Linears are quantised and may have an adapter. This is the only definition, for files and for modules; the header of a
file is enough to apply it. Embeddings and head are in no numbered layer, and a norm with a row for each head has `norm`
in its name. A layer with any other matrix is refused (shared/base/architecture.py). No torch here: `doctor` and the
plan of a run use this without it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelError

OWN_LAYERS = frozenset({"llama", "qwen2", "qwen3"})
"""Model types whose layers are computed without their modules (shared/model/layers/trained_layers.py)."""
LONG_ROPE = frozenset({"longrope", "su"})
"""Two names of one rotary type."""
IN_LAYER = re.compile(r"\.\d+\.(.*\.)?(?![^.]*norm)[^.]+\.weight$")


def is_decoder_linear(weight: str, dims: int) -> bool:
    """Judged by name and number of dimensions; NF4 codes have two as well."""
    return dims == 2 and IN_LAYER.search(weight) is not None


def check_targets(targets: Iterable[str], linears: Iterable[str]) -> None:
    """ModelError if the model lacks one. linears: names of modules."""
    known = {name.rpartition(".")[2] for name in linears}
    if unknown := set(targets) - known:
        raise ModelError(
            f"lora.targets names '{min(unknown)}', which this model does not have; choose from"
            f" {', '.join(sorted(known))}."
        )


@dataclass(frozen=True, kw_only=True)
class Room:
    """For prompt and completion together."""

    positions: int | None
    """None if the model does not say."""
    beyond: str = ""
    """What a refusal adds: why there are not more, if the model itself has more."""

    def holds(self, tokens: int) -> bool:
        return self.positions is None or tokens <= self.positions


def room_of(setting: Callable[[str], Any]) -> Room:
    """setting: of the model's configuration by its name, or None.

    `longrope` has frequencies for short sequences and others for long ones. The longest sequence of a batch decides for
    all of it, and for the keys that are cached already, so beyond the short ones a token's log-prob would depend on
    what is computed beside it.
    """
    most = setting("max_position_embeddings")
    rope = setting("rope_parameters") or setting("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in LONG_ROPE:
        return Room(positions=most)
    original = setting("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    known = [positions for positions in (original, most) if positions]
    return Room(
        positions=min(known, default=None), beyond=", beyond which longrope would change the log-probs of a batch"
    )
