"""What the three trackers have of a run, read back from where they keep it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Steps = dict[int, dict[str, float]]
"""Step -> name -> figure."""
FULL, FIRST, LAST = 1, 2, 4
"""Kinds of pieces in LevelDB's log format."""


def written(out: Path) -> Steps:
    """What metrics.jsonl has."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: {name: figure for name, figure in row.items() if name != "step" and figure is not None}
        for row in rows
    }


def tracked(kind: str, out: Path) -> Steps:
    """What the tracker has."""
    found: Steps = {}
    for step, name, figure in {"trackio": of_trackio, "wandb": of_wandb, "tensorboard": of_tensorboard}[kind](out):
        found.setdefault(step, {})[name] = figure
    return found


def of_trackio(out: Path) -> Iterator[tuple[int, str, float]]:
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    at = json.loads((out / "tracking.json").read_text())
    seen: set[tuple[int, str]] = set()
    for row in SQLiteStorage.get_logs(at["project"], at["name"]):
        for name, figure in row.items():
            if name not in ("step", "timestamp") and not name.startswith("rollout/"):
                assert (row["step"], name) not in seen, "no step twice"
                seen.add((row["step"], name))
                yield row["step"], name, figure


def of_wandb(out: Path) -> Iterator[tuple[int, str, float]]:
    ids = set()
    for record in wandb_records(out):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                yield record.history.step.num, name, json.loads(item.value_json)
    assert len(ids) == 1, "a resumed run is the same tracked run"


def wandb_records(out: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    for file in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(data)
            yield record


def wandb_summary(out: Path) -> dict[str, float]:
    items = [item for record in wandb_records(out) for item in record.summary.update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def log_records(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file: LevelDB's log format after seven bytes. A record that a kill has torn ends the file."""
    block, place, parts = 32_768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        piece = data[place + 7 : place + 7 + size]
        if kind == 0 or len(piece) < size:
            return
        parts = piece if kind in (FULL, FIRST) else parts + piece
        place += 7 + size
        if kind in (FULL, LAST):
            yield parts


def of_tensorboard(out: Path) -> Iterator[tuple[int, str, float]]:
    seen: set[tuple[int, str]] = set()
    for event in tensorboard_events(out):
        for value in event.summary.value:
            assert (event.step, value.tag) not in seen, "no step twice"
            seen.add((event.step, value.tag))
            yield event.step, value.tag, value.tensor.float_val[0]


def tensorboard_events(out: Path) -> Iterator[Any]:
    from tensorboard.backend.event_processing.event_file_loader import (  # pyright: ignore[reportMissingImports]
        EventFileLoader,
    )

    for file in sorted((out / "tensorboard").glob("events.*")):
        yield from EventFileLoader(str(file)).Load()


def assert_equal(found: Steps, expected: Steps) -> None:
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        # TensorBoard keeps 32 bits of a figure.
        assert found[step] == pytest.approx(row, rel=1e-6), f"step {step}"
