"""Dropout whose masks follow the token, not the rank (see `tpfuse.ops.dropout`)."""

from dataclasses import dataclass

from torch import Tensor, nn

from tpfuse.ops.dropout import dropout


@dataclass(frozen=True)
class DropoutState:
    """The keys and row numbers that a forward pass needs for its dropout masks.

    keys: [sites] int64, this step's (`tpfuse.ops.dropout.dropout_keys`); rows: [m] int64, the number of each of this
    rank's rows in the whole batch; head_rows: [B, H] int64, the number of each (sequence, head) of this rank in it.
    """

    keys: Tensor
    rows: Tensor
    head_rows: Tensor


class Dropout(nn.Module):
    """Dropout of elements of [m, C] with probability p; each dropout of a model has another `site`."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, state: DropoutState | None) -> Tensor:
        """Return x [m, C] with elements dropped; with state None return x as it is (evaluation)."""
        return x if state is None or self.p == 0.0 else dropout(x, self.p, state.rows, state.keys[self.site])

    def extra_repr(self) -> str:
        return f"p={self.p}, site={self.site}"
