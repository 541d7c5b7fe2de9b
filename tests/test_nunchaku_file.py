"""A file with Nunchaku's names is the model it was made of: fused projections, split inputs, modulation and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint import build_transformer, random_tensors
from runtime.errors import Refused
from runtime.families.flux import FLUX
from runtime.inspection import inspect_model
from runtime.quant.svdquant.formats import INT4
from runtime.quant.svdquant.tensors import Packing
from runtime.safetensors_header import read_metadata
from tests.nunchaku_packer import packed_modulation
from tests.ranks import Case, relative_error, run_as_threads, run_case, run_on_one

WIDTH = 128
OLD_NAMES = {
    "proj_down": "lora_down",
    "proj_up": "lora_up",
    "smooth_factor": "smooth",
    "smooth_factor_orig": "smooth_orig",
}
MODULATIONS = {
    "transformer_blocks.{}.norm1": 6,
    "transformer_blocks.{}.norm1_context": 6,
    "single_transformer_blocks.{}.norm": 3,
}


def four_bit(weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    """A Linear as such a file has it, all of whose weight is in the low rank: codes of 0 round nothing."""
    n, k = weight.shape
    left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    packing = Packing(n, k, len(sizes), INT4)
    plain = {
        "qweight": torch.zeros(n, k, dtype=torch.uint8),
        "wscales": torch.ones(n, k // 64, dtype=torch.bfloat16),
        "proj_up": left * sizes,
        "proj_down": right,
        "smooth_factor": torch.ones(k),
        "smooth_factor_orig": torch.ones(k),
        "bias": bias,
    }
    return {leaf: packing.packed(leaf, tensor).contiguous() for leaf, tensor in plain.items()}


def modulation(parts: int, seed: int, bias: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A weight that 4 bits can hold, and how such a file has it: features outermost, 1 added to the biases of scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (parts * WIDTH, WIDTH), generator=generator)
    scales = (torch.rand(parts * WIDTH, WIDTH // 64, generator=generator) + 0.5) / 100
    zeros = -8 * scales
    weight = codes * scales.repeat_interleave(64, 1) + zeros.repeat_interleave(64, 1)
    lifted = bias.unflatten(0, (parts, WIDTH)).clone()
    for part in {1, parts - 2}:
        lifted[part] += 1

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (parts, WIDTH)).transpose(0, 1).flatten(0, 1)

    return weight, {
        "qweight": packed_modulation(interleaved(codes)),
        "wscales": interleaved(scales).T.contiguous(),
        "wzeros": interleaved(zeros).T.contiguous(),
        "bias": interleaved(lifted.flatten()).contiguous(),
    }


def write_both(folder: Path) -> tuple[Path, Path]:
    """The tiny Flux as a diffusers folder, and as a file of Nunchaku's first generation of names."""
    _, shapes = build_transformer(inspect_model("random:flux"))
    plain = dict(random_tensors(shapes))
    packed: dict[str, torch.Tensor] = {}
    for block in range(2):
        for number, (name, parts) in enumerate(MODULATIONS.items()):
            linear = f"{name.format(block)}.linear"
            weight, tensors = modulation(parts, 10 * block + number, plain[f"{linear}.bias"])
            plain[f"{linear}.weight"] = weight
            packed |= {f"{linear}.{leaf}": tensor for leaf, tensor in tensors.items()}
        for each in FLUX.nunchaku:
            linears = [linear.format(block) for linear in each.linears]
            weight, bias = (torch.cat([plain[f"{linear}.{leaf}"] for linear in linears]) for leaf in ("weight", "bias"))
            if each.part is not None:
                weight, bias = weight.split([WIDTH, 4 * WIDTH], dim=1)[each.part], bias * (0.25, 0.75)[each.part]
            tensors = four_bit(weight, bias)
            packed |= {f"{each.stored.format(block)}.{OLD_NAMES.get(leaf, leaf)}": t for leaf, t in tensors.items()}
    linears = {linear.format(block) for each in FLUX.nunchaku for linear in each.linears for block in range(2)}
    linears |= {f"{name.format(block)}.linear" for name in MODULATIONS for block in range(2)}
    for name, tensor in plain.items():
        if name.rpartition(".")[0] not in linears:
            packed[name.replace("attn.norm_", "norm_")] = tensor
    config = {"_class_name": FLUX.transformer_class, **FLUX.tiny}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in plain.items()}, folder / "diffusion_pytorch_model.safetensors")
    path = folder / "svdq-int4_r128-tiny.safetensors"
    save_file(packed, path, metadata={"config": json.dumps(config)})
    return folder, path


