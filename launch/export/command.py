"""`export`: writes what a run trained as a folder that other programs can load, after comparing it with the policy.

    cached base + adapter --> folder --> read back, compared with the policy --> model card --> moved into place --> hub

The folder is pushed to the Hugging Face hub only if the user asks for it. The token comes from the environment, is
checked before anything is written, and is sent to the hub only.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import ConfigError, RunDirError, in_words
from shared.process.determinism import cpu_environment
from shared.run.evaluation import Evaluation, read_evaluation
from shared.run.files import disk_errors, made_whole, make_folder, sync_files
from shared.run.reader import intact
from shared.run.run_dir import RunDir

if TYPE_CHECKING:
    from launch.export.agreement import Agreement
    from launch.export.folders import CardFacts, Form, TrainedPolicy

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
FOUR_BIT = ("nf4", "fp4", "int4", "4bit", "4-bit", "q4")
TOKEN = "HF_TOKEN"
MODEL_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)
"""What the forms of an export are loaded from. Those of an earlier push, in another form, would be loaded in place of
the new ones: an adapter beside a whole model, a single file beside several."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What is exported, and how."""

    run: RunDir
    """The run."""
    config: Config
    """Its configuration."""
    checkpoint: Checkpoint
    """The one that was chosen."""
    form: "Form"
    """Form of the folder."""
    dtype: str
    """Number type of merged weights: `bfloat16` or `float32`."""
    is_pushed: bool
    """Whether it goes to the hub, where nobody needs a path of this machine."""


class Hub(Protocol):
    """The methods of huggingface_hub.HfApi that a push needs."""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def model_info(self, repo_id: str) -> Any: ...

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]
    ) -> Any: ...


def hub_api(token: str) -> Hub:
    from huggingface_hub import HfApi

    return HfApi(token=token)


