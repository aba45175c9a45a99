"""The requests that change something, with `--control` only; control.py says what each one does.

    POST /api/runs/RUN/evaluate chat resume stop     about one run
    POST /api/draft plan train                       a new run: its command, its plan, its start
    GET  /api/form?source=                           presets, files, and every key with its meaning and range
    GET  /api/jobs  /api/jobs/N?first=               the processes of this page, and what one has said
    POST /api/jobs/N/say end                         to one of them

A request is handled in a thread, since it may read files and start a process.
"""

from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.ui.control import MOST_BYTES, Control, Say, Wanted, asked
from launch.ui.jobs import Job
from launch.ui.questions import answered, problem, whole
from launch.ui.runs_folder import OpenRun

Act = Callable[[Request, bytes], Any]


def control_routes(control: Control) -> list[Route]:
    def job(request: Request) -> Job:
        return control.jobs.find(whole(request.path_params, "job"))

    def say(request: Request, body: bytes) -> Any:
        job(request).say(asked(body, Say).line)
        return {}

    def end(request: Request, body: bytes) -> Any:
        asked(body, Wanted)
        job(request).end()
        return {}

    about_run = {"evaluate": control.evaluate, "chat": control.chat, "resume": control.resume, "stop": control.stop}
    about_new = {"draft": control.draft, "plan": control.plan, "train": control.train}
    return [
        *(post(f"/api/runs/{{run}}/{name}", about_one(control, act)) for name, act in about_run.items()),
        *(post(f"/api/{name}", lambda _, body, act=act: act(body)) for name, act in about_new.items()),
        post("/api/jobs/{job}/say", say),
        post("/api/jobs/{job}/end", end),
        get("/api/jobs/{job}", lambda request: job(request).told(whole(request.query_params, "first", 0))),
        get("/api/jobs", lambda _: {"jobs": [one.state() for one in list(control.jobs.known.values())]}),
        get("/api/form", lambda request: control.form(request.query_params.get("source", ""))),
    ]


def about_one(control: Control, of_run: Callable[[OpenRun, bytes], Any]) -> Act:
    def act(request: Request, body: bytes) -> Any:
        with control.runs.reading(request.path_params["run"]) as opened:
            return of_run(opened, body)

    return act


def get(path: str, ask: Callable[[Request], Any]) -> Route:
    def endpoint(request: Request) -> Response:
        return answered(lambda: ask(request))

    return Route(path, endpoint)


def post(path: str, act: Act) -> Route:
    async def endpoint(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                return problem(f"A request has at most {MOST_BYTES} bytes.", 413)
        return await run_in_threadpool(lambda: answered(lambda: act(request, body)))

    return Route(path, endpoint, methods=["POST"])
