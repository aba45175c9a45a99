"""Bounds of values and of arrays in a message: a value outside them is malformed, and cannot be sent."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.codec import decode, encode
from protocol.errors import MalformedMessage
from protocol.messages import AnyMessage
from tests.support.wire_examples import changed, examples, filled_order, forge, group, name_of, order, policy

QUICK = settings(deadline=None, database=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
ALL = pytest.mark.parametrize("message", examples(), ids=name_of)
ARRAYS = {np.uint8: st.integers(0, 255), np.int32: st.integers(-(2**31), 2**31 - 1), np.float32: st.floats(width=32)}


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (policy(), "version", limits.MAX_COUNT + 1),
        (policy(), "version", -1),
        (policy(), "sha256", "0" * 63),
        (policy(), "sha256", "0" * 64 + "\n"),
        (policy(), "sha256", "A" * 64),
        (examples()[0], "credits", limits.MAX_CREDITS + 1),
        (examples()[0], "credits", 0),
        (examples()[0], "actor_id", ""),
        (examples()[0], "actor_id", "x" * (limits.MAX_NAME_CHARS + 1)),
        (examples()[10], "public", "k" * 39),
        (examples()[10], "public", "k" * 41),
        (examples()[1], "heartbeat_s", 0.0),
        (order(), "groups", []),
    ],
)
def test_bounds_of_values(message: AnyMessage, field: str, value: Any) -> None:
    with pytest.raises(MalformedMessage, match=field):
        decode(changed(message, (field,), value))
    with pytest.raises(MalformedMessage, match=field):
        encode(msgspec.structs.replace(message, **{field: value}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("groups", 0, "seeds"), (2**63,)),
        (("groups", 0, "seeds"), (-1,)),
        (("groups", 0, "seeds"), (0,) * (limits.MAX_ITEMS + 1)),
        (("groups", 0, "columns"), {f"c{i}": "" for i in range(limits.MAX_KEYS + 1)}),
        (("groups", 0, "columns"), {"": ""}),
        (("sampling", "max_new_tokens"), 0),
        (("sampling", "temperature"), -0.5),
    ],
)
def test_bounds_inside_an_order(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(changed(order(), path, value))


@pytest.mark.parametrize(
    "array",
    [
        ["float32", 3],
        ["float64", 3],
        ["object", 3],
        [">i4", 3],
        [None, 3],
        ["int32", -3],
        ["int32", 2],
        ["int32", 4],
        ["int32", [3]],
        ["int32", 3.0],
        ["int32", True],
        ["int32", 2**62],
        ["int32"],
        ["int32", 3, 0],
        {"dtype": "int32", "size": 3},
        "int32",
        3,
    ],
    ids=str,
)
def test_an_array_that_does_not_fit(array: Any) -> None:
    assert decode(changed(order(), ("groups", 0, "prompt_ids"), ["int32", 3]))
    with pytest.raises(MalformedMessage):
        decode(changed(order(), ("groups", 0, "prompt_ids"), array))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda buffers: buffers + b"\0",
        lambda buffers: buffers + bytes(16),
        lambda buffers: buffers[:-1],
        lambda buffers: buffers[:8] + b"\1" + buffers[9:],
    ],
    ids=["one byte more", "sixteen more", "one less", "hole is not zero"],
)
def test_every_byte_of_the_buffers_is_accounted_for(spoil: Callable[[bytes], bytes]) -> None:
    _, body, buffers = encode(filled_order())
    assert decode(forge("FilledOrder", body, buffers))
    with pytest.raises(MalformedMessage, match="buffers"):
        decode(forge("FilledOrder", body, spoil(buffers)))


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("completion_ids", ["int32", 5], "other than zeros"),
        ("prompt_ids", ["int32", 1], "other than zeros"),
        ("entropies", ["float32", 2**28], "arrays fill"),
    ],
)
def test_arrays_that_do_not_follow_one_another(name: str, array: list[Any], said: str) -> None:
    """One takes bytes of the next, one leaves some of its own, one leaves the frame."""
    with pytest.raises(MalformedMessage, match=f"{said}.*buffers"):
        decode(changed(filled_order(), ("groups", 0, name), array))


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, np.float64), np.zeros((2, 1), np.int32), np.array(["x"]), np.array([None]), np.int32(3)],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_arrays_that_cannot_be_sent(array: Any) -> None:
    with pytest.raises(MalformedMessage, match="cannot be sent"):
        encode(filled_order(group(completion_ids=array)))


def test_an_array_of_another_fields_dtype_cannot_be_sent() -> None:
    with pytest.raises(MalformedMessage, match="Expected dtype int32, got float32"):
        encode(filled_order(group(completion_ids=np.zeros(3, np.float32))))


def test_a_score_that_is_not_finite_cannot_be_sent() -> None:
    with pytest.raises(MalformedMessage, match="scores"):
        encode(filled_order(group(scores=(1.0, math.nan, 0.0))))
