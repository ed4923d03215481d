"""Define the options of all commands as typed dataclasses. Flags, TOML keys and help texts are made from them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from tpfuse.choices import (
    Accumulate,
    Balance,
    ContextSchedule,
    GradientDtype,
    Implementation,
    Kernels,
    MomentDtype,
    PipelineSchedule,
    Recompute,
)

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Autocast = Literal["none", "bfloat16", "float16"]
LearningRateSchedule = Literal["cosine", "linear", "constant", "wsd"]
Documents = Literal["attend", "mask"]
Order = Literal["shuffled", "random"]
Preset = Literal["tiny", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m"]

T = TypeVar("T")

try:
    from tyro.conf import Positional, arg
except ModuleNotFoundError:  # Then nobody reads a command line by these classes, but `tpfuse verify` trains with them.
    Positional = Annotated[T, None]  # type: ignore[misc]

    def arg(**settings: object) -> None:  # type: ignore[no-redef]
        """Return no settings."""


def _hint(default: str) -> str:
    """Return what the help says after the text of an optional option, whose text names the default in words."""
    return "" if default == "None" else f"(default: {default})"


OptionalPath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint=_hint)]
OptionalInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint=_hint)]
OptionalFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint=_hint)]
OptionalText = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint=_hint)]
OptionalLength = Annotated[int | str | None, arg(metavar="STEPS", help_behavior_hint=_hint)]


class Effect(Enum):
    """The effect of a changed option on the next step of a run that resumes; each option of `TrainCommand` has one."""

    NUMBERS = "the step computes other numbers"
    ROUNDING = "the step rounds differently"
    ORDER = "the step sums in another order, unless virtual ranks fix it"
    NOTHING = "the step computes the same, or what the option names is compared"
    REFUSED = "nothing: only new runs read it"


Alters = Annotated[T, Effect.NUMBERS]
Rounds = Annotated[T, Effect.ROUNDING]
Orders = Annotated[T, Effect.ORDER]
Keeps = Annotated[T, Effect.NOTHING]
Begins = Annotated[T, Effect.REFUSED]


@dataclass(frozen=True)
class Needs:
    """The condition under which an option means something: a dimension of the layout, or a value of another option.

    said: that in words. met: whether a run has it. A new run refuses the option without it. A run that resumes without
    it drops the option that it had, and says so (`tpfuse.train.option_marks`).
    """

    said: str
    met: Callable[["TrainCommand"], bool]


def _has_replicas(options: "TrainCommand") -> bool:
    ranks = options.parallel.dp or 2  # those of this machine, if they are not given
    return options.zero.stage == 3 and ranks * options.parallel.cp > 1


OfPipelines = Annotated[T, Needs("--parallel.pp of at least 2", lambda run: run.parallel.pp > 1)]
OfContext = Annotated[T, Needs("--parallel.cp of at least 2", lambda run: run.parallel.cp > 1)]
OfUlyssesRing = Annotated[
    T,
    Needs(
        "--parallel.cp of at least 2 with --parallel.cp-schedule ulysses_ring",
        lambda run: run.parallel.cp > 1 and run.parallel.cp_schedule == "ulysses_ring",
    ),
]
OfReplicas = Annotated[T, Needs("--zero.stage 3 on several data-parallel ranks", _has_replicas)]
OfShardedGradients = Annotated[T, Needs("--zero.stage 2 and 3", lambda run: run.zero.stage >= 2)]
OfWholeParameters = Annotated[T, Needs("--zero.stage 0, 1 and 2", lambda run: run.zero.stage <= 2)]
OfMuon = Annotated[T, Needs("--optim.name muon", lambda run: run.optim.name == "muon")]
OfWsd = Annotated[T, Needs("--optim.schedule wsd", lambda run: run.optim.schedule == "wsd")]
OfDecay = Annotated[T, Needs("--optim.schedule cosine, linear and wsd", lambda run: run.optim.schedule != "constant")]
OfFullRecompute = Annotated[
    T,
    Needs("--train.recompute full, which keeps the inputs of blocks alone", lambda run: run.train.recompute == "full"),
]


@dataclass(frozen=True)
class ModelOptions:
    """The model: a GPT, or a model of transformers. A preset sets its whole shape, which single flags override."""

    preset: Begins[Preset] = "tiny"
    """Named configuration to start from: the shape of the GPT, batch, steps and learning rate."""
    n_layer: Alters[int] = 4
    """Number of transformer blocks."""
    n_head: Alters[int] = 4
    """Number of attention heads, a multiple of parallel.tp."""
    n_embd: Alters[int] = 128
    """Width: features of each token, a multiple of n_head."""
    n_positions: Alters[int] = 128
    """Sequence length in tokens, the longest context of the GPT. Default with --model.from: at most 1024."""
    bias: Alters[bool] = True
    """Biases in linear layers and norms."""
    dropout: Alters[float] = 0.0
    """Dropout probability after the embedding, in attention and on the residual paths."""
    layer_norm_epsilon: Alters[float] = 1e-5
    """Number that each layer norm adds to the variance."""
    from_: Begins[Annotated[Path | None, arg(name="from", metavar="PATH", help_behavior_hint=_hint)]] = None
    """Hugging Face folder of a model of transformers to train instead of the GPT: config.json, tokenizer, and weights
    in safetensors, without which they are random. Among the options of the model it takes only --model.n-positions."""


@dataclass(frozen=True)
class DataOptions:
    """The text and its tokenizer."""

    path: Keeps[OptionalPath] = None
    """Text: a file, a folder or a quoted pattern such as 'web/*.jsonl' of text, jsonl, parquet, json or csv, compressed
    or not; or tokens in .bin or .npy; or a FILE.toml of sources and weights. Default: the Python standard library."""
    val_path: Keeps[OptionalPath] = None
    """Validation text, given as for --data.path. Default: the end of the training tokens."""
    field: Begins[str] = "text"
    """Field of the records of jsonl, parquet, json and csv that holds the text."""
    tokenizer: Begins[str] = "bytes"
    """Tokenizer: bytes, chars, gpt2, a FILE.json (tokenizers library or a run), a FILE.model (sentencepiece), or the
    folder of one. The JSON file beside a token file overrides it."""
    documents: Alters[Documents] = "attend"
    """Attention across documents: attend (to all earlier tokens of the sequence), or mask (within each document alone).
    A document begins at the tokenizer's token for that, such as <|endoftext|>."""
    val_fraction: Alters[float] = 0.1
    """Fraction of the tokens, at their end, that validates without --data.val-path."""
    order: Alters[Order] = "shuffled"
    """Order of the windows of the text: shuffled (each token once in an epoch) or random (each begins anywhere)."""


