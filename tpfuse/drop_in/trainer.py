"""transformers' Trainer on a mesh of tensor-, context- and data-parallel ranks, with ZeRO.

    ParallelTrainer(model, arguments, train_dataset=data, tp=2, zero_stage=2).train()

Under torchrun it trains as Trainer does in one process whose batches are those of all data-parallel ranks together: the
order of the samples, the loss, the gradient and its norm are the same. Ranks of tensor and context parallelism get the
same batches, and compare them in every step. Where accelerate repeats samples to fill the last batches of an epoch,
their labels are masked.

A checkpoint has whole weights in Hugging Face's form, which the first rank writes, and in its folder `optimizer` the
trained parameters and their moments, of which each rank writes its own (`tpfuse.checkpoint`), so that any layout
resumes from it. What several ranks cannot keep exactly is refused before training.
"""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

try:
    from transformers import Trainer, TrainingArguments
except ModuleNotFoundError as error:
    raise ImportError("tpfuse.ParallelTrainer needs transformers 5.24 or newer: pip install transformers") from error

from tpfuse.checkpoint.checkpoint import Checkpoint, CheckpointError, Shard, save
from tpfuse.comm import collectives
from tpfuse.comm.agreement import agreement, exchange
from tpfuse.comm.collectives.one_model import compare_inputs, share_generators
from tpfuse.comm.mesh import build_mesh, default_group, groups_of, rank_and_size, shown
from tpfuse.drop_in.huggingface import check_release, outermost, takes_labels
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.drop_in.structure import decoder_layers
from tpfuse.drop_in.weights import is_persistent, offer_save_pretrained
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.optimizer import ZeroOptimizer

_MODEL_AXES = ("cp", "ring", "ulysses", "tp")  # along these axes, ranks have the same sequences
_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_SCHEDULER = "scheduler.pt"  # transformers' name
_SWITCHES = (  # TrainingArguments that are refused
    "fp16", "fp16_full_eval", "fsdp", "torch_compile", "use_liger_kernel", "auto_find_batch_size", "save_on_each_node",
    "enable_jit_checkpoint", "eval_use_gather_object",
)  # fmt: skip


