"""The command; the package's docstring says what it does."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tpfuse.testing import faults
from tpfuse.testing.faults.record import record
from tpfuse.testing.faults.run import results_of, run


def report(folder: Path) -> str:
    """Return a table by area, the number of faults that no test reaches, and the faults that the first tier missed."""
    results = results_of(folder)
    reached = [result for result in results if sum(result.reached)]
    lines = ["area            planted  first tier  both tiers  first/both"]
    for area in (*dict.fromkeys(result.area for result in reached), "all"):
        tiers = Counter(result.tier for result in reached if area in ("all", result.area))
        both = tiers["first"] + tiers["second"]
        share = f"{tiers['first'] / both:10.1%}" if both else "         -"
        lines.append(f"{area:15} {tiers.total():7} {tiers['first']:11} {both:11} {share:>11}")
    lines.append(f"{len(results) - len(reached)} more are in functions that no test calls")
    for tier, title in (("second", "caught by the second tier alone"), ("", "survived both tiers")):
        lines += ["", title]
        lines += [
            f"  {result.fault}" + (f"  [{result.test}]" if tier else "") + _cut(result.left)
            for result in reached
            if result.tier == tier
        ]
    return "\n".join(lines)


def _cut(left: Sequence[int]) -> str:
    return f"  ({sum(left)} tests left out)" if sum(left) else ""


def main() -> int:
    """Run the command of the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tpfuse.testing.faults",
        description=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("record", "run", "report"), help="the command, as described above")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of the record and the results")
    parser.add_argument("--count", type=int, default=240, help="number of faults to plant (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of faults (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=2, help="number of faults to try at the same time (default: %(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=120.0,
        help="longest total time of the tests of a tier for one fault, in seconds (default: %(default)s)",
    )
    options, rest = parser.parse_known_args()
    if rest and options.command != "record":
        parser.error(f"unknown arguments: {' '.join(rest)}; only record passes arguments to pytest")
    root = Path.cwd()
    if options.command == "record":
        return record(root, options.folder.resolve(), rest)
    if options.command == "run":
        run(root, options.folder.resolve(), options.count, options.seed, options.workers, options.limit)
    print(report(options.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
