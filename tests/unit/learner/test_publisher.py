"""Of published versions a learner keeps the message, and the file only where nothing else has its bytes."""

from pathlib import Path

import pytest
import torch

from learner.durable.checkpoint import CheckpointStore, UnsavedCheckpoint
from learner.update.publisher import Publisher
from shared.errors import DamageError
from shared.model.adapter_file import adapter_bytes, digest
from shared.model.policy import Policy
from tests.support.fakes import shake, tiny_policy

pytestmark = pytest.mark.usefixtures("one_thread")


def publisher_of(policy: Policy, *, keeps_older: bool) -> Publisher:
    return Publisher(policy.adapter, dtype="bf16", keeps_older=keeps_older)


def whole(publisher: Publisher, version: int) -> bytes:
    return b"".join(publisher.file(version))


def test_in_strict_turns_the_newest_file_is_the_adapter_itself(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher = publisher_of(policy, keeps_older=False)
    publisher.snapshot(1)
    file = adapter_bytes(policy.adapter)
    assert publisher.versions[1].file is None
    assert whole(publisher, 1) == file and publisher.versions[1].sha256 == digest(file)
    places = {value.data_ptr() for value in policy.adapter.parameters().values()}
    tensors = [torch.frombuffer(part, dtype=torch.uint8).data_ptr() for part in publisher.file(1)[1:]]
    assert set(tensors) == places, "no copy was made"


def test_an_older_version_that_orders_may_name_has_its_own_file(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher, files = publisher_of(policy, keeps_older=True), dict[int, bytes]()
    for version in (1, 2):
        shake(policy, version)
        files[version] = adapter_bytes(policy.adapter)
        publisher.snapshot(version)
    assert {version: whole(publisher, version) for version in (1, 2)} == files
    restored = publisher_of(tiny_policy(checkpoint), keeps_older=False)
    restored.restore(files)
    assert {version: whole(restored, version) for version in (1, 2)} == files


def test_the_newest_version_always_stays(checkpoint: Path) -> None:
    publisher = publisher_of(tiny_policy(checkpoint), keeps_older=True)
    for version in range(3):
        publisher.snapshot(version)
    publisher.forget_before(1)
    assert sorted(publisher.versions) == [1, 2]
    publisher.forget_before(9)
    assert sorted(publisher.versions) == [2]


def test_what_is_sent_as_it_is_has_one_copy(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher = Publisher(policy.adapter, keeps_older=False)
    message = publisher.snapshot(1)
    (file,) = publisher.file(1)
    assert message.adapter.tobytes() == file and publisher.versions[1].sha256 == message.sha256
    assert message.adapter.base is file


def test_an_adapter_that_changed_under_its_version_is_not_saved(checkpoint: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher = publisher_of(policy, keeps_older=False)
    publisher.snapshot(4)
    next(iter(policy.adapter.parameters().values())).data[0, 0] += 1.0
    with pytest.raises(DamageError, match=r"The adapter of version 4 has changed in memory .* `resume` goes on from"):
        publisher.file(4)


def test_a_checkpoint_in_parts_is_that_of_its_copy(checkpoint: Path, tmp_path: Path) -> None:
    policy = tiny_policy(checkpoint)
    publisher = publisher_of(policy, keeps_older=False)
    publisher.snapshot(3)
    unsaved = UnsavedCheckpoint(step=3, files={"adapter": publisher.file(3), "empty": (), "state.json": (b"{", b"}")})
    copied = unsaved.copied()
    assert copied.files == {"adapter": adapter_bytes(policy.adapter), "empty": b"", "state.json": b"{}"}
    stores = [CheckpointStore(tmp_path / name, keep=1) for name in ("parts", "copy")]
    for store, one in zip(stores, (unsaved, copied), strict=True):
        store.save(one)
    assert stores[0].load(3) == stores[1].load(3) == copied
    parts, copy = ((store.path(3) / "MANIFEST.json").read_bytes() for store in stores)
    assert parts == copy
