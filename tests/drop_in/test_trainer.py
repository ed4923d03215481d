"""ParallelTrainer trains, evaluates, saves and resumes as transformers' Trainer does in one process."""

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import tpfuse
from tests.support.decoders import decoder
from tests.support.meshes import mesh_of
from tests.support.tiers import exhaustive
from tpfuse.checkpoint.checkpoint import Checkpoint
from tpfuse.comm.layout import gather_whole
from tpfuse.testing.inputs import integers
from tpfuse.testing.ranks import pool
from tpfuse.zero.optimizer import ZeroOptimizer

SAMPLES, STEPS, SAVED = 7, 6, 3  # of 4 samples a step: 2 steps in an epoch, the last one of 3 samples


def _data(samples: int = SAMPLES) -> list[dict[str, Tensor]]:
    """Return texts of 13 tokens, of which other numbers have a label: 12, 1, 6, 12, …"""
    rows = []
    for index, ids in enumerate(integers(1, samples, 13, low=3, high=100, dtype=torch.int64)):
        labels = ids.clone()
        labels[[0, 12, 7][index % 3] :] = -100
        rows.append({"input_ids": ids, "labels": ids.clone() if index % 3 == 0 else labels})
    return rows


def _arguments(folder: Path, data_ranks: int, **settings: Any) -> Any:
    from transformers import TrainingArguments

    own: dict[str, Any] = {
        "per_device_train_batch_size": 2 // data_ranks, "gradient_accumulation_steps": 2, "max_steps": STEPS,
        "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2, "logging_steps": 1,
        "per_device_eval_batch_size": 2 // data_ranks, "use_cpu": True, "report_to": [], "save_strategy": "steps",
        "save_steps": SAVED, "eval_strategy": "steps", "eval_steps": SAVED, "seed": 3, "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    return TrainingArguments(str(folder), **(own | settings))


def _result(trainer: Any) -> dict[str, Any]:
    """Return the losses, norms, evaluations, whole weights, and what Trainer has counted."""
    rows = {kind: [row[kind] for row in trainer.state.log_history if kind in row] for kind in KINDS}
    shapes = {name: p.shape for name, p in decoder(FAMILY, torch.float32).named_parameters()}
    model, state = trainer.model, trainer.state
    rows["counts"] = [state.total_flos, state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)]
    rows["weights"] = {n: gather_whole(p.detach()).reshape(shapes[n]).clone() for n, p in model.named_parameters()}
    return rows


KINDS, FAMILY = ("loss", "grad_norm", "eval_loss", "learning_rate"), "llama"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of transformers' Trainer in this process."""
    from transformers import Trainer

    data = _data()
    trainer = Trainer(
        decoder(FAMILY, torch.float32),
        _arguments(tmp_path_factory.mktemp("plain"), 1),
        train_dataset=data,
        eval_dataset=data[:5],
    )
    trainer.train()
    return _result(trainer)


def _torchrun() -> Any:
    """Return a patch of the environment to that of a rank of torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": "1"}
    return mock.patch.dict(os.environ, {**names, "MASTER_ADDR": "localhost"})


def _trainer(folder: Path, layout: tuple[int, int, int], stage: int = 1, model: Any = None, **options: Any) -> Any:
    """Return a ParallelTrainer, which needs the environment of `_torchrun`. options: settings of the arguments too."""
    dp, tp, cp = layout
    data = options.pop("data", _data())
    own = {name: options.pop(name) for name in ("callbacks", "compute_metrics", "tp", "cp", "mesh") if name in options}
    where = {} if "tp" in own else {"mesh": mesh_of(dp, tp, cp)}
    return tpfuse.ParallelTrainer(
        decoder(FAMILY, torch.float32) if model is None else model, _arguments(folder, dp, **options),
        train_dataset=data, eval_dataset=_data()[:5], zero_stage=stage, **where | own,
    )  # fmt: skip


def _parallel(folder: Path, layout: tuple[int, int, int], stage: int, resume: Path | None = None) -> dict[str, Any]:
    with _torchrun():
        trainer = _trainer(folder, layout, stage, gradient_checkpointing=stage == 2, tp=layout[1], cp=layout[2])
        sizes = dict(zip(trainer.mesh.mesh_dim_names, trainer.mesh.shape, strict=True))
        assert tuple(sizes.get(name, 1) for name in ("dp", "tp", "cp")) == layout
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return _result(trainer)


def _agree(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-6, abs=1e-7), kind
    for name, weight in expected["weights"].items():
        error = float((found["weights"][name] - weight).abs().max())
        assert error <= 1e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("layout", "stage"), [((1, 2, 1), 1), *exhaustive(((2, 1, 1), 2), ((1, 1, 2), 1))])
def test_it_trains_and_resumes_as_one_process(
    layout: tuple[int, int, int], stage: int, plain: Any, tmp_path: Path
) -> None:
    ranks = pool(layout[0] * layout[1] * layout[2])
    for found in ranks.run(_parallel, tmp_path / "first", layout, stage):
        _agree(plain, found)
    for found in ranks.run(_parallel, tmp_path / "second", layout, stage, tmp_path / "first" / f"checkpoint-{SAVED}"):
        _agree(plain, found)
        if layout[0] == 1:  # data-parallel ranks repeat samples to fill the last batches
            assert found["counts"] == plain["counts"]


def _one_process(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Return the result of a ParallelTrainer without a mesh in this process, which resumes from a checkpoint."""
    data, model = _data(), decoder(FAMILY, torch.float32)
    trainer = tpfuse.ParallelTrainer(model, _arguments(folder, 1), train_dataset=data, eval_dataset=data[:5])
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return _result(trainer)


