"""Checks of what a run loads and where it writes: libraries, the disk, the run directory, the learner's address, the
model, the task files, the reward function."""

from packaging.specifiers import SpecifierSet

from launch.doctor.disk import Folder
from launch.doctor.finding import Finding, Missing, error, known, note, ok, warning
from launch.doctor.machine import Machine, cached_base_bytes
from launch.doctor.model import weight_bytes
from launch.plan.memory import size
from launch.plan.shape import adapter_bytes, anchor_bytes
from learner.reports.disk_need import bytes_needed
from shared.config.named_rewards import SUM_DECIDES, name_one, sum_decides
from shared.run.run_dir import MIN_FREE_BYTES, RunDir

INSTALL = "run ./launch/run.sh, which makes .venv with the allowed versions, and use .venv/bin/python"
AGAIN = "the machine may be busy: run doctor again"
MAX_KERNEL_GAP = 1e-5
"""A card may fuse a product and a sum that the formula rounds twice."""
MAX_ROUND_TRIP = 0.2
"""Relative to a block's largest value. NF4's widest gap is 0.304: half of it, and a margin for the quantised scales."""
MIN_FREE_FILES = 1000
SLOW_SYNC_S = 0.05
VERY_SLOW_SYNC_S = 0.5
IN_MEMORY = {"tmpfs", "ramfs"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "drvfs", "virtiofs", "fuse.sshfs", "lustre", "ceph", "glusterfs", "afs"}
"""Stored by another machine, or by Windows."""
IN_CONTAINER = {"overlay", "aufs"}
OTHER_OUT = "choose an --out on a disk of this machine"
FETCH = "fetch it where there is a network (hf download {path}), or give a local folder as model.path"


def python(machine: Machine) -> Finding:
    software = known(machine.software)
    found = f"Python {software.python}, expected {software.python_versions}"
    if software.python not in SpecifierSet(software.python_versions, prereleases=True):
        return error(found, "install a newer Python and make .venv again: PYTHON=/path/to/python ./launch/run.sh")
    if not software.waits_steadily:
        # The timer of shared/process/watchdog.py is such a wait.
        return note(
            f"{found}; its waits follow the clock: a machine that wakes, or a clock that is set, may end a run",
            "keep the machine awake, or continue the run with `resume`",
        )
    return ok(found)


def libraries(machine: Machine) -> Finding:
    found = known(machine.software).libraries
    missing = [f"{library.name} ({library.versions})" for library in found if library.installed is None]
    outside = [
        f"{library.name} {library.installed} (expected {library.versions})"
        for library in found
        if library.installed is not None and library.installed not in SpecifierSet(library.versions, prereleases=True)
    ]
    if missing:
        return error(f"not installed: {', '.join(missing)}", INSTALL)
    if outside:
        return warning(f"not an allowed version: {', '.join(outside)}", INSTALL)
    return ok(f"all {len(found)} have an allowed version")


def torch(machine: Machine) -> Finding:
    if isinstance(machine.torch, Missing):
        if machine.torch.timed_out:
            return unfinished("PyTorch", machine.torch)
        return error(f"PyTorch does not load: {machine.torch.reason}", f"try `python -c 'import torch'`; {INSTALL}")
    cuda = machine.torch.cuda_build
    return ok(f"PyTorch {machine.torch.version} loads, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}")


def unfinished(what: str, missing: Missing) -> Finding:
    return note(f"{what} was not checked: {missing.reason}", AGAIN)