def test_an_old_flux_file_is_the_model_it_was_made_of(tmp_path):
    folder, path = write_both(tmp_path)
    facts = inspect_model(str(path))
    kinds = {
        name.partition(".")[0] + "." + name.partition("0.")[2]: each.kind
        for name, each in facts.stored.items()
        if ".0." in name
    }
    assert kinds["single_transformer_blocks.proj_out"] == "joined"
    assert kinds["transformer_blocks.norm1.linear"] == "awq-int4"
    assert [each.kind for each in facts.stored["single_transformer_blocks.1.proj_out"].joined] == [
        "svdquant-int4",
        "svdquant-int4-unsigned",
    ]
    case = {"family": "flux", "latent": (1, 16, 8, 8), "steps": 2}
    [reference] = run_on_one([Case(model=str(folder), **case)])
    [result] = run_on_one([Case(model=str(path), **case)])
    print(f"{relative_error(result, reference):.1e}")
    assert relative_error(result, reference) < 1e-4
    packed = Case(model=str(path), **case)
    for part in run_as_threads({"tensor": 2}, lambda mesh: run_case(packed, mesh, {})):
        assert relative_error(part, reference) < 1e-4


def test_a_folder_of_the_first_generation_is_the_file(tmp_path):
    _, path = write_both(tmp_path)
    folder = tmp_path / "svdq-int4-tiny"
    folder.mkdir()
    tensors = load_file(path)
    blocks = {name for name in tensors if name.startswith(("transformer_blocks.", "single_transformer_blocks."))}
    for name, names in (("transformer_blocks", blocks), ("unquantized_layers", tensors.keys() - blocks)):
        save_file({each: tensors[each] for each in names}, folder / f"{name}.safetensors")
    (folder / "config.json").write_text((tmp_path / "config.json").read_text())
    case = {"family": "flux", "latent": (1, 16, 8, 8), "steps": 2}
    [one], [other] = (run_on_one([Case(model=str(each), **case)]) for each in (path, folder))
    assert torch.equal(one, other)
    (folder / "unquantized_layers.safetensors").unlink()
    with pytest.raises(Refused, match=r"but not unquantized_layers.safetensors: download that too"):
        inspect_model(str(folder))


@pytest.mark.parametrize(
    ("family", "change"), [("flux-schnell", {"guidance_embeds": False}), ("flux-fill", {"in_channels": 384})]
)
def test_relatives_are_told_apart_by_their_configuration(family, change, tmp_path):
    path = tmp_path / "x.safetensors"
    config = {"_class_name": "NunchakuFluxTransformer2dModel", **FLUX.tiny, "out_channels": 64, **change}
    save_file(
        {
            "x.qweight": torch.zeros(4, 64, dtype=torch.int32),
            "x.wscales": torch.ones(2, 16),
            "x.wzeros": torch.ones(2, 16),
            "x.bias": torch.ones(16),
        },
        path,
        metadata={"config": json.dumps(config)},
    )
    assert inspect_model(str(path)).family == family