class ParallelTrainer(Trainer):
    """transformers' Trainer for the ranks of a mesh, each of which makes one and calls its methods.

    tp, cp: the numbers of tensor- and context-parallel ranks, along which the model is parallelized here. All other
    ranks that run are data-parallel. mesh: in their place, all ranks, with axes named among "dp", "cp" (or "ring" and
    "ulysses") and "tp", in this order; a model that has been given to `tpfuse.parallelize` before needs its mesh.
    zero_stage: 0 to 3, that of `tpfuse.ZeroOptimizer`, whose AdamW trains the model; stage 3 gathers the decoder's
    parameters layer by layer. All other arguments are those of Trainer.

    per_device_train_batch_size is that of a data-parallel rank. Callbacks run on every rank, where
    state.is_world_process_zero tells the first, whose decisions (to stop, save, evaluate, log) and metrics all follow.

    Raise ValueError, on every rank, for arguments that several ranks cannot keep exactly, for a checkpoint that cannot
    be read, and if a rank cannot write its files. Raise PeerTimeout if a rank does not come.
    """

    def __init__(
        self, model: Any, args: Any, *rest: Any, tp: int = 1, cp: int = 1, mesh: DeviceMesh | None = None,
        zero_stage: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module) or not isinstance(args, TrainingArguments):
            given = f"{shown(model)} and {shown(args)}"
            raise ValueError(f"ParallelTrainer got {given}: expected the model (no model_init) and TrainingArguments")
        check_release()
        device = args.device.type  # it starts the process group, if nobody has
        mesh = _mesh(model, device, tp, cp) if mesh is None else _checked(mesh, tp, cp)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        self.mesh, self.zero_stage = mesh, zero_stage
        self._model_meshes = [mesh[name] for name in _MODEL_AXES if mesh is not None and name in names]
        data = mesh["dp"] if mesh is not None and "dp" in names else None
        self._data_group = None if data is None or data.size() == 1 else data.get_group()
        self._data_rank, self._data_ranks = rank_and_size(self._data_group)
        self._zero: ZeroOptimizer  # `create_optimizer` makes it
        model.__dict__["trained_by_all_ranks"] = True  # plain trainers refuse parallelized models without it
        try:
            with self._agreed("ParallelTrainer"):
                super().__init__(model, args, *rest, **options)
                self._refuse()
        finally:
            del model.__dict__["trained_by_all_ranks"]
        self.accelerator.dataloader_config.dispatch_batches = False
        # Trainer's mark of models that place themselves: it wraps them in nothing, and all ranks save them.
        self.is_distributed_loading_by_transformers = True
        if "replacements" not in model.__dict__ and mesh is not None:
            if any(each.size() > 1 for each in self._model_meshes):
                parallelize(model, mesh)
            else:
                offer_save_pretrained(model, mesh)

    @contextmanager
    def _agreed(self, what: str) -> Iterator[None]:
        """Run the block on all ranks; an error on one of them is raised on all, ValueError for a damaged checkpoint."""
        with agreement(what, default_group()):
            try:
                yield
            except CheckpointError as error:
                raise ValueError(f"{what}: the checkpoint is damaged: {error}") from None

    def _refuse(self) -> None:
        """Raise ValueError for what ParallelTrainer does not keep exactly."""
        args, accelerator, spread = self.args, self.accelerator, self._data_ranks > 1
        optim = getattr(args.optim, "value", args.optim)
        config: Any = args.accelerator_config
        inner = outermost(cast(nn.Module, self.model))
        wrong = {name: bool(getattr(args, name)) for name in _SWITCHES} | {
            "optimizers": self.optimizer is not None or self.optimizer_cls_and_kwargs is not None,
            f"optim={optim!r}": optim not in ("adamw_torch", "adamw_torch_fused"),
            "an FSDP plugin": self.is_fsdp_enabled,
            "deepspeed": self.is_deepspeed_enabled,
            "parallelism_config": accelerator.parallelism_config is not None,
            "a model of transformers' own tp_plan": self.is_distributed_loading_by_transformers,
            "neftune_noise_alpha": args.neftune_noise_alpha is not None,
            "average_tokens_across_devices=False": not args.average_tokens_across_devices,
            "split_batches": config.split_batches,
            "dispatch_batches": bool(config.dispatch_batches),
            "even_batches=False": not config.even_batches,
            "load_best_model_at_end with save_only_model": args.load_best_model_at_end and args.save_only_model,
            f"train_sampling_strategy={args.train_sampling_strategy!r} over data-parallel ranks": spread
            and args.train_sampling_strategy not in ("random", "sequential"),
            "a loss other than that of causal language models over data-parallel ranks": spread
            and not (inner is not None and takes_labels(inner))
            and self.compute_loss_func is None,
            "output_router_logits over data-parallel ranks": spread
            and getattr(getattr(inner, "config", None), "output_router_logits", False),
        }
        found = [name for name, given in wrong.items() if given]
        if found:
            raise ValueError(f"ParallelTrainer does not support {', '.join(found)}: leave it out")
        ranks = 1 if self.mesh is None else self.mesh.size()
        if not args.world_size == ranks == max(ranks, int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(
                f"accelerate sees {args.world_size} processes, and the mesh has {ranks} ranks: start the program by"
                " torchrun with LOCAL_RANK, RANK and WORLD_SIZE in its environment, on CPUs with use_cpu=True"
            )

    # Batches: those of a data-parallel rank, and the loss over the labels of all.

    @contextmanager
    def _as_data_parallel(self) -> Iterator[None]:
        """Let transformers and accelerate take the data-parallel ranks for all processes in the block."""
        states: list[Any] = [self.args.distributed_state, self.accelerator.state]
        whole = [(state.num_processes, state.process_index) for state in states]
        for state in states:
            state.num_processes, state.process_index = self._data_ranks, self._data_rank
        try:
            yield
        finally:
            for state, numbers in zip(states, whole, strict=True):
                state.num_processes, state.process_index = numbers

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        repeats = self._data_ranks > 1 and not self.args.dataloader_drop_last
        if repeats and isinstance(dataset, torch.utils.data.IterableDataset):
            raise ValueError(
                "accelerate would repeat samples of an IterableDataset to fill the last batches of data-parallel ranks:"
                " expected a data set with a length, or dataloader_drop_last=True"
            )
        with self._as_data_parallel():
            return super()._get_dataloader(dataset, *args, **kwargs)

    def get_tp_size(self) -> int:
        """Return the number of ranks that have the same sequences, by which Trainer divides the processes."""
        return int(self.args.world_size) // self._data_ranks

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return (the micro-batches of a step, the number of labels of all ranks)."""
        drawn = islice(epoch_iterator, num_batches)
        batches = [self._without_repeated(batch, self._train_batch_size) for batch in drawn]
        self._compare(batches, device)
        return batches, self._get_num_items_in_batch(batches, device)

    def _without_repeated(self, batch: Any, rows: int) -> Any:
        """Return the batch of `rows` samples without the labels of those that accelerate has repeated.

        It fills the last batches of an epoch with the first samples, so that all ranks have equally many.
        """
        state = self.accelerator.gradient_state
        if self._data_ranks == 1 or self.args.dataloader_drop_last or not state.end_of_dataloader:
            return batch
        left = len(state.active_dataloader.dataset) % (rows * self._data_ranks)
        own = max(0, left - rows * self._data_rank)
        if not left:
            return batch
        labels = [name for name in (*self.label_names, "shift_labels") if isinstance(batch.get(name), Tensor)]
        if not labels:
            raise ValueError(
                f"the last {left} samples do not fill the batches of {self._data_ranks} data-parallel ranks, and"
                " without labels none can be left out: expected dataloader_drop_last=True"
            )
        masked = {name: batch[name].clone() for name in labels}
        for each in masked.values():
            each[own:] = -100
        return {**batch, **masked}

    def _compare(self, batches: list[Any], device: torch.device) -> None:
        """Raise ValueError on all ranks if some have fewer batches, or ranks of one model have others. Collective."""
        if self.mesh is None:
            return
        counts = collectives.all_gather(torch.tensor([len(batches)], device=device), default_group()).tolist()
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks have {counts} micro-batches in step {self.state.global_step + 1}: expected as many on each"
            )
        inputs = {f"{name} of micro-batch {i}": x for i, batch in enumerate(batches) for name, x in batch.items()}
        groups = [group for mesh in self._model_meshes for group in groups_of(mesh)]
        compare_inputs(f"step {self.state.global_step + 1}", inputs, groups, device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of a batch, of which each rank of a model does a part."""
        return super().floating_point_ops(inputs) // self.get_tp_size()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    # Steps.

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the ZeroOptimizer, which is made in the first call."""
        if self.optimizer is not None:
            return self.optimizer
        args, model = self.args, self.model
        assert isinstance(model, nn.Module)
        theirs = set(self.get_decay_parameter_names(model))
        for name, parameter in model.named_parameters():
            if args.weight_decay and parameter.requires_grad and decays(name, parameter) != (name in theirs):
                raise ValueError(
                    f"weight_decay={args.weight_decay}: Trainer {'has' if name in theirs else 'has none'} for {name},"
                    " and ZeroOptimizer has it for matrices alone: expected weight_decay=0"
                )
        kind = type(model).__name__
        self._zero = self.optimizer = ZeroOptimizer(
            model,
            self.mesh,
            stage=self.zero_stage,
            units=decoder_layers(model) if self.zero_stage == 3 and self.mesh is not None else (),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        # By its class's name, which fully_shard changes, Trainer knows that label smoothing shifts a model's labels.
        type(model).__name__ = kind
        return self._zero

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._zero.zero_grad()
        return prepared

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: the engine has made them equal, and sums their gradients."""

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Do nothing: `training_step` tells the engine which micro-batch is the last."""
        yield

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a micro-batch, after its backward pass."""
        zero = self._zero
        if not zero.engine.accumulating:
            zero.zero_grad()
        with nullcontext() if self.accelerator.sync_gradients else zero.no_sync():
            return super().training_step(model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._zero.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._zero.clip_grad_norm_(math.inf) if grad_norm is None else grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._follow_first_rank()
        acts = self.control.should_log or self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if acts:
            self._follow_first_rank()  # callbacks have seen logs, metrics or a checkpoint

    def _follow_first_rank(self) -> None:
        """Decide on every rank as the callbacks of the first one have. Collective."""
        own = [float(getattr(self.control, name)) * self.is_world_process_zero() for name in _DECISIONS]
        decided = collectives.all_reduce(torch.tensor(own, device=self.args.device), default_group()).tolist()
        for name, decision in zip(_DECISIONS, decided, strict=True):
            setattr(self.control, name, bool(decision))

    # Evaluation.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Return what Trainer's returns of the samples of all data-parallel ranks, with the first rank's metrics."""
        self.gather_function = self._gather_rows
        output = super().evaluation_loop(*args, **kwargs)
        return output._replace(metrics=exchange(output.metrics, default_group(), op="metrics")[0])

    def _gather_rows(self, data: Any) -> Any:
        """Return the rows of the tensors on all data-parallel ranks, without those of repeated samples."""
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return tree_map(lambda x: collectives.all_gather(x if x.ndim else x[None], self._data_group)[:rows], data)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return (loss, logits, labels) of this rank's batch; the loss is that of the batches of all ranks."""
        if any(inputs.get(name) is not None for name in self.label_names):
            inputs = self._without_repeated(inputs, self.args.eval_batch_size)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            loss = collectives.all_reduce(loss, self._data_group) / self._data_ranks
        return loss, logits, labels

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self._agreed("saving a checkpoint"):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or self.args.output_dir
        with self._agreed(f"saving the model in {folder}"):
            super()._save(folder, state_dict)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the whole weights, and push them from the first rank. All ranks call this."""
        with self._agreed("push_to_hub"):
            return super().push_to_hub(*args, **kwargs)

    def _shards(self) -> dict[str, list[Shard]]:
        """Return this rank's trained parameters or masters, their moments, and the persistent buffers."""
        shards: dict[str, list[Shard]] = {}
        for piece in self._zero._adamw.rectangles():
            shard = Shard(piece.shape, piece.slices, piece.tensor, piece.is_owner)
            shards.setdefault(f"{piece.kind}.{piece.name}", []).append(shard)
        model = cast(nn.Module, self.model)
        for name, buffer in model.named_buffers():
            if is_persistent(model, name):
                slices = tuple((0, size) for size in buffer.shape)
                shards[f"buffer.{name}"] = [Shard(tuple(buffer.shape), slices, buffer, self.is_world_process_zero())]
        return shards

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        zero, folder, first = self._zero, Path(output_dir), self.is_world_process_zero()
        with self._agreed(f"saving in {folder}"):
            if first and (folder / "optimizer").exists():  # of an earlier run with this output_dir
                shutil.rmtree(folder / "optimizer")
            if not folder.is_dir():
                raise ValueError(f"{folder} is not here: expected an output_dir on a disk that all ranks share")
        state = {name: x for name, x in zero.state_dict().items() if name in ("param_groups", "updates")}
        problems: list[str] = []
        saved = save(
            folder / "optimizer", self.state.global_step, self._shards(), state,
            keep=1, group=default_group(), warn=problems.append,
        )  # fmt: skip
        zero._adamw.release()
        with self._agreed(f"saving in {folder}"):
            if saved is None and first:
                raise OSError(problems[0])
            if first:
                torch.save(cast(Any, self.lr_scheduler).state_dict(), folder / _SCHEDULER)

    def _saved(self, checkpoint: str | os.PathLike[str]) -> Checkpoint:
        """Return the state of the optimizer in a checkpoint. Raise ValueError if there is none."""
        folders = list(Path(checkpoint, "optimizer").glob("step-*"))
        if len(folders) != 1:
            raise ValueError(
                f"{checkpoint} has no whole optimizer state of ParallelTrainer in its folder optimizer: expected"
                " another checkpoint, or a new run from its weights"
            )
        return Checkpoint(folders[0])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that there is a checkpoint; the parameters are read with the optimizer's state."""
        with self._agreed(f"resuming from {resume_from_checkpoint}"):
            self._saved(resume_from_checkpoint)
            trained = [parameter.requires_grad for parameter in cast(nn.Module, self.model).parameters()]
            if not all(trained) and not hasattr(self.model, "peft_config"):
                raise ValueError(
                    f"resuming from {resume_from_checkpoint}: the model has frozen parameters, which ParallelTrainer"
                    " does not read: expected adapters of PEFT, or a new run from its weights"
                )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        zero = self._zero
        state = self._load_shards(checkpoint, ("",))
        for group, saved in zip(zero.param_groups, state["param_groups"], strict=True):
            group.update({**saved, "betas": tuple(saved["betas"])})
        zero._adamw.updates = int(state["updates"])
        with self._agreed(f"resuming from {checkpoint}"):
            scheduler: Any = torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
        cast(Any, self.lr_scheduler).load_state_dict(scheduler)

    def _load_shards(self, checkpoint: str, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """Fill the tensors whose names begin so from a checkpoint, in any layout; return its other state."""
        with self._agreed(f"reading {checkpoint}"):
            saved = self._saved(checkpoint)
            saved.load({name: held for name, held in self._shards().items() if name.startswith(prefixes)})
        self._zero._adamw.publish()
        return cast(dict[str, Any], saved.state)

    def _load_best_model(self) -> None:
        self._load_shards(cast(str, self.state.best_model_checkpoint), ("model.", "buffer."))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random state of each data-parallel rank, by the first rank of its model."""
        with self._agreed(f"saving in {output_dir}"), self._as_data_parallel():
            if not any(mesh.get_local_rank() for mesh in self._model_meshes):
                super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._agreed(f"resuming from {checkpoint}"), self._as_data_parallel():
            super()._load_rng_state(checkpoint)
        for mesh in self._model_meshes:  # a file has the states of the devices of one rank alone
            share_generators(groups_of(mesh), mesh.device_type)


def _mesh(model: nn.Module, device: str, tp: int, cp: int) -> DeviceMesh | None:
    """Return the mesh of all ranks, as many models of tp x cp ranks as there are; None for one rank."""
    _, world = rank_and_size(default_group())
    if world > 1 and "replacements" in model.__dict__:
        raise ValueError("ParallelTrainer: the model is parallelized: expected mesh=, that of tpfuse.parallelize")
    if not all(isinstance(size, int) and size > 0 for size in (tp, cp)) or world % (tp * cp):
        raise ValueError(
            f"ParallelTrainer: tp={shown(tp)}, cp={shown(cp)} on {world} ranks: expected whole numbers whose product"
            " divides the ranks that torchrun starts (--nproc-per-node)"
        )
    return build_mesh(device, dp=world // (tp * cp), tp=tp, cp=cp) if world > 1 else None


def _checked(mesh: DeviceMesh, tp: int, cp: int) -> DeviceMesh:
    """Return the mesh. Raise ValueError unless it alone has all ranks, along axes that ParallelTrainer knows."""
    if (tp, cp) != (1, 1):
        raise ValueError(f"ParallelTrainer: tp={shown(tp)}, cp={shown(cp)} and a mesh: expected one of the two")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"ParallelTrainer: mesh is {shown(mesh)}: expected a DeviceMesh, or tp and cp in its place")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= {"dp", *_MODEL_AXES}:
        raise ValueError(f"ParallelTrainer: mesh has the axes {names}: expected names among dp, cp, ring, ulysses, tp")
    if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ValueError(f"ParallelTrainer: mesh has {mesh.size()} of {dist.get_world_size()} ranks: expected all")
    return mesh
