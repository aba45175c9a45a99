"""The edge of a process: where errors become an exit code.

    0  done        2  something a user can mend, one sentence on stderr        1  a crash, with its traceback

Also where logging is set up and the process is tied to its parent's life.
"""

import logging
import sys
from collections.abc import Callable

from protocol.errors import ProtocolError
from shared.errors import UserError
from shared.lifeline import die_with_parent


def run_process(name: str, body: Callable[[], None]) -> int:
    """Run a process's body; returns its exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s", stream=sys.stderr)
    try:
        body()
    except (UserError, ProtocolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
