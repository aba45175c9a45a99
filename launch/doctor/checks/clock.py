"""Time."""

from datetime import UTC, datetime

from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.known import known
from launch.doctor.machine import Machine

EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""This program is younger."""
LATEST = datetime(2060, 1, 1, tzinfo=UTC)
MAX_DRIFT_S = 1.0
NTP = "set the clock (timedatectl set-ntp true)"


def date(machine: Machine) -> Finding:
    """Not absurd: certificates of a hub are refused on a wrong date."""
    now = datetime.fromtimestamp(known(machine.clock).now, UTC)
    if not EARLIEST <= now <= LATEST:
        return warning(f"it is {now:%Y-%m-%d} here; downloads refuse certificates on a wrong date", NTP)
    return ok(f"{now:%Y-%m-%d %H:%M} UTC")


def steady(machine: Machine) -> Finding:
    """Both clocks went on, and together."""
    clock = known(machine.clock)
    if clock.monotonic_s <= 0:
        return error(
            "the monotonic clock stands still, and every deadline depends on it",
            "restart the machine; in a virtual machine choose another clock source",
        )
    drift = clock.wall_s - clock.monotonic_s
    if abs(drift) > MAX_DRIFT_S:
        return warning(f"the date jumped by {drift:+.1f} s within {clock.monotonic_s:.1f} s", NTP)
    return ok("date and monotonic clock go together")