@pytest.mark.exhaustive
def test_a_checkpoint_resumes_in_another_layout(plain: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer

    saved = f"checkpoint-{SAVED}"
    pool(4).run(_parallel, tmp_path / "four", (2, 2, 1), 2)
    for folder, layout, stage in (("three", (2, 1, 1), 3), ("tp", (1, 2, 1), 0)):
        for found in pool(2).run(_parallel, tmp_path / folder, layout, stage, tmp_path / "four" / saved):
            _agree(plain, found)
    _agree(plain, _one_process(tmp_path / "one", tmp_path / "four" / saved))
    trainer = Trainer(
        decoder(FAMILY, torch.float32), _arguments(tmp_path, 1, eval_strategy="no"), train_dataset=_data()
    )
    with pytest.raises(FileNotFoundError):  # it would forget the moments without a word if it found no such folder
        trainer.train(resume_from_checkpoint=str(tmp_path / "four" / saved))
    for folder in ("four", "three"):  # whole weights, which transformers reads
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder / f"checkpoint-{STEPS}")
        _agree(plain, plain | {"weights": model.state_dict()})


OTHER = {
    "label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "max_steps": -1, "num_train_epochs": 3,
    "save_strategy": "epoch", "eval_strategy": "epoch", "dataloader_drop_last": True,
}  # fmt: skip


def _other_settings(folder: Path, layout: tuple[int, int, int] | None, stage: int = 1) -> dict[str, Any]:
    """Train twice with the settings OTHER, by transformers' Trainer if there is no layout.

    The first time an error ends the training between two micro-batches of a step, whose gradient is then forgotten.
    Return the results, with the logits of texts without labels among the weights.
    """
    from transformers import Trainer, TrainerCallback

    class Fail(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise InterruptedError

    data, settings = _data(), OTHER
    with contextlib.nullcontext() if layout is None else _torchrun():
        if layout is None:
            model, arguments = decoder(FAMILY, torch.float32), _arguments(folder, 1, **settings)
            trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:5])
        else:
            trainer = _trainer(folder, layout, stage, **settings)
        trainer.add_callback(Fail)
        with pytest.raises(InterruptedError):
            trainer.train()
        trainer.remove_callback(Fail)
        trainer.train()
        result = _result(trainer)
        texts: Any = [{"input_ids": sample["input_ids"]} for sample in data[:3]]
        result["weights"]["logits"] = torch.from_numpy(trainer.predict(texts).predictions) / 100
    return result


@pytest.mark.exhaustive
def test_other_settings_and_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    expected = _other_settings(tmp_path / "one", None)
    for layout, stage in (((2, 1, 1), 3), ((1, 1, 2), 1)):
        for found in pool(2).run(_other_settings, tmp_path / str(stage), layout, stage):
            _agree(expected, found)


