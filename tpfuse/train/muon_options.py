"""Muon's part of the options of a run."""

from tpfuse.errors import UserError
from tpfuse.train.options import OptimOptions
from tpfuse.zero.muon import MuonOptions


def muon_options(optim: OptimOptions) -> MuonOptions:
    """Return the options of Muon. Raise ValueError for numbers that no Muon has."""
    try:
        a, b, c = map(float, optim.muon_coefficients.split(","))
    except ValueError:
        raise UserError(
            f"--optim.muon-coefficients {optim.muon_coefficients!r}: expected three numbers, such as 3.4445,-4.775,2.03"
        ) from None
    return MuonOptions(
        optim.muon_lr, None, optim.muon_momentum, optim.muon_nesterov, (a, b, c), optim.muon_steps, optim.muon_eps,
        optim.muon_adjust,
    )  # fmt: skip
