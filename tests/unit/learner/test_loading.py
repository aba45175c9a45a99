"""A learner loads in a turn of its own where both bases together may be too large."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from learner.session import loading
from shared.process.lease import Turn, nothing

CARD = torch.device("cuda", 0)


class Turns:
    """A lease that notes its turns."""

    def __init__(self) -> None:
        self.is_held = False
        self.count = 0

    @contextmanager
    def hold(self, role: str, meanwhile: Callable[[], None] = nothing) -> Iterator[Turn]:
        self.is_held, self.count = True, self.count + 1
        try:
            yield Turn(waited_s=0.0)
        finally:
            self.is_held = False


def test_on_a_card_it_is_a_turn() -> None:
    turns = Turns()
    with loading(turns, CARD):
        assert turns.is_held
    assert not turns.is_held


def test_on_a_cpu_both_load_at_the_same_time() -> None:
    turns = Turns()
    with loading(turns, torch.device("cpu")):
        pass
    assert turns.count == 0
