"""The local endpoint: an `ipc://` path that both processes compute from the run directory alone.

    {$TMPDIR or /tmp}/tandem-{uid}/{first 16 hex digits of sha256(run directory)}

The folder has mode 0700, because a new socket file is open to all. The socket is not in the run directory, because the
kernel limits its path to 107 bytes. Nor is it in $XDG_RUNTIME_DIR: that is removed at the last logout of the user,
while a run under nohup or tmux goes on, and after `su` it is another user's. What cleans /tmp of old files leaves
sockets in use, and their folders, alone. Left out on purpose: abstract sockets, which have no owner.
"""

import hashlib
import os
import stat
from pathlib import Path

from protocol.errors import SecurityError

MAX_PATH_BYTES = 100


def local_endpoint(run_dir: Path) -> str:
    """The endpoint of a run; creates the folder of its socket."""
    path = socket_path(run_dir)
    make_private(path.parent)
    return f"ipc://{path}"


def socket_path(run_dir: Path) -> Path:
    """In /tmp where the path of $TMPDIR is too long for a socket."""
    path = user_folder() / hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return path if len(os.fsencode(path)) <= MAX_PATH_BYTES else Path("/tmp") / path.parent.name / path.name


def user_folder() -> Path:
    """What the processes of this user share, in $TMPDIR if it is a folder, else in /tmp."""
    # Not `tempfile.gettempdir`: it chooses another folder when the disk is full, where an actor waits for nobody.
    temp = os.environ.get("TMPDIR", "")
    return Path(temp if os.path.isdir(temp) else "/tmp") / f"tandem-{os.getuid()}"


def make_private(folder: Path, variable: str = "TMPDIR") -> None:
    """Create the folder if it is missing. SecurityError unless it is ours and closed to others. variable: of the
    environment, which chooses another place."""
    if not os.path.lexists(folder):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SecurityError(
                f"{folder} cannot be made ({error.strerror}); set {variable} to a folder you can write to."
            ) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SecurityError(f"{folder} is not a folder of this user; set {variable} to a folder only you can write to.")
    # A folder below one with the setgid bit inherits that; it opens nothing.
    if found.st_mode & 0o777 != 0o700:
        raise SecurityError(f"{folder} does not have mode 0700; run `chmod 700 {folder}`.")
