"""One example of every message, and ways to look at and to forge their bytes. No torch: the wire's tests are quick."""

import copy
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import msgspec
import numpy as np

from protocol.codec import encode, to_msgpack
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AnyMessage,
    Bye,
    Drain,
    FilledOrder,
    Finish,
    Group,
    GroupOrder,
    Heartbeat,
    Hello,
    KeyAdded,
    NewKey,
    Order,
    Outcome,
    Policy,
    Refused,
    Sampling,
    Timings,
    Welcome,
)

DIGEST = "0123456789abcdef" * 4
MESSAGE_TYPES: tuple[type, ...] = get_args(AnyMessage)


def policy(num_bytes: int = 5, version: int = 3) -> Policy:
    """An adapter of this many bytes, which are no safetensors file."""
    adapter = np.arange(num_bytes, dtype=np.uint32).astype(np.uint8)
    return Policy(
        version=version,
        adapter=adapter,
        sha256=hashlib.sha256(adapter.tobytes()).hexdigest(),
        canary_ids=np.array([4, 9, 2], np.int32),
        canary_logprobs=np.array([-3.5, -0.25], np.float32),
    )


def group(**changes: Any) -> Group:
    """Three completions of 2, 0 and 1 tokens."""
    fields: dict[str, Any] = {
        "group_id": "train/000012/003",
        "prompt_ids": np.array([1, 7], np.int32),
        "completion_ids": np.array([5, 6, 9], np.int32),
        "trained": None,
        "lengths": (2, 0, 1),
        "logprobs": np.array([-0.5, -1.0, 0.0], np.float32),
        "entropies": np.array([0.25, 0.5, 0.0], np.float32),
        "finishes": (Finish.STOP, Finish.LENGTH, Finish.STOP),
        "outcomes": (Outcome.CORRECT, Outcome.TRUNCATED, Outcome.WRONG),
        "scores": (1.0, 0.0, -0.5),
        "rewards": {"brevity": (0.5, 0.0, 1.0)},
        "metrics": {"found": 0.5},
        "extras": {"read": ("18", "", "7")},
        "votes": (0, 0, 1),
        "teacher": None,
    }
    return Group(**fields | changes)


def timings(**changes: float) -> Timings:
    """Of an actor that took no time, had 1 MiB, and no card."""
    nothing = dict.fromkeys(Timings.__struct_fields__, 0.0)
    return Timings(**nothing | {"memory_mb": 1.0} | changes)


def filled_order(*members: Group) -> FilledOrder:
    """A filled order."""
    return FilledOrder(
        order_id="train/000012/u0",
        policy_version=12,
        adapter_sha256=DIGEST,
        groups=members or (group(),),
        timings=timings(wait_s=0.1, rollout_s=1.5, memory_mb=812.5, card_allocated_mb=4096.5),
    )


def order() -> Order:
    """One group of two completions."""
    return Order(
        order_id="train/000012/u0",
        policy_version=12,
        sampling=Sampling(temperature=1.0, max_new_tokens=64),
        groups=(
            GroupOrder(
                group_id="train/000012/000",
                prompt_ids=np.array([1, 7, 258], np.int32),
                columns={"answer": "42"},
                seeds=(5, 6),
            ),
        ),
        votes=False,
        teacher=False,
    )


def examples() -> list[AnyMessage]:
    """One of each."""
    return [
        Hello(
            actor_id="actor0",
            engine="hf",
            base_digest=DIGEST,
            tokenizer_digest=DIGEST,
            lora_digest=DIGEST,
            rules_digest=DIGEST,
            machine=None,
            mark=0,
            version=None,
            credits=2,
        ),
        Welcome(run_id="embedded-1", heartbeat_s=2.0, silence_s=60.0, mark=5),
        Refused(reason="The tokenizer differs; use the run's model folder."),
        policy(),
        order(),
        filled_order(group(), group(group_id="train/000012/004", entropies=None, teacher=np.ones(3, np.float32) / -8)),
        Ack(order_id="train/000012/u0"),
        Heartbeat(phase="decoding"),
        Drain(),
        Bye(reason="drained"),
        NewKey(public="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"),
        KeyAdded(),
    ]


def name_of(value: object) -> str:
    """Test id."""
    return type(value).__name__


def plain(message: AnyMessage) -> object:
    """Something that `==` can compare: arrays as dtype and list."""
    return msgspec.to_builtins(message, enc_hook=lambda array: [array.dtype.str, array.tolist()])


def forge(kind: str, body: Any, buffers: bytes = b"", **header: Any) -> list[bytes]:
    """Frames with a right checksum around any content; `header` overrides."""
    packed = body if isinstance(body, bytes) else to_msgpack(body)
    crc32 = zlib.crc32(packed + buffers)
    return [to_msgpack({"version": PROTOCOL_VERSION, "type": kind, "crc32": crc32} | header), packed, buffers]


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*prefix, key)
        yield from paths(child, (*prefix, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The value at this place."""
    for key in path:
        tree = tree[key]
    return tree


def changed(message: AnyMessage, path: tuple[Any, ...], value: Any) -> list[bytes]:
    """The message's frames with one place of the body replaced and the checksum right."""
    _, body, buffers = encode(message)
    tree = copy.deepcopy(msgpack.unpackb(body))
    at(tree, path[:-1])[path[-1]] = value
    return forge(name_of(message), tree, buffers)


def places(message: AnyMessage) -> tuple[Any, list[tuple[Any, ...]]]:
    """Body of a message, and all places in it."""
    tree = msgpack.unpackb(encode(message)[1])
    return tree, list(paths(tree))
