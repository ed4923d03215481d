"""Parallelized models are filled from Hugging Face folders slice by slice, and saved with the same names and bits."""

import contextlib
import copy
import json
import operator
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.support.decoders import decoder
from tests.support.meshes import mesh_of, tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.agreement import agreement
from tpfuse.comm.dispatch import symmetric_memory
from tpfuse.comm.errors import PeerTimeout
from tpfuse.comm.layout import local_tensor
from tpfuse.comm.mesh import all_groups_of, build_mesh
from tpfuse.comm.settings import set_settings, settings
from tpfuse.comm.stored_tensors import StoredTensor, check_names
from tpfuse.drop_in.parallelize import parallelize, restore
from tpfuse.drop_in.styles import FusedColwiseParallel
from tpfuse.drop_in.weights import empty_model, find_weights
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool

IDS = integers(1, 2, 13, low=3, high=100, dtype=torch.int64)
# Conv1D with packed projections and a tied head; packed linear layers; a packed layer with few key/value heads, which
# every rank holds whole; one key/value head; projections packed head by head, whose head has another name in the file;
# experts, each of which has tensors of its own in the files and none in the model (the order of 10 and 2 shows).
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {}, "phi3": {}, "phi3_shared": {}, "llama_one_kv_head": {"attention_bias": True}, "gemma2": {}, "neox": {},
    "mixtral": {"num_local_experts": 11, "intermediate_size": 16},
}  # fmt: skip


