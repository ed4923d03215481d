"""python -m tpfuse.explore FILE.py[:protocol]: run every execution of a protocol of one's own, under a budget of time.

The protocol is a function that takes a rank's symmetric memory, as for `explore`. Exit status: 0 if these were all
executions and none has a fault, 1 for a fault, 3 if the time ran out before a fault was found.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Read the arguments, explore, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tpfuse.explore",
        description="Run every execution of a protocol of several ranks, without a GPU.",
    )
    parser.add_argument("protocol", metavar="FILE.py[:protocol]", help="the file and its function (default: protocol)")
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--resident", type=int, default=1, help="programs of a grid that interleave (default: 1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no execution begins (default: 60)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":  # it must be set before Triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tpfuse.explore", *sys.argv[1:]])

    from tpfuse.explore import ExploreError, explore_all
    from tpfuse.explore.picture import picture

    try:
        program = _read(options.protocol)
        report = explore_all(program, options.world, seconds=options.seconds, resident=options.resident)
    except ValueError as error:
        parser.error(str(error))
    except ExploreError as error:
        if options.json:
            found = {"fault": type(error).__name__, "message": error.message, "replay": error.replay}
            print(json.dumps(found, ensure_ascii=False))
        else:
            print(f"{type(error).__name__}: {error}\n\n{picture(error.steps, error.message)}")
        return 1
    if options.json:
        print(json.dumps({"fault": None, "executions": len(report.schedules), "all": report.exhausted}))
    else:
        print(report)
    return 0 if report.exhausted else 3


def _read(place: str) -> Any:
    """Return the function at "FILE.py:name". Raise ValueError if it is not there."""
    file, _, name = place.partition(".py")
    path, name = Path(f"{file}.py"), name.removeprefix(":") or "protocol"
    if not path.is_file():
        raise ValueError(f"{path} is not there: expected FILE.py[:protocol]")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(program := getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name!r}: name it, as in {path}:my_protocol")
    return program


if __name__ == "__main__":
    sys.exit(main())