@dataclass(frozen=True)
class TrainOptions:
    """The training loop: its length, precision, evaluations and checkpoints."""

    steps: Keeps[int] = 1000
    """Number of optimizer steps."""
    batch: Alters[int] = 32
    """Global batch size: sequences in each optimizer step, over all ranks."""
    micro_batch: Rounds[OptionalInt] = None
    """Micro-batch size: sequences in each forward pass of a rank; the step accumulates gradients over them (gradient
    accumulation). Default: as many as the free memory holds, at most all of the rank, and in a pipeline at least 4 x pp
    micro-batches if possible."""
    virtual_ranks: Rounds[int] = 0
    """Virtual data-parallel ranks, a power of two: the run has the same bits for every parallel.dp that divides it,
    every parallel.pp and every ZeRO stage (docs/training.md). 0: the order of sums is that of the real ranks."""
    seed: Alters[int] = 1337
    """Seed of the initial weights, the batches and dropout."""
    dtype: Alters[Dtype] = "float32"
    """Dtype of parameters and activations. The optimizer adds float32 master weights to bfloat16 and float16."""
    autocast: Alters[Autocast] = "none"
    """Mixed precision (torch.autocast): dtype of matrix products and attention; none: that of --train.dtype."""
    deterministic: Rounds[bool] = False
    """Bitwise reproducible runs on GPUs too, as on CPUs. Attention then runs by Triton instead of cuDNN."""
    compile: Rounds[bool] = False
    """Compilation of training steps by torch.compile, which takes about a minute at the start."""
    cuda_graph: Keeps[Literal["auto", "yes", "no"]] = "auto"
    """Replay of the forward and backward passes of a step as one CUDA graph, from the fourth step on, so that the host
    does not launch each kernel: yes, which --train.cuda-graph alone means too; no; or auto, on one GPU if nothing
    forbids it. With yes on several GPUs, gradients are summed over ranks after all passes."""
    recompute: Rounds[Recompute] = "none"
    """Activation checkpointing: none, selective (attention and the MLP's activation are computed again in the backward
    pass) or full (everything but the input of each block)."""
    offload_activations: OfFullRecompute[Keeps[bool]] = False
    """Under recompute full, the inputs of blocks are in the host's memory from the forward to the backward pass."""
    eval_every: Keeps[int] = 250
    """Steps between evaluations, which also begin and end a run. 0: never evaluate."""
    eval_batches: Keeps[int] = 20
    """Number of batches in each evaluation."""
    save_every: Keeps[int] = 500
    """Steps between checkpoints. 0: only one at the end."""
    keep: Keeps[int] = 2
    """Number of newest checkpoints to keep. 0: all."""
    log_every: Keeps[int] = 10
    """Steps between reports of loss and speed."""
    expandable_segments: Keeps[bool] = True
    """Growing segments in torch's CUDA allocator, which lose less memory to fragmentation."""


