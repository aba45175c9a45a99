"""The disk under the run directory: room, speed, and what a run relies on."""

from launch.doctor.amount import size
from launch.doctor.estimate import adapter_bytes, anchor_bytes
from launch.doctor.finding import Finding, error, note, ok, warning
from launch.doctor.known import Missing, known
from launch.doctor.machine import Machine
from learner.disk_need import bytes_needed
from shared.run_dir import MIN_FREE_BYTES

MIN_FREE_FILES = 1000
SLOW_SYNC_S = 0.05
VERY_SLOW_SYNC_S = 0.5
MAX_SKEW_S = 2.0
VOLATILE = {"tmpfs", "ramfs"}
SHARED = {"nfs", "nfs4", "cifs", "smb3", "9p", "drvfs", "virtiofs", "fuse.sshfs", "lustre", "ceph", "glusterfs", "afs"}
"""Kept by another machine, or by Windows."""
INSIDE = {"overlay", "aufs"}
ELSEWHERE = "choose an --out on a disk of this machine"


def writable(machine: Machine) -> Finding:
    """Files can be made there."""
    disk = known(machine.disk)
    place = disk.folder.existing
    if disk.trouble:
        return error(f"{place} cannot be written to: {disk.trouble}", f"choose another --out; see ls -ld {place}")
    return ok(f"{place} can be written to")


def space(machine: Machine) -> Finding:
    """Room for journal, checkpoints and logs."""
    disk, needed = known(machine.disk), needed_bytes(machine)
    found = f"{size(disk.folder.free)} free under {disk.folder.existing}, a run may need {size(needed)}"
    remedy = "free some space on that disk, choose another --out, or use a smaller checkpoint.keep or fewer run.steps"
    if disk.free_files is not None and disk.free_files < MIN_FREE_FILES:
        return error(f"{disk.free_files} more files fit under {disk.folder.existing} (inodes)", remedy)
    if disk.folder.free >= needed:
        return ok(found)
    if known(machine.run).state == "run":
        return warning(f"{found} (less what this one has written already)", remedy)
    return error(found, remedy)


def needed_bytes(machine: Machine) -> int:
    """As a learner counts it, once the model is here and so the size of its adapter is known."""
    shape = known(machine.model).shape
    if isinstance(shape, Missing):
        return max(MIN_FREE_BYTES, bytes_needed(machine.config, 0, first_step=0))
    adapter, anchor = adapter_bytes(machine.config, shape), anchor_bytes(machine.config, shape)
    return max(MIN_FREE_BYTES, bytes_needed(machine.config, adapter, first_step=0, anchor_bytes=anchor))


def speed(machine: Machine) -> Finding:
    """A sync is waited for before a group is acknowledged."""
    seconds = known(machine.disk).sync_s
    found = f"a 4 KiB write with fsync takes {seconds * 1000:.3g} ms"
    why = "the learner waits for one before it acknowledges an answer, and for several a checkpoint"
    if seconds > VERY_SLOW_SYNC_S:
        return warning(f"{found}: {why}", f"{ELSEWHERE}, a local SSD if there is one")
    if seconds > SLOW_SYNC_S:
        return note(f"{found}: {why}", f"{ELSEWHERE}, a local SSD if there is one")
    return ok(found)


def file_system(machine: Machine) -> Finding:
    """One that keeps what it is given."""
    kind = known(machine.disk).kind
    if kind in VOLATILE:
        return warning(f"{kind}: the run lies in memory and is gone after a power cut or a restart", ELSEWHERE)
    if kind in SHARED or kind.startswith("fuse."):
        return warning(
            f"{kind}: kept by another system, so locks hold on this machine only and a sync may be slow",
            f"{ELSEWHERE}; never start a second learner on this run from elsewhere",
        )
    if kind in INSIDE:
        return note(f"{kind}: the run lies inside the container and goes with it", "mount a volume and use it as --out")
    return ok(kind)


def modes(machine: Machine) -> Finding:
    """Key files can be closed to others."""
    if not known(machine.disk).keeps_modes:
        return error(
            "a file made for its owner alone can be read by others there, and such keys are refused",
            f"{ELSEWHERE} (not on a Windows or FAT drive)",
        )
    return ok("files keep their permissions")


def locks(machine: Machine) -> Finding:
    """Two learners can be kept apart."""
    if not known(machine.disk).keeps_locks:
        return error("flock does not exclude there, so two learners could write one run", ELSEWHERE)
    return ok("locks exclude")


def clock(machine: Machine) -> Finding:
    """The file system's time is ours."""
    seconds = known(machine.disk).ahead_s
    if abs(seconds) > MAX_SKEW_S:
        return warning(
            f"a new file's time is {seconds:+.1f} s off this machine's clock",
            "set both clocks by NTP: times in logs and files do not fit together",
        )
    return ok("new files have this machine's time")
