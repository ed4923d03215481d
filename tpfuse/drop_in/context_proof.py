"""The proof that a model of transformers may be sharded over a context: its tokens meet in attention alone.

The ranks of a context run all of a model's code, each on its own tokens, and only attention sees those of others. So an
output must follow from its own token and position, and each attention mask must be one that `ring_attention` computes.
Both are tried before anything is changed, on a copy without values: it runs on a short sequence, and on each half of
it. In the place of attention, linear layers and embeddings, which need no proof, are cheap functions of each token. All
other code runs as it is: a convolution or a state along the sequence, or positions counted from a rank's first token,
change what a half computes.

Of layers that are built alike one is tried. A module whose own weights have three dimensions and more than 2**20
elements, as those of experts, is not tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpfuse.drop_in.sketch import (
    LARGE,
    agree,
    apart,
    first_input,
    first_tensor,
    give_values,
    kind_of,
    largest_value,
    line_of,
    refuse_set_forward,
    set_forwards,
    sketch,
    width_of,
    with_first_tensor,
)

PROOF = "tpfuse_proof"
_SEQUENCES, _TOKENS = 2, 3  # sequences, and tokens of each in one half
_RANK = 4  # of the matrices in the place of linear layers
_PAIRS = 4096  # pairs of a query and a key at which a mask is tried


@dataclass(frozen=True)
class _Proved:
    """Stands for the attention mask in the layers of the copy."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"its layers read {name} of their attention mask")

    def __getitem__(self, key: Any) -> Any:
        raise NotImplementedError("its layers read parts of their attention mask")


def prove_context(model: nn.Module) -> None:
    """Raise ValueError, with the reason, unless the tokens of a model meet only in what `ring_attention` computes.

    transformers must know `attention` and `mask` by the name PROOF (`tpfuse.drop_in.huggingface.register`).
    """
    try:
        with apart(), torch.no_grad():
            made = stood_in(model, PROOF)
            ids = (3 + torch.arange(_SEQUENCES * 2 * _TOKENS)).view(_SEQUENCES, -1)
            positions = torch.arange(2 * _TOKENS).expand(_SEQUENCES, -1)
            whole = run(made, ids, position_ids=positions)
            for half in (slice(None, _TOKENS), slice(_TOKENS, None)):
                found = run(made, ids[:, half], position_ids=positions[:, half])
                agree(
                    "its tokens meet outside of attention too, and the output of half of them",
                    found,
                    whole[:, half],
                    largest_value(whole),
                )
    except NotImplementedError as reason:
        raise ValueError(
            f"context parallelism: {type(model).__name__} cannot be sharded over the sequence: {reason}; use a mesh"
            " without cp"
        ) from None


def separates_documents(model: nn.Module) -> bool:
    """Return whether positions that start again separate documents, without an attention mask and a cache.

    The output of the second of two documents must be what it is alone. It is tried as in `prove_context`, but with the
    model's own attention. A model that cannot be tried counts as one that does not separate them.
    """
    try:
        with apart(), torch.no_grad():
            made = stood_in(model, None)
            ids = (3 + torch.arange(_SEQUENCES * 2 * _TOKENS)).view(_SEQUENCES, -1)
            positions = torch.arange(2 * _TOKENS).remainder(_TOKENS).expand(_SEQUENCES, -1)
            both = run(made, ids, position_ids=positions, use_cache=False)[:, _TOKENS:]
            alone = run(made, ids[:, _TOKENS:], position_ids=positions[:, _TOKENS:], use_cache=False)
            agree("the output of a document behind another one", both, alone, largest_value(alone))
    except NotImplementedError:
        return False
    return True


def stood_in(model: nn.Module, attention: str | None) -> Any:
    """Return a `sketch` with cheap functions of each token in the place of linear layers and embeddings.

    attention: the name of its implementation, None for that of the model. Raise NotImplementedError for a module whose
    forward is not that of its class.
    """
    for name in set_forwards(model):
        refuse_set_forward(name)
    made, generator = sketch(model), torch.Generator().manual_seed(0)
    passed: set[nn.Module] = set()
    for module in made.modules():
        if module in passed:
            continue
        if attention is not None and module.__dict__.get("config") is not None:
            module.__dict__["config"]._attn_implementation = attention
        width = width_of(module)
        large = [x for x in module.parameters(recurse=False) if x.numel() > LARGE]
        if isinstance(module, nn.Embedding) and width is not None:
            module.__dict__["forward"] = partial(
                _embedded, torch.randn(width, generator=generator, dtype=torch.float64)
            )
        elif width is not None:
            into = torch.randn(_RANK, width, generator=generator, dtype=torch.float64)
            module.__dict__["forward"] = partial(_projected, into)
        elif any(x.ndim > 2 for x in large):
            module.__dict__["forward"] = lambda *args, **kwargs: torch.tanh(first_input(args, kwargs))
        if isinstance(module, nn.ModuleList):
            passed.update(_pass_through(module))
        give_values(module, generator)
        for name, x in module._parameters.items():
            if x is not None and x.numel() > LARGE and x.is_floating_point():
                row = torch.randn(x.shape[-1], generator=generator, dtype=torch.float64)
                module._parameters[name] = nn.Parameter(row.expand(x.shape), requires_grad=False)
    return made


