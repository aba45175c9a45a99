"""Matrix products with an fp32 result for any factors: scores and logits lose too much when rounded to bf16.

fp32 x fp32: the product    bf16 x bf16 on a card: summed and kept in fp32    elsewhere: factors widened first
"""

import torch


def product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[..., n, k] x [..., k, m] -> [..., n, m] fp32; equal leading dimensions."""
    if a.dtype == torch.float32:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    flat = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
    return flat.view(*a.shape[:-1], b.shape[-1])


def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * a b in fp32. A bf16 factor would be rounded twice, so the product is scaled instead."""
    return product_fp32(a * scale, b) if a.dtype == torch.float32 else product_fp32(a, b).mul_(scale)
