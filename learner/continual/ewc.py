"""Elastic weight consolidation of one layer (Kirkpatrick et al. 2017), on the weights that its adapter makes.

    penalty = lambda / 2 sum F (dW - dW*)^2,    dW = s B A
    P = d penalty / d dW = lambda F (dW - dW*)
    d penalty / dA = s B^T P,    d penalty / dB = s P A^T

Both depend on A and B only through their product: another factorisation of the same policy has the same penalty.
"""

import torch

from shared.model.lora import LoraLinear


def delta(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[R, in], [out, R] -> [out, in] dW"""
    return scale * (b @ a)


@torch.no_grad()
def add_penalty(layer: LoraLinear, anchored: torch.Tensor, fisher: torch.Tensor, weight: float) -> torch.Tensor:
    """Add the gradient to what A and B have; the penalty, a scalar. anchored: [out, in] dW*, fisher: [out, in] F,
    both fp32."""
    a, b = layer.lora_A, layer.lora_B
    assert a.grad is not None and b.grad is not None
    drift = delta(a, b, layer.scale) - anchored
    pull = weight * fisher * drift
    a.grad.addmm_(b.t(), pull, alpha=layer.scale)
    b.grad.addmm_(pull, a.t(), alpha=layer.scale)
    return 0.5 * (pull * drift).sum()
