"""Compiles every kernel for a card that need not be there: the interpreter accepts what the compiler refuses.

    python -m tests.support.compiled_kernels 86         (without TRITON_INTERPRET)

prints a JSON object: kernel and variant -> bytes of the card's shared memory that a program takes.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = {
    "logits": "*fp32",
    "largest": "*fp32",
    "means": "*fp32",
    "ids": "*i64",
    "logprobs": "*fp32",
    "entropies": "*fp32",
    "product": "*fp32",
    "targets": "*i64",
    "temperature": "fp32",
    "scale": "fp32",
    "cap": "fp32",
}
"""Of arguments that always have the same; all others but those of a variant are i32."""
BLOCK, BLOCKS, TILE = 1024, 256, 2048


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, object]]]:
    """Name, kernel, types that differ, and constants."""
    from shared.model.kernels import head, lora, sampler

    yield "block_sums", sampler.block_sums, {"sums": "*fp64"}, {"BLOCK": BLOCK}
    for greedy, uniforms in ((True, "*fp32"), (False, "*fp64"), (False, "*fp32")):
        constants = {"GREEDY": greedy, "BLOCK": BLOCK, "BLOCKS": BLOCKS}
        yield f"choose {greedy} {uniforms}", sampler.choose, {"sums": "*fp64", "uniforms": uniforms}, constants
    for form, kind in ((True, "bf16"), (False, "fp32")):
        types = {"sums": "*fp32", "bias": f"*{kind}", "shares": f"*{kind}"}
        flags = dict.fromkeys(("HAS_BIAS", "HAS_CAP", "ENTROPIES"), form)
        yield f"add_tile {kind}", head.add_tile, types, {**flags, "DIRECTIONS": True, "BLOCK": TILE}
    for kind, precision in (("bf16", "tf32"), ("fp16", "tf32"), ("fp32", "ieee")):
        for rows, ranks in ((lora.SMALLEST, lora.SMALLEST), (lora.ROWS, lora.RANKS)):
            sizes = {"ROWS": rows, "RANKS": ranks, "INPUTS": lora.INPUTS, "OUTPUTS": lora.OUTPUTS}
            types = dict.fromkeys("yxab", f"*{kind}")
            yield f"add_product {kind} {rows}", lora.add_product, types, {**sizes, "PRECISION": precision}


def shared_bytes(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], capability: int) -> int:
    from triton import compile as compile_kernel  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from shared.model.kernels.lora import STAGES

    names: list[str] = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else (TYPES | dict(types)).get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values)
    done: Any = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": STAGES})
    return done.metadata.shared


def main() -> None:
    capability = int(sys.argv[1])
    found = {name: shared_bytes(kernel, types, constants, capability) for name, kernel, types, constants in variants()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
