"""protocol/README.md says what the code does: version, messages, fields, limits, bytes."""

import ast
import re
from pathlib import Path

import pytest

from protocol import limits, messages
from protocol.codec import decode, encode
from protocol.messages import PROTOCOL_VERSION, Ack, AnyMessage, Finish, Outcome
from tests.support.wire_examples import MESSAGE_TYPES, name_of, order, plain

PROTOCOL = Path(messages.__file__).parent
README = (PROTOCOL / "README.md").read_text()
RECORDS = {
    node.name: node
    for node in ast.parse((PROTOCOL / "messages.py").read_text()).body
    if isinstance(node, ast.ClassDef) and "kw_only" in ast.unparse(node) and node.name not in ("Message", "Record")
}
LIMITS = {name: value for name, value in vars(limits).items() if name.isupper()}
WORDS = {
    "Name": "name",
    "Text": "text",
    "Digest": "digest",
    "Key": "key",
    "Count": "count",
    "Mark": "mark",
    "Count | None": "count or nil",
    "Name | None": "name or nil",
    "bool": "boolean",
    "Seconds": "seconds",
    "NDArray[np.uint8]": "uint8 array",
    "NDArray[np.uint8] | None": "uint8 array or nil",
    "NDArray[np.int32]": "int32 array",
    "NDArray[np.float32]": "float32 array",
    "NDArray[np.float32] | None": "float32 array or nil",
    "Annotated[dict[Name, Text], Meta(max_length=MAX_KEYS)]": "map of name to text",
    "Annotated[dict[Name, Scores], Meta(max_length=MAX_KEYS)]": "map of name to list of score",
    "Annotated[dict[Name, Texts], Meta(max_length=MAX_KEYS)]": "map of name to list of text",
    "Annotated[dict[Name, Score], Meta(max_length=MAX_KEYS)]": "map of name to score",
    "Annotated[int, Meta(ge=1, le=MAX_CREDITS)]": "integer, 1 to 1024",
    "Annotated[int, Meta(ge=1, le=1000000)]": "integer, 1 to 1000000",
    "Annotated[float, Meta(gt=0, le=3600)]": "float, above 0 to 3600",
    "Annotated[float, Meta(gt=0, le=86400)]": "float, above 0 to 86400",
    "Annotated[float, Meta(ge=0.0, le=100.0)]": "float, 0 to 100",
    "Megabytes": "float, 0 to 1e9",
}


def words(annotation: ast.expr) -> str:
    """A type as the document writes it."""
    source = ast.unparse(annotation)
    many = r"Annotated\[tuple\[(\w+), \.\.\.\], Meta\(min_length=1, max_length=MAX_ITEMS\)\]( \| None)?"
    items = re.fullmatch(many, source)
    if items is None:
        return WORDS.get(source, source)
    scalar = items[1] in ("Seed", "Count", "Finish", "Outcome", "Score")
    return f"list of {items[1].lower() if scalar else items[1]}{' or nil' if items[2] else ''}"