@dataclass(frozen=True)
class OptimOptions:
    """AdamW, which decays matrices only, or Muon; the learning rate. Lengths are steps, or tokens as in 375e6tokens."""

    name: Alters[Literal["adamw", "muon"]] = "adamw"
    """Optimizer: adamw, or muon for the matrices of the blocks, with adamw for all other parameters."""
    schedule: Alters[LearningRateSchedule] = "cosine"
    """Learning rate schedule after a linear warm-up: cosine and linear fall to min_lr at decay_steps, wsd
    (arXiv:2404.06395) stays at lr and falls at the end, constant stays at lr."""
    lr: Alters[float] = 1e-3
    """Learning rate at the end of the warm-up, the highest."""
    min_lr: Alters[OptionalFloat] = None
    """Learning rate from decay_steps on, at most lr. Schedule constant ignores it. Default: a tenth of lr."""
    warmup: Alters[int | str] = 100
    """Length of the warm-up, in which the learning rate rises linearly."""
    decay_steps: OfDecay[Alters[OptionalLength]] = None
    """Length after which the learning rate is min_lr. A resumed run keeps its own. Default: train.steps."""
    decay: OfWsd[Alters[OptionalLength]] = None
    """Length of the fall of schedule wsd at its end. Default: a tenth of decay_steps."""
    weight_decay: Alters[float] = 0.1
    """Weight decay of matrices, as a coefficient of the learning rate. Vectors do not decay."""
    beta1: Alters[float] = 0.9
    """AdamW's beta1: decay rate of the first moment."""
    beta2: Alters[float] = 0.99
    """AdamW's beta2: decay rate of the second moment."""
    state_dtype: Alters[MomentDtype] = "float32"
    """Dtype of AdamW's two moments: float32, or bfloat16, rounded at random so that small changes are not lost."""
    clip: Alters[float] = 1.0
    """Gradient clipping: the highest global norm of the gradient. 0: do not clip."""
    muon_lr: OfMuon[Alters[OptionalFloat]] = None
    """Muon's learning rate where AdamW has optim.lr; it follows the same schedule. Default: optim.lr."""
    muon_adjust: OfMuon[Alters[Literal["match_rms_adamw", "original"]]] = "match_rms_adamw"
    """What multiplies Muon's learning rate for a matrix of m x n: match_rms_adamw (0.2 sqrt(max(m, n)), with which
    AdamW's rate suits) or original (sqrt(max(1, m / n)))."""
    muon_momentum: OfMuon[Alters[float]] = 0.95
    """Muon's momentum: decay rate of its only moment."""
    muon_nesterov: OfMuon[Alters[bool]] = True
    """Nesterov's form of Muon's momentum."""
    muon_steps: OfMuon[Alters[int]] = 5
    """Iterations of Newton-Schulz in each update."""
    muon_coefficients: OfMuon[Alters[str]] = "3.4445,-4.775,2.0315"
    """Coefficients of x, x^3 and x^5 in an iteration of Newton-Schulz."""
    muon_eps: OfMuon[Alters[float]] = 1e-7
    """Least norm by which Newton-Schulz divides a matrix."""


