"""The diagonal Fisher information of the adapted weights, from completions of the policy itself.

    F_W = 1/N sum_i (d log p(y_i | x_i) / d dW)^2,    y_i ~ p(. | x_i),    dW = s B A

Squared for each completion before averaging: the square of a mean gradient is not a Fisher. Because these are the
policy's own, this is the true Fisher, not the empirical one. It is taken in dW and not in A and B, since (R A, B R^-1)
is the same policy with other gradients; so it does not vanish at B = 0 either.

A layer's gradient d/d dW is the sum of dy x^T over all rows that passed it, so the hooks below need its input and the
gradient of its output, and no tensor of the base requires a gradient. Left out on purpose: several completions in one
pass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shared.model.layers.lora import Adapter

Weights = dict[str, torch.Tensor]
"""Layer -> [out, in]."""


@contextmanager
def weight_gradients(adapter: Adapter) -> Iterator[Weights]:
    """Inside, every backward pass adds to these fp32 gradients of dW."""
    found: Weights = {}

    def watched(name: str) -> Callable[..., None]:
        def after(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if output.requires_grad:
                rows = inputs[0].detach().flatten(0, -2).float()
                output.register_hook(lambda grad: add(name, grad.flatten(0, -2).float().t() @ rows))

        return after

    def add(name: str, gradient: torch.Tensor) -> None:
        found[name] = found[name] + gradient if name in found else gradient

    handles = [layer.register_forward_hook(watched(name)) for name, layer in adapter.layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def diagonal_fisher(adapter: Adapter, log_likelihoods: Iterable[torch.Tensor]) -> Weights:
    """One log p(y | x) after the other; fp32 on the CPU. Also adds to the gradients of A and B."""
    total: Weights = {}
    count = 0
    with weight_gradients(adapter) as gradients:
        for log_likelihood in log_likelihoods:
            gradients.clear()
            log_likelihood.backward()
            for name, gradient in gradients.items():
                square = gradient.square_().cpu()
                total[name] = total[name].add_(square) if name in total else square
            count += 1
    return {name: square.div_(count) for name, square in total.items()}


def normalised(fisher: Mapping[str, torch.Tensor]) -> Weights:
    """Scaled so that the mean over all weights is 1: only then does a penalty's weight mean the same twice."""
    mean = sum(float(f.sum(dtype=torch.float64)) for f in fisher.values()) / sum(f.numel() for f in fisher.values())
    return {name: f / mean if mean else f for name, f in fisher.items()}


def merged(older: Mapping[str, torch.Tensor], newer: Mapping[str, torch.Tensor], decay: float) -> Weights:
    """decay F + F_k: one matrix for each layer, for any number of stages."""
    return {name: newer[name] + decay * older[name] if name in older else newer[name] for name in newer}
