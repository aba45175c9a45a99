"""What memory of a card is for, and the phase in which a process has no turn: the words of a plan.

of the base         codes, scales and dense weights of the linears, embedding, head, norms and biases
of one process      adapter, gradients and moments; keys and values of an order and of earlier turns
of a moment         activations wait for a later phase, temporaries do not
around the tensors  context and cuBLAS before the first one, what the allocator has cached, a margin
"""

from dataclasses import dataclass

from launch.plan.memory import Items

NF4, SCALES, WEIGHTS, EMBEDDING, HEAD, REST = "NF4", "scales", "weights", "embedding", "head", "norms and biases"
BASE = (NF4, SCALES, WEIGHTS, EMBEDDING, HEAD, REST)
LORA, GRADIENTS, ADAM = "LoRA", "gradients", "Adam"
KV, TURNS, GRAPHS, ENGINE = "KV", "earlier turns", "CUDA graphs", "vLLM weights"
ACTIVATIONS, TEMPORARIES, TILES = "activations", "temporaries", "head tiles"
CONTEXT, CUBLAS, CACHED, MARGIN = "context", "cuBLAS", "cached", "margin"
OUTSIDE_PYTORCH = {CONTEXT, MARGIN}
OUTSIDE_TENSORS = {*OUTSIDE_PYTORCH, CACHED}
WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that a process takes of a card in a phase."""

    name: str
    """Of the phase."""
    items: Items
    """In tensors, at the moment when they are most."""
    reserved: int
    """What PyTorch's allocator has taken by the end of the phase."""