@dataclass(frozen=True)
class ParallelOptions:
    """How ranks share the work, and how they communicate."""

    tp: Rounds[int] = 1
    """Tensor parallelism with sequence parallelism: ranks that share the matrices of each layer."""
    dp: Orders[OptionalInt] = None
    """Data parallelism: ranks that share the sequences of a batch. Default: all ranks divided by tp x cp x pp."""
    cp: Rounds[int] = 1
    """Context parallelism (ring attention): ranks that share the tokens of each sequence."""
    cp_schedule: OfContext[Rounds[ContextSchedule]] = "auto"
    """Context-parallel attention: ring (keys and values travel), all_gather (of all keys and values), ulysses (heads
    for tokens; cp must divide the heads of a rank), ulysses_ring (both), or auto."""
    cp_balance: OfContext[Rounds[Balance]] = "zigzag"
    """Tokens of a context-parallel rank: zigzag (a chunk from the front and one from the end, equal work in causal
    attention), contiguous (one chunk) or striped (every cp-th token)."""
    cp_ulysses: OfUlyssesRing[Rounds[OptionalInt]] = None
    """Ulysses group size under ulysses_ring. Default: the largest divisor of cp below cp that divides the heads."""
    pp: Orders[int] = 1
    """Pipeline parallelism: ranks that share the layers. The micro-batches pass from rank to rank."""
    pp_schedule: OfPipelines[Orders[PipelineSchedule]] = "1f1b"
    """Pipeline schedule: gpipe (all forward passes first), 1f1b (one forward, one backward), interleaved_1f1b (several
    stages on each rank), zero_bubble (weight gradients fill idle time), or zbv (zero_bubble in a V of two stages)."""
    pp_stages_per_rank: OfPipelines[Orders[OptionalInt]] = None
    """Pipeline stages of each rank. Default: 2 for interleaved_1f1b and zbv, 1 for the others."""
    pp_layers: OfPipelines[Orders[OptionalText]] = None
    """Layers of each pipeline stage, as in 3,5,4,4. Default: about equal work on all ranks, embedding and head too."""
    replicas: OfReplicas[Orders[int]] = 1
    """HSDP: replica groups of ZeRO stage 3 (FSDP), each of which shards the parameters. The number of nodes keeps
    gathers within nodes. It must divide dp x cp."""
    impl: Rounds[Implementation] = "auto"
    """Implementation of tensor-parallel GEMMs and ZeRO: fused (Triton kernels), direct (shared memory of CPU ranks),
    collective (NCCL, Gloo), or auto, which chooses one."""
    measure_seconds: Rounds[OptionalFloat] = None
    """Seconds in the first step for measuring which implementation is the fastest under impl auto. 0: measure nothing.
    Default: 20 on GPUs, 0 on CPUs, where direct is the fastest."""

    @property
    def data_ranks(self) -> int:
        """Return dp, which is filled in before a run starts (`tpfuse.train.check_options.with_layout`)."""
        assert self.dp is not None
        return self.dp


@dataclass(frozen=True)
class ZeroOptions:
    """The state that data-parallel and context-parallel ranks shard among themselves (ZeRO, arXiv:1910.02054)."""

    stage: Orders[int] = 0
    """ZeRO stage: 0 (shard nothing), 1 (optimizer state), 2 (and gradients) or 3 (and parameters: FSDP)."""
    gradient_dtype: OfWholeParameters[Alters[GradientDtype]] = "float32"
    """Dtype in which gradients accumulate: float32, or parameter for the parameters' dtype. Stage 3: float32 only."""
    reduce_dtype: Alters[Literal["gradient", "float32", "parameter"]] = "gradient"
    """Dtype in which gradients are reduced over ranks: float32, parameter, or gradient for that of gradient_dtype."""
    accumulate: OfShardedGradients[Orders[Accumulate]] = "sharded"
    """Gradients of earlier micro-batches that a rank keeps at stages 2 and 3: sharded (its shard of their sum: each
    micro-batch is reduced) or whole (all: one reduction in a step, for four bytes a parameter)."""
    offload: Rounds[str] = "none"
    """Offload of the optimizer's state: none, host (to the host's memory), or a folder on a local disk. At stage 3 the
    shards of parameters go there too, and those of gradients to the host's memory."""
    compression: OfWholeParameters[Alters[str]] = "none"
    """Gradient compression between nodes: none, bf16, or powersgd-RANK (products of two matrices of this rank), as in
    powersgd-4. Within a node gradients are never compressed."""


