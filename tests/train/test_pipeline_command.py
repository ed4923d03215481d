"""A whole run of a pipeline: what it prints and writes, and how one rank resumes, samples and evaluates it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.command import Commands
from tests.support.training import looped, prepared
from tpfuse import cli
from tpfuse.testing.ranks import pool
from tpfuse.train.metrics import read_metrics

pytestmark = pytest.mark.exhaustive

DOUBLE = "--train.dtype float64 --model.dropout 0.1 --model.n-layer 4"
ZBV = "--parallel.pp 2 --parallel.pp-schedule zbv --train.micro-batch 2"
ROOT = Path(__file__).resolve().parents[2]


def test_a_run_explains_its_pipeline_as_the_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pipeline.md").read_text()
    (shown,) = re.findall(r"The first command of this page prints:\n\n```\n(.*?)^```$", page, re.M | re.S)
    (words,) = re.findall(r"^tpfuse train (.*) --train.steps 50 (.*) --out runs/pipeline$", page, re.M)
    words = " ".join(words).replace("README.md", str(ROOT / "README.md"))
    run = prepared(f"{words} --train.steps 1 --train.eval-every 0 --out {tmp_path / 'run'}".split(), 2)
    assert shown in pool(2).run(looped, run)[0]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["loss"] is not None]


def test_a_pipeline_trains_and_is_used_as_a_run_of_one_rank(
    flags: list[str], tmp_path: Path, commands: Commands
) -> None:
    one, piped = tmp_path / "one", tmp_path / "piped"
    assert cli.run(["train", *flags, *DOUBLE.split(), "--out", str(one)]) == 0
    out = pool(2).run(looped, prepared([*flags, *DOUBLE.split(), *ZBV.split(), "--out", piped], 2))[0]
    assert "ranks    tp 1 x dp 1 x pp 2 on cpu" in out
    found = re.search(r"^pipeline zbv: 4 micro-batches of 2 sequences on 2 pipeline ranks with 2 stages each; predicted"
                      r" idle share at most (\d+)%$", out, re.MULTILINE)  # fmt: skip
    assert found and 0 < int(found[1]) < 60
    assert re.search(r"^memory   ZeRO stage 0, counted [\d.]+ MiB a rank: parameters ", out, re.MULTILINE)
    assert losses(piped) == pytest.approx(losses(one), rel=1e-9)
    rows = read_metrics(piped / "metrics.jsonl")
    for row in rows[1:]:
        for shares in (row["pipeline_idle"], row["predicted_idle"]):
            assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
    manifest = json.loads((piped / "step-12" / "manifest.json").read_text())
    assert manifest["state"]["layout"]["pp"] == 2 and len(manifest["files"]) == 2
    for words in ("sample {} --prompt the --tokens 40 --temperature 0", "evaluate {}"):
        texts = [commands.do(*words.format(run).split()).replace(str(run), "") for run in (one, piped)]
        assert texts[0] == texts[1]
    shutil.rmtree(piped / "step-12")
    commands.out = piped
    assert "continuing after step 10" in commands.resume("--parallel.pp", "1", "--parallel.pp-schedule", "1f1b")
    assert losses(piped) == pytest.approx(losses(one), rel=1e-9)
