"""4-bit Linears on CUDA: the kernels that are chosen give the numbers of plain torch, and how long they take."""

from __future__ import annotations

import pytest
import torch
from torch.utils.benchmark import Timer

from runtime.kernels import kernels_here
from runtime.quant.kernels import usable_kernels
from runtime.stored import IN_NUNCHAKU, IN_TORCH, IN_TRITON
from tests.ranks import Case, relative_error, run_case, run_on_one
from tests.test_svdquant import KINDS, filled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none"),
]
LIMIT = 1e-2
"""In bf16."""
WIDTH, TOKENS = 3072, 4096


def outputs_of(kind: str, kernels: str, x: torch.Tensor, n: int) -> torch.Tensor:
    layer = filled(n, x.shape[-1], kind, dtype=x.dtype, kernels=kernels).cuda()
    return layer(x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_that_are_chosen_work_here(kind):
    wanted = kernels_here([kind], dtype="bf16", device="cuda:0")
    found = usable_kernels([kind], dtype=torch.bfloat16, device=torch.device("cuda:0"))
    print(found)
    assert found.name == wanted.name, found.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "tokens"), [(128, 128, 1), (200, 320, 77), (3072, 3072, 1000)])
@pytest.mark.parametrize("kernels", [IN_TRITON, IN_NUNCHAKU])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_kernels_give_the_numbers_of_plain_torch(kind, kernels, n, k, tokens, dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    chosen = kernels_here([kind], dtype=name, device="cuda:0")
    if kernels not in (chosen.name, chosen.rest) and not (kernels == IN_TRITON and chosen.name == IN_NUNCHAKU):
        pytest.skip(f"{kernels} is not for this GPU: {chosen}")
    if kernels == IN_NUNCHAKU and kind == "svdquant-int4-unsigned":
        pytest.skip("unsigned inputs run in the rest")
    x = torch.randn(tokens, k, device="cuda", dtype=dtype)
    x = torch.nn.functional.gelu(x) if KINDS[kind].unsigned else x
    error = relative_error(outputs_of(kind, kernels, x, n).double(), outputs_of(kind, IN_TORCH, x, n).double())
    print(f"relative error {error:.1e}")
    assert error < LIMIT


@pytest.mark.parametrize("kind", ["svdquant-int4", "svdquant-nvfp4"])
@torch.inference_mode()
def test_the_time_of_a_wide_linear(kind):
    """No bar yet: these kernels were written without a GPU. Prints microseconds beside those of bf16."""
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    layers = {"bf16": torch.nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)}
    chosen = kernels_here([kind], dtype="bf16", device="cuda:0").name
    layers |= {each: filled(WIDTH, WIDTH, kind, dtype=x.dtype, kernels=each).cuda() for each in {chosen, IN_TORCH}}
    for name, layer in layers.items():
        seconds = Timer("layer(x)", globals={"layer": layer, "x": x}).blocked_autorange(min_run_time=0.5).median
        print(f"{kind} {name}: {1e6 * seconds:.0f} us")


@pytest.mark.parametrize("quant", ["svdquant-int4", "svdquant-nvfp4"])
def test_a_model_in_4_bits_is_the_one_of_the_processor(quant):
    case = Case(model="random:flux", quant=quant, latent=(1, 16, 8, 8), steps=2, dtype="fp32")
    from runtime.mesh import Mesh

    [reference] = run_on_one([case])
    error = relative_error(run_case(case, Mesh.single("cuda:0"), {}), reference)
    print(f"relative error {error:.1e}")
    assert error < 0.1  # where an activation falls to another code; see tests/test_svdquant_ranks.py
