"""An invitation is used once, whoever is killed when; a revoked key and its name are gone for good."""

import errno
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.access.allow_list import AllowList
from protocol.access.allowance import Allowances
from protocol.access.key_list import (
    add_key,
    create_invitation,
    is_invited,
    list_keys,
    mark_seen,
    open_invitations,
    revoke,
)
from protocol.access.keys import create_actor_key, create_keys, load_learner_keys, new_pair, read_allowed
from protocol.access.sparse_log import SparseLog
from protocol.errors import SecurityError
from tests.support.disk_faults import failing, kill_before_every_call

OWN = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
NOW, LATER = 1000.0, 2000.0
NAMES = ("guest1", "actor0")


def invite(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    create_keys(folder / "keys")
    create_invitation(folder / "keys", "guest0", LATER)


def join(folder: Path) -> None:
    add_key(folder / "keys", "guest0", OWN, NOW)


def invite_and_join(folder: Path) -> None:
    invite(folder)
    join(folder)


def end(folder: Path) -> None:
    revoke(folder / "keys", "guest0", "it lied", NOW)


def is_accepted(keys: Path) -> bool:
    found = read_allowed(keys / "allowed")
    assert not found.faults
    return found.actor_ids.get(OWN) == "guest0"


def is_open(keys: Path) -> bool:
    return "guest0" in open_invitations(keys, NOW).values()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    invite(tmp_path)
    return tmp_path / "keys"


def test_a_kill_while_an_actor_joins_leaves_the_invitation_or_the_key(tmp_path: Path) -> None:
    folders = kill_before_every_call(invite, join, tmp_path)
    seen = set[bool]()
    for folder in folders:
        keys = folder / "keys"
        assert is_accepted(keys) != is_open(keys), folder
        seen.add(is_accepted(keys))
        if is_accepted(keys):
            with pytest.raises(SecurityError, match="invitation of guest0 was used already"):
                add_key(keys, "guest0", new_pair()[0], NOW)
        join(folder)
        assert is_accepted(keys) and not is_open(keys)
        files = [file for file in keys.rglob("*") if file.is_file()]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert seen == {True, False} and len(folders) > 8
    assert is_accepted(folders[-1] / "keys") and not (folders[-1] / "keys" / "invited" / "guest0.json").exists()


@pytest.mark.parametrize("before", [invite, invite_and_join])
def test_a_kill_while_a_key_is_revoked_never_opens_it_again(tmp_path: Path, before: object) -> None:
    assert callable(before)
    folders = kill_before_every_call(before, end, tmp_path)
    for folder in folders:
        keys = folder / "keys"
        (row,) = [key for key in list_keys(keys, NOW) if key.actor_id == "guest0"]
        if row.state != "revoked":
            assert is_accepted(keys) != is_open(keys)
            end(folder)
        assert not is_accepted(keys) and not is_open(keys), folder
        with pytest.raises(SecurityError, match="was revoked"):
            join(folder)
        assert not is_accepted(keys)


def test_an_invitation_expires(keys: Path) -> None:
    assert open_invitations(keys, LATER) and not open_invitations(keys, LATER + 0.1)
    (row,) = [key for key in list_keys(keys, LATER + 0.1) if key.actor_id == "guest0"]
    assert row.state == "expired"


def test_what_is_no_key_is_not_added(keys: Path) -> None:
    for bad in ("x" * 39, "\u00e4" * 40, '"' * 40):
        with pytest.raises(SecurityError, match="no valid key"):
            add_key(keys, "guest0", bad, NOW)
    assert is_open(keys) and not is_accepted(keys)


def test_a_key_that_the_run_has_had_is_not_added_for_another_actor(keys: Path) -> None:
    """The learner would not start again with two files of one key, and a revoked key would come back."""
    create_invitation(keys, "guest1", LATER)
    invitation, local = (next(one.public for one in list_keys(keys, NOW) if one.actor_id == name) for name in NAMES)
    add_key(keys, "guest0", OWN, NOW)
    for known in (OWN, invitation, local):
        with pytest.raises(SecurityError, match="NewKey of guest1 is no new one: the run has had this key"):
            add_key(keys, "guest1", known, NOW)
    revoke(keys, "guest0", "it lied", NOW)
    with pytest.raises(SecurityError, match="no new one"):
        add_key(keys, "guest1", OWN, NOW)
    load_learner_keys(keys)
    assert "guest1" in open_invitations(keys, NOW).values(), "it is open as before"
    add_key(keys, "guest1", new_pair()[0], NOW)


def test_a_name_is_used_once(keys: Path) -> None:
    for make in (lambda: create_invitation(keys, "guest0", LATER), lambda: create_actor_key(keys, "guest0")):
        with pytest.raises(SecurityError, match="There is an actor 'guest0' already"):
            make()
    add_key(keys, "guest0", OWN, NOW)
    for make in (lambda: create_invitation(keys, "guest0", LATER), lambda: create_actor_key(keys, "guest0")):
        with pytest.raises(SecurityError, match="There is an actor 'guest0' already"):
            make()
    assert not (keys / "guest0.json").exists(), "no secret was left behind"


def test_a_local_key_is_revoked_like_any_other(keys: Path) -> None:
    assert "actor0" in read_allowed(keys / "allowed").actor_ids.values()
    revoke(keys, "actor0", "sold", NOW)
    assert not read_allowed(keys / "allowed").actor_ids
    # Somebody restores the file from a copy.
    create_keys(keys.parent / "other")
    (keys.parent / "other" / "allowed" / "actor0.json").rename(keys / "allowed" / "actor0.json")
    assert not read_allowed(keys / "allowed").actor_ids
    (row,) = [key for key in list_keys(keys, NOW) if key.actor_id == "actor0"]
    assert (row.state, row.reason, row.at) == ("revoked", "sold", NOW)


def test_two_may_revoke_a_key_at_the_same_moment(tmp_path: Path) -> None:
    """The learner, that has found a lie, and a person. Neither sees half of what the other does."""
    names = [f"actor{number}" for number in range(40)]
    create_keys(tmp_path / "keys", names)
    both, said = threading.Barrier(2), list[str]()

    def revoke_all(reason: str) -> None:
        for name in names:
            both.wait(10.0)
            try:
                revoke(tmp_path / "keys", name, reason, NOW)
            except SecurityError as error:
                said.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(revoke_all, reason) for reason in ("it lied", "by hand")]:
            done.result()
    assert all("revoked already" in sentence or "no key of" in sentence for sentence in said), said
    assert {key.actor_id for key in list_keys(tmp_path / "keys", NOW) if key.state == "revoked"} == set(names)
    assert len([*(tmp_path / "keys" / "revoked").iterdir()]) == len(names)


