"""LoRA files of each layout that ComfyUI knows for a family change its latent as LoraLoaderModelOnly does, each layer of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.mesh import Mesh
from runtime.pipeline import Pipeline
from runtime.progress import ignore_progress
from runtime.protocol import Conditioning, Sample
from runtime.settings import LoraSettings, ModelSettings, SampleSettings
from tests import test_comfyui_models as pictures
from tests import test_comfyui_videos as videos
from tests.stock import ask_comfyui, relative_error
from tests.test_comfyui_models import PLAIN, REMADE, full

pytestmark = pytest.mark.comfy

VIDEOS = {"ltx": videos.MODELS["ltx"][1:], "hunyuan-1.5": videos.MODELS["hunyuan 1.5"][1:]}
MODELS = pictures.MODELS | VIDEOS
INPUTS = pictures.INPUTS | {
    "words": videos.INPUTS["words"],
    "no words": videos.INPUTS["no words"],
    "mask of words": videos.INPUTS["mask of words"],
    "ltx": torch.zeros(1, 128, 2, 3, 5),
    "hunyuan-1.5": torch.zeros(1, 32, 2, 3, 5),
}
LIMIT = 1e-4
STRENGTH = 0.7
LAYOUTS = {
    "flux": ("original", "kohya", "PEFT", "SimpleTuner", "OneTrainer", "original prefix, other names"),
    "qwen": ("original", "kohya", "PEFT", "SimpleTuner", "bare"),
    "zimage": ("original", "kohya", "SimpleTuner", "original prefix, other names"),
    "flux2": ("original", "kohya"),
    "chroma": ("original", "PEFT"),
    "sd3": ("original", "kohya", "PEFT", "diffusers", "SimpleTuner", "OneTrainer"),
    "lumina2": ("original", "kohya"),
    "ltx": ("original", "kohya"),
    "hunyuan-1.5": ("original", "kohya", "PEFT", "original prefix, other names"),
}
LEFT_OUT = {
    "flux2": {"PEFT", "SimpleTuner", "OneTrainer", "original prefix, other names"},
    "chroma": {"kohya", "SimpleTuner", "OneTrainer", "original prefix, other names"},
    "lumina2": {"SimpleTuner", "original prefix, other names"},
}
"""Names of Flux.1 that ComfyUI 0.3 has for Flux.2 too, which are not those of its class, and parts of what is one layer in
it. Chroma's are Flux.1's, and its 355 layers take a while. Those of Z-Image that it has for Lumina 2 too are of as many rows
for keys as for queries.
"""
FEW_STEPS = {
    ("qwen", "bare"): {"steps": 4, "cfg": 1.0, "shift": 3.0, "shift_node": "AuraFlow", "scheduler": "sgm_uniform"},
    ("flux", "PEFT"): {"steps": 8, "cfg": 1.0},
    ("zimage", "original prefix, other names"): {"steps": 8, "cfg": 1.0, "shift": 4.0, "shift_node": "AuraFlow"},
}
"""How distilled LoRAs in these layouts are run: Qwen-Image-Lightning, Hyper, Z-Image's."""
CASES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]


def case_of(family: str, layout: str) -> dict:
    prompt = {"positive": [["a", {"pooled_output": "pooled"}]]} if family == "chroma" else {}
    if family in VIDEOS:
        options = {"pooled_output": None} | ({"attention_mask": "mask of words"} if family == "ltx" else {})
        prompt = {"positive": [["words", options]], "negative": [["no words", options]]}
    picture = {"latent": {"flux2": "wide picture", **{each: each for each in VIDEOS}}.get(family, "picture")}
    return full(
        {**PLAIN["part"], **prompt, **picture, "denoise": 1.0, "steps": 2, **FEW_STEPS.get((family, layout), {})}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def stock(folder) -> dict[tuple[str, str], torch.Tensor]:
    """ComfyUI's latent with each file, and without one ("")."""
    for family in LAYOUTS:
        kind, config = MODELS[family]
        config = {**config, "num_blocks": config["depth"]} if family == "sd3" else config  # as in every published one
        described = {"class": kind, "unet_config": config, "remade": REMADE.get(family, {})}
        described |= {"metadata": {"config": json.dumps({"transformer": config})}} if family in VIDEOS else {}
        (folder / f"{family}.json").write_text(json.dumps(described))
    cases = [*CASES, *((family, "") for family in LAYOUTS)]
    samples = [
        {**case_of(*case), "model": str(folder / f"{case[0]}.json")}
        | ({"loras": [(str(path_of(folder, *case)), STRENGTH)]} if case[1] else {})
        for case in cases
    ]
    written = [{"model": str(folder / f"{family}.json"), "files": str(folder / family)} for family in LAYOUTS]
    results = ask_comfyui(folder, inputs=INPUTS, samples=samples, lora_files=written)
    errors = [bytes(tensor.tolist()).decode() for name, tensor in results.items() if name.startswith("errors.")]
    assert not errors, errors
    for number, (family, layouts) in enumerate(LAYOUTS.items()):
        known = json.loads(bytes(results[f"lora_files.{number}"].tolist()))
        assert {*known} - {*layouts} == LEFT_OUT.get(family, set()), "a layout that is not looked at"
    return {case: results[f"samples.{number}"] for number, case in enumerate(cases)}


def path_of(folder: Path, family: str, layout: str) -> Path:
    return folder / f"{family} {layout}.safetensors"


@pytest.fixture(scope="module")
def load(folder, stock):
    """A family's model, loaded once."""
    loaded: dict[str, Pipeline] = {}

    def load(family: str) -> Pipeline:
        if family not in loaded:
            settings = ModelSettings(model=str(folder / f"{family}.safetensors"), dtype="fp32")
            loaded[family] = Pipeline.load(settings, mesh=Mesh.single(), progress=ignore_progress)
        return loaded[family]

    return load


def entry(name: str, options: dict) -> Conditioning:
    named = {"pooled_output": "pooled", "attention_mask": "attention_mask"}
    fields = {field: INPUTS[options[key]] for key, field in named.items() if options.get(key)}
    return Conditioning(embedding=INPUTS[name], guidance=options.get("guidance"), **fields)


def sampled(pipeline: Pipeline, case: dict) -> torch.Tensor:
    request = Sample(
        job="stock",
        model=ModelSettings(model="random:wan"),
        settings=SampleSettings(**{name: case[name] for name in SampleSettings.model_fields if name in case}),
        latent=INPUTS[case["latent"]].clone(),
        **{side: tuple(entry(*each) for each in case[side]) for side in ("positive", "negative")},
    )
    return pipeline.sample(request, progress=ignore_progress)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_latent_is_that_of_comfyuis_lora_loader(family, layout, stock, load, folder, capsys):
    pipeline, case = load(family), case_of(family, layout)
    [report] = pipeline.use_loras([LoraSettings(path=str(path_of(folder, family, layout)), strength=STRENGTH)])
    error = relative_error(sampled(pipeline, case), stock[family, layout])
    moved = relative_error(stock[family, layout], stock[family, ""])
    with capsys.disabled():
        print(f"\n  {family}, {layout}: {error:.1e} (moved by {moved:.2f}); {report[:300]}", end="")
    assert error < LIMIT and moved > 100 * LIMIT
    assert "not applied" not in report