def damaged(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A 4-bit Linear of 128 x 128 and rank 16 that is not as it should be; None leaves a tensor out."""
    whole = four_bit(torch.eye(128)[:, :128] * torch.ones(128), torch.zeros(128))
    return {f"x.{leaf}": tensor for leaf, tensor in {**whole, **changes}.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"proj_up": torch.zeros(128, 32)}, r"a rank of 128, but proj_up is \(128, 32\) and not \(128, 128\)"),
        ({"proj_up": torch.zeros(128, 8), "proj_down": torch.zeros(128, 8)}, "a rank of 8; .* ranks of 16"),
        ({"wscales": torch.ones(8, 128).bfloat16()}, r"in groups of 64, .* wscales is \(8, 128\) and not \(2, 128\)"),
        ({"wscales": torch.ones(2, 128).to(torch.float8_e4m3fn)}, r"in groups of 16, .* wscales is \(2, 128\)"),
        ({"wscales": torch.ones(2, 128, dtype=torch.int32)}, "x.wscales is I32, but scales of INT4 are BF16 or F16"),
        ({"smooth_factor": None}, "x has no smooth_factor"),
        ({"bias": torch.zeros(64)}, r"bias is \(64,\) and not \(128,\)"),
        ({"qweight": torch.zeros(128, 32, dtype=torch.int8)}, r"codes for 128 x 64, "),
    ],
)  # fmt: skip
def test_tensors_that_do_not_go_together_are_refused(tmp_path, changes, says):
    path = tmp_path / "x.safetensors"
    save_file(damaged(**changes), path, metadata=FLUX_CONFIG)
    with pytest.raises(Refused, match=says):
        inspect_model(str(path))


def test_a_file_that_is_cut_short_or_of_another_size_or_no_number_is_refused(tmp_path):
    _, path = write_both(tmp_path)
    whole, tensors = path.read_bytes(), load_file(path)
    config = json.loads(read_metadata(path)["config"])
    case = Case(model=str(path), family="flux", latent=(1, 16, 8, 8), steps=1)
    path.write_bytes(whole[: len(whole) - 1000])
    with pytest.raises(Refused, match="is cut short"):
        inspect_model(str(path))
    save_file(tensors, path, metadata={"config": json.dumps({**config, "num_attention_heads": 8})})
    with pytest.raises(Refused, match=r"needs \(1024, 256\)"):
        run_on_one([case])
    tensors["transformer_blocks.1.mlp_fc1.wscales"][0, 3] = torch.nan
    save_file(tensors, path, metadata={"config": json.dumps(config)})
    with pytest.raises(Refused, match=r"transformer_blocks.1.mlp_fc1.wscales has numbers that are not finite"):
        run_on_one([case])


FLUX_CONFIG = {"config": json.dumps({"_class_name": "FluxTransformer2DModel", **FLUX.tiny})}


def said(**quantization: object) -> dict[str, str]:
    """The metadata of a file that says this of its numbers."""
    return {**FLUX_CONFIG, "quantization_config": json.dumps(quantization)}


@pytest.mark.parametrize(
    ("change", "metadata", "says"),
    [
        ({}, {}, "no configuration in its metadata"),
        ({}, {"config": "{"}, "no configuration in its metadata"),
        ({}, {"config": "[]"}, "is a None in 4 bits"),
        ({}, {"config": '{"_class_name": "SanaTransformer2DModel"}'}, "SanaTransformer2DModel in 4 bits"),
        (
            {"x.strange": torch.ones(1)},
            FLUX_CONFIG,
            "no 4-bit Linear that is known",
        ),
        (
            {"x.qweight": torch.zeros(64, dtype=torch.int8)},
            FLUX_CONFIG,
            r"x.qweight is I8 \(64,\), but 4-bit codes are rows",
        ),
        ({"x.qweight": torch.tensor(1, dtype=torch.int8)}, FLUX_CONFIG, r"x.qweight is I8 \(\), but"),
        ({"x.qweight": torch.zeros(128, 8, dtype=torch.int64)}, FLUX_CONFIG, r"x.qweight is I64 \(128, 8\), but"),
        ({}, said(method="gptq"), "its method is 'gptq', but only 'svdquant' can be read"),
        ({}, said(weight={"dtype": "int8"}), "its dtype is 'int8', but only 'int4' and 'fp4_e2m1_all'"),
        ({}, said(weight={"dtype": "int4", "group_size": 32}), "its group_size is 32, but only 64 can"),
        (
            {},
            said(runtime_tensor_layout="logical"),
            "its runtime_tensor_layout is 'logical', but only 'nunchaku_packed'",
        ),
        ({}, {**FLUX_CONFIG, "runtime_tensor_layout": "logical"}, "its runtime_tensor_layout is 'logical'"),
    ],
)
def test_a_file_that_says_too_little_is_refused(tmp_path, change, metadata, says):
    path = tmp_path / "x.safetensors"
    tensors = {"x.qweight": torch.zeros(128, 64, dtype=torch.int8), "x.wscales": torch.ones(2, 128), **change}
    save_file(tensors, path, metadata=metadata or None)
    with pytest.raises(Refused, match=says):
        inspect_model(str(path))
