"""The disk under the run directory: room, speed, and what a run relies on; the directory itself; the wire's address."""

from launch.doctor.estimate import adapter_bytes, anchor_bytes
from launch.doctor.finding import Finding, Missing, error, known, note, ok, size, warning
from launch.doctor.machine import Machine
from learner.reports.disk_need import bytes_needed
from shared.run.run_dir import MIN_FREE_BYTES, RunDir

MIN_FREE_FILES = 1000
SLOW_SYNC_S = 0.05
VERY_SLOW_SYNC_S = 0.5
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
    rank = machine.config.lora.rank
    adapter, anchor = adapter_bytes(rank, shape), anchor_bytes(rank, machine.config.curriculum, shape)
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


def directory(machine: Machine) -> Finding:
    """Free for a run, or one."""
    state = known(machine.run).state
    if state == "other":
        return error(f"{machine.run_dir} is not empty and holds no run", "choose another --out, or empty it")
    if state == "run":
        return note(f"{machine.run_dir} holds a run", "go on with it by `resume`; for a new one choose another --out")
    return ok(f"{machine.run_dir} is free")


def keys(machine: Machine) -> Finding:
    """Whole, and closed to others."""
    run = known(machine.run)
    folder = machine.run_dir / "keys"
    if run.keys_trouble:
        found, _, remedy = run.keys_trouble.partition("; ")
        return error(found, remedy.rstrip("."))
    if run.keys_mode is not None and run.keys_mode & 0o077:
        return error(f"{folder} is open to others (mode {run.keys_mode:04o})", f"chmod 700 {folder}")
    return ok("keys are closed to others" if run.state == "run" else "keys are made with the run")


def lock(machine: Machine) -> Finding:
    """Nobody is writing this run."""
    holder = known(machine.run).lock_holder
    if holder:
        return error(f"{machine.run_dir} is in use by {holder}", "wait until it ends, or stop it first")
    return ok("no learner is at work in it")


def lease(machine: Machine) -> Finding:
    """No stray process computes in it."""
    run = known(machine.run)
    if run.lease_holder and not run.lock_holder:
        holder = "a process" if run.lease_holder == "another process" else run.lease_holder
        return warning(
            f"no learner is up, and still {holder} holds the lease of {machine.run_dir}",
            f"end it: a new run would wait for it (fuser {RunDir(machine.run_dir).lease} names it)",
        )
    return ok("no stray process holds the lease")


def address(machine: Machine) -> Finding:
    """The configured tcp endpoint can be bound."""
    link = known(machine.link)
    if link.address == "ipc":
        return ok("a local socket, no port")
    found = f"{link.address} cannot be bound: {link.trouble}"
    if link.busy and not isinstance(machine.run, Missing) and machine.run.lock_holder:
        return note(f"{found}; this run's learner is up")
    if link.busy:
        return error(found, "end the program that has it (ss -ltnp shows it), or choose another port")
    if link.trouble:
        return error(found, "set link.bind to an address of this machine, such as tcp://0.0.0.0:5757")
    return ok(f"{link.address} can be bound")
