"""The model of cost predicts published runs within the errors that docs/planning.md tells, and the page tells all."""

from pathlib import Path

import pytest

from benchmarks import plan_b200, plan_published
from benchmarks.plan_page import newest, table
from benchmarks.plan_published import cases
from tpfuse.cost.memory import memories

BOUNDS = {
    "Megatron-LM, A100": (10, 0.08, 0.13),
    "torchtitan, A100": (8, 0.18, 0.21),
    "torchtitan, H100": (8, 0.31, 0.42),
}


@pytest.mark.parametrize("source", BOUNDS)
def test_errors_without_fitting(source: str) -> None:
    """The runs of a source are complete; the mean and the worst error are at most those that were found."""
    runs, average, worst = BOUNDS[source]
    errors = [abs(case.predicted_seconds() / case.seconds - 1) for case in cases() if case.source == source]
    assert len(errors) == runs and sum(errors) / runs <= average and max(errors) <= worst


def test_models_and_layouts_are_those_that_were_measured() -> None:
    """Parameters are as many as the tables name, layouts use all GPUs, and their memory is that of the GPUs."""
    for case in cases():
        billions = float(case.name.split("B,")[0] if "Megatron" in case.source else case.sizes.name.split("-")[1][:-1])
        assert case.sizes.parameters / 1e9 == pytest.approx(billions, rel=0.03), case.name
        for layout in case.layouts:
            assert layout.ranks == case.cluster.gpus
            assert layout.batch == layout.micro_batches * layout.micro_batch * layout.dp
        # A layout that was measured fits, with the most recomputation that it may have. torchtitan's H100 have 96 GB.
        needed = max(memory.total for memory in memories(case.sizes, case.layouts[-1], case.program))
        assert needed < (96e9 if "H100" in case.source else case.cluster.gpu.memory), case.name


def test_the_page_has_all_errors() -> None:
    """The table of the page is that of the newest results, and what is cheap to compute again is still the same."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    rows = newest()
    assert table(rows) in page
    again = rows | {each["subject"]: each for each in (plan_b200.main(), plan_published.main())}
    assert table(again) == table(rows)
