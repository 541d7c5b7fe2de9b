"""Every way of multiplying with 4-bit weights gives the numbers of plain torch, and the fastest that works is chosen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from runtime.kernels import Kernels, kernels_for, nunchaku_package
from runtime.quant import kernels as chosen
from runtime.quant.kernels import usable_kernels
from runtime.quant.svdquant.formats import NVFP4, Format, round_activations
from runtime.quant.svdquant.tensors import Packing
from runtime.stored import IN_NUNCHAKU, IN_TORCH, IN_TRITON, Stored
from tests.ranks import relative_error
from tests.test_svdquant import KINDS, filled
from tests.test_svdquant_ranks import FLIP_LIMIT

LIMITS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
"""Sums in another order, and in 16 bits numbers that are rounded at other places; in bf16 the interpreter cuts them off."""
INT4, UNSIGNED, FLOAT = KINDS
HOPPER, ADA, BLACKWELL, TURING = (9, 0), (8, 9), (12, 0), (7, 5)


# Triton ---------------------------------------------------------------------------------------------------------------


def test_triton_kernels_give_the_numbers_of_plain_torch_under_its_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreted"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 3 * 3 * 2 + 2 + 3 * 2 * 2 + 2
    for name, limit in LIMITS.items():
        worst = max((error, label) for label, error in errors.items() if name in label)
        print(f"{worst[0]:.1e} at most, {worst[1]}")
        assert worst[0] < limit
    assert max(error for label, error in errors.items() if label.startswith("awq")) < LIMITS["fp32"]
    models = [error for label, error in errors.items() if label.startswith("model")]
    print("models with a LoRA, streamed", *(f"{error:.1e}" for error in models))
    assert len(models) == 2 and max(models) < FLIP_LIMIT


@pytest.mark.parametrize("capability", [80, 90, pytest.param(100, marks=pytest.mark.full)])
def test_triton_kernels_compile_for_a_gpu_that_is_not_here(capability):
    """To machine code: the products are on tensor cores, in int8 where the codes are integers."""
    pytest.importorskip("triton")
    pytest.importorskip("triton.backends.nvidia")
    from tests.triton_compiled import compiled

    code = {name: kernel.asm["ptx"] for name, kernel in compiled(capability).items()}
    assert set(code) == {"round integers", "round floats", "multiply integers", "multiply floats", "multiply awq"}
    assert all("mma" in text for text in code.values())
    assert ".s8" in code["multiply integers"] or "kind::i8" in code["multiply integers"]
    assert ".s8" not in code["multiply floats"]


# nunchaku -------------------------------------------------------------------------------------------------------------


def stand_in(calls: list[str]) -> dict[str, ModuleType]:
    """The two functions of the package, which see to what they are given, in plain torch."""

    def quantize(x, *, lora_down, smooth, fp4, pad_size):
        rows, k = x.shape
        assert x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous() and k % 128 == 0 and pad_size == 256
        assert smooth.shape == (k,) and lora_down.shape[0] == k and smooth.dtype == lora_down.dtype == x.dtype
        form, packing = _form(fp4), Packing(128, k, lora_down.shape[1], _form(fp4))
        filled_up = nn.functional.pad(x, (0, 0, 0, -rows % pad_size)).float()
        values = round_activations(filled_up / packing.plain("smooth_factor", smooth).float(), form)
        calls.append("quantize")
        return values, form, filled_up @ packing.plain("proj_down", lora_down).float().T

    def gemm(*, act, wgt, out, ascales, wscales, lora_act_in, lora_up, fp4, alpha, wcscales):
        rows, n = out.shape
        assert act.shape[0] % 256 == 0 and act.shape[0] - rows < 256 and n % 128 == 0 and alpha == 1.0
        assert wgt.dtype == torch.int8 and wgt.shape == (n, act.shape[1] // 2)
        assert wscales.dtype == (torch.float8_e4m3fn if fp4 else out.dtype) and lora_up.shape[0] == n
        assert (wcscales is not None) == fp4
        packing = Packing(n, act.shape[1], lora_up.shape[1], ascales)
        codes, scales = (packing.plain(leaf, tensor) for leaf, tensor in (("qweight", wgt), ("wscales", wscales)))
        weight = _values(codes, fp4) * scales.float().repeat_interleave(ascales.group, 1)
        if fp4:
            weight = weight * packing.plain("wcscales", wcscales).float()[:, None]
        result = act @ weight.T + lora_act_in @ packing.plain("proj_up", lora_up).float().T
        out.copy_(result[:rows])
        calls.append("gemm")

    ops, gemm_module, quantize_module = (ModuleType(f"nunchaku.ops{name}") for name in ("", ".gemm", ".quantize"))
    gemm_module.svdq_gemm_w4a4_cuda, quantize_module.svdq_quantize_w4a4_act_fuse_lora_cuda = gemm, quantize
    modules = (ModuleType("nunchaku"), ops, gemm_module, quantize_module)
    return {module.__name__: module for module in modules}


def _form(fp4: bool) -> Format:
    return NVFP4 if fp4 else KINDS[INT4]


def _values(codes: torch.Tensor, fp4: bool) -> torch.Tensor:
    floats = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = [*floats, *(-value for value in floats)] if fp4 else [*range(8), *range(-8, 0)]
    return torch.tensor(table, dtype=torch.float32)[codes.int()]


@pytest.fixture
def nunchaku(monkeypatch):
    """The package, as far as we use it; a list of what was called."""
    calls: list[str] = []
    for name, module in stand_in(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "runtime.quant.svdquant.nunchaku_core", raising=False)
    yield calls
    sys.modules.pop("runtime.quant.svdquant.nunchaku_core", None)


@pytest.mark.parametrize("kind", [INT4, FLOAT])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 320)])
@torch.inference_mode()
def test_the_nunchaku_kernels_are_given_what_they_take(kind, n, k, nunchaku):
    x = torch.randn(3, 7, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, kernels = (filled(n, k, kind, dtype=torch.bfloat16, kernels=kernels) for kernels in (IN_TORCH, IN_NUNCHAKU))
    error = relative_error(kernels(x).double(), plain(x).double())
    assert nunchaku == ["quantize", "gemm"]
    print(f"{error:.1e}")
    assert error < 1e-2  # bf16, in which the scale of the whole goes into those of the channels
    assert kernels(x[:0]).shape == (0, 7, n)


def test_what_the_nunchaku_kernels_do_not_take_runs_in_the_rest():
    kernels = Kernels(IN_NUNCHAKU, rest=IN_TRITON)
    joined = Stored("joined", joined=(Stored(INT4), Stored(UNSIGNED)))
    assert kernels.of(Stored(INT4)).kernels == IN_NUNCHAKU
    assert kernels.of(Stored("awq-int4")).kernels == IN_TRITON
    assert [part.kernels for part in kernels.of(joined).joined] == [IN_NUNCHAKU, IN_TRITON]
    assert "after a GELU" in str(kernels)


def test_the_package_of_that_name_on_pypi_is_told_from_the_kernels(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nunchaku", raising=False)
    assert nunchaku_package() == ""
    (tmp_path / "nunchaku").mkdir()
    (tmp_path / "nunchaku" / "__init__.py").touch()
    assert nunchaku_package() == "other"
    (tmp_path / "nunchaku" / "ops").mkdir()
    (tmp_path / "nunchaku" / "ops" / "gemm.py").touch()
    assert nunchaku_package() == "kernels"


# What is chosen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "kind", "dtype", "package", "triton", "says"),
    [
        (None, INT4, "fp32", "kernels", True, "plain torch: without CUDA there are no kernels"),
        (ADA, INT4, "bf16", "kernels", True, "in the nunchaku kernels"),
        (BLACKWELL, FLOAT, "bf16", "kernels", True, "in the nunchaku kernels"),
        (TURING, INT4, "fp16", "kernels", False, "in the nunchaku kernels"),
        (
            HOPPER,
            INT4,
            "bf16",
            "kernels",
            True,
            "Triton kernels: nunchaku has no INT4 kernels for compute capability 9.0",
        ),
        (HOPPER, FLOAT, "bf16", "kernels", True, "Triton kernels: nunchaku has no NVFP4 kernels"),
        (ADA, INT4, "fp32", "kernels", True, "Triton kernels: nunchaku does not take fp32"),
        (
            ADA,
            INT4,
            "bf16",
            "other",
            True,
            "Triton kernels: the package nunchaku that is installed is a statistics package",
        ),
        (ADA, INT4, "bf16", "", True, "Triton kernels: the nunchaku kernels are not installed"),
        (ADA, INT4, "bf16", "", False, "plain torch: the nunchaku kernels are not installed; Triton is not installed"),
        (TURING, INT4, "fp16", "", True, "plain torch: .*Triton needs a newer GPU than 7.5"),
    ],
)
def test_the_fastest_that_fits_is_chosen_and_the_reason_told(capability, kind, dtype, package, triton, says):
    first = kernels_for([kind], dtype=dtype, capability=capability, nunchaku=package, triton=triton)[0]
    assert re.search(says, str(first)), str(first)


def on_a_gpu(monkeypatch, **packages: object) -> Kernels:
    """What is chosen on the processor, which is taken for an Ada GPU with these packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ADA)
    monkeypatch.setattr(chosen, "nunchaku_package", lambda: packages.get("nunchaku", ""))
    monkeypatch.setattr(chosen, "has_triton", lambda: packages.get("triton", False))
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(chosen, "_error", packages["error"])
    return usable_kernels([INT4, "fp8"], dtype=torch.bfloat16, device=device)


