"""Matrix products with an fp32 result for any factors: scores and logits lose too much when rounded to bf16.

    fp32 x fp32              the product
    bf16 x bf16 on a card    summed and kept in fp32
    bf16 x bf16 on a CPU     factors widened to fp32

PyTorch has no bf16 product with an fp32 result on a CPU. With `narrowed`, oneDNN multiplies fp32 factors in bf16 and
sums in fp32. Factors that were widened lose nothing by that, and the bf16 units of the processor do the work.

Two are exceptions: `weight_product`, the product with a weight, in the type of its factors, and `product_tiles`, whose
results are rounded to bf16 by their distance from one of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from shared.config.processes import ONEDNN_VALUES

SHORT = 256
"""Up to this number of rows, `weight_product` has the weight on the left. With more, arithmetic takes the time."""
BETWEEN = range(769, 2048)
"""Numbers of rows with which oneDNN is up to half as fast, as it cuts such products into blocks of other sizes.
`weight_product` and `gradient_product` take a half or a third of them at a time."""
FEW = 16
"""Below this number of rows, reading the weight takes longer than the product, and `narrowed` costs more than it
saves."""
IN_FP32 = 64
"""Of the values of a row, so many are computed in fp32."""
BLOCK = 128
"""Columns of which the maximum is looked at first."""
AT_ONCE = 4096
"""Columns that are turned into rows at once: few enough to stay in the cache of the core."""
RowsTimesWeight = Callable[[torch.Tensor], torch.Tensor]
"""[n, k] -> [n, m], the product with a weight that is known."""


def weight_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[n, in], [out, in], [out] -> [n, out] W x + b.

    For bf16 units, oneDNN rearranges the right factor in each call. With few rows that must not be the weight: the
    product takes two thirds of the time with the weight on the left. The result is then a view of [out, n]."""
    if x.dtype == torch.float32 or not x.is_cpu or x.dim() > 2:
        return F.linear(x, weight, bias)
    if len(x) > SHORT:
        return F.linear(x, weight, bias) if x.requires_grad or len(x) not in BETWEEN else by_rows(x, weight.t(), bias)
    return (weight @ x.t() if bias is None else torch.addmm(bias[:, None], weight, x.t())).t()


def is_for_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies few rows by this weight in fp32, and not MKL.

    It does so for large weights where PyTorch computes with AVX2: on processors that have no AVX-512, and with
    compute.blas = "portable". On an AMD of the first generation, 8 rows take five sixths of MKL's time, and two thirds
    with packed weights. With smaller weights it is not faster unless they are packed. The bits of the two libraries
    differ, so no measured time decides this. For the plan, which has no torch, `gains_by_packing`
    (shared/process/processor.py) knows the processor, and `ModelShape` the weights."""
    large = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= ONEDNN_VALUES
    return large and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


def gradient_product(grad: torch.Tensor, weight: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """[n, out], [out, in] -> [n, in] dy W, added to `total` in place if there is one."""
    if grad.dtype == torch.float32 or not grad.is_cpu or grad.dim() > 2 or len(grad) not in BETWEEN:
        return grad @ weight if total is None else total.addmm_(grad, weight)
    return by_rows(grad, weight, total=total)


def by_rows(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, total: torch.Tensor | None = None
) -> torch.Tensor:
    """a b + bias, or added to `total`, in equal pieces."""
    result = a.new_empty(len(a), b.shape[1]) if total is None else total
    pieces = -(-len(a) // BETWEEN.start)
    for rows, out in zip(a.chunk(pieces), result.chunk(pieces), strict=True):
        if total is not None:
            out.addmm_(rows, b)
        elif bias is not None:
            torch.addmm(bias, rows, b, out=out)
        else:
            torch.mm(rows, b, out=out)
    return result


def product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., n, k] x [..., k, m] -> [..., n, m] fp32; equal leading dimensions."""
    if a.dtype == torch.float32:
        # `@` does the same after some more calls.
        return torch.bmm(a, b) if a.dim() == b.dim() == 3 else a @ b
    if not a.is_cpu and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        # PyTorch has no gradient of the product below.
        return a.float() @ b.float()
    if not a.is_cpu:
        flat = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
        return flat.view(*a.shape[:-1], b.shape[-1])
    with narrowed(a.shape[-2]):
        return a.float() @ b.float()


