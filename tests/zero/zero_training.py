"""Models that ZeRO trains on any layout in tests, and the same training by torch's AdamW and Muon on one rank."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from math import inf, nan
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from tests.support.meshes import mesh_from, mesh_of
from tpfuse.comm.layout import gather_whole, local_slices, local_tensor
from tpfuse.models.gpt import GPT, GPTConfig
from tpfuse.models.parallelize_gpt import GPTOptions, parallelize_gpt
from tpfuse.parallel.initialize import initialize
from tpfuse.testing.inputs import integers
from tpfuse.zero import MuonOptions, adamw, hidden_matrices, shard
from tpfuse.zero.bucket_layout import decays
from tpfuse.zero.bucket_updater import BucketUpdater
from tpfuse.zero.fully_sharded import FullySharded
from tpfuse.zero.gradient_buckets import GradientBuckets
from tpfuse.zero.unit_updater import UnitUpdater

# A vocabulary of 61 rows, which no world divides; some first dimensions are smaller than a world.
CONFIG = GPTConfig(vocab_size=61, n_positions=7, n_embd=20, n_layer=2, n_head=4, dropout=0.2)
STEPS, BATCH, LR, CLIP = 7, 12, 1e-2, 0.5
SPARED = 2 if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else BATCH
# The gradients of keys' biases are rounding errors only; a smaller eps would make their updates as large as all others.
ADAMW: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 1e-1}


class ToyExperts(nn.Module):
    """Stacked experts, each of which computes all tokens."""

    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,...ei->...o", self.down_proj, torch.einsum("eoi,...i->...eo", self.up_proj, x).tanh())


class ToyBlock(nn.Module):
    """A block of odd sizes; `spare` is used in even steps only, and there for the rows of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.spare, self.experts = nn.Linear(5, 5), ToyExperts()

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) + self.experts(x)
        wanted = (rows < SPARED) & (step % 2 == 0)
        if wanted.any():
            x = x + wanted.view(-1, 1, 1) * self.spare(x)
        return x


class Toy(nn.Module):
    """Tied embeddings and a frozen parameter; parameters of one and three rows; gradients in some steps, or in none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(3))
        self.head = nn.Linear(5, 13)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.mixing = nn.Parameter(torch.randn(3, 5))
        self.seldom = nn.Parameter(torch.randn(1, 5))
        self.never, self.one = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.embed(ids) * self.one + self.mixing.sin().sum(0) * self.frozen.mean(0)
        if step % 3 == 2:
            x = x + self.seldom
        for block in self.blocks:
            x = block(x, rows, step)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum")


Result = tuple[dict[str, Tensor], list[float]]  # weights and norms of gradients


@dataclass
class Case:
    """A model, its units, and a function that returns the loss of some rows in a step."""

    model: nn.Module
    units: list[nn.Module]
    loss: Callable[[Tensor, int], Tensor]


def ids_of(vocabulary: int) -> Tensor:
    return integers(1, BATCH, CONFIG.n_positions, low=0, high=vocabulary - 1, dtype=torch.int64)


def toy(dtype: torch.dtype = torch.float64, **_: Any) -> Case:
    torch.manual_seed(3)
    model, ids = Toy().to(dtype), ids_of(13)
    return Case(model, list(model.blocks), lambda rows, step: model(ids[rows], rows, step) / ids.numel())


def gpt(dtype: torch.dtype = torch.float64, mesh: DeviceMesh | None = None, **options: Any) -> Case:
    model, ids = parallelize_gpt(GPT(CONFIG, dtype=dtype), mesh, GPTOptions(**options)), ids_of(CONFIG.vocab_size)
    initialize(model, 1)

    def loss(rows: Tensor, step: int) -> Tensor:
        weight = 1 / ids.numel()
        options = {"loss_weight": weight, "dropout_at": (3, step), "sequences_B": rows}
        total: Tensor = model(ids[rows], ids[rows].roll(-1, 1), **options)
        return total

    return Case(model, list(model.transformer.h), loss)


CASES = {"toy": toy, "gpt": gpt}


def torchs_adamw(parameters: Mapping[str, Tensor], lr: float = LR, **options: Any) -> torch.optim.AdamW:
    """Return torch's AdamW, which decays the parameters that ZeRO decays; options replace those of `ADAMW`."""
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in parameters.items() if decays(name, p) == decay]} for decay in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(groups, lr=lr, **{**ADAMW, **options})


class TorchsMuon:
    """torch.optim.Muon for the matrices of these parameters, each by itself, also where one packs or stacks several.

    Newton-Schulz computes float64 parameters in float64, and not in bfloat16 as torch does.
    """

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        self.parts = [(p, part) for p in parameters for part in ([()] if p.ndim == 2 else range(len(p)))]
        self.views = [nn.Parameter(p.detach()[part]) for p, part in self.parts]
        self.muon = torch.optim.Muon(self.views, **options)

    def step(self) -> None:
        for view, (parameter, part) in zip(self.views, self.parts, strict=True):
            assert parameter.grad is not None
            view.grad = parameter.grad[part]
        own = torch.Tensor.bfloat16
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.clone() if x.dtype is torch.float64 else own(x)):
            self.muon.step()


