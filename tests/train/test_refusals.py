"""Bad input of every command is an error of one line, and the command writes nothing."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tpfuse.cli import run
from tpfuse.train.token_file import write_token_file
from tpfuse.train.tokenizer import CharTokenizer

# The command line and what its error says. {run} is a finished run, {given} the folder of the fixture below. The
# options of `train` come after those of a tiny run in a new folder.
REFUSED = {
    "train --train.stepz 3": "did you mean --train.steps",
    "train --train.steps three": "--train.steps: invalid literal for int() with base 10: 'three'",
    "train --train.steps": "Missing value for argument '--train.steps'",
    "train --train.dtype int8": "invalid choice 'int8' for argument '--train.dtype'. Expected one of ('float32'",
    "train stray": "unexpected 'stray' after --out",
    "train --config absent.toml": "cannot read absent.toml",
    "train --resume": "no run to resume in",
    "train --resume maybe": "invalid choice 'maybe' for argument '--resume'",
    "train --resume auto --out {given}": "exists: it holds no run: choose another --out",
    "train --restarts -1": "--restarts -1: expected at least 0",
    "train --parallel.tp 3": "tp 3 does not divide n_head 4",
    "train --model.n-embd 30": "n_embd 30 is not a multiple of n_head 4",
    "train --model.n-positions 100000": "a context of 100000 needs 100001",
    "train --data.val-fraction 0.001": "tokens for validation",
    "train --data.val-fraction 1.5": "--data.val-fraction 1.5",
    "train --data.path /nowhere/at/all.txt": "/nowhere/at/all.txt does not exist",
    "train --data.path /nowhere/at/all.bin": "cannot read /nowhere/at/all.bin",
    "train --data.tokenizer klingon": "tokenizer 'klingon' is not known",
    "train --train.batch 9 --parallel.dp 2": "--train.batch 9 cannot be divided among 2",
    "train --train.micro-batch 3": "--train.micro-batch 3 does not divide the 8 sequences",
    "train --init-from /nowhere": "--init-from /nowhere: expected the folder of a `tpfuse train` run, or of a Hugging",
    "train --optim.beta2 1.0": "--optim.beta2 1.0",
    "train --optim.lr nan": "--optim.lr nan",
    "train --optim.lr 1e-4 --optim.min-lr 1e-3": "--optim.min-lr 0.001 is above --optim.lr 0.0001: the rate would rise",
    "train --optim.lr inf": "--optim.lr inf: expected at least 0, and finite",
    "train --comm.timeout 1e7": "--comm.timeout 10000000.0: expected at most 1e+06 seconds",
    "train --out=~/runs/x": "--out=~/runs/x: shells leave ~ as it is here: write --out ~/runs/x",
    "train --out r\udcff": "the name is not UTF-8: rename it",
    "train --model.dropout 1.0": "dropout 1.0",
    "train --train.seed 9223372036854775808": "9223372036854775808: expected a number of 64 bits with a sign",
    "train --data.path a.txt b.txt": "unexpected 'b.txt' after --data.path, which takes one value",
    "train --data.path '/nowhere/*.bin'": "no file matches /nowhere/*.bin",
    "train --data.val-path v.txt --data.val-fraction 0.2": "--data.val-fraction is not for --data.val-path, whose",
    "train --train.batch 1000000000000": "--train.batch 1000000000000: the token ids of one step take",
    "train --optim.warmup soon": "--optim.warmup 'soon': expected a number of steps, or of tokens such as 375e6tokens",
    "train --optim.warmup -1": "--optim.warmup -1: expected at least 0",
    "train --optim.decay 5": "--optim.decay 5: only for --optim.schedule wsd",
    "train --optim.schedule constant --optim.decay-steps 9": "--optim.decay-steps 9: only for",
    "train --optim.muon-lr 0.02": "--optim.muon-lr 0.02: only for --optim.name muon",
    "train --optim.name muon --optim.muon-momentum 1": "--optim.name muon: Muon: momentum 1.0: expected from 0",
    "train --optim.name muon --optim.muon-coefficients 3,-4": "muon-coefficients '3,-4': expected three numbers",
    "train --optim.name muon --optim.muon-lr 1 --optim.lr 0": "--optim.muon-lr follows the schedule of --optim.lr",
    "train --train.virtual-ranks 6": "--train.virtual-ranks: virtual_ranks 6: expected a power of two, or 0",
    "train --train.virtual-ranks 2 --parallel.dp 4": "virtual_ranks 2: expected a multiple of the 4 data-parallel",
    "train --train.virtual-ranks 4 --train.batch 6 --parallel.dp 2": "batch 6 cannot be divided among 4 virtual ranks",
    "train --train.virtual-ranks 4 --train.batch 8 --train.micro-batch 4": (
        "--train.micro-batch 4 does not divide the 2 sequences of each virtual rank (--train.batch 8, virtual-ranks 4)"
    ),
    "train --parallel.tp 0": "--parallel.tp 0",
    "train --parallel.pp 3": "--parallel.pp 3: 2 layers cannot be cut into 3 pipeline stages: expected at least one",
    "train --parallel.pp 2 --parallel.pp-schedule zbv": "2 layers cannot be cut into 4 pipeline stages",
    "train --model.n-layer 8 --parallel.pp 4 --parallel.pp-schedule interleaved_1f1b --train.batch 9"
    " --train.micro-batch 1": "9 micro-batches of each rank in a step: schedule interleaved_1f1b on 4 ranks accepts for"
    " example 6, 7, 8, 10, 12 or 15 (--train.batch 9, dp 1, --train.micro-batch 1)",
    "train --parallel.pp 2 --parallel.pp-layers 1": "--parallel.pp-layers 1 has 1 stages and 1 layers: expected 2",
    "train --parallel.pp 2 --parallel.pp-layers 1,2": "1,2 has 2 stages and 3 layers: expected 2 stages",
    "train --parallel.pp 2 --parallel.pp-layers one": "--parallel.pp-layers 'one': expected a number",
    "train --parallel.pp-schedule zbv --parallel.pp-layers 2": (
        "--parallel.pp-schedule zbv, --parallel.pp-layers 2: only for --parallel.pp of at least 2"
    ),
    "train --model.n-layer 100000000000000000000000": "n_layer 100000000000000000000000: expected at most 65536",
    "train --train.compile=true": "--train.compile=true: --train.compile takes no value",
    "train --data.path=": "--data.path '': expected a path",
    "train --model.layer-norm-epsilon nan": "layer_norm_epsilon nan: expected 0 <= layer_norm_epsilon < 1",
    "train --parallel.pp 1000000000": "--parallel.pp 1000000000: 1000000000 stages: expected at most 1024",
    "train --parallel.pp 2 --parallel.pp-stages-per-rank -1": "--parallel.pp-stages-per-rank -1: expected at least 1",
    "train --parallel.pp 2 --parallel.pp-stages-per-rank 2": (
        "--parallel.pp-stages-per-rank 2: schedule 1f1b with 2 stages on each rank: expected 1\n"
    ),
    "train --parallel.pp 2 --parallel.pp-schedule zbv --parallel.pp-stages-per-rank 1": (
        "schedule zbv with 1 stages on each rank: expected 2"
    ),
    "train --parallel.pp 2 --parallel.pp-schedule interleaved_1f1b --parallel.pp-stages-per-rank 1": (
        "schedule interleaved_1f1b with 1 stages on each rank: expected at least 2"
    ),
    "train --train.cuda-graph": "--train.cuda-graph needs a GPU, and this machine has none: leave it out",
    "train --train.offload-activations": "--train.offload-activations: only for --train.recompute full, which keeps",
    "train --train.recompute full --train.offload-activations": "--train.offload-activations needs a GPU, and this",
    "train --zero.stage 4": "--zero.stage 4: expected 0, 1, 2 or 3",
    "train --parallel.replicas 2": "--parallel.replicas 2: only for --zero.stage 3 on several data-parallel ranks",
    "train --parallel.replicas 3 --parallel.dp 4 --zero.stage 3": (
        "--parallel.replicas 3: expected a number that divides the 4 data-parallel ranks"
    ),
    "train --zero.stage 3 --zero.compression bf16": "--zero.compression bf16: only for --zero.stage 0, 1 and 2",
    "train --zero.stage 3 --zero.offload /nowhere": "--zero.offload /nowhere is not a folder: expected none, host or",
    "train --zero.offload /nowhere": "--zero.offload /nowhere is not a folder: expected none, host or a folder on a",
    "train --zero.compression powersgd": "--zero.compression powersgd: expected none, bf16, or powersgd-RANK",
    "train --zero.compression powersgd-0": "--zero.compression powersgd-0: expected none, bf16, or powersgd-RANK",
    "train --parallel.cp 17": "cp 17 is more than the 16 tokens of a sequence",
    "train --parallel.cp 3 --parallel.cp-schedule ulysses": "3 ranks cannot divide 4 heads; ring and all_gather",
    "train --parallel.cp 4 --parallel.tp 2 --parallel.cp-schedule ulysses": (
        "4 ranks cannot divide 2 heads; ring and all_gather can be used, and so can ulysses_ring with one of [2]"
    ),
    "train --parallel.cp 2 --parallel.cp-schedule ulysses_ring": (
        "cp 2 has no divisor between 1 and itself that divides 4 heads"
    ),
    "train --parallel.cp 8 --parallel.cp-schedule ulysses_ring --parallel.cp-ulysses 8": (
        "schedule ulysses_ring: 8 of cp 8 exchange heads: expected a divisor between"
    ),
    "train --parallel.cp 2 --parallel.cp-ulysses 2": "--parallel.cp-ulysses 2: only for --parallel.cp of",
    "train --parallel.cp-schedule ring": "--parallel.cp-schedule ring: only for --parallel.cp of at least 2",
    "train --zero.accumulate whole --zero.stage 1": "--zero.accumulate whole: only for --zero.stage 2 and 3",
    "train --parallel.replicas 0 --zero.stage 3 --parallel.dp 2": "--parallel.replicas 0: expected a number that",
    "sample": "expected the folder of a run or of a Hugging Face model",
    "sample {given}": "holds no checkpoint",
    "sample {run} --tokens 0": "--tokens 0",
    "sample {run} --temperature -1": "--temperature -1.0",
    "sample {run} --top-k -1": "--top-k -1",
    "sample {run} --prompt ''": "the prompt is empty",
    "sample {run} --seed 99999999999999999999999": "--seed 99999999999999999999999: expected a number of 64 bits",
    "sample {run} --seed -9223372036854775809": "--seed -9223372036854775809: expected a number of 64 bits",
    "sample {run} --top-p 0": "--top-p 0.0: expected more than 0",
    "sample {run} --prompt-file /nowhere": "cannot read --prompt-file /nowhere: No such file",
    "sample {run} --prompt-file {run}/loss.png": "expected UTF-8",
    "sample {run} --prompt a --prompt-file {run}/config.toml": "were both given",
    "sample {run} --prompt ☃": "is not among",
    "evaluate {run} --data.path {given}/short.txt": "found 1 tokens, expected at least 2",
    "evaluate {run} --data.path {given}/data": "another tokenizer",
    "memory gpt9": "gpt9 is neither a preset (tiny, ",
    "memory openai/gpt9": "hf download openai/gpt9 --local-dir FOLDER",
    "memory tiny --ranks 3 --tp 2": "tp 2 x dp 1 needs 2 ranks, and there are 3",
    "memory tiny --ranks -1": "--ranks -1: expected at least 1",
    "memory tiny --ranks 3": "train.batch 16 cannot be divided among 3 data-parallel ranks",
    "memory tiny --micro-batch 5": "micro-batches of 5 do not divide the 16 sequences",
    "plan": "give --model, or --layers, --width and --heads together",
    "plan --model gpt2-1559m": "did you mean gpt2-1558m?",
    "plan --model tiny --width 64": "--model tiny has its own sizes: leave out --width",
    "plan --model {run}": "/config.json: cannot be read: No such file or directory",
    "plan --model tiny --gpus 0": "--gpus 0: expected at least 1",
    "plan --model tiny --gpus 12": "--gpus 12 cannot be divided equally among nodes of 8: give --nodes that divide it",
    "plan --model tiny --nodes 3": "--gpus 8 cannot be divided equally among --nodes 3",
    "plan --model tiny --gpu h1000": "unknown GPU 'h1000'",
    "plan --model tiny --gpu absent.toml": "there is no file absent.toml",
    "plan --model tiny --network fast": "network 'fast': expected the Gb/s of each GPU",
    "plan --model tiny --batch -1": "--batch -1: expected at least 1",
    "plan --model gpt2-1558m --batch 1 --gpus 512 --tokens 128": (
        "a batch of 1 sequences cannot be divided among 512 GPUs by any layout (tp can be one of [1]): --batch 512 can"
    ),
    "plan --model tiny --toml /nowhere/x.toml": "cannot write /nowhere/x.toml: No such file or directory",
    "plan --layers 96 --width 12288 --heads 96 --batch 96 --gpus 8": "; 64 of these GPUs are enough: ",
    "export {run}": "Missing from tpfuse export: FOLDER",
    "export {run} {given}/new y": "unexpected 'y'",
    "export {given} {given}/new": "holds no checkpoint: expected the folder of a `tpfuse train` run",
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a text of one character, and tokens of another tokenizer than the run's."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "short.txt").write_text("a")
    write_token_file(folder / "data", [np.zeros(9, np.uint16)], CharTokenizer("ab"), "test")
    return folder


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(
    line: str, trained: Path, given: Path, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *options = shlex.split(line.format(run=trained, given=given))
    tiny = [*flags, "--out", str(tmp_path / "run")] if command == "train" else []
    capfd.readouterr()
    assert run([command, *tiny, *options]) == 2
    captured = capfd.readouterr()
    assert REFUSED[line] in captured.err and captured.err.count("\n") == 1
    assert captured.err.startswith(f"tpfuse {command}: error: ")
    assert captured.out == "" or (command == "train" and re.fullmatch(r"reading  \S+\n", captured.out))
    assert not list(tmp_path.iterdir()) and not (given / "new").exists()
