"""What the sections of the configuration are made of: their base class, numbers with a range, names of functions."""

import os
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from shared.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""

    def expand_home(self, *keys: str) -> None:
        """`~` as a shell expands it, once, when the section is made: every process and every check then has the path
        itself. Unlike Path.expanduser, no error without a home."""
        for key in keys:
            force_setattr(self, key, os.path.expanduser(getattr(self, key)))


def check_function_name(key: str, name: str) -> None:
    """ConfigError unless it is a name in a file of the user's."""
    file, _, function = name.rpartition(":")
    if not file or not function.isidentifier():
        raise ConfigError(f"{key} names '{name}', expected path/to/file.py:name; add what is missing.")
