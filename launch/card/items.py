"""What memory of a card is for, and the phase in which a process has no turn: the words of a plan.

of the base         codes, scales and dense weights of the linears, embedding, head, norms and biases
of one process      adapter, gradients and moments; keys and values of an order and of earlier turns
of a moment         activations wait for a later phase, temporaries do not
around the tensors  context and cuBLAS before the first one, what the allocator has cached, a margin
"""

NF4, SCALES, WEIGHTS, EMBEDDING, HEAD, REST = "NF4", "scales", "weights", "embedding", "head", "norms and biases"
BASE = (NF4, SCALES, WEIGHTS, EMBEDDING, HEAD, REST)
LORA, GRADIENTS, ADAM = "LoRA", "gradients", "Adam"
KV, TURNS, GRAPHS, ENGINE = "KV", "earlier turns", "CUDA graphs", "vLLM weights"
ACTIVATIONS, TEMPORARIES, TILES = "activations", "temporaries", "head tiles"
CONTEXT, CUBLAS, CACHED, MARGIN = "context", "cuBLAS", "cached", "margin"
OUTSIDE_PYTORCH = {CONTEXT, MARGIN}
OUTSIDE_TENSORS = {*OUTSIDE_PYTORCH, CACHED}
WAITING = "waiting"
