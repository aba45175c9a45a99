"""What actors of one machine pass on to each other: real files, and nothing that is not what the learner sent."""

import logging
import os
import shutil
import stat
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actor.passed_on import FORGOTTEN_S, KEPT, MACHINE, PassedOn, passed_on
from protocol.messages import Policy
from tests.support.fakes import toy_policy


def without_adapter(policy: Policy) -> Policy:
    """As the learner sends it to those who get it from another actor."""
    return msgspec.structs.replace(policy, adapter=policy.adapter[:0])


def adapters(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_one_actor_writes_and_another_reads_the_same_policy(tmp_path: Path) -> None:
    one, other = PassedOn(tmp_path / "adapters"), PassedOn(tmp_path / "adapters")
    assert one.machine == other.machine and len(one.machine) == 32
    policy = toy_policy(3)
    assert other.find(without_adapter(policy)) is None
    one.keep(policy)
    found = other.find(without_adapter(policy))
    assert found is not None and found.adapter.tobytes() == policy.adapter.tobytes()
    assert (found.version, found.sha256) == (3, policy.sha256)
    assert stat.S_IMODE((tmp_path / "adapters").stat().st_mode) == 0o700
    assert not list((tmp_path / "adapters").glob("*.part"))


def test_another_folder_is_another_machine(tmp_path: Path) -> None:
    assert PassedOn(tmp_path / "a").machine != PassedOn(tmp_path / "b").machine


@pytest.mark.parametrize("content", [b"", b"other bytes"])
def test_a_file_of_other_bytes_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    folder = PassedOn(tmp_path / "adapters")
    policy = toy_policy(0)
    folder.path(policy).write_bytes(content)
    assert folder.find(without_adapter(policy)) is None


def test_the_newest_few_are_kept_and_the_name_too(tmp_path: Path) -> None:
    folder = PassedOn(tmp_path / "adapters")
    policies = [toy_policy(version, bytes([version]) * 64) for version in range(KEPT + 3)]
    for place, policy in enumerate(policies):
        folder.keep(policy)
        os.utime(folder.path(policy), ns=(place, place))
    folder.keep(policies[-1])
    assert {path.name for path in adapters(folder.folder)} == {folder.path(policy).name for policy in policies[-KEPT:]}
    assert PassedOn(folder.folder).machine == folder.machine


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PassedOn(tmp_path / "adapters")
    shutil.rmtree(folder.folder)
    with caplog.at_level(logging.WARNING):
        folder.keep(toy_policy(5))
    assert "policy 5 is not passed on" in caplog.text
    assert folder.find(without_adapter(toy_policy(5))) is None


def test_only_actors_of_a_network_pass_on_and_each_learner_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert passed_on("ipc:///somewhere", b"key") is None
    one, again, other = (passed_on("tcp://127.0.0.1:1", key) for key in (b"key", b"key", b"another"))
    assert one and again and other
    assert one.folder == again.folder != other.folder
    assert one.folder.parent == tmp_path / f"tandem-{os.getuid()}"
    assert (one.folder / MACHINE).read_text() == again.machine != other.machine


def test_folders_of_learners_of_long_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    old, young = (passed_on("tcp://127.0.0.1:1", key) for key in (b"old", b"young"))
    assert old and young
    for one, age_s in ((old, FORGOTTEN_S + 3600.0), (young, FORGOTTEN_S - 3600.0)):
        then = time.time() - age_s
        os.utime(one.folder, (then, then))
    new = passed_on("tcp://127.0.0.1:1", b"new")
    assert new and set(new.folder.parent.iterdir()) == {young.folder, new.folder}


def test_what_is_found_can_be_installed_as_it_is(tmp_path: Path) -> None:
    folder, policy = PassedOn(tmp_path / "adapters"), toy_policy(1)
    folder.keep(policy)
    found = folder.find(without_adapter(policy))
    assert found is not None and found.adapter.dtype == np.uint8
    assert found.canary_ids.tolist() == policy.canary_ids.tolist()