def _pass_through(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Let layers that are built like one before them return their input, and yield all modules of these."""
    first: dict[Any, list[Any]] = {}
    for layer in layers:
        out = first.get(kind_of(layer))
        if out is None:
            out = first[kind_of(layer)] = []
            layer.register_forward_hook(partial(_keep, out))
        else:
            layer.__dict__["forward"] = partial(_passed, out)
            yield from layer.modules()


def _keep(kept: list[Any], module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    kept[:] = [out]


def _passed(kept: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Return the first input, in the place of an output like the one that was kept."""
    return with_first_tensor(kept[0], first_input(args, kwargs)) if kept else first_input(args, kwargs)


def run(made: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    """Return the first output of a copy for these arguments. Raise NotImplementedError for any error of its code."""
    try:
        return first_tensor(made(input_ids=ids, return_dict=True, **more))
    except NotImplementedError:
        raise
    except Exception as error:  # any code may raise anything
        raise NotImplementedError(f"it cannot be tried: {line_of(error)}") from None


def _embedded(frequencies: Tensor, ids: Tensor) -> Tensor:
    """Return [..., width] for ids [...]: sines of each id."""
    return torch.sin((1.0 + ids.double())[..., None] * frequencies)


def _projected(into: Tensor, x: Tensor) -> Tensor:
    """Return [..., width] for x [..., features]: a product with a matrix of low rank. into: [rank, width]."""
    phases = torch.arange(x.shape[-1], dtype=torch.float64)
    out_of = torch.sin(phases[:, None] * torch.arange(1.0, len(into) + 1) + phases[:, None] ** 2)
    return torch.tanh(x.double() @ out_of / x.shape[-1] ** 0.5) @ into


def mask(*args: Any, **kwargs: Any) -> _Proved:
    """Return what stands for a mask, for AttentionMaskInterface. Raise NotImplementedError for one of another form.

    A mask is causal, or a sliding window of local_size tokens; it is tried at random pairs and at its borders.
    """
    function, window = kwargs["mask_function"], kwargs.get("local_size")
    reach = 64 if window is None else window
    steps = torch.tensor([0, 1, 2, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 1])
    borders = torch.cartesian_prod(steps, torch.cat([steps, steps + reach]))
    generator = torch.Generator().manual_seed(0)
    pairs = torch.cat([borders, torch.randint(0, 4 * reach + 4, (_PAIRS, 2), generator=generator)])
    queries, keys = pairs.unbind(1)
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    try:
        found = torch.as_tensor(function(torch.tensor(0), torch.tensor(0), queries, keys)).expand_as(expected)
    except Exception as error:  # any code may raise anything
        raise NotImplementedError(f"its attention mask cannot be tried: {line_of(error)}") from None
    if not torch.equal(found.bool(), expected):
        raise NotImplementedError("its attention mask is neither causal nor a sliding window")
    return _Proved()


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return (a function of each token [batch, tokens, heads, size], None), for transformers' AttentionInterface."""
    if kwargs.get("head_mask") is not None:
        raise NotImplementedError(f"{type(module).__name__} takes head_mask")
    for name, child in module.named_children():
        # More tokens than are tried may meet there, as in the windows of DeepSeek V4's compressor.
        parts = [part for part in child.children() if any(True for _ in part.parameters())]
        if len(parts) > 1 and not hasattr(child, "base_layer"):
            raise NotImplementedError(f"{name} of {type(module).__name__} is no projection or norm")
    if not isinstance(attention_mask, _Proved):
        raise NotImplementedError("it makes its attention masks by itself")
    if key.shape[:-1] != value.shape[:-1] or query.shape[1] % key.shape[1] or query.shape[-1] != key.shape[-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise NotImplementedError(f"its queries, keys and values are {shapes}: expected as many values as keys")
    repeats = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.tanh(query + keys).sum(-1, keepdim=True)  # values may be of another size
    return (scores + values).transpose(1, 2).contiguous(), None
