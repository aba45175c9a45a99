"""One line that joins a run from another machine: what it has, who is refused, and what a damaged one does."""

import base64
import json
import zlib
from pathlib import Path

import msgspec
import pytest

from actor.__main__ import parse, read_text
from launch.__main__ import main
from protocol.access.keys import load_actor_key, read_allowed
from shared.config.load import config_from_json
from shared.errors import ConfigError, UserError
from shared.process.invitation import MAX_JSON_BYTES, Invitation, accept, read_invitation

SETTLED = ("compute.dtype=fp32", "compute.learner_threads=1", "compute.actor_threads=1", "rollout.prompts=6")


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
    assert "secret key" in said and f"rm {out / 'keys' / 'allowed'}" in said
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
    assert load_actor_key(found.key).actor_id == "guest0", "the mode of the file is checked too"
    assert found.key.read_bytes() == (out / "keys" / "guest0.json").read_bytes()
    assert found.key.parent.stat().st_mode & 0o777 == 0o700
    other = accept(second, tmp_path / "cache")
    assert other.key.name == "gpu-box.json" and other.config == found.config, "one folder, so one lease"
    assert accept(first, tmp_path / "cache") == found, "it may be used again"
    assert {"guest0", "gpu-box"} < set(read_allowed(out / "keys" / "allowed").actor_ids.values())
    assert len(first) < 1500, "a terminal takes it"


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
    assert not (out / "keys" / "guest0.json").exists()


def test_all_addresses_are_one_to_listen_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invited(prepared(tmp_path / "run", "link.bind=tcp://0.0.0.0:5757"), capsys)


def test_a_run_that_has_not_chosen_its_arithmetic_invites_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = prepared(tmp_path / "run", "compute.dtype=auto")
    assert f"start it with `resume {out}` first" in refused(["invite", str(out)], capsys)


def test_a_taken_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = prepared(tmp_path / "run")
    assert "actor0.json exists" in refused(["invite", str(out), "actor0"], capsys)


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
