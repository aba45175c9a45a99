"""The structure of the code as tests: small folders, imports in one direction, modules that hold an idea each."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "shared", "actor", "learner", "launch")
MAX_MODULES_IN_A_FOLDER = 15
MAX_MODULES = 352
MIN_MEAN_LINES = 115
MAX_IMPORTED_ONCE = 0.24
"""Of all modules."""
MAX_README_LINES = 270
ROOT_CONFIG_FUNCTIONS = {"learner": 13, "launch": 16}
DOCUMENTED = (0.50, 0.65)


@cache
def modules() -> dict[str, Path]:
    """Name -> file of every module with code; a one-line `__init__.py` is a caption, not a module."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    code = [path for path in files if path.name != "__init__.py" or len(ast.parse(path.read_text()).body) > 1]
    return {path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", "."): path for path in code}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Our modules that this one imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= inner or ({node.module} & modules().keys())
    return found


@cache
def arrows() -> dict[str, set[str]]:
    return {name: imported(path) - {name} for name, path in modules().items()}


def folder(module: str) -> str:
    return module.rpartition(".")[0]


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other: Tarjan's strongly connected components of more than one node."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            component = stack[place:]
            del stack[place:]
            if len(component) > 1:
                found.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_the_search_for_circles_finds_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_module_imports_itself_through_others() -> None:
    assert circles(arrows()) == []


def test_no_two_folders_import_each_other() -> None:
    """Folders inside a package; a package's own modules (its loop, its builder) may use all of them."""
    between: dict[str, set[str]] = defaultdict(set)
    for name, others in arrows().items():
        for other in others:
            if "." in folder(name) and "." in folder(other) and folder(name) != folder(other):
                between[folder(name)].add(folder(other))
    assert circles(between) == []


def test_no_folder_imports_the_package_above_it() -> None:
    """A folder of actor, learner or launch does not know the loop, the builder or the front door that uses it."""
    upward = {
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in others
        if folder(other) in ("actor", "learner", "launch") and folder(name).startswith(f"{folder(other)}.")
    }
    assert upward == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_is_a_chapter(package: str) -> None:
    sizes = Counter(folder(name) for name in modules() if name.startswith(package))
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES_IN_A_FOLDER} == {}


def test_modules_are_few_and_hold_an_idea_each() -> None:
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values()]
    assert len(lines) <= MAX_MODULES
    assert sum(lines) / len(lines) >= MIN_MEAN_LINES


def test_few_modules_serve_one_other_alone() -> None:
    users = Counter(other for others in arrows().values() for other in others)
    once = sorted(name for name, count in users.items() if count == 1)
    assert len(once) <= MAX_IMPORTED_ONCE * len(modules()), once


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


@pytest.mark.parametrize("package", ROOT_CONFIG_FUNCTIONS)
def test_only_builders_see_the_whole_configuration(package: str) -> None:
    takers = [
        f"{name}.{function.name}"
        for name, function in functions()
        if name.startswith(package)
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if argument.annotation and re.search(r"\bConfig\b", ast.unparse(argument.annotation))
    ]
    assert len(takers) <= ROOT_CONFIG_FUNCTIONS[package], takers


def test_docstrings_are_where_they_add_something() -> None:
    all_functions = [function for _, function in functions()]
    documented = sum(ast.get_docstring(function) is not None for function in all_functions)
    assert DOCUMENTED[0] <= documented / len(all_functions) <= DOCUMENTED[1], documented / len(all_functions)


def test_the_readme_is_for_users() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES
