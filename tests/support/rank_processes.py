"""`python -m tests.support.rank_processes MODEL FOLDER RANKS...`: one step on real ranks, for each of these numbers.

The processes are forked from this one, so that libraries are imported once, and meet over gloo. Each rank writes what
it has then to FOLDER/<ranks>-<rank>.safetensors: gradients before clipping, and the adapter after the optimizer's step.
One more process computes the same in turns: FOLDER/<ranks>-in-turns.safetensors.

The same with a divided base: FOLDER/<ranks>-<rank>-divided.safetensors, with divided moments: ...-owned.safetensors,
and all three for other policies. What a rank has of the base: FOLDER/<ranks>-<rank>-kept.json. What two clipped steps
with whole and with divided moments end with: FOLDER/<ranks>-<rank>-ddp-clipped and -zero2-clipped. Then the last rank
is killed in a step, and what each of the others says of it is in FOLDER/<ranks>-<rank>-lost.
"""

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # Before the forks: it takes a second.
from msgspec import structs
from safetensors.torch import save_file

from learner.objective.batch import StepBatch
from learner.update.figures import UpdateStats
from learner.update.placement.divided import frozen_linears
from learner.update.placement.placement import InTurns, Placement
from learner.update.placement.ranks import RankGroup, meeting
from learner.wiring import build_trainer, placement_on
from shared.config.model import LoraConfig
from shared.config.processes import Parallel
from shared.config.tree import BatchConfig, Config, LossConfig, OptimizerConfig, RolloutConfig
from shared.errors import RankLost
from shared.model.canary import canary_ids, canary_of
from shared.model.policy import Policy
from tests.support.fakes import tiny_group, tiny_policy
from tests.support.steps import batch_of, gradients

MEETING_S = 60.0
CONFIG = Config(
    loss=LossConfig(entropy_fraction=0.5, kl_beta=0.05, max_mismatch=1e9),
    rollout=RolloutConfig(max_new_tokens=14),
    optimizer=OptimizerConfig(max_grad_norm=1e9),
    batch=BatchConfig(token_budget=60, head_rows=5),
)
"""Several micro-batches of different sizes, a mask over all of them, and a KL."""
CLIPPED = structs.replace(
    CONFIG,
    loss=structs.replace(CONFIG.loss, passes=2),
    optimizer=OptimizerConfig(lr=0.01, max_grad_norm=0.01, weight_decay=0.1),
)
PARALLEL: Mapping[Parallel, str] = {"fsdp2": "-divided", "ddp": "", "zero2": "-owned"}
"""And how files of it end."""


def batch_of_step(policy: Policy) -> StepBatch:
    """Ragged groups, one of which teaches nothing."""
    groups = [
        tiny_group([1.0, 0.0, 0.0], [3, 12, 7], group_id="a", seed=1),
        tiny_group([1.0, 1.0, 1.0], [4, 4, 4], group_id="equal", seed=2),
        tiny_group([0.0, 1.0, 1.0], [1, 5, 2], group_id="b", seed=3),
        tiny_group([1.0, 0.0, 0.0], [6, 14, 9], group_id="c", seed=4),
    ]
    return batch_of(groups, policy, CONFIG)


def gradients_of(policy: Policy, placement: Placement) -> tuple[dict[str, torch.Tensor], UpdateStats]:
    """Of one step."""
    update = build_trainer(policy, CONFIG, lambda: None, placement=placement).update
    stats = update.apply(0, batch_of_step(policy))
    return gradients(policy), stats


def policies(model: Path, ranks: int) -> Iterator[tuple[str, Policy]]:
    """Whose layers we compute ourselves; for a pair one of modules, with linears that have no adapter, and bf16."""
    yield "", tiny_policy(model)
    if ranks > 2:
        return
    some = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
    yield "-modules", replace(tiny_policy(model, lora=some), layers=None)
    yield "-bf16", tiny_policy(model, dtype=torch.bfloat16)


