"""The GPT-2 family of models, reproduced exactly on tensor- and sequence-parallel layers.

    x = wte[ids] + wpe[positions]
    x = x + attention(ln_1(x));  x = x + mlp(ln_2(x))        for each block
    logits = ln_f(x) wteᵀ

The model has LayerNorm before each sublayer, learned positions, GELU in its tanh form, and tied input and output
embeddings (Radford et al. 2019). Parameter names are those of Hugging Face; linear weights are [out, in] here and
[in, out] there (`models/huggingface.py` converts them). c_attn packs q, k, v as [3, C, C], each sharded by itself.

Between the blocks, a rank holds a shard of the batch's B * T tokens, which are concatenated and padded to a multiple of
the tensor-parallel size. The first layers of each block gather them, and its last layers scatter them.

With context parallelism, a rank holds n of each sequence's T tokens (`tpfuse.parallel.context`), and only attention
reads the other tokens. The paragraph above then holds for these B * n tokens.

Shape suffixes: B sequences, T positions, n positions of this context-parallel rank (T if there is one), M = B * n
tokens (padded), m this rank's tokens, C width, H this rank's heads, D head size, V this rank's shard of the vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.comm.collectives.one_model import InputComparison
from tpfuse.comm.mesh import groups_of
from tpfuse.layers.dropout import Dropout, DropoutState
from tpfuse.layers.layer_norm import LayerNorm
from tpfuse.layers.position_embedding import PositionEmbedding
from tpfuse.layers.vocab_parallel_embedding import VocabParallelEmbedding
from tpfuse.models.gpt_block import Block, first_rows
from tpfuse.models.gpt_config import GPTConfig as GPTConfig
from tpfuse.models.key_value_cache import KeyValueCache
from tpfuse.ops.cross_entropy import IGNORE, cross_entropy
from tpfuse.ops.dropout import dropout_keys
from tpfuse.parallel.context import ONE_RANK, ContextParallel, Documents, ShardedBatch
from tpfuse.parallel.pipeline.cut import Stage, whole_model


class Transformer(nn.Module):
    """The embeddings, the blocks and the last norm, under Hugging Face's prefix. mesh: tensor-parallel, or None."""

    def __init__(self, config: GPTConfig, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        width = config.n_embd
        self.wte = VocabParallelEmbedding(config.vocab_size, width, sequence_parallel=True, device_mesh=mesh)
        self.wpe = PositionEmbedding(config.n_positions, width, sequence_parallel=True, device_mesh=mesh)
        self.drop = Dropout(config.dropout, site=0)
        self.h = nn.ModuleList(Block(config, layer, mesh) for layer in range(config.n_layer))
        self.ln_f = LayerNorm(width, config.layer_norm_epsilon, config.bias, sequence_parallel=True, device_mesh=mesh)


class GPT(nn.Module):
    """A GPT-2 model on one rank; `tpfuse.models.parallelize_gpt` puts it on many.

    device, dtype: of the parameters, which are left uninitialised: `tpfuse.parallel.initialize` draws them,
    `models.huggingface` loads them. Raise ValueError for an impossible configuration.
    """

    def __init__(
        self, config: GPTConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.device_mesh: DeviceMesh | None = None  # the tensor-parallel mesh
        self.rank, self.tp = 0, 1
        self.context = ONE_RANK
        self.sum_over_context: ContextParallel | None = None  # for the engines of `tpfuse.zero`
        self.stages = [whole_model(config.n_layer)]
        self.recomputed: Callable[..., Tensor] | None = None  # runs a block whose input alone is kept; None for none
        self.parallelized = False
        self._compare_inputs = InputComparison("GPT")
        with torch.device("meta"):
            self.transformer = Transformer(config)
        for module in self.modules():
            for name, shape in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty_like(shape, device=device, dtype=dtype)))

    def initial_distribution(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation of parameter `name` at the start of training.

        As in GPT-2, the standard deviation is 0.02, and 0.02 / sqrt(2 n_layer) for the projections that end a residual
        branch.
        """
        if ".ln_" in name:
            return (1.0, 0.0) if name.endswith("weight") else (0.0, 0.0)
        if name.endswith("bias"):
            return 0.0, 0.0
        return 0.0, 0.02 / math.sqrt(2 * self.config.n_layer) if "c_proj" in name else 0.02

    def flops_per_token(self) -> int:
        """Return the number of floating-point operations of a training step for each token.

        They are 6 for each parameter except those of the position table, and 12 n_layer T C for attention (PaLM,
        arXiv:2204.02311, appendix B).
        """
        blocks, _, head = self.config.part_costs()
        return sum(block.flops for block in blocks) + head.flops

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks that this rank has, in the order of the model."""
        return [block for block in self.transformer.h if isinstance(block, Block)]

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        """Return the modules with the parameters of a stage of this rank."""
        whole = self.transformer
        ends: list[nn.Module] = [whole.wte, whole.wpe] if stage.first else []
        ends += [whole.wte, whole.ln_f] if stage.last else []
        return ends + [whole.h[layer] for layer in stage.layers]

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        loss_weight: float | None = None,
        dropout_at: tuple[int, int] | Tensor | None = None,
        sequences_B: Tensor | None = None,
        cache: KeyValueCache | None = None,
        stage: Stage | None = None,
        x_mC: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> Tensor:
        """Return losses [B, T] in nats if targets are given, else logits [B, T, vocab_size]; equal on all ranks.

        ids_BT, targets_BT: int64, equal on all ranks; a target of -1 or -100 has no loss. loss_weight: if given,
        the losses times this weight are summed to one value [], and the logits are never held whole; each
        context-parallel rank returns the sum over its own tokens, so that the sum over the ranks is the whole.
        dropout_at: if dropout is wanted, (seed, step) or the keys (`tpfuse.ops.dropout.dropout_keys`) that follow from
        it. sequences_B: the numbers of these sequences in the whole batch, by default 0 … B-1. cache: holds the
        positions before these, and afterwards also these; with it, every context-parallel rank computes everything.
        stage: a pipeline stage of this rank, by default the whole model; unless it is the first one, x_mC is the output
        [m, C] of the stage before it; unless it is the last one, its output [m, C] is returned. starts_BT: bool, equal
        on all ranks, where a document begins; the tokens of a document see each other alone and have positions of their
        own. By default each sequence is one document. Raise ValueError for other shapes or dtypes of these,
        loss_weight without targets, and starts with a cache; if there are no tokens, or fewer than context-parallel
        ranks, if the context is too short, or if an id is not in the vocabulary.
        """
        stage = stage or self.stages[0]
        given = {"ids": ids_BT, "targets": targets_BT, "loss_weight": loss_weight, "dropout_at": dropout_at}
        context = self.context if cache is None else ONE_RANK
        if not torch.compiler.is_compiling():
            given |= {"sequences": sequences_B, "starts": starts_BT}
            sizes = self.tp, context.size
            self._compare_inputs(given, self, sizes, lambda: [*groups_of(self.device_mesh), *context.groups])
        self._check(ids_BT, targets_BT, starts_BT, loss_weight, cache, stage)
        past = 0 if cache is None else cache.length
        shape = batch, length = ids_BT.shape
        documents = None if starts_BT is None else Documents(starts_BT)
        if documents is not None:
            ids_BT, targets_BT = ids_BT.reshape(1, -1), None if targets_BT is None else targets_BT.reshape(1, -1)
        sharded = context.sharded_batch(ids_BT, documents)
        share = -(-sharded.tokens // self.tp)
        padding = share * self.tp - sharded.tokens
        ids_M = F.pad(sharded.shard(ids_BT).reshape(-1), (0, padding))
        rows_m = torch.arange(self.rank * share, (self.rank + 1) * share, device=ids_BT.device)
        positions_m = sharded.positions[rows_m % sharded.local_length]
        if sequences_B is None:
            sequences_B = torch.arange(batch, device=ids_BT.device)
        state = self._dropout_state(dropout_at, sequences_B, sharded, rows_m, positions_m)
        if stage.first:
            places_m = positions_m if documents is None else documents.positions[positions_m]
            x_mC = self.transformer.wte(ids_M) + self.transformer.wpe(places_m + past)
            x_mC = self.transformer.drop(x_mC, state)
        assert x_mC is not None
        blocks = list(self.transformer.h) if stage.layers else []
        for layer in stage.layers:
            block = blocks[layer]
            through = block if self.recomputed is None or cache is not None else partial(self.recomputed, block)
            x_mC = through(x_mC, sharded, state, cache)
        if cache is not None and stage is self.stages[-1]:
            cache.length += length
        if not stage.last:
            return x_mC
        targets_M = None
        if targets_BT is not None:
            targets_M = F.pad(sharded.shard(targets_BT, IGNORE).reshape(-1), (0, padding), value=IGNORE)
        result = self._result(self.transformer.ln_f(x_mC), targets_M, loss_weight, sharded)
        return result if loss_weight is not None else result.view(*shape, *result.shape[2:])

    def _result(
        self, x_mC: Tensor, targets_M: Tensor | None, loss_weight: float | None, sharded: ShardedBatch
    ) -> Tensor:
        """Return what `forward` returns, from the last norm's output: logits or losses of whole sequences, or a sum."""
        wte, shape = self.transformer.wte, (sharded.batch, sharded.local_length)
        if targets_M is None:
            logits_MV = wte.project(x_mC, gather_output=True)
            return sharded.gather(first_rows(logits_MV, sharded.tokens).view(*shape, -1))
        if loss_weight is not None:
            return wte.loss(x_mC, targets_M, loss_weight)
        losses_M = cross_entropy(wte.project(x_mC), targets_M, self.config.vocab_size, wte.group)
        return sharded.gather(first_rows(losses_M, sharded.tokens).view(shape))

    def _check(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None,
        starts_BT: Tensor | None,
        loss_weight: float | None,
        cache: KeyValueCache | None,
        stage: Stage,
    ) -> None:
        """Raise ValueError for arguments of `forward` that do not fit each other or the model."""
        if ids_BT.ndim != 2 or not ids_BT.numel():
            raise ValueError(f"ids of shape {tuple(ids_BT.shape)}: expected [B, T] with at least one token")
        for name, given in (("targets", targets_BT), ("starts", starts_BT)):
            if given is not None and given.shape != ids_BT.shape:
                raise ValueError(f"{name} of shape {tuple(given.shape)}: expected {tuple(ids_BT.shape)}, as ids")
        if starts_BT is not None and (starts_BT.dtype != torch.bool or cache is not None):
            found = f"of {starts_BT.dtype}" if cache is None else "with a cache"
            raise ValueError(f"starts {found}: expected bool, and no cache")
        if loss_weight is not None and targets_BT is None and stage.last:
            raise ValueError(f"loss_weight {loss_weight} without targets: expected both")
        tokens = ids_BT.shape[1] + (0 if cache is None else cache.length)
        if tokens > self.config.n_positions:
            raise ValueError(f"{tokens} tokens do not fit a context of {self.config.n_positions}")

    def _dropout_state(
        self,
        dropout_at: tuple[int, int] | Tensor | None,
        sequences_B: Tensor,
        sharded: ShardedBatch,
        rows_m: Tensor,
        positions_m: Tensor,
    ) -> DropoutState | None:
        """Number this rank's rows and heads as in the unsharded batch, so that dropout masks are equal.

        Of documents, the number of the first token in the whole batch stands for that of the sequence.
        """
        if dropout_at is None or self.config.dropout == 0.0:
            return None
        heads = self.config.n_head // self.tp
        heads_H = torch.arange(self.rank * heads, (self.rank + 1) * heads, device=rows_m.device)
        if sharded.documents is None:
            sequence_m = sequences_B[(rows_m // sharded.local_length).clamp(max=sharded.batch - 1)]
            tokens_m, numbers_S = sequence_m * sharded.length + positions_m, sequences_B
        else:
            length = sharded.documents.longest
            tokens = (sequences_B.unsqueeze(1) * length + torch.arange(length, device=rows_m.device)).flatten()
            tokens_m, numbers_S = tokens[positions_m], tokens[sharded.documents.cu_seqlens[:-1].long()]
        head_rows_SH = numbers_S.unsqueeze(1) * self.config.n_head + heads_H
        keys: Tensor
        if isinstance(dropout_at, Tensor):
            keys = dropout_at
        else:
            keys = dropout_keys(rows_m, *dropout_at, self.config.dropout_sites)
        return DropoutState(keys, tokens_m, head_rows_SH)
