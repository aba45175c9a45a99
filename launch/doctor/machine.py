"""Everything that the checks look at: a configuration, and the facts of this machine."""

from dataclasses import dataclass
from pathlib import Path

from launch.doctor.facts.card import Cards
from launch.doctor.facts.cgroup import Cgroup
from launch.doctor.facts.clock import Clock
from launch.doctor.facts.disk import Disk
from launch.doctor.facts.hub import Hub
from launch.doctor.facts.limits import Limits
from launch.doctor.facts.link import Link
from launch.doctor.facts.memory import Memory
from launch.doctor.facts.model import Model
from launch.doctor.facts.processor import Processor
from launch.doctor.facts.reward import Reward
from launch.doctor.facts.run_folder import RunFolder
from launch.doctor.facts.software import Software
from launch.doctor.facts.torch_build import Driver, RoundTrip, TorchBuild
from launch.doctor.known import Missing
from shared.config import Config


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts, or why there are none."""

    config: Config
    """What is to be run."""
    run_dir: Path
    """Where."""
    software: Software | Missing
    """Versions and windows."""
    driver: Driver | Missing
    """The card's driver."""
    torch: TorchBuild | Missing
    """PyTorch; Missing if it does not load."""
    bitsandbytes: RoundTrip | Missing
    """NF4 there and back; Missing if it does not work."""
    cards: Cards | Missing
    """What nvidia-smi lists."""
    processor: Processor | Missing
    """Cores and vector units."""
    cgroup: Cgroup | Missing
    """A container's limits."""
    memory: Memory | Missing
    """RAM, swap, shared memory."""
    disk: Disk | Missing
    """Under the run directory."""
    limits: Limits | Missing
    """ulimit."""
    link: Link | Missing
    """The wire's address."""
    clock: Clock | Missing
    """Date and monotonic clock."""
    run: RunFolder | Missing
    """The run directory, where it exists."""
    model: Model | Missing
    """The model as far as it is here."""
    hub: Hub | Missing
    """What the hub says about one that is not here."""
    reward: Reward | Missing
    """The user's reward function."""
