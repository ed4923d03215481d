"""The launcher of the kernel that sends messages refuses what the kernel cannot send."""

from typing import Any

import pytest
import torch

from tpfuse.kernels.endpoint import Endpoint
from tpfuse.kernels.send_message import send_message


def _endpoint() -> Endpoint:
    """Return rank 0 of two, with slots of 16 bytes and two words; no memory stands behind the addresses."""
    addresses, words = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    return Endpoint(
        0, 2, slots=addresses, slot_bytes=16, flags=addresses, flag_count=2, state=words, abort=words[:1], programs=1
    )


@pytest.mark.parametrize(
    ("x", "words", "message"),
    [
        (torch.ones(4, 2).T, {}, r"send_message: x .*contiguous"),
        (torch.ones(2, device="meta"), {}, r"send_message: .*meta"),
        (torch.ones(5), {}, r"send_message: .*20 bytes"),
        (torch.ones(4), {"full": 2}, r"send_message: words 2 and 1: the channel has 2 flags"),
        (torch.ones(4), {"free": -1}, r"send_message: words 0 and -1: the channel has 2 flags"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_refused(x: torch.Tensor, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        send_message(x, _endpoint(), **{"target": 1, "slot": 0, "full": 0, "free": 1, "epoch": 1, **words})
