"""How each actor behaves, and whether it is shut out for it.

    allowance   a connection costs HANDSHAKE_COST, every message 1 + its bytes / 64 KiB; an actor may spend
                ALLOWANCE_BURST at once, and ALLOWANCE_PER_S for ever. Who runs out is flooding
    refusals    a Refused says that something was wrong with what an actor sent; a faultless one leaves after the first

Whoever overdraws the one, or collects MAX_REFUSALS, is shut out for SHUT_OUT_S. Counted for each key, whatever the
number of connections. Left out on purpose: degrees of punishment, and memory beyond the learner's life.
"""

import threading
import time
from dataclasses import dataclass, field

from protocol.limits import ALLOWANCE_BURST, ALLOWANCE_PER_S, COST_BYTES, MAX_REFUSALS, SHUT_OUT_S


@dataclass(kw_only=True)
class Standing:
    """Of one actor."""

    allowance: float
    """What it may still spend."""
    counted_at: float = field(default_factory=time.monotonic)
    """When that was."""
    refusals: int = 0
    """Since it was last shut out."""
    shut_out_until: float = 0.0
    """0 if it never was."""


class Conduct:
    """All actors. Has one entry for each allowed key at most."""

    def __init__(self, burst: float = ALLOWANCE_BURST) -> None:
        self.burst = burst
        self.lock = threading.Lock()
        self.standings: dict[str, Standing] = {}

    def standing(self, actor_id: str) -> Standing:
        """New for who is new."""
        return self.standings.setdefault(actor_id, Standing(allowance=self.burst))

    def spend(self, actor_id: str, num_bytes: int) -> bool:
        """Charge for a message or a connection, which two threads do; False for the one that shuts the actor out."""
        with self.lock:
            standing, now = self.standing(actor_id), time.monotonic()
            earned = (now - standing.counted_at) * ALLOWANCE_PER_S
            standing.allowance = min(self.burst, standing.allowance + earned) - 1 - num_bytes / COST_BYTES
            standing.counted_at = now
            if standing.allowance < 0:
                self.shut_out(standing)
            return standing.allowance >= 0

    def refused(self, actor_id: str) -> bool:
        """Note that it was told Refused; False for the time that shuts it out."""
        standing = self.standing(actor_id)
        standing.refusals += 1
        patient = standing.refusals < MAX_REFUSALS
        if not patient:
            self.shut_out(standing)
        return patient

    def shut_out(self, standing: Standing) -> None:
        """From now on, for a while; afterwards it begins anew."""
        standing.shut_out_until = time.monotonic() + SHUT_OUT_S
        standing.refusals = 0

    def is_shut_out(self, actor_id: str) -> bool:
        """Whether it has to stay outside. Asked by the thread that answers handshakes, too."""
        standing = self.standings.get(actor_id)
        return standing is not None and time.monotonic() < standing.shut_out_until
