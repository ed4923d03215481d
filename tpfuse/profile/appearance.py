"""What the pictures of a profile have in common: one colour for each kind of time, and how a time is written."""

# Four of the colours of Okabe and Ito, which colour-blind readers can tell apart, and a grey.
COLOURS = {"computing": "#0072B2", "communication": "#009E73", "waiting": "#E69F00", "idle": "#D0D0D0"}
INK = {"computing": "white", "communication": "black", "waiting": "black", "idle": "black"}  # of text on a colour


def three_digits(value: float) -> str:
    """Returns a number with at least three digits, or with two decimals if it is small."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def duration(ns: float) -> str:
    """Returns a time with its unit."""
    if ns >= 1e9:
        return f"{three_digits(ns / 1e9)} s"
    return f"{three_digits(ns / 1e6)} ms" if ns >= 1e6 else f"{ns / 1e3:.0f} µs"