def bitsandbytes(machine: Machine) -> Finding:
    """Whether it quantises to NF4 as the formula says, and its kernels agree with the formula."""
    unused = machine.config.model.quantization == "none"
    if isinstance(machine.bitsandbytes, Missing):
        if machine.bitsandbytes.timed_out:
            return unfinished("bitsandbytes", machine.bitsandbytes)
        found = f"bitsandbytes does not work: {machine.bitsandbytes.reason}"
        if unused:
            return note(f"{found} (model.quantization is 'none', so it is not needed)")
        return error(found, f"{INSTALL}; or train without it: --set model.quantization=none")
    library = machine.bitsandbytes
    name = f"bitsandbytes {library.version} on {library.device}"
    # Written so that NaN fails.
    if not library.round_trip <= MAX_ROUND_TRIP:
        return error(
            f"{name} quantises wrongly: an error of {library.round_trip:.3g} of a block's largest value", INSTALL
        )
    if not library.kernel_gap <= MAX_KERNEL_GAP:
        return error(f"{name} has kernels that differ from the NF4 formula by {library.kernel_gap:.3g}", INSTALL)
    return ok(f"{name} quantises and dequantises NF4 correctly")


def writable(machine: Machine) -> Finding:
    disk = known(machine.disk)
    place = disk.folder.existing
    if disk.trouble:
        return error(f"{place} cannot be written to: {disk.trouble}", f"choose another --out; see ls -ld {place}")
    return ok(f"{place} can be written to")


def space(machine: Machine) -> Finding:
    disk, needed = known(machine.disk), needed_bytes(machine)
    found = f"{size(disk.folder.free)} free under {disk.folder.existing}, a run may need {size(needed)}"
    remedy = "free some space on that disk, choose another --out, or use a smaller checkpoint.keep or fewer run.steps"
    if disk.free_files is not None and disk.free_files < MIN_FREE_FILES:
        return error(f"{disk.free_files} more files fit under {disk.folder.existing} (inodes)", remedy)
    if disk.folder.free >= needed:
        return ok(found)
    if known(machine.run).state == "run":
        return warning(f"{found} (minus what this one has written already)", remedy)
    return error(found, remedy)


def needed_bytes(machine: Machine) -> int:
    """What the learner will ask for. The size of the adapter is known once the model is on this machine."""
    shape = known(machine.model).shape
    if isinstance(shape, Missing):
        return max(MIN_FREE_BYTES, bytes_needed(machine.config, 0, first_step=0))
    lora_rank = machine.config.lora.largest_rank
    adapter, anchor = adapter_bytes(lora_rank, shape), anchor_bytes(lora_rank, machine.config.curriculum, shape)
    return max(MIN_FREE_BYTES, bytes_needed(machine.config, adapter, first_step=0, anchor_bytes=anchor))


def speed(machine: Machine) -> Finding:
    seconds = known(machine.disk).sync_s
    found = f"a 4 KiB write with fsync takes {seconds * 1000:.3g} ms"
    why = "the learner waits for one before it acknowledges a filled order, and for several at each checkpoint"
    if seconds > VERY_SLOW_SYNC_S:
        return warning(f"{found}: {why}", f"{OTHER_OUT}, if possible a local SSD")
    if seconds > SLOW_SYNC_S:
        return note(f"{found}: {why}", f"{OTHER_OUT}, if possible a local SSD")
    return ok(found)


def file_system(machine: Machine) -> Finding:
    kind = known(machine.disk).kind
    if kind in IN_MEMORY:
        return warning(f"{kind}: the run would be kept in memory and be lost after a power cut or a restart", OTHER_OUT)
    if kind in REMOTE or kind.startswith("fuse."):
        return warning(
            f"{kind}: stored on another system, so locks work on this machine only and fsync may be slow",
            f"{OTHER_OUT}; never start a second learner on this run from another machine",
        )
    if kind in IN_CONTAINER:
        return note(
            f"{kind}: the run would be inside the container and be deleted with it",
            "mount a volume and use it as --out",
        )
    return ok(kind)


def modes(machine: Machine) -> Finding:
    """Whether key files can be made unreadable for others."""
    if not known(machine.disk).keeps_modes:
        return error(
            "a file created for its owner only can be read by others there, and a run refuses such keys",
            f"{OTHER_OUT} (not on a Windows or FAT drive)",
        )
    return ok("files keep their permissions")


