"""The parts of LoRA files for a text encoder change the prompt's conditioning, whole and cut over ranks, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from runtime.encoders.text_loras import for_text
from runtime.errors import Refused
from runtime.lora.text_names import TextNames
from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.settings import TINY_SHAPES, LoraSettings, ModelSettings
from tests.lora_files import Draw, Tensors, kohya, pairs, write
from tests.ranks import relative_error, run_as_threads

LIMIT = 2e-6
PROMPT = "a red circle on a white background"
STRENGTH = -0.7


class Told:
    """Keeps the notices of a job."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def __call__(self, stage, step, total, *, preview=None, notice="", together=True) -> None:
        self.notices += [notice] if notice else []


def load(mesh: Mesh | None = None) -> Pipeline:
    return Pipeline.load(ModelSettings(model=TINY_SHAPES), mesh=mesh or Mesh.single(), progress=Told())


def encoded(pipeline: Pipeline, *loras: LoraSettings, told: Told | None = None) -> torch.Tensor | None:
    conditioning = pipeline.encode_text(PROMPT, loras=loras, progress=told or Told())
    return None if conditioning is None else conditioning.embedding


@pytest.fixture(scope="module")
def layers() -> dict[str, tuple[int, int]]:
    """Every Linear of the encoder of tiny-shapes."""
    pipeline = load()
    encoded(pipeline)
    model = pipeline._components.text_encoder.model["umt5xxl"]
    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    assert len(linears) == 7
    return {name: tuple(each.weight.shape) for name, each in linears.items()}


NAMES = {
    "kohya": lambda layer: "lora_te_" + layer.replace(".", "_"),
    "numbered": lambda layer: "lora_te1_" + layer.replace(".", "_"),
    "diffusers": lambda layer: f"text_encoder.{layer}",
    "ComfyUI": lambda layer: f"text_encoders.umt5xxl.transformer.{layer}",
}


def parts(layers: dict[str, tuple[int, int]], name: str) -> Tensors:
    return pairs(layers, Draw(1), down=".lora_down.weight", up=".lora_up.weight", name=NAMES[name], alpha=True)


def expected(layers: dict[str, tuple[int, int]], tensors: Tensors, name: str, strength: float) -> torch.Tensor:
    """With the product added to the weights of the class, by no code of ours."""
    pipeline = load()
    encoded(pipeline)
    encoder = pipeline._components.text_encoder
    encoder.model = copy.deepcopy(encoder.model)
    for layer in layers:
        weight = encoder.model["umt5xxl"].get_submodule(layer).weight
        down, up = (tensors[f"{NAMES[name](layer)}.lora_{side}.weight"].double() for side in ("down", "up"))
        weight.data = (weight.double() + strength * 3 / 4 * up @ down).float()
    pipeline._components._prompts._entries.clear()
    return encoded(pipeline)


@pytest.mark.parametrize("name", NAMES)
def test_the_conditioning_is_that_of_the_products_added_to_the_weights(name, layers, tmp_path):
    tensors = parts(layers, name)
    lora = write(tmp_path / "lora.safetensors", tensors).model_copy(update={"strength_clip": STRENGTH})
    pipeline, told = load(), Told()
    plain = encoded(pipeline)
    changed, wanted = encoded(pipeline, lora, told=told), expected(layers, tensors, name, STRENGTH)
    assert relative_error(changed, wanted) < LIMIT and relative_error(plain, wanted) > 1e-2
    assert told.notices == ["lora.safetensors: 7 targets applied to the text encoder UMT5"]
    assert torch.equal(encoded(pipeline), plain)
    assert torch.equal(encoded(pipeline, lora.model_copy(update={"strength_clip": 0.0})), plain)


def test_ranks_that_share_an_encoder_give_what_one_gives(layers, tmp_path):
    lora = write(tmp_path / "lora.safetensors", parts(layers, "kohya"))
    alone = encoded(load(), lora)
    first, second = run_as_threads({"tensor": 2}, lambda mesh: encoded(load(mesh), lora))
    assert relative_error(first, alone) < 1e-5 and second is None


def test_a_file_for_both_changes_each_at_its_own_strength(layers, tmp_path):
    transformer = {"blocks.0.attn1.to_q": (128, 128)}
    pipeline = load()
    width = pipeline.transformer.blocks[0].attn1.to_q.weight.shape
    own = pairs(
        dict.fromkeys(transformer, tuple(width)),
        Draw(2),
        down=".lora_A.weight",
        up=".lora_B.weight",
        name=lambda each: f"transformer.{each}",
    )
    both = write(tmp_path / "both.safetensors", parts(layers, "numbered") | own)
    alone = write(tmp_path / "alone.safetensors", parts(layers, "numbered"))
    assert relative_error(encoded(pipeline, both), encoded(pipeline, alone)) < LIMIT
    [report] = pipeline.use_loras([both])
    assert report.startswith(
        "both.safetensors: 1 target applied; left to Outrigger Text Encode: lora_te1_encoder_block_"
    )
    with pytest.raises(
        Refused, match="changes a text encoder alone: set strength_model to 0 and connect a strength_clip"
    ):
        pipeline.use_loras([alone])
    assert pipeline.use_loras([alone.model_copy(update={"strength": 0.0})]) == ()


def test_what_fits_no_layer_of_the_encoder_is_told_by_name(layers, tmp_path):
    tensors = parts({"text_model.encoder.layers.0.mlp.fc1": (8, 8)}, "numbered")
    told = Told()
    encoded(load(), write(tmp_path / "clip.safetensors", tensors), told=told)
    assert told.notices == [
        "clip.safetensors: 0 targets applied to the text encoder UMT5; not applied: "
        + ", ".join(f"lora_te1_text_model_encoder_layers_0_mlp_fc1.{role}" for role in ("alpha", "lora_down.weight", "lora_up.weight"))
    ]  # fmt: skip


def test_a_file_without_a_part_for_text_encodes_no_prompt_anew(layers, tmp_path):
    ordinary = write(tmp_path / "ordinary.safetensors", kohya({"blocks.0.attn1.to_q": (128, 128)}, Draw(1)))
    both = write(tmp_path / "both.safetensors", parts(layers, "kohya"))
    gone = ordinary.model_copy(update={"path": str(tmp_path / "gone.safetensors")})
    assert for_text([ordinary, both]) == (both,)
    told = Told()
    assert torch.equal(encoded(load(), ordinary, told=told), encoded(load())) and not told.notices
    with pytest.raises(Refused, match="no such LoRA"):
        encoded(load(), gone)


def test_the_second_of_several_encoders_has_its_number():
    names = TextNames({"encoder.block.0.wi.weight": torch.Size((4, 4))}, title="T5", comfyui="t5xxl", places=(2,))
    for layer in (
        "lora_te2_encoder_block_0_wi",
        "text_encoder_2.encoder.block.0.wi",
        "text_encoders.t5xxl.transformer.encoder.block.0.wi",
    ):
        assert [target.name for target in names.find(layer)] == ["encoder.block.0.wi.weight"]
    for layer in ("lora_te1_encoder_block_0_wi", "lora_te_encoder_block_0_wi", "text_encoder.encoder.block.0.wi"):
        assert names.find(layer) == ()
