"""`tpfuse plan` prints a report, writes the same as JSON and the best layout as TOML."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tpfuse.cli import run
from tpfuse.commands.plan.report import slower
from tpfuse.commands.plan.search import PlanCandidate
from tpfuse.plan.memory import RankMemory
from tpfuse.plan.sizes import RankLayout
from tpfuse.plan.time import StepTimes
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train

SMALL = ("--layers", "6", "--width", "512", "--heads", "8", "--batch", "64")


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert run(["plan", *map(str, arguments)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def _document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_plan(capsys, *arguments, "--json", "-"))
    return document


def test_the_report_has_what_the_document_has_and_it_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    text, document = _plan(capsys, *SMALL), _document(capsys, *SMALL)
    best = document["layouts"][0]
    assert f"{document['compared']:,} layouts were compared, of which {len(document['layouts']):,} fit" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("1 "))
    assert row[1:5] == [str(best["layout"][name]) for name in ("tp", "cp", "dp", "pp")]
    assert f"{best['tokens_per_second']:,.0f}" in row and f"{best['mfu']:.1%}" in row
    assert f"{best['bytes'] / 2**30:.1f}" == row[-1]
    assert document["command"] in " ".join(text.replace("\\\n", " ").split())
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())
    tokens, gpu = 64 * 1024, document["cluster"]["gpu"]
    seconds = [each["seconds"] for each in document["layouts"]]
    assert seconds == sorted(seconds) and len(seconds) > 100
    for each in document["layouts"][:50]:
        assert sum(each["seconds_by_kind"].values()) == pytest.approx(each["seconds"])
        assert sum(each["bytes_by_kind"].values()) == pytest.approx(each["bytes"])
        assert each["bytes"] <= gpu["memory"]
        assert each["tokens_per_second"] == pytest.approx(tokens / each["seconds"])
        hourly = gpu["price"] * 8
        assert each["dollars_per_million_tokens"] == pytest.approx(hourly * each["seconds"] / 3600 / tokens * 1e6)
        model = document["model"]
        operations = 6 * (model["layers"] * 12 * 512**2 + model["vocabulary"] * 512) + 12 * 6 * 1024 * 512
        assert each["mfu"] == pytest.approx(operations * tokens / each["seconds"] / 8 / gpu["half_rate"])
    assert document["sources"]["h100 memory"] and document["sources"]["nvlink4 latency"]


def test_the_command_and_the_file_give_the_best_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.toml"
    text = _plan(capsys, *SMALL, "--toml", file, "--json", tmp_path / "all.json")
    document = json.loads((tmp_path / "all.json").read_text())
    program, name, *arguments = shlex.split(document["command"])
    assert (program, name) == ("tpfuse", "train") and arguments == document["train"]
    options = parse_train(arguments)
    best = document["layouts"][0]["layout"]
    parallel = options.parallel
    assert [parallel.tp, parallel.cp, parallel.dp, parallel.pp] == [best[name] for name in ("tp", "cp", "dp", "pp")]
    assert (options.zero.stage, options.train.recompute) == (best["zero"], best["recompute"])
    assert (options.train.micro_batch, options.train.batch) == (best["micro_batch"], best["batch"])
    again = with_layout(parse_train(["--config", str(file)]), 8)
    assert (again.model, again.parallel, again.zero, again.train) == (
        options.model, parallel, options.zero, options.train
    )  # fmt: skip
    assert f"{file}: the options of the best layout" in text


def test_many_gpus_are_expected_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected to fail" not in _plan(capsys, *SMALL)
    text = _plan(capsys, *SMALL, "--gpus", "64", "--network", "100GbE")
    assert "64 x h100, nvlink4; 8 nodes, network 100GbE" in text
    assert "In a long run a GPU is expected to fail every 33" in text
    assert "torchrun --nnodes 8 --node-rank $NODE --nproc-per-node 8" in text


def test_slower_names_the_kinds_that_take_more() -> None:
    layout, memory = RankLayout(1, 1, 8, 1, "1f1b", 1, 0, "none", 1, 8), RankMemory()
    best = PlanCandidate(layout, memory, StepTimes(products=8.0, bubble=1.0, data=1.0))

    def told(**times: float) -> str:
        return slower(best, PlanCandidate(layout, memory, StepTimes(**times)))

    assert told(products=8.0, bubble=2.2, data=0.5) == "7.0% slower: the bubble adds 12.0%"
    assert told(products=9.0, bubble=2.0, data=0.5) == "15.0% slower: matrix products add 10.0%, the bubble 10.0%"
    assert told(products=8.0, bubble=1.0, data=1.0) == "equally fast: predictions within 1 % count as ties"


def test_plan_and_train_need_no_gpu_and_no_data_to_agree_on_a_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,'
        ' "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}'
    )
    document = _document(capsys, "--model", str(tmp_path))
    assert {each["layout"]["pp"] for each in document["layouts"]} == {1, 2}, "two layers"
    assert {each["layout"]["tp"] for each in document["layouts"]} == {1, 2}, "two heads of keys and values"
    assert {each["layout"]["recompute"] for each in document["layouts"]} <= {"none", "full"}
    assert with_layout(parse_train(document["train"]), 8).model.from_ == tmp_path


def test_the_page_shows_what_its_first_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    (shown,) = re.findall(r"^The first command prints:\n\n```\n(.*?)^```$", page, re.M | re.S)
    (words,) = re.findall(r"\A# Planning\n\n```sh\ntpfuse plan (.*)$", page, re.M)
    assert _plan(capsys, *words.split()) == shown
