"""The steps that a GPU of some minutes runs first do not time what is wrong, and sum up what they have timed."""

from pathlib import Path

import pytest
import torch

from benchmarks import contact_products, contact_training
from benchmarks.apart import Row, Rows, append, read
from benchmarks.contact_products import CANDIDATES, GRADIENTS, LIMIT, SEPARATE, ActivatedProduct, Call, Gradient
from benchmarks.contact_steps import Plan
from benchmarks.contact_training import BEST, LAUNCHED, PEER, STEP, fastest, part_of
from benchmarks.harness import OURS
from tpfuse.train.gpt import GPTModel

FAR = float("inf")


def test_a_wrong_epilogue_is_not_timed_and_a_missing_library_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate of torch alone and a wrong one stand for all; the interpreter's are in the rehearsal."""
    right, right_gradient = CANDIDATES[SEPARATE], GRADIENTS[SEPARATE]

    def wrong(p: ActivatedProduct) -> Call | None:
        return right(p._replace(bias=p.bias.index_fill(0, torch.tensor(9), 2.0)))

    def wrong_gradient(g: Gradient) -> Call | None:
        return right_gradient(g._replace(argument=g.argument.index_fill(1, torch.tensor(9), 0.5)))

    missing = {name: CANDIDATES[name] for name in ("GELU_AUX_BIAS", "quack")}
    monkeypatch.setattr(
        contact_products, "CANDIDATES", {SEPARATE: right, OURS: wrong, LIMIT: CANDIDATES[LIMIT], **missing}
    )
    products = {SEPARATE: right_gradient, OURS: wrong_gradient, LIMIT: GRADIENTS[LIMIT]}
    monkeypatch.setattr(contact_products, "GRADIENTS", products)
    contact_products.epilogues(Plan(tmp_path, True, 0, ()), Rows(tmp_path, "epilogues", FAR))
    kept, dropped, plain, residual, gradient = (
        {each["candidate"]: each for each in row["measurements"]} | {"passed": row["passed"]} for row in read(tmp_path)
    )
    for row in (kept, dropped, gradient):
        assert not row["passed"] and "median_us" in row[SEPARATE]
        assert row[OURS]["error"].startswith("AssertionError: out[")
    assert "median_us" in gradient[LIMIT]
    for row in (kept, dropped):
        assert row["quack"]["error"].startswith("ModuleNotFoundError")
    assert "GELU_AUX_BIAS" in kept and "GELU_AUX_BIAS" not in dropped and set(plain) == {LIMIT, "passed"}
    assert "median_us" in residual[LIMIT]


def _measured(candidate: str, case: str, median: float) -> Row:
    return {"operator": STEP, "case": case, "candidate": candidate, "median_us": median, "tokens": 1000}


def test_the_fastest_micro_batches_and_the_parts_of_a_profile(tmp_path: Path) -> None:
    rows = [_measured(OURS, "micro-batch 12", 3e3), _measured(OURS, "micro-batch 48", 2e3)]
    rows += [_measured(PEER, "micro-batch 12", 4e3), {"candidate": LAUNCHED, "case": "micro-batch 12", "error": "no"}]
    for row in rows:
        append(tmp_path, {"step": STEP, "row": "a", "measurements": [row]})
    assert {name: row["case"] for name, row in fastest(read(tmp_path)).items()} == {
        OURS: "micro-batch 48", PEER: "micro-batch 12"
    }  # fmt: skip
    best = contact_training._best(Plan(tmp_path, True, 0, ()))
    assert {row["case"] for row in best["measurements"]} == {BEST} and "500,000 tokens/s" in best["note"]
    kernels = {
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "products", "gemm_forward_kernel": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention", "adamw_kernel": "update",
        "layer_norm_backward_kernel": "norms", "activation_backward_kernel": "activation",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "activation",
        "cross_entropy_kernel": "loss", "Memcpy DtoD (Device -> Device)": "copies and additions",
    }  # fmt: skip
    assert {name: part_of(name) for name in kernels} == kernels


def test_training_that_computes_another_loss_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rows = Plan(tmp_path, True, 0, ()), Rows(tmp_path, STEP, FAR)
    rows.each("reference", lambda: contact_training.reference(plan))
    right = contact_training._speed(plan, 2, LAUNCHED)
    assert right["passed"] and right["measurements"][0]["tokens"] == 32
    drawn = GPTModel.draw

    def enlarged(self, seed):  # type: ignore[no-untyped-def]
        drawn(self, seed)
        with torch.no_grad():
            self.module.transformer.wte.weight.mul_(20.0)

    monkeypatch.setattr(GPTModel, "draw", enlarged)
    wrong = contact_training._speed(plan, 2, LAUNCHED)
    assert not wrong["passed"] and "median_us" not in wrong["measurements"][0]
