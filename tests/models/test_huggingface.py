"""GPT-2 in the form of Hugging Face is read and written, and agrees with transformers."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.meshes import tensor_mesh
from tests.support.tiers import exhaustive
from tpfuse.comm.layout import copy_whole_, gather_whole
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.huggingface import load_pretrained, save_pretrained
from tpfuse.models.parallelize_gpt import parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers, normal
from tpfuse.testing.ranks import pool

if TYPE_CHECKING:  # it is imported where it is used, since the ranks load this file too and do not need it
    from transformers import GPT2LMHeadModel

IDS = integers(1, 3, 13, low=0, high=100, dtype=torch.int64)
CONFIG = GPTConfig(vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> "GPT2LMHeadModel":
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_positions=16, n_embd=48, n_layer=2, n_head=12, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("bias"):  # biases start at zero, so that a forgotten one would change nothing
            parameter.data.copy_(normal(seed, *parameter.shape) / 4)
    return model


@pytest.fixture
def folder(theirs: "GPT2LMHeadModel", tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def _logits(folder: Path, dtype: torch.dtype) -> Tensor:
    model = load_pretrained(folder, device_mesh=tensor_mesh(), dtype=dtype)
    assert isinstance(model.transformer.wte.weight, DTensor)
    return model(IDS).detach()


@pytest.mark.parametrize("world", [2, *exhaustive(3)])
def test_logits_agree(theirs: "GPT2LMHeadModel", folder: Path, world: int) -> None:
    wide = type(theirs)(theirs.config).double().eval()
    wide.load_state_dict(theirs.state_dict())
    expected = wide(IDS).logits.detach()
    for logits in pool(world).run(_logits, folder, torch.float64):
        assert (expected - logits).abs().max() < 1e-12


def _their_logits(folder: Path) -> Tensor:
    from transformers import GPT2LMHeadModel

    model, found = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.transformer.wte.weight
    logits: Tensor = model.eval()(IDS).logits.detach()
    return logits


def _save(folder: Path, bias: bool, dtype: torch.dtype) -> Tensor:
    config = GPTConfig(101, 16, 48, 2, 12, bias=bias, dropout=0.1)
    model = parallelize_gpt(GPT(config, dtype=dtype), tensor_mesh())
    for seed, parameter in enumerate(model.parameters()):
        copy_whole_(parameter.detach(), normal(seed, *parameter.shape) / 4)
    save_pretrained(model, folder)
    return model(IDS).detach()


@pytest.mark.parametrize(("world", "bias"), [(2, True), (1, False), *exhaustive((3, False))])
def test_transformers_loads_what_was_saved(tmp_path: Path, world: int, bias: bool) -> None:
    ours = pool(world).run(_save, tmp_path / "ours", bias, torch.float32)[0]
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]
    assert (_their_logits(tmp_path / "ours") - ours).abs().max() < 1e-4 * ours.abs().max()
    assert load_file(tmp_path / "ours" / "model.safetensors")["transformer.wte.weight"].shape == (101, 48)


def _copy(source: Path, target: Path) -> None:
    save_pretrained(load_pretrained(source, device_mesh=tensor_mesh()), target)


def test_round_trip_keeps_every_bit(folder: Path, tmp_path: Path) -> None:
    pool(2).run(_copy, folder, tmp_path / "copy")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "copy"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_bfloat16_model_keeps_its_dtype_and_settings(tmp_path: Path) -> None:
    pool(1).run(_save, tmp_path, True, torch.bfloat16)
    model = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.config == GPTConfig(101, 16, 48, 2, 12, dropout=0.1)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    whole = gather_whole(model.transformer.wte.weight)
    assert whole.dtype == torch.bfloat16 and torch.equal(whole, tensors["transformer.wte.weight"])


def _rewrite(folder: Path, change: dict[str, Tensor | None], rename: Any = str) -> None:
    """Add, replace or (None) removes tensors of the file, then renames all of them."""
    tensors = load_file(folder / "model.safetensors") | change
    kept = {rename(name): x.contiguous() for name, x in tensors.items() if x is not None}
    save_file(kept, folder / "model.safetensors")


def test_names_without_prefix_tied_heads_and_buffers(theirs: "GPT2LMHeadModel", folder: Path) -> None:
    wte = theirs.transformer.wte.weight.detach().clone()
    buffers = {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    _rewrite(folder, {"lm_head.weight": wte, **buffers}, lambda name: name.removeprefix("transformer."))
    expected = theirs(IDS).logits
    assert (load_pretrained(folder)(IDS) - expected).abs().max() < 1e-5
    assert (load_pretrained(folder / "model.safetensors")(IDS) - expected).abs().max() < 1e-5
    _rewrite(folder, {"h.2.ln_1.bias": torch.ones(48)}, lambda name: f"_orig_mod.transformer.{name}")
    with pytest.warns(
        UserWarning, match=r"1 tensors are not the model's: _orig_mod.transformer.h.2.ln_1.bias: they are"
    ):
        assert (load_pretrained(folder)(IDS) - expected).abs().max() < 1e-5


def test_weights_in_several_files_are_read(theirs: "GPT2LMHeadModel", tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and not (tmp_path / "model.safetensors").exists()
    logits = pool(2).run(_logits, tmp_path, torch.float32)[0]
    assert (logits - theirs(IDS).logits).abs().max() < 1e-5
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    wrong = {name: x + 9 for name, x in load_file(first).items() if index["weight_map"][name] == first.name}
    save_file(load_file(last) | wrong, last, metadata={"format": "pt"})
    assert wrong and (load_pretrained(tmp_path)(IDS) - theirs(IDS).logits).abs().max() < 1e-5
    index["weight_map"]["transformer.wte.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not the name of a file beside it"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read as an index"):
        load_pretrained(tmp_path)


def test_wrong_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Tensor | None], str]] = [
        ({"transformer.ln_f.bias": None}, "1 tensors are missing: ln_f.bias: expected all files"),
        ({"transformer.h.1.ln_3.bias": torch.ones(48)}, "1 tensors are not the model's: transformer.h.1.ln_3.bias"),
        ({"transformer.wpe.weight": torch.ones(15, 48)}, r"wpe.weight has shape \[15, 48\]: the model has \[16, 48\]"),
        ({"transformer.h.0.mlp.c_fc.weight": torch.ones(192, 48)}, r"the model has \[48, 192\]"),
        ({"transformer.h.0.mlp.c_fc.weight": torch.ones(48, 192).char()}, r"c_fc.weight is I8: expected F64"),
        ({"lm_head.weight": torch.ones(101, 48)}, "the output embedding must be tied"),
        ({"lm_head.weight": torch.ones(100, 48)}, "the output embedding must be tied"),
        ({"ln_f.bias": torch.ones(48)}, "ln_f.bias appears twice, also in"),
    ]
    for index, (change, message) in enumerate(cases):
        copy = shutil.copytree(folder, tmp_path / str(index))
        _rewrite(copy, change)
        with pytest.raises(ValueError, match=message):
            load_pretrained(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function is 'relu', expected 'gelu_new' or 'gelu_pytorch_tanh'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_inner": 100}, "n_inner is 100, expected null or 4 n_embd = 192"),
        ({"n_layer": "2"}, "n_layer is '2', expected an integer"),
        ({"embd_pdrop": 0.1}, "differ, expected one for all"),
        ({"resid_pdrop": None}, "resid_pdrop is None, expected a number"),
        ({"n_head": 7}, "n_embd 48 is not a multiple of n_head 7"),
        ({"vocab_size": 102}, r"wte.weight has shape \[101, 48\]: the model has \[102, 48\]"),
    ],
)
def test_wrong_configurations_are_refused(folder: Path, change: dict[str, object], message: str) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_missing_and_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read"):
        load_pretrained(tmp_path / "nothing")
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json: "):
            load_pretrained(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", data[:100], data[:-1], b"\x80\x04K\x01."):  # the last one is a pickle
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read as a safetensors file"):
            load_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read"):
        load_pretrained(folder)


def test_a_pickle_is_refused_with_a_command_that_converts_it(
    theirs: "GPT2LMHeadModel", folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(
            ValueError, match=r"pytorch_model\.bin is a pickle.* convert it with transformers"
        ) as refused:
            load_pretrained(path)
    command = str(refused.value).partition(' python -c "')[2].removesuffix('"')
    exec(command, {})  # what the message says
    assert (load_pretrained(folder)(IDS) - theirs(IDS).logits).abs().max() < 1e-5


def _refuse(folder: Path) -> None:
    model = parallelize_gpt(GPT(CONFIG), tensor_mesh())
    initialize(model, 1)
    with pytest.raises(ValueError, match="already: remove it or choose another folder"):
        save_pretrained(model, folder)
    dist.barrier()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    pool(2).run(_refuse, tmp_path)
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
