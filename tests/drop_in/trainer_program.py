"""Train a tiny Llama by transformers' Trainer and in a loop of accelerate, on one rank or under torchrun.

Each rank writes losses and norms to FOLDER/RANK.json. The Trainer saves the trained model to FOLDER/model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpfuse
from tests.support.decoders import decoder


def _trained_by_trainer(model: Any, data: list[dict[str, torch.Tensor]], folder: Path) -> list[dict[str, float]]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder / "unused"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, weight_decay=0.1, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
        eval_strategy="steps", eval_steps=4, seed=3, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    trainer.save_model(str(folder / "model"))
    kinds = ("loss", "grad_norm", "eval_loss")
    return [{kind: row[kind] for kind in kinds if kind in row} for row in trainer.state.log_history]


def _trained_by_accelerate(model: Any, data: list[dict[str, torch.Tensor]]) -> list[list[float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rows = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        rows.append([loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)])
        optimizer.step()
        optimizer.zero_grad()
    return rows


def main(folder: Path) -> None:
    """Train both models and write the results."""
    torch.set_num_threads(1)
    models = [decoder("llama", torch.float32) for _ in range(2)]
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            del os.environ[name]
        for model in models:
            tpfuse.parallelize(model, mesh)
    ids = torch.randint(3, 101, (16, 13), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    results = {
        "trainer": _trained_by_trainer(models[0], data, folder),
        "accelerate": _trained_by_accelerate(models[1], data),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
