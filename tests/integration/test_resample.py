"""A step whose recorded groups the gate refuses: it is sampled again, and the run ends as if they had never come."""

import shutil
from pathlib import Path

import msgspec
import pytest

from learner.durable.journal import Journal
from learner.durable.recorder import orders_in, read
from learner.orders.orders import step_of
from protocol.codec import encode, pack
from protocol.messages import FilledOrder
from tests.support.runs import launch, replayed, summary, train

BAD = 5
"""The step, from 1; a checkpoint holds the one before."""


def lied(filled_order: FilledOrder) -> FilledOrder:
    """The same tokens with log-probs that are well formed and false."""
    members = (msgspec.structs.replace(group, logprobs=group.logprobs - 3.0) for group in filled_order.groups)
    return msgspec.structs.replace(filled_order, groups=tuple(members))


def spoil(run: Path) -> None:
    """As if it had died while step BAD was filled, with false log-probs."""
    records = Journal.read(run / "journal").records()
    payloads = [packed for record in records for packed in orders_in(record).values()]
    shutil.rmtree(run / "journal")
    journal = Journal.open(run / "journal")
    for payload in payloads:
        filled_order = read(payload)
        if step_of(filled_order.order_id) < BAD - 1:
            journal.append(payload)
        elif step_of(filled_order.order_id) == BAD - 1:
            journal.append(pack(encode(lied(filled_order))))
    journal.close()
    shutil.rmtree(run / "checkpoints" / "step-000006")
    (run / "summary.json").unlink()


@pytest.mark.long
def test_a_step_that_the_gate_refuses_is_sampled_again_and_the_run_ends_as_undisturbed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    undisturbed = train(run)["adapter_sha256"]
    spoil(run)
    for _ in range(2):
        refused = launch("resume", run)
        assert refused.returncode == 2 and f"Step {BAD}: actor and learner differ" in refused.stderr
        command = f"python -m launch resume {run} --resample-step {BAD}"
        assert command in refused.stderr.replace("\n", " ")
    done = launch("resume", run, "--resample-step", str(BAD))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recorded orders of step 5 and later are void" in done.stderr
    assert summary(run)["adapter_sha256"] == undisturbed
    assert replayed(run)["match"]