@dataclass(frozen=True)
class CommOptions:
    """How ranks wait for each other."""

    timeout: Keeps[float] = 60.0
    """Longest wait for another rank, in seconds. Then all ranks end with an error that names it."""


@dataclass(frozen=True)
class DebugOptions:
    """Checks that help to find a fault but cost time."""

    fingerprint: Keeps[bool] = False
    """Comparison of each operation's name, shape and dtype between ranks before it begins, so that a rank that differs
    stops in that operation."""


@dataclass(frozen=True)
class ProfileOptions:
    """A record of what the ranks do in some steps. `tpfuse profile` sets these options and explains the result."""

    steps: Keeps[str] = "3:5"
    """Steps to record: one number, or the first and the last as in 3:5. The first step of a run is step 1."""
    trace: Keeps[OptionalPath] = None
    """Folder for the spans of every rank: layers, operators, communication, and waits for other ranks."""
    torch: Keeps[OptionalPath] = None
    """Folder for the trace of torch.profiler and a snapshot of the memory of every rank."""
    nvtx: Keeps[bool] = False
    """NVTX ranges of steps, layers and operators for Nsight Systems, in all steps."""


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
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    kernels: Rounds[Kernels] = "auto"
    """Kernels: auto (Triton on GPUs, torch on CPUs), triton (interpreted on CPUs, which is slow) or torch."""
    out: Keeps[OptionalPath] = None
    """Run folder, which must be new or empty unless --resume is given. Default: runs/DATE-TIME."""
    init_from: Begins[OptionalPath] = None
    """Folder of another run, or of a Hugging Face GPT-2, whose weights, shape and tokenizer step 0 starts from. A
    smaller --model.n-positions cuts the position table. Default: random weights."""
    resume: Keeps[Literal["no", "yes", "auto"]] = "no"
    """Continue from the newest good checkpoint in --out, with the options of that run, which flags override: yes,
    which --resume alone means too, or auto, which starts the run if --out has none."""
    restarts: Keeps[int] = 0
    """Start the ranks again and resume, up to this often, after one of them was killed or no longer answers. Under
    torchrun: its --max-restarts, with --resume auto."""
    config: Keeps[OptionalPath] = None
    """TOML file of options, such as n_layer in a table [model], or the config.toml of a run."""


@dataclass(frozen=True)
class PrepareDataOptions:
    """The text and its tokenizer."""

    path: OptionalPath = None
    """Text, given as for `tpfuse train`. Default: the Python standard library."""
    field: str = "text"
    """Field of the records of jsonl, parquet, json and csv that holds the text."""
    tokenizer: str = "bytes"
    """Tokenizer, given as for `tpfuse train`."""


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into a token file, which `tpfuse train` reads from the disk."""

    out: Path
    """Folder for tokens.bin and tokens.json."""
    data: PrepareDataOptions = field(default_factory=PrepareDataOptions)
    config: OptionalPath = None
    """TOML file with these options in a table [data]."""


@dataclass(frozen=True)
class LayoutOptions:
    """The ranks, which this command starts, or which torchrun has started."""

    tp: int = 1
    """Tensor-parallel ranks, which share the matrices of each layer."""
    cp: int = 1
    """Context-parallel ranks, which share the tokens of each sequence."""
    dp: OptionalInt = None
    """Data-parallel ranks, which share the windows or the texts. Default: 1, or what torchrun starts for it."""
    pp: int = 1
    """Pipeline ranks, which share the layers."""


@dataclass(frozen=True)
class EvaluateDataOptions:
    """The text to evaluate on."""

    path: OptionalPath = None
    """Text or token files, given as for `tpfuse train`. Default: the run's validation tokens."""
    field: str = "text"
    """Field of the records of jsonl, parquet, json and csv that holds the text."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure the loss of a model on a whole text, on one rank or many.

    FOLDER is a run of `tpfuse train`, or a model of Hugging Face.
    """

    data: EvaluateDataOptions = field(default_factory=EvaluateDataOptions)
    parallel: LayoutOptions = field(default_factory=LayoutOptions)
    comm: CommOptions = field(default_factory=CommOptions)
    length: OptionalInt = None
    """Window length in tokens. Default: the sequence length of training."""


