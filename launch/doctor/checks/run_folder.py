"""The run directory, where it exists."""

from launch.doctor.finding import Finding, error, note, ok, warning
from launch.doctor.known import known
from launch.doctor.machine import Machine
from shared.run_dir import RunDir


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
