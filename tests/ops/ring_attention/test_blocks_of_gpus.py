"""Blocks that torch's operators for GPUs compute (a stand-in, `attention_of_gpus`), and when Triton's kernels do."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend

from tests.ops.ring_attention.attention_of_gpus import attention_of_gpus
from tests.ops.ring_attention.whole_sequences import BF16, F32, Case, Way, check_call, heads_for
from tests.support.tiers import exhaustive
from tpfuse.choices import Implementation, Kernels
from tpfuse.ops.ring_attention import torch_blocks
from tpfuse.ops.ring_attention.call import RingCall
from tpfuse.ops.ring_attention.layout import SequenceLayout
from tpfuse.ops.ring_attention.triton_blocks import by_kernels, explained_blocks
from tpfuse.switches import use
from tpfuse.testing.ranks import on_ranks


def _cases(world: int) -> list[tuple[Way, Case]]:
    """Return ways and masks. A contiguous rank has 130 tokens.

    Windows end one token before a block does, between blocks, inside two blocks, and inside each rank's own.
    """
    length = 130 * world
    causal, whole = Case(length - 1), Case(length - 2, causal=False)
    contiguous = Way("ring", "contiguous")
    cases = [(Way("ring"), replace(causal, window=80))]
    cases += [(Way("ring"), causal), (Way("ring", "striped"), causal), (Way("ring"), whole)]
    cases += [(Way("ulysses", ulysses=world), causal), (Way("all_gather", "contiguous"), causal)]
    cases += [(contiguous, Case(length, window=window)) for window in (30, 131, length // 2 + 20, length - 1)]
    cases += [(Way("ring"), replace(whole, window=100)), (Way("ring", "striped"), replace(causal, window=150))]
    cases += [(Way("ring"), Case(length, window=length // 2 - 7)), (Way("ring"), replace(causal, length=9))]
    return [*cases, (Way("ring"), replace(causal, documents=(0, 9)))]


@pytest.mark.parametrize(
    ("backend", "name", "kernels", "dtype"),
    [
        ("CUDNN_ATTENTION", "direct", "triton", torch.float16),
        ("CUDNN_ATTENTION", "collective", "auto", BF16),
        *exhaustive(("FLASH_ATTENTION", "collective", "auto", BF16)),
    ],
)
@on_ranks(2)
def test_operators_of_gpus_compute_the_blocks(
    backend: str, name: Implementation, kernels: Kernels, dtype: torch.dtype
) -> None:
    """Those of a call with documents are computed without them. With kernels triton the kernel merges the results."""
    rank, world, on_cpu = dist.get_rank(), dist.get_world_size(), torch_blocks.chosen_operator

    def chosen(q: Tensor, call: RingCall) -> torch_blocks.AttentionOperator | None:
        return on_cpu(q, call) if call.cu_seqlens is not None else torch_blocks.gpu_operator(q)[0]

    with (
        attention_of_gpus(SDPBackend.__members__[backend]) as calls,
        mock.patch.object(torch_blocks, "chosen_operator", chosen),
        use(implementation=name, kernels=kernels),
    ):
        for i, (way, mask) in enumerate(_cases(world)[: None if kernels == "auto" else 1]):
            calls.clear()
            case = replace(mask, dtype=dtype, **heads_for(way, grouped=i % 3 == 0))
            check_call(way, case, 10)
            forward, backward = ([c._replace(backward=False) for c in calls if c.backward == b] for b in (False, True))
            assert sorted(map(str, forward)) == sorted(map(str, backward)), (way, mask)  # the same rectangles alike
            assert bool(forward) == (mask.documents is None), (way, mask)
            plain = [call for call in forward if call.window == (None, None)]
            assert not mask.window or len(plain) < len(forward) or rank < world - 1, (way, mask)
            large = [call for call in plain if min(call.rows, call.keys) >= 64]  # cuDNN cannot attend to one key
            assert [call for call in forward if call.operator == "cudnn"] == (large if "CUDNN" in backend else [])


CUDNN, TRITON = SDPBackend.CUDNN_ATTENTION, "blocks by Triton kernels"
HALF = "cuDNN and flash attention take half types alone"
FLASH, REST = SDPBackend.FLASH_ATTENTION, "with documents or dropout"
EDGES = "with flash attention at the edges of windows"


@pytest.mark.parametrize(
    ("dtype", "size", "backend", "kernels", "expected"),
    [
        (BF16, 128, CUDNN, "auto", f"blocks by cuDNN attention, {EDGES}; by Triton kernels {REST}"),
        (torch.float16, 64, FLASH, "torch", f"blocks by flash attention; by the definition {REST}"),
        (BF16, 64, SDPBackend.MATH, "auto", f"{TRITON} (scaled_dot_product_attention takes MATH here)"),
        (BF16, 64, CUDNN, "triton", f"{TRITON} (chosen)"),
        (BF16, 136, CUDNN, "auto", f"{TRITON} (cuDNN has gradients only for heads of at most 128 in multiples of 8)"),
        (F32, 64, CUDNN, "auto", f"{TRITON} ({HALF})"),
        (F32, 64, CUDNN, "torch", f"blocks by the definition ({HALF})"),
    ],
)
def test_a_gpu_takes_the_operator_that_torch_takes(
    dtype: torch.dtype, size: int, backend: SDPBackend, kernels: Kernels, expected: str
) -> None:
    q = FakeTensor(FakeTensorMode(), torch.empty(1, 4, 128, size, dtype=dtype, device="meta"), torch.device("cuda:0"))
    call = RingCall(SequenceLayout(256, 2).runs, 1, causal=True, window=None, scale=1.0)
    with attention_of_gpus(backend), use(kernels=kernels):
        assert explained_blocks(q) == expected
        assert by_kernels(q, call) == expected.startswith(TRITON)
        documents = torch.tensor([0, 256], dtype=torch.int32)
        for changes in ({"dropout_p": 0.1}, {"cu_seqlens": documents}):
            assert by_kernels(q, replace(call, **changes)) == (kernels != "torch"), changes  # type: ignore[arg-type]
        assert by_kernels(q, replace(call, window=128)) == by_kernels(q, call)
        with mock.patch("torch.backends.cuda.is_flash_attention_available", return_value=False):
            assert by_kernels(q, call) == (kernels != "torch")
        with mock.patch.dict(os.environ, TORCH_CUDNN_SDPA_AVOID_RECOMPILE="1"):
            assert by_kernels(q, call) == (kernels != "torch")
        torch.use_deterministic_algorithms(True)
        assert by_kernels(q, call) == (kernels != "torch")
