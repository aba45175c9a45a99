"""Encodes a message as three frames, and decodes it. `encode` and `decode` are pure inverses.

    header   msgpack map {version, type, crc32}; crc32 is computed over body, then buffers
    body     msgpack map of the message's fields; an array is represented as [dtype, number of elements]
    buffers  the arrays' little-endian bytes in the order of the body, each at the next multiple of 16, zeros between
             them, nothing after them

Both ends check a message against the types of messages.py, so an invalid one raises at the sender.
Decoded arrays are read-only views into the frame. validate.py checks whether a FilledOrder message makes sense.
Left out on purpose: pickle, msgpack's extension types, more than one dimension, compression (log-probs do not shrink).
"""

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, cast, get_args

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec
import numpy as np
from msgspec import Meta

from protocol.errors import MalformedMessage, WrongVersion
from protocol.limits import (
    BUFFER_ALIGNMENT,
    MAX_BODY_BYTES,
    MAX_BUFFER_BYTES,
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_STRING_BYTES,
    NUM_FRAMES,
)
from protocol.messages import PROTOCOL_VERSION, AnyMessage, Name, Record

DTYPES = {"uint8": np.dtype("u1"), "int32": np.dtype("<i4"), "float32": np.dtype("<f4")}
NAMES = {dtype.str[1:]: name for name, dtype in DTYPES.items()}
"""By numpy's code without the byte order: `i4` is `int32`."""
MESSAGES: dict[str, type[AnyMessage]] = {kind.__name__: kind for kind in get_args(AnyMessage)}
FRAME_LIMITS = (MAX_HEADER_BYTES, MAX_BODY_BYTES, MAX_BUFFER_BYTES)
LENGTH = struct.Struct("<I")


class Header(Record, frozen=True, kw_only=True):
    """First frame."""

    version: int
    """Protocol version of the sender."""
    type: Name
    """Name of the message."""
    crc32: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    """Checksum of the second and third frame together."""


class Represented(Record, frozen=True, kw_only=True, array_like=True):
    """Stands for an array in the body."""

    dtype: Literal["uint8", "int32", "float32"]
    """Type of the elements."""
    size: Annotated[int, Meta(ge=0, le=MAX_BUFFER_BYTES)]
    """Their number."""


