"""How requests are read and answered: numbers in an address are checked, answers are JSON, and an error that a person
can fix is one sentence."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from shared.errors import UserError

LARGEST = 10**9
JSON = "application/json"


class NotThere(UserError):
    """A run, a step, a group or an answer that the folder does not have."""


def whole(query: Mapping[str, str], name: str, default: int | None = None, *, most: int = LARGEST) -> int:
    """A whole number from 0 to `most`. Without a default it must be given."""
    text = query.get(name, "")
    if text == "" and default is not None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST)) and int(text) <= most):
        raise UserError(f"{name} got {text[:80]!r}, expected a whole number from 0 to {most}.")
    return int(text)


def is_text(name: str) -> bool:
    """Whether JSON can have this name of a file: not if its bytes are no UTF-8."""
    return name.encode(errors="ignore").decode() == name


def answered(ask: Callable[[], Any]) -> Response:
    """NaN becomes null."""
    try:
        return Response(msgspec.json.encode(ask()), media_type=JSON)
    except NotThere as error:
        return problem(str(error), 404)
    except UserError as error:
        return problem(str(error), 400)


def problem(sentence: str, status: int) -> Response:
    return Response(msgspec.json.encode({"problem": sentence}), status, media_type=JSON)
