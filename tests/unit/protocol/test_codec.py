"""Frames and back: every message, every limit, and nothing but MalformedMessage for bytes that are no message."""

import functools
import math
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from protocol import limits
from protocol.codec import decode, encode, field_in, pack, to_msgpack, unpack
from protocol.errors import MalformedMessage, WrongVersion
from protocol.messages import PROTOCOL_VERSION, Ack, AnyMessage, Drain, FilledOrder, Heartbeat, Order, Policy
from tests.support.wire_examples import (
    MESSAGE_TYPES,
    at,
    changed,
    examples,
    filled_order,
    forge,
    group,
    name_of,
    order,
    places,
    plain,
    policy,
)

QUICK = settings(deadline=None, database=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
ALL = pytest.mark.parametrize("message", examples(), ids=name_of)
ARRAYS = {np.uint8: st.integers(0, 255), np.int32: st.integers(-(2**31), 2**31 - 1), np.float32: st.floats(width=32)}


def strategy(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Anything that this type allows, from the type itself; collections are kept small."""
    match kind:
        case inspect.IntType(ge=low, le=high):
            return st.integers(low, high)
        case inspect.FloatType(ge=low, gt=above, le=high):
            return st.floats(low if above is None else above, high, exclude_min=above is not None)
        case inspect.StrType(pattern=str()):
            return st.text("0123456789abcdef", min_size=64, max_size=64)
        case inspect.StrType(min_length=low, max_length=high):
            return st.text(min_size=low or 0, max_size=max(low or 0, min(high or 0, 20)))
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy(key), strategy(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(strategy, types))
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.VarTupleType(item_type=item):
            return st.lists(strategy(item), min_size=1, max_size=3).map(tuple)
        case inspect.StructType(cls=cls, fields=fields):
            hints = get_type_hints(cls)
            return st.builds(cls, **{field.name: field_strategy(field, hints[field.name]) for field in fields})
    raise AssertionError(f"a type without a strategy: {kind}")


def field_strategy(field: inspect.Field, hint: Any) -> st.SearchStrategy[Any]:
    """Arrays for a field that holds one; msgspec's own view of a type does not know of the elements."""
    for element, values in ARRAYS.items():
        if "ndarray" in str(hint) and element.__name__ in str(hint):
            made = st.lists(values, max_size=9).map(functools.partial(np.array, dtype=element))
            return made | st.none() if "None" in str(hint) else made
    return strategy(field.type)


ANY_MESSAGE = st.one_of(*(strategy(inspect.type_info(kind)) for kind in MESSAGE_TYPES))


@ALL
def test_round_trip(message: AnyMessage) -> None:
    frames = encode(message)
    again = decode(frames)
    assert type(again) is type(message)
    assert plain(again) == plain(message)
    assert encode(again) == frames


@QUICK
@given(ANY_MESSAGE)
def test_round_trip_of_anything_the_types_allow(message: AnyMessage) -> None:
    frames = unpack(pack(encode(message)))
    again = decode(frames)
    np.testing.assert_equal(plain(again), plain(message))
    assert encode(again) == frames


def test_every_message_has_an_example() -> None:
    assert [type(message) for message in examples()] == list(MESSAGE_TYPES)


def test_decoded_arrays_are_read_only_views_of_the_frame() -> None:
    frames = encode(policy(1000))
    message = decode(frames)
    assert isinstance(message, Policy)
    assert np.shares_memory(message.adapter, np.frombuffer(frames[2], np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        message.adapter[0] = 1


def test_arrays_start_at_multiples_of_sixteen_with_zeros_between() -> None:
    _, body, buffers = encode(filled_order())
    found = msgpack.unpackb(body)["groups"][0]
    assert [found[name] for name in ("prompt_ids", "completion_ids", "logprobs")] == [
        ["int32", 2],
        ["int32", 3],
        ["float32", 3],
    ]
    assert buffers[:8] == np.array([1, 7], "<i4").tobytes()
    assert buffers[8:16] == bytes(8)
    assert buffers[16:28] == np.array([5, 6, 9], "<i4").tobytes()
    assert buffers[28:32] == bytes(4)
    assert buffers[32:44] == np.array([-0.5, -1.0, 0.0], "<f4").tobytes()


def test_big_endian_and_strided_arrays_are_sent_as_their_values() -> None:
    ids = np.arange(6, dtype=">i4")[::2]
    again = decode(encode(filled_order(group(prompt_ids=ids))))
    assert isinstance(again, FilledOrder)
    assert again.groups[0].prompt_ids.tolist() == [0, 2, 4]


@ALL
def test_every_cut_is_malformed(message: AnyMessage) -> None:
    packed = pack(encode(message))
    for length in range(len(packed)):
        with pytest.raises(MalformedMessage):
            decode(unpack(packed[:length]))


@ALL
def test_every_cut_of_a_frame_is_malformed(message: AnyMessage) -> None:
    whole = encode(message)
    for index, frame in enumerate(whole):
        for length in range(len(frame)):
            with pytest.raises(MalformedMessage):
                decode([*whole[:index], frame[:length], *whole[index + 1 :]])


@ALL
def test_every_flipped_byte_of_body_and_buffers_is_malformed(message: AnyMessage) -> None:
    header, body, buffers = encode(message)
    for position in range(len(body) + len(buffers)):
        joined = bytearray(body + buffers)
        joined[position] ^= 0x10
        with pytest.raises(MalformedMessage, match="checksum"):
            decode([header, bytes(joined[: len(body)]), bytes(joined[len(body) :])])


WITHOUT_FIELDS = {kind.__name__ for kind in MESSAGE_TYPES if not kind.__struct_fields__}


@settings(QUICK, max_examples=300)
@given(st.sampled_from([kind.__name__ for kind in MESSAGE_TYPES]), st.binary(max_size=60), st.binary(max_size=8))
def test_any_bytes_are_malformed(kind: str, body: bytes, buffers: bytes) -> None:
    # A map without an entry is a message without a field.
    if (kind in WITHOUT_FIELDS, body, buffers) != (True, b"\x80", b""):
        with pytest.raises(MalformedMessage):
            decode(forge(kind, body, buffers))
    with pytest.raises((MalformedMessage, WrongVersion)):
        decode([body, body, buffers])


@ALL
@pytest.mark.parametrize("value", [True, {"bogus": None}, [[]], [True]], ids=str)
def test_every_place_refuses_a_value_of_another_type(message: AnyMessage, value: Any) -> None:
    tree, found = places(message)
    for path in [path for path in found if type(at(tree, path)) is not type(value) or value is not True]:
        with pytest.raises(MalformedMessage):
            decode(changed(message, path, value))


@ALL
def test_every_float_refuses_nan_and_infinity(message: AnyMessage) -> None:
    tree, found = places(message)
    for path in [path for path in found if isinstance(at(tree, path), float)]:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(MalformedMessage, match="float"):
                decode(changed(message, path, value))


def test_every_float_is_bounded_on_both_sides() -> None:
    """The reason why none can be NaN or infinite."""

    def floats(kind: Any) -> Iterator[inspect.FloatType]:
        if isinstance(kind, inspect.FloatType):
            yield kind
        for child in getattr(kind, "fields", ()):
            yield from floats(child.type)
        if isinstance(kind, inspect.VarTupleType):
            yield from floats(kind.item_type)

    found = [number for kind in MESSAGE_TYPES for number in floats(inspect.type_info(kind))]
    assert len(found) == 12
    assert all(number.le is not None and (number.ge is not None or number.gt is not None) for number in found)


@ALL
def test_a_missing_and_an_unknown_field_are_refused(message: AnyMessage) -> None:
    tree, _ = places(message)
    for name in tree:
        with pytest.raises(MalformedMessage, match=f"missing required field `{name}`"):
            decode(forge(name_of(message), {key: tree[key] for key in tree if key != name}, encode(message)[2]))
    for extra in ("bogus", "type"):
        with pytest.raises(MalformedMessage, match=f"unknown field `{extra}`"):
            decode(forge(name_of(message), tree | {extra: 1}, encode(message)[2]))


def test_another_version_is_named_beside_ours() -> None:
    newer = [to_msgpack({"version": PROTOCOL_VERSION + 1, "whatever": "else"})]
    with pytest.raises(WrongVersion, match=f"version {PROTOCOL_VERSION + 1} and this side speaks {PROTOCOL_VERSION};"):
        decode(newer)
    with pytest.raises(WrongVersion):
        decode(forge("Drain", {}, version=0))


@pytest.mark.parametrize(
    "header",
    [
        {"version": "1"},
        {"version": True},
        {"version": 1.0},
        {"version": None},
        {"type": 7},
        {"type": ""},
        {"type": "Nonsense"},
        {"crc32": -1},
        {"crc32": "0"},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_header_that_is_not_as_agreed(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(forge("Drain", {}, **header))


@pytest.mark.parametrize("frame", [b"\x93\x01\x02\x03", b"\x01", b"\xc0", b"\xa5Drain"], ids=repr)
def test_header_and_body_are_maps(frame: bytes) -> None:
    header, body, buffers = encode(Drain())
    with pytest.raises(MalformedMessage, match="header is a msgpack"):
        decode([frame, body, buffers])
    with pytest.raises(MalformedMessage, match="body is a msgpack"):
        decode(forge("Drain", frame))
    assert decode([header, body, buffers]) == Drain()


def test_number_of_frames() -> None:
    frames = encode(Drain())
    for wrong in ([], frames[:1], frames[:2], [*frames, b""], frames * 2):
        with pytest.raises(MalformedMessage):
            decode(wrong)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\x81\xa6reason" + b"\xdb" + (2**31).to_bytes(4, "big"), "incomplete"),
        (to_msgpack({"reason": "x" * (limits.MAX_STRING_BYTES + 1)}), "max_str_len"),
        (b"\x81\xa6reason\xc4\x01x", "max_bin_len"),
        (b"\x81\xa6reason\xd4\x05x", "max_ext_len"),
        (b"\x81\xa6reason\xc7\x00\x05", "extension type 5"),
        (b"\x81\xa6reason\xd6\xff\x00\x00\x00\x00", "max_ext_len"),
        (to_msgpack({"reason": [None] * (limits.MAX_ITEMS + 1)}), f"exceeds max_array_len.{limits.MAX_ITEMS}"),
        (to_msgpack({f"k{i}": None for i in range(limits.MAX_KEYS + 1)}), f"exceeds max_map_len.{limits.MAX_KEYS}"),
        (b"\x81\x01\x02", "map key"),
        (b"\x81\xa6reason\xa1\xff", "utf-8"),
        (b"\x81\xa6reason\xc1", "msgpack"),
        (b"\x80\x80", "extra data"),
        (b"\x81\xa6reason" + b"\x91" * 1000 + b"\xc0", "Expected `str`"),
        (b"\x91" * 5000 + b"\xc0", "msgpack"),
        (to_msgpack({"reason": "x" * (limits.MAX_TEXT_CHARS + 1)}), "length <= 65536"),
    ],
)
def test_msgpack_limits(body: bytes, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        decode(forge("Bye", body))


def test_a_body_frame_that_is_too_large() -> None:
    header, _, buffers = encode(Drain())
    with pytest.raises(MalformedMessage, match=f"body frame has {limits.MAX_BODY_BYTES + 1} bytes"):
        decode([header, bytes(limits.MAX_BODY_BYTES + 1), buffers])
    with pytest.raises(MalformedMessage, match="checksum"):
        decode([header, bytes(limits.MAX_BODY_BYTES), buffers])


def test_a_header_frame_that_is_too_large() -> None:
    """At the limit it is parsed; one byte more and it is not, however well it would parse."""
    start = to_msgpack({"version": PROTOCOL_VERSION, "type": "Drain", "crc32": 0})
    overhead = len(start) + len(b"\xa1x\xd9\x00")
    for excess, said in ((0, "unknown field"), (1, "header frame has 257")):
        text = "y" * (limits.MAX_HEADER_BYTES - overhead + excess)
        header = to_msgpack({"version": PROTOCOL_VERSION, "type": "Drain", "crc32": 0, "x": text})
        assert len(header) == limits.MAX_HEADER_BYTES + excess
        with pytest.raises(MalformedMessage, match=said):
            decode([header, b"\x80", b""])


def test_a_body_that_is_too_large_is_not_sent() -> None:
    """The socket would cut the connection, and lose more than this message."""
    template = order()
    text = "x" * limits.MAX_TEXT_CHARS
    members = [msgspec.structs.replace(template.groups[0], columns={"a": text})] * 129
    with pytest.raises(MalformedMessage, match=f"body frame has .* the limit is {limits.MAX_BODY_BYTES}"):
        encode(msgspec.structs.replace(template, groups=tuple(members)))


def test_a_buffer_frame_that_is_too_large_is_not_sent() -> None:
    """Found out before a gigabyte is copied: zeros that nobody touches take no memory."""
    adapter = np.zeros(limits.MAX_BUFFER_BYTES + 1, np.uint8)
    with pytest.raises(MalformedMessage, match="limit of the buffer frame"):
        encode(msgspec.structs.replace(policy(), adapter=adapter))


def test_key_order_and_integer_width_are_free() -> None:
    """Another implementation need not produce our bytes."""
    body = b"\x81\xa8order_id\xd9\x01a"
    assert decode(forge("Ack", body)) == Ack(order_id="a")
    _, ours, buffers = encode(order())
    tree = msgpack.unpackb(ours)
    backwards = forge("Order", dict(reversed(tree.items())) | {"policy_version": 12}, buffers)
    again = decode(backwards)
    assert isinstance(again, Order)
    assert plain(again) == plain(order())


def test_pack_is_undone_by_unpack() -> None:
    frames = [b"", b"a", bytes(1000)]
    assert unpack(pack(frames)) == frames
    assert unpack(b"") == []
    with pytest.raises(MalformedMessage, match="frame 1 at byte 4"):
        unpack(pack([b"", b"abc"])[:-1])


@ALL
def test_a_field_is_found_without_the_others(message: AnyMessage) -> None:
    body = encode(message)[1]
    fields = msgpack.unpackb(body)
    assert {name: field_in(body, name) for name in fields} == fields
    assert field_in(body, "none") is None


def test_of_two_fields_the_last_counts() -> None:
    body = b"\x82" + 2 * b"\xa8order_id\xa1a"
    body = body[:-1] + b"b"
    assert decode(forge("Ack", body)) == Ack(order_id="b") and field_in(body, "order_id") == "b"


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Heartbeat(phase="x").phase = "y"  # type: ignore[misc]
