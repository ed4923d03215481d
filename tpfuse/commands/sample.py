"""`tpfuse sample` generates texts with a run's newest good checkpoint, or a Hugging Face folder.

Data-parallel ranks share the texts. Each text is drawn with a seed of its own, so it is the same in any layout.
"""

from pathlib import Path

import torch

from tpfuse.checkpoint.untrusted import read_text, reading
from tpfuse.comm.mesh import shard_range
from tpfuse.commands.shared_model import ModelRanks, SavedModel, on_ranks
from tpfuse.errors import UserError, check_at_least, refusing
from tpfuse.train.language_model import Drawing
from tpfuse.train.options import SampleCommand

BETWEEN = "\n------\n"  # separates two samples


def sample(folder: Path, options: SampleCommand) -> str | int:
    """Return the prompt and its continuation up to the token that ends a text, or an exit status if another process
    prints them. `BETWEEN` separates several samples.

    Raise UserError for bad options, and as `tpfuse.commands.shared_model.on_ranks` does.
    """
    check_at_least({"tokens": (options.tokens, 1), "top-k": (options.top_k, 1), "samples": (options.samples, 1)})
    check_at_least({"temperature": (options.temperature, 0)})
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: expected more than 0 and at most 1")
    if not -(2**63) <= options.seed <= 2**64 - options.samples:
        raise UserError(f"--seed {options.seed}: expected a number of 64 bits")
    return on_ranks(texts, options.parallel, options.comm, folder, options)


def _continued(
    ranks: ModelRanks, folder: Path, options: SampleCommand
) -> tuple[SavedModel, list[int], tuple[int, ...]]:
    """Return the model, the prompt and the tokens that end a text, on the first rank.

    Raise UserError, and CheckpointError if all checkpoints are damaged.
    """
    text = options.prompt
    if options.prompt_file is not None:
        if text != SampleCommand.prompt:
            raise UserError("--prompt and --prompt-file were both given: expected one of them")
        with reading(f"--prompt-file {options.prompt_file}"):
            text = read_text(options.prompt_file)
    saved = ranks.find(folder)
    prompt, config, end = saved.tokenizer.encode(text).tolist(), saved.config, saved.tokenizer.end_of_text
    begins = list(saved.tokenizer.begins)  # a model knows the beginning of a text by these tokens
    if prompt[: len(begins)] != begins:
        prompt = begins + prompt
    if not prompt:
        raise UserError("the prompt is empty: give at least one token to continue")
    ends: tuple[int, ...] = () if end is None else (end,)
    with refusing():
        config.check_prompt(len(prompt))
    return saved, prompt, config.ends or ends


def texts(ranks: ModelRanks, folder: Path, options: SampleCommand) -> str:
    """Return the texts of `sample`, on all ranks."""
    saved, prompt, ends = ranks.from_first(lambda: _continued(ranks, folder, options))
    ranks.load(saved)
    start, stop = shard_range(options.samples, ranks.replica, ranks.replicas)
    own = []
    if start < stop:
        ids = torch.tensor(prompt, device=ranks.device).expand(stop - start, -1)
        drawing = Drawing(options.temperature, options.top_k, options.top_p, options.seed + start)
        for tokens in ranks.generate(ids, options.tokens, drawing, ends).tolist():
            # without the tokens that begin a text and the one that ends it
            ending = (place for place in range(len(prompt), len(tokens)) if tokens[place] in ends)
            own.append(saved.tokenizer.decode(tokens[len(saved.tokenizer.begins) : next(ending, len(tokens))]))
    of_replicas = dict(ranks.gathered((ranks.replica, own)))
    return BETWEEN.join(text for replica in sorted(of_replicas) for text in of_replicas[replica])