def _family(folder: Path, family: str, layout: tuple[int, int, int] | None, stage: int = 0) -> None:
    """Train a model for two steps, by transformers' Trainer if there is no layout, and save it."""
    from transformers import Trainer

    model = decoder(family, torch.float32)
    # The biases of keys have no gradient but rounding, which AdamW would divide by itself.
    settings = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "adam_epsilon": 1e-4}
    with contextlib.nullcontext() if layout is None else _torchrun():
        if layout is None:
            trainer = Trainer(model, _arguments(folder, 1, **settings), train_dataset=_data())
        else:
            trainer = _trainer(folder, layout, stage, model, **settings)
        trainer.train()
        trainer.save_model()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout", "stage"), [("gpt2", (2, 2, 1), 3), ("llama_tied", (1, 2, 2), 1), ("mixtral", (2, 2, 1), 1)]
)
def test_whole_weights_are_those_of_one_process(family: str, layout: Any, stage: int, tmp_path: Path) -> None:
    _family(tmp_path / "one", family, None)
    pool(4).run(_family, tmp_path / "four", family, layout, stage)
    one, four = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "four"))
    assert one.keys() == four.keys() and all((four[name] - x).abs().max() < 1e-6 for name, x in one.items())


def _by_accelerate(zero: bool) -> list[list[float]]:
    """Train in a loop of accelerate, with ZeroOptimizer on the ranks of a pool; return losses of rank 0 and norms."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), decoder(FAMILY, torch.float32)
    texts: Any = [sample["input_ids"] for sample in _data(16)]
    loader = torch.utils.data.DataLoader(texts, batch_size=2 if zero else 4)
    settings = {"lr": 1e-3, "weight_decay": 0.0}
    own: Any = ZeroOptimizer(model, stage=2, **settings) if zero else torch.optim.AdamW(model.parameters(), **settings)
    optimizer, loader = accelerator.prepare(own, loader)
    rows = []
    for ids in loader:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = own.clip_grad_norm_(0.5) if zero else accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rows.append([float(accelerator.gather(loss.detach()).mean()), float(norm)])
    return rows


def _on_ranks() -> list[list[float]]:
    with _torchrun():
        return _by_accelerate(zero=True)


@pytest.mark.exhaustive
def test_accelerate_trains_with_zero_as_in_one_process() -> None:
    expected = _by_accelerate(zero=False)
    for found in pool(2).run(_on_ranks):
        assert len(found) == 4
        for row, theirs in zip(found, expected, strict=True):
            assert row == pytest.approx(theirs, rel=1e-6)


def _refusals(folder: Path) -> list[str]:
    """Return the errors of trainers that are made or trained wrongly."""
    from transformers import LlamaForSequenceClassification, Trainer

    model, messages = tpfuse.parallelize(decoder(FAMILY, torch.float32), mesh_of(1, 2)), []

    def refused(make: Callable[[], Any]) -> None:
        with pytest.raises(ValueError) as caught:
            make()
        messages.append(str(caught.value))

    refused(lambda: Trainer(model, _arguments(folder, 1, eval_strategy="no")))
    Trainer(model, _arguments(folder, 1, eval_strategy="no", save_strategy="no"))
    refused(lambda: _trainer(folder, (1, 2, 1), tp=1, cp=3))
    refused(lambda: _trainer(folder, (1, 2, 1), tp=2, mesh=mesh_of(1, 2)))
    refused(lambda: _trainer(folder, (1, 2, 1), model=model, tp=2))
    refused(lambda: _trainer(folder, (1, 2, 1), model=model))  # outside of torchrun
    with _torchrun():
        refused(lambda: Trainer(model, _arguments(folder, 1, save_strategy="no", eval_strategy="no")))
        refused(lambda: _trainer(folder, (1, 2, 1), 3, optim="sgd", neftune_noise_alpha=5.0))
        classifier = LlamaForSequenceClassification(decoder(FAMILY).config)
        refused(lambda: _trainer(folder, (2, 1, 1), model=classifier))
        refused(lambda: _trainer(folder, (1, 2, 1)).train(resume_from_checkpoint=str(folder)))
        if dist.get_rank() == 0:
            (folder / "optimizer" / "step-1").mkdir(parents=True)
        refused(lambda: _trainer(folder, (1, 2, 1)).train(resume_from_checkpoint=str(folder)))
        texts = _data()[dist.get_rank() :]
        refused(lambda: _trainer(folder, (1, 2, 1), data=texts, max_steps=1).train())
    return messages


def test_it_refuses_what_would_be_wrong(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    for messages in pool(2).run(_refusals, tmp_path):
        plain, *layouts, outside, batches, unsupported, loss, nothing, damaged, different = messages
        way = "the model is parallelized: use tpfuse.ParallelTrainer"
        assert plain == (
            "save_strategy='steps': Trainer would write the checkpoints of all 2 ranks to the same files:"
            f' {way}, or save_strategy="no"'
        )
        assert layouts == [
            "ParallelTrainer: tp=1, cp=3 on 2 ranks: expected whole numbers whose product divides the ranks that"
            " torchrun starts (--nproc-per-node)",
            "ParallelTrainer: tp=2, cp=1 and a mesh: expected one of the two",
            "ParallelTrainer: the model is parallelized: expected mesh=, that of tpfuse.parallelize",
        ]
        assert batches == f"Trainer would give the 2 ranks different batches: {way}"
        assert outside.startswith(
            "accelerate sees 1 processes, and the mesh has 2 ranks: start the program by torchrun"
        )
        what = "optim='sgd', neftune_noise_alpha"
        assert unsupported == f"ParallelTrainer does not support {what}: leave it out"
        assert "a loss other than that of causal language models over data-parallel ranks" in loss
        assert nothing.startswith(f"{tmp_path} has no whole optimizer state of ParallelTrainer")
        assert damaged.startswith(f"resuming from {tmp_path}: the checkpoint is damaged: ") and "manifest" in damaged
        versions = "int64 [2, 13] on rank 0, int64 [2, 13] on rank 1, with different values"
        assert different.startswith(
            f"step 1: the ranks of one model have different inputs: input_ids of micro-batch 0 is {versions}; "
        )


def _together(folder: Path) -> tuple[int, list[str]]:
    """Return the step at which the first rank's callback has stopped all, and the errors of all when disks are full."""
    from transformers import Trainer, TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == (2 if state.is_world_process_zero else 1)

    messages = []
    full = OSError(28, "No space left on device")
    with _torchrun():
        stopped = _trainer(folder, (1, 2, 1), callbacks=[Stop()])
        stopped.train()
        with mock.patch.object(Trainer, "_load_rng_state", lambda *_: torch.manual_seed(dist.get_rank())):
            stopped._load_rng_state("a checkpoint whose states of devices are those of another rank")
        messages.append(str(torch.rand(())))
        for rank, what in ((1, "tpfuse.checkpoint.checkpoint.write_safetensors"), (0, "torch.save")):
            failing = mock.patch(what, side_effect=full if dist.get_rank() == rank else None, wraps=_named(what))
            with failing, pytest.raises((ValueError, OSError)) as caught:
                _trainer(folder, (1, 2, 1), save_steps=1).train()
            messages.append(str(caught.value))
        for rate in (1e-3, 5e-3):  # the second run replaces what the first one has saved
            _trainer(folder, (1, 2, 1), max_steps=1, learning_rate=rate).train()
    return stopped.state.global_step, messages


