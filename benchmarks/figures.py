"""The figures that the kernels must reach, and their outcomes computed from the rows of a run.

A figure is computed from all cases of figures that have the peer; the worst of them counts. Its outcome contains the
number of cases that could not be measured. Where there are several peers, the slowest one is compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import OURS, Row, aligned


@dataclass(frozen=True)
class Target:
    """A figure that must be reached. threshold: the least the value may be, or the most that a cost may be.

    value: a function of tpfuse's row, the peer's (tpfuse's again without a peer) and the copy bandwidth; it returns
    None where the rows have no value.
    """

    name: str
    operator: str
    mode: str
    threshold: float
    peer: str | tuple[str, ...] | None
    value: Callable[[Row, Row, float], float | None]
    case: str = ""  # a string that the names of its cases contain

    @property
    def at_most(self) -> bool:
        """Return whether less is better."""
        return self.value in (cost, memory)

    def outcome(self, rows: Sequence[Row], copy: float) -> dict[str, Any]:
        """Return asked, got (the worst value; None without one), its case, and the number of cases without a value."""
        ours = {row["case"]: row for row in rows if row["candidate"] == OURS and self._concerns(row)}
        peers: dict[str, Row] = {}
        for row in rows:
            if row["candidate"] in self.peers and self._concerns(row):
                peers[row["case"]] = _slower(row, peers.get(row["case"], row))
        failed = {case for case, row in ours.items() if not row["mode"]}
        names = peers.keys() | failed
        pairs = {name: (ours.get(name, {}), peers.get(name, {})) for name in names - failed}
        timed = {name: pair for name, pair in pairs.items() if all("median_us" in row for row in pair)}
        values = {name: x for name, pair in timed.items() if (x := self.value(*pair, copy)) is not None}
        outcome: dict[str, Any] = {"figure": self.name, "asked": self.threshold, "at_most": self.at_most, "got": None}
        outcome |= {"case": None, "cases": len(names), "missing": len(names) - len(values)}
        if not values:
            return outcome | {"verdict": "not measured yet"}
        worst = (max if self.at_most else min)(values, key=values.__getitem__)
        reached = values[worst] <= self.threshold if self.at_most else values[worst] >= self.threshold
        verdict = "miss" if not reached else "pass" if not outcome["missing"] else "pass, but not all measured"
        return outcome | {"got": values[worst], "case": worst, "verdict": verdict}

    @property
    def peers(self) -> tuple[str, ...]:
        """Return the candidates that tpfuse is compared with: tpfuse itself where there are no peers."""
        return (self.peer,) if isinstance(self.peer, str) else self.peer or (OURS,)

    def _concerns(self, row: Row) -> bool:
        """Return whether a row is of one of the figure's cases.

        A case that failed before it reached a mode has mode "", and a process that ended early has a case "all …".
        """
        return (
            row["operator"] == self.operator
            and row["asked"]
            and row["mode"] in (self.mode, "")
            and (self.case in row["case"] or row["case"].startswith("all"))
        )


def _slower(row: Row, other: Row) -> Row:
    """Return the slower of two rows; one that could not be measured counts as the slowest."""
    return row if row.get("median_us", float("inf")) >= other.get("median_us", float("inf")) else other


def speedup(ours: Row, peer: Row, copy: float) -> float:
    """Return the peer's time divided by tpfuse's."""
    return float(peer["median_us"] / ours["median_us"])


def cost(ours: Row, peer: Row, copy: float) -> float:
    """Return tpfuse's time divided by the peer's."""
    return float(ours["median_us"] / peer["median_us"])


def memory(ours: Row, peer: Row, copy: float) -> float | None:
    """Return the peak memory as a fraction of the peer's; None on the CPU, where it is not measured."""
    if ours.get("peak_bytes") is None or not peer.get("peak_bytes"):
        return None
    return float(ours["peak_bytes"] / peer["peak_bytes"])


def of_copy(ours: Row, peer: Row, copy: float) -> float:
    """Return the least bytes that it moves, per second, as a fraction of the copy bandwidth."""
    return float(ours["bytes"] / (ours["median_us"] * 1e-6) / copy)


def fraction(ours: Row, peer: Row, copy: float) -> float:
    """Return the peer's speed as a fraction of tpfuse's."""
    return float(ours["median_us"] / peer["median_us"])


def thousand_tokens(ours: Row, peer: Row, copy: float) -> float:
    """Return the thousands of tokens trained in a second."""
    return float(ours["tokens"] / ours["median_us"] * 1e3)


def figures_table(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return the short table: figure, asked, got, verdict, and the worst case."""
    lines = [("figure", "asked", "got", "verdict", "worst case")]
    for x in outcomes:
        got = "-" if x["got"] is None else f"{x['got']:.2f}"
        sign = "<=" if x["at_most"] else ">="
        missing = f" ({x['missing']} of {x['cases']} not measured)" if x["missing"] and x["got"] is not None else ""
        lines.append((x["figure"], f"{sign} {x['asked']:.2f}", got, x["verdict"], (x["case"] or "-") + missing))
    return aligned(lines)


EAGER, COMPILED = "F.linear + activation", "torch.compile max-autotune"
LOSS, SEPARATE, NANOGPT = "F.cross_entropy(F.linear)", "cuBLAS then gelu", "nanoGPT compiled"
# cuDNN is attention's peer on compute capability 9.0 and 10.0, where it is the fastest one, and flash on other devices.
# llm.c trains GPT-2 124M at 140 ms for 524,288 tokens on 8 H100, its all-reduce included: 468k tokens/s for each
# (KellerJordan/modded-nanogpt, records/…/2024-10-13_llmc).
FIGURES = (
    Target("GPT-2 124M, thousand tokens/s", "speed_124m", "step", 500.0, None, thousand_tokens, "best"),
    Target("1.05 of llm.c's thousand tokens/s", "speed_124m", "step", 491.4, None, thousand_tokens, "best"),
    Target("GPT-2 124M / compiled nanoGPT, each at its best", "speed_124m", "step", 1.10, NANOGPT, speedup, "best"),
    Target(
        "GPT-2 124M, launched / graph at micro-batch 48", "speed_124m", "step", 0.97, "launched", fraction,
        "micro-batch 48",
    ),
    *(
        Target(
            f"gemm + bias + gelu, argument kept / {SEPARATE}, K {k}", "epilogues", "kept", least, SEPARATE, speedup,
            f", K {k}, gelu",
        )
        for k, least in ((768, 1.30), (1600, 1.30), (4096, 1.10), (8192, 1.02))
    ),
    Target(
        "gemm + bias + gelu, argument kept / cuBLASLt's epilogue", "epilogues", "kept", 1.00, "GELU_AUX_BIAS", speedup,
        ", gelu",
    ),
    Target(
        "gemm + bias + gelu / cuBLASLt's epilogue", "epilogues", "not kept", 1.00, "_addmm_activation", speedup,
        ", gelu",
    ),
    Target("gemm + bias + gelu / eager, no graph", "gemm", "inference", 1.10, EAGER, speedup, ", gelu"),
    Target("gemm + bias + gelu / eager, in training", "gemm", "forward", 1.10, EAGER, speedup, ", gelu"),
    Target("gemm + bias + gelu / torch.compile, no graph", "gemm", "inference", 1.00, COMPILED, speedup, ", gelu"),
    Target("gemm + bias + gelu / torch.compile, in training", "gemm", "forward", 1.00, COMPILED, speedup, ", gelu"),
    Target("gemm plain / cuBLAS", "gemm", "inference", 0.95, "F.linear", speedup, "plain"),
    Target(
        "all_gather_gemm, chunks present / gemm", "overlapped_gemm", "all_gather_gemm", 1.03, "gemm", cost, "gather"
    ),
    *(
        Target(
            f"gemm_reduce_scatter without waits / gemm, {world} ranks", "overlapped_gemm", "gemm_reduce_scatter", most,
            "gemm", cost, f", {world} ranks",
        )
        for world, most in ((4, 1.03), (8, 1.10))
    ),
    Target(
        "all_gather_gemm / longer of copies and gemm", "overlapped_gemm", "from host memory", 1.05,
        ("copies alone", "gemm"), cost, "link",
    ),
    Target("attention forward / SDPA cudnn", "attention", "forward", 0.75, "SDPA cudnn", speedup),
    Target("attention backward / SDPA cudnn", "attention", "backward", 0.50, "SDPA cudnn", speedup),
    Target("attention forward / SDPA flash", "attention", "forward", 1.00, "SDPA flash", speedup),
    Target("attention backward / SDPA flash", "attention", "backward", 1.00, "SDPA flash", speedup),
    *(
        Target(
            f"carried attention {mode}, blocks present / attention", "carried_attention", mode, 1.05, "attention", cost
        )
        for mode in ("forward", "backward")
    ),
    *(
        Target(f"{operator} {mode}, part of copy bandwidth", operator, mode, threshold, None, of_copy)
        for operator, mode, threshold in (
            ("layer_norm", "forward", 0.85), ("layer_norm", "backward", 0.85), ("rms_norm", "forward", 0.85),
            ("rms_norm", "backward", 0.85), ("adamw", "step", 0.85), ("sharded_adamw", "step", 0.80),
        )
    ),
    Target("linear_cross_entropy / eager", "linear_cross_entropy", "both", 1.00, LOSS, speedup),
    Target("linear_cross_entropy memory / eager's", "linear_cross_entropy", "both", 0.25, LOSS, memory),
)  # fmt: skip
