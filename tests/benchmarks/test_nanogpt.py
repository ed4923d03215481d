"""The benchmark beside nanoGPT, with a program in nanoGPT's place that takes no steps."""

import sys
from pathlib import Path

import pytest

from benchmarks import bench_nanogpt
from benchmarks.harness import Row

PEER = """
import sys
from pathlib import Path
assert "--max_iters=22" in sys.argv and Path("data/text/train.bin").stat().st_size == 2 * 900
for step in range(23):
    print(f"iter {step}: loss 4.0, time {1000 + step}.00ms, mfu 1%")
"""


@pytest.mark.processes
def test_both_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkout, text, kept = tmp_path / "nanogpt", tmp_path / "input.txt", dict[str, Row]()
    (checkout / "config").mkdir(parents=True)
    for name in ("model.py", "configurator.py"):
        (checkout / name).write_text("")
    (checkout / "train.py").write_text(PEER)
    text.write_text("abcdefghij" * 100)
    monkeypatch.setattr(bench_nanogpt, "write_row", lambda name, row, keep: kept.update({name: row}))
    small = {"--train.eval-batches": "1", "--model.n-layer": "1", "--model.n-embd": "16"}
    pairs = zip(["", *bench_nanogpt.OURS], bench_nanogpt.OURS, strict=False)
    monkeypatch.setattr(bench_nanogpt, "OURS", [small.get(flag, value) for flag, value in pairs])
    flags = ["--nanogpt", str(checkout), "--text", str(text), "--rounds", "1", "--turn", "22", "--steps", "0"]
    monkeypatch.setattr(sys, "argv", ["bench_nanogpt.py", *flags])
    bench_nanogpt.main()
    row = kept["nanogpt"]
    assert row["nanogpt_ms"] == {"median": 1021.0, "p20": 1020.4, "p80": 1021.6}, "the first 20 steps do not count"
    assert row["speedup"] == pytest.approx(1021.0 / row["tpfuse_ms"]["median"], rel=0.01)
    assert "step of 768 tokens" in capsys.readouterr().out
