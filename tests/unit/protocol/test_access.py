"""Keys that others can read are refused; a peer without a key, or with a wrong one, gets nothing."""

import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq

from protocol.access.allow_list import ZAP_DOMAIN, AllowList
from protocol.access.allowance import Allowances
from protocol.access.keys import (
    ActorKey,
    LearnerFile,
    create_actor_key,
    create_keys,
    load_actor_key,
    load_learner_keys,
    read_allowed,
    write_new,
)
from protocol.access.sparse_log import SparseLog
from protocol.codec import encode
from protocol.errors import SecurityError
from protocol.limits import MAX_HANDSHAKE_FAILURES
from protocol.messages import Drain, Heartbeat
from protocol.transport import ZmqActorPort, ZmqLearnerPort
from tests.support.disk_faults import list_calls, no_descriptor_free


@dataclass(frozen=True, kw_only=True)
class Run:
    """A listening learner, its actors' key, and the key of another run."""

    learner: ZmqLearnerPort
    key: ActorKey
    foreign: ActorKey


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture(params=["ipc", "tcp"])
def run(request: pytest.FixtureRequest, keys: Path, tmp_path: Path) -> Iterator[Run]:
    create_keys(tmp_path / "other")
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/socket" if request.param == "ipc" else "tcp://127.0.0.1:*"
        with closing(ZmqLearnerPort(endpoint, load_learner_keys(keys))) as learner:
            key, foreign = load_actor_key(keys / "actor0.json"), load_actor_key(tmp_path / "other" / "actor0.json")
            yield Run(learner=learner, key=key, foreign=foreign)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        create_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == 0o700
    assert {file.name: mode(file) for file in (tmp_path / "keys").iterdir()} == {
        "learner.json": 0o600,
        "actor0.json": 0o600,
        "allowed": 0o700,
    }
    assert mode(tmp_path / "keys" / "allowed" / "actor0.json") == 0o600


def test_every_key_is_durable_by_name(tmp_path: Path) -> None:
    calls = [call for call in list_calls(lambda: create_keys(tmp_path / "keys")) if call in ("mkdir", "fsync")]
    # Three files, each synced before the folder that holds its name, and first the two folders.
    assert calls == ["mkdir", "mkdir", *["fsync"] * 6]


def test_a_folder_that_is_there_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    create_keys(tmp_path / "keys")
    assert mode(tmp_path / "keys") == 0o700


def test_a_disk_that_keeps_no_permissions_is_no_place_for_keys(keys: Path) -> None:
    def show_all_to_all(_frame: FrameType, event: str, called: Any) -> None:
        # As a drive of Windows in WSL: whatever is looked at has mode 0777.
        if event == "c_call" and called is os.stat:
            for path in (keys, *keys.iterdir()):
                os.chmod(path, 0o777)

    before = {file.name for file in keys.iterdir()}
    told = r"{} can be read by others, since its disk keeps no permissions; .* such as --out "
    sys.setprofile(show_all_to_all)
    try:
        with pytest.raises(SecurityError, match=told.format(keys)):
            create_keys(keys, ["actor1"])
        with pytest.raises(SecurityError, match=told.format(keys / "more.json")):
            write_new(keys / "more.json", LearnerFile(public="", secret=""))
    finally:
        sys.setprofile(None)
    assert {file.name for file in keys.iterdir()} == before


def test_keys_are_not_overwritten(keys: Path) -> None:
    before = load_learner_keys(keys)
    with pytest.raises(SecurityError, match=r"learner\.json exists"):
        create_keys(keys)
    assert load_learner_keys(keys) == before


def test_the_two_files_fit_together(keys: Path) -> None:
    learner, actor = load_learner_keys(keys), load_actor_key(keys / "actor0.json")
    assert read_allowed(learner.allowed).actor_ids == {actor.public.decode(): "actor0"}
    assert not read_allowed(learner.allowed).faults
    assert actor.actor_id == "actor0"
    assert learner.public == actor.learner_public
    assert learner.secret != actor.secret
    assert actor.file == keys / "actor0.json"


