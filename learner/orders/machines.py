"""Which actor of a machine gets the adapter of each version, and passes it on to the others (actor/passed_on.py).

    whole     the first that needs a version; one that asks again; one that is idle while the bringer is busy
    without   the others: the bringer was idle when it was sent the adapter, or has read it, or they are busy themselves

An actor reads messages between two orders only, so an idle one would wait for the order of a busy one. A bringer that
leaves, or that shows that it read everything and asks again, brings nothing. Actors that have an empty Policy of it
wait for a minute at most, and then ask. Left out: telling them at once, which is worth it for larger adapters only.
"""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Bringer:
    """An actor that was sent a version for its machine."""

    address: bytes
    """Of the peer."""
    reads_soon: bool
    """Whether it was idle, or has read the version since."""


class Machines:
    """All machines whose actors pass adapters on."""

    def __init__(self) -> None:
        self.bringers: dict[int, dict[str, Bringer]] = {}
        """Version -> machine -> who passes it on."""

    def gets_adapter(self, machine: str | None, version: int, address: bytes, *, is_idle: bool) -> bool:
        """Whether this actor is sent the adapter. It then passes it on, if its machine has a name."""
        if machine is None:
            return True
        bringers = self.bringers.setdefault(version, {})
        known = bringers.get(machine)
        if known and known.address != address and (known.reads_soon or not is_idle):
            return False
        bringers[machine] = Bringer(address=address, reads_soon=is_idle)
        return True

    def has_read(self, machine: str | None, version: int, address: bytes) -> None:
        """It has filled an order that names this version."""
        known = self.bringers.get(version, {}).get(machine or "")
        if known and known.address == address:
            known.reads_soon = True

    def forget(self, machine: str | None, address: bytes) -> None:
        """It brings nothing any more."""
        for bringers in self.bringers.values():
            if machine in bringers and bringers[machine].address == address:
                del bringers[machine]

    def forget_before(self, version: int) -> None:
        """No order names an earlier version."""
        self.bringers = {v: bringers for v, bringers in self.bringers.items() if v >= version}
