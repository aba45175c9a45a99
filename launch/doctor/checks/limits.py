"""ulimit."""

from launch.doctor.amount import size
from launch.doctor.device import on_card
from launch.doctor.finding import Finding, error, ok, warning
from launch.doctor.known import Missing, known
from launch.doctor.machine import Machine
from learner.journal import SEGMENT_BYTES

MIN_OPEN_FILES = 128
COMFORTABLE_OPEN_FILES = 1024
ADDRESS_BYTES = 16 * 2**30
"""What torch's libraries, threads and file maps reserve in one process, with a margin."""
MIN_PROCESSES = 256


def open_files(machine: Machine) -> Finding:
    """Sockets, segments, libraries."""
    limit = known(machine.limits).open_files
    if limit is None or limit >= COMFORTABLE_OPEN_FILES:
        return ok(f"{limit or 'any number of'} open files a process")
    found, remedy = f"{limit} open files a process", f"ulimit -n {COMFORTABLE_OPEN_FILES}"
    return error(found, remedy) if limit < MIN_OPEN_FILES else warning(found, remedy)


def file_size(machine: Machine) -> Finding:
    """Journal segments and the quantised base."""
    limit = known(machine.limits).file_bytes
    if limit is None:
        return ok("files of any size")
    shape = known(machine.model).shape
    largest = SEGMENT_BYTES if isinstance(shape, Missing) else max(SEGMENT_BYTES, shape.file_bytes)
    found = f"files up to {size(limit)}; the largest of a run has about {size(largest)}"
    return error(found, "ulimit -f unlimited") if limit < largest else ok(found)


def address_space(machine: Machine) -> Finding:
    """Far more is reserved than used."""
    limit = known(machine.limits).address_bytes
    if limit is None:
        return ok("any amount of address space")
    found, remedy = f"{size(limit)} of address space a process", "ulimit -v unlimited; bound memory by a cgroup instead"
    if on_card(machine):
        return error(f"{found}: CUDA reserves more than the card and the machine have together", remedy)
    return warning(found, remedy) if limit < ADDRESS_BYTES else ok(found)


def processes(machine: Machine) -> Finding:
    """Every thread counts, of all programs of this user."""
    limit = known(machine.limits).processes
    if limit is not None and limit < MIN_PROCESSES:
        return warning(f"{limit} processes and threads for this user", f"ulimit -u {4 * MIN_PROCESSES}")
    return ok(f"{limit or 'any number of'} processes and threads")
