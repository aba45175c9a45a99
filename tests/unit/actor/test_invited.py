"""A machine joins by an invitation, over real sockets, at a run that goes on; nobody joins with it again."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actor.invited import add_key, join
from protocol.access.key_list import create_invitation, revoke
from protocol.access.keys import ActorKey, read_allowed
from protocol.errors import HandshakeRefused, NotAccepted, PeerTimeout
from protocol.limits import MAX_REFUSALS
from protocol.messages import Heartbeat, Hello, NewKey, Order, Welcome
from protocol.transport import ZmqActorPort
from shared.config.tree import Config
from shared.process.entry_point import run_process
from shared.process.invitation import Accepted, accept, write_invitation
from tests.support.fakes import hello_of, scripted_identity
from tests.support.live_run import LiveRun, live_run
from tests.support.runs import wait_until

SILENCE_S = 20.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """One run for all tests of this module."""
    with live_run(tmp_path_factory.mktemp("run")) as live:
        yield live


def invited(run: LiveRun, name: str, hours: float = 1.0) -> str:
    expires_at = time.time() + 3600 * hours
    return write_invitation(run.endpoint, create_invitation(run.keys, name, expires_at), expires_at, Config())


def hello(name: str) -> Hello:
    return hello_of(scripted_identity(), name)


def is_welcome(run: LiveRun, key: ActorKey) -> bool:
    port = ZmqActorPort(run.endpoint, key)
    try:
        for _ in range(20):
            port.send(hello(key.actor_id))
            if isinstance(port.receive(0.5), Welcome):
                return True
        return False
    finally:
        port.close()


def joined(run: LiveRun, name: str, cache: Path) -> tuple[Accepted, ActorKey]:
    accepted = accept(invited(run, name), cache)
    return accepted, join(accepted, SILENCE_S)


def test_it_joins_with_a_key_of_its_own_and_again_after_a_restart(run: LiveRun, tmp_path: Path) -> None:
    text = invited(run, "box")
    accepted = accept(text, tmp_path)
    key = join(accepted, SILENCE_S)
    assert key.public != accepted.invitation.public
    assert read_allowed(run.keys / "allowed").actor_ids[key.public.decode()] == "box"
    assert is_welcome(run, key)
    secrets = [key.secret, accepted.invitation.secret]
    files = [file for file in run.keys.rglob("*") if file.is_file()]
    assert not [file for file in files for secret in secrets if secret in file.read_bytes()]
    assert join(accept(text, tmp_path), SILENCE_S) == key, "the same command, on the same machine"
    assert accepted.key.stat().st_mode & 0o777 == 0o600 and not accepted.unconfirmed.exists()
    run.goes_on()


def test_nobody_joins_with_it_again(
    run: LiveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = invited(run, "once")
    first = join(accept(text, tmp_path / "first"), SILENCE_S)
    code = run_process("invited", lambda: replay(text, tmp_path / "second"))
    said = capsys.readouterr().err
    assert code == 2 and said.count("error: ") == 1
    assert re.search(r"error: .* the invitation of once: it was used already, or revoked\. Ask for a new one", said)
    assert "--revoke once" in said
    assert first.secret.decode() not in said + caplog.text
    assert is_welcome(run, first), "the one who came first stays"
    run.goes_on()


def replay(text: str, cache: Path) -> None:
    join(accept(text, cache), SILENCE_S)


def test_an_expired_one_is_refused(run: LiveRun, tmp_path: Path) -> None:
    accepted = accept(invited(run, "late", hours=-1.0), tmp_path)
    with pytest.raises(NotAccepted, match=r"invitation of late: it expired at 20.* UTC\. Ask for a new one"):
        join(accepted, SILENCE_S)
    assert "late" not in read_allowed(run.keys / "allowed").actor_ids.values()
    run.goes_on()


def test_an_actor_that_was_killed_before_the_reply_goes_on_with_its_key(run: LiveRun, tmp_path: Path) -> None:
    accepted, key = joined(run, "killed", tmp_path)
    accepted.key.rename(accepted.unconfirmed)
    assert join(accepted, SILENCE_S) == key and is_welcome(run, key)
    run.goes_on()


def test_two_at_once_with_one_invitation(run: LiveRun, tmp_path: Path) -> None:
    """The second is connected already when the first uses it."""
    accepted = accept(invited(run, "twice"), tmp_path)
    port = ZmqActorPort(run.endpoint, accepted.invitation)
    wait_until(lambda: port.receive(0.05) is None and port.watch.has_succeeded, seconds=10)
    key = join(accepted, SILENCE_S)
    port.send(Heartbeat(phase="me too"))
    with pytest.raises(NotAccepted):
        wait_until(lambda: port.receive(0.1) is not None, seconds=20)
    port.close()
    assert is_welcome(run, key)
    run.goes_on()


def test_with_an_invitation_nothing_can_be_done_but_adding_a_key(
    run: LiveRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = accept(invited(run, "odd"), tmp_path)
    run.port.sparse_log.counts.clear()
    port = ZmqActorPort(run.endpoint, accepted.invitation)
    port.send(hello("odd"))
    wait_until(lambda: "odd is invited and sent something else than its key" in caplog.text, seconds=10)
    assert port.receive(0.3) is None
    port.close()
    with pytest.raises(HandshakeRefused, match="no valid key"):
        add_key(run.endpoint, accepted.invitation, '"' * 40, SILENCE_S)
    assert join(accepted, SILENCE_S), "it is open as before"
    run.goes_on()


def test_who_sends_nonsense_with_an_invitation_again_and_again_is_banned(run: LiveRun, tmp_path: Path) -> None:
    """Nobody reads the replies: without an end, sending one more would make the learner wait."""
    accepted = accept(invited(run, "flood"), tmp_path)
    port = ZmqActorPort(run.endpoint, accepted.invitation)
    for _ in range(MAX_REFUSALS):
        port.send(NewKey(public='"' * 40))
    wait_until(lambda: run.port.allowances.is_banned("flood"), seconds=10)
    port.close()
    run.goes_on()


def test_nobody_listens(tmp_path: Path, run: LiveRun) -> None:
    accepted = replace(accept(invited(run, "alone"), tmp_path), endpoint="tcp://127.0.0.1:9")
    with pytest.raises(PeerTimeout, match="reply to an invitation"):
        join(accepted, 0.5)


def test_a_revoked_actor_is_cut_off_and_its_order_goes_to_others(
    run: LiveRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accepted, key = joined(run, "gone", tmp_path)
    caplog.set_level(logging.INFO)
    port = ZmqActorPort(run.endpoint, key)
    port.send(hello("gone"))
    wait_until(lambda: isinstance(port.receive(0.5), Order), seconds=20)
    revoke(run.keys, "gone", "by hand", time.time())
    with pytest.raises(NotAccepted, match="its actor was revoked"):
        for _ in range(200):
            port.send(Heartbeat(phase="still here"))
            port.receive(0.1)
    port.close()
    wait_until(lambda: "actor gone cannot be reached" in caplog.text, seconds=10)
    run.goes_on()
    with pytest.raises(NotAccepted):
        is_welcome(run, join(accepted, SILENCE_S))
    run.goes_on()