def test_when_an_actor_was_seen(keys: Path) -> None:
    add_key(keys, "guest0", OWN, NOW)
    before = {key.actor_id: key.seen_at for key in list_keys(keys, NOW)}
    assert before == {"actor0": None, "guest0": None}
    mark_seen(keys, "guest0")
    after = {key.actor_id: key for key in list_keys(keys, NOW)}
    assert after["actor0"].seen_at is None and (after["guest0"].seen_at or 0.0) > 1e9
    assert after["guest0"].invited and after["guest0"].at == NOW and not after["actor0"].invited
    assert stat.S_IMODE((keys / "seen").stat().st_mode) == 0o700


def test_who_joined_by_an_invitation(keys: Path) -> None:
    create_actor_key(keys, "own")
    add_key(keys, "guest0", OWN, NOW)
    assert is_invited(keys, "guest0") and not is_invited(keys, "own")
    (keys / "allowed" / "own.json").write_text("{")
    assert is_invited(keys, "own"), "nothing is known of it"


def test_a_key_that_cannot_be_written(keys: Path) -> None:
    allowed = AllowList(keys / "allowed", Allowances(), SparseLog())
    shutil.rmtree(keys / "allowed")
    with pytest.raises(SecurityError, match=r"cannot write the key of guest0 \(No such file or directory\)"):
        allowed.add_key("guest0", OWN)
    assert is_open(keys)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_key_that_a_full_disk_did_not_take_can_be_made_again(nth: int, keys: Path) -> None:
    before = sorted(keys.rglob("*"))
    with pytest.raises(OSError, match="No space left"), failing("fsync", errno.ENOSPC, nth=nth):
        create_actor_key(keys, "own")
    assert sorted(keys.rglob("*")) == before
    create_actor_key(keys, "own")
    assert "own" in load_learner_keys(keys).allowed.joinpath("own.json").read_text()


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_revocation_that_a_full_disk_did_not_take_can_be_made_again(call: str, keys: Path) -> None:
    (keys / "revoked").mkdir(mode=0o700)
    before = sorted(keys.rglob("*"))
    with pytest.raises(OSError, match="No space left"), failing(call, errno.ENOSPC):
        end(keys.parent)
    assert sorted(keys.rglob("*")) == before
    end(keys.parent)
    assert not is_open(keys)
