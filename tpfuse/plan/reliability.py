"""The mean cost of failures and stragglers, at any number of GPUs.

A failure of one GPU ends the run, which starts again from its newest checkpoint. For a mean time M between failures of
the run, and checkpoints that each take d seconds, Young (1974, doi:10.1145/361147.361115) writes one every √(2 d M)
seconds of work. Daly (2006, doi:10.1016/j.future.2004.11.016) refines this, and gives the expected time of a run: with
an interval t and restarts of R seconds, t seconds of work take M exp(R / M) (exp((t + d) / M) - 1) seconds.

A step ends when its slowest rank has ended. If the speeds of GPUs are normally distributed, the expected slowest of n
ranks follows from the quantiles of that distribution (Blom 1958).
"""

from dataclasses import dataclass
from math import exp, expm1, sqrt
from statistics import NormalDist

# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100, and more than 90 %
# of the time was effective. So what an interruption costs in addition is at most a tenth of the mean time between them.
GPU_FAILURE_SECONDS = 16384 * 54 * 86400 / 419
RESTART_SECONDS = 0.1 * 54 * 86400 / 419
# The same paper, section 3.3.1: 2 TB/s of storage for 2,048 nodes of 8 GPUs.
STORAGE_PER_NODE = 2e12 / 2048
# GPUs of one model in a cluster differ by 8 % from the fastest to the slowest without outliers (arXiv:2208.11035, from
# box plots), which are 5.4 standard deviations.
SPREAD = 0.08 / 5.4
_BLOM = 0.375


@dataclass(frozen=True)
class Reliability:
    """The expected course of a long run."""

    # Seconds between two failures of a GPU of the run.
    between_failures: float
    # Seconds that a checkpoint takes, and seconds of work between two of them.
    checkpoint: float
    interval: float
    # The share of the time that is no progress: checkpoints, restarts, and work that failures undo.
    lost: float
    # The share by which the slowest rank is slower than the mean.
    slower: float

    @property
    def effective(self) -> float:
        """Return the expected share of the predicted tokens a second that a long run reaches."""
        return (1.0 - self.lost) / (1.0 + self.slower)


def daly_interval(checkpoint: float, between_failures: float) -> float:
    """Return Daly's seconds of work between two checkpoints, his equation 37."""
    if checkpoint >= 2.0 * between_failures:
        return between_failures
    ratio = checkpoint / (2.0 * between_failures)
    return sqrt(2.0 * checkpoint * between_failures) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - checkpoint


def lost_share(interval: float, checkpoint: float, restart: float, between_failures: float) -> float:
    """Return the expected share of the time that is no progress."""
    exponent = (interval + checkpoint) / between_failures
    if exponent > 700.0:  # the exponential is no float any more
        return 1.0
    return 1.0 - interval / (between_failures * exp(restart / between_failures) * expm1(exponent))


def slowest(ranks: int, spread: float = SPREAD) -> float:
    """Return the expected share by which the slowest of `ranks` ranks is slower than the mean.

    spread: the standard deviation of a rank's time as a share of the mean.
    """
    return spread * NormalDist().inv_cdf((ranks - _BLOM) / (ranks - 2 * _BLOM + 1))


def reliability(gpus: int, nodes: int, state_bytes: float) -> Reliability:
    """Return what is expected of a run whose checkpoints have `state_bytes` bytes, which all nodes write together."""
    between = GPU_FAILURE_SECONDS / gpus
    checkpoint = state_bytes / (STORAGE_PER_NODE * nodes)
    interval = daly_interval(checkpoint, between)
    return Reliability(
        between, checkpoint, interval, lost_share(interval, checkpoint, RESTART_SECONDS, between), slowest(gpus)
    )
