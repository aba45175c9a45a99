"""One kernel beside its torch version, on an example with the shapes of a policy: do they agree, and which is quicker?

    agree     |kernel - torch| <= tolerance |torch| for every result, as vectors; whole numbers are equal
    quicker   seconds of the kernel < QUICKER x seconds of the torch version

What is measured is what a process will run: the policy's own head, its largest adapter, its vocabulary; as a CUDA graph
if it is part of a token step. On an H200 the adapter's kernel takes 31 us with its launch and PyTorch 36, but 13 and 9
in a graph (benchmarks/kernels.py). The time in a graph decides even if `actor.graphs` is `never`, so that all processes
share one choice. The examples are random, the same in every process, and take some ten megabytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from shared.errors import in_words
from shared.model.head import Sums, SumsOf, token_stats
from shared.model.layers.lora import AddLowRank, add_low_rank
from shared.model.policy import Policy
from shared.model.sampler import Draw, draw

Tensors = tuple[torch.Tensor, ...]
Seconds = Callable[[Callable[[], object], bool], float]
"""Of the work, and whether it is timed as a graph: how long one call takes."""

HEAD_ROWS, STEP_ROWS = 256, 16
"""Tokens of an update, and completions that are decoded together."""
TEMPERATURE = 0.8
QUICKER = 0.9
"""A choice that the noise of a measurement could turn is not worth another rounding."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""By the type of the policy. Both versions round to it, one of them perhaps the other way."""
EXACT = 1e-4
"""For what has no factor in that type."""
WARM_UP, CALLS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is compared."""

    kernel: Any
    """What takes the place of the torch version."""
    example: Callable[[], Tensors]
    """New tensors with the same values in each call; both versions may overwrite them."""
    by_torch: Callable[..., Tensors]
    """The example -> its results."""
    by_triton: Callable[..., Tensors]
    """The same by the kernel."""
    tolerance: float
    """Of the results."""
    bytes_moved: int
    """That must be read or written once; for the benchmark."""
    in_graph: bool
    """Whether it is part of a token step, which is a CUDA graph unless `actor.graphs` is `never`."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial showed."""

    use: Literal["triton", "torch"]
    """Which computes."""
    why: str
    """For the log."""
    lasting: bool = True
    """Whether it may be kept: a kernel that could not be started may start another time."""


def judge(make: Callable[[], Trial], *, forced: bool, seconds: Seconds) -> Judgement:
    """forced: the kernel is used if it agrees, however long it takes."""
    try:
        trial = make()
        gap = difference(trial)
        if not gap <= trial.tolerance:
            found = f"differs from PyTorch by {gap:.2g}, at most {trial.tolerance:.2g} is allowed"
            return Judgement(use="torch", why=found)
        if forced:
            return Judgement(use="triton", why="as configured")
        example = trial.example()
        runs = (trial.by_triton, trial.by_torch)
        ours, theirs = (seconds(lambda run=run: run(*example), trial.in_graph) for run in runs)
    # Triton, the C compiler and the driver raise what they like, and the torch version is there.
    except Exception as error:
        return Judgement(use="torch", why=f"the kernel cannot be used ({in_words(error)})", lasting=False)
    use = "triton" if ours < QUICKER * theirs else "torch"
    return Judgement(use=use, why=f"Triton {ours * 1e3:.3f} ms, PyTorch {theirs * 1e3:.3f} ms")


def difference(trial: Trial) -> float:
    """The largest of all results, relative to the torch version."""
    ours, theirs = trial.by_triton(*trial.example()), trial.by_torch(*trial.example())
    return max(relative(one, other) for one, other in zip(ours, theirs, strict=True))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def card_seconds(work: Callable[[], object], in_graph: bool = False) -> float:
    """By the card's own clock. Outside of a graph, with what the host adds where it is slower than the card."""
    for _ in range(WARM_UP):
        work()
    if not in_graph:
        return seconds_of_calls(work)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return seconds_of_calls(graph.replay)
    finally:
        # Its stream has got 32 MiB of cuBLAS, which would stay until the process ends.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage] - as PyTorch's notes on CUDA say


