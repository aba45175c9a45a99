"""The canary on the real policy: what it says is true, two processes agree on it, and one wrong weight shows."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from actor.engines.engine import Completion
from actor.engines.hf_engine import HFEngine
from actor.installer import TOLERANCE, Allowed, CanaryMismatch, Installer
from learner.update.publisher import Publisher, canary_of_sent
from protocol.messages import GroupOrder, Sampling
from shared.config.processes import ComputeConfig, LinkConfig, sent_dtype
from shared.model.adapter_file import adapter_bytes
from shared.model.canary import NO_CANARY, canary_ids, canary_of, sequence_logprobs
from shared.model.policy import Policy
from tests import reference
from tests.support.fakes import VOCAB, dense_twin, shake, tiny_policy, tiny_prompter

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = canary_ids(3, VOCAB, 12)


def publisher_of(policy: Policy) -> Publisher:
    return Publisher(policy.adapter, lambda: canary_of(policy, IDS))


def test_the_sequence_is_a_function_of_the_seed_and_within_the_vocabulary() -> None:
    assert canary_ids(3, VOCAB, 12).tolist() == IDS.tolist() and len(IDS) == 13 and IDS.dtype == np.int32
    assert canary_ids(4, VOCAB, 12).tolist() != IDS.tolist()
    many = canary_ids(0, 5, 4000)
    assert set(many.tolist()) == {0, 1, 2, 3, 4}


def test_without_tokens_there_is_no_canary(checkpoint: Path) -> None:
    assert canary_of(tiny_policy(checkpoint), canary_ids(0, VOCAB, 0)) is NO_CANARY


def test_the_scores_are_those_of_full_float64_logits(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint, shaken=False)
    ids = torch.from_numpy(IDS.astype(np.int64))
    logits = dense_twin(checkpoint).double()(input_ids=ids[None]).logits[0, :-1]
    expected, _ = reference.softmax_stats(logits, ids[1:], 1.0)
    np.testing.assert_allclose(sequence_logprobs(policy, IDS), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    assert sequence_logprobs(policy, IDS).dtype == np.float32


def test_an_adapter_that_went_in_is_proved_within_a_tenth_of_the_tolerance(checkpoint: Path) -> None:
    learner, actor = tiny_policy(checkpoint), tiny_policy(checkpoint, shaken=False)
    installer = Installer(HFEngine(actor, tiny_prompter()), Allowed(largest=TOLERANCE / 10))
    publisher = publisher_of(learner)
    for version in range(3):
        shake(learner, version)
        installer.install(publisher.snapshot(version), woken=False)
        assert adapter_bytes(actor.adapter) == adapter_bytes(learner.adapter)


def test_a_rounded_adapter_goes_in_with_a_canary_of_its_own(checkpoint: Path) -> None:
    learner, actor = tiny_policy(checkpoint), tiny_policy(checkpoint, shaken=False)
    shake(learner, 1)
    before = adapter_bytes(learner.adapter)
    exact = publisher_of(learner)
    rounded = Publisher(learner.adapter, lambda: canary_of_sent(learner, IDS, "bf16"), dtype="bf16")
    sent = rounded.snapshot(1)
    Installer(HFEngine(actor, tiny_prompter()), Allowed(largest=TOLERANCE / 10)).install(sent, woken=False)
    assert adapter_bytes(learner.adapter) == before == rounded.versions[1].file, (
        "the learner goes on from its own values"
    )
    assert rounded.versions[1].sha256 == exact.snapshot(1).sha256 != sent.sha256
    assert len(sent.adapter) < 0.6 * len(before)
    difference = np.abs(sent.canary_logprobs - exact.versions[1].message.canary_logprobs).max()
    assert 0.0 < difference < 0.05
    for name, value in actor.adapter.parameters().items():
        assert torch.equal(value, learner.adapter.parameters()[name].to(torch.bfloat16).float()), name


def test_a_policy_in_bf16_is_the_same_to_the_bit_with_a_rounded_adapter(checkpoint: Path) -> None:
    """So `link.adapter_dtype = "auto"` sends half of the bytes there."""
    assert sent_dtype(LinkConfig(), ComputeConfig(dtype="bf16")) == "bf16"
    assert sent_dtype(LinkConfig(), ComputeConfig(dtype="fp32")) == "fp32"
    assert sent_dtype(LinkConfig(adapter_dtype="fp32"), ComputeConfig(dtype="bf16")) == "fp32"
    assert sent_dtype(LinkConfig(), ComputeConfig(dtype="bf16", ranks=2)) == "fp32", "ranks compare all bits"
    learner = tiny_policy(checkpoint, dtype=torch.bfloat16)
    shake(learner, 1)
    order = GroupOrder(group_id="0", prompt_ids=IDS[:5], columns={}, seeds=(1, 2, 3))
    found: list[list[Completion]] = []
    canaries: list[bytes] = []
    for dtype in ("fp32", "bf16"):
        publisher = Publisher(learner.adapter, partial(canary_of_sent, learner, IDS, dtype), dtype=dtype)
        sent = publisher.snapshot(1)
        engine = HFEngine(tiny_policy(checkpoint, shaken=False, dtype=torch.bfloat16), tiny_prompter(0))
        Installer(engine, Allowed(largest=0.0)).install(sent, woken=False)
        found += engine.generate((order,), Sampling(temperature=1.0, max_new_tokens=9), lambda ended: None)
        canaries.append(sent.canary_logprobs.tobytes())
    assert canaries[0] == canaries[1]
    for mine, theirs in zip(*found, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist() and mine.logprobs.tobytes() == theirs.logprobs.tobytes()


class StaleEngine(HFEngine):
    """Takes no adapter, and does not say so."""

    def install(self, version: int, adapter: bytes) -> None:
        pass


@pytest.mark.parametrize("spoil", ["adapter", "base", "head", "scale"])
def test_what_is_wrong_in_the_actors_memory_shows(checkpoint: Path, spoil: str) -> None:
    """The bytes are right and what the engine computes with is not."""
    learner, actor = tiny_policy(checkpoint), tiny_policy(checkpoint, shaken=False)
    layer = next(iter(actor.adapter.layers.values()))
    policy = publisher_of(learner).snapshot(0)
    if spoil == "base":
        flip_top_exponent_bit(next(p for n, p in actor.backbone.named_parameters() if n.endswith("norm.weight")))
    elif spoil == "head":
        with torch.no_grad():
            actor.head[IDS[1]] *= 1.1
    elif spoil == "scale":
        layer.scale *= 1.5
    # Made now: what changes while an engine runs is found by its sums already.
    engine = (StaleEngine if spoil == "adapter" else HFEngine)(actor, tiny_prompter())
    with pytest.raises(CanaryMismatch, match=r"log-probs are \[.*\] here and \[-.*\] at the learner \(they differ by"):
        Installer(engine).install(policy, woken=False)


def flip_top_exponent_bit(parameter: torch.Tensor) -> None:
    """Of the first value."""
    parameter.data.flatten().view(torch.int32)[0] ^= 1 << 30


def test_versions_of_a_checkpoint_come_back_with_their_own_canaries(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher = publisher_of(policy)
    for version in (4, 5, 6):
        shake(policy, version)
        publisher.snapshot(version)
    again = tiny_policy(checkpoint, shaken=False)
    restored = publisher_of(again)
    restored.restore({version: b"".join(publisher.file(version)) for version in publisher.versions})
    for version, published in publisher.versions.items():
        canaries = [kept.message.canary_logprobs.tolist() for kept in (restored.versions[version], published)]
        assert canaries[0] == canaries[1]
        assert restored.versions[version].sha256 == published.sha256
    assert len({tuple(kept.message.canary_logprobs) for kept in restored.versions.values()}) == 3
    assert adapter_bytes(again.adapter) == adapter_bytes(policy.adapter)
