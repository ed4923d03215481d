"""Every option of the commands, as typed dataclasses: flags, TOML keys and documentation are made from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tpfuse.comm.sequence import Balance
from tpfuse.implementation_choice import Implementation
from tpfuse.kernel_choice import Kernels
from tpfuse.parallel.gradient_buckets import GradientDtype
from tpfuse.parallel.offload import Offload
from tpfuse.parallel.recompute import Recompute
from tpfuse.parallel.ring_attention import Schedule

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Preset = Literal["tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"]


@dataclass(frozen=True)
class ModelOptions:
    """The GPT. A preset sets everything here (and some of the training options); flags win over it."""

    preset: Preset = "tiny"
    """Named configuration, a file of tpfuse/models."""
    n_layer: int = 4
    """Blocks."""
    n_head: int = 4
    """Attention heads; tensor parallelism must divide them."""
    n_embd: int = 128
    """Width; a multiple of n_head."""
    n_positions: int = 128
    """Context length in tokens."""
    bias: bool = True
    """Biases in linear layers and norms."""
    dropout: float = 0.0
    """Probability, after the embedding, in attention and on the residual paths."""


@dataclass(frozen=True)
class DataOptions:
    """The text."""

    path: Path | None = None
    """Text file, folder of text files, or a .bin of `tpfuse prepare`. Default: the Python standard library."""
    tokenizer: str = "bytes"
    """bytes, chars, gpt2, or a tokenizers FILE.json."""
    val_fraction: float = 0.1
    """Part at the end of the tokens that is kept for validation."""


@dataclass(frozen=True)
class TrainOptions:
    """The training loop."""

    steps: int = 1000
    """Optimizer steps."""
    batch: int = 32
    """Sequences per optimizer step, all ranks together."""
    micro_batch: int = 0
    """Sequences per forward pass of one rank; smaller ones are accumulated. 0: all of the rank's share."""
    seed: int = 1337
    """Of initial weights, batches and dropout."""
    dtype: Dtype = "float32"
    """Of parameters and activations; the half types keep float32 master weights."""
    recompute: Recompute = "none"
    """What is computed again in the backward pass instead of being kept: none, selective (attention and the MLP's
    activation), or full (all but the input of each block)."""
    eval_every: int = 250
    """Steps between evaluations; 0: never."""
    eval_batches: int = 20
    """Batches per evaluation."""
    save_every: int = 500
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints that are kept; 0: all."""
    log_every: int = 10
    """Steps between lines of metrics."""
    expandable_segments: bool = True
    """On GPUs torch's allocator grows its segments, so that less memory is lost between them."""


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with decay on matrices only, linear warm-up and cosine decay."""

    lr: float = 1e-3
    """Highest learning rate."""
    min_lr: float = 1e-4
    """Learning rate from decay_steps on."""
    warmup: int = 100
    """Steps until lr is reached."""
    decay_steps: int = 0
    """Step at which min_lr is reached; 0: train.steps."""
    weight_decay: float = 0.1
    """Of matrices."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks share the work."""

    tp: int = 1
    """Tensor-parallel ranks."""
    dp: int = 0
    """Data-parallel ranks; 0: the GPUs (or the ranks of torchrun) divided by tp x cp, 1 on CPU."""
    cp: int = 1
    """Context-parallel ranks, which share the tokens of each sequence."""
    cp_schedule: Schedule = "auto"
    """How they attend to each other's tokens: ring (blocks of keys and values travel), all_gather (every rank fetches
    all of them), ulysses (heads for tokens; cp must divide a rank's heads), ulysses_ring (both), or auto, which
    chooses."""
    cp_balance: Balance = "zigzag"
    """Which tokens a rank has: zigzag (a chunk from the front and one from behind, for equal work), contiguous (one
    chunk) or striped (dealt out one by one)."""
    cp_ulysses: int = 0
    """Ranks that exchange heads under ulysses_ring; 0: the largest divisor of cp below it that divides the heads."""
    replicas: int = 1
    """Groups of ranks, within each of which ZeRO's stage 3 shards the parameters; it must divide dp x cp. With as many
    as there are nodes, parameters are gathered within a node only."""
    impl: Implementation = "auto"
    """How tensor-parallel products and ZeRO communicate: fused (Triton kernels), direct (shared memory of CPU ranks),
    collective (NCCL, Gloo), or auto, which chooses."""