def fields(record: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Name, type and docstring of each field."""
    found: list[tuple[str, str, str]] = []
    for field, doc in zip(record.body, record.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert isinstance(doc, ast.Expr), f"{record.name}.{field.target.id} has no docstring"
            found.append((field.target.id, words(field.annotation), " ".join(ast.literal_eval(doc.value).split())))
    return found


def section(title: str) -> str:
    """Text below a heading, up to the next."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match, f"README.md has no section {title}"
    return match[1]


def rows(text: str) -> list[tuple[str, ...]]:
    """Cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split(" | ")) for line in lines]


def test_version() -> None:
    assert f"\nProtocol version: {PROTOCOL_VERSION}\n" in README


def test_every_message_is_among_the_records() -> None:
    assert {kind.__name__ for kind in MESSAGE_TYPES} < set(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_every_message_and_field(name: str) -> None:
    text = section(name)
    purpose = ast.get_docstring(RECORDS[name])
    assert purpose is not None
    assert purpose in text
    assert rows(text) == fields(RECORDS[name])


def test_the_document_has_no_message_that_the_code_has_not() -> None:
    titles = re.findall(r"^#### (\w+)$", README, re.MULTILINE)
    assert titles == list(RECORDS)


def test_every_outcome_and_finish() -> None:
    for kind in (Outcome, Finish):
        listed = ", ".join(f"`{value}`" for value in kind)
        assert f"| {kind.__name__.lower()} | {listed} |" in README


def test_every_limit() -> None:
    documented = {name: value for name, value, _ in rows(section("Limits"))}
    assert documented == {name: str(value) for name, value in LIMITS.items()}


def test_limits_are_a_decision() -> None:
    """They belong to the protocol version: change a limit only with the version, here and in the document."""
    assert PROTOCOL_VERSION == 11
    assert LIMITS == {
        "NUM_FRAMES": 3,
        "MAX_HEADER_BYTES": 256,
        "MAX_BODY_BYTES": 8_388_608,
        "GROUPS_BYTES": 8_257_536,
        "MAX_BUFFER_BYTES": 1_073_741_824,
        "BUFFER_ALIGNMENT": 16,
        "PART_BYTES": 1_048_576,
        "MAX_ITEMS": 4096,
        "MAX_KEYS": 64,
        "MAX_NAME_CHARS": 128,
        "MAX_TEXT_CHARS": 65_536,
        "MAX_STRING_BYTES": 262_144,
        "MAX_COUNT": 2_147_483_647,
        "MAX_SEED": 9_223_372_036_854_775_807,
        "MAX_SCORE": 1e9,
        "MAX_CREDITS": 1024,
        "HIGH_WATER_MARK": 2048,
        "SEND_TIMEOUT_S": 10.0,
        "LINGER_MS": 1000,
        "MAX_INBOUND_BYTES": 67_108_864,
        "MAX_MESSAGES_A_PUMP": 512,
        "MAX_BACKLOG_BYTES": 536_870_912,
        "BACKLOG_SHARE_BYTES": 1_048_576,
        "HANDSHAKE_COST": 256,
        "MAX_CONNECTIONS": 2048,
        "MAX_UNAUTHENTICATED": 128,
        "MAX_HANDSHAKE_BYTES": 65_536,
        "LISTEN_BACKLOG": 64,
        "HANDSHAKE_MS": 5000,
        "ALLOWANCE_BURST": 4096.0,
        "ALLOWANCE_PER_S": 500.0,
        "COST_BYTES": 65_536,
        "MAX_REFUSALS": 8,
        "BAN_S": 60.0,
        "KEEPALIVE_MS": 2000,
        "KEEPALIVE_TIMEOUT_MS": 10_000,
        "MAX_HANDSHAKE_FAILURES": 3,
        "MAX_PARSE_RATIO": 80,
        "PARSE_BYTES": 1_048_576,
        "MAX_LOGPROB": 1e-3,
        "MIN_LOGPROB": -1000.0,
        "MAX_ENTROPY": 22.0,
        "MAX_SHOWN_CHARS": 200,
    }


def hex_examples() -> list[list[bytes]]:
    """The frames of each example in the document."""
    blocks = re.findall(r"```hex\n(.*?)```", README, re.DOTALL)
    return [[bytes.fromhex(part) for part in re.split(r"header|body|buffers", block)[1:]] for block in blocks]


@pytest.mark.parametrize(
    ("index", "message"), [(0, Ack(order_id="train/000012/u0")), (1, order())], ids=["Ack", "Order"]
)
def test_the_bytes_in_the_document(index: int, message: AnyMessage) -> None:
    frames = hex_examples()[index]
    assert encode(message) == frames
    assert plain(decode(frames)) == plain(message)
    assert name_of(decode(frames)) == name_of(message)


def test_number_of_examples() -> None:
    assert len(hex_examples()) == 2
