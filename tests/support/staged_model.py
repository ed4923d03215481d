"""The stages of a pipeline without a pipeline: many passes of several stages in one step of an engine, in tests.

A model in one process gives the input of each stage and the gradient of its output. It is also what sums, norms and
weights are compared with.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tests.support.meshes import mesh_of
from tests.support.zero_training import Engine, torchs_adamw
from tpfuse.comm import collectives
from tpfuse.comm.layout import copy_whole_, local_slices
from tpfuse.comm.mesh import shard_range
from tpfuse.layers.column_parallel_linear import ColumnParallelLinear
from tpfuse.layers.row_parallel_linear import RowParallelLinear
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.parallel.pipeline.shared_parameters import SharedParameters
from tpfuse.testing.inputs import integers
from tpfuse.zero import shard
from tpfuse.zero.fully_sharded import FullySharded

VOCABULARY, WIDTH, TOKENS, BLOCKS = 14, 6, 4, 4
TIED = "embed.weight"


class Scale(nn.Module):
    """A norm's weight on a shard of the tokens: each tensor-parallel rank has the gradient of its tokens."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        self.tp, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.mesh, self.sum_gradients = mesh, self.tp > 1

    def forward(self, x: Tensor) -> Tensor:
        own = (torch.arange(TOKENS) % self.tp == self.rank).view(-1, 1)
        weight: Tensor = self.weight
        if self.mesh is not None and self.sum_gradients:  # no engine has taken this over
            weight, group = weight * 1, self.mesh.get_group()
            if weight.requires_grad:
                weight.register_hook(lambda gradient: collectives.all_reduce(gradient, group))  # type: ignore[no-untyped-call]
        return x * torch.where(own, weight, weight.detach())


class Block(nn.Module):
    """`seldom` is used in even steps only, and there for the first row of the batch; `never` is not used."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        options: dict[str, Any] = {"device_mesh": mesh, "dtype": torch.float64}
        self.norm, self.up = Scale(mesh), ColumnParallelLinear(WIDTH, 10, **options)
        self.down = RowParallelLinear(10, WIDTH, **options)
        self.seldom, self.never = (nn.Parameter(torch.rand(WIDTH, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        wanted = (rows == 0) & (step % 2 == 0)
        return x + wanted.view(-1, 1, 1) * self.seldom * x if wanted.any() else x


class Staged(nn.Module):
    """The `stages` of a model of `count` stages; the head is tied to the embedding."""

    def __init__(self, stages: Collection[int], count: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"device_mesh": mesh, "dtype": torch.float64}
        self.count, first, last = count, 0 in stages, count - 1 in stages
        embed = VocabParallelEmbedding(VOCABULARY, WIDTH, **options)
        if first:
            self.embed = embed
        present = [index * count // BLOCKS in stages for index in range(BLOCKS)]
        self.blocks = nn.ModuleList(Block(mesh) if here else nn.Identity() for here in present)
        if last:
            self.embed, self.head = embed, ColumnParallelLinear(WIDTH, VOCABULARY, bias=False, **options)
            self.head.weight = embed.weight

    def forward(self, x: Tensor, stage: int, rows: Tensor, step: int) -> Tensor:
        if stage == 0:
            x = self.embed(x)
        for block in self.blocks[stage * BLOCKS // self.count : (stage + 1) * BLOCKS // self.count]:
            x = block(x, rows, step)
        return self.head(x) if stage == self.count - 1 else x

    def parameters_of(self, stage: int) -> set[nn.Parameter]:
        """Return the parameters of a stage; the modules hold other ones while an engine has gathered them."""
        blocks = self.blocks[stage * BLOCKS // self.count : (stage + 1) * BLOCKS // self.count]
        ends = [self.embed] if stage in (0, self.count - 1) else []
        return {parameter for module in (*blocks, *ends) for parameter in module.parameters()}


@dataclass(frozen=True)
class Layout:
    """Stages by pipeline rank, and the numbers of data- and tensor-parallel ranks."""

    stages: tuple[tuple[int, ...], ...] = ((0,), (1,))
    dp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return len(self.stages) * self.dp * self.tp

    @property
    def count(self) -> int:
        return sum(map(len, self.stages))

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of(self.dp, self.tp, pp=len(self.stages))


INTERLEAVED = ((0, 2), (1, 3))
V_SHAPE = ((0, 3), (1, 2))  # the first rank has the embedding twice
FOUR = ((0,), (1,), (2,), (3,))


def engine_of(model: Staged, layout: Layout, zero: int, **options: Any) -> Engine:
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    here = {0, layout.count - 1} & set(stages)
    apart = not any({0, layout.count - 1} <= set(each) for each in layout.stages)
    shared = SharedParameters(
        uses={TIED: 2} if len(here) == 2 else {},
        tied=[TIED] if here and apart else [],
        ends=(0, len(layout.stages) - 1) if apart else None,
    )
    units = [block for block in model.blocks if isinstance(block, Block)]
    return shard(model, mesh, stage=zero, units=units, shared=shared, bucket_bytes=200, **options)


def actions(stages: tuple[int, ...], count: int) -> Iterator[tuple[str, int, int]]:
    """Yield (pass, stage, micro-batch): forwards run two micro-batches ahead of backwards, weights one behind them."""
    for batch in range(count + 2):
        if batch < count:
            yield from (("forward", stage, batch) for stage in stages)
        if batch >= 2:
            yield from (("backward", stage, batch - 2) for stage in stages[::-1])
        if batch >= 3:
            yield from (("weight", stage, batch - 3) for stage in stages[::-1])
    yield from (("weight", stage, count - 1) for stage in stages[::-1])


class Passes:
    """The passes of one step on this rank. inputs, gradients: of each stage's input and output, for the rows given."""

    def __init__(self, model: Staged, split: bool) -> None:
        self.model, self.split = model, split
        self.alive: dict[tuple[int, int], Any] = {}

    def forward(self, key: tuple[int, int], x: Tensor, rows: Tensor, step: int) -> None:
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        self.alive[key] = x, self.model(x, key[0], rows, step)

    def backward(self, key: tuple[int, int], gradient: Tensor) -> None:
        x, out = self.alive[key]
        if not self.split:
            out.backward(gradient)
        elif key[0] == 0:  # there is no input gradient
            self.alive[key] = lambda: out.backward(gradient)
        else:
            leaves = ((p, getattr(p, "local_leaf", None)) for p in self.model.parameters())
            weights = [parameter if leaf is None else leaf.value for parameter, leaf in leaves]
            _, groups = stage_backward_input([out], [gradient], [x], iter(weights))
            self.alive[key] = lambda: self._weights(weights, groups)

    def weight(self, key: tuple[int, int]) -> None:
        if self.split:
            self.alive.pop(key)()

    @staticmethod
    def _weights(weights: list[Tensor], groups: list[dict[str, Any]]) -> None:
        stage_backward_weight(iter(weights), groups)  # type: ignore[arg-type]
        for weight in weights:
            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                hook(weight)


