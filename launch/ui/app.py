"""What the page asks of its process: the files of the page, and questions about runs with JSON answers.

    GET /                                        the page; /static/NAME its files, all read at the start
    GET /api/runs                                all runs
    GET /api/runs/RUN/overview why evaluations curves lanes     monitor.py
    GET /api/runs/RUN/steps steps/N steps/N/I steps/N/I/J task search      samples.py
    GET /api/compare                             compare.py
    GET /api/control                             whether the page may do more than look: control_routes.py

A question with `stamp` is answered by the stamp alone if nothing has changed since: that is what a page asks all the
time, and it costs a few `stat`s. Answers are made in threads, one at a time for each run. An error that a person can
fix is answered with one sentence; texts of models are JSON strings here and text nodes in the page.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from launch.ui import compare, monitor, samples
from launch.ui.access import AccessCheck
from launch.ui.questions import answered, problem
from launch.ui.runs_folder import OpenRun, RunsFolder

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
Query = Mapping[str, str]
"""What the address of a question has after `?`, and the numbers of its path."""
Question = Callable[[OpenRun, Query], Any]


def build_app(runs: RunsFolder, port: int, token: str, control: Sequence[Route] = ()) -> ASGIApp:
    """control: of control_routes.py; none for a page that only looks."""
    files = {path.name: path.read_bytes() for path in STATIC.iterdir()}

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return problem(f"There is no file {name!r}.", 404)
        return Response(files[name], media_type=TYPES[Path(name).suffix])

    def about_all(request: Request) -> Response:
        return answered(lambda: all_runs(runs, request.query_params.get("stamp", "")))

    def compared(request: Request) -> Response:
        return answered(lambda: compare.compared(runs, request.query_params))

    return AccessCheck(
        Starlette(
            routes=[
                Route("/", page),
                Route("/static/{name}", page),
                Route("/api/runs", about_all),
                Route("/api/compare", compared),
                Route("/api/control", lambda request: answered(lambda: {"control": bool(control)})),
                *control,
                *(
                    Route(f"/api/runs/{{run}}/{path}", about_one(runs, question))
                    for path, question in QUESTIONS.items()
                ),
            ]
        ),
        port,
        token,
    )


QUESTIONS: Mapping[str, Question] = {
    "overview": monitor.overview,
    "why": monitor.why,
    "evaluations": monitor.evaluations,
    "curves": monitor.curves,
    "lanes": monitor.lanes,
    "steps": samples.steps,
    "steps/{step}": samples.groups,
    "steps/{step}/{group}": samples.group,
    "steps/{step}/{group}/{sample}": samples.answer,
    "task": samples.history,
    "search": samples.search,
}


def about_one(runs: RunsFolder, question: Question) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        def ask() -> Any:
            with runs.reading(request.path_params["run"]) as opened:
                return question(opened, {**request.query_params, **request.path_params})

        return answered(ask)

    return answer


def all_runs(runs: RunsFolder, known: str) -> Mapping[str, Any]:
    stamps: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for opened in runs.all():
        with opened.lock:
            stamps[opened.name] = opened.stamp()
            rows.append(opened.description(stamps[opened.name]))
    stamp = f"{hash(tuple(stamps.items())):x}"
    return {"stamp": stamp} if stamp == known else {"stamp": stamp, "folder": str(runs.path), "runs": rows}
