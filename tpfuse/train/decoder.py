"""The model of a decoder of transformers on a rank, which `tpfuse.parallelize` makes (`tpfuse.train.decoder_config`).

Its parameters have the names and the shapes of Hugging Face in checkpoints.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpfuse.checkpoint.manifest import Shard
from tpfuse.comm.layout import Slices, copy_whole_
from tpfuse.comm.mesh import context_mesh, flat_group, rank_and_size, tensor_mesh
from tpfuse.drop_in.causal_loss import causal_loss
from tpfuse.drop_in.decoder_stages import DecoderStages
from tpfuse.drop_in.huggingface import adapt, causal_model, cut, replace_forward, takes_labels
from tpfuse.drop_in.parallelize import parallelize
from tpfuse.drop_in.weights import file_pieces, read_shard, read_weights, take_weights
from tpfuse.models.generate import choose
from tpfuse.parallel.context import ContextParallel, Documents
from tpfuse.parallel.initialize import seed_of
from tpfuse.parallel.offloaded_inputs import OffloadedInputs
from tpfuse.parallel.pipeline.cut import Stage, whole_model
from tpfuse.plan.sizes import ModelSizes
from tpfuse.train.batches import MicroBatch
from tpfuse.train.decoder_config import DecoderConfig, count_parameters
from tpfuse.train.decoder_sizes import sizes_of_decoder
from tpfuse.train.language_model import Drawing, LanguageModel, ModelFiles
from tpfuse.train.options import TrainCommand
from tpfuse.train.pipeline_options import own_stages


class DecoderModel(LanguageModel):
    """A decoder on this rank. mesh: the whole mesh of the run, None for one rank.

    Raise ValueError for a model that the ranks cannot share.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: TrainCommand,
        mesh: DeviceMesh | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.device = config, device
        model: Any = config.empty(dtype)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        looked_up = sum(table.numel() for table in tables if table is not model.get_output_embeddings().weight)
        self._flops = 6 * (count_parameters(model) - looked_up) + config.n_layer * config.attention_flops()
        self._takes_labels = takes_labels(model)  # else its forward computes another loss from them, or none
        schedule = options.parallel.cp_schedule
        self.context = ContextParallel(context_mesh(mesh), schedule)
        self.device_mesh = tensor_mesh(mesh)
        if mesh is not None and (self.device_mesh is not None or self.context.groups):
            parallelize(model, mesh, context_parallel=schedule if self.context.groups else "auto")
        else:
            adapt(model, self.context, None, sliced=False)
        self.stages = [whole_model(config.n_layer)]
        self._cut: DecoderStages | None = None
        if options.parallel.pp > 1:
            self.stages = own_stages(options.parallel, config, rank_and_size(flat_group(mesh, "pp"))[0])
            self._cut = cut(model, self.stages)
        take_weights(model, read_weights(model, {}, device), device)
        if options.train.recompute == "full":
            model.activation_checkpointing_enable({"use_reentrant": False})
        if options.train.offload_activations:
            offloaded = OffloadedInputs()
            for module in model.modules():
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = partial(offloaded, module._gradient_checkpointing_func)
        self.module = model
        self._forward: Any = model  # in training

    @staticmethod
    def outlined(config: DecoderConfig, mesh: DeviceMesh | None, dtype: torch.dtype) -> nn.Module:
        return config.outlined(mesh, dtype)

    @staticmethod
    def sizes(name: str, config: DecoderConfig, dtype: str) -> ModelSizes:
        return sizes_of_decoder(name, config, dtype)

    @staticmethod
    def files(config: DecoderConfig, folder: Path) -> ModelFiles:
        found, left_out = config.find_weights(folder)

        def read(name: str, shard: Shard) -> None:
            read_shard(shard.tensor.detach(), shard.slices, shard.shape, found[name])

        return ModelFiles(left_out, read)

    def draw(self, seed: int) -> None:
        """Fill the parameters as transformers initialises the model after `torch.manual_seed(seed)`, on each rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            whole = dict(causal_model(self.config.settings, torch.float32).named_parameters())
        for name, parameter in self.module.named_parameters():
            copy_whole_(parameter, whole[name].detach().reshape(parameter.shape))

    def compile(self, *, one_graph: bool) -> None:
        """Let training steps run by torch.compile; one_graph is not asked of code that is not ours."""
        from tpfuse.train.compiled import compiled

        self._forward = compiled(self.module, one_graph=False, torch_dropout=self.config.drops)

    def part(self, stage: Stage, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Return the output of a stage. Its dropout follows from (seed, step, first sequence, stage) and the layout."""
        ids, targets, weight, at, sequences, _, length = batch
        training = at is not None
        self.module.train(training)
        if at is not None and self.config.drops:
            assert not isinstance(at, Tensor)
            first = 0 if sequences is None else int(sequences[0])
            torch.manual_seed(seed_of(*at, first, *[stage.index] * (stage.index > 0)))
        more: dict[str, Any] = {} if self._cut is None else {"stage": stage, "stage_input": x}
        if targets is None:
            more |= _padded(ids, length or ids.shape[1], stage)
        elif self.document_start is not None:  # transformers masks documents by positions that do not increase by one
            documents = Documents(ids == self.document_start)
            more["position_ids"] = documents.positions.view(ids.shape)
        if targets is not None and stage.last and self._takes_labels:
            self.module.training = True  # with labels, the model in eval mode would return whole logits
            more |= {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1}
        out = (self._forward if training else self.module)(input_ids=ids, use_cache=False, **more)
        if not stage.last:
            return out  # type: ignore[no-any-return]
        if targets is None:
            return out.logits  # type: ignore[no-any-return]
        loss: Tensor = (
            out.loss
            if self._takes_labels
            else causal_loss(out.logits, targets, out.logits.shape[-1], 1, shift_labels=targets)
        )
        if weight is not None:
            loss = loss * weight
        return loss / self.context.size  # the sum over these ranks, which the trainer takes, is the loss of the batch

    def modules_of(self, stage: Stage) -> list[nn.Module]:
        return [self.module] if self._cut is None else self._cut.modules_of(stage)

    def generate(
        self,
        ids: Tensor,
        tokens: int,
        drawing: Drawing,
        ends: tuple[int, ...] = (),
        logits: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Tensor:
        """Return the prompts with their continuations, by the `generate` of transformers.

        They end where the model's context is full; the prompts must be shorter than that. With `logits` there is no
        key/value cache: every token computes the whole text again, padded to its last length.
        """
        tokens = min(tokens, self.config.longest - ids.shape[1])
        model: Any = self.module.eval()
        if logits is not None:
            longest, compute = ids.shape[1] + tokens, logits

            def of_last(ids: Tensor) -> Tensor:
                padded = F.pad(ids, (0, longest - ids.shape[1]))
                return compute(MicroBatch(padded, length=ids.shape[1]))

            model = replace_forward(self.config.empty(torch.float32), of_last)
        draws = [] if drawing.temperature == 0 else [_draws(drawing, len(ids))]
        with torch.no_grad():
            out: Tensor = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                use_cache=logits is None,
                eos_token_id=list(ends) or None,
                pad_token_id=ends[0] if ends else 0,
                do_sample=False,
                logits_processor=draws,
            )
        return out

    def flops_per_token(self) -> int:
        return self._flops

    def stored(
        self, name: str, tensor: Tensor, slices: Slices, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], Tensor, Slices]]:
        """Yield this shard's rectangles of the tensor of Hugging Face, which packs projections in one dimension."""
        for piece, ranges in file_pieces(tensor, slices, shape, self._shapes[name]):
            yield self._shapes[name], piece, ranges


def _draws(drawing: Drawing, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what leaves transformers one token for each row of logits: the one that is drawn as for the GPT."""
    generators = [torch.Generator("cpu").manual_seed(drawing.seed + row) for row in range(rows)]

    def draw(_ids: Tensor, logits: Tensor) -> Tensor:
        drawn = choose(logits, drawing.temperature, drawing.top_k, drawing.top_p, generators).to(logits.device)
        return torch.full_like(logits, -torch.inf).scatter_(1, drawn[:, None], 0.0)

    return draw


def _padded(ids: Tensor, length: int, stage: Stage) -> dict[str, Tensor]:
    """Return the arguments for the logits of the last of `length` tokens, which padding follows.

    Positions do not exceed those of the text, on which the frequencies of some rotary embeddings depend.
    """
    numbers = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    last = {"logits_to_keep": numbers[0, length - 1 : length]} if stage.last else {}
    return {"attention_mask": (numbers < length).long(), "position_ids": numbers.clamp(max=length - 1)} | last
