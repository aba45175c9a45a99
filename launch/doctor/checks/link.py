"""The wire's address."""

import os

from launch.doctor.finding import Finding, error, note, ok
from launch.doctor.known import Missing, known
from launch.doctor.machine import Machine
from protocol.endpoint import MAX_PATH_BYTES


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


def socket_path(machine: Machine) -> Finding:
    """Short enough for the kernel, which takes 107 bytes."""
    path = known(machine.link).socket_path
    length = len(os.fsencode(path))
    found = f"the local socket {path} has {length} bytes of at most {MAX_PATH_BYTES}"
    if known(machine.link).address == "ipc" and length > MAX_PATH_BYTES:
        return error(found, "set XDG_RUNTIME_DIR to a folder with a shorter path")
    return ok(found)


def socket_folder(machine: Machine) -> Finding:
    """Ours alone."""
    trouble = known(machine.link).folder_trouble
    if trouble:
        found, _, remedy = trouble.partition("; ")
        return error(found, remedy.rstrip("."))
    return ok("the folder of local sockets is closed to others, or not needed")