def test_secrets_are_not_shown(keys: Path) -> None:
    learner, actor = load_learner_keys(keys), load_actor_key(keys / "actor0.json")
    assert learner.secret.decode() not in repr(learner)
    assert actor.secret.decode() not in repr(actor)


@pytest.mark.parametrize("name", ["learner.json", "actor0.json", "allowed/actor0.json"])
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o610, 0o602, 0o666])
def test_a_file_open_to_others_is_refused(keys: Path, name: str, bits: int) -> None:
    (keys / name).chmod(bits)
    with pytest.raises(SecurityError, match=f"run `chmod 600 {keys / name}`"):
        load_all(keys)
    (keys / name).chmod(0o400)
    load_all(keys)


@pytest.mark.parametrize("name", ["learner.json", "actor0.json"])
def test_a_missing_file_is_named(keys: Path, name: str) -> None:
    (keys / name).unlink()
    words = rf"{keys / name} cannot be read \(No such file.*launch key RUN NAME.*copy the run's keys/NAME"
    with pytest.raises(SecurityError, match=words):
        load_all(keys)


def load_all(keys: Path) -> None:
    """What learner and actor load at their start."""
    load_learner_keys(keys)
    load_actor_key(keys / "actor0.json")


def spoilt(content: dict[str, str]) -> dict[str, bytes]:
    """Ways in which a key file can be wrong."""
    return {
        "empty": b"",
        "not JSON": b"not json",
        "not UTF-8": b'{"public": "\xff"}',
        "list": b"[]",
        "no secret": json.dumps({**content, "secret": None}).encode(),
        "unknown field": json.dumps({**content, "extra": 1}).encode(),
        "short secret": json.dumps({**content, "secret": content["secret"][:-1]}).encode(),
        "not Z85": json.dumps({**content, "secret": "~" * 40}).encode(),
        "not a pair": json.dumps({**content, "public": content["secret"]}).encode(),
        "no actor id": json.dumps({**content, "actor_id": ".."}).encode(),
        "bad learner key": json.dumps({**content, "learner_public": "x"}).encode(),
        "cut off": json.dumps(content).encode()[:-2],
    }


@pytest.mark.parametrize("name", ["learner.json", "actor0.json"])
def test_a_malformed_file_is_refused_and_not_quoted(keys: Path, name: str) -> None:
    file = keys / name
    content = json.loads(file.read_bytes())
    for data in spoilt(content).values():
        file.write_bytes(data)
        with pytest.raises(SecurityError, match=f"{file} has no valid key; make one with") as caught:
            load_all(keys)
        assert content["public"] not in str(caught.value)
        assert content.get("secret", "none") not in str(caught.value)


@pytest.mark.parametrize("folder", ["", "allowed"])
def test_a_folder_open_to_others_is_refused(keys: Path, folder: str) -> None:
    (keys / folder).chmod(0o750)
    with pytest.raises(SecurityError, match=f"run `chmod 700 {keys / folder}`"):
        load_learner_keys(keys)
    (keys / folder).chmod(0o500)
    load_learner_keys(keys)


def test_a_missing_folder_is_named(keys: Path) -> None:
    (keys / "allowed" / "actor0.json").unlink()
    (keys / "allowed").rmdir()
    with pytest.raises(SecurityError, match=f"There is no folder {keys / 'allowed'}"):
        load_learner_keys(keys)


def test_a_lack_of_descriptors_is_not_blamed_on_the_key(keys: Path) -> None:
    for load, path in ((load_actor_key, keys / "actor0.json"), (load_learner_keys, keys)):
        words = (
            r"cannot be read \(Too many open files\); no descriptor is free: raise the limit \(`ulimit -n 1024`\)\.$"
        )
        with pytest.raises(SecurityError, match=words), no_descriptor_free():
            load(path)


def allow_list(keys: Path) -> tuple[AllowList, bytes]:
    """As a learner has it, and the key of its actor."""
    return AllowList(keys / "allowed", Allowances(), SparseLog()), load_actor_key(keys / "actor0.json").public