def locks(machine: Machine) -> Finding:
    """Whether a lock keeps a second learner out."""
    if not known(machine.disk).keeps_locks:
        return error("flock does not keep a second process out there, so two learners could write one run", OTHER_OUT)
    return ok("a lock keeps other processes out")


def directory(machine: Machine) -> Finding:
    state = known(machine.run).state
    if state == "other":
        return error(f"{machine.run_dir} is not empty and has no run", "choose another --out, or empty it")
    if state == "run":
        return note(f"{machine.run_dir} has a run", "continue it with `resume`; for a new run choose another --out")
    return ok(f"{machine.run_dir} is free")


def keys(machine: Machine) -> Finding:
    run = known(machine.run)
    folder = machine.run_dir / "keys"
    if run.keys_trouble:
        found, _, remedy = run.keys_trouble.partition("; ")
        return error(found, remedy.rstrip("."))
    if run.keys_mode is not None and run.keys_mode & 0o077:
        return error(f"{folder} can be read by others (mode {run.keys_mode:04o})", f"chmod 700 {folder}")
    return ok("only the owner can read the keys" if run.state == "run" else "the keys are made with the run")


def lock(machine: Machine) -> Finding:
    """Whether another learner writes this run."""
    owner = known(machine.run).lock_owner
    if owner:
        return error(f"{machine.run_dir} is in use by {owner}", "wait until it ends, or stop it first")
    return ok("no learner is running in it")


def lease(machine: Machine) -> Finding:
    """Whether a process that outlived its learner still computes in it."""
    run = known(machine.run)
    if run.lease_holder and not run.lock_owner:
        holder = "a process" if run.lease_holder == "another process" else run.lease_holder
        return warning(
            f"no learner is running, but {holder} has the lease of {machine.run_dir}",
            f"end it, because a new run would wait for it (fuser {RunDir(machine.run_dir).lease} names it)",
        )
    return ok("no other process has the lease")


def address(machine: Machine) -> Finding:
    link = known(machine.link)
    if link.address == "ipc":
        return ok("a local socket, no port")
    found = f"{link.address} cannot be bound: {link.trouble}"
    if link.busy and not isinstance(machine.run, Missing) and machine.run.lock_owner:
        return note(f"{found}; this run's learner uses it")
    if link.busy:
        return error(found, "end the program that uses it (ss -ltnp shows it), or choose another port")
    if link.trouble:
        return error(found, "set link.bind to an address of this machine, such as tcp://0.0.0.0:5757")
    return ok(f"{link.address} can be bound")


def present(machine: Machine) -> Finding:
    """Whether the model is on this machine or can be fetched."""
    model, config = known(machine.model), machine.config.model
    if model.kind == "gguf" and not model.folder:
        return error(f"there is no file {config.path}", "check model.path")
    if model.kind == "gguf" and isinstance(model.shape, Missing):
        return error(model.shape.reason, "get the file again, or use the model's folder in Hugging Face format")
    if model.folder:
        return ok(f"model.path = '{config.path}' is on this machine")
    if model.trouble:
        return refused(model.trouble)
    if model.kind == "folder":
        return error(f"{config.path} is not a model", "model.path must be a folder with config.json and *.safetensors")
    fetch = FETCH.format(path=config.path)
    if model.offline:
        return error(
            f"'{config.path}' is not in the hub's cache, and HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE; or {fetch}"
        )
    if isinstance(machine.hub, Missing):
        return warning(
            f"'{config.path}' is not on this machine, and the hub could not be asked: {machine.hub.reason}",
            fetch,
        )
    if not machine.hub.found:
        return error(
            f"'{config.path}' is neither a folder on this machine nor a model that the hub shows to this user",
            "check model.path and model.revision; a private model needs `hf auth login`",
        )
    amount = size(machine.hub.num_bytes) if machine.hub.num_bytes else "size unknown"
    return note(
        f"'{config.path}' ({amount}) will be fetched when a run starts",
        f"fetch it beforehand: hf download {config.path}",
    )


