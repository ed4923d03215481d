"""Hardware is read from TOML, each number with its source; a malformed file is refused in one line."""

import dataclasses
from pathlib import Path

import pytest

from tpfuse.plan.hardware import NO_LINK, GpuSpec, Link, described, known_tables, load_gpu, parse_network

ENTRY = '{ value = 1e-06, source = "x" }'


def test_known_hardware_has_a_source_for_each_number() -> None:
    tables = known_tables()
    gpus = {name: load_gpu(name) for name in tables["gpu"]}
    assert {"a100", "a100-40gb", "h100", "h200", "b200"} == set(gpus)
    assert {"nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"} == set(tables["link"])
    for gpu in gpus.values():
        assert gpu.link.name in tables["link"]
        assert 39e9 < gpu.memory < 2e11 and 100 < gpu.half_rate / gpu.bandwidth < 600
    assert gpus["h100"].memory < gpus["h200"].memory < gpus["b200"].memory
    assert gpus["a100"].link.bandwidth < gpus["h100"].link.bandwidth < gpus["b200"].link.bandwidth
    assert all(
        len(entry["source"]) > 10 for kind in tables.values() for item in kind.values() for entry in item.values()
    )


def test_networks() -> None:
    fast, slow, ethernet = parse_network("400Gb"), parse_network("200Gb"), parse_network("200GbE")
    assert fast.bandwidth == 2 * slow.bandwidth and 40e9 < fast.bandwidth < 50e9
    assert slow.latency < ethernet.latency and fast.name == "400Gb"
    for text in ("400", "400GB", "0Gb", "fast", "-1Gb"):
        with pytest.raises(ValueError, match="expected the Gb/s of each GPU, such as 400Gb"):
            parse_network(text)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'H10': expected a100.* or a TOML file; did you mean h100\?"):
        load_gpu("H10")
    with pytest.raises(ValueError, match=r"there is no file nowhere/mine\.toml that describes a GPU"):
        load_gpu("nowhere/mine.toml")


@pytest.mark.parametrize("link", [NO_LINK, Link("b200", 1e9, 1e-6, 2e-6)])
def test_a_file_is_read_again(link: Link, tmp_path: Path) -> None:
    gpu = dataclasses.replace(load_gpu("b200"), link=link, multiprocessors=0, price=0.0)
    sources = {each.name: 'measured with "copies", 1 °C' for each in dataclasses.fields(GpuSpec)}
    path = tmp_path / "b200.toml"
    path.write_text(described(gpu, sources | {f"link {each.name}": "x" for each in dataclasses.fields(Link)}))
    assert load_gpu(str(path)) == gpu


def _file(path: Path, link: str) -> str:
    path = path / "mine.toml"
    sources = dict.fromkeys((each.name for each in dataclasses.fields(GpuSpec)), "x")
    path.write_text(described(dataclasses.replace(load_gpu("a100"), link=NO_LINK, launch_seconds=1e-6), sources) + link)
    return str(path)


def test_a_file_may_name_a_known_link(tmp_path: Path) -> None:
    gpu = load_gpu(_file(tmp_path, 'link = { value = "pcie5", source = "x" }'))
    assert gpu.link.name == "pcie5" and gpu.link.bandwidth == 42e9
    with pytest.raises(ValueError, match=r"mine.toml: link: expected nvlink3.* or a table \[link\], not 'pcie9'"):
        load_gpu(_file(tmp_path, 'link = { value = "pcie9", source = "x" }'))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("launch_seconds", "lunch_seconds", r"unknown entry lunch_seconds; did you mean launch_seconds\?$"),
        (f"launch_seconds = {ENTRY}\n", "", "the entry launch_seconds is missing$"),
        ("value = 1e-06", "value = 0", "launch_seconds: expected a positive number, not 0$"),
        ("value = 1e-06", "value = -1", "launch_seconds: expected a positive number, not -1$"),
        ("value = 1e-06", "value = inf", "launch_seconds: expected a positive number, not inf$"),
        ("value = 1e-06", "value = true", "launch_seconds: expected a positive number, not True$"),
        ("value = 1e-06", 'value = "1"', "launch_seconds: expected a positive number, not '1'$"),
        (ENTRY, '{ value = 1e-06, from = "x" }', "launch_seconds: expected a table of value and source$"),
        ("launch_seconds =", "launch_seconds", r"Expected '=' after a key .*line \d+"),
        ("value = 0.81", "value = 1.5", "product_share: expected a share of at most 1, not 1.5$"),
        ("value = 108", "value = 1.5", "multiprocessors: expected a whole number, not 1.5$"),
        ("launch_seconds", f"at_once = {ENTRY}\nlaunch_seconds", "unknown entry at_once"),
        ("launch_seconds", "link = 3\nlaunch_seconds", "link: expected a table of the link's entries$"),
    ],
)
def test_malformed_files_are_refused_in_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = Path(_file(tmp_path, ""))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        load_gpu(str(path))
    assert "\n" not in str(error.value) and "mine.toml: " in str(error.value)
