"""README and docs/ name what exists: pages, headings, files, modules, make targets and options."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpfuse
from tpfuse.train import options
from tpfuse.train.flags import flags_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted((ROOT / ".github").glob("*.md"))]
FIGURES = sorted((ROOT / "benchmarks").rglob("*.md"))  # they name what existed when they were written
FOLDERS = {"tpfuse.kernels": ROOT / "kernels", "tpfuse.models": ROOT / "models"}


def _prose(page: Path) -> str:
    """Return the text of a page without its programs."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    """Return the headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: Path) -> Iterator[str]:
    """Yield the targets that do not exist, in the repository or, for links between pages, in the HTML of docs/."""
    prose = _prose(page)
    inline, named = re.findall(r"\]\(([^)\s]+)", prose), re.findall(r"^\[[^\]]+\]: *(\S+)", prose, re.M)
    for target in [*inline, *named, *re.findall(r"""(?:href|src)=["']([^"']+)""", prose)]:
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", path):
            continue
        file = (page.parent / path).resolve() if path else page
        outside = page in DOCS and file.suffix == ".md" and file not in DOCS
        if outside or not file.is_file() or (anchor and anchor not in _anchors(file)):
            yield target


def _skipped_levels(page: Path) -> Iterator[str]:
    """Yield the headings that are more than one level below the heading before them."""
    level = 0
    for signs, text in re.findall(r"^(#+) (.*)$", _prose(page), re.M):
        if len(signs) > level + 1:
            yield f"{signs} {text}"
        level = len(signs)


def _exists(name: str) -> bool:
    """Return whether a dotted name is a module, or a name that a module's text defines or imports."""
    first, *rest = name.split(".")
    place, prefix = ROOT / first, first
    for index, part in enumerate(rest):
        prefix = f"{prefix}.{part}"
        place = FOLDERS.get(prefix, place / part)
        if place.with_suffix(".py").is_file():
            text, rest = place.with_suffix(".py").read_text(), rest[index + 1 :]
            break
        if not place.is_dir():
            text, rest = (place.parent / "__init__.py").read_text(), rest[index:]
            break
    else:
        return True
    return not rest or re.search(rf"\b{rest[0]}\b", text) is not None


def _missing(page: Path) -> Iterator[str]:
    """Return the page's names of files, modules, make targets and options that do not exist."""
    text = page.read_text()
    for path in re.findall(r"`((?:kernels|tpfuse|tests|models|benchmarks|examples|docs)/[\w./*-]*)", text):
        if "NAME" not in path and not any(ROOT.glob(path.rstrip("/"))):
            yield path
    yield from (name for name in re.findall(r"\b(?:tpfuse|benchmarks)(?:\.\w+)+\b(?!…)", text) if not _exists(name))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in re.findall(r"(?:`|^)make ((?:[a-z-]+ ?)+)", text, re.M):
        yield from (f"make {word}" for word in words.split() if word not in targets)
    kinds = [kind for name, kind in vars(options).items() if name.endswith("Command")]
    known = {f"--{flag}" for kind in kinds for flag, _ in flags_of(kind)} | {
        "--help",
        "--help-all",
        "--version",
    }
    known |= {"--override.imports", "--parallelism.tensor_parallel_degree"}  # torchtitan's
    commands = re.findall(r"(?:`|^)tpfuse \w+ [^`\n#]*", text, re.M)
    for flag in re.findall(r"--[a-z][\w-]*\.[\w-]+", text) + re.findall(r"--[\w.-]+", " ".join(commands)):
        if flag.replace(".no-", ".") not in known:
            yield flag


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    tables, trees = re.findall(r"^\| \[.*\]\((\w+)\.\w+\)", index, re.M), re.findall(r"^\w+$", index, re.M)
    pages = {page.stem for page in [*DOCS, *(ROOT / "docs").glob("*.ipynb")]} - {"index"}
    assert tables == trees and sorted(trees) == sorted(pages), "both list each page once, in the same order"
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_architecture_lists_every_folder() -> None:
    places = [place for top in ("tpfuse", "kernels", "models") for place in (ROOT / top, *(ROOT / top).rglob("*"))]
    packages = {str(place.relative_to(ROOT)) for place in places if (place / "__init__.py").is_file()} - {"tpfuse"}
    listed = re.findall(r"^\| `([\w/]+?)/?` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert packages | {"tests", "benchmarks", "examples"} == set(listed)


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^\.\. automodule:: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.M)
    assert set(tpfuse._MODULES.values()) <= set(listed)


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^\| \*\*(.*?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 10 < len(terms) <= 25 and len(set(terms)) == len(terms)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert [*_broken_links(page), *_skipped_levels(page), *_missing(page)] == []


@pytest.mark.parametrize("page", FIGURES, ids=lambda page: page.name)
def test_links_of_measured_figures_lead_somewhere(page: Path) -> None:
    assert [*_broken_links(page), *_skipped_levels(page)] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    right = '[a](page.md#a-page) [a](#a-page) <img src="page.md"> [a](https://a.b/c)\n[a]: page.md\n```\n[a](b)\n```\n'
    page.write_text(f"# A page\n\n{right}")
    assert [*_broken_links(page), *_skipped_levels(page)] == []
    page.write_text('# A page\n### Part\n[a](#b) [a](c.md) ![a](d.png "title") <a href="e">\n[f]: g\n')
    assert [*_broken_links(page), *_skipped_levels(page)] == ["#b", "c.md", "d.png", "g", "e", "### Part"]


def test_changes_pass_here_what_they_pass_in_public() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (here,) = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.M)
    in_public, nightly = re.findall(r"^ +- run: (make .*)$", workflow, re.M)
    assert here == "make ci" and in_public.startswith('make ci TORCH="$TORCH" TESTS=')
    assert nightly.startswith("make compiled-matrix ")


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {tpfuse.__version__}\n" in (ROOT / "CITATION.cff").read_text()
