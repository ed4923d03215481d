"""The hyperparameters of a GPT-2."""

from dataclasses import asdict, dataclass
from typing import Any

from tpfuse.parallel.pipeline.cut import Cost

_MOST_LAYERS = 2**16


@dataclass(frozen=True)
class GPTConfig:
    """The hyperparameters under GPT-2's names. `n_positions` is the context length in tokens."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    bias: bool = True
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5

    # A model of transformers has a description with the same methods (`tpfuse.train.decoder_config`).

    @property
    def family(self) -> str:
        """Return the model_type of a model of transformers, and "" for this one."""
        return ""

    @property
    def longest(self) -> int:
        """Return the longest sequence of the model, in tokens."""
        return self.n_positions

    @property
    def tied(self) -> list[str]:
        """Return the names of the parameters that a pipeline's first and last stage share."""
        return ["transformer.wte.weight"]

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a text, of which the GPT has none of its own."""
        return ()

    @property
    def files(self) -> dict[str, str]:
        """Return the texts of small files that belong to the model, by name: none."""
        return {}

    def as_json(self) -> dict[str, Any]:
        """Return the hyperparameters by name."""
        return asdict(self)

    def compared(self) -> dict[str, Any]:
        """Return what two models must have in common if one is to have the other's weights."""
        return self.as_json()

    def check_whole(self) -> None:
        """Raise ValueError for a configuration that cannot be built on one rank."""
        self.check()

    def check_context(self, tp: int) -> None:
        """Context-parallel ranks can share the sequences of every GPT."""

    def check_documents(self) -> None:
        """Every GPT can mask documents."""

    def check_prompt(self, tokens: int) -> None:
        """Every prompt can be continued: the last `n_positions` tokens count."""

    def check(self, tp: int = 1) -> None:
        """Raise ValueError for a configuration that cannot be built on `tp` tensor-parallel ranks."""
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.n_layer > _MOST_LAYERS:
            raise ValueError(f"n_layer {self.n_layer}: expected at most {_MOST_LAYERS}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if not 0.0 <= self.layer_norm_epsilon < 1.0:
            raise ValueError(f"layer_norm_epsilon {self.layer_norm_epsilon}: expected 0 <= layer_norm_epsilon < 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout}: expected 0 <= dropout < 1")
        if self.n_head % tp:
            fitting = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            raise ValueError(f"tp {tp} does not divide n_head {self.n_head}: it can be one of {fitting}")

    @property
    def dropout_sites(self) -> int:
        """Return the number of sites of dropout: 0 is that of the embeddings, and block b has 4 b + 1 to 4 b + 3."""
        return 4 * self.n_layer if self.dropout else 0

    def part_costs(self) -> tuple[list[Cost], Cost, Cost]:
        """Return the costs of each block, of the embeddings, and of the last norm with the head, in a training step.

        A parameter of a product takes 6 operations for each token, and attention 12 T C (PaLM, arXiv:2204.02311,
        appendix B). The head has the parameters of the embedding once more, which are on the rank of the first stage
        too.
        """
        width, biases = self.n_embd, int(self.bias)
        products = 12 * width * width
        block = Cost(6 * products + 12 * self.n_positions * width, products + width * (2 + 11 * biases))
        table = self.vocab_size * width
        head = Cost(6 * table, table + width * (1 + biases))
        return [block] * self.n_layer, Cost(0, table + self.n_positions * width), head
