"""Application and server behind `titan-rl view`: a page, and the API that it reads. All requests are GET, and answers
JSON.

/api/runs                        {"runs": [{"id", "name", "kind", "state", "reason", "waits_for", "steps",
                                 "steps_planned", "began", "resumed", "ended", "seconds", "tasks", "named"}]},
                                 newest first, with times in seconds; "named" tells whether the run's own folder was
                                 given on the command line
/api/settings                    {"settings": {id: {"training.lr": 0.0003}}}: settings of all runs, by dotted names
/api/runs/{id}/summary           see `summarize`
/api/runs/{id}/metrics           {"metrics": [{"name", "unit", "help", "group"}]}
/api/runs/{id}/curves            ?names=a,b&points=1000&from=&to=: {"curves": {"a": {"steps", "values", "low", "high"}}}
/api/runs/{id}/rollouts          filters as in `RolloutQuery`: {"total", "rows", "facets", "ranges", "indexed"}
/api/runs/{id}/rollouts/{index}  a line of `rollouts.jsonl`
/api/runs/{id}/prompts           see `RolloutIndex.prompts`
/api/runs/{id}/timeline          ?from=&to=&width=1000&seen_from=&seen_to=: see `titan_rl.viewer.timeline`
/api/runs/{id}/trace.json        a Chrome trace of all processes, for ui.perfetto.dev
/api/events                      server-sent events: {"run", "changed": ["metrics", "rollouts", "timeline"]} for runs
                                 that a client has opened, and {"run": "", "changed": ["runs"]} if /api/runs changes.
                                 The first, {"run": "", "changed": []}, says that changes are reported from then on

Errors are {"error": "...", "field": "limit"}: 400 for a wrong parameter, 404 for an unknown path or run, 403 for a
request that does not come from the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import os
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan_rl.core.calls.parsing import host_of, names_this_machine
from titan_rl.core.errors import ConfigError
from titan_rl.core.http_server import HttpServer, listening_socket
from titan_rl.viewer.html import STATIC, page_file, served_page
from titan_rl.viewer.metric_columns import described
from titan_rl.viewer.rollout_index import QueryError, RolloutQuery, integer, number
from titan_rl.viewer.runs import RunReader, Runs
from titan_rl.viewer.summary import settings_of
from titan_rl.viewer.timeline import chrome_trace, timeline

LOOK_S = 0.5
"""Interval at which files are checked for changes while a page is open, in seconds."""

BEAT_S = 15.0
"""Interval of keep-alive comments in the stream of events, in seconds."""

TRACE_PATIENCE_S = 0.5
"""Time for which a trace is read before the answer is sent with the part read so far, in seconds."""

MAX_POINTS = 20_000
_POLICY = b"content-security-policy"
_GUARDS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


def make_viewer(runs: Runs, *, key: str | None = None, look_s: float = LOOK_S) -> ViewerApp:
    """Make the application for some runs.

    Args:
        key: Key that is required to open the page: `/?key=...` sets a cookie. None admits every client of this machine.
        look_s: Interval at which files are checked while a client listens to events, in seconds.
    """
    endpoints = {
        "/api/runs/{run}/summary": _summary,
        "/api/runs/{run}/metrics": _metrics,
        "/api/runs/{run}/curves": _curves,
        "/api/runs/{run}/timeline": _timeline,
        "/api/runs/{run}/trace.json": _trace,
        "/api/runs/{run}/prompts": _prompts,
        "/api/runs/{run}/rollouts": _rollouts,
        "/api/runs/{run}/rollouts/{index}": _rollout,
    }
    ended = asyncio.Event()

    def everything(request: Request) -> Response:
        return _json({"runs": runs.describe()})

    def settings(request: Request) -> Response:
        return _json({"settings": {run: settings_of(folder) for run, folder in runs.folders().items()}})

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(runs, look_s, ended), media_type="text/event-stream")

    routes = [
        Route("/", _page),
        Route("/api/runs", everything),
        Route("/api/settings", settings),
        Route("/api/events", events),
        *(Route(path, _of_run(runs, answer)) for path, answer in endpoints.items()),
        Route(f"{STATIC}{{path:path}}", _file),
    ]
    handlers: Any = {QueryError: _wrong_query, HTTPException: _refused}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return ViewerApp(app, ended, key)


class ViewerApp:
    """ASGI application that admits only pages of this server, and sets the headers that restrict browsers."""

    def __init__(self, app: ASGIApp, ended: asyncio.Event, key: str | None) -> None:
        self._app = app
        self._ended = ended
        self._key = key

    def end(self) -> None:
        """End the streams of events."""
        self._ended.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                is_page = any(name == _POLICY for name, _ in headers)
                message["headers"] = [*headers, *_GUARDS, *([] if is_page else [(_POLICY, b"default-src 'none'")])]
            await send(message)

        await (self._gate(Request(scope)) or self._app)(scope, receive, send_guarded)

    def _gate(self, request: Request) -> Response | None:
        """Check the host and the key of a request; None admits it.

        A page of another site reaches this server under its own name, which resolves to this address. All ports of a
        host share cookies, so the cookie's name has the port.
        """
        host = request.headers.get("host", "")
        if not names_this_machine(host_of(host)):
            return _error(403, f"this server only answers as http://localhost, not as {host[:100]!r}")
        if self._key is None:
            return None
        cookie = f"titan_rl_view_{request.url.port}"
        if request.url.path == "/" and "key" in request.query_params:
            if not secrets.compare_digest(request.query_params["key"].encode(), self._key.encode()):
                return _error(403, "this key belongs to another server; open the address that titan-rl view prints")
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, self._key, httponly=True, samesite="strict")
            return answer
        if not secrets.compare_digest(request.cookies.get(cookie, "").encode(), self._key.encode()):
            return _error(403, "open the address that titan-rl view prints, which contains the key")
        return None


def _of_run(runs: Runs, answer: Callable[[Request, RunReader], Response]) -> Callable[[Request], Response]:
    """Make an endpoint of one run. Starlette runs it in a thread, because it reads files."""

    def endpoint(request: Request) -> Response:
        run = request.path_params["run"]
        reader = runs.reader(run)
        if reader is None:
            raise HTTPException(404, f"there is no run {run[:200]!r}; /api/runs lists the runs")
        return answer(request, reader)

    return endpoint


def _metrics(request: Request, reader: RunReader) -> Response:
    return _json({"metrics": described(reader.columns())})


def _curves(request: Request, reader: RunReader) -> Response:
    given = request.query_params
    names = [name for name in given.get("names", "").split(",") if name]
    points = integer("points", given.get("points") or "1000", least=2, most=MAX_POINTS)
    first = number("from", given["from"]) if given.get("from") else -math.inf
    last = number("to", given["to"]) if given.get("to") else math.inf
    return _json({"curves": reader.curves(names, points, first, last)})


def _summary(request: Request, reader: RunReader) -> Response:
    return _json(reader.summary())


def _timeline(request: Request, reader: RunReader) -> Response:
    given = request.query_params
    first, last, seen_from, seen_to = (
        number(name, given[name]) if given.get(name) else None for name in ("from", "to", "seen_from", "seen_to")
    )
    seen = None if seen_from is None or seen_to is None else (seen_from, seen_to)
    width = integer("width", given.get("width") or "1000", least=1, most=MAX_POINTS)
    with reader.traces.lock:
        answer = timeline(reader.traces, first, last, width, seen, TRACE_PATIENCE_S)
    return _json({**answer, "bottleneck": reader.summary()["bottleneck"]})


def _trace(request: Request, reader: RunReader) -> Response:
    name = f"{reader.folder.name}.trace.json"
    headers = {"content-disposition": f'attachment; filename="{quote(name)}"'}
    return StreamingResponse(chrome_trace(reader.folder), media_type="application/json", headers=headers)


def _rollouts(request: Request, reader: RunReader) -> Response:
    return _json(reader.rollouts(RolloutQuery.parse(request.query_params)))


def _prompts(request: Request, reader: RunReader) -> Response:
    return _json(reader.prompts())


def _rollout(request: Request, reader: RunReader) -> Response:
    text = request.path_params["index"]
    line = reader.rollout(integer("index", text, least=0, most=1 << 53))
    if line is None:
        raise HTTPException(404, f"there is no rollout {text}")
    return Response(line, media_type="application/json")


async def _events(runs: Runs, look_s: float, ended: asyncio.Event) -> AsyncGenerator[str]:
    known, silent = await run_in_threadpool(runs.look), 0.0
    yield _event("")  # changes from now on are reported
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), look_s)
        seen = await run_in_threadpool(runs.look)
        for run, numbers in seen.items():
            before = known.get(run, {})
            if changed := [what for what, number in numbers.items() if number != before.get(what)]:
                silent = 0.0
                yield _event(run, *changed)
        known, silent = seen, silent + look_s
        if silent >= BEAT_S:
            silent = 0.0
            yield ": alive\n\n"


def _event(run: str, *changed: str) -> str:
    return f"data: {json.dumps({'run': run, 'changed': changed})}\n\n"


async def _page(request: Request) -> Response:
    page = served_page()
    return HTMLResponse(page.html, headers={"content-security-policy": page.policy})


async def _file(request: Request) -> Response:
    path = request.path_params["path"]
    try:
        content, media_type = page_file(path)
    except KeyError:
        raise HTTPException(404, f"the page has no file {path[:200]!r}") from None
    return Response(content, media_type=media_type)


def _json(answer: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)


async def _wrong_query(request: Request, error: QueryError) -> Response:
    return _json({"error": str(error), "field": error.field}, 400)


async def _refused(request: Request, error: HTTPException) -> Response:
    return _error(error.status_code, error.detail)


HOST = "127.0.0.1"
PORT = 8484
GRACE_S = 1
"""Grace period of answers when the server stops, in seconds."""


def listen(port: int | None) -> socket.socket:
    """Open a socket that listens on loopback, which the caller has to close.

    Args:
        port: Port, or 0 for any. None for `PORT`, or any free port if that is taken.

    Raises:
        ConfigError: The port cannot be used.
    """
    try:
        try:
            return listening_socket(HOST, PORT if port is None else port)
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
            return listening_socket(HOST, 0)
    except (OSError, OverflowError) as error:
        problem = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(f"--port {port}: {problem}; use another one, or 0 for any free port") from None


def run_viewer(app: ViewerApp, listener: socket.socket, ready: Callable[[], None]) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        ready: Called once requests are answered.

    Returns:
        128 plus the number of the signal.
    """
    return asyncio.run(_serve(app, listener, ready))


async def _serve(app: ViewerApp, listener: socket.socket, ready: Callable[[], None]) -> int:
    server = HttpServer(app, ready, timeout_graceful_shutdown=GRACE_S)
    loop, received = asyncio.get_running_loop(), [0]

    def stop(signum: int) -> None:
        received[0] = signum
        app.end()
        server.should_exit = True

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop, signum)
    await server.serve(sockets=[listener])
    return 128 + received[0] if received[0] else 0
