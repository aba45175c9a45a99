"""`export`: what a run trained, as a folder that other programs load, checked against the policy before it is kept.

cached base + adapter --> folder --> read back, compared with the policy --> card --> moved into place --> hub?
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launch.export.hub import Hub, hub_api, push, require_token
from learner.durable.checkpoint import Checkpoint, choose_checkpoint
from shared.config.load import config_from_json
from shared.config.tree import Config
from shared.errors import ConfigError, RunDirError
from shared.process.determinism import cpu_environment
from shared.run.evaluation import Evaluation, read_evaluation
from shared.run.files import disk_errors, made_whole, make_folder, sync_files
from shared.run.run_dir import RunDir

if TYPE_CHECKING:
    from launch.export.agreement import Agreement
    from launch.export.folders import Form

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
FEW_BITS = ("nf4", "fp4", "int4", "4bit", "4-bit", "q4")


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
    """Write, compare, print, push."""
    run = RunDir.open(directory)
    config = config_from_json(run.config.read_bytes())
    chosen = choose_checkpoint(run, config.checkpoint.keep, checkpoint)
    refuse_dtype(form, dtype)
    refuse_taken(out)
    token = require_token() if repo else ""
    os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
    found = write(run, config, chosen, form, DTYPES[dtype], out)
    print(f"step {chosen.step} of {directory} as {form} in {out}\n{found.sentence()}")
    if form == "gguf-ready":
        print(f"next: python convert_hf_to_gguf.py {out} --outfile {out}/model.gguf --outtype bf16")
    if repo:
        print(f"pushed to {push(out, repo, f'Step {chosen.step}, {form}', lambda: connect(token))} (private)")
    return 0


def refuse_dtype(form: "Form", dtype: str) -> None:
    """4 bits get the reason why not; an adapter stays fp32."""
    if dtype.lower() in FEW_BITS:
        from launch.export.weights import REFUSED

        raise ConfigError(f"--dtype {dtype} is refused: the merge goes into the dequantised base. {REFUSED}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype got '{dtype}', expected bf16 or fp32.")


def refuse_taken(out: Path) -> None:
    """Nothing is written over."""
    with disk_errors(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RunDirError(f"{out} is there already and not empty; choose another --out.")


def write(run: RunDir, config: Config, checkpoint: Checkpoint, form: "Form", dtype: str, out: Path) -> "Agreement":
    """In a folder beside, moved into place once it is whole and agrees."""
    import torch

    from launch.export.agreement import measure, refuse_disagreement
    from launch.export.card import Facts, model_card
    from launch.export.folders import write_merged, write_peft
    from learner.state import ADAPTER
    from shared.model.adapter_file import digest
    from shared.model.base_cache import cached_base
    from shared.process.determinism import pin_torch

    pin_torch(config.compute.learner_threads)
    base, number_type = cached_base(config.model), torch.float32 if form == "peft" else getattr(torch, dtype)
    make_folder(out.parent)
    with made_whole(out) as work:
        if form == "peft":
            write_peft(work, config, checkpoint, base.folder)
        else:
            write_merged(work, config, checkpoint, base.folder, number_type, form)
        found = measure(work, form, config, checkpoint, base)
        refuse_disagreement(found, number_type)
        sha256 = digest(checkpoint.files[ADAPTER])
        facts = Facts(
            form=form,
            dtype=str(number_type).removeprefix("torch."),
            config=config,
            info=run.read_info(),
            step=checkpoint.step,
            adapter_sha256=sha256,
            base_digest=base.digest,
            evaluations=evaluations(run, sha256),
            agreement=found,
        )
        (work / "README.md").write_text(model_card(facts), encoding="utf-8")
        sync_files(work)
        refuse_taken(out)
    return found


def evaluations(run: RunDir, sha256: str) -> tuple[Evaluation, ...]:
    """Of this very adapter, the largest there is, and of the base if it answered the same tasks."""
    kept = [found for file in sorted(run.eval.glob("*.json")) if (found := read_evaluation(file))]
    own = [found for found in kept if found.adapter_sha256 == sha256]
    if not own:
        return ()
    best = max(own, key=lambda found: (found.n, found.sampled.draws))
    base = [found for found in kept if found.label == "base" and found.tasks_sha256 == best.tasks_sha256]
    return (*base, best)
