"""What remains of communication that overlaps with products."""

import pytest

from tpfuse.cost.overlap import gather_exposed, hidden_rest, ring_exposed, scatter_exposed


@pytest.mark.parametrize("exposed", [gather_exposed, scatter_exposed])
def test_chunks_hide_each_other(exposed: object) -> None:
    assert callable(exposed)
    assert exposed(8.0, 0.0, 4) == 0
    assert exposed(8.0, 3.0, 4) == pytest.approx(3 * 3.0 + 2.0 - 8.0), "messages of 3 behind chunks of 2"
    assert exposed(0.0, 3.0, 4) == 9.0, "nothing to hide behind"


def test_the_own_chunk_is_first_and_last() -> None:
    """Messages shorter than a chunk hide completely: the own chunk covers the first arrival and the last message."""
    assert gather_exposed(8.0, 1.9, 4) == pytest.approx(0.0)
    assert scatter_exposed(8.0, 1.9, 4) == pytest.approx(0.0)


def test_rings_and_rests() -> None:
    assert ring_exposed(8.0, 1.0, 4) == 0 and ring_exposed(8.0, 3.0, 4) == 3.0
    assert hidden_rest(5.0, 3.0, 1.0) == 2.0 and hidden_rest(5.0, 9.0, 1.0) == 1.0
