"""Every key of the configuration with its type, range, default and meaning, from the classes of shared/config alone: a
form that is made from them cannot be out of date.

msgspec knows types and ranges. Meanings are the texts below the fields, which Python does not keep, so they are read
from the source.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect as types

from shared.config.tree import Config
from shared.config.types import Section

LIMITS = ("ge", "gt", "le", "lt")


def keys(values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """values: of a configuration, by section and key."""
    return [row | {"value": values[row["section"]][row["name"]]} for row in described()]


@cache
def described() -> list[dict[str, Any]]:
    defaults = msgspec.to_builtins(Config())
    sections: Mapping[str, type[Section]] = get_type_hints(Config)
    return [row for name, section in sections.items() for row in rows_of(name, section, defaults[name])]


def rows_of(name: str, section: type[Section], defaults: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    meanings = meanings_of(section)
    found = types.type_info(section)
    assert isinstance(found, types.StructType)
    for field in found.fields:
        yield {
            "section": name,
            "name": field.name,
            "key": f"{name}.{field.name}",
            "default": defaults[field.name],
            "meaning": meanings[field.name],
            **form_of(field.type),
        }


def meanings_of(section: type) -> dict[str, str]:
    """The texts below the fields of a class."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def form_of(kind: types.Type) -> dict[str, Any]:
    """What may be given: one of `choices`, a number with its range, or a text."""
    match kind:
        case types.LiteralType():
            return {"form": "choice", "choices": [str(value) for value in kind.values]}
        case types.BoolType():
            return {"form": "choice", "choices": ["true", "false"]}
        case types.IntType() | types.FloatType():
            limits = {name: getattr(kind, name) for name in LIMITS if getattr(kind, name) is not None}
            return {"form": "whole number" if isinstance(kind, types.IntType) else "number", "range": limits}
        case types.UnionType():
            forms = [form_of(one) for one in kind.types if not isinstance(one, types.NoneType)]
            return forms[0] if len(forms) == 1 else {"form": "text"}
        case _:
            return {"form": "text"}
