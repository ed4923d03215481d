"""ZeRO as a torch.optim.Optimizer, for training loops that were written for PyTorch's DDP and AdamW.

    optimizer = ZeroOptimizer(model, stage=2, lr=1e-3)    # was: model = DDP(model); torch.optim.AdamW(…, lr=1e-3)
    …
    loss.backward()
    optimizer.clip_grad_norm_(1.0)                        # was: clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()

As under DDP, each rank computes the mean loss of its own tokens, and the gradient is the mean over the data-parallel
ranks. If ranks or micro-batches have different numbers of labels, compute sums, and give the numbers to `divide_by`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tpfuse.choices import MomentDtype
from tpfuse.comm import collectives
from tpfuse.comm.errors import Disagreement
from tpfuse.comm.mesh import AXES, flat_group, rank_and_size, shown
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.compression import PowerSGDCompression
from tpfuse.zero.engine import StepState
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.muon import MuonOptions
from tpfuse.zero.muon_matrices import hidden_matrices
from tpfuse.zero.sharding import adamw, shard

_SHARED = ("lr", "betas", "eps")  # hyperparameters that must be equal in both of AdamW's groups of parameters


class ZeroOptimizer(Optimizer):
    """AdamW, or Muon and AdamW, for the parameters of `model`, with its state in shards on the data-parallel ranks.

    model, mesh, stage, sharding: the arguments of `tpfuse.zero.shard`, which takes a model of any parallelism; the
    engine that it returns is `engine`. lr, betas, eps, weight_decay: as in torch.optim.AdamW. state_dtype: as in
    `tpfuse.zero.adamw`.

    algorithm: with "muon", Muon updates the matrices of the model's blocks (`tpfuse.zero.hidden_matrices`), or those
    that the argument `matrices` of `tpfuse.zero.shard` names, and AdamW all other parameters. muon: its options, whose
    learning rate and weight decay are by default those of AdamW.

    param_groups: the first has the parameters with weight decay, the second biases and norms, whose weight decay is 0
    (`tpfuse.zero.bucket_layout.decays`). `step` reads them each time, so that torch's schedulers work; lr, betas
    and eps must be the same in both. With Muon there is a third group, of its matrices, with the fields of
    `MuonOptions` and a learning rate and a weight decay of its own. `state` stays empty: a rank's state is in flat
    shards, which `state_dict` returns.

    Every rank must make its optimizer and call its methods in the same order. If a rank does not, ranks that share
    memory raise Disagreement at once, others raise PeerTimeout; after that, and after an error in a backward pass, call
    `engine.abandon()` and `zero_grad()` on every rank. torch.amp.GradScaler is refused: bfloat16 needs no scaler.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        *,
        stage: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        algorithm: Literal["adamw", "muon"] = "adamw",
        muon: MuonOptions | None = None,
        state_dtype: MomentDtype = "float32",
        **sharding: Any,
    ) -> None:
        if algorithm not in ("adamw", "muon"):
            raise ValueError(f'ZeroOptimizer: algorithm is {shown(algorithm)}: expected "adamw" or "muon"')
        if sharding.get("virtual_ranks"):
            raise ValueError(
                "ZeroOptimizer does not know which micro-batches virtual ranks have: use tpfuse.zero.shard and adamw"
            )
        if algorithm == "adamw" and (muon is not None or "matrices" in sharding):
            raise ValueError('ZeroOptimizer: muon and matrices are for algorithm="muon"')
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"ZeroOptimizer: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}: expected betas from 0"
                " to below 1, and no number below 0"
            )
        if algorithm == "muon" and "matrices" not in sharding and isinstance(model, nn.Module):
            pipeline = isinstance(mesh, DeviceMesh) and "pp" in (mesh.mesh_dim_names or ())
            sharding["matrices"] = hidden_matrices(model, flat_group(mesh, *AXES) if pipeline else None)
        self.engine = engine = shard(model, mesh, stage=stage, **sharding)
        kept: dict[str, Any] = {"muon": muon, "state_dtype": state_dtype}
        self._adamw = adamw(engine, betas=betas, eps=eps, weight_decay=weight_decay, **kept)
        if isinstance(engine, FullySharded):
            trained = {member.name: member.sharded for member in engine.members}
        else:
            trained = engine.trained
        names = {matrix.name for matrix in engine.matrices}
        decayed = {name: decays(name, parameter) for name, parameter in trained.items() if name not in names}
        groups: list[dict[str, Any]] = [
            {"params": [trained[name] for name in decayed if decayed[name]]},
            {"params": [trained[name] for name in decayed if not decayed[name]], "weight_decay": 0.0},
        ]
        if names:
            options = {name: value for name, value in asdict(self._adamw.muon).items() if value is not None}
            groups.append({"params": [trained[name] for name in trained if name in names], **options})
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._clip: float | None = None  # the factor of the mean gradient in the next update; None before it is summed
        self._divisor = 1.0  # of the summed gradient in the next update
        self._labels: Tensor | None = None  # what `divide_by` was given in this step
        self._counting: bool | None = None  # whether every step calls `divide_by`; None before the first update
        self._device = engine.device
        engine.start(last=True)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise ValueError. torch.amp.GradScaler reads this first: its ranks would skip updates without agreement."""
        raise ValueError(
            "ZeroOptimizer does not work with torch.amp.GradScaler: train in bfloat16, which needs no scaler"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, except in the constructor: the parameters of an engine and their groups do not change."""
        if len(self.param_groups) == 2 + bool(self.engine.matrices):
            raise ValueError(
                "ZeroOptimizer has the parameters of its engine: for a changed model, make a new engine and optimizer"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Raise ValueError: a copy would lack the engine."""
        raise ValueError(
            "ZeroOptimizer cannot be copied or pickled, since its engine has the model's memory: save state_dict(), or"
            " copy the model and make a new optimizer for the copy"
        )

    def _refuse_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ValueError for a hook that would not run."""
        raise ValueError("ZeroOptimizer runs no hooks around state_dict and load_state_dict: change their results")

    register_state_dict_pre_hook = register_state_dict_post_hook = _refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refuse_hook

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, and discard gradients that have arrived since the last update. set_to_none has no effect.

        To skip an update, call this instead of `step` on every rank, also on a rank without gradients. Without an
        update since the last call the ranks reduce their gradients first, so call it once per step. Raise ValueError
        if the model's parameters are not those that the engine took.
        """
        self._clip = self._labels = None
        with _explained():
            self.engine.discard()
            self.engine.start(last=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes in this block on each rank; the next one after it sums them.

        Forward passes belong in the block too. Passes outside of such blocks sum their gradients over the ranks and add
        them to those of the step; below stage 2, and if gradients accumulate whole (`tpfuse.zero.shard`), a step has
        one, after the others. Raise ValueError at another time.
        """
        if self.engine.state is not StepState.REDUCING or not self.engine.unused:
            raise ValueError("no_sync() is for the backward passes between zero_grad() and the last one of a step")
        self.engine.start(last=False, local=True, again=True)
        try:
            yield
        finally:
            self.engine.start(last=True)

    def divide_by(self, labels: int | Tensor) -> None:
        """Divide the gradient of this step by the sum of `labels` over its micro-batches and over all ranks.

        labels: the number of labels whose losses this rank has summed in a micro-batch, 0 if there are none; a number
        or a tensor []. Without this method it is 1 on each rank: the gradient is the mean over ranks. Ranks that
        compute one loss together, those of tensor parallelism, of a context and of a pipeline, pass the same number,
        which counts once.

        Call it between `zero_grad()` and `clip_grad_norm_()` or `step()`, for each micro-batch, on every rank and in
        every step, or never. Raise ValueError at another time, for anything but one number, and with PowerSGD, whose
        remainders would be divided by the labels of a later step. The next `clip_grad_norm_()` or `step()` sums the
        numbers. It raises ValueError on every rank if this was not called on some rank, or if there is no label on any.
        """
        if isinstance(self.engine.compression, PowerSGDCompression):
            raise ValueError(
                "divide_by() with PowerSGD, whose remainders would be divided by the labels of a later step: divide the"
                " losses by the labels of the whole batch, or use Bf16Compression"
            )
        if self._counting is False:
            raise ValueError(
                "divide_by() after steps without it, whose losses were means: call it in every step, with 0 for a"
                " micro-batch without labels, or make a new optimizer"
            )
        if not self.engine.accumulating:
            raise ValueError("divide_by() comes between zero_grad() and clip_grad_norm_() or step()")
        number = torch.as_tensor(labels, dtype=torch.float64, device=self._device)
        if number.ndim:
            raise ValueError(f"divide_by() got a tensor of shape {tuple(number.shape)}: expected the number of labels")
        self._labels = number if self._labels is None else self._labels + number

    def _agree_on_divisor(self) -> float:
        """Return what the summed gradient is divided by. In the first step ranks agree on whether they count labels."""
        ranks = float(self.engine.data_ranks)
        if self._counting is False:
            return ranks
        world_group = self.engine.world_group
        _, world = rank_and_size(world_group)
        own = torch.zeros(2, dtype=torch.float64, device=self._device)  # the labels, and whether they were counted
        if self._labels is not None:
            own[0], own[1] = self._labels, 1.0
        labels, callers = map(float, collectives.all_reduce(own, world_group).tolist())
        if self._counting is None:
            self._counting = callers > 0
        if not self._counting:
            return ranks
        if callers < world:
            raise ValueError(
                f"divide_by() was called on {callers:.0f} of {world} ranks in this step: call it on every rank, with 0"
                " where there are no labels"
            )
        if not labels > 0:
            raise ValueError(
                f"divide_by() was given {labels:g} labels by all ranks together: skip such a step by zero_grad() on"
                " every rank"
            )
        return labels * ranks / world

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Make the next `step` scale the gradient so that its 2-norm is at most max_norm; return the norm before that.

        A second call in a step finds the gradient as the first one has scaled it. The norm, float64 [], is that of the
        whole gradient of all parameters, the same on every rank. Call this after the last backward pass of a step. If
        the gradient is not finite, the norm is not finite either. Raise ValueError if max_norm is negative or NaN.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_({max_norm}): expected a norm that is not negative")
        if self._clip is None:
            self.engine.finish()
            self._divisor, self._clip = self._agree_on_divisor(), 1.0
        norm = self.engine.norm() / self._divisor * self._clip
        factor = max_norm / (norm + 1e-6)
        self._clip *= 1.0 if factor > 1.0 or max_norm == math.inf else factor  # NaN stays NaN, as in torch's function
        return torch.tensor(norm, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with the mean gradient; afterwards every rank has the new ones.

        closure: a function that computes the loss and its backward pass; it is called first, and its loss is returned.
        Raise ValueError if `zero_grad()` was not called since the last step, and if the groups differ in lr, betas or
        eps.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decayed, rest, *matrices = self.param_groups
        differing = [name for name in _SHARED if decayed[name] != rest[name]]
        if differing or rest["weight_decay"]:
            name = differing[0] if differing else "weight_decay"
            raise ValueError(
                f"param_groups: {name} is {decayed[name]} and {rest[name]}: ZeroOptimizer has one lr, betas and eps for"
                " both groups, and no weight decay in the second"
            )
        adamw, clip = self._adamw, self._clip
        for group in matrices:
            given = {name: group[name] for name in asdict(adamw.muon)}
            adamw.muon = MuonOptions(**given | {"lr": float(group["lr"])})
        adamw.betas, adamw.eps, adamw.weight_decay = decayed["betas"], decayed["eps"], decayed["weight_decay"]
        with _explained():
            if clip is None:
                self.engine.finish(sums=False)
                self._divisor = self._agree_on_divisor()
            self._clip = self._labels = None
            adamw.step(float(decayed["lr"]), (1.0 if clip is None else clip) / self._divisor)
        return loss

    def _shards(self) -> dict[str, Tensor]:
        """Return this rank's moments and float32 masters by kind, parameter and slices of the whole tensor."""
        shards = {}
        for rectangle in self._adamw.rectangles():
            if (
                rectangle.kind == "model"
                and rectangle.tensor.dtype == self.engine.model.get_parameter(rectangle.name).dtype
            ):
                continue  # this is the parameter itself, which is in the model's state_dict
            ranges = ", ".join(f"{start}:{stop}" for start, stop in rectangle.slices)
            shards[f"{rectangle.kind}.{rectangle.name}[{ranges}]"] = rectangle.tensor
        return shards

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for `load_state_dict` on the same rank of the same layout; no communication.

        "state": moments, and float32 masters of half types, by the name and slices of their tensor. They are not
        copies: the next step changes them, so save or copy them before it. "param_groups": the groups without the
        parameters. "updates": the number of updates. "compression": PowerSGD's remainders and factors. Every rank must
        save its own file. The parameters are in the model's state_dict.
        """
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        compression = self.engine.compression
        return {
            "state": self._shards(),
            "param_groups": groups,
            "updates": self._adamw.updates,
            "compression": None if compression is None else compression.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` on this rank; no communication.

        Raise ValueError, before it changes anything, if this rank holds other rectangles: after a change of the number
        of ranks, the stage, the bucket size or the model.
        """
        if not {"state", "param_groups", "updates", "compression"} <= set(state_dict):
            raise ValueError(
                f"load_state_dict: the state has {sorted(map(str, state_dict))}: expected that of"
                " ZeroOptimizer.state_dict(); the state of another optimizer cannot be loaded"
            )
        here, there, saved = self._shards(), state_dict["state"], state_dict["param_groups"]
        if len(saved) != len(self.param_groups) or not isinstance(state_dict["updates"], int):
            raise ValueError(
                f"load_state_dict: the state has {len(saved)} param_groups and {shown(state_dict['updates'])} updates:"
                f" expected {len(self.param_groups)} groups and a number"
            )
        for name, x in here.items():
            if name not in there:
                continue
            found = there[name]
            if not isinstance(found, Tensor) or found.shape != x.shape:
                of = tuple(found.shape) if isinstance(found, Tensor) else shown(found)
                raise ValueError(f"load_state_dict: the state has {name} as {of}: expected a tensor {tuple(x.shape)}")
            if found.dtype != x.dtype:
                raise ValueError(
                    f"load_state_dict: the state has {name} in {found.dtype}, this optimizer in {x.dtype}: make"
                    " it with the state_dtype, and the model with the dtype, of the one that was saved"
                )
        if here.keys() != there.keys():
            lacking = next((name for name in here if name not in there), "nothing")
            other = next((name for name in there if name not in here), "nothing more")
            raise ValueError(
                f"load_state_dict: the state is of another layout, it has {other} and lacks {lacking}: load it on the"
                " rank that saved it, with the same number of ranks, stage, bucket size and model"
            )
        compression = self.engine.compression
        if compression is not None and state_dict["compression"] is not None:
            compression.load_state_dict(state_dict["compression"])
        for name, tensor in here.items():
            tensor.copy_(there[name])
        for group, options in zip(self.param_groups, saved, strict=True):
            group.update(options)
        self._adamw.updates = state_dict["updates"]
        self._adamw.release()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Disagreement as error:
        raise Disagreement(
            f"ZeroOptimizer: every rank must call step(), or every rank must skip it by zero_grad(): {error}"
        ) from error
