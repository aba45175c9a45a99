"""Elastic weight consolidation of one layer (Kirkpatrick et al. 2017), on the weights that its adapter makes.

    penalty = lambda / 2 sum F (dW - dW*)^2,    dW = s B A
    P = d penalty / d dW = lambda F (dW - dW*)
    d penalty / dA = s B^T P,    d penalty / dB = s P A^T

Both depend on A and B only through their product: another factorisation of the same policy has the same penalty.
"""

import torch

from shared.model.layers.lora import LoraLinear


def delta(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[R, in], [out, R] -> [out, in] dW"""
    return scale * (b @ a)


@torch.no_grad()
def add_penalty(
    layer: LoraLinear,
    anchored: torch.Tensor,
    fisher: torch.Tensor,
    weight: float,
    a_grad: torch.Tensor | None,
    b_grad: torch.Tensor | None,
) -> torch.Tensor:
    """Add the gradient to that of A and B, where this process has it; the penalty, a scalar. anchored: [out, in] dW*,
    fisher: [out, in] F, both fp32."""
    a, b = layer.lora_A, layer.lora_B
    drift = delta(a, b, layer.scale) - anchored
    pull = weight * fisher * drift
    if a_grad is not None:
        a_grad.addmm_(b.t().to(a_grad.device), pull.to(a_grad.device), alpha=layer.scale)
    if b_grad is not None:
        b_grad.addmm_(pull.to(b_grad.device), a.t().to(b_grad.device), alpha=layer.scale)
    return 0.5 * (pull * drift).sum()
