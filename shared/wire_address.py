"""Which address a config means, for either side."""

from pathlib import Path

from protocol.endpoint import local_endpoint
from shared.config import LinkConfig


def dial_address(link: LinkConfig, run_dir: Path) -> str:
    """What an actor connects to."""
    return local_endpoint(run_dir) if link.endpoint == "ipc" else link.endpoint


def bind_address(link: LinkConfig, run_dir: Path) -> str:
    """What the learner listens on."""
    return link.bind or dial_address(link, run_dir)
