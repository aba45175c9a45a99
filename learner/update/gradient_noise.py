"""How noisy the gradient of a step is, from the gradients of its groups (McCandlish et al., arXiv 1812.06162).

    G        = sum_j g_j                                g_j: what group j adds to the gradient; n groups were sampled
    spread   = n / (n - 1) * (n sum_j |g_j|^2 - |G|^2)  unbiased trace of the covariance of one group's n g_j
    signal   = |G|^2 - spread / n                       unbiased square of the true gradient's norm; may be negative
    noise scale = spread / signal                       the number of groups at which the two are even

That is the paper's estimate from two batch sizes with the small one a single group. A group that teaches nothing was
sampled too and adds nothing: it is one of the n. The loss's divisor (all response tokens) is taken as given, though it
varies a little with the groups. No extra pass: the groups' micro-batches are computed one group after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Of one step, before clipping."""

    spread: float
    """Variance of one group's gradient, summed over all parameters."""
    signal: float
    """|true gradient|^2."""


class GroupGradients:
    """Takes the gradient of one group after the other, and gives back their sum."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], norm: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> None:
        """norm: of the whole gradient, from that of these parameters."""
        self.parameters = parameters
        self.norm = norm
        self.total: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        """|g_j|"""

    def take(self) -> None:
        """The gradient in the parameters is one group's."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.norms.append(self.norm(gradients))
        if self.total:
            for total, gradient in zip(self.total, gradients, strict=True):
                total += gradient
        else:
            self.total = [gradient.clone() for gradient in gradients]

    def give_back(self, sampled: int) -> GradientNoise:
        """The sum into the parameters; the noise of `sampled` groups, two or more."""
        for parameter, gradient in zip(self.parameters, self.total, strict=True):
            parameter.grad = gradient
        squares = sum(norm**2 for norm in torch.stack(self.norms).tolist())
        return noise_of(squares, float(self.norm(self.total)) ** 2, sampled)


def noise_of(squares: float, whole: float, sampled: int) -> GradientNoise:
    spread = sampled / (sampled - 1) * (sampled * squares - whole)
    return GradientNoise(spread=spread, signal=whole - spread / sampled)
