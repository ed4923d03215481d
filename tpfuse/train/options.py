"""Every option of the commands, as typed dataclasses: flags, TOML keys and documentation are made from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tpfuse.choices import Balance, GradientDtype, Implementation, Kernels, Offload, Recompute, Schedule

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Autocast = Literal["none", "bfloat16", "float16"]
LearningRateSchedule = Literal["cosine", "linear", "constant", "wsd"]
Preset = Literal["tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"]
OptionalPath = Annotated[
    Path | None,
    arg(metavar="PATH", help_behavior_hint=lambda default: "" if default == "None" else f"(default: {default})"),
]
"""A path whose help text says itself what None means."""


@dataclass(frozen=True)
class ModelOptions:
    """The GPT. A preset sets everything here and some of the training options; flags win over it."""

    preset: Preset = "tiny"
    """Named configuration."""
    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Number of attention heads, a multiple of parallel.tp."""
    n_embd: int = 128
    """Width of the model, a multiple of n_head."""
    n_positions: int = 128
    """Context length in tokens."""
    bias: bool = True
    """Whether linear layers and norms have biases."""
    dropout: float = 0.0
    """Dropout probability after the embedding, in attention and on the residual paths."""
    layer_norm_epsilon: float = 1e-5
    """Number that norms add to the variance."""


@dataclass(frozen=True)
class DataOptions:
    """The text."""

    path: OptionalPath = None
    """A text file, a folder of text files, a token file (.bin), a folder of token files, or a pattern in quotes such as
    'fineweb_train_*.bin'. Default: the Python standard library."""
    val_path: OptionalPath = None
    """The same for validation. Default: the end of the training tokens."""
    tokenizer: str = "bytes"
    """bytes, chars, gpt2, or a FILE.json: the tokenizers library's, or tokenizer.json of a run. A JSON beside a token
    file wins over it."""
    val_fraction: float = 0.1
    """The part of the tokens, at their end, that validation takes where there is no val_path."""


@dataclass(frozen=True)
class TrainOptions:
    """The training loop."""

    steps: int = 1000
    """Number of optimizer steps."""
    batch: int = 32
    """Sequences per optimizer step, counted over all ranks."""
    micro_batch: int = 0
    """Sequences per forward pass of one rank. Gradients are accumulated over the micro-batches of a step. 0: the
    rank's whole share of the batch."""
    seed: int = 1337
    """Seed of initial weights, batches and dropout."""
    dtype: Dtype = "float32"
    """Dtype of parameters and activations. With bfloat16 and float16 the optimizer keeps float32 master weights."""
    autocast: Autocast = "none"
    """Half type in which matrix products and attention compute (torch.autocast) while parameters, norms, residual
    paths and losses stay in float32. none: everything computes in --train.dtype."""
    deterministic: bool = False
    """Whether the same run gives the same bits every time on GPUs too, as it does on CPU. Attention is then Triton's,
    because the gradients of cuDNN's are not the same every time."""
    compile: bool = False
    """Whether training steps run by torch.compile, which takes about a minute at the start. Evaluations do not."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: none, selective (attention and the MLP's
    activation), or full (everything but the input of each block)."""
    eval_every: int = 250
    """Steps between evaluations. 0: the run never evaluates."""
    eval_batches: int = 20
    """Number of batches per evaluation."""
    save_every: int = 500
    """Steps between checkpoints. 0: the run saves at its end only."""
    keep: int = 2
    """Number of newest checkpoints that are kept. 0: all."""
    log_every: int = 10
    """Steps between reports."""
    expandable_segments: bool = True
    """Whether torch's CUDA allocator grows its segments, which loses less memory to fragmentation."""


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with weight decay on matrices only, and the schedule of the learning rate. The lengths of the schedule are
    numbers of steps, or of tokens when they are written as in 375e6tokens."""

    schedule: LearningRateSchedule = "cosine"
    """What the learning rate does after its linear warm-up: cosine and linear fall to min_lr at decay_steps, wsd
    (arXiv:2404.06395) stays at lr and falls at the end, constant stays at lr."""
    lr: float = 1e-3
    """Highest learning rate."""
    min_lr: float = 1e-4
    """Learning rate from decay_steps on."""
    warmup: int | str = 100
    """Steps or tokens until lr is reached."""
    decay_steps: int | str = 0
    """Step, or number of tokens, at which min_lr is reached; 0: train.steps."""
    decay: int | str = 0
    """Steps or tokens of the fall at the end of schedule wsd; 0: a tenth of decay_steps."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors have none."""
    beta1: float = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: float = 0.99
    """Decay rate of AdamW's second moment."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks share the work."""

    tp: int = 1
    """Number of tensor-parallel ranks, which share the matrices of each layer."""
    dp: int = 0
    """Number of data-parallel ranks, which share the sequences of a batch. 0: the GPUs, or the ranks of torchrun,
    divided by tp x cp; on CPU 1."""
    cp: int = 1
    """Number of context-parallel ranks, which share the tokens of each sequence."""
    cp_schedule: Schedule = "auto"
    """How context-parallel ranks attend to each other's tokens: ring (blocks of keys and values travel from rank to
    rank), all_gather (every rank fetches all blocks), ulysses (ranks exchange heads for tokens; cp must divide the
    heads of a rank), ulysses_ring (both), or auto, which chooses one of them."""
    cp_balance: Balance = "zigzag"
    """Which tokens of a sequence a context-parallel rank holds: zigzag (a chunk from the front and one from the end,
    which gives causal attention equal work on all ranks), contiguous (one chunk) or striped (every cp-th token)."""
    cp_ulysses: int = 0
    """Number of ranks that exchange heads under ulysses_ring. 0: the largest divisor of cp, below cp, that divides the
    heads of a rank."""
    replicas: int = 1
    """Number of groups of ranks, within each of which ZeRO's stage 3 shards the parameters; it must divide dp x cp.
    With as many groups as nodes, parameters are gathered within a node only."""
    impl: Implementation = "auto"
    """How tensor-parallel GEMMs and ZeRO communicate: fused (Triton kernels), direct (shared memory of CPU ranks),
    collective (NCCL, Gloo), or auto, which chooses one of them."""
    measure_seconds: float = -1.0
    """Seconds that the first step may take to measure, for impl auto, which implementation of each product is the
    fastest on this machine. 0: measure nothing. -1: 20 on GPUs, 0 on CPU, where direct is the fastest."""


