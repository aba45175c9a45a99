"""shared/config/load.py: what only several keys together can get wrong."""

from typing import Any

import pytest

from shared.config.load import apply_override, config_from_json, config_to_json, resolve
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["verifier.kind=callable"], "verifier.function is empty"),
        (["link.endpoint=udp://host:1"], "expected 'ipc' or tcp://host:port"),
        (["constraint.beta=0.1", "constraint.reference=old"], "constraint.reference is 'old' but loss.passes is 1"),
        (["growth.max_prompts=15"], "growth.max_prompts = 15 is less than rollout.prompts = 16"),
        (["curriculum.ewc=1"], "curriculum.kind = 'shuffled' has no stages"),
        (["curriculum.kl_to=stage", "curriculum.kind=pass_rate"], "curriculum.kind = 'pass_rate' has no stages"),
        (["loss.kind=dr_grpo", "reward.divide_by_std=true"], "loss.kind = 'dr_grpo' leaves the standard deviation out"),
        (["loss.kind=gspo", "loss.entropy_fraction=0.2"], "loss.kind = 'gspo' takes one ratio over all tokens"),
        (["link.heartbeat_s=10", "link.silence_s=10"], "link.silence_s must be larger than link.heartbeat_s"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(overrides: list[str], part: str) -> None:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    with pytest.raises(ConfigError) as caught:
        resolve(tree)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["verifier.kind=callable", "verifier.function=mine.py:score"],
        ["link.endpoint=tcp://10.0.0.1:5757"],
        ["curriculum.ewc=1", "curriculum.kind=levels"],
        ["curriculum.kl_to=stage", "curriculum.kind=sent"],
        ["link.heartbeat_s=1", "link.silence_s=1.5"],
        ["constraint.beta=0.1", "constraint.reference=old", "loss.passes=2"],
        ["constraint.reference=old"],
        ["verifier.on_truncated=mask"],
        ["loss.kind=dr_grpo", "reward.divide_by_std=false"],
        ["loss.kind=gspo", "loss.clip_low=0.2"],
        ["loss.kind=grpo", "reward.divide_by_std=false"],
        ["growth.max_prompts=16"],
    ],
)
def test_keys_that_fit_together_pass(overrides: list[str]) -> None:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    resolve(tree)


@pytest.mark.parametrize(
    ("kind", "bounds", "by_std"),
    [
        ("grpo", (0.8, 1.2), True),
        ("dr_grpo", (0.8, 1.2), False),
        ("dapo", (0.8, 1.28), True),
        ("gspo", (1 - 3e-4, 1 + 4e-4), True),
        ("cispo", (0.0, 5.0), True),
    ],
)
def test_a_kind_brings_its_papers_clip_range_and_advantage(
    kind: str, bounds: tuple[float, float], by_std: bool
) -> None:
    config = resolve({"loss": {"kind": kind}})
    assert config.loss.ratio_bounds == pytest.approx(bounds, abs=1e-15)
    assert config.divides_by_std is by_std


def test_a_key_that_is_given_goes_before_the_kinds_own() -> None:
    loss = {"kind": "gspo", "clip_low": 0.5, "clip_high": 0.25}
    config = resolve({"loss": loss, "reward": {"divide_by_std": False}})
    assert config.loss.ratio_bounds == (0.5, 1.25) and not config.divides_by_std
    assert config_from_json(config_to_json(config)) == config
    assert resolve({"loss": {"kind": "cispo", "clip_high": 1.0}}).loss.ratio_bounds == (0.0, 2.0)