def test_an_allow_list_that_cannot_be_read_stays_as_it_was(keys: Path) -> None:
    allowed, key = allow_list(keys)
    with no_descriptor_free():
        assert allowed.callback(ZAP_DOMAIN, key)
        allowed.read()
    assert allowed.allows("actor0") and allowed.actor_id(key.decode()) == "actor0"
    assert allowed.sparse_log.counts["kept the allow-list as it was"] == 2


def test_a_file_that_the_disk_does_not_give_keeps_its_key_and_no_other(keys: Path) -> None:
    """A folder in the file's place opens as little as a file on a bad block."""
    other = load_actor_key(create_actor_key(keys, "other")).public
    allowed, key = allow_list(keys)
    (keys / "allowed" / "actor0.json").unlink()
    (keys / "allowed" / "actor0.json").mkdir()
    (keys / "allowed" / "other.json").unlink()
    assert allowed.callback(ZAP_DOMAIN, key)
    assert not allowed.callback(ZAP_DOMAIN, other)
    assert allowed.sparse_log.counts["kept a key as it was"] == 2
    (keys / "allowed" / "actor0.json").rmdir()
    assert not allowed.callback(ZAP_DOMAIN, key), "it was removed"


def test_a_file_that_is_removed_between_listing_and_reading_counts_as_removed(keys: Path) -> None:
    """As a link to nothing does: its name is listed, and it cannot be opened."""
    allowed, key = allow_list(keys)
    (keys / "allowed" / "actor0.json").unlink()
    (keys / "allowed" / "actor0.json").symlink_to(keys / "nothing.json")
    found = read_allowed(keys / "allowed")
    assert not found.actor_ids and not found.faults and not found.unread
    assert not allowed.callback(ZAP_DOMAIN, key)


def test_without_its_folder_the_allow_list_is_empty(keys: Path) -> None:
    allowed, key = allow_list(keys)
    shutil.rmtree(keys / "allowed")
    assert not allowed.callback(ZAP_DOMAIN, key)
    assert not allowed.sparse_log.counts["kept the allow-list as it was"]


def test_looking_up_a_key_never_raises(keys: Path) -> None:
    """It would end the thread that does the handshakes."""
    allowed, key = allow_list(keys)
    assert not allowed.callback(ZAP_DOMAIN, b"\xff")
    assert allowed.sparse_log.counts["refused a connection: its key could not be looked up"] == 1
    assert allowed.callback(ZAP_DOMAIN, key)


def test_a_key_is_durable_by_name(keys: Path) -> None:
    calls = list_calls(lambda: create_actor_key(keys, "other"))
    assert [call for call in calls if call != "open"] == ["fsync"] * 4, "each file and its folder"


def test_one_more_actor_has_a_key_of_its_own(keys: Path) -> None:
    file = create_actor_key(keys, "gpu-box.1")
    key, first = load_actor_key(file), load_actor_key(keys / "actor0.json")
    assert file == keys / "gpu-box.1.json" and key.actor_id == "gpu-box.1"
    assert key.public != first.public and key.learner_public == first.learner_public
    allowed = read_allowed(keys / "allowed")
    assert allowed.actor_ids == {key.public.decode(): "gpu-box.1", first.public.decode(): "actor0"}
    assert not allowed.faults
    with pytest.raises(SecurityError, match="exists; use the key in it"):
        create_actor_key(keys, "gpu-box.1")
    assert load_actor_key(file) == key


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "learner", "a" * 65, "a\n", "\u00e9"])
def test_names_that_are_no_actor(keys: Path, name: str) -> None:
    with pytest.raises(SecurityError, match="is not a name for an actor"):
        create_actor_key(keys, name)


def test_entries_that_the_allow_list_may_not_have(keys: Path) -> None:
    """Each costs its own entry and no other."""
    create_actor_key(keys, "good")
    file = keys / "allowed" / "actor0.json"
    good = json.loads((keys / "allowed" / "good.json").read_bytes())
    twice = {"actor_id": "zz", "public": good["public"]}
    for name, content in {"actor0": good, "zz": twice, "yy": {"actor_id": "yy", "public": "~" * 40}, "xx": []}.items():
        file.unlink(missing_ok=True)
        file = keys / "allowed" / f"{name}.json"
        file.write_text(json.dumps(content))
        file.chmod(0o600)
        found = read_allowed(keys / "allowed")
        assert found.actor_ids == {good["public"]: "good"} and not found.unread
        assert list(found.faults) == [name] and str(file) in str(found.faults[name])
        with pytest.raises(SecurityError, match=str(file)):
            load_learner_keys(keys)


