"""The switches that say which kernels compute."""

import os

import pytest
import torch

from tpfuse import backend
from tpfuse.backend import kernels, resolved_kernels, set_kernels, use_triton


def test_torch_computes_on_cpu_tensors_unless_triton_is_set() -> None:
    x = torch.ones(2)
    assert not use_triton(x)
    with kernels("triton"):
        assert use_triton(x)
        assert not use_triton(x.double())
        with kernels("torch"):
            assert not use_triton(x)
        assert use_triton(x)
    assert not use_triton(x)


def test_triton_computes_on_cuda_tensors() -> None:
    x = torch.empty(2, device="cuda") if torch.cuda.is_available() else _FakeCuda()
    assert use_triton(x)  # type: ignore[arg-type]
    with kernels("torch"):
        assert not use_triton(x)  # type: ignore[arg-type]


class _FakeCuda:
    dtype, device = torch.float32, torch.device("cuda")


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'cuda': expected one of auto, triton, torch"):
        set_kernels("cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "INTERPRETED", False)
    with kernels("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        use_triton(torch.ones(2))


def test_resolved_kernels_depend_on_the_device() -> None:
    assert [resolved_kernels(name) for name in ("cpu", "cuda", "meta")] == ["torch", "triton", "torch"]


def test_cublas_has_a_workspace_of_a_fixed_size() -> None:
    """torch's deterministic mode refuses products on GPUs without it. `import tpfuse` sets it."""
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
