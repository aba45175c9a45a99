"""`replay --batch FILE`: one quarantined batch alone, in this process, on the CPU.

Prints what each sample does, and where the suspect's numbers first go wrong. Ends with one JSON line; exit 0 if the
fault came back.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config.load import config_from_json
from shared.process.determinism import cpu_environment
from shared.run.metrics import finite

if TYPE_CHECKING:
    from learner.quarantine.quarantine import KeptBatch
    from learner.quarantine.reproduce import Reproduction


def run_command(*, file: Path) -> int:
    """Read, reproduce, print."""
    from learner.quarantine.quarantine import read_batch

    kept = read_batch(file)
    config = config_from_json(kept.config)
    os.environ.update(cpu_environment(config.compute.learner_threads, config.compute.blas))
    print(f"step {kept.step + 1} stopped because {kept.what}; suspect {kept.sample}", file=sys.stderr)

    from learner.quarantine.reproduce import reproduce

    found = reproduce(kept, config, lambda: None)
    print("\n".join(sample_lines(kept, found)))
    report = outcome(kept, found)
    print(json.dumps(report))
    return 0 if report["reproduced"] else 1


def sample_lines(kept: "KeptBatch", found: "Reproduction") -> list[str]:
    """One line a sample, in groups; one for the tensor; one for what became of the fault."""
    scores = {
        f"{group.group_id}[{index}]": score
        for answer in kept.answers
        for group in answer.groups
        for index, score in enumerate(group.scores)
    }
    alone = {finding.sample: finding for finding in found.findings}
    lines = [f"{'sample':<28} {'tokens':>6} {'score':>8} {'advantage':>10} {'loss':>12} {'grad norm':>12}"]
    for entry in found.batch.scored:
        name, finding = entry.sample.name, alone[entry.sample.name]
        blamed = "  <-- suspect" if found.fault and name == found.fault.suspect.sample else ""
        lines.append(
            f"{name:<28} {len(entry.selected):>6} {scores[name]:>8.4g} {entry.sample.advantage:>10.4g}"
            f" {finding.loss:>12.4g} {finding.grad_norm:>12.4g}{blamed}"
        )
    if found.bad:
        lines.append(f"first ({found.bad.where}): {found.bad.name} {found.bad.value}")
    return [*lines, str(found.fault) if found.fault else not_reproduced(found)]


def not_reproduced(found: "Reproduction") -> str:
    """The update went through."""
    return (
        f"The update went through here with a gradient norm of {found.grad_norm:.4g}: the fault came from the machine"
        " or from its arithmetic (a card, other threads), not from the batch."
    )


def outcome(kept: "KeptBatch", found: "Reproduction") -> dict[str, Any]:
    """For programs."""
    fault = found.fault
    suspect = fault.suspect if fault else None
    return {
        "step": kept.step + 1,
        "recorded": {"kind": kept.kind, "sample": kept.sample},
        "reproduced": fault is not None and fault.refusal.kind == kept.kind,
        "kind": fault.refusal.kind if fault else None,
        "sample": suspect.sample if suspect else None,
        "group": suspect.sample.partition("[")[0] if suspect else None,
        "loss": finite(suspect.loss) if suspect else None,
        "grad_norm": finite(suspect.grad_norm) if suspect else finite(found.grad_norm),
        "first": asdict(found.bad) if found.bad else None,
    }
