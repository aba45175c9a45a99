"""Installing an adapter: bytes by their digest, the engine by its canary, nothing twice, nothing unproved."""

from typing import Any

import msgspec
import numpy as np
import pytest

from actor.installer import FLOOR, TIMES, Allowed, CanaryMismatch, Installer
from protocol.messages import Policy
from shared.errors import DamageError
from tests.support.fakes import ScriptedEngine, toy_policy

IDS = np.array([3, 1, 4, 1, 5], np.int32)


def published(version: int, **changes: Any) -> Policy:
    """A version with the canary that a faultless engine finds."""
    policy, engine = toy_policy(version), ScriptedEngine()
    engine.install(version, policy.adapter.tobytes())
    fields = {"canary_ids": IDS, "canary_logprobs": engine.logprobs(IDS)}
    return msgspec.structs.replace(policy, **(fields | changes))


class CountingEngine(ScriptedEngine):
    """Counts canaries."""

    scored = 0

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        self.scored += 1
        return super().logprobs(ids)


def test_each_version_is_installed_and_proved_once() -> None:
    engine = CountingEngine()
    installer = Installer(engine)
    for version in (0, 0, 1, 1, 0):
        installer.install(published(version), woken=False)
    assert engine.installed == [0, 1, 0] and engine.scored == 3


def test_weights_that_have_been_away_are_proved_again() -> None:
    engine = CountingEngine()
    installer = Installer(engine)
    installer.install(published(0), woken=True)
    installer.install(published(0), woken=True)
    assert engine.installed == [0] and engine.scored == 2
    engine.adapter = b"what came back is something else"
    with pytest.raises(CanaryMismatch, match="Policy 0 was installed, but this actor computes other values"):
        installer.install(published(0), woken=True)


def test_what_an_engine_has_lost_is_installed_again_and_said_to_be_its() -> None:
    engine = CountingEngine()
    installer = Installer(engine, place="the server at X", remedy="Serve Y there.")
    installer.install(published(0), woken=False)
    installer.forget()
    installer.install(published(0), woken=False)
    assert engine.installed == [0, 0] and engine.scored == 2
    with pytest.raises(CanaryMismatch, match=r"Policy 1 was installed, but the server at X computes.*Serve Y there\.$"):
        installer.install(published(1, canary_logprobs=-np.ones(4, np.float32)), woken=False)


def test_bytes_that_are_not_those_of_the_digest_are_not_installed() -> None:
    policy = published(4)
    changed = policy.adapter.copy()
    changed[7] ^= 1
    engine = ScriptedEngine()
    with pytest.raises(DamageError, match=r"policy 4 has sha256 [0-9a-f]{12} here and [0-9a-f]{12} at the learner"):
        Installer(engine).install(msgspec.structs.replace(policy, adapter=changed), woken=False)
    assert engine.installed == []


@pytest.mark.parametrize("off", [2e-3, -2e-3, np.nan, np.inf])
def test_one_wrong_log_prob_of_many_is_enough_and_both_lists_are_told(off: float) -> None:
    right = published(0).canary_logprobs
    wrong = right.copy()
    wrong[2] += np.float32(off)
    installer = Installer(ScriptedEngine())
    with pytest.raises(CanaryMismatch) as caught:
        installer.install(published(0, canary_logprobs=wrong), woken=False)
    for values in (right, wrong):
        assert f"[{', '.join(f'{value:.5g}' for value in values)}]" in str(caught.value)
    # What failed is not taken for installed the next time.
    with pytest.raises(CanaryMismatch):
        installer.install(published(0, canary_logprobs=wrong), woken=False)


def test_rounding_is_within_the_tolerance() -> None:
    right = published(0).canary_logprobs
    Installer(ScriptedEngine()).install(published(0, canary_logprobs=right + np.float32(5e-4)), woken=False)


def test_a_list_of_another_length_is_a_mismatch() -> None:
    with pytest.raises(CanaryMismatch):
        Installer(ScriptedEngine()).install(published(0, canary_logprobs=published(0).canary_logprobs[:1]), woken=False)


def test_a_policy_without_a_canary_is_taken_as_it_is() -> None:
    engine = CountingEngine()
    Installer(engine).install(toy_policy(0), woken=False)
    assert engine.installed == [0] and engine.scored == 0


BASE = np.array([-3.0, -1.0, -4.0, -1.5], np.float32)


class RoundingEngine(ScriptedEngine):
    """Its log-probs are given, and move by `noise` where more tokens follow."""

    def __init__(self, found: np.ndarray, noise: float) -> None:
        super().__init__()
        self.found = found
        self.noise = noise

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        alone = len(ids) == len(IDS)
        rest = np.zeros(len(ids) - len(IDS), np.float32)
        signs = np.array([1, -1, 1, -1], np.float32)
        return np.concatenate([self.found if alone else self.found + self.noise * signs, rest])


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_in_bf16_the_mean_may_be_a_multiple_of_the_engines_own_rounding(noise: float) -> None:
    limit = max(FLOOR, TIMES * noise)
    for difference, passes in ((0.9 * limit, True), (1.1 * limit, False)):
        policy = published(0, canary_logprobs=BASE + np.float32(difference))
        installer = Installer(RoundingEngine(BASE, noise), Allowed(measured=True))
        if passes:
            installer.install(policy, woken=False)
        else:
            with pytest.raises(CanaryMismatch, match=rf"in the mean, rounding allows {limit:.3g}"):
                installer.install(policy, woken=False)


@pytest.mark.parametrize("found", [np.nan, np.inf])
def test_in_bf16_what_is_no_number_does_not_pass(found: float) -> None:
    engine = RoundingEngine(np.full(4, found, np.float32), 0.01)
    with pytest.raises(CanaryMismatch):
        Installer(engine, Allowed(measured=True)).install(published(0, canary_logprobs=BASE), woken=False)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.15, "They show about 15% of the adapter's effect"),
        (0.0, "They are those of policy 0, the base without an adapter: the adapter was not installed."),
        (0.5, "They show about 50% of the adapter's effect: half an adapter, an old one, or a wrong scale."),
        (2.0, "They show about 200% of the adapter's effect"),
    ],
)
def test_a_fault_is_named_by_what_earlier_versions_gave(share: float, said: str) -> None:
    effect = np.array([0.3, -0.2, 0.4, 0.1], np.float32)
    engine = RoundingEngine(BASE, 0.005)
    installer = Installer(engine, Allowed(measured=True))
    installer.install(published(0, canary_logprobs=BASE), woken=False)
    engine.found = BASE + np.float32(share) * effect
    with pytest.raises(CanaryMismatch) as caught:
        installer.install(published(1, canary_logprobs=BASE + effect), woken=False)
    assert said in str(caught.value)


def test_the_version_before_is_recognised() -> None:
    engine = RoundingEngine(BASE, 0.01)
    installer = Installer(engine, Allowed(measured=True))
    for version in (3, 4):
        engine.found = BASE + np.float32(version)
        installer.install(published(version, canary_logprobs=engine.found), woken=False)
    with pytest.raises(CanaryMismatch, match="They are those of policy 4: the adapter was not installed"):
        installer.install(published(5, canary_logprobs=BASE + np.float32(5)), woken=False)