@dataclass(frozen=True)
class ZeroOptions:
    """What data-parallel ranks share of the model's state, after ZeRO (arXiv:1910.02054)."""

    stage: int = 0
    """0: nothing; 1: the optimizer's state; 2: and the gradients; 3: and the parameters."""
    gradient_dtype: GradientDtype = "float32"
    """In which gradients are accumulated and kept: float32, or the parameters' own. Not at stage 3."""
    reduce_dtype: Literal["gradient", "float32", "parameter"] = "gradient"
    """In which gradients travel: float32, the parameters' own, or as they are kept."""
    offload: Offload = "none"
    """Where the optimizer's state lives: none (on the device), optimizer (the host's memory) or nvme (files)."""
    offload_path: Path | None = None
    """Folder on a local disk, for offload nvme."""
    compression: Literal["none", "bf16", "powersgd"] = "none"
    """Of gradients that pass between nodes whose ranks share memory; nothing is lost within a node."""
    powersgd_rank: int = 4
    """Of the matrices that stand for a gradient under compression powersgd."""


@dataclass(frozen=True)
class CommOptions:
    """How ranks wait for each other."""

    timeout: float = 60.0
    """Seconds that a rank waits for another one before all end with an error that names it."""


@dataclass(frozen=True)
class DebugOptions:
    """What helps to find a fault and costs time."""

    fingerprint: bool = False
    """Before each operation ranks compare its name, shape and dtype; where they differ, all end and show both."""


@dataclass(frozen=True)
class TrainCommand:
    """Train a GPT on text, on one rank or many."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    zero: ZeroOptions = field(default_factory=ZeroOptions)
    comm: CommOptions = field(default_factory=CommOptions)
    debug: DebugOptions = field(default_factory=DebugOptions)
    kernels: Kernels = "auto"
    """What computes: auto (Triton on GPUs, torch on CPU), triton (on CPU interpreted, which is slow), or torch."""
    out: Path | None = None
    """Run folder, which must not exist. Default: runs/DATE-TIME."""
    resume: bool = False
    """Go on from the newest good checkpoint of the run folder, with its configuration under the flags."""
    config: Path | None = None
    """TOML file with any of these options in tables [model], [data], [train], [optim], [parallel], [zero], [comm],
    [debug]."""


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into a token file that `train` maps into memory."""

    out: Path
    """Folder for tokens.bin and tokens.json."""
    data: DataOptions = field(default_factory=DataOptions)
    config: Path | None = None
    """TOML file with a table [data]."""


@dataclass(frozen=True)
class SampleCommand:
    """Generate text with the newest good checkpoint of a run."""

    prompt: str = "\n"
    """Text to continue."""
    tokens: int = 256
    """Tokens to generate."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0: all."""
    seed: int = 0
    """Of the choice of tokens."""


@dataclass(frozen=True)
class MemoryCommand:
    """Count what each rank of a training run will hold, without starting it."""

    ranks: int = 0
    """All ranks; 0: as many as the configuration's tp x cp x dp."""
    tp: int = 0
    """Tensor-parallel ranks; 0: the configuration's."""
    cp: int = 0
    """Context-parallel ranks; 0: the configuration's."""
    stage: Literal["all", "0", "1", "2", "3"] = "all"
    """Of ZeRO; all: a column for each."""
    micro_batch: int = 0
    """Sequences per forward pass of one rank; 0: the configuration's."""
    recompute: Literal["config", "none", "selective", "full"] = "config"
    """What is computed again instead of being kept; config: as the configuration says."""
    vocab_size: int = 0
    """Tokens of the vocabulary; 0: of the configuration's tokenizer, where its name says it."""


@dataclass(frozen=True)
class TuneCommand:
    """Measure tile sizes on the GPU at hand and write kernels/configurations.toml."""

    out: Path | None = None
    """Write the whole table there instead."""
    minutes: float = 0.0
    """No candidate is begun after this long; 0: no limit."""


@dataclass(frozen=True)
class VerifyCommand:
    """Compare every kernel with its reference on this machine, and compile them all; exit status 1 where one fails."""

    operators: tuple[str, ...] = ()
    """Only these; "training" is two steps of GPT tiny at tp 2 with each implementation. Default: all."""
    json: bool = False
    """One JSON document on stdout."""
    compile: bool = True
    """Registers, spills and shared memory, for this machine's GPU, sm_90 where there is none."""
