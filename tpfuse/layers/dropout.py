"""Dropout whose masks follow the token, not the rank (see `tpfuse.ops.dropout`)."""

from dataclasses import dataclass

from torch import Tensor, nn

from tpfuse.ops.dropout import dropout


@dataclass(frozen=True)
class DropoutState:
    """What a forward pass needs to know for its masks.

    keys: [sites] int64, this step's (`tpfuse.ops.dropout.dropout_keys`); rows: [m] int64, the number each of this
    rank's rows has in the whole batch; head_rows: [B, H] int64, likewise for each (sequence, head) of this rank.
    """

    keys: Tensor
    rows: Tensor
    head_rows: Tensor


class Dropout(nn.Module):
    """Drops elements of [m, C] with probability p; `site` tells the dropouts of a model apart."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, state: DropoutState | None) -> Tensor:
        """x: [m, C]; state None: nothing is dropped (evaluation)."""
        return x if state is None or self.p == 0.0 else dropout(x, self.p, state.rows, state.keys[self.site])

    def extra_repr(self) -> str:
        """What print(layer) shows between the brackets."""
        return f"p={self.p}, site={self.site}"