def run_export(
    *,
    directory: Path,
    form: "Form",
    out: Path,
    checkpoint: str,
    dtype: str,
    repo: str | None,
    connect: Callable[[str], Hub] = hub_api,
) -> int:
    """Returns the exit code."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    chosen = choose_checkpoint(run, config.checkpoint.keep, checkpoint)
    refuse_dtype(form, dtype)
    refuse_taken(out)
    token = require_token() if repo else ""
    os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
    export = Export(run=run, config=config, checkpoint=chosen, form=form, dtype=DTYPES[dtype], is_pushed=bool(repo))
    found = write(export, out)
    print(f"step {chosen.step} of {directory} as {form} in {out}\n{found.sentence()}")
    if form == "gguf-ready":
        words = ("python", "convert_hf_to_gguf.py", str(out), "--outfile", str(out / "model.gguf"), "--outtype", "bf16")
        print(f"next: {shlex.join(words)}")
    if repo:
        for line in base_without_path(export):
            print(line)
        print(f"pushed to {push(out, repo, f'Step {chosen.step}, {form}', lambda: connect(token))}")
    return 0


def base_without_path(export: Export) -> Iterator[str]:
    """What to know of a pushed adapter whose base is on this machine; nothing for others."""
    from launch.export.folders import is_local, public_base
    from learner.durable.find_adapter import ADAPTER_CONFIG

    path = export.config.model.path
    if export.form == "peft" and is_local(path):
        yield (
            f"{ADAPTER_CONFIG} names the base '{public_base(path)}' without its folder, which is private; to load the"
            " adapter, set base_model_name_or_path there to where the base is."
        )


def refuse_dtype(form: "Form", dtype: str) -> None:
    """For 4 bits, the message says why they are refused."""
    if dtype.lower() in FOUR_BIT:
        from launch.export.weights import REFUSED

        raise ConfigError(f"--dtype {dtype} is refused: the adapter is added to the dense base. {REFUSED}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype got '{dtype}', expected bf16 or fp32; choose one of them.")


def refuse_taken(out: Path) -> None:
    with disk_errors(out):
        if os.path.ismount(out):
            raise RunDirError(
                f"{out} is where a disk is mounted, which no export can replace; choose a folder inside it."
            )
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunDirError(f"{out} exists and is not empty; choose another --out.")
        if out.is_dir() and out.samefile(Path()):
            raise RunDirError(f"{out} is the current folder, which an export would replace; choose another --out.")


def require_token() -> str:
    token = os.environ.get(TOKEN, "")
    if not token:
        raise ConfigError(f"--push needs a token of the hub with write access; set {TOKEN} in the environment.")
    return token


def write(export: Export, out: Path) -> "Agreement":
    """Writes into a temporary folder, which becomes `out` once it is complete and agrees with the policy."""
    import torch

    from launch.export.agreement import measure, refuse_disagreement
    from launch.export.folders import TrainedPolicy, base_name, model_card, public_base, write_merged, write_peft
    from learner.durable.state import ADAPTER
    from shared.base.cache import cached_base
    from shared.process.determinism import pin_torch

    config, form = export.config, export.form
    pin_torch(config.compute.learner_threads)
    policy = TrainedPolicy(
        base=cached_base(config.model),
        model=config.model,
        lora=config.lora,
        adapter=export.checkpoint.files[ADAPTER],
    )
    # PEFT's format keeps the adapter in fp32.
    dtype = torch.float32 if form == "peft" else getattr(torch, export.dtype)
    make_folder(out.parent)
    with made_whole(out) as work:
        if form == "peft":
            named = public_base if export.is_pushed else base_name
            write_peft(work, policy, named(config.model.path))
        else:
            write_merged(work, policy, form, dtype)
        found = measure(work, form, policy, config.run.seed)
        refuse_disagreement(found, dtype)
        (work / "README.md").write_text(model_card(card_facts(export, policy, found)), encoding="utf-8")
        sync_files(work)
        refuse_taken(out)
    return found


def card_facts(export: Export, policy: "TrainedPolicy", found: "Agreement") -> "CardFacts":
    from launch.export.folders import CardFacts
    from learner.durable.state import trained_system
    from shared.model.adapter_file import digest

    sha256 = digest(policy.adapter)
    return CardFacts(
        form=export.form,
        dtype="float32" if export.form == "peft" else export.dtype,
        config=export.config,
        system=trained_system(export.run, export.config.tasks),
        info=export.run.read_info(),
        step=export.checkpoint.step,
        adapter_sha256=sha256,
        base_digest=policy.base.digest,
        evaluations=evaluations(export.run, sha256),
        agreement=found.sentence(),
    )


def evaluations(run: RunDir, sha256: str) -> tuple[Evaluation, ...]:
    """The largest evaluation of this adapter, and the base's on the same tasks if there is one. A damaged file is left
    out."""
    files = sorted(run.eval.glob("*.json"))
    saved = [found for file in files if (found := intact(lambda file=file: read_evaluation(file)))]
    own = [found for found in saved if found.adapter_sha256 == sha256]
    if not own:
        return ()
    best = max(own, key=lambda found: (found.n, found.sampled.draws))
    base = [found for found in saved if found.version == 0 and found.tasks_sha256 == best.tasks_sha256]
    # There may be several, with other draws or caps.
    alike = [found for found in base if found.kind() == best.kind()] or base
    return (*alike[:1], best) if best.version else (best,)


def push(folder: Path, repo: str, message: str, connect: Callable[[], Hub]) -> str:
    """Returns the address of the repository, and who can see it. A new one is private; only its owner can decide to
    publish it. One that exists stays as it is, but for the model that was there."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        hub = connect()
        hub.create_repo(repo, private=True, exist_ok=True)
        seen_by = "private" if hub.model_info(repo).private else "public"
        # In the same commit, and of what is uploaded the hub deletes nothing.
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=list(MODEL_FILES))
    # Without a network the library raises an error of its HTTP client, and for a large file that failed, RuntimeError.
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        again = ("hf", "upload", repo, str(folder), *(f"--delete={pattern}" for pattern in MODEL_FILES))
        raise RunDirError(
            f"The hub did not accept {repo}: {in_words(error)}; the export is complete in {folder}. To push it"
            f" again, use `{shlex.join(again)}`."
        ) from error
    return f"https://huggingface.co/{repo} ({seen_by})"
