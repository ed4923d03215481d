"""The switches that say which kernels compute and how ranks communicate."""

import os

import pytest
import torch

from tpfuse import switches
from tpfuse.switches import chosen_implementation, chosen_kernels, use, use_triton


def _chosen() -> tuple[str, str]:
    return chosen_implementation(), chosen_kernels()


def test_switches_are_set_for_good_or_within_a_block() -> None:
    assert _chosen() == ("auto", "auto")
    with pytest.raises(KeyError), use(implementation="direct", kernels="torch"):
        with use(implementation="collective"):
            assert _chosen() == ("collective", "torch")
            use(kernels="triton")
        assert _chosen() == ("direct", "torch")
        raise KeyError
    assert _chosen() == ("auto", "auto")
    with pytest.raises(ValueError, match="implementation 'nccl': expected one of auto, fused, direct, collective"):
        use(implementation="nccl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernels 'cuda': expected one of auto, triton, torch"):
        use(implementation="fused", kernels="cuda")  # type: ignore[arg-type]
    assert _chosen() == ("auto", "auto")


def test_torch_computes_on_cpu_tensors_unless_triton_is_set() -> None:
    x = torch.ones(2)
    assert not use_triton(x)
    with use(kernels="triton"):
        assert use_triton(x)
        assert not use_triton(x.double())
        with use(kernels="torch"):
            assert not use_triton(x)
        assert use_triton(x)
    assert not use_triton(x)


def test_triton_computes_on_cuda_tensors() -> None:
    x = torch.empty(2, device="cuda") if torch.cuda.is_available() else _FakeCuda()
    assert use_triton(x)  # type: ignore[arg-type]
    with use(kernels="torch"):
        assert not use_triton(x)  # type: ignore[arg-type]


class _FakeCuda:
    dtype, device = torch.float32, torch.device("cuda")


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "INTERPRETED", False)
    with use(kernels="triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        use_triton(torch.ones(2))


def test_cublas_has_a_workspace_of_a_fixed_size() -> None:
    """torch's deterministic mode refuses products on GPUs without it. `import tpfuse` sets it."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
