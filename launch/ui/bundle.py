"""`report RUN --bundle DIR`: the Samples page as files, to keep, to send, or to put onto any web server.

    index.html            the page, with a policy under which a browser runs no script but these files
    static/               its style sheets, and its modules (launch/ui/static) as one script
    data/index.js         name of the run, and the steps that have groups
    data/steps/12.js      groups of a step with their answers
    data/tokens/12-0.js   answers of a group, token by token
    data/tasks/ab.js      tasks whose key begins so, over all steps

It opens from a folder without a server. A browser loads no modules and no JSON there, so the modules are joined, and
data is in scripts that hand over one value each. Values are JSON, so a script in a model's answer is a string.

The size is bounded. Steps are written in an order in which each part of it is spread over the run, the newest first,
until the next one does not fit. index.html is written last, so a folder that has it is whole.
Left out on purpose: the other pages, since report.html has curves, verdict and tables, and weights.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.ui.group_rows import answer_row, group_row, head_row
from shared.errors import RunDirError, UserError
from shared.run.files import disk_errors, make_folder, write_whole
from shared.run.reader import Run
from shared.run.rollouts import RolloutGroup

OPTION = "--bundle"
STATIC = Path(__file__).with_name("static")
PAGES = ("samples.js",)
FOLDERS = ("static", "data")
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' file: data:; base-uri 'none';"
    " form-action 'none'"
)
"""Some browsers do not count files of a folder as its own."""
FRAME_BYTES = 64
"""More than what is around a value in its file, or around a task among others."""
MEGABYTE = 10**6
PAGE_BYTES = MEGABYTE // 2
"""At most, of what is not data."""
IMPORT = re.compile(r'^import (?:\* as (\w+)|\{([^}]*)\}) from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)
MODULE_WORD = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
SHEET = re.compile(r'href="/static/([\w.-]+)"')
ENTRY = '<script type="module" src="/static/app.js"></script>'


def bundle(*, directories: Sequence[Path], folder: Path, megabytes: int) -> int:
    if len(directories) > 1:
        raise UserError(f"--bundle got {len(directories)} runs, expected one; give each a folder of its own.")
    run = Run(directories[0])
    if not (steps := run.rollouts.steps()):
        raise RunDirError(f"{run.path} has no groups in rollouts.jsonl, so there is nothing to show.")
    with disk_errors(folder, OPTION):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--bundle got {folder}, which exists already; choose a new folder.")
    written = Bundle(folder, megabytes * MEGABYTE)
    try:
        written.add_steps(run)
        if not written.steps:
            raise UserError(f"No step of {run.path} fits into {megabytes} MB; give more with --megabytes.")
        written.finish(run)
    except BaseException:
        written.remove()
        raise
    left_out = len(steps) - len(written.steps)
    print(f"written to {folder / 'index.html'}: {written.groups} groups of {len(written.steps)} steps, {written.size}")
    if left_out:
        print(f"{left_out} of {len(steps)} steps did not fit into {megabytes} MB; --megabytes allows more")
    return 0


class Bundle:
    """A folder, and what was written into it."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.used = PAGE_BYTES
        self.steps: list[int] = []
        self.groups = 0
        self.tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @property
    def size(self) -> str:
        whole = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return f"{whole / MEGABYTE:.1f} MB"

    def add_steps(self, run: Run) -> None:
        """As many as fit."""
        for step in spread(run.rollouts.steps()):
            if not self.add(step, run.rollouts.groups(step)):
                break
        self.steps.sort()

    def finish(self, run: Run) -> None:
        page, script = (STATIC / "index.html").read_text(encoding="utf-8"), joined(STATIC, "app.js", PAGES)
        self.file("static/page.js", script.encode())
        for name in SHEET.findall(page):
            self.file(f"static/{name}", (STATIC / name).read_bytes())
        for start in sorted({task[:2] for task in self.tasks}):
            same = {task: in_order(rows) for task, rows in self.tasks.items() if task.startswith(start)}
            self.value(f"tasks/{start}", msgspec.json.encode(same))
        status = {"running": "snapshot"}.get(run.state(), run.state())
        about = {"run": run.path.resolve().name, "status": status, "steps": self.steps, "groups": self.groups}
        self.file("data/index.js", b"globalThis.tandem = %b;\n" % msgspec.json.encode(about))
        self.file("index.html", as_file(page).encode())

    def add(self, step: int, groups: dict[int, RolloutGroup]) -> bool:
        """False if it does not fit."""
        rows = [head_row(group, number) for number, group in groups.items()]
        files: dict[str, Any] = {
            f"steps/{step}": {"groups": [group_row(group, number) for number, group in groups.items()]}
        }
        files |= {
            f"tokens/{step}-{number}": [answer_row(group, number, place) for place in range(len(group.samples))]
            for number, group in groups.items()
        }
        encoded = {name: msgspec.json.encode(value) for name, value in files.items()}
        # A group is in the file of its task, too.
        size = sum(len(value) + FRAME_BYTES for value in (*encoded.values(), *map(msgspec.json.encode, rows)))
        if self.used + size > self.most_bytes:
            return False
        for name, value in encoded.items():
            self.value(name, value)
        for row in rows:
            self.tasks[row["task"]].append(row)
        self.used += size
        self.steps.append(step)
        self.groups += len(rows)
        return True

    def value(self, name: str, value: bytes) -> None:
        """value: as JSON."""
        self.file(f"data/{name}.js", b"tandem.put(%b,%b);\n" % (msgspec.json.encode(name), value))

    def file(self, name: str, content: bytes) -> None:
        path = self.folder / name
        make_folder(path.parent, place=OPTION)
        write_whole(path, content, durable=False, place=OPTION)

    def remove(self) -> None:
        """Delete an unfinished bundle, so that the folder can be chosen again."""
        for part in FOLDERS:
            shutil.rmtree(self.folder / part, ignore_errors=True)


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["step"], row["group"]))


