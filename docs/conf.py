"""Settings of Sphinx: `make docs` builds these pages and the reference of the public modules. Warnings are errors."""

import json
import re
from collections.abc import Iterator
from typing import Any

from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser

import tpfuse

project = html_title = "tpfuse"
author = copyright = "tpfuse contributors"
version = release = tpfuse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images/*.py"]
html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_sourcelink = False
myst_heading_anchors = 3  # headings are linked to as on GitHub
autodoc_default_options = {"members": True, "member-order": "bysource"}
toc_object_entries_show_parents = "hide"  # from_linear, not ColumnParallelLinear.from_linear
maximum_signature_line_length = 100  # a longer one has a line for each parameter


class NotebookParser(MystParser):
    """Parses a notebook as the Markdown of its texts, its programs and their outputs."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: document) -> None:
        """Add the notebook to the document."""
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(part for cell in cells for part in _parts(cell)), document)


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/png" in data:
            yield f"![The picture that the program draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
        else:
            yield f"```text\n{''.join(output.get('text') or data['text/plain']).strip()}\n```"


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
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", as_rst)