def one_rank(model: Path, folder: Path, rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    with meeting(folder, f"{ranks}", rank=rank, size=ranks, warn_after_s=MEETING_S) as group:
        for parallel, how in PARALLEL.items():
            for kind, policy in policies(model, ranks):
                placement = placement_on(group, policy, parallel)
                write_step(folder / f"{ranks}-{rank}{kind}{how}", policy, placement)
                if parallel == "fsdp2" and not kind:
                    (folder / f"{ranks}-{rank}-kept.json").write_text(json.dumps(kept(policy)))
        for parallel in ("ddp", "zero2"):
            write_clipped(folder / f"{ranks}-{rank}-{parallel}-clipped", model, group, parallel)


def kept(policy: Policy) -> dict[str, int]:
    """Bytes of the base's linears that this process has, and how many weights it has whole."""
    gc.collect()
    linears: list[Any] = [*frozen_linears(policy)]
    shapes = {tuple(linear.matmul.holder.weight.shape) for linear in linears}
    parts = [linear.matmul.tensors()["weight"] for linear in linears]
    # A part of one weight may have the shape of another.
    known = {part.untyped_storage().data_ptr() for part in parts}
    alive = (one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter))
    memory = (one.untyped_storage() for one in alive if tuple(one.shape) in shapes)
    whole = [one for one in memory if one.nbytes() and one.data_ptr() not in known]
    return {"bytes": sum(part.nbytes for part in parts), "whole": len(whole)}


def loses(model: Path, folder: Path, rank: int, ranks: int) -> None:
    """The last rank is killed after its first micro-batch, while others gather for their next one."""
    torch.set_num_threads(1)
    policy = tiny_policy(model)
    try:
        with meeting(folder, f"{ranks}-loses", rank=rank, size=ranks, warn_after_s=MEETING_S) as group:
            placement = placement_on(group, policy, "fsdp2")
            killed = partial(os.kill, os.getpid(), signal.SIGKILL)
            progress = killed if rank == ranks - 1 else lambda: None
            build_trainer(policy, CONFIG, progress, placement=placement).update.apply(0, batch_of_step(policy))
    except RankLost as error:
        (folder / f"{ranks}-{rank}-lost").write_text(str(error))


def in_turns(model: Path, folder: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    policy = tiny_policy(model)
    write_step(folder / f"{ranks}-in-turns", policy, InTurns([*policy.adapter.parameters().values()], ranks))


def write_step(file: Path, policy: Policy, placement: Placement) -> None:
    canary = canary_of(policy, canary_ids(0, len(policy.head), 8)).logprobs  # A publisher has it before the first step.
    found, stats = gradients_of(policy, placement)
    adapter = {f"adapter {name}": value.detach() for name, value in policy.adapter.parameters().items()}
    figures = {"loss": torch.tensor(stats.loss), "norm": torch.tensor(stats.grad_norm)}
    figures["canary"] = torch.from_numpy(canary)
    save_file(found | adapter | figures, file.with_suffix(".safetensors"))


def write_clipped(file: Path, model: Path, group: RankGroup, parallel: Parallel) -> None:
    """Two steps of two updates each, whose gradients are clipped. Moments: all that rank 0 would save, and own ones."""
    policy = tiny_policy(model)
    update = build_trainer(policy, CLIPPED, lambda: None, placement=placement_on(group, policy, parallel)).update
    norms = [update.apply(step, batch_of_step(policy)).grad_norm for step in range(2)]
    found = {name: value.detach() for name, value in policy.adapter.parameters().items()}
    save_file(found | {"norms": torch.tensor(norms)}, file.with_suffix(".safetensors"))
    file.with_suffix(".moments").write_bytes(update.optimizer.state_bytes())
    file.with_suffix(".own").write_bytes(update.optimizer.own_state_bytes())


def forked(work: Callable[[], None]) -> int:
    """Its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # the edge of a process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def main(model: Path, folder: Path, numbers: list[int]) -> int:
    for ranks in numbers:
        pids = [forked(partial(one_rank, model, folder, rank, ranks)) for rank in range(ranks)]
        pids.append(forked(partial(in_turns, model, folder, ranks)))
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            return 1
        pids = [forked(partial(loses, model, folder, rank, ranks)) for rank in range(ranks)]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if codes != [0] * (ranks - 1) + [signal.SIGKILL]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), [int(word) for word in sys.argv[3:]]))