@dataclass(frozen=True)
class SampleCommand:
    """Generate text with a model, on one rank or many.

    FOLDER is a run of `tpfuse train`, or a model of Hugging Face.
    """

    parallel: LayoutOptions = field(default_factory=LayoutOptions)
    comm: CommOptions = field(default_factory=CommOptions)
    prompt: Annotated[str, arg(help_behavior_hint="(default: a line break)")] = "\n"
    """Text to continue."""
    prompt_file: OptionalPath = None
    """UTF-8 file of the text to continue. Default: the text of --prompt."""
    samples: int = 1
    """Number of texts, drawn independently."""
    tokens: int = 256
    """Most tokens to generate for each text."""
    temperature: float = 0.8
    """Sampling temperature. 0: take the most probable token."""
    top_k: OptionalInt = None
    """Number of most probable tokens to draw from. Default: all tokens."""
    top_p: float = 1.0
    """Nucleus sampling: draw from the smallest set of most probable tokens with at least this probability."""
    seed: int = 0
    """Seed of the draws."""


@dataclass(frozen=True)
class ExportCommand:
    """Write the newest good checkpoint of a run for Hugging Face's transformers.

    The GPT becomes a GPT-2, which `tpfuse train --init-from` can read too.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of a run of `tpfuse train`."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder for the model, which must be new or empty."""


@dataclass(frozen=True)
class MemoryCommand:
    """Count the memory that each rank of a training run will hold.

    MODEL is a preset, a TOML file of `tpfuse train`, or a Hugging Face folder.
    """

    ranks: OptionalInt = None
    """Number of ranks in total. Default: tp x cp x dp x pp of the configuration."""
    tp: OptionalInt = None
    """Tensor-parallel ranks. Default: those of the configuration."""
    cp: OptionalInt = None
    """Context-parallel ranks. Default: those of the configuration."""
    pp: OptionalInt = None
    """Pipeline ranks. Default: those of the configuration."""
    stage: Annotated[Literal["0", "1", "2", "3"] | None, arg(metavar="{0,1,2,3}", help_behavior_hint=_hint)] = None
    """ZeRO stage. Default: one column for each stage."""
    micro_batch: OptionalInt = None
    """Sequences in each forward pass of a rank. Default: those of the configuration, or the fewest."""
    recompute: Annotated[Recompute | None, arg(metavar="{none,selective,full}", help_behavior_hint=_hint)] = None
    """Activation checkpointing, as for `tpfuse train`. Default: as the configuration says."""
    vocab_size: OptionalInt = None
    """Vocabulary in tokens. Default: that of the configuration's tokenizer."""


@dataclass(frozen=True)
class PlanCommand:
    """Predict which layout trains a model fastest, how fast, in how much memory.

    Without --calibrate nothing is measured on this machine, and no GPU is needed.
    """

    model: OptionalText = None
    """Model: a preset, a TOML file of `tpfuse train`, or a config.json of Hugging Face or its folder."""
    layers: OptionalInt = None
    """Transformer blocks of a GPT to plan for without --model."""
    width: OptionalInt = None
    """Width of that GPT: features of each token."""
    heads: OptionalInt = None
    """Attention heads of that GPT in each layer."""
    vocab_size: OptionalInt = None
    """Vocabulary in tokens. Default: that of the model's tokenizer; without --model that of GPT-2."""
    tokens: OptionalInt = None
    """Sequence length in tokens. Default: as the preset or the TOML file says; for other models at most 1024."""
    batch: OptionalInt = None
    """Global batch size in sequences. Default: as the preset or the TOML file says; for other models the smallest
    multiple of --gpus with at least 2**20 tokens."""
    gpus: int = 8
    """Number of GPUs in total."""
    gpu: str = "h100"
    """GPU: a name such as h100 or a100, or a FILE.toml that describes one and its links."""
    nodes: OptionalInt = None
    """Number of nodes. Default: nodes of 8 GPUs."""
    network: str = "400Gb"
    """Bandwidth of the network between nodes for each GPU, in bits per second."""
    json: OptionalText = None
    """JSON file for all layouts that fit, with their times and memory. -: print them instead of the report."""
    toml: OptionalPath = None
    """TOML file for the options of the best layout, which `tpfuse train --config` reads."""
    calibrate: OptionalPath = None
    """TOML file, for --gpu, into which this machine's GPUs are measured for half a minute, instead of planning."""