def product_of_largest(x: torch.Tensor, weight: torch.Tensor, rounded: RowsTimesWeight | None = None) -> torch.Tensor:
    """[n, k], [m, k] -> [n, m] fp32; from bf16 factors on a CPU, the IN_FP32 largest values of a row are computed in
    fp32 and the others rounded to bf16. In a softmax the largest decide; the errors of the others cancel in the sum.
    rounded: computes the product in another way; None for `weight_product`. From bf16 factors it may round more; from
    fp32 factors on a CPU, what it returns is the result.

    Takes a third of the time of widening, which is half a token step at a vocabulary of 150,000."""
    if x.dtype == torch.float32 or not x.is_cpu:
        return rounded(x) if rounded and x.is_cpu else product_fp32(x, weight.t())
    result = widened_rows(rounded(x) if rounded else weight_product(x, weight))
    columns = largest_columns(result, min(IN_FP32, len(weight)))
    # A vector product for each entry, summed in fp32.
    factors = weight[columns.flatten()].float().unflatten(0, columns.shape)
    return result.scatter_(1, columns, torch.linalg.vecdot(factors, x.float()[:, None]))


def widened_rows(product: torch.Tensor) -> torch.Tensor:
    """[n, m, ...] fp32, row after row, whatever the order of the product's values is."""
    if product.is_contiguous():
        return product.float()
    result = product.new_empty(product.shape, dtype=torch.float32)
    for part in slices(product.shape[1], AT_ONCE):
        result[:, part] = product[:, part]
    return result


def largest_columns(values: torch.Tensor, count: int) -> torch.Tensor:
    """[n, m] -> [n, count] where the largest are. Each lies in one of the `count` blocks with the largest maxima.
    Looking at the maxima first takes a third of the time of `topk` over all columns."""
    blocks = values.shape[1] // BLOCK
    if blocks <= count:
        return values.topk(count, dim=1, sorted=False).indices
    whole, offsets = blocks * BLOCK, torch.arange(BLOCK, device=values.device)
    best = values[:, :whole].unflatten(1, (blocks, BLOCK)).amax(dim=2).topk(count, dim=1, sorted=False).indices
    rest = torch.arange(whole, values.shape[1], device=values.device).expand(len(values), -1)
    candidates = torch.cat([(best[:, :, None] * BLOCK + offsets).flatten(1), rest], dim=1)
    return candidates.gather(1, values.gather(1, candidates).topk(count, dim=1, sorted=False).indices)


def product_in_two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[n, k] x [k, m] -> [n, m] fp32, within 1e-5 of the largest value. On a CPU, bf16 factors stay as they are: one
    product is rounded, and a second one, from which it is taken before rounding, gives the rest. For many rows, this
    takes about as long as one product of widened factors, for few rows half as long."""
    if a.dtype == torch.float32 or not a.is_cpu:
        return product_fp32(a, b)
    rounded = a @ b
    return torch.addmm(rounded, a, b, beta=-1).float().add_(rounded)


def product_tiles(
    a: torch.Tensor, b: torch.Tensor, columns: int, centers: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """[n, k] x [k, m] -> tiles [n, columns] of the product, each with its columns and what is to be added to it; None
    in fp32.

    centers [n]: one column for each row. With bf16 factors on a CPU, a tile has bf16(a b - c), where c [n, 1] is the
    row's value in that column, rounded to bf16. So a result is wrong by at most 2^-8 of its distance from c; choose a
    column whose neighbours matter. A product of widened factors would be exact, but takes twice as long without AMX."""
    if a.dtype == torch.float32 or not a.is_cpu:
        for part in slices(b.shape[1], columns):
            yield part, product_fp32(a, b[:, part]), None
        return
    center = torch.linalg.vecdot(b.t()[centers].float(), a.float()).to(a.dtype)[:, None]
    for part in slices(b.shape[1], columns):
        yield part, torch.addmm(-center, a, b[:, part]), center


def slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


@contextmanager
def narrowed(rows: int) -> Iterator[None]:
    """Inside the block, fp32 factors on a CPU are rounded to bf16, their products summed in fp32."""
    if rows < FEW:
        yield
        return
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
