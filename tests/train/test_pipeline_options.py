"""The options of a pipeline set the layout and the size of a micro-batch."""

import pytest

from tpfuse.errors import UserError
from tpfuse.train.check_options import with_layout
from tpfuse.train.config import parse_train
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import micro_batch_size, pipeline_order


def options_of(words: str, world: int | None = None) -> TrainCommand:
    return with_layout(parse_train(words.split()), world)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("--parallel.pp 2 --train.batch 32", 4),  # eight micro-batches, four for each of two ranks
        ("--parallel.pp 2 --parallel.dp 2 --train.batch 32", 2),
        ("--parallel.pp 2 --train.batch 15", 1),  # 15 is the least divisor of at least 8
        ("--parallel.pp 4 --train.batch 6", 1),  # there are fewer sequences than 16
        ("--parallel.pp 2 --train.batch 100", 10),
        ("--parallel.pp 2 --train.batch 32 --train.micro-batch 16", 16),
        ("--parallel.pp 2 --parallel.pp-schedule interleaved_1f1b --train.batch 27", 9),  # 9 and 27 are refused
        ("--parallel.pp 2 --parallel.pp-schedule zbv --train.batch 27", 3),
        ("--train.batch 32", 32),
        ("--parallel.dp 2 --train.batch 32", 16),
    ],
)
def test_a_pipeline_has_by_default_at_least_four_micro_batches_for_each_rank(words: str, size: int) -> None:
    options = options_of(words)
    assert micro_batch_size(options) == size
    if options.parallel.pp > 1:
        assert pipeline_order(options).micro_batches * size * options.parallel.dp == options.train.batch


@pytest.mark.parametrize(
    ("words", "world", "error"),
    [
        ("--parallel.pp 3", 4, "tp 1 x dp 1 x pp 3 needs 3 ranks, and there are 4"),
        ("--parallel.pp 2 --parallel.dp 1", 4, "tp 1 x dp 1 x pp 2 needs 2 ranks, and there are 4"),
        ("--parallel.pp 4 --parallel.cp 2", 4, "tp 1 x cp 2 x dp 1 x pp 4 needs 8 ranks, and there are 4"),
        ("--parallel.pp 0", 4, "--parallel.pp 0: expected at least 1"),
    ],
)
def test_a_world_of_another_size_is_refused(words: str, world: int, error: str) -> None:
    with pytest.raises(UserError, match=error):
        options_of(words, world)