def _named(what: str) -> Any:
    module, _, name = what.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_ranks_stop_and_fail_together(tmp_path: Path) -> None:
    (step, first), (other, second) = pool(2).run(_together, tmp_path)
    assert step == other == 2
    assert first.pop(0) == second.pop(0)  # the random states
    assert "rank 1: [Errno 28] No space left on device" in first[0] and first[0] in second[0]
    assert first[1] == "[Errno 28] No space left on device"
    assert "failed on rank 0" in second[1] and second[1].endswith(": OSError: [Errno 28] No space left on device")
    saved = Checkpoint(tmp_path / "checkpoint-1" / "optimizer" / "step-1")
    assert saved.state["param_groups"][0]["initial_lr"] == 5e-3


def _best(folder: Path, layout: tuple[int, int, int]) -> tuple[list[tuple[int, ...]], dict[str, Tensor]]:
    """Return the shapes of what the metrics are computed from, and the weights after training, those of the best."""
    shapes = []

    def worse(predicted: Any) -> dict[str, float]:
        shapes.append((*predicted.predictions.shape[:2], *predicted.label_ids.shape))
        return {"fit": -float(len(shapes)) * (1 if dist.get_rank() == 0 else -1)}  # the first rank's counts

    with _torchrun():
        trainer = _trainer(
            folder, layout, 2, compute_metrics=worse, load_best_model_at_end=True, metric_for_best_model="fit",
            greater_is_better=True,
        )  # fmt: skip
        trainer.train()
        return shapes, _result(trainer)["weights"]


