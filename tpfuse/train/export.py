"""`tpfuse export` writes the newest good checkpoint of a run as a Hugging Face GPT-2."""

import json
from pathlib import Path
from typing import Any

import torch

from tpfuse.models.huggingface import save_pretrained
from tpfuse.train.errors import UserError
from tpfuse.train.sample import load_run
from tpfuse.train.tokenizer import END_OF_TEXT


def export(run: Path, folder: Path) -> str:
    """Writes config.json and model.safetensors, and the files of the tokenizer if the tokenizers library has made it.

    Weights are the float32 masters (float64 if the run was trained in float64). Returns in words what was written and
    what was not. Raises UserError if the folder is not empty or the run has no checkpoint, CheckpointError if all
    checkpoints are damaged, and OSError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: choose a new folder")
    model, tokenizer = load_run(run, torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    description = tokenizer.as_json()
    written = "config.json, model.safetensors"
    if description["kind"] == "tokenizers":
        _write_tokenizer(folder, description["json"], model.config.n_positions, tokenizer.end_of_text is not None)
        written += ", tokenizer.json, tokenizer_config.json"
    else:
        written += f" (no tokenizer: Hugging Face has none for {description['kind']})"
    save_pretrained(model, folder)
    return f"{folder}: {written}"


def _write_tokenizer(folder: Path, text: str, longest: int, ends: bool) -> None:
    """Writes the tokenizer's files and names the library's own class.

    GPT-2's class would treat every tokenizer as byte-level BPE.
    """
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
    if ends:
        settings |= dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