@dataclass(frozen=True)
class ZeroOptions:
    """Which state of the model data-parallel ranks shard among themselves (ZeRO, arXiv:1910.02054)."""

    stage: int = 0
    """ZeRO's stage. 0: nothing is sharded; 1: the optimizer's state; 2: also the gradients; 3: also the parameters."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which gradients are accumulated and kept: float32, or parameter for the parameters' dtype. Stage 3
    takes float32 only."""
    reduce_dtype: Literal["gradient", "float32", "parameter"] = "gradient"
    """Dtype in which gradients are sent: float32, parameter for the parameters' dtype, or gradient for the dtype in
    which they are kept."""
    offload: Offload = "none"
    """Where the optimizer's state lives: none (on the device), optimizer (in the host's memory) or nvme (in files)."""
    offload_path: OptionalPath = None
    """Folder on a local disk for the optimizer's state, which offload nvme needs."""
    compression: Literal["none", "bf16", "powersgd"] = "none"
    """Compression of the gradients that nodes send to each other, where the ranks of a node share memory. Within a
    node gradients are never compressed."""
    powersgd_rank: int = 4
    """Rank of the matrices that approximate a gradient under compression powersgd."""


@dataclass(frozen=True)
class CommOptions:
    """How ranks wait for each other."""

    timeout: float = 60.0
    """Seconds that a rank waits for another rank. Then all ranks end with an error that names it."""


