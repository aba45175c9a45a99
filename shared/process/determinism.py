"""What must be fixed to get the same numbers twice: threads, vector units, BLAS mode.

Floating-point sums depend on their order. On a CPU that order is chosen by the number of threads (PyTorch's own
reductions), by the vector width (ATen, oneDNN) and, in MKL, also by the alignment of the operands, unless MKL_CBWR asks
for reproducible kernels. Measured on two cores: without it the same matmul gave three results for four alignments; with
AUTO,STRICT it gave one result for every alignment and thread count, at the same speed.

    fast      MKL_CBWR=AUTO,STRICT: the widest vector units of this machine; repeatable here, not on another kind of CPU
    portable  AVX2 kernels in MKL, ATen and oneDNN: the same bits on more machines, about as fast at small sizes.
              MKL's COMPATIBLE mode supports older CPUs at half the speed, and is left out

Threads that wait for others spin for a fraction of a millisecond and then sleep. By default libgomp lets them spin five
times as long, and beside busy processes that takes the core from the very thread that is waited for; if they sleep at
once, waking them takes longer than many an operation of a small model (benchmarks/busy_machine.py). While other
processes compute, they spin less (busy_cores/spinning.py). Bits do not depend on it.

In bf16, oneDNN compiles a product of every new shape and keeps it: 0.7 MB each, and the shapes of micro-batches and of
token steps are many. By default it and PyTorch keep a thousand each, up to a gigabyte in each process, which also
leaves holes in the heap. Sixty-four are enough for a micro-batch, and take some 70 MB less than two hundred. In four
steps of half a billion parameters a learner then compiles 430 products in place of 370, each in a third of a
millisecond.

Left out: pages of 2 MB for the heap (GLIBC_TUNABLES). Alone an update is a tenth faster with them, but in a run, where
memory goes back to the system after each turn, it takes a third longer.

The environment must be set before torch is loaded, so the launcher sets it; `pin_torch` does the rest.
"""

import os
from typing import Any, Literal

Blas = Literal["fast", "portable"]
PINNED = (
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_DYNAMIC",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "TOKENIZERS_PARALLELISM",
)
SPINS = "60000"
"""libgomp's own default is 300,000."""
COMPILED_PRODUCTS = 64
"""That oneDNN and PyTorch keep."""


def cpu_environment(threads: int, blas: Blas) -> dict[str, str]:
    """Variables for a process that is about to start."""
    count = str(threads)
    environment = {
        "OMP_NUM_THREADS": count,
        "GOMP_SPINCOUNT": SPINS,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        # MKL may otherwise take fewer threads than it was given.
        "MKL_DYNAMIC": "FALSE",
        "MKL_CBWR": "AUTO,STRICT",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(COMPILED_PRODUCTS),
        "LRU_CACHE_CAPACITY": str(COMPILED_PRODUCTS),
        # Deterministic algorithms on a GPU refuse to run without a fixed cuBLAS workspace.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # The Rust tokenizer's threads gain nothing here and warn after every fork.
        "TOKENIZERS_PARALLELISM": "false",
    }
    if blas == "portable":
        environment |= {"MKL_CBWR": "AVX2,STRICT", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    return environment


def pin_torch(threads: int) -> None:
    """Fix what torch would decide by itself. Call before the first tensor operation of the process."""
    import torch

    torch.set_num_threads(threads)
    # Torch allows this once and before any parallel work; one thread also keeps independent operations in order.
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills every empty tensor with NaN. That finds bugs, but costs time in each call.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def record() -> dict[str, Any]:
    """The settings in force in this process, for its log. Versions and processor are in run.json."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": {name: os.environ[name] for name in PINNED if name in os.environ},
    }
