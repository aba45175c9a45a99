"""Triton kernels beside the PyTorch code that they may replace on a card, and the choice between the two."""