def _make(family: str) -> Any:
    return decoder(family, torch.float32, **_FAMILIES[family]).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that writes the folder of a family once, in files of at most 60 KB."""
    root, made = tmp_path_factory.mktemp("folders"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = root / family
            _make(family).save_pretrained(made[family], max_shard_size="60KB")
        return made[family]

    yield folder


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def _whole(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _empty(folder: Path, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return empty_model(AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(folder), **options).eval()


def _loaded(folder: Path, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    return parallelize(_empty(folder), tensor_mesh() if mesh is None else mesh, weights=folder, **options)


@contextlib.contextmanager
def _counted() -> Iterator[list[tuple[str, int]]]:
    """Yield a list of (tensor, bytes) of every read from a file."""
    reads: list[tuple[str, int]] = []
    read = StoredTensor.__getitem__

    def counting(stored: StoredTensor, slices: Any) -> Tensor:
        part = read(stored, slices)
        reads.append((stored.name, part.nbytes))
        return part

    with mock.patch.object(StoredTensor, "__getitem__", counting):
        yield reads


def _same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name, x in a.items():
        whole = b[name].full_tensor() if isinstance(b[name], DTensor) else b[name]
        assert x.dtype == whole.dtype and torch.equal(x, whole), name


def _load(folder: Path, same: Path | None = None) -> None:
    """Compare a model with transformers' of the same folder, or of one with the `same` tensors."""
    theirs = _whole(same or folder)
    model = _empty(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    with _counted() as reads:
        parallelize(model, tensor_mesh(), weights=folder)
    merged = {id(x): x.nbytes for name, x in model.named_parameters() if ".experts." in name}  # of all that is merged
    needed = {id(parameter): local_tensor(parameter).nbytes for parameter in model.parameters()} | merged
    assert sum(size for _, size in reads) == sum(needed.values())
    assert max(size for _, size in reads) <= max(needed.values())
    _same(theirs.state_dict(), model.state_dict())
    _same(dict(theirs.named_buffers()), dict(model.named_buffers()))
    assert len(list(model.parameters())) == len(list(theirs.parameters()))  # tied weights are tied
    with torch.no_grad():
        expected = theirs(IDS).logits
        assert (model(IDS).logits - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize(
    ("world", "family"),
    [
        (2, "gpt2"), (2, "llama_one_kv_head"), (2, "mixtral"),
        *exhaustive((2, "gemma2"), (2, "neox"), (3, "gpt2"), (3, "phi3_shared"), (3, "mixtral")),
    ],
)  # fmt: skip
def test_each_rank_reads_its_shards_and_no_more(folders: Any, world: int, family: str) -> None:
    pool(world).run(_load, folders(family))


def _load_into_values(folder: Path) -> None:
    model = _make("phi3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(dist.get_rank())
    parallelize(model, tensor_mesh(), weights=folder)
    _same(_whole(folder).state_dict(), model.state_dict())


def test_a_model_with_values_takes_those_of_the_files(folders: Any) -> None:
    pool(2).run(_load_into_values, folders("phi3"))


def _load_dtypes(folder: Path) -> None:
    narrow = parallelize(_empty(folder, dtype=torch.bfloat16), tensor_mesh(), weights=folder)
    _same(_whole(folder, dtype=torch.bfloat16).state_dict(), narrow.state_dict())


@pytest.mark.exhaustive
def test_tensors_are_converted_to_the_dtype_of_the_model(folders: Any) -> None:
    pool(2).run(_load_dtypes, folders("phi3"))


class _Own(nn.Module):
    """A model that is not of transformers: persistent and other buffers, a shared parameter and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.zeros(2, 3))
        self.register_buffer("table", torch.arange(8.0), persistent=False)


class _Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(3))


def _load_own(folder: Path) -> None:
    model = empty_model(_Own)
    assert model.one.weight.is_meta and model.one.weight is model.two.weight and not model.scale.requires_grad
    plan = {"one": FusedColwiseParallel(), "two": FusedColwiseParallel()}
    parallelize(model, tensor_mesh(), plan, weights=folder / "model.safetensors")
    assert model.one.weight is model.two.weight and isinstance(model.one.weight, DTensor)
    assert model.scale == 5 and not model.scale.requires_grad and model.count == 7 and model.table[7] == 7
    assert torch.equal(model.mean, torch.arange(6.0).view(2, 3))
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(model.one.weight.full_tensor(), tensors["two.weight"])
    with pytest.raises(ValueError, match=r"two.weight differs from another tensor, but the model shares them"):
        parallelize(empty_model(_Own), tensor_mesh(), plan, weights=folder / "differing.safetensors")
    read, whole = StoredTensor.__getitem__, _Own()
    nn.init.constant_(whole.two.bias, 2.0)
    before, parameters = copy.deepcopy(whole.state_dict()), list(whole.parameters())

    def failing(stored: StoredTensor, slices: Any) -> Tensor:
        if dist.get_rank() and stored.name == "two.bias":
            raise OSError("the disk is lost")
        return read(stored, slices)

    with mock.patch.object(StoredTensor, "__getitem__", failing), pytest.raises((OSError, ValueError), match="is lost"):
        parallelize(whole, tensor_mesh(), plan, weights=folder / "model.safetensors")
    _same(before, whole.state_dict())
    assert type(whole.one) is nn.Linear and all(map(operator.is_, whole.parameters(), parameters))
    assert not any("unconverted" in module.__dict__ for module in whole.modules())
    parallelize(whole, tensor_mesh(), plan)  # with its own values
    assert torch.equal(whole.two.bias.full_tensor(), torch.full((8,), 2.0))
    restore(whole).one.weight.kept = "an attribute"
    scale, mean = whole.scale, whole.mean
    parallelize(whole, tensor_mesh(), plan, weights=folder / "model.safetensors")  # in the place of its own values
    assert whole.one.weight is whole.two.weight and whole.one.weight.kept == "an attribute"
    assert whole.scale is scale and scale == 5 and whole.mean is mean and torch.equal(mean, tensors["mean"])
    assert torch.equal(whole.two.bias.full_tensor(), tensors["two.bias"])


def test_shared_parameters_scalars_and_buffers_are_filled(tmp_path: Path) -> None:
    tensors = {name: torch.randn_like(x) if x.is_floating_point() else x for name, x in _Own().state_dict().items()}
    tensors |= {"scale": torch.tensor(5.0), "count": torch.tensor(7), "mean": torch.arange(6.0).view(2, 3)}
    del tensors["one.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    tensors["one.weight"] = tensors["two.weight"] + 1
    save_file(tensors, tmp_path / "differing.safetensors")
    pool(2).run(_load_own, tmp_path)
    with pytest.raises(ValueError, match="table is a buffer without values"):
        empty_model(_Uninitialised)


def test_names_without_the_prefix_and_buffers_in_the_file(folders: Any, tmp_path: Path) -> None:
    tensors = {name.removeprefix("transformer."): x for name, x in _tensors(folders("gpt2")).items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.bias": torch.ones(1, 1, 64, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    found, said = find_weights(_empty(folders("gpt2")), tmp_path)
    assert found["transformer.wte.weight"] == found["lm_head.weight"] and not said
    assert [x.name for x in found["transformer.h.1.ln_1.bias"]] == ["h.1.ln_1.bias"]
    tensors["transformer.ln_f.bias"] = tensors["ln_f.bias"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"ln_f\.bias appears twice, also in"):
        find_weights(_empty(folders("gpt2")), tmp_path)


def _load_all(folders: list[tuple[Path, Path]]) -> list[list[str]]:
    """Load folders as `_load` does, and return what this rank is warned of with each."""
    said = []
    for folder, same in folders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _load(folder, same)
        said.append([str(warning.message) for warning in caught if "tensors" in str(warning.message)])
    return said


def _in_two_files(folder: Path, tensors: dict[str, Tensor], named: str | None) -> None:
    """Write a folder with a tensor in two files, `named` in the index, in the other one as another tensor."""
    name, (first, second) = "model.layers.0.mlp.up_proj.weight", ("a.safetensors", "b.safetensors")
    wrong = {name: tensors[name] + 9}
    save_file(tensors | (wrong if named == second else {}), folder / first)
    save_file(
        {name: tensors[name], "mtp.norm.weight": torch.ones(48)} | (wrong if named == first else {}), folder / second
    )
    files = {**dict.fromkeys(tensors, first), "mtp.norm.weight": second, name: named}
    index = {"metadata": {}, "weight_map": {name: file for name, file in files.items() if file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_files_of_wrapped_older_and_larger_models_are_read(folders: Any, tmp_path: Path) -> None:
    """transformers reads most of them; it gives random weights to wrapped names, and obeys no index."""
    source = folders("llama_one_kv_head")
    tensors = _tensors(source)
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in (0, 1)}
    layer = {name.replace("layers.1", "layers.2"): x for name, x in tensors.items() if "layers.1" in name}
    more = {"mtp.norm.weight": torch.ones(48), "vision_tower.layers.0.weight": torch.ones(3), **layer}
    cases = [
        (tensors | frequencies, True),
        (tensors | more, True),
        ({f"module._orig_mod.{name}": x for name, x in tensors.items()}, False),
        ({name.replace("layers.1.", "layers.1._orig_mod."): x for name, x in tensors.items()}, False),
    ]
    made: list[tuple[Path, Path]] = []
    for index in range(len(cases) + 2):
        folder = tmp_path / str(index)
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        if index < len(cases):
            save_file({name: x.clone() for name, x in cases[index][0].items()}, folder / "model.safetensors")
        else:
            _in_two_files(folder, tensors, "ab"[index - len(cases)] + ".safetensors")
        made.append((folder, folder if folder.name == "5" or (index < 4 and cases[index][1]) else source))
    said, nothing = pool(2).run(_load_all, made)
    assert nothing == [[]] * 6 and [len(lines) for lines in said] == [0, 1, 0, 0, 1, 1]
    names = ", ".join(sorted(more)[:5])
    assert said[1] == [f"{tmp_path / '1'}: {len(more)} tensors are not the model's: {names}: they are left out"]


def test_wrong_tensors_and_files_are_refused_with_their_names(folders: Any, tmp_path: Path) -> None:
    source = folders("llama_one_kv_head")
    one = torch.ones(48)
    quantized = {f"model.layers.{layer}.self_attn.q_proj.weight": None for layer in (0, 1)}
    cases: list[tuple[dict[str, Tensor | None], str]] = [
        ({"model.norm.weight": None}, "1 tensors are missing: model.norm.weight: expected all files of the model"),
        ({"lm_head.weight": None}, 'missing: lm_head.weight: expected them, or "tie_word_embeddings": true in config'),
        (
            {"lm_head.weight": None, "mtp.a": one},
            'missing: lm_head.weight; 1 tensors are not the model\'s: mtp.a: expected them, or "tie_word_embeddings"',
        ),
        (
            {"model.norm.weight": None, "mtp.a": one, "model.last.weight": one},
            "1 tensors are missing: model.norm.weight; 2 tensors are not the model's: model.last.weight, mtp.a:"
            " expected the config.json that belongs to these files",
        ),
        (
            {"model.layers.0.mlp.up_proj.bias": one, "model.layers.0.mlp.norm.weight": one, "mtp.a": one},
            "2 tensors are not the model's: model.layers.0.mlp.norm.weight, model.layers.0.mlp.up_proj.bias: expected",
        ),
        (
            {name.replace("weight", "qweight"): torch.ones(6, 48, dtype=torch.int32) for name in quantized} | quantized,
            "2 tensors are missing: .*q_proj.qweight: for quantized weights, get those that they were made from, or",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
            "up_proj.weight_scale: for quantized weights, get",
        ),
        (
            {"model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(2, 48)},
            r"lora_A.default.weight: for a model with adapters of PEFT, call its merge_and_unload\(\), and save_pretr",
        ),
        ({"model.norm.weight": torch.ones(6, 1, dtype=torch.uint8)}, r"norm.weight is U8: .* for quantized weights"),
        (
            {"_orig_mod.model.norm.weight": one},
            r"_orig_mod.model.norm.weight appears twice, also in \S+model.safetensors as model.norm.weight: expected",
        ),
        ({"lm_head.weight": torch.ones(100, 48)}, r"lm_head.weight has shape \[100, 48\]: the model has \[101, 48\]"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, r"is I8: .* BF16; for quantized weights, get those"),
    ]
    model = _empty(source)
    for index, (change, message) in enumerate(cases):
        copy = tmp_path / str(index)
        copy.mkdir()
        kept = {name: x for name, x in (_tensors(source) | change).items() if x is not None}
        save_file({name: x.clone() for name, x in kept.items()}, copy / "model.safetensors")
        with pytest.raises(ValueError, match=message) as refused:
            find_weights(model, copy)
        assert "\n" not in str(refused.value) and str(copy) in str(refused.value)
    copy = shutil.copytree(source, tmp_path / "damaged")
    last = sorted(copy.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{last.name}: cannot be read as a safetensors file"):
        find_weights(model, copy)
    last.unlink()
    with pytest.raises(ValueError, match=f"{last.name}: cannot be read as a safetensors file"):
        find_weights(model, copy)
    twice = tmp_path / "twice"
    twice.mkdir()
    _in_two_files(twice, _tensors(source), None)
    with pytest.raises(
        ValueError, match=r"a.safetensors: \S+ appears twice, also in \S+b.safetensors as model.layers.0"
    ):
        find_weights(model, twice)
    model.config.quantization_config = {"quant_method": "aqlm"}
    with pytest.raises(ValueError, match=r"missing: model.norm.weight: for quantized weights, get those that they"):
        find_weights(model, tmp_path / "0")
    head = StoredTensor(copy, "model.mtp.a", torch.Size(), "F32")  # a parameter of the whole model makes it no layer
    assert "left out" in check_names(copy, [], {head.name: head}, ["model.scale", "model.norm.weight"])
    (copy / "model.safetensors.index.json").unlink()
    (copy / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read .* adapters of PEFT, call its merge_and"):
        find_weights(model, copy)


def _refused(folder: Path) -> str:
    model = _empty(folder)
    state = {name: id(x) for name, x in model.named_parameters()}
    with pytest.raises(ValueError) as refused:
        parallelize(model, tensor_mesh(), weights=folder if dist.get_rank() else folder / "nothing")
    assert {name: id(x) for name, x in model.named_parameters()} == state
    assert not any("unconverted" in module.__dict__ for module in model.modules())
    return str(refused.value)


def test_an_error_on_one_rank_is_one_on_all_and_leaves_the_model_as_it_was(folders: Any) -> None:
    first, second = pool(2).run(_refused, folders("llama_one_kv_head"))
    assert "nothing: cannot be read" in first and "failed on rank 0" in second


@pytest.mark.parametrize(
    ("world", "family"),
    [
        (2, "phi3"), (2, "mixtral"),
        *exhaustive((2, "gemma2"), (2, "neox"), (3, "gpt2"), (3, "phi3_shared"), (3, "mixtral")),
    ],
)  # fmt: skip
def test_save_pretrained_writes_the_files_that_were_read(folders: Any, tmp_path: Path, world: int, family: str) -> None:
    pool(world).run(_save, folders(family), tmp_path / "out")
    _same(_tensors(folders(family)), _tensors(tmp_path / "out"))
    for file in folders(family).glob("*.json"):
        assert json.loads(file.read_text()) == json.loads((tmp_path / "out" / file.name).read_text()), file.name


def _save(folder: Path, out: Path) -> None:
    _loaded(folder).save_pretrained(out, max_shard_size="60KB")
    assert (out / "config.json").is_file()  # every rank returns when the files are there


def _save_other_things(folder: Path, out: Path) -> None:
    model = _loaded(folder)
    model.model.save_pretrained(out / "inner")
    model.save_pretrained(out / "given", state_dict=_whole(folder).state_dict())
    model.save_pretrained(out / "nobody", is_main_process=False)
    (out / "file").touch()
    dist.barrier()
    with pytest.raises((OSError, ValueError), match=r"failed on rank|file") as refused:
        model.save_pretrained(out / "file" / "below")
    assert isinstance(refused.value, OSError) == (dist.get_rank() == 0)
    restore(model)
    assert "save_pretrained" not in model.__dict__


def test_save_pretrained_of_parts_of_given_states_and_errors(folders: Any, tmp_path: Path) -> None:
    pool(2).run(_save_other_things, folders("llama_one_kv_head"), tmp_path)
    inner = {f"model.{name}": x for name, x in _tensors(tmp_path / "inner").items()}
    _same({name: x for name, x in _tensors(folders("llama_one_kv_head")).items() if name != "lm_head.weight"}, inner)
    _same(_tensors(folders("llama_one_kv_head")), _tensors(tmp_path / "given"))
    assert not (tmp_path / "nobody").exists()


def _train(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _gathered(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _gathered(x) for name, x in state.items()}
    if isinstance(state, list):
        return [_gathered(x) for x in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def _checkpoint(folder: Path, out: Path) -> Any:
    model = _loaded(folder)
    optimizer = _train(model)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=out)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    _same(full, model.state_dict())
    _same(full, {name: x.clone() for name, x in model.state_dict().items()})
    return _gathered(state)


def _resume(folder: Path, out: Path) -> Any:
    """Load a checkpoint into a parallelized model, and the model's part of it into an untouched one."""
    untouched = _whole(folder)
    plain = untouched.state_dict()
    dcp.load({"model": plain}, checkpoint_id=out)
    model = _loaded(folder)
    optimizer = _train(model, 1)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=out)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    _same(plain, model.state_dict())
    return _gathered({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)})


def _equal_states(a: Any, b: Any, name: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            _equal_states(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _equal_states(x, y, f"{name}.{index}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), name
    else:
        assert a == b, name


@pytest.mark.parametrize(("family", "world"), [("phi3", 2), *exhaustive(("gpt2", 3))])
def test_distributed_checkpoints_load_at_another_tp(folders: Any, tmp_path: Path, family: str, world: int) -> None:
    saved = pool(2).run(_checkpoint, folders(family), tmp_path / "dcp")[0]
    loaded = pool(world).run(_resume, folders(family), tmp_path / "dcp")[0]
    _equal_states(saved, loaded)


def _fully_sharded(folder: Path, out: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2)
    model = _loaded(folder, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    _same(_whole(folder).state_dict(), model.state_dict())
    dcp.save(get_model_state_dict(model), checkpoint_id=out / "dcp")
    plain = _make("phi3").state_dict()
    dcp.load(plain, checkpoint_id=out / "dcp")
    _same(_whole(folder).state_dict(), plain)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    _same(plain, model.state_dict())
    model.save_pretrained(out / "files")


@pytest.mark.exhaustive
def test_models_under_fully_shard_are_saved(folders: Any, tmp_path: Path) -> None:
    pool(4).run(_fully_sharded, folders("phi3"), tmp_path)
    _same(_tensors(folders("phi3")), _tensors(tmp_path / "files"))


def _context_alone(folder: Path, out: Path) -> None:
    model = _loaded(folder, DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",)))
    written = mock.Mock()
    with mock.patch.object(type(model), "save_pretrained", written):
        model.save_pretrained(out)
    assert written.call_count == (dist.get_rank() == 0)
    model.save_pretrained(out)


@pytest.mark.exhaustive
def test_one_rank_writes_a_model_that_every_rank_holds_whole(folders: Any, tmp_path: Path) -> None:
    pool(2).run(_context_alone, folders("llama_one_kv_head"), tmp_path / "out")
    _same(_tensors(folders("llama_one_kv_head")), _tensors(tmp_path / "out"))


def _slow_writer() -> str:
    """Return what a rank learns whose peer writes longer than a wait of an operator may take, and then fails."""
    before = settings().timeout
    set_settings(timeout=1.0)
    try:
        mesh = build_mesh("cpu", dp=1, tp=2)
        symmetric_memory(mesh["tp"].get_group(), "cpu")
        with agreement("writing", *all_groups_of(mesh)):
            time.sleep(2.5 * (dist.get_rank() == 0))
            if dist.get_rank() == 0:
                raise OSError("the disk is full")
    except (OSError, ValueError, PeerTimeout) as error:
        return str(error)
    finally:
        set_settings(timeout=before)
    return ""


@pytest.mark.exhaustive
def test_ranks_wait_for_one_that_writes_and_learn_why_it_fails() -> None:
    expected = ["the disk is full", "writing failed on rank 0: OSError: the disk is full"]
    assert pool(2).run(_slow_writer) == expected
