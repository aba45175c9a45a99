"""YAML as a second form of a configuration file: the same sections and keys as in TOML, and the same values.

    optimizer:
      lr: 1e-5

Read by PyYAML's safe loader with fewer rules. YAML 1.1 reads `1e-5` as a text, `no` as false and `12:30` as a number;
here a number is what TOML calls one, and only `true` and `false` are booleans. A key that is given twice is refused, as
in TOML. Anchors are refused, because a few lines of them can stand for gigabytes.
Left out on purpose: dates, tags, several documents in one file.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from shared.errors import ConfigError

NULL = re.compile(r"~|null|")
BOOL = re.compile(r"true|false")
INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
FLOAT = re.compile(r"[-+]?(0|[1-9][0-9_]*)(\.[0-9_]+)?([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)|[-+]?inf|nan")


class PlainLoader(yaml.SafeLoader):
    """The safe loader with the rules above."""

    # PyYAML looks rules up by the first character of a value; None stands for all.
    yaml_implicit_resolvers = {  # noqa: RUF012
        None: [
            ("tag:yaml.org,2002:null", re.compile(rf"(?:{NULL.pattern})\Z")),
            ("tag:yaml.org,2002:bool", re.compile(rf"(?:{BOOL.pattern})\Z")),
            ("tag:yaml.org,2002:int", re.compile(rf"(?:{INT.pattern})\Z")),
            ("tag:yaml.org,2002:float", re.compile(rf"(?:{FLOAT.pattern})\Z")),
        ]
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"'{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


PlainLoader.add_constructor("tag:yaml.org,2002:float", read_number)


def yaml_tree(text: str) -> dict[str, Any]:
    """ValueError, with the line, if it is not YAML as described above."""
    try:
        # PlainLoader is a safe loader.
        tree = yaml.load(text, Loader=PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem}{where}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"The file has {type(tree).__name__} at its top, expected sections such as `optimizer:`.")
    return tree