@dataclass(frozen=True)
class DebugOptions:
    """Checks that help to find a fault and cost time."""

    fingerprint: bool = False
    """Whether ranks compare the name, shape and dtype of each operation before it begins. Where these differ, all
    ranks end and show both sides."""


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
    """Kernels that compute: auto (Triton on GPUs, torch on CPU), triton (slow on CPU, where it is interpreted) or
    torch."""
    out: OptionalPath = None
    """Folder for everything the run writes, new or empty unless --resume is given. Default: runs/DATE-TIME."""
    init_from: OptionalPath = None
    """Folder of another run, or of a Hugging Face GPT-2 (config.json, model.safetensors), from whose weights the run
    starts at step 0. The model's shape and the tokenizer come from there too. A smaller --model.n-positions cuts the
    position table. Default: random weights."""
    resume: bool = False
    """Whether to go on from the newest good checkpoint of the run folder --out. Its configuration is taken; flags win
    over it."""
    config: OptionalPath = None
    """TOML file with any of these options, as `model.n_layer` in a table [model]. The config.toml of a run is one."""


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into a token file, which `tpfuse train` reads from the disk."""

    out: Path
    """Folder for tokens.bin and tokens.json."""
    data: DataOptions = field(default_factory=DataOptions)
    config: OptionalPath = None
    """TOML file with these options in a table [data]."""


@dataclass(frozen=True)
class EvaluateDataOptions:
    """The text to evaluate on."""

    path: OptionalPath = None
    """A text or token files, as for `tpfuse train`. Default: the run's validation tokens."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure the loss of a run's newest good checkpoint on a whole text, on one rank.

    RUN is the folder that `tpfuse train` has written.
    """

    data: EvaluateDataOptions = field(default_factory=EvaluateDataOptions)


@dataclass(frozen=True)
class SampleCommand:
    """Generate text with the newest good checkpoint of a run.

    RUN is the folder that `tpfuse train` has written.
    """

    prompt: Annotated[str, arg(help_behavior_hint="(default: a line break)")] = "\n"
    """Text to continue."""
    prompt_file: OptionalPath = None
    """UTF-8 file with the text to continue. Default: --prompt."""
    samples: int = 1
    """Number of texts to generate, each drawn by itself."""
    tokens: int = 256
    """Number of tokens to generate."""
    temperature: float = 0.8
    """Number that divides the logits. 0: the most probable token is taken."""
    top_k: int = 0
    """Number of most probable tokens among which each one is chosen. 0: all."""
    top_p: float = 1.0
    """Each token is chosen among the fewest most probable ones whose probabilities add up to this. 1: all."""
    seed: int = 0
    """Seed of the random choice of tokens."""


@dataclass(frozen=True)
class ExportCommand:
    """Write the newest good checkpoint of a run as a Hugging Face GPT-2.

    transformers reads the folder, and so does `tpfuse train --init-from`.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder that `tpfuse train` has written."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder to write, which is new or empty."""


@dataclass(frozen=True)
class MemoryCommand:
    """Count the memory that each rank of a training run will hold.

    CONFIG is a preset, such as gpt2-124m, or a TOML file of `tpfuse train`.
    """

    ranks: int = 0
    """Number of all ranks. 0: the configuration's tp x cp x dp."""
    tp: int = 0
    """Number of tensor-parallel ranks. 0: the configuration's."""
    cp: int = 0
    """Number of context-parallel ranks. 0: the configuration's."""
    stage: Literal["all", "0", "1", "2", "3"] = "all"
    """ZeRO's stage. all: the table has a column for each."""
    micro_batch: int = 0
    """Sequences per forward pass of one rank. 0: the configuration's."""
    recompute: Literal["config", "none", "selective", "full"] = "config"
    """What the backward pass computes again instead of keeping it. config: as the configuration says."""
    vocab_size: int = 0
    """Number of tokens in the vocabulary. 0: that of the configuration's tokenizer."""


@dataclass(frozen=True)
class TuneCommand:
    """Measure tile sizes of the kernels on this GPU and write them into a table.

    OPERATOR is the name of a kernel, such as gemm. Default: all.
    """

    out: OptionalPath = None
    """File that the whole table is written to. Default: kernels/configurations.toml."""
    minutes: float = 0.0
    """Minutes after which no further candidate is measured. 0: no limit."""


@dataclass(frozen=True)
class VerifyCommand:
    """Compare every kernel with its reference on this machine and compile it.

    It takes some minutes on two CPU cores. The exit status is 1 where one fails.
    """

    operators: Annotated[tuple[str, ...], arg(metavar="OPERATOR ...", help_behavior_hint="(default: all)")] = ()
    """Operators to verify, such as gemm or rope. The name training stands for two training steps of the small GPT on
    two ranks with each implementation of tensor parallelism."""
    json: bool = False
    """Whether to print one JSON document instead of tables."""
    compile: bool = True
    """Whether to compile the kernels as well and show their registers, spills and shared memory, for the GPU of this
    machine, or for sm_90 where there is none."""