def access(machine: Machine) -> Finding:
    """A gated model needs a token that its owner gave access."""
    model, path = known(machine.model), machine.config.model.path
    if model.folder or model.kind != "hub":
        return ok("not needed: the model is on this machine")
    if model.offline:
        return note("the hub is not asked: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    if isinstance(machine.hub, Missing):
        found = f"could not ask the hub whether '{path}' is gated: {machine.hub.reason}"
        return warning(found, "try again when there is a network")
    hub = machine.hub
    if hub.gated and not hub.token:
        return error(
            f"'{path}' is gated and there is no token on this machine",
            f"ask for access at https://huggingface.co/{path}, then `hf auth login` (or set HF_TOKEN)",
        )
    if hub.gated and not hub.admitted:
        return error(
            f"'{path}' is gated and this token has no access",
            f"ask for access at https://huggingface.co/{path}; a fine-grained token must allow gated models",
        )
    return ok("anyone can fetch it" if not hub.gated else "gated, and this token has access")


def hub_cache(machine: Machine) -> Finding:
    model = known(machine.model)
    if model.folder or model.kind != "hub":
        return ok("nothing is fetched from the hub")
    said = None if isinstance(machine.hub, Missing) else machine.hub.num_bytes
    return cache_folder(model.hub_cache, said or weight_bytes(model), "HF_HOME")


def base_cache(machine: Machine) -> Finding:
    """What is there already needs no room."""
    model = known(machine.model)
    if isinstance(model.shape, Missing):
        return cache_folder(model.base_cache, weight_bytes(model), "model.cache_dir")
    needed = sum(
        num_bytes for part, num_bytes in cached_base_bytes(machine, model.shape).items() if part not in model.cached
    )
    return cache_folder(model.base_cache, needed, "model.cache_dir")


def cache_folder(folder: Folder, needed: int, key: str) -> Finding:
    """`key`: the key or variable that names another folder."""
    if not folder.writable:
        return error(f"{folder.existing} is not a folder that this user may write to", f"set {key} to another folder")
    found = f"{size(folder.free)} free under {folder.path}, about {size(needed)} are needed"
    if folder.free < needed:
        return error(found, f"free some space, or set {key} to a folder on a larger disk")
    return ok(found)


def targets(machine: Machine) -> Finding:
    """Whether the model has what lora.targets names."""
    model = known(machine.model)
    if model.folder and model.trouble:
        return refused(model.trouble)
    found = ", ".join(machine.config.lora.targets)
    return ok(f"the model has {found}" if model.folder else f"{found}, compared once the model is on this machine")


def refused(sentence: str) -> Finding:
    """sentence: of a run, `what is wrong; what to do.`"""
    found, _, remedy = sentence.removesuffix(".").partition("; ")
    return error(found, remedy)


def tasks(machine: Machine) -> Finding:
    if trouble := known(machine.model).tasks_trouble:
        return refused(trouble)
    return ok(f"tasks.source = '{machine.config.tasks.source}'")


def function(machine: Machine) -> Finding:
    """Whether the user's reward function can be imported and called."""
    reward = known(machine.reward)
    verifier = machine.config.verifier
    if reward.timed_out:
        return warning(
            f"{reward.function} was not checked: {reward.trouble}",
            f"{AGAIN}; if this does not help, its file waits for something",
        )
    if reward.trouble:
        is_own = reward.function not in verifier.rewards
        name = f"verifier.function = '{reward.function}'" if is_own else f"'{reward.function}' in [verifier.rewards]"
        return error(
            f"{name} cannot be used: {reward.trouble}",
            "fix the file; its import must finish within seconds and read no input",
        )
    found = f"{reward.function} can be imported" if reward.function else f"built in: {verifier.kind}"
    if sum_decides(verifier):
        return note(f"{found}; {SUM_DECIDES}", name_one(verifier.rewards))
    return ok(found)