class Reference:
    """The whole model in one process, with torch's AdamW."""

    def __init__(self, layout: Layout, batches: int) -> None:
        torch.manual_seed(7)
        self.model, self.layout = Staged(range(layout.count), layout.count), layout
        self.named = dict(self.model.named_parameters())
        self.optimizer = torchs_adamw(self.named)
        self.rows = torch.arange(2 * batches * layout.dp)

    def step(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the gradients of a step; return the inputs of all stages, and the gradients of their outputs."""
        self.optimizer.zero_grad()
        inputs = [integers(step, len(self.rows), TOKENS, low=0, high=VOCABULARY - 1, dtype=torch.int64)]
        outputs: list[Tensor] = []
        for stage in range(self.layout.count):
            outputs.append(self.model(inputs[stage], stage, self.rows, step))
            outputs[-1].retain_grad()
            inputs.append(outputs[-1])
        loss = (outputs[-1].sin() / outputs[-1].numel()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return inputs, [output.grad for output in outputs if output.grad is not None]


def run_step(
    layout: Layout,
    engine: Engine,
    reference: Reference,
    split: bool,
    batches: int,
    step: int,
    after: Callable[[str, int, int], object] | None = None,
) -> None:
    """Run the passes of this rank's stages between start() and finish(); `after` is called after each."""
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    inputs, gradients = reference.step(step)
    gradients[-1] = gradients[-1][..., slice(*shard_range(VOCABULARY, mesh.get_local_rank("tp"), layout.tp))]
    rows_of = reference.rows.chunk(layout.dp)[mesh.get_local_rank("dp")].chunk(batches)
    assert isinstance(engine.model, Staged)
    passes = Passes(engine.model, split)
    engine.start(last=True, backwards=batches)
    for kind, stage, batch in actions(stages, batches):
        key, rows = (stage, batch), rows_of[batch]
        last = (kind, batch) == ("weight" if split else "backward", batches - 1)
        later = (engine.model.parameters_of(each) for each in stages[: stages.index(stage)])
        with engine.last_pass(engine.model.parameters_of(stage).difference(*later)) if last else nullcontext():
            if kind == "forward":
                passes.forward(key, inputs[stage][rows], rows, step)
            elif kind == "backward":
                passes.backward(key, gradients[stage][rows])
            else:
                passes.weight(key)
        if after is not None:
            after(kind, stage, batch)


def parts(engine: Engine, whole: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each parameter in this rank's shards, its summed gradient there, and that part of `whole`."""
    if isinstance(engine, FullySharded):
        for member in engine.members:
            here = tuple(slice(*each) for each in local_slices(member.sharded))
            yield member.name, member.gradient, whole[member.name][here]
        return
    for bucket in engine.buckets:
        for segment, part in bucket.layout.segments_in(bucket.shard):
            here = tuple(slice(*each) for each in local_slices(engine.trained[segment.name]))
            local_whole = whole[segment.name][here].flatten()[part.start - segment.start : part.stop - segment.start]
            yield segment.name, bucket.reduced_shard[part.start - bucket.shard.start :][: len(part)], local_whole


def check_close(name: str, found: Tensor, expected: Tensor, whole: Tensor) -> None:
    assert found.shape == expected.shape, name
    assert not found.numel() or (found - expected).abs().amax() <= 1e-12 * whole.abs().amax(), name


def model_of(layout: Layout, reference: Reference) -> Staged:
    """Return this rank's stages; ranks other than the first begin with other weights at the ends and as replicas."""
    mesh, stages = layout.mesh, layout.stages[layout.mesh.get_local_rank("pp")]
    model = Staged(stages, layout.count, mesh["tp"] if layout.tp > 1 else None)
    other = dist.get_rank() // layout.tp if mesh.get_local_rank("dp") else 0
    for name, parameter in model.named_parameters():
        copy_whole_(parameter, reference.named[name].detach() + other + (name == TIED) * mesh.get_local_rank("pp"))
    return model
