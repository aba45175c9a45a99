"""The model and the tasks that the configuration names."""

from launch.doctor.facts.disk import Folder
from launch.doctor.finding import Finding, Missing, error, known, note, ok, size, warning
from launch.doctor.machine import Machine

UNKNOWN_BYTES = 2 * 2**30
"""Room that is asked for where the hub did not say how large the model is."""
FETCH = "fetch it where there is a network (hf download {path}), or give a local folder as model.path"


def present(machine: Machine) -> Finding:
    """Here, or to be had."""
    model, config = known(machine.model), machine.config.model
    if model.folder:
        return ok(f"model.path = '{config.path}' is here")
    if model.kind == "folder":
        return error(f"{config.path} is no model", "model.path must hold config.json and *.safetensors")
    fetch = FETCH.format(path=config.path)
    if model.offline:
        return error(
            f"'{config.path}' is not in the hub's cache, and HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE; or {fetch}"
        )
    if isinstance(machine.hub, Missing):
        return warning(
            f"'{config.path}' is not here, and the hub could not be asked for it: {machine.hub.reason}", fetch
        )
    if not machine.hub.found:
        return error(
            f"'{config.path}' is neither a folder here nor a model that the hub shows",
            "check model.path and model.revision; a private model needs `hf auth login`",
        )
    amount = size(machine.hub.num_bytes) if machine.hub.num_bytes else "size unknown"
    return note(
        f"'{config.path}' ({amount}) is fetched when a run starts",
        f"fetch it beforehand: hf download {config.path}",
    )


def access(machine: Machine) -> Finding:
    """A gated model needs a token that its owner let in."""
    model, path = known(machine.model), machine.config.model.path
    if model.folder or model.kind != "hub":
        return ok("not needed: the model is here")
    if model.offline:
        return note("the hub is not asked: HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    if isinstance(machine.hub, Missing):
        found = f"could not ask the hub whether '{path}' is gated: {machine.hub.reason}"
        return warning(found, "try again with a network")
    hub = machine.hub
    if hub.gated and not hub.token:
        return error(
            f"'{path}' is gated and there is no token here",
            f"ask for access at https://huggingface.co/{path}, then `hf auth login` (or set HF_TOKEN)",
        )
    if hub.gated and not hub.admitted:
        return error(
            f"'{path}' is gated and this token has no access",
            f"ask for access at https://huggingface.co/{path}; a fine-grained token must allow gated models",
        )
    return ok("open to everybody" if not hub.gated else "gated, and this token has access")


def hub_cache(machine: Machine) -> Finding:
    """Room for what is fetched."""
    model = known(machine.model)
    if model.folder or model.kind != "hub":
        return ok("nothing is fetched from the hub")
    needed = UNKNOWN_BYTES
    if not isinstance(machine.hub, Missing) and machine.hub.num_bytes:
        needed = machine.hub.num_bytes
    return cache(model.hub_cache, needed, "HF_HOME")


def base_cache(machine: Machine) -> Finding:
    """Room for the quantised base, which may be as large as the checkpoint."""
    model = known(machine.model)
    needed = UNKNOWN_BYTES if isinstance(model.shape, Missing) else model.shape.file_bytes
    return cache(model.base_cache, needed, "model.cache_dir")


def cache(folder: Folder, needed: int, key: str) -> Finding:
    """Writable, and large enough."""
    if not folder.writable:
        return error(f"{folder.existing} is no folder this user may write to", f"set {key} to a folder of yours")
    found = f"{size(folder.free)} free under {folder.path}, about {size(needed)} are needed"
    if folder.free < needed:
        return error(found, f"free some space, or set {key} to a folder on a larger disk")
    return ok(found)


def tasks(machine: Machine) -> Finding:
    """Files that the configuration names."""
    lost = known(machine.model).lost_files
    if lost:
        return error(
            f"there is no file {', '.join(lost)}",
            "check tasks.source, tasks.held_out and tasks.test; a path is relative to where the command is typed",
        )
    return ok(f"tasks.source = '{machine.config.tasks.source}'")