@dataclass(frozen=True)
class WatchCommand:
    """Show the metrics of a run in a browser of this machine.

    RUN is a folder that `tpfuse train` has written, or is writing.
    """

    port: int = 8800
    """Port of 127.0.0.1 that serves the page. 0: any free port."""


@dataclass(frozen=True)
class HangCommand:
    """Say which rank the others waited for, and show the Python stack of each.

    RUN is the folder of a run of `tpfuse train` that a time-out has ended.
    """


@dataclass(frozen=True)
class ProfileCommand:
    """Run some steps of a training under a profiler, and explain what they show.

    After -- comes a preset, a TOML file or a command, with its options, as in:

    tpfuse profile -- tiny --parallel.tp 2

    `tpfuse profile summary FOLDER` explains what another program has recorded.
    """

    with_: Annotated[Literal["trace", "nsys", "ncu", "torch"], arg(name="with")] = "trace"
    """Profiler: trace (tpfuse's own, also on CPUs), nsys (Nsight Systems), ncu (Nsight Compute) or torch
    (torch.profiler, with a snapshot of the memory)."""
    steps: str = "3:5"
    """Steps to record: one number, or the first and the last as in 10:12. The run ends after them."""
    kernel: OptionalText = None
    """Regular expression of the kernels that ncu measures. Those that wait for other ranks need no command: tpfuse
    launches them as one rank alone."""
    out: OptionalPath = None
    """Folder for all files, which must be new or empty. Default: profiles/DATE-TIME."""
    print: bool = False
    """Print the commands that would run, and run nothing."""


@dataclass(frozen=True)
class ProfileSummaryCommand:
    """Explain the traces in a folder: those of `tpfuse profile`, or of tpfuse.profile.record in another program."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder of the traces, for the summary and the picture too."""


@dataclass(frozen=True)
class TuneCommand:
    """Measure tile sizes of the kernels on this GPU and write them into a table."""

    operators: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[OPERATOR ...]", help_behavior_hint="(default: all)")
    ] = ()
    """Kernels to measure, such as gemm."""
    out: OptionalPath = None
    """File for the whole table. Default: kernels/configurations.toml."""
    minutes: OptionalFloat = None
    """Minutes after which no further measurement starts. Default: no limit."""


@dataclass(frozen=True)
class DoctorCommand:
    """Find out what of this machine makes tpfuse fail or slow, and what it will use.

    The exit status is 1 if something will fail. Notes do not change it.
    """

    json: bool = field(default=False, metadata={"help": "Print one JSON document instead of text."})


@dataclass(frozen=True)
class VerifyCommand:
    """Compare every kernel with its reference on this machine.

    This takes some minutes on two CPU cores. The exit status is 1 if one fails.
    """

    operators: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Operators to verify, such as gemm. The name training stands for two training steps of the small"
            " GPT on two ranks with each implementation of tensor parallelism. (default: all)"
        },
    )
    json: bool = field(default=False, metadata={"help": "Print one JSON document instead of tables."})


FIRST: dict[type, tuple[str, ...]] = {
    TrainCommand: (
        "model.preset", "model.from", "data.path", "train.steps", "train.batch", "train.micro-batch", "optim.lr",
        "parallel.tp", "parallel.cp", "parallel.pp", "zero.stage", "out", "resume",
    ),
}  # fmt: skip
"""The options that --help shows, for commands with more than 15 of them. --help-all shows all."""
