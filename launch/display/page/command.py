"""`report RUN...`: runs as one HTML file to keep, to send or to print. A run that ends writes its own.

The file needs nothing else: curves are inline SVG, colours follow a style sheet inside, and there is no script. Its
content policy forbids a browser to load anything or to run anything, whatever a model wrote into an answer. Jinja
escapes every text besides, and control characters become visible.
Left out on purpose: whole runs. rollouts.jsonl has every group, `show` and the window show them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from launch.display.page.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from launch.display.page.content import comparison_of, page_of
from protocol.plain_text import for_terminal
from shared.run.files import write_whole
from shared.run.reader import Run
from shared.run.run_dir import RunDir, refuse_to_replace

FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}


def report(*, directories: Sequence[Path], out: Path | None) -> int:
    if out is not None:
        refuse_to_replace(out)
    runs = [Run(directory) for directory in directories]
    file = out or runs[0].files.report
    write_whole(file, rendered(runs).encode("utf-8", "replace"), durable=False)
    print(f"written to {file}")
    return 0


def write_report(run: RunDir) -> Path:
    """At the end of a run."""
    write_whole(run.report, rendered([Run(run.path)]).encode("utf-8", "replace"), durable=False)
    return run.report


def rendered(runs: Sequence[Run]) -> str:
    environment = Environment(
        loader=PackageLoader("launch.display.page", ""),
        autoescape=True,
        finalize=without_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages = [page_of(run) for run in runs]
    compared = comparison_of(by_name(runs)) if len(runs) > 1 else None
    return environment.get_template("report.html.jinja").render(pages=pages, compared=compared, frame=FRAME)


def without_controls(value: Any) -> Any:
    """What a macro returns is HTML already."""
    return for_terminal(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def by_name(runs: Sequence[Run]) -> Mapping[str, Run]:
    """By the name of the folder, or by the path where two have the same."""
    names = [run.path.resolve().name for run in runs]
    return {name if names.count(name) == 1 else str(run.path): run for name, run in zip(names, runs, strict=True)}
