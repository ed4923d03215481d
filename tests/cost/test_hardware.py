"""Hardware is read from TOML files, each number with its source; a malformed file is refused in one line."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from tpfuse.cost.hardware import (
    FOLDER,
    Gpu,
    Link,
    check_link,
    link_names,
    load_gpu,
    load_link,
    parse_network,
    save,
)

GPUS = [path.stem for path in FOLDER.glob("gpus/*.toml")]


def test_known_hardware() -> None:
    assert {"a100", "a100-40gb", "h100", "h200", "b200"} == set(GPUS)
    assert {"nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"} == set(link_names())
    for gpu in map(load_gpu, GPUS):
        assert gpu.links and set(gpu.links) <= set(link_names())
        assert 39e9 < gpu.memory < 2e11 and 100 < gpu.half_rate / gpu.bandwidth < 600
        for link in gpu.links:
            check_link(gpu, load_link(link))
    assert load_gpu("h100").memory < load_gpu("h200").memory < load_gpu("b200").memory
    assert load_link("pcie4").bandwidth < load_link("nvlink3").bandwidth < load_link("nvlink5").bandwidth


def test_every_number_has_a_source() -> None:
    files = list(FOLDER.glob("*/*.toml"))
    assert len(files) == len(GPUS) + len(link_names()) + 2
    for file in files:
        for entry in tomllib.loads(file.read_text()).values():
            assert len(entry["source"]) > 10


def test_networks() -> None:
    fast, slow, ethernet = parse_network("400Gb"), parse_network("200Gb"), parse_network("200GbE")
    assert fast.bandwidth == 2 * slow.bandwidth and 40e9 < fast.bandwidth < 50e9
    assert slow.latency < ethernet.latency and fast.name == "400Gb"
    for text in ("400", "400GB", "0Gb", "fast", "-1Gb"):
        with pytest.raises(ValueError, match="expected the Gb/s of each GPU, such as 400Gb"):
            parse_network(text)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'H10': expected a100, .* or a TOML file; did you mean h100\?"):
        load_gpu("H10")
    with pytest.raises(ValueError, match=r"unknown link 'nvlink9': .*; did you mean nvlink"):
        load_link("nvlink9")
    with pytest.raises(ValueError, match=r"there is no file nowhere/mine\.toml that describes a GPU"):
        load_gpu("nowhere/mine.toml")


def test_a_gpu_has_only_its_links() -> None:
    a100, nvlink5 = load_gpu("a100"), load_link("nvlink5")
    with pytest.raises(ValueError, match=r"^a100 has no nvlink5: its links are nvlink3, pcie4$"):
        check_link(a100, nvlink5)
    check_link(a100, dataclasses.replace(nvlink5, name="measured"))
    check_link(dataclasses.replace(a100, links=()), nvlink5)


@pytest.mark.parametrize(
    "item", [load_gpu("b200"), dataclasses.replace(load_gpu("h100"), links=()), load_link("pcie5")]
)
def test_a_saved_file_is_read_again(item: Gpu | Link, tmp_path: Path) -> None:
    sources = {field.name: 'measured with "copies", 1 °C' for field in dataclasses.fields(item)}
    path = tmp_path / f"{item.name}.toml"
    save(item, path, sources)
    assert (load_gpu(str(path)) if isinstance(item, Gpu) else load_link(str(path))) == item
    assert tomllib.loads(path.read_text())["bandwidth"]["source"] == sources["bandwidth"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[bandwidth]", "[bandwith]", r"unknown entry bandwith; did you mean bandwidth\?$"),
        ('[latency]\nvalue = 1e-06\nsource = "x"\n', "", "the entry latency is missing$"),
        ("value = 1e-06", "value = 0", "latency: expected a positive number, not 0$"),
        ("value = 1e-06", "value = -1", "latency: expected a positive number, not -1$"),
        ("value = 1e-06", "value = inf", "latency: expected a positive number, not inf$"),
        ("value = 1e-06", "value = true", "latency: expected a positive number, not True$"),
        ("value = 1e-06", 'value = "1"', "latency: expected a positive number, not '1'$"),
        ("value = false", "value = 0", "in_network: expected true or false, not 0$"),
        ("value = 1e-06\nsource", "value = 1e-06\nfrom", "latency: expected a table of value and source$"),
        ("[latency]", "latency]", r"Expected '=' after a key .*line \d+"),
    ],
)
def test_malformed_files_are_refused_in_one_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    save(Link("mine", 1e9, 1e-6, 2e-6), path, dict.fromkeys(["bandwidth", "latency", "start", "in_network"], "x"))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        load_link(str(path))
    assert "\n" not in str(error.value) and "mine.toml: " in str(error.value)


def test_shares_and_counts(tmp_path: Path) -> None:
    gpu = load_gpu("a100")
    path, sources = tmp_path / "mine.toml", {field.name: "x" for field in dataclasses.fields(gpu)}
    save(dataclasses.replace(gpu, multiprocessors=0, price=0.0), path, sources)
    assert load_gpu(str(path)).multiprocessors == 0
    for changes in ({"product_share": 1.5}, {"multiprocessors": 1.5}, {"links": [3]}):
        save(dataclasses.replace(gpu, **changes), path, sources)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=next(iter(changes))):
            load_gpu(str(path))
