"""The public names of `tpfuse` and `tpfuse.layers`: their list, their modules, and the time that importing takes."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tpfuse

LAYERS = "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding PositionEmbedding LayerNorm RMSNorm Dropout"
NAMES = {
    "tpfuse": """
        ColumnParallelLinear RowParallelLinear VocabParallelEmbedding PositionEmbedding LayerNorm RMSNorm GPT
        parallelize restore FusedColwiseParallel FusedRowwiseParallel FusedSequenceParallel FusedPrepareModuleInput
        ParallelTrainer Pipeline ZeroOptimizer zero ring_attention SequenceLayout attention gemm all_gather_linear
        linear_reduce_scatter linear_all_reduce linear_cross_entropy use autotune explain symmetric_memory explore
        profile PeerTimeout Disagreement
    """,
    "tpfuse.layers": LAYERS,
    "tpfuse.profile": "record",
}
SECONDS = 0.1  # the most seconds that `import tpfuse` may take


@pytest.mark.parametrize("package", NAMES)
def test_the_public_names_are_listed_and_editors_see_them(package: str) -> None:
    module = importlib.import_module(package)
    names = NAMES[package].split()
    assert module.__all__ == [name for name in names if name != "ParallelTrainer"], "it needs transformers"
    assert set(names) <= set(dir(module))
    assert module.__file__ is not None
    (typed,) = (node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {}
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name, "without `as` type checkers take the name for a private one"
            seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    assert seen == {name: getattr(module, name) for name in names}


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tpfuse' has no attribute 'PeerTimout'") as caught:
        tpfuse.PeerTimout  # type: ignore[attr-defined] # noqa: B018
    assert caught.value.obj is tpfuse and caught.value.name == "PeerTimout"


IMPORT = """
import sys, time
start = time.process_time()
import tpfuse, tpfuse.layers, tpfuse.profile
seconds = time.process_time() - start
assert {"ColumnParallelLinear", "PeerTimeout"} <= {*dir(tpfuse)}
print(seconds, *{"torch", "triton", "numpy"} & {*sys.modules})
"""


def test_importing_is_quick_and_needs_no_torch() -> None:
    for _ in range(10):  # Another process may disturb one attempt.
        run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        seconds, *modules = run.stdout.split()
        assert modules == []
        if float(seconds) < SECONDS:
            return
    pytest.fail(f"import tpfuse took {seconds} s: expected less than {SECONDS}")
