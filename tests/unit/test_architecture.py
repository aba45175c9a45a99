"""The shape of the code, as tests: layers, lengths, names, forbidden calls, and a README whose tree is the real one.

The README's tree: the fenced block below the heading `## The tree` has one line for each folder, `folder/   what it
is`, indented below its parent. It lists every folder of code on the first two levels.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "shared", "actor", "learner", "launch")
MAY_IMPORT = {
    "protocol": {"protocol"},
    "shared": {"protocol", "shared"},
    "actor": {"protocol", "shared", "actor"},
    "learner": {"protocol", "shared", "learner"},
    "launch": set(PACKAGES),
}
TOP_LEVEL = {*PACKAGES, "tests", "docker", "benchmarks", "pyproject.toml", "README.md"}
HEAVY = {
    *(
        "torch",
        "transformers",
        "bitsandbytes",
        "triton",
        "datasets",
        "pandas",
        "pyarrow",
        "peft",
        "ray",
        "vllm",
        "gradio",
    )
}
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
BANNED_CALLS = {"eval", "exec", "torch.load", "torch.save", "pickle.load", "pickle.loads"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj"}
BANNED_ARGUMENTS = {"shell", "trust_remote_code", "allow_pickle"}
COUNT_CORES = {"shared/process/processor.py", "shared/process/busy_cores/gathering.py", "launch/doctor/hardware.py"}
"""May ask which cores a process may use. All others ask `cores_here`, which knows the limit of a container; doctor
reports the two apart."""
BANNED_NAMES = {"util", "utils", "common", "manager", "helper", "helpers", "misc"}
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_LOOP_LINES = 40
MAX_COLUMNS = 120
MAX_BROAD_EXCEPTS_PER_1000_LINES = 2
TEXT_SUFFIXES = {".py", ".toml", ".sh", ".yaml", ".yml", ".md"}


def python_files(*folders: str) -> list[Path]:
    """Every .py file below these folders, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    """The path as it is written in messages and in the README."""
    return path.relative_to(ROOT).as_posix()


SOURCES = python_files(*PACKAGES)
ALL_PYTHON = python_files(*PACKAGES, "tests", "benchmarks")