class BufferWriter:
    """Collects arrays into the buffer frame."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.size = 0

    def append(self, array: object) -> tuple[str, int]:
        """Add an array; returns what represents it in the body."""
        if not isinstance(array, np.ndarray):
            raise MalformedMessage(f"A {type(array).__name__} cannot be sent; use Python's own types or a numpy array.")
        values = cast("np.ndarray[Any, np.dtype[Any]]", array)
        name = NAMES.get(values.dtype.str[1:])
        if name is None or values.ndim != 1:
            raise MalformedMessage(
                f"An array of dtype {values.dtype} and shape {values.shape} cannot be sent; "
                f"one dimension of {', '.join(DTYPES)} can."
            )
        little_endian = np.ascontiguousarray(values, DTYPES[name])
        padding = -self.size % BUFFER_ALIGNMENT
        self.parts += [bytes(padding), little_endian.data]
        self.size += padding + little_endian.nbytes
        if self.size > MAX_BUFFER_BYTES:
            raise MalformedMessage(
                f"The arrays take more than {MAX_BUFFER_BYTES} bytes, the limit of the buffer frame."
            )
        return name, values.size

    def frame(self) -> bytes:
        return b"".join(self.parts)


class BufferReader:
    """Gives views into the buffer frame, one after the other, and checks that they use every byte of it."""

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.end = 0
        """Of the arrays so far."""
        self.between: list[bytes] = []
        """What was left out between the arrays."""
        self.whole: dict[str, np.ndarray[Any, np.dtype[Any]]] = {}
        """By dtype, the frame from its first byte on: a part of an array is made in half the time of an array."""

    def view(self, kind: type, raw: object) -> np.ndarray[Any, np.dtype[Any]]:
        """The next array, as it is represented in the body. msgspec adds the field's path to a ValueError from here."""
        array, expected = msgspec.convert(raw, Represented), dtype_name(kind)
        if array.dtype != expected:
            raise ValueError(f"Expected dtype {expected}, got {array.dtype}")
        whole = self.whole.get(expected)
        if whole is None:
            dtype = DTYPES[expected]
            whole = self.whole[expected] = np.ndarray(len(self.frame) // dtype.itemsize, dtype, self.frame)
        before, item = self.end, whole.itemsize
        start = before + -before % BUFFER_ALIGNMENT
        self.end = end = start + array.size * item
        self.between.append(self.frame[before:start])
        return whole[start // item : end // item]

    def check_all_used(self) -> None:
        """ValueError unless all arrays were inside of the frame, with nothing but zeros between and after them."""
        if any(b"".join(self.between)):
            raise ValueError("Something other than zeros is between the arrays in the buffers")
        if self.end != len(self.frame):
            raise ValueError(f"The arrays fill {self.end} of {len(self.frame)} bytes of buffers")


@cache
def dtype_name(kind: type) -> str:
    """`int32` for NDArray[np.int32]. Cached: a message has many arrays of few types."""
    return np.dtype(get_args(get_args(kind)[1])[0]).name


def encode(message: AnyMessage) -> list[bytes]:
    return to_frames(message, checked=True)


def encode_again(message: AnyMessage) -> list[bytes]:
    """The same of a message that was decoded, and so checked."""
    return to_frames(message, checked=False)


def to_frames(message: AnyMessage, *, checked: bool) -> list[bytes]:
    writer = BufferWriter()
    name = type(message).__name__
    body = without_type(msgspec.msgpack.encode(message, enc_hook=writer.append), name)
    buffers = writer.frame()
    if checked:
        to_message(name, from_msgpack(body, "body"), buffers)
    header = to_msgpack({"version": PROTOCOL_VERSION, "type": name, "crc32": checksum(body, buffers)})
    frames = [header, body, buffers]
    check_sizes(frames)
    return frames


def body_bytes(record: Record) -> int:
    """What a record takes of the body of a message."""
    return len(msgspec.msgpack.encode(record, enc_hook=BufferWriter().append))


def without_type(body: bytes, name: str) -> bytes:
    """A msgpack map of at most 15 entries without its first one, which is the type's name: it is in the header."""
    first = b"\xa4type" + bytes([0xA0 + len(name)]) + name.encode()
    assert body.startswith(first, 1)
    return bytes([body[0] - 1]) + body[1 + len(first) :]


def decode(frames: Sequence[bytes]) -> AnyMessage:
    """The message in these frames. MalformedMessage or WrongVersion if they are not a message."""
    header = read_header(frames[0] if frames else b"")
    check_sizes(frames)
    _, body, buffers = frames
    if header.crc32 != checksum(body, buffers):
        raise MalformedMessage(f"The {header.type} message does not have the checksum in its header.")
    return to_message(header.type, from_msgpack(body, "body"), buffers)


def read_header(frame: bytes) -> Header:
    """The header, if it has our version. Read first, because everything else may differ in another version."""
    check_size("header", frame, MAX_HEADER_BYTES)
    raw = from_msgpack(frame, "header")
    version = raw.get("version")
    if type(version) is int and version != PROTOCOL_VERSION:
        raise WrongVersion(
            f"The peer speaks protocol version {version} and this side speaks {PROTOCOL_VERSION}; "
            "install the same release on both."
        )
    try:
        return msgspec.convert(raw, Header)
    except ValueError as error:
        raise MalformedMessage(f"The header is invalid: {error}.") from error


def to_message(name: str, fields: dict[str, object], buffers: bytes) -> AnyMessage:
    """Build a message from plain values, checked against its type."""
    reader = BufferReader(buffers)
    try:
        if "type" in fields:
            raise ValueError("Object contains unknown field `type`")
        if name not in MESSAGES:
            raise ValueError("There is no such message")
        # Of the union of all messages msgspec would look at all types anew each time, which takes longer than the rest.
        message = msgspec.convert(fields, MESSAGES[name], dec_hook=reader.view)
        reader.check_all_used()
    except ValueError as error:
        raise MalformedMessage(f"The {name} message is invalid: {error}.") from error
    return message


def check_sizes(frames: Sequence[bytes]) -> None:
    if len(frames) != NUM_FRAMES:
        raise MalformedMessage(f"A message has {NUM_FRAMES} frames, got {len(frames)}.")
    for name, frame, limit in zip(("header", "body", "buffer"), frames, FRAME_LIMITS, strict=True):
        check_size(name, frame, limit)


def check_size(name: str, frame: bytes, limit: int) -> None:
    if len(frame) > limit:
        raise MalformedMessage(f"The {name} frame has {len(frame)} bytes; the limit is {limit}.")


def checksum(body: bytes, buffers: bytes) -> int:
    return zlib.crc32(buffers, zlib.crc32(body))


def to_msgpack(fields: dict[str, object]) -> bytes:
    return cast(bytes, msgpack.packb(fields))  # pyright: ignore[reportUnknownMemberType]


def from_msgpack(frame: bytes, what: str) -> dict[str, object]:
    """A map from msgpack bytes; every size in it is within the limits."""
    try:
        raw = cast(
            object,
            msgpack.unpackb(  # pyright: ignore[reportUnknownMemberType]
                frame,
                strict_map_key=True,
                ext_hook=refuse_extension,
                max_str_len=MAX_STRING_BYTES,
                max_bin_len=0,
                max_ext_len=0,
                max_array_len=MAX_ITEMS,
                max_map_len=MAX_KEYS,
            ),
        )
    except ValueError as error:
        raise MalformedMessage(f"The {what} is not msgpack within the limits: {error}.") from error
    if not isinstance(raw, dict):
        raise MalformedMessage(f"The {what} is a msgpack {type(raw).__name__}, not a map.")
    return cast("dict[str, object]", raw)


def field_in(body: bytes, name: str) -> object:
    """One field of a message that was decoded before, without building the others; None if it has no such field.

    By the same parser, since what it takes may be too deep for another one. Of two the last counts, as in a dict.
    """
    unpacker = cast(Any, msgpack.Unpacker())  # pyright: ignore[reportUnknownMemberType]
    unpacker.feed(body)
    found = None
    for _ in range(unpacker.read_map_header()):
        if unpacker.unpack() == name:
            found = unpacker.unpack()
        else:
            unpacker.skip()
    return found


def refuse_extension(code: int, _: bytes) -> None:
    # Needed besides max_ext_len=0, which an empty extension passes.
    raise ValueError(f"extension type {code}")


def pack(frames: Sequence[bytes]) -> bytes:
    """Frames as one byte string for a file: each after its length in 4 bytes, little-endian."""
    return b"".join(packed_parts(frames))


def packed_parts(frames: Sequence[bytes]) -> list[bytes]:
    """The same before they are joined."""
    return [part for frame in frames for part in (LENGTH.pack(len(frame)), frame)]


def unpack(packed: bytes) -> list[bytes]:
    """The inverse of `pack`."""
    return [packed[frame] for frame in frames_in(packed)]


def frames_in(packed: bytes) -> list[slice]:
    """Where the packed frames are."""
    frames: list[slice] = []
    start = 0
    while start < len(packed):
        body = start + LENGTH.size
        if body > len(packed) or (end := body + LENGTH.unpack_from(packed, start)[0]) > len(packed):
            raise MalformedMessage(f"Packed frames end early: frame {len(frames)} at byte {start} is cut off.")
        frames.append(slice(body, end))
        start = end
    return frames
