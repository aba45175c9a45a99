"""Repeats a step of fixed shapes: as a CUDA graph where there is a card for it, else as it is.

A step of a model of 28 layers is more than a thousand launches, which take the host longer than the card. A graph is
all of them in one. It holds addresses and shapes, so there is one for each shape of a step, at most `MOST` of them in
one pool of memory: nothing that a step leaves behind lies in the pool, so their order does not matter.

    first step of a shape     as it is, on the stream of the graphs: libraries load and allocate what they need
    second                    captured, then replayed
    all others                replayed

A card or a model whose step cannot be captured runs it as it is; the log says why, once. Running out of memory is an
error in both cases, for the engine to handle.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.errors import in_words

MOST = 16

log = logging.getLogger(__name__)

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a graph is for."""

    rows: int
    """In use."""
    width: int
    """Columns of a prompt."""
    columns: int
    """Columns of completions that are read."""
    temperature: float
    """It is a constant of the step."""


class Capture(Protocol):
    """What makes graphs."""

    def warm(self, step: Step) -> None:
        """Run it where it will be captured."""
        ...

    def graph(self, step: Step) -> Step:
        """Record it without running it; the result runs it."""
        ...


class CudaGraphs:
    """Graphs of one card."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """stream: of an engine. cuBLAS keeps 32 MiB for each one that it has seen, until the process ends."""
        self.stream = stream
        self.pool = torch.cuda.graph_pool_handle()

    def warm(self, step: Step) -> None:
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            step()
        main.wait_stream(self.stream)

    def graph(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Other threads of an actor do not touch the card; an error of theirs must not end the capture.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class Replay:
    """The graphs of one set of buffers."""

    def __init__(self, capture: Callable[[], Capture] | None) -> None:
        """capture: made again for other buffers; None runs every step as it is."""
        self.capture = capture
        self.forget()

    def forget(self) -> None:
        """All graphs and their memory, when the buffers are given up."""
        self.maker: Capture | None = None
        self.warm: set[StepShape] = set()
        self.graphs = OrderedDict[StepShape, Step]()

    def __call__(self, shape: StepShape, step: Step) -> None:
        if self.capture is None:
            step()
            return
        self.maker = self.maker or self.capture()
        if shape not in self.warm:
            self.warm.add(shape)
            self.maker.warm(step)
            return
        if shape not in self.graphs:
            self.add(shape, step, self.maker)
        self.graphs.get(shape, step)()

    def add(self, shape: StepShape, step: Step, maker: Capture) -> None:
        """Capture the step, unless that fails."""
        if len(self.graphs) == MOST:
            self.graphs.popitem(last=False)
        try:
            self.graphs[shape] = maker.graph(step)
        except RuntimeError as error:
            # The end of a capture may fail as well, and so hide why the capture did.
            if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            log.warning("decodes without CUDA graphs: a step cannot be captured (%s)", in_words(error))
            self.capture = None
