"""Settings of Sphinx: `make docs` builds these pages and the reference of the public modules. Warnings are errors."""

import re
from typing import Any

import tpfuse

project = "tpfuse"
author = copyright = "tpfuse contributors"
version = release = tpfuse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images/*.py"]
html_theme = "alabaster"
html_theme_options = {"description": tpfuse.__doc__, "fixed_sidebar": True}
html_show_sourcelink = False
myst_heading_anchors = 3  # headings are linked to as on GitHub
autodoc_default_options = {"members": True, "member-order": "bysource"}


def as_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring, plain text with names in `backticks`, in Sphinx's language. A module's gets a title."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    title = [f"**{name}**"] if what == "module" else []
    lines[:] = "\n\n".join([*title, *map(_paragraph, paragraphs)]).split("\n")


def _paragraph(text: str) -> str:
    if text.startswith((" ", "|")):  # a program or a table
        return "::\n\n" + "\n".join(f"    {line}" for line in text.split("\n"))
    prose_and_names = re.split(r"(`[^`]+`)", text)
    escaped = [re.sub(r"([\\*|_])", r"\\\1", prose) for prose in prose_and_names[::2]]
    quoted = [f"`{name}`" for name in prose_and_names[1::2]]
    return "".join(prose + name for prose, name in zip(escaped, [*quoted, ""], strict=True))


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", as_rst)