def spread(steps: Sequence[int]) -> Iterator[int]:
    """The last, then the others so that the first ones of them are far from each other: halves, quarters, eighths."""
    yield steps[-1]
    digits = (len(steps) - 1).bit_length()
    places = sorted(range(len(steps) - 1), key=lambda place: f"{place:0{digits}b}"[::-1])
    yield from (steps[place] for place in places)


def as_file(page: str) -> str:
    """index.html for a folder."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    scripts = '<script src="data/index.js"></script>\n<script src="static/page.js" defer></script>'
    head, _, rest = page.partition(ENTRY)
    return f"{head}{scripts}{rest}".replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}').replace(
        'href="/static/', 'href="static/'
    )


def joined(folder: Path, entry: str, pages: Collection[str]) -> str:
    """One script of `entry` and the modules that it needs, each in a function of its own. Modules that are imported as
    a whole (`* as`) are pages: those that are not in `pages` are undefined."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        if name in found:
            return
        source = (folder / name).read_text(encoding="utf-8")
        for whole, _, module in IMPORT.findall(source):
            if not whole or module in pages:
                add(module)
        found[name] = function_of(name, source, pages)

    add(entry)
    return "\n".join(['"use strict";', "(() => {", "const modules = {};", *found.values(), "})();", ""])


def function_of(name: str, source: str, pages: Collection[str]) -> str:
    """`modules["dom.js"] = (() => { ... return { h, put }; })();`"""

    def imported(match: re.Match[str]) -> str:
        whole, names, module = match.groups()
        if whole:
            return f'const {whole} = modules["{module}"];\n' if module in pages else f"const {whole} = undefined;\n"
        return f'const {{{names.replace(" as ", ": ")}}} = modules["{module}"];\n'

    body = EXPORT.sub(r"\1", IMPORT.sub(imported, source))
    if left := MODULE_WORD.search(body):
        raise ValueError(f"{name} has a form of import or export that is not known here: {left[0]}")
    exported = ", ".join(match[2] for match in EXPORT.finditer(source))
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'