def rule_of(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of all these files, which names every file that breaks the rule. A test for each would be thousands."""

    def as_test(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = {name(path): reason for path in paths if (reason := why_broken(check, path))}
            assert not broken, "\n".join(f"{path}: {reason}" for path, reason in broken.items())

        test.__name__ = test.__qualname__ = check.__name__
        return test

    return as_test


def why_broken(check: Callable[[Path], None], path: Path) -> str:
    try:
        check(path)
    except AssertionError as error:
        return str(error) or "it does not hold"
    return ""


each_source = rule_of(SOURCES)
each_file = rule_of(ALL_PYTHON)


@cache
def parse(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.Module) -> Iterator[str]:
    """Full names of all imported modules, those inside functions included; a relative import starts with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last line of the body."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def count_lines(paths: Iterable[Path]) -> int:
    """Lines of all these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@each_source
def test_a_package_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    for module in imports(parse(path)):
        assert not module.startswith("."), f"relative import {module}: write the full name"
        top = module.partition(".")[0]
        assert top not in (*PACKAGES, "tests", "benchmarks") or top in allowed, f"imports {module}"


@each_source
def test_a_package_knows_no_path_into_a_package_above(path: Path) -> None:
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    steps = (
        node.right for node in ast.walk(parse(path)) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    )
    folders = {step.value for step in steps if isinstance(step, ast.Constant)}
    assert not (folders & {*PACKAGES}) - allowed, "a path that points upwards"


def distribution(requirement: str) -> str:
    """The name in a requirement or a distribution, as indexes compare them."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def owners(path: Path) -> list[set[str]]:
    """For each third-party package that this file imports, the distributions it may come from."""
    known = {*sys.stdlib_module_names, *PACKAGES}
    tops = {module.partition(".")[0] for module in imports(parse(path))} - known
    return [{distribution(owner) for owner in installed().get(top, [top])} for top in tops]


@cache
def installed() -> Mapping[str, list[str]]:
    """Top-level package -> distributions, of this environment."""
    return importlib.metadata.packages_distributions()


@cache
def project() -> dict[str, Any]:
    """pyproject.toml's [project]."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@each_source
def test_a_third_party_import_is_a_declared_dependency(path: Path) -> None:
    extras = project()["optional-dependencies"]
    optional = [requirement for name in extras if name != "dev" for requirement in extras[name]]
    declared = {distribution(r) for r in [*project()["dependencies"], *optional]}
    for names in owners(path):
        assert names & declared, f"imports {names}, which pyproject.toml does not name"


def test_every_dependency_is_imported_somewhere() -> None:
    used = {owner for path in SOURCES for names in owners(path) for owner in names}
    # transformers imports jinja2 when a chat template is rendered, and does not require it.
    assert {distribution(requirement) for requirement in project()["dependencies"]} - used <= {"jinja2"}


def wire_modules() -> list[str]:
    """All of protocol."""
    paths = [path for path in python_files("protocol") if path.name != "__init__.py"]
    return [name(path).removesuffix(".py").replace("/", ".") for path in paths]


@pytest.mark.parametrize(
    "modules",
    [
        wire_modules(),
        ["shared.config.tree", "shared.config.load", "shared.errors"],
        ["launch.__main__", "launch.commands.run"],
    ],
    ids=["wire", "configuration", "command line"],
)
def test_the_front_loads_nothing_heavy(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*(set({sorted(HEAVY)}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@each_file
def test_functions_are_short(path: Path) -> None:
    for function in functions(parse(path)):
        assert num_lines(function) <= MAX_FUNCTION_LINES, f"{function.name} has {num_lines(function)} lines"


@each_file
def test_files_are_short(path: Path) -> None:
    assert count_lines([path]) <= MAX_FILE_LINES, f"{count_lines([path])} lines"


@pytest.mark.parametrize("path", ["actor/loop.py", "learner/loop.py"])
def test_the_main_loops_fit_one_screen(path: str) -> None:
    loops = [function for function in functions(parse(ROOT / path)) if function.name in ("run", "train", "serve")]
    assert loops, "the loop is called run, train or serve"
    for loop in loops:
        assert num_lines(loop) <= MAX_LOOP_LINES, f"{loop.name} has {num_lines(loop)} lines"


@each_file
def test_nothing_executes_or_unpickles_data(path: Path) -> None:
    tree = parse(path)
    for module in imports(tree):
        assert module.partition(".")[0] not in BANNED_MODULES, f"imports {module}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        assert called not in BANNED_CALLS, f"line {call.lineno} calls {called}"
        assert called.rpartition(".")[2] not in BANNED_METHODS, f"line {call.lineno} calls {called}"
        for keyword in call.keywords:
            on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            assert not (keyword.arg in BANNED_ARGUMENTS and on), f"line {call.lineno} sets {keyword.arg}"


@each_source
def test_cores_are_counted_in_one_place(path: Path) -> None:
    if name(path) not in COUNT_CORES:
        calls = [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
        counts = [call.lineno for call in calls if ast.unparse(call.func) == "os.sched_getaffinity"]
        assert not counts, f"line {counts} counts cores without a container's limit"


@each_file
def test_a_module_is_named_after_its_idea(path: Path) -> None:
    words = {*path.stem.lower().split("_"), *path.relative_to(ROOT).parts[:-1]}
    assert not BANNED_NAMES & words, f"the name says nothing: {BANNED_NAMES & words}"


@each_source
def test_a_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(parse(path)), "no docstring"


@each_source
def test_everything_is_annotated(path: Path) -> None:
    for function in functions(parse(path)):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, f"{function.name}: {bare}"
        assert function.returns is not None, f"{function.name} has no return type"


def test_few_excepts_are_broad_and_none_is_bare() -> None:
    broad: list[str] = []
    for path in SOURCES:
        for handler in (node for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler)):
            assert handler.type is not None, f"{name(path)}:{handler.lineno} is a bare except"
            caught = {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
            if caught & {"Exception", "BaseException"}:
                broad.append(f"{name(path)}:{handler.lineno}")
    assert len(broad) <= MAX_BROAD_EXCEPTS_PER_1000_LINES * count_lines(SOURCES) / 1000, broad


def text_files() -> list[Path]:
    """Everything that people write, dot-files of the top level included."""
    folders = [ROOT / folder for folder in sorted(TOP_LEVEL) if (ROOT / folder).is_dir()]
    dotted = [ROOT / ".ci/run", ROOT / ".gitignore", ROOT / ".dockerignore", ROOT / ".pre-commit-config.yaml"]
    below = [path for folder in [*folders, ROOT / ".github"] for path in sorted(folder.rglob("*"))]
    top = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "docker/Dockerfile", *dotted]
    return [path for path in top if path.exists()] + [path for path in below if path.suffix in TEXT_SUFFIXES]


@rule_of(text_files())
def test_text_is_ascii_and_fits_the_column_limit(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert line.isascii(), f"line {number}: {line}"
        # A Markdown table or link cannot be broken.
        assert len(line) <= MAX_COLUMNS or path.suffix == ".md", f"line {number} has {len(line)} columns"


def ignored_at_top() -> set[str]:
    """What .gitignore expects at the top level: things that tools and runs make there."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return {line.strip("/") for line in lines if line.startswith("/")}


def test_the_top_level_is_fixed() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - ignored_at_top() - {"__pycache__"} == TOP_LEVEL


def test_tests_weigh_at_least_as_much_as_the_sources() -> None:
    assert count_lines(python_files("tests")) >= count_lines(SOURCES)


def test_tests_shadow_no_package() -> None:
    """Only folders that can get onto sys.path matter; tests/unit groups its tests by package, and never does."""
    assert [name(path) for path in python_files("tests") if path.name == "__init__.py"] == ["tests/__init__.py"]
    shadows = {path for path in (ROOT / "tests").rglob("*") if path.is_dir() and path.name in PACKAGES}
    assert {name(path.parent) for path in shadows} <= {"tests/unit"}
    assert not python_files("docker"), "a module there would shadow or fake the package `docker`"


def test_our_package_names_have_no_other_owner() -> None:
    for package in PACKAGES:
        assert set(installed().get(package, [])) <= {"tandem-rl"}


def readme_tree() -> set[str]:
    """Folders of the README's tree, from their indentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block below `## The tree`"
    found: set[str] = set()
    above = ""
    for line in block[1].splitlines():
        indent, folder = re.match(r"( *)(\S+)/ +\S", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        above = above if indent else folder
        found.add(f"{above}/{folder}" if indent else folder)
    return found


def test_every_benchmark_that_can_be_started_is_in_their_readme() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    started = [path for path in python_files("benchmarks") if '__name__ == "__main__"' in path.read_text("utf-8")]
    assert [path.stem for path in started if not re.search(rf"\b{path.stem}\b", text)] == []


def test_the_readme_tree_is_the_real_one() -> None:
    listed = readme_tree()
    assert {path for path in listed if not (ROOT / path).is_dir()} == set()
    below = {name(path.parent) for path in [*SOURCES, *python_files("benchmarks")]}
    assert {path for path in below if path.count("/") <= 1} <= listed
