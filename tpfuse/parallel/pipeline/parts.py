"""The parts of a model that a pipeline cuts: its blocks, and what the embedding and the head use."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

from torch import nn

from tpfuse.parallel.pipeline.cut import Cost, Stage, cut_layers, explicit_cut, stage_costs

Part = nn.Module | nn.Parameter


class Parts:
    """The blocks of `model`, and the modules and parameters of its embedding and its head.

    embed: what the first stage uses beside its blocks; head: what the last stage uses; what is in both is tied. Raise
    ValueError for a part that is not in the model, and for a trained parameter that is in no part.
    """

    def __init__(
        self, model: nn.Module, blocks: Iterable[nn.Module], embed: Iterable[Part], head: Iterable[Part]
    ) -> None:
        self.model, self.blocks, self.embed, self.head = model, list(blocks), list(embed), list(head)
        present = {*model.modules(), *model.parameters()}
        for place, part in self._placed():
            if part not in present:
                raise ValueError(f"{place} ({type(part).__name__}) is not in the model: expected one of its parts")
        everywhere = {parameter for _, part in self._placed() for parameter in _parameters(part)}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in everywhere:
                raise ValueError(f"{name} is in no block: add it, or the module that has it, to `embed` or `head`")

    def _placed(self) -> Iterator[tuple[str, Part]]:
        for name, parts in (("blocks", self.blocks), ("embed", self.embed), ("head", self.head)):
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(parts))

    def cut(self, rank_of: Sequence[int], layers: Sequence[int] | None) -> list[Stage]:
        """Return the stages. rank_of: the rank of each. layers: the number of blocks of each; None to cut by cost.

        The cost of a part is 6 operations for each parameter and token (PaLM, arXiv:2204.02311, appendix B), except for
        those of nn.Embedding in `embed`, which looks rows up. Raise ValueError for fewer blocks than stages, and for
        `layers` that do not fit.
        """
        if layers is not None:
            return explicit_cut(",".join(map(str, layers)), len(self.blocks), len(rank_of))
        return cut_layers(*self._costs(), rank_of)

    def costs(self, stages: Sequence[Stage]) -> list[Cost]:
        """Return the cost of each stage, as `cut` counts it, before `keep` frees the parameters of other stages."""
        return stage_costs(stages, *self._costs())

    def _costs(self) -> tuple[list[Cost], Cost, Cost]:
        """Return the costs of each block, of what comes before the blocks, and of what comes after them."""
        tables = [module for part in self.embed for module in _modules(part) if isinstance(module, nn.Embedding)]
        return [_cost([block]) for block in self.blocks], _cost(self.embed, looked_up=tables), _cost(self.head)

    def of(self, stage: Stage) -> list[Part]:
        """Return the parts of a stage."""
        blocks = [self.blocks[index] for index in stage.layers]
        return [*(self.embed if stage.first else []), *blocks, *(self.head if stage.last else [])]

    def shared(self) -> list[str]:
        """Return the names of the parameters that are both in `embed` and in `head`, in the order of the model."""
        embed, head = ({p for part in parts for p in _parameters(part)} for parts in (self.embed, self.head))
        return [name for name, parameter in self.model.named_parameters() if parameter in embed & head]

    def check_sharing(self, stages: Sequence[Stage], rank_of: Sequence[int]) -> None:
        """Raise ValueError for a trained parameter on several ranks, except those in `embed` and in `head`."""
        tied = {self.model.get_parameter(name) for name in self.shared()}
        names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        stage_of: dict[nn.Parameter, Stage] = {}
        for stage in stages:
            for parameter in (p for part in self.of(stage) for p in _parameters(part)):
                other = stage_of.setdefault(parameter, stage)
                if rank_of[other.index] != rank_of[stage.index] and parameter in names.keys() - tied:
                    raise ValueError(
                        f"{names[parameter]} is in stages {other.index} and {stage.index}, on different ranks: only"
                        " parameters in both `embed` and `head` can be shared"
                    )

    def keep(self, stages: Sequence[Stage]) -> None:
        """Free the parameters of all other stages.

        Modules of other stages become nn.Identity, so that the others keep their names. A module with a tied parameter
        stays at both ends, without its other parameters, so that the tied parameter has one name on both ranks. A call
        of what is not whole on this rank raises ValueError.
        """
        own = {part for stage in stages for part in self.of(stage)}
        kept_modules = {module for part in own for module in _modules(part)}
        kept = {parameter for part in own for parameter in _parameters(part)}
        parts = [part for _, part in self._placed()]
        freed = {parameter for part in parts for parameter in _parameters(part)} - kept
        gone = {
            part
            for part in parts
            if isinstance(part, nn.Module)
            and kept_modules.isdisjoint(part.modules())
            and kept.isdisjoint(part.parameters())
        }
        for path, module in list(self.model.named_modules()):
            for name, child in list(module._modules.items()):
                if child in gone:
                    setattr(module, name, nn.Identity())
                    _refuse_calls(_joined(path, name), getattr(module, name), *child.modules())
        for path, module in self.model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in freed:
                    module.register_parameter(name, None)
                    if not module._modules:  # others may have it only for the functions of `embed` and `head`
                        _refuse_calls(_joined(path, name), module)
        own_blocks = {index for stage in stages for index in stage.layers}
        self.blocks = [block if index in own_blocks else nn.Identity() for index, block in enumerate(self.blocks)]
        self.embed = [part for part in self.embed if part in own]
        self.head = [part for part in self.head if part in own]


def as_modules(parts: Iterable[Part]) -> list[nn.Module]:
    """Return modules with the parameters of the parts."""
    return [part if isinstance(part, nn.Module) else nn.ParameterList([part]) for part in parts]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_calls(name: str, *modules: nn.Module) -> None:
    """Make calls of the modules raise ValueError, since `name` belongs to other ranks, which train it."""
    for module in modules:
        module.register_forward_pre_hook(partial(_refuse, name))


def _refuse(name: str, *_: object) -> None:
    raise ValueError(
        f"{name} is not on this rank, because no part of its stages lists it: add it, or the module that has it, to"
        " `embed` or `head`, whichever uses it"
    )


def _modules(part: Part) -> Iterator[nn.Module]:
    return part.modules() if isinstance(part, nn.Module) else iter(())


def _parameters(part: Part) -> Iterator[nn.Parameter]:
    return part.parameters() if isinstance(part, nn.Module) else iter((part,))


def _cost(parts: Iterable[Part], looked_up: Collection[nn.Module] = ()) -> Cost:
    parameters = set(itertools.chain.from_iterable(map(_parameters, parts)))
    tables = {parameter for module in looked_up for parameter in module.parameters()}
    flops = sum(6 * parameter.numel() for parameter in parameters - tables)
    return Cost(flops, sum(parameter.numel() for parameter in parameters))
