"""The proof that a decoder of transformers may be cut into the stages of a pipeline.

`DecoderStages` knows embeddings, layers and a last norm. A decoder's forward may do more with them: nanochat's also
puts its norm before the first layer, and Dory's runs layers several times. So a copy without values runs as a whole and
cut, as in `tpfuse.drop_in.context_proof`, and must give the same.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tpfuse.drop_in.context_proof import run, stood_in
from tpfuse.drop_in.decoder_stages import DecoderStages, decoder_parts
from tpfuse.drop_in.sketch import agree, apart, largest_value
from tpfuse.parallel.pipeline.cut import Stage

_IDS = torch.arange(3, 15, device="cpu").view(2, -1)


def prove_stages(model: nn.Module) -> None:
    """Raise ValueError, with the reason, unless the stages of a pipeline compute what the whole decoder does.

    Three stages are tried: the first layer, those between, and the last one. Raise ValueError as `decoder_parts` does.
    """
    decoder_parts(model)
    try:
        with apart(), torch.no_grad():
            made = stood_in(model, None)
            parts = decoder_parts(made)
            decoder, layers = parts.decoder, parts.of(made).blocks
            claimed, count = getattr(made.config, "num_hidden_layers", None), len(layers)
            if claimed != count:
                raise NotImplementedError(f"its num_hidden_layers is {claimed}, and it has {count} layers")
            ran: list[int] = []
            for number, layer in enumerate(layers):
                layer.register_forward_pre_hook(partial(_note, ran, number))
            whole = run(decoder, _IDS, use_cache=False)
            if ran != list(range(count)):
                raise NotImplementedError("its forward does not run each layer once")
            ranges = [range(*ends) for ends in pairwise(sorted({0, 1, count - 1, count}))]
            cut = DecoderStages(made, [Stage(i, r, r.start == 0, r.stop == count) for i, r in enumerate(ranges)])
            x, found = None, torch.empty(0)
            for stage in cut.stages:
                with cut.only(stage, x, _IDS.shape) as running:
                    found = run(decoder, _IDS, use_cache=False)
                    x = running.output
            agree("the output of its stages", found, whole, largest_value(whole))
    except NotImplementedError as reason:
        raise ValueError(f"a pipeline cannot cut {type(model).__name__}: {reason}; use a layout without pp") from None


def _note(ran: list[int], number: int, *_: Any) -> None:
    ran.append(number)
