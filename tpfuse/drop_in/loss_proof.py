"""The proof that a causal language model computes its loss from slices of its logits as from whole ones.

Between the projection to the vocabulary and the loss stands the model's own code. It runs here with random logits, on a
copy without values: with all of them, and with each half of the vocabulary or of the tokens. The loss function must be
given the same half of what it is given of all, with its gradients, and nothing else may depend on the logits. Soft
caps and scalings are proved so; a loss of the softmax's normaliser (z-loss) and a mask of some of the vocabulary not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tpfuse.drop_in.context_proof import stood_in
from tpfuse.drop_in.sketch import agree, agree_in_shape, apart, largest_value, line_of

_TOKENS = 4


def prove_loss(model: nn.Module, dim: int) -> None:
    """Raise NotImplementedError, with the reason, unless the loss of `model` may be computed from halves of its logits.

    model: a causal language model of transformers. dim: of the logits, 1 for the tokens or 2 for the vocabulary.
    """
    with apart():
        made = stood_in(model, None)
        made.training = True  # some code computes losses of its own in training alone
        ids = 3 + torch.arange(_TOKENS).unsqueeze(0)
        shape, generator = (1, _TOKENS, made.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
        logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole = _tried(made, ids, logits)
        halves = ids.chunk(2, 1) if dim == 1 else (ids, ids)
        for number, (some, half) in enumerate(zip(halves, logits.chunk(2, dim), strict=True)):
            for name, x in _tried(made, some, half).items():
                agree(f"{name} of a slice of the logits", x, whole[name].chunk(2, dim)[number], largest_value(x))


def _tried(made: Any, ids: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Return what the loss function and the caller are given of these logits, and the gradients of both."""
    leaf = logits.clone().requires_grad_()
    given: list[Tensor] = []
    head: nn.Module = made.get_output_embeddings()

    def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given.append(logits)
        return torch.zeros(())

    head.__dict__["forward"] = lambda x: leaf.clone()  # foreign code may change it in place
    made.__dict__["_loss_function"] = loss
    try:
        out = made(input_ids=ids, labels=ids, return_dict=True)
    except Exception as error:  # any code may raise anything
        raise NotImplementedError(f"its loss cannot be tried: {line_of(error)}") from None
    if len(given) != 1:
        raise NotImplementedError(f"it calls its loss function {len(given)} times")
    found = {"the input of the loss": given[0]}
    for name, x in out.items():
        if name == "logits":
            found["the output"] = x
        elif isinstance(x, Tensor) and x.requires_grad and _gradient(x, leaf, torch.ones_like(x)) is not None:
            raise NotImplementedError(f"its {name} depends on the logits, not through its loss function alone")
    for name, x in list(found.items()):
        agree_in_shape(name, x, leaf)
        gradient = _gradient(x, leaf, logits.to(x.dtype)) if x.requires_grad else None
        if gradient is None:
            raise NotImplementedError(f"{name} does not depend on the logits")
        found[f"the gradient of {name}"] = gradient
    return found


def _gradient(out: Tensor, leaf: Tensor, seed: Tensor) -> Tensor | None:
    return torch.autograd.grad(out, leaf, seed, retain_graph=True, allow_unused=True)[0]