def test_kernels_that_do_not_work_here_are_left_out_with_the_reason(monkeypatch):
    def error(kernels: Kernels, *_: object) -> float:
        if kernels.name == IN_NUNCHAKU:
            raise ImportError("undefined symbol: something\nand more")
        return 0.4

    found = on_a_gpu(monkeypatch, nunchaku="kernels", triton=True, error=error)
    assert found.name == IN_TORCH
    assert "nunchaku does not work here (undefined symbol: something)" in found.why
    assert "triton gives other numbers here (relative error 0.4)" in found.why
    assert on_a_gpu(monkeypatch, nunchaku="kernels", triton=True, error=lambda *_: 0.001).name == IN_NUNCHAKU


@pytest.mark.parametrize("fails", ["the package", "the compiler"])
def test_a_package_of_another_version_and_a_compiler_that_fails_are_told_too(fails, monkeypatch):
    problem = TypeError("gemm() got an unexpected keyword argument 'fp4'")
    if fails == "the compiler":
        problem = pytest.importorskip("triton.errors").TritonError("no PTX for this GPU")

    def error(*_: object) -> float:
        raise problem

    found = on_a_gpu(monkeypatch, nunchaku="kernels", triton=True, error=error)
    assert found.name == IN_TORCH
    assert str(found).startswith(f"4-bit Linears run in plain torch: nunchaku does not work here ({problem})")
    assert f"triton does not work here ({problem})" in found.why


def test_a_model_without_such_linears_has_no_kernels_to_tell_of():
    assert usable_kernels(["fp8", "none"], dtype=torch.float32, device=torch.device("cpu")) is None
