"""Whether a process has been stopped (SIGSTOP): it lives, and does nothing."""

import contextlib
import os
import sys
from pathlib import Path


def is_stopped(pid: int) -> bool:
    """As the kernel shows it on Linux; elsewhere as a parent is told about its child."""
    if sys.platform == "linux":
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
