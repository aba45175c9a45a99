"""shared/config_load.py: what only several keys together can get wrong."""

from typing import Any

import pytest

from shared.config_load import apply_override, resolve
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
        ["growth.max_prompts=16"],
    ],
)
def test_keys_that_fit_together_pass(overrides: list[str]) -> None:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    resolve(tree)
