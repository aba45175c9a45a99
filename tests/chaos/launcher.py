"""`python -m tests.chaos.launcher DIR`: the real supervisor over a run, with children that are forked.

Exit codes and the error line are those of `python -m launch resume`; only the display is left out, and the pauses are
short, so that a start and end of a run takes a second.
"""

import sys
from pathlib import Path
from secrets import token_hex

from launch.supervisor.restarts import SupervisorLimits
from launch.supervisor.supervise import Supervisor
from launch.supervisor.topology import ProcessFailed, topology
from shared.config.load import config_from_json
from shared.errors import UserError
from shared.run.run_dir import RunDir
from tests.chaos.forking import LoadedStarter

LIMITS = SupervisorLimits(tick_s=0.02, grace_s=10.0, restarts=1000, pause_s=0.0, after_exit_s=10.0)


class Silent:
    """A screen that prints notes alone."""

    def tick(self) -> int:
        """No display, so no step is ever seen."""
        return 0

    def note(self, text: str) -> None:
        """Something the user should know."""
        print(text, flush=True)

    def log_line(self, name: str, line: str) -> None:
        """They are in the logs."""


def main(path: Path) -> int:
    """Until the run ends."""
    try:
        config = config_from_json(RunDir.open(path).config.read_bytes())
        Supervisor(topology(path, config, meeting=token_hex(8)), Silent(), LoadedStarter(), LIMITS).run()
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 2
    except ProcessFailed as error:
        print(f"failed: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
