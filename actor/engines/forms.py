"""What a token step of `hf` on a CPU computes with, as a run has settled it: codes, the head in 8 bits, C code.

Where this machine cannot do what was settled on another one, the dense values and PyTorch's operations serve, and the
log says so. The numbers then differ in rounding.
"""

import logging

import torch

from actor.engines.token_step.coded import Codes, reads_codes
from actor.engines.token_step.compiled.head import TiledHead, tiled_head
from actor.engines.token_step.compiled.library import Library, library_for
from actor.engines.token_step.compiled.step import has_covered_sizes
from actor.engines.token_step.compiled.stored_codes import StoredCodes
from actor.engines.token_step.eight_bit import REMEDY, EightBitHead, eight_bit_head, multiplies_eight_bits
from actor.engines.token_step.stacks import dense_bytes
from shared.base.cache import CachedBase
from shared.base.interleaved import interleaved_base
from shared.config.model import cache_root
from shared.config.tree import Config
from shared.errors import ModelError
from shared.model.layers.nf4 import WEIGHTS
from shared.model.layers.trained_layers import covers
from shared.model.policy import Policy
from shared.tensor_file import map_file

log = logging.getLogger("actor")


def codes_for(config: Config, base: CachedBase, policy: Policy, compiled: Library | None) -> Codes | StoredCodes | None:
    """What a token step of `hf` on a CPU may read in place of the dense base; None where it does not."""
    if config.actor.weights != "nf4" or not uses_own_layers(policy):
        return None
    # PyTorch's product with codes gives other numbers than C code, so neither stands in for the other.
    in_c = config.actor.token_step == "compiled"
    if policy.dtype != torch.bfloat16 or not (compiled if in_c else reads_codes()):
        needed = "C code" if in_c else "a processor with AVX512-BF16"
        log.warning("actor.weights is 'nf4', which takes bf16 and %s: it reads dense weights", needed)
        return None
    if compiled:
        return stored_codes(base)
    log.info("a token step of few rows reads the NF4 codes")
    return Codes(map_file(interleaved_base(base).folder / WEIGHTS))


def stored_codes(base: CachedBase) -> StoredCodes | None:
    """None if C code can read no linear of this base as codes."""
    found = StoredCodes(map_file(base.folder / WEIGHTS))
    if not found.has_any():
        log.info("a token step reads dense weights: this model's type or sizes do not fit")
        return None
    log.info("a token step reads the NF4 codes of the base")
    return found


def uses_own_layers(policy: Policy) -> bool:
    """Whether it is decoded by our own layers, in C or in PyTorch, from dense values on a CPU."""
    return policy.device.type == "cpu" and dense_bytes(policy.adapter) > 0 and covers(policy.backbone)


def eight_bit_head_for(
    config: Config, base: CachedBase, policy: Policy, compiled: Library | None
) -> EightBitHead | TiledHead | None:
    """What logits come from while `hf` decodes on a CPU; None where they come from the values."""
    if config.actor.head != "int8" or not uses_own_layers(policy):
        return None
    has_vnni = torch.cpu._is_vnni_supported() if compiled else multiplies_eight_bits()
    if policy.dtype != torch.bfloat16 or not has_vnni:
        log.warning("actor.head is 'int8', which takes bf16 and a processor with VNNI: logits come from dense values")
        return None
    if compiled:
        found = TiledHead.mapped(map_file(tiled_head(base).folder / WEIGHTS))
    else:
        found = EightBitHead.mapped(map_file(eight_bit_head(base).folder / WEIGHTS))
    if not found.matches(policy.head):
        raise ModelError(
            f"The head of this model is not the one that its weight file in {base.folder} names; {REMEDY}."
        )
    log.info("logits come from the head in 8 bits")
    return found


def compiled_for(config: Config, policy: Policy) -> Library | None:
    """The token step in C; None where PyTorch's operations compute it."""
    if config.actor.token_step != "compiled":
        return None
    if not uses_own_layers(policy) or not has_covered_sizes(policy):
        log.info("PyTorch's operations compute the token step: the C code does not cover this model")
        return None
    return library_for(policy.dtype, cache_root(config.model))