def seconds_of_calls(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / CALLS


def normal(*shape: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Drawn on the CPU, the same for every card."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(like.device, like.dtype)


def trial_of_sums(policy: Policy) -> Trial:
    """An update's log-probs with their gradient."""
    # Imported here and below, because it imports Triton.
    from shared.model.kernels.head import FoldedSums

    head = policy.head
    vocabulary, width = head.shape

    def example() -> Tensors:
        targets = torch.randint(vocabulary, (HEAD_ROWS,), generator=torch.Generator().manual_seed(1))
        return normal(HEAD_ROWS, width, seed=0, like=head).requires_grad_(), targets.to(head.device)

    def run(sums: SumsOf) -> Callable[..., Tensors]:
        def stats(hidden: torch.Tensor, targets: torch.Tensor) -> Tensors:
            with torch.enable_grad():
                found = token_stats(
                    hidden, head, targets, temperature=TEMPERATURE, rows=HEAD_ROWS, form=policy.form, sums=sums
                )
                (gradient,) = torch.autograd.grad(found.logprobs.sum(), hidden)
            return found.logprobs.detach(), found.entropies, gradient

        return stats

    products = 2 * (head.nbytes + HEAD_ROWS * vocabulary * (4 + head.itemsize))
    return Trial(
        kernel=FoldedSums,
        example=example,
        by_torch=run(Sums),
        by_triton=run(FoldedSums),
        tolerance=TOLERANCE[head.dtype],
        bytes_moved=products,
        in_graph=False,
    )


def trial_of_low_rank(policy: Policy) -> Trial:
    """The largest adapter of a token step."""
    from shared.model.kernels.lora import add_low_rank as by_kernel

    layer = max(policy.adapter.layers.values(), key=lambda one: one.lora_A.numel() + one.lora_B.numel())
    (rank, inputs), outputs = layer.lora_A.shape, len(layer.lora_B)

    def example() -> Tensors:
        like = policy.head
        return (
            normal(STEP_ROWS, outputs, seed=0, like=like),
            normal(STEP_ROWS, inputs, seed=1, like=like),
            normal(rank, inputs, seed=2, like=like) / inputs**0.5,
            normal(outputs, rank, seed=3, like=like),
        )

    def run(add: AddLowRank) -> Callable[..., Tensors]:
        def added(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Tensors:
            with torch.no_grad():
                return (add(y, x, a, b, layer.scale),)

        return added

    numbers = 2 * STEP_ROWS * outputs + STEP_ROWS * inputs + rank * (inputs + outputs)
    return Trial(
        kernel=by_kernel,
        example=example,
        by_torch=run(add_low_rank),
        by_triton=run(by_kernel),
        tolerance=TOLERANCE[policy.dtype],
        bytes_moved=numbers * policy.head.itemsize,
        in_graph=True,
    )


def trial_of_draw(policy: Policy) -> Trial:
    """A token step's tokens."""
    from shared.model.kernels.sampler import draw as by_kernel

    vocabulary, device = len(policy.head), policy.device

    def example() -> Tensors:
        logits = 3.0 * normal(STEP_ROWS, vocabulary, seed=0, like=torch.empty(0, device=device))
        uniforms = torch.rand(STEP_ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return logits, uniforms.to(device)

    def run(drawing: Draw) -> Callable[..., Tensors]:
        def drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> Tensors:
            found = drawing(logits, uniforms)
            return found.ids, found.logprobs, found.entropies

        return drawn

    return Trial(
        kernel=by_kernel,
        example=example,
        by_torch=run(draw),
        by_triton=run(by_kernel),
        tolerance=EXACT,
        bytes_moved=4 * STEP_ROWS * vocabulary,
        in_graph=True,
    )


TRIALS: dict[str, Callable[[Policy], Trial]] = {
    "sums": trial_of_sums,
    "add_low_rank": trial_of_low_rank,
    "draw": trial_of_draw,
}
"""By the field of `Kernels` that is chosen."""
