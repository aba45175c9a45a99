"""One line that joins a run from another machine: what it has, who is refused, what a damaged one does; and the list of
those who joined."""

import base64
import errno
import json
import time
import zlib
from pathlib import Path

import msgspec
import pytest

from actor.__main__ import parse, read_text
from launch.__main__ import main
from protocol.access.key_list import add_key, fingerprint, mark_seen, open_invitations
from protocol.access.keys import load_actor_key, read_allowed
from shared.config.load import config_from_json
from shared.errors import ConfigError, UserError
from shared.process.invitation import MAX_JSON_BYTES, Invitation, accept, read_invitation
from tests.support.disk_faults import failing

SETTLED = (
    "compute.dtype=fp32",
    "compute.learner_threads=1",
    "compute.actor_threads=1",
    "actor.token_step=torch",
    "rollout.prompts=6",
)


def prepared(out: Path, *keys: str) -> Path:
    """A run that an actor elsewhere can reach, unless the keys say otherwise."""
    words = [word for key in (*SETTLED, "link.endpoint=tcp://learner.example:5757", *keys) for word in ("--set", key)]
    assert main(["run", "embedded", "--prepare", "--out", str(out), *words]) == 0
    return out


def invited(out: Path, capsys: pytest.CaptureFixture[str], *name: str) -> str:
    """The text of an invitation, as the printed command has it."""
    capsys.readouterr()
    assert main(["invite", str(out), *name]) == 0
    said = capsys.readouterr().out
    (command,) = [line for line in said.splitlines() if line.startswith("echo ")]
    text, _, rest = command.removeprefix("echo ").partition(" ")
    assert rest == "| python -m actor --invitation -"
    assert "secret key" in said and f"python -m launch keys {out} --revoke" in said
    return text


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_it_has_address_key_and_the_whole_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    first, second = invited(out, capsys), invited(out, capsys, "gpu-box")
    found = accept(first, tmp_path / "cache")
    assert found.endpoint == "tcp://learner.example:5757"
    assert config_from_json(found.config.read_bytes()) == config_from_json((out / "config.json").read_bytes())
    own = load_actor_key(found.unconfirmed)
    assert own.actor_id == "guest0", "the mode of the file is checked too"
    assert not found.key.exists() and own.public != found.invitation.public
    for folder in (found.key.parent, found.unconfirmed.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    other = accept(second, tmp_path / "cache")
    assert other.key.name == "gpu-box.json" and other.config == found.config, "one folder, so one lease"
    assert accept(first, tmp_path / "cache") == found
    assert load_actor_key(found.unconfirmed) == own, "a pair that may be known to the learner stays"
    assert set(open_invitations(out / "keys", time.time()).values()) == {"guest0", "gpu-box"}
    assert set(read_allowed(out / "keys" / "allowed").actor_ids.values()) == {"actor0"}, "nobody has joined"
    assert len(first) < 1500, "a terminal takes it"


def test_the_secret_of_an_invitation_is_stored_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    secret = read_invitation(invited(out, capsys)).key.secret.encode()
    files = [file for file in out.rglob("*") if file.is_file()]
    assert files and not [file for file in files if secret in file.read_bytes()]
    assert {file.stat().st_mode & 0o777 for file in (out / "keys").rglob("*.json")} == {0o600}


def test_keys_are_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    invited(out, capsys)
    text = invited(out, capsys, "gpu-box", "--hours", "2")
    key = accept(text, tmp_path / "cache").unconfirmed
    add_key(out / "keys", "gpu-box", load_actor_key(key).public.decode(), now=1e9)
    mark_seen(out / "keys", "gpu-box")
    capsys.readouterr()
    assert main(["keys", str(out)]) == 0
    _, local, box, guest = capsys.readouterr().out.splitlines()
    assert "actor0" in local and "made here" in local and "not seen yet" in local
    assert "gpu-box" in box and "joined by invitation at 2001-09-09 01:46 UTC, last seen at 20" in box
    assert fingerprint(load_actor_key(key).public.decode()) in box
    assert "guest0" in guest and "invited, until 20" in guest
    for name in ("gpu-box", "guest0"):
        assert main(["keys", str(out), "--revoke", name]) == 0
    capsys.readouterr()
    assert main(["keys", str(out)]) == 0
    _, local, box, guest = capsys.readouterr().out.splitlines()
    assert "made here" in local and all("revoked at 20" in line and "by hand" in line for line in (box, guest))
    assert "is revoked already" in refused(["keys", str(out), "--revoke", "guest0"], capsys)
    assert "no key of 'x' to revoke; the run has actor0." in refused(["keys", str(out), "--revoke", "x"], capsys)
    assert "was revoked, and a name is used once" in refused(["invite", str(out), "gpu-box"], capsys)
    assert "was revoked, and a name is used once" in refused(["key", str(out), "gpu-box"], capsys)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("link.endpoint=ipc", "(link.endpoint = 'ipc'); for actors elsewhere link.endpoint must be tcp://HOST:PORT"),
        ("link.endpoint=tcp://127.0.0.1:5757", "(link.endpoint = 'tcp://127.0.0.1:5757')"),
        ("link.endpoint=tcp://[::1]:5757", "(link.endpoint = 'tcp://[::1]:5757')"),
        ("link.endpoint=tcp://localhost:5757", "(link.endpoint = 'tcp://localhost:5757')"),
        ("link.endpoint=tcp://0.0.0.0:5757", "link.endpoint must name an address"),
        ("link.bind=tcp://127.0.0.1:5757", "(link.bind = 'tcp://127.0.0.1:5757')"),
    ],
)
def test_a_run_that_no_other_machine_reaches_invites_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    out = prepared(tmp_path / "run", key)
    said = refused(["invite", str(out)], capsys)
    assert words in said and str(out / "config.json") in said
    assert not open_invitations(out / "keys", time.time())


