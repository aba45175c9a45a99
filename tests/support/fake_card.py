"""A card that is a few numbers: what its driver says, and what processes take and give back."""

from shared.process.card import CardMemory

GIB = 2**30


class FakeCard:
    """The memory that processes share."""

    def __init__(self, total: int = 8 * GIB) -> None:
        self.total = total
        self.used = 0


class FakeDriver:
    """What one process does on it. PyTorch keeps what was freed, until it is released."""

    def __init__(self, card: FakeCard | None = None) -> None:
        self.card = card or FakeCard()
        self.allocated = self.reserved = 0
        self.most = CardMemory()
        self.asked = 0
        self.releases = 0

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.grow(max(0, self.allocated - self.reserved))
        self.most = CardMemory(
            allocated=max(self.most.allocated, self.allocated), reserved=max(self.most.reserved, self.reserved)
        )

    def free(self, num_bytes: int) -> None:
        """Back to PyTorch, not to the driver."""
        self.allocated -= num_bytes

    def grow(self, num_bytes: int) -> None:
        self.reserved += num_bytes
        self.card.used += num_bytes

    def free_bytes(self) -> int:
        self.asked += 1
        return self.card.total - self.card.used

    def total_bytes(self) -> int:
        return self.card.total

    def peak(self) -> CardMemory:
        found = CardMemory(allocated=self.most.allocated, reserved=self.most.reserved, driver=self.card.used)
        self.most = CardMemory(allocated=self.allocated, reserved=self.reserved)
        return found

    def release(self) -> None:
        self.releases += 1
        self.grow(self.allocated - self.reserved)
        self.most = CardMemory(allocated=self.allocated, reserved=self.reserved)
