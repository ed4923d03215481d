"""`tpfuse watch` serves a page that draws the metrics of a run."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Commands
from tpfuse.commands.watch import PICTURE, open_server
from tpfuse.parallel.pipeline.order import order
from tpfuse.parallel.pipeline.timeline import timeline
from tpfuse.testing.patience import patient
from tpfuse.train.metrics import read_metrics
from tpfuse.train.pipeline_picture import NAME, draw_pipeline

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def address(copied: Path) -> Iterator[str]:
    """Serve a copy of the finished run."""
    with open_server(copied, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _get(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=patient(5.0)) as answer:
        body: bytes = answer.read()
        return body


def test_the_rows_are_those_of_the_metrics(address: str, copied: Path) -> None:
    found = json.loads(_get(f"{address}/rows"))
    assert found["rows"] == read_metrics(copied / "metrics.jsonl") and len(found["rows"]) > 3
    assert (found["run"], found["steps"]) == (str(copied), 12) and 0 <= found["age"] < 1e6
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # a row that is being written
    assert json.loads(_get(f"{address}/rows"))["rows"] == found["rows"]
    (copied / "metrics.jsonl").unlink()
    assert json.loads(_get(f"{address}/rows"))["rows"] == []


def test_the_picture_of_a_pipeline_is_served(address: str, copied: Path) -> None:
    assert PICTURE == NAME
    picture = copied / NAME
    assert json.loads(_get(f"{address}/rows"))["picture"] is None
    with pytest.raises(urllib.error.HTTPError) as refused:
        _get(f"{address}/{NAME}")
    assert refused.value.code == 404
    draw_pipeline(copied, timeline(order("1f1b", 2, 1, 2)), None, 1)
    changed = json.loads(_get(f"{address}/rows"))["picture"]
    assert changed == str(picture.stat().st_mtime_ns)
    with urllib.request.urlopen(f"{address}/{NAME}?{changed}", timeout=patient(5.0)) as answer:
        assert answer.headers["Content-Type"] == "image/png"
        assert answer.read() == picture.read_bytes()


def test_the_page_loads_nothing_from_elsewhere_and_hides_a_missing_picture(address: str) -> None:
    page = _get(f"{address}/").decode()
    assert "<script>" in page and '<figure id="pipeline" hidden' in page
    assert re.findall(r"https?://[^\"']+", page) == ["http://www.w3.org/2000/svg"]


def test_other_requests_are_refused(address: str, copied: Path) -> None:
    """A page of the web cannot read the run by a name that stands for this machine."""
    for url, headers, status in (
        (f"{address}/../config.toml", {}, 404),
        (f"{address}/rows", {"Host": f"elsewhere.example:{address.rpartition(':')[2]}"}, 403),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            _get(url, **headers)
        assert refused.value.code == status
    shutil.rmtree(copied)
    with pytest.raises(urllib.error.HTTPError) as refused:
        _get(f"{address}/rows")
    assert refused.value.code == 500


def test_bad_folders_and_ports_are_refused(trained: Path, tmp_path: Path, commands: Commands) -> None:
    assert "is no run: expected a folder that `tpfuse train` has written" in commands.fail("watch", tmp_path)
    with open_server(trained, 0) as server:
        assert "cannot be used" in commands.fail("watch", trained, "--port", server.server_port)
    assert "--port 70000 cannot be used" in commands.fail("watch", trained, "--port", "70000")


@pytest.mark.processes
def test_the_command_serves_until_it_is_interrupted(trained: Path) -> None:
    command = [sys.executable, "-m", "tpfuse", "watch", str(trained), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert json.loads(_get(said.split()[0] + "rows"))["steps"] == 12
        process.send_signal(signal.SIGINT)
        assert process.wait(patient(10.0)) == 0


def _shown(address: str, tmp_path: Path) -> str:
    """Return the page as Chromium shows it."""
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    profile, budget = f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000"
    return subprocess.run(
        [str(CHROMIUM), *flags.split(), profile, budget, "--dump-dom", f"{address}/"],
        capture_output=True,
        text=True,
        timeout=patient(60.0),
        check=True,
    ).stdout


def _captions(shown: str) -> dict[str, int]:
    """Return the caption of each chart and the number of its lines, none of which may have a bad point."""
    charts = shown.partition('<div id="charts">')[2].partition("<script>")[0]
    assert not re.search("NaN|undefined|Infinity", charts)
    figures = charts.split("<figure>")[1:]
    return {re.findall(r"<figcaption>([^<]*)<", figure)[0]: figure.count("<polyline points=") for figure in figures}


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_draws_the_charts_and_the_picture_of_a_pipeline(address: str, copied: Path, tmp_path: Path) -> None:
    draw_pipeline(copied, timeline(order("1f1b", 2, 1, 2)), None, 1)
    shown = _shown(address, tmp_path)
    assert f'src="{NAME}?{(copied / NAME).stat().st_mtime_ns}"' in shown and '<figure id="pipeline">' in shown
    assert "The run has taken all 12 steps." in shown
    captions = _captions(shown)
    assert list(captions)[:2] == ["Loss, nats per token", "Tokens per second"] and len(captions) >= 6
    assert sum(captions.values()) == len(captions) + 1, "two lines of losses"