def test_a_key_names_no_address_that_only_this_machine_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, address in (("link.endpoint=tcp://127.0.0.1:5757", "HOST:PORT"), ("run.seed=1", "learner.example:5757")):
        out = prepared(tmp_path / address, key)
        assert main(["key", str(out), "box"]) == 0
        said = capsys.readouterr().out
        assert f"--connect tcp://{address} --key box.json" in said
        assert ("tcp://127.0.0.1:5757 works only on this one" in said) == (address == "HOST:PORT")


def test_all_addresses_are_one_to_listen_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invited(prepared(tmp_path / "run", "link.bind=tcp://0.0.0.0:5757"), capsys)


def test_a_run_that_has_not_chosen_its_arithmetic_invites_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prepared(tmp_path / "run", "compute.dtype=auto")
    assert f"start it with `resume {out}` first" in refused(["invite", str(out)], capsys)


def test_a_taken_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    assert "There is an actor 'actor0' already" in refused(["invite", str(out), "actor0"], capsys)
    invited(out, capsys, "box")
    assert "There is an actor 'box' already" in refused(["invite", str(out), "box"], capsys)
    assert "There is an actor 'box' already" in refused(["key", str(out), "box"], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config"], "An invited actor cannot be called 'config'"),
        (["--hours", "9" * 40], "expected at most 8760"),
    ],
)
def test_what_the_other_machine_could_not_take_is_not_invited(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prepared(tmp_path / "run")
    assert said in refused(["invite", str(out), *words], capsys)
    assert not (out / "keys" / "invited").exists()


def packed(content: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(content)).decode()


def changed(text: str, **fields: object) -> str:
    """An invitation with other fields."""
    return packed(msgspec.json.encode(msgspec.structs.replace(read_invitation(text), **fields)))


def test_a_damaged_one_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = invited(prepared(tmp_path / "run"), capsys)
    whole: Invitation = read_invitation(text)
    path = msgspec.structs.replace(whole.key, actor_id="../../x")
    lease = msgspec.structs.replace(whole.key, actor_id="lease")
    for bad in (
        "",
        "hello",
        text[:-9],
        text[9:],
        "\u00e4" * 40,
        packed(b"[" * 100_000),
        packed(b" " * (2 * MAX_JSON_BYTES)),
        packed(json.dumps({"endpoint": "tcp://x:1"}).encode()),
        changed(text, key=path),
        changed(text, key=lease),
    ):
        with pytest.raises(ConfigError, match="damaged or cut short"):
            accept(bad, tmp_path / "cache")
    assert read_invitation(f"  {text[:40]}\n{text[40:]}\n") == whole, "a mail program may wrap it"


def test_another_version_of_the_configuration_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = invited(prepared(tmp_path / "run"), capsys)
    with pytest.raises(ConfigError, match="another version of Tandem"):
        accept(changed(text, sha256="0" * 64), tmp_path / "cache")
    with pytest.raises(ConfigError, match="another version of Tandem"):
        accept(changed(text, changed={"run": {"steps": 7}}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_invitation_stands_alone_and_may_be_a_file(tmp_path: Path) -> None:
    assert parse(["--invitation", "-"]).id == "invited"
    with pytest.raises(SystemExit):
        parse(["--invitation", "-", "--id", "actor0"])
    (tmp_path / "text").write_text("abc")
    assert read_text(str(tmp_path / "text")) == "abc"
    with pytest.raises(UserError, match="cannot be read"):
        read_text(str(tmp_path / "none"))


@pytest.mark.parametrize("command", ["key DIR a", "invite DIR a", "keys DIR --revoke actor0", "resume DIR --actors 2"])
def test_a_full_disk_is_one_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    with failing("fsync", errno.ENOSPC):
        said = refused(command.replace("DIR", str(out)).split(), capsys)
    assert f"{out / 'keys'} cannot be used (No space left on device); free some space on that disk" in said