@pytest.mark.exhaustive
def test_the_best_model_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    for shapes, weights in pool(2).run(_best, tmp_path, (2, 1, 1)):
        assert shapes == [(5, 13, 5, 13)] * 2  # each sample once
        saved = load_file(tmp_path / f"checkpoint-{SAVED}" / "model.safetensors")
        assert all(torch.equal(weights[name], x) for name, x in saved.items())


def _pushed(folder: Path) -> list[str]:
    """Return the names of the files that are in the folder when it is pushed, on the first rank."""
    names: list[str] = []

    class Hub:
        def create_repo(self, *_: Any, **__: Any) -> Any:
            return mock.Mock(repo_id="someone/run")

        def upload_folder(self, *, folder_path: str, run_as_future: bool = False, **_: Any) -> Any:
            names.extend(each.name for each in Path(folder_path).iterdir())

    with _torchrun(), mock.patch("transformers.trainer.hf_api", Hub):
        settings = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 1}
        trainer = _trainer(folder, (1, 2, 1), push_to_hub=True, **settings)
        trainer.train()
        trainer.push_to_hub()
    return names


@pytest.mark.exhaustive
def test_the_first_rank_pushes_whole_weights(tmp_path: Path) -> None:
    first, second = pool(2).run(_pushed, tmp_path)
    assert {"model.safetensors", "config.json", "README.md"} <= set(first) and second == []
    shapes = {name: tuple(p.shape) for name, p in decoder(FAMILY).named_parameters()}
    assert {name: tuple(x.shape) for name, x in load_file(tmp_path / "model.safetensors").items()} == shapes


def _adapted(folder: Path, stage: int | None, resume: Path | None = None) -> dict[str, Any]:
    """Train adapters of PEFT, by transformers' Trainer if there is no stage; return losses, norms and adapters."""
    import peft
    from transformers import Trainer

    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(decoder(FAMILY, torch.float32), config)
    if stage is None:
        data = _data()
        trainer = Trainer(model, _arguments(folder, 1), train_dataset=data, eval_dataset=data[:5])
    else:
        trainer = _trainer(folder, (2, 2, 1), stage, model)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    rows = {kind: [row[kind] for row in trainer.state.log_history if kind in row] for kind in KINDS}
    trained = {name: gather_whole(p.detach()).clone() for name, p in model.named_parameters() if p.requires_grad}
    return rows | {"weights": trained}


def _adapted_on_ranks(folder: Path, stage: int, resume: Path | None = None) -> dict[str, Any]:
    with _torchrun():
        return _adapted(folder, stage, resume)


@pytest.mark.exhaustive
def test_adapters_train_and_resume_as_in_one_process(tmp_path: Path) -> None:
    expected = _adapted(tmp_path / "one", None)
    saved = f"checkpoint-{SAVED}"
    for found in pool(4).run(_adapted_on_ranks, tmp_path / "four", 2):
        _agree(expected, found)
    for found in pool(4).run(_adapted_on_ranks, tmp_path / "again", 3, tmp_path / "four" / saved):
        _agree(expected, found)
    for name, step in (("four", SAVED), ("again", STEPS)):
        files = (tmp_path / each / f"checkpoint-{step}" / "adapter_model.safetensors" for each in ("one", name))
        one, found = map(load_file, files)
        assert one.keys() == found.keys() and all((found[name] - x).abs().max() < 1e-6 for name, x in one.items())


def _dropped(folder: Path, resume: Path | None) -> list[float]:
    with _torchrun():
        model = decoder(FAMILY, torch.float32, attention_dropout=0.3)
        trainer = _trainer(folder, (2, 2, 1), 2, model, bf16=True)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.exhaustive
def test_dropout_in_bfloat16_resumes_with_the_same_masks(tmp_path: Path) -> None:
    first = pool(4).run(_dropped, tmp_path / "first", None)
    again = pool(4).run(_dropped, tmp_path / "again", tmp_path / "first" / f"checkpoint-{SAVED}")
    assert first == again and first[0] == first[3] and len(first[0]) == STEPS
