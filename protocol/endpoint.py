"""The local endpoint: an `ipc://` path that both processes compute from the run directory alone.

    {$XDG_RUNTIME_DIR or the temp folder}/tandem-{uid}/{first 16 hex digits of sha256(run directory)}

The folder has mode 0700, because a new socket file is open to all. The socket is not in the run directory, because the
kernel limits its path to 107 bytes. Left out on purpose: abstract sockets, which have no owner.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from protocol.errors import SecurityError

MAX_PATH_BYTES = 100


def local_endpoint(run_dir: Path) -> str:
    """The endpoint of a run; creates the folder of its socket."""
    path = socket_path(run_dir)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise SecurityError(
            f"{path} is longer than the {MAX_PATH_BYTES} bytes a local socket may have; "
            "set XDG_RUNTIME_DIR to a folder with a shorter path."
        )
    make_private(path.parent)
    return f"ipc://{path}"


def socket_path(run_dir: Path) -> Path:
    folder = runtime_dir() / f"tandem-{os.getuid()}"
    return folder / hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


def runtime_dir() -> Path:
    """$XDG_RUNTIME_DIR if it is a folder, else the temp folder."""
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(session if os.path.isdir(session) else tempfile.gettempdir())


def make_private(folder: Path, variable: str = "XDG_RUNTIME_DIR") -> None:
    """Create the folder if it is missing. SecurityError unless it is ours and closed to others. variable: of the
    environment, which chooses another place."""
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(f"{folder} is not a folder of this user; set {variable} to a folder only you can write to.")
    if stat.S_IMODE(found.st_mode) != 0o700:
        raise SecurityError(f"{folder} does not have mode 0700; run `chmod 700 {folder}`.")