def matrices_and_others(trained: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the matrices of the blocks of these models, which Muon updates, and all other parameters."""
    found = {name: p for name, p in trained.items() if p.ndim > 1 and (".h." in name or name.startswith("blocks."))}
    return found, {name: p for name, p in trained.items() if name not in found}


@functools.cache
def plain(name: str, clip: float = CLIP, dtype: torch.dtype = torch.float64, muon: MuonOptions | None = None) -> Result:
    """Return the weights after STEPS steps of torch's AdamW on one rank, and the norms before clipping.

    muon: the options of torch's Muon, if it updates the matrices.
    """
    case = CASES[name](dtype)
    trained = {name: p for name, p in case.model.named_parameters() if p.requires_grad}
    matrices, others = matrices_and_others(trained) if muon else ({}, trained)
    optimizers: list[Any] = [torchs_adamw(others)]
    norms = []
    if muon is not None:
        options = {name: x for name, x in asdict(muon).items() if x is not None}
        optimizers.append(TorchsMuon(matrices.values(), **{"lr": LR, "weight_decay": ADAMW["weight_decay"], **options}))
    for step in range(STEPS):
        case.loss(torch.arange(BATCH), step).backward()  # type: ignore[no-untyped-call]
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), clip)))
        for optimizer in optimizers:
            optimizer.step()
        case.model.zero_grad()
    return {name: p.detach() for name, p in case.model.named_parameters()}, norms


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks, tp x dp x cp, and of copies of the model among dp x cp at stage 3."""

    tp: int = 1
    dp: int = 1
    cp: int = 1
    replicas: int = 1
    stage: int = 3

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.dp * self.cp


Engine = GradientBuckets | FullySharded
Optimizer = BucketUpdater | UnitUpdater


def engine_of(
    name: str,
    layout: Layout,
    dtype: torch.dtype = torch.float64,
    group: dist.ProcessGroup | None = None,
    muon: MuonOptions | None = None,
    **options: Any,
) -> tuple[Case, Any]:
    """Return a case and the engine of its model, with options of both. group: replaces all groups of the mesh.

    muon: given if Muon updates the matrices.
    """
    mesh = mesh_of(layout.dp, layout.tp, layout.cp) if group is None else mesh_from(group)
    of_engine = [key for key in ("reduce_dtype", "bucket_bytes", "accumulate", "offload") if key in options]
    kept: dict[str, Any] = {key: options.pop(key) for key in of_engine}
    if name == "gpt":
        options |= {"mesh": mesh}
    case = CASES[name](dtype, **options)
    if muon is not None:
        kept["matrices"] = hidden_matrices(case.model)
    return case, shard(case.model, mesh, stage=layout.stage, units=case.units, replicas=layout.replicas, **kept)


def micro_batches(layout: Layout, accumulation: int) -> tuple[Tensor, ...]:
    """Return the rows of each micro-batch of this rank."""
    dp_rank = mesh_of(layout.dp, layout.tp, layout.cp).get_local_rank("dp")
    return torch.arange(BATCH).chunk(layout.dp)[dp_rank].tensor_split(accumulation)


def train_step(
    case: Case, engine: Any, optimizer: Optimizer, batches: tuple[Tensor, ...], at: int, clip: float = CLIP
) -> float:
    """Run a step and return the norm of the gradients before clipping; nan without clipping, which needs no norm."""
    for index, rows in enumerate(batches):
        engine.start(last=index == len(batches) - 1)
        case.loss(rows, at).backward()  # type: ignore[no-untyped-call]
    engine.finish(sums=clip != inf)
    if clip == inf:
        optimizer.step(LR)
        return nan
    norm: float = engine.norm()
    optimizer.step(LR, min(1.0, clip / (norm + 1e-6)))
    return norm


def whole(engine: Engine) -> dict[str, Tensor]:
    """Return all parameters, whole; check that this rank's shard has the elements that `local_slices` gives."""
    weights = {}
    for name, parameter in engine.model.named_parameters():
        weights[name] = gather_whole(parameter).clone()
        part = weights[name][tuple(slice(*each) for each in local_slices(parameter))]
        assert torch.equal(part, local_tensor(parameter)), name
    return weights


def run(
    name: str, layout: Layout, accumulation: int, clip: float = CLIP, muon: MuonOptions | None = None, **options: Any
) -> tuple[Result, int]:
    """Train on this rank of a pool. Return weights and norms, and the bytes that this rank received in the last step.

    A forward pass without gradients, as of an evaluation, comes between two steps.
    """
    case, engine = engine_of(name, layout, muon=muon, **options)
    optimizer, norms, received = adamw(engine, **ADAMW, muon=muon), [], 0
    batches = micro_batches(layout, accumulation)
    for step in range(STEPS):
        received = engine.traffic.received
        norms.append(train_step(case, engine, optimizer, batches, step, clip))
        if step == 4:
            with torch.no_grad():
                case.loss(batches[0], step)
    assert optimizer.updates == STEPS
    received, weights = engine.traffic.received - received, whole(engine)
    if isinstance(engine, GradientBuckets):
        engine.close()
    return (weights, norms), received


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless all weights are the same, up to this part of the largest of each."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= tolerance * weight.abs().max(), name
