"""`tpfuse export` writes the newest good checkpoint of a run as a folder of Hugging Face's transformers."""

import json
from pathlib import Path

import tokenizers
import torch
from safetensors import SafetensorError

from tpfuse.commands.shared_model import load_run
from tpfuse.errors import UserError
from tpfuse.models.gpt import GPT
from tpfuse.models.huggingface import save_pretrained
from tpfuse.train.decoder_config import DecoderConfig
from tpfuse.train.language_model import LanguageModel
from tpfuse.train.tokenizer import document_start


def export(run: Path, folder: Path) -> str:
    """Write config.json and safetensors files, and the files of the tokenizer if the tokenizers library has made it.

    The GPT becomes a GPT-2; a model of transformers keeps its small files, such as those of its tokenizer.

    The GPT's weights are the float32 masters. A model of transformers has the dtype that its config.json names, else
    float32. A run that was trained in float64 is written in float64. Return in words what was written and what was
    not. Raise UserError if the folder is not empty or the run has no checkpoint, CheckpointError if all checkpoints
    are damaged, and OSError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose a new folder")
    model, tokenizer = load_run(run, torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    description, config, module = tokenizer.as_json(), model.config, model.module
    special = {"bos_token": document_start(tokenizer), "eos_token": tokenizer.end_of_text}
    if isinstance(module, GPT):
        save_pretrained(module, folder, bos_and_eos=(special["bos_token"], special["eos_token"]))
    else:
        try:
            module.to(_dtype(config, model)).save_pretrained(folder)  # type: ignore[operator]
        except SafetensorError as error:
            raise OSError(f"cannot write {folder}: {error}") from None
    left_out = f" (no tokenizer: Hugging Face has none for {description['kind']})"
    if description["kind"] == "tokenizers":
        # With GPT-2's class, every tokenizer would be treated as byte-level BPE.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.longest}
        text_of = tokenizers.Tokenizer.from_str(description["json"]).id_to_token
        settings |= {name: text_of(number) for name, number in special.items() if number is not None}
        (folder / "tokenizer.json").write_text(description["json"], encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        left_out = ""
    for name, text in config.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}{left_out}"


def _dtype(config: DecoderConfig, model: LanguageModel) -> torch.dtype:
    """Return the dtype in which the weights are exported."""
    own: torch.dtype = next(model.module.parameters()).dtype
    named = getattr(torch, str(config.settings.get("dtype") or config.settings.get("torch_dtype")), None)
    return named if own != torch.float64 and isinstance(named, torch.dtype) else own
