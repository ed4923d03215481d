"""`tpfuse watch` shows the metrics of a run, while it trains or after its end, as a page in a browser of this machine.

The page asks for the rows of metrics.jsonl every two seconds and draws them itself. It also loads pipeline.png if the
run has this picture, and nothing else.
"""

import json
import time
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from tpfuse.errors import UserError
from tpfuse.train.config import read_toml
from tpfuse.train.messages import say
from tpfuse.train.metrics import read_metrics

PICTURE = "pipeline.png"  # `tpfuse.train.pipeline_picture.NAME`, whose module imports matplotlib
_ADDRESS = "127.0.0.1"


def rows_of(run: Path) -> dict[str, Any]:
    """Return what the page draws: the run's name, its number of steps, the age of the last row in s, and all rows.

    Its entry picture is when the pipeline's picture last changed, in ns, as text; None without one.
    """
    path, picture = run / "metrics.jsonl", run / PICTURE
    drawn = str(picture.stat().st_mtime_ns) if picture.exists() else None
    steps = read_toml(run / "config.toml").get("train", {}).get("steps", 0)
    age = time.time() - path.stat().st_mtime if path.exists() else 0.0
    return {"run": str(run), "steps": steps, "age": max(0.0, age), "rows": read_metrics(path), "picture": drawn}


class _Handler(BaseHTTPRequestHandler):
    """Answer requests for the page of a run, its rows and its picture."""

    def __init__(self, run: Path, *connection: Any) -> None:
        self.run = run
        super().__init__(*connection)  # it answers

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_ADDRESS, "localhost"):  # a page of the web whose name means this machine
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", files("tpfuse.commands").joinpath("watch.html").read_bytes())
        elif self.path == "/rows":
            try:
                rows = json.dumps(rows_of(self.run), allow_nan=False)
            except ValueError as error:  # an unreadable file, or a loss that is not finite
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error).partition("\n")[0])
            else:
                self._answer("application/json", rows.encode())
        elif self.path.partition("?")[0] == f"/{PICTURE}" and (self.run / PICTURE).is_file():
            self._answer("image/png", (self.run / PICTURE).read_bytes())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def open_server(run: Path, port: int) -> ThreadingHTTPServer:
    """Return the server of a run, which answers after `serve_forever`. port: 0 for any. Raise UserError."""
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is no run: expected a folder that `tpfuse train` has written")
    try:
        return ThreadingHTTPServer((_ADDRESS, port), partial(_Handler, run))
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} cannot be used: {error}") from None


def watch(run: Path, port: int) -> None:
    """Serve the page until Ctrl-C. Raise UserError for a folder that is no run, and for a port in use."""
    with open_server(run, port) as server:
        say(f"http://{_ADDRESS}:{server.server_port}/ shows {run}; Ctrl-C ends this")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say()
