"""The numbers of steps in the option --profile.steps."""

import re

from tpfuse.train.errors import UserError


def profiled_steps(text: str) -> range:
    """Return the steps that the option names: one number, or the first and the last. Raise UserError."""
    found = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text)
    if found is not None:
        first = int(found[1])
        last = int(found[2] or first)
        if 1 <= first <= last:
            return range(first, last + 1)
    raise UserError(f"steps {text!r}: expected a step, such as 10, or the first and the last, such as 10:12")