@pytest.mark.parametrize("whose", ["foreign", "wrong learner key"])
def test_an_actor_whose_key_does_not_fit_is_told_so(run: Run, whose: str) -> None:
    """The file to replace is named within seconds; the learner hears nothing and goes on."""
    unknown_key = replace(run.foreign, learner_public=run.key.learner_public)
    wrong_learner = replace(run.key, learner_public=run.foreign.learner_public)
    key = unknown_key if whose == "foreign" else wrong_learner
    start = time.monotonic()
    told = pytest.raises(SecurityError, match=f"key file {key.file}[: ].*(not in keys/allowed|do not belong together)")
    with closing(ZmqActorPort(run.learner.endpoint, key, silence_s=1.0)) as actor, told:
        actor.receive(10.0)
    assert time.monotonic() - start < 5
    assert run.learner.receive(0.1) is None
    with closing(ZmqActorPort(run.learner.endpoint, run.key)) as actor:
        actor.send(Heartbeat(phase="here"))
        assert run.learner.receive(5.0) is not None


def test_sending_tells_it_too(run: Run) -> None:
    key = replace(run.foreign, learner_public=run.key.learner_public)
    with closing(ZmqActorPort(run.learner.endpoint, key, send_timeout_s=0.5)) as actor:
        actor.socket.linger = 0
        with pytest.raises(SecurityError, match="not in keys/allowed"):
            for _ in range(500):
                actor.send(Drain())
                time.sleep(0.01)


def test_a_peer_without_a_key_gets_nothing(run: Run) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(run.learner.endpoint)
        with suppress(zmq.Again):  # nothing can be sent any more once the handshake has failed
            dealer.send_multipart(encode(Heartbeat(phase="here")), zmq.NOBLOCK)
        assert run.learner.receive(0.5) is None
        assert not dealer.poll(0)


def test_a_learner_without_keys_is_not_believed(keys: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        key = load_actor_key(keys / "actor0.json")
        with closing(ZmqActorPort(f"tcp://127.0.0.1:{port}", key, silence_s=0.5)) as actor:
            actor.socket.linger = 0
            with pytest.raises(SecurityError, match="do not belong together"):
                actor.send(Heartbeat(phase="here"))
                actor.receive(10.0)
        assert not impostor.poll(0)


def hang_up(endpoint: str, times: int) -> None:
    """Accept this many connections and drop them, as a learner does that is killed while it starts."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port)), reuse_port=True) as server:
        for _ in range(times):
            server.accept()[0].close()


def test_hanging_up_is_forgiven_for_as_long_as_silence_is(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A forwarder takes every call while its learner is not there. Only one that never ends is blamed on the key."""
    with closing(ZmqLearnerPort("tcp://127.0.0.1:*", load_learner_keys(keys))) as first:
        endpoint = first.endpoint
    with closing(ZmqActorPort(endpoint, load_actor_key(keys / "actor0.json"), silence_s=2.0)) as actor:
        for _ in range(2):
            hang_up(endpoint, 2 * MAX_HANDSHAKE_FAILURES)
            assert actor.receive(0.1) is None
            with closing(ZmqLearnerPort(endpoint, load_learner_keys(keys))) as learner:
                actor.send(Heartbeat(phase="here"))
                assert learner.receive(5.0) is not None
        assert "hangs up during the handshake: the learner behind it has not started, or" in caplog.text
        start = time.monotonic()
        with pytest.raises(SecurityError, match="do not belong together"):
            while time.monotonic() - start < 20:
                hang_up(endpoint, 1)
                actor.receive(0.01)
        assert time.monotonic() - start > 2.0
