"""A model without a family: on one rank, through diffusers' own pipeline."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.client import Sidecar
from runtime.errors import Cancelled, Refused
from runtime.loading import load_pipeline
from runtime.machine import CudaDevice, Machine
from runtime.mesh import Mesh
from runtime.own_call import Way
from runtime.own_pipeline import DiffusersPipeline
from runtime.plan import plan_model
from runtime.progress import ignore_progress
from runtime.prompt_text import as_conditioning, text_of
from runtime.protocol import Conditioning, Decode, EncodeText, Notice, Sample
from runtime.settings import LoraSettings, MemorySettings, ModelSettings, ParallelSettings, SampleSettings
from runtime.tiny_shapes import MODEL_FOLDER
from runtime.without_spec import OwnPipeline, pipeline_without_spec
from tests.own_pipelines import PIPELINES, made

PROMPTS = "a red circle on a white background", "a blue square"
STEPS, CFG, SEED = 3, 4.0, 5
SHAPE = (2, 4, 8, 6)
GPU = Machine(cuda=(CudaDevice("GPU", 24000), CudaDevice("GPU", 24000)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("aura")
    made("AuraFlow").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pipeline(folder) -> DiffusersPipeline:
    return load_pipeline(ModelSettings(model=str(folder)), mesh=Mesh.single(), progress=ignore_progress)


def request(folder: Path, *, settings: SampleSettings | None = None, **changed) -> Sample:
    positive, negative = ((as_conditioning(text),) for text in PROMPTS)
    given = {"positive": positive, "negative": negative, "latent": torch.zeros(SHAPE), **changed}
    settings = settings or SampleSettings(steps=STEPS, cfg=CFG, seed=SEED)
    return Sample(job="j", model=ModelSettings(model=str(folder)), settings=settings, **given)


LATENTS = {
    **dict.fromkeys(("CogVideoX", "HunyuanVideo", "Mochi", "Latte", "TextToVideoSD"), (1, 16, 3, 8, 6)),
    "SkyReelsV2": (1, 16, 3, 4, 6),
    "SanaVideo": (1, 16, 3, 4, 8),
    "Allegro": (1, 16, 6, 20, 20),
    "Sana": (2, 16, 8, 8),
}
"""Of the size of a tile for Allegro, and of 32 pixels for Sana; ComfyUI's latents have more channels than these VAEs."""
FRAMES = {
    "CogVideoX": 9, "HunyuanVideo": 9, "Mochi": 13, "Latte": 3, "Allegro": 21, "TextToVideoSD": 3, "SkyReelsV2": 9, "SanaVideo": 9,
}  # fmt: skip
"""How many of a video these stand for."""
FEW = ("AuraFlow", "CogVideoX", "PixArtSigma")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in PIPELINES]
)
def test_it_samples_and_decodes_what_diffusers_does(name, tmp_path):
    made(name).save_pretrained(tmp_path)
    pipeline = load_pipeline(ModelSettings(model=str(tmp_path)), mesh=Mesh.single(), progress=ignore_progress)
    latent = torch.zeros(LATENTS.get(name, (2, 16, 8, 6)))
    negative = {"negative": ()} if name == "LatentConsistencyModel" else {}  # it takes none
    sampled = pipeline.sample(request(tmp_path, latent=latent, **negative), progress=ignore_progress)
    pictures = pipeline.decode(sampled, progress=ignore_progress)
    assert sampled.dtype == torch.float32
    frames = FRAMES.get(name, 0)
    counts = dict.fromkeys(("num_frames", "video_length", "frames"), frames) if frames else {"num_images_per_prompt": 2}
    height, width = (8 * side for side in latent.shape[-2:])
    expected = own_pictures(name, tmp_path, height=height, width=width, **counts)
    assert len(pictures) == (
        24 if name == "Allegro" else len(expected)
    )  # its VAE makes 4 of each, and it drops the last
    assert torch.equal(pictures[: len(expected)], expected)


def own_pictures(name: str, folder: Path, **counts: int) -> torch.Tensor:
    """What the pipeline itself draws: `(N, H, W, 3)`."""
    own = getattr(diffusers, f"{name}Pipeline").from_pretrained(folder, local_files_only=True)
    own.set_progress_bar_config(disable=True)
    if name == "Allegro":
        own.vae.enable_tiling()  # without it, it decodes nothing
    prompt, negative = PROMPTS
    taken = inspect.signature(own.__call__).parameters
    cfg = "true_cfg_scale" if "true_cfg_scale" in taken else "guidance_scale"
    asked = {
        "prompt": prompt, "negative_prompt": negative, "num_inference_steps": STEPS, cfg: CFG, "use_resolution_binning": False,
        "output_type": "pt", "generator": torch.Generator().manual_seed(SEED), **counts,
    }  # fmt: skip
    result = own(**{key: value for key, value in asked.items() if key in taken})
    return (result.images if "images" in result else result.frames[0]).movedim(1, -1)


def test_the_prompt_seed_and_cfg_count(folder, pipeline):
    first = pipeline.sample(request(folder), progress=ignore_progress)
    assert torch.equal(pipeline.sample(request(folder), progress=ignore_progress), first)
    for change in (
        {"settings": SampleSettings(steps=STEPS, cfg=CFG, seed=SEED + 1)},
        {"settings": SampleSettings(steps=STEPS, cfg=1.0, seed=SEED)},
        {"positive": (as_conditioning("a green cross"),)},
        {"negative": (as_conditioning("a green cross"),)},
    ):
        assert not torch.equal(pipeline.sample(request(folder, **change), progress=ignore_progress), first)


def test_the_size_is_the_latents_in_pixels(folder, pipeline):
    smaller = request(folder, latent=torch.zeros(1, 16, 4, 4))  # of another model: ComfyUI's are made for 8 pixels
    assert pipeline.sample(smaller, progress=ignore_progress).shape == (1, 4, 4, 4)
    noted = request(folder, latent=torch.zeros(1, 4, 4, 4), downscale=(16, None))
    assert pipeline.sample(noted, progress=ignore_progress).shape == (1, 4, 8, 8)


def test_a_cancel_ends_it_at_the_next_step_and_it_samples_again(folder, pipeline):
    seen = []

    def stop(stage, step, total, **others):
        seen.append((step, total))
        if step == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        pipeline.sample(request(folder), progress=stop)
    assert seen == [(0, STEPS), (1, STEPS), (2, STEPS)]
    assert pipeline.sample(request(folder), progress=ignore_progress).isfinite().all()


def test_a_file_that_is_written_to_ends_the_run_that_reads_from_it(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    pipeline = load_pipeline(ModelSettings(model=str(copy)), mesh=Mesh.single(), progress=ignore_progress)
    assert not pipeline.changed
    os.utime(next(copy.glob("transformer/*.safetensors")))
    with pytest.raises(Refused, match="has been written to, while the model ran from it"):
        pipeline.sample(request(copy), progress=ignore_progress)
    with pytest.raises(Refused, match="has been written to, while the model ran from it"):
        pipeline.decode(torch.zeros(1, 4, 8, 8), progress=ignore_progress)
    assert "has been written to" in pipeline.changed


def test_what_a_pipeline_would_do_to_the_decoded_picture_is_told_of(folder, pipeline, monkeypatch):
    told: list[str] = []
    listen = lambda *_, notice="", **others: told.append(notice)  # noqa: E731
    pipeline.sample(request(folder), progress=listen)
    assert not any(told)
    monkeypatch.setattr(pipeline._pipeline, "watermark", object(), raising=False)
    pipeline.sample(request(folder), progress=listen)
    assert [line for line in told if line] == [
        "AuraFlowPipeline's watermark is left out: Decode makes the picture alone"
    ]


def widgets(**changed) -> dict:
    return {"settings": SampleSettings(**{"steps": STEPS, "cfg": CFG, **changed})}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (widgets(sampler_name="dpmpp_2m"), "sampler_name dpmpp_2m.*own scheduler.*euler"),
        (widgets(scheduler="karras"), "scheduler karras"),
        (widgets(denoise=0.5), "denoise 0.5"),
        (widgets(shift=3.0), "shift 3"),
        (widgets(start_at_step=1), "start_at_step 1"),
        (widgets(cfg=0.5), "cfg 0.5"),
        ({"noise_mask": torch.ones(1, 1, 8, 6)}, "noise mask"),
        ({"noise": torch.ones(SHAPE)}, "NOISE"),
        ({"sigmas": torch.ones(3)}, "SIGMAS"),
        ({"batch_index": (0, 1)}, "batch_index"),
        ({"latent": torch.ones(SHAPE)}, "empty latent"),
        ({"latent": torch.zeros(1, 4, 3, 8, 6)}, "3 frames"),
        ({"positive": (Conditioning(embedding=torch.ones(1, 4, 32)),)}, "positive: .*Outrigger Text Encode"),
        ({"positive": (as_conditioning("a"), as_conditioning("b"))}, "positive: .*one prompt"),
        ({"positive": (as_conditioning("a").model_copy(update={"mask": torch.ones(8, 6)}),)}, "positive: .*mask"),
        ({"negative": (as_conditioning("a").model_copy(update={"start_percent": 0.5}),)}, "negative: .*start_percent"),
        ({"positive": (as_conditioning("a").model_copy(update={"guidance": 3.5}),)}, "Flux Guidance"),
        ({"negative": (as_conditioning("a").model_copy(update={"guidance": 3.5}),)}, "negative: .*guidance"),
    ],
)  # fmt: skip
def test_what_a_pipeline_does_not_take_is_refused_by_name(folder, pipeline, changed, named):
    with pytest.raises(Refused, match=named):
        pipeline.sample(request(folder, **changed), progress=ignore_progress)


def test_a_text_that_was_mixed_with_another_is_no_text():
    first, second = as_conditioning("ein Häuschen").embedding, as_conditioning("b").embedding
    assert text_of(first) == "ein Häuschen" and text_of(as_conditioning("").embedding) == ""
    assert text_of(torch.cat([first, second], dim=1)) is None and text_of(first * 0.5 + first * 0.5) is None


def test_its_plan_is_one_rank_and_says_why(folder):
    for machine, device in ((Machine(), "cpu"), (GPU, "cuda:0")):
        plan = plan_model(ModelSettings(model=str(folder)), machine)
        assert plan.devices == (device,) and plan.world == 1
        assert (
            plan.reason
            == f"{folder.name} has no family here and runs on one rank through diffusers' own AuraFlowPipeline"
        )
        assert plan.bytes_per_rank == sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"parallel": ParallelSettings(ulysses=2)}, "ulysses 2"),
        ({"parallel": ParallelSettings(devices="cuda:0,1")}, "devices cuda:0,1.*such as cuda:0"),
        ({"parallel": ParallelSettings(devices="cuda:3")}, "cuda:3 is not there"),
        ({"quant": "fp8"}, "quant fp8"),
        ({"loras": (LoraSettings(path="/a.safetensors"),)}, "LoRA"),
        ({"memory": MemorySettings(offload="layerwise")}, "Configure Memory"),
        ({"vae": "/other.safetensors"}, "vae"),
        ({"text_encoder": "/other.safetensors"}, "text_encoder"),
        ({"model_low_noise": "/other.safetensors"}, "model_low_noise"),
        ({"boundary": 0.5}, "boundary 0.5"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused_before_a_weight_is_read(folder, settings, named):
    with pytest.raises(Refused, match=named):
        plan_model(ModelSettings(model=str(folder), **settings), GPU)


def renamed(key: str, value) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        index = json.loads((path / "model_index.json").read_text())
        (path / "model_index.json").write_text(json.dumps({**index, key: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (renamed("_class_name", ["pipeline", "MyPipeline"]), "names .*MyPipeline.* only classes of diffusers"),
        (renamed("vae", ["os", "system"]), "only classes of diffusers and transformers"),
        (lambda path: (path / "vae" / "diffusers.py").write_text("raise SystemExit"), "diffusers.py is a program"),
        (lambda path: (path / "vae" / "config.json").write_text('{"auto_map": {}}'), "config.json is a program"),
        (lambda path: shutil.rmtree(path / "vae"), "vae is missing"),
        (
            lambda path: (path / "vae/diffusion_pytorch_model.safetensors").rename(path / "vae/a.bin"),
            "a.bin is a pickle",
        ),
        (renamed("vae", None), "has no part named vae.* choose another model"),
        (renamed("audio_vae", ["diffusers", "AutoencoderKL"]), "makes sound as well .audio_vae."),
        (renamed("_class_name", "NoSuchPipeline"), "NoSuchPipeline, which diffusers .* does not have"),
        (lambda path: (path / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"{}"), "is not a .safetensors"),
    ],
)
def test_a_folder_with_programs_or_pickles_is_refused(folder, tmp_path, damage, named):
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(Refused, match=named):
        load_pipeline(ModelSettings(model=str(tmp_path / "copy")), mesh=Mesh.single(), progress=ignore_progress)


def test_weights_of_a_variant_alone_are_read_and_what_is_not_finite_or_no_float_is_refused(folder, pipeline, tmp_path):
    def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> DiffusersPipeline:
        save_file({**tensors, name: change(tensors[name])}, part / "diffusion_pytorch_model.fp16.safetensors")
        return load_pipeline(ModelSettings(model=str(copy)), mesh=Mesh.single(), progress=ignore_progress)

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    part = copy / "transformer"
    (part / "diffusion_pytorch_model.safetensors").rename(part / "diffusion_pytorch_model.fp16.safetensors")
    tensors, name = load_file(part / "diffusion_pytorch_model.fp16.safetensors"), "proj_out.weight"
    expected = pipeline.sample(request(folder), progress=ignore_progress)
    assert torch.equal(changed(name, torch.clone).sample(request(copy), progress=ignore_progress), expected)
    with pytest.raises(Refused, match=r"not finite .*proj_out\.weight of .*transformer is so: the file is damaged"):
        changed(name, lambda tensor: tensor / 0).sample(request(copy), progress=ignore_progress)
    with pytest.raises(Refused, match=r"proj_out\.weight is I32\)"):
        changed(name, torch.Tensor.int)
    with pytest.raises(Refused, match=r"vae made numbers that are not finite"):
        pipeline.decode(torch.full(SHAPE, float("nan")), progress=ignore_progress)


def test_the_model_of_a_family_is_none():
    assert pipeline_without_spec(str(MODEL_FOLDER)) is None
    assert pipeline_without_spec("tiny-shapes") is None and pipeline_without_spec("random:flux") is None


@pytest.mark.parametrize("name", PIPELINES)
def test_the_pipelines_of_well_known_models_take_what_a_sampler_gives(name):
    kind = getattr(diffusers, f"{name}Pipeline")
    assert Way.of(kind, OwnPipeline(Path("model"), kind.__name__, 0)).names


@pytest.mark.parametrize(
    ("name", "lacks"), [("StableDiffusionImg2Img", "works from pictures"), ("HunyuanVideo15", "callback_on_step_end")]
)
def test_a_pipeline_that_takes_less_or_needs_more_is_refused(name, lacks):
    kind = getattr(diffusers, f"{name}Pipeline")
    with pytest.raises(Refused, match=lacks):
        Way.of(kind, OwnPipeline(Path("model"), kind.__name__, 0))


@pytest.mark.full
def test_the_node_is_told_and_the_picture_comes_through_a_sidecar(folder, pipeline):
    model = ModelSettings(model=str(folder))
    sidecar = Sidecar.start(log=lambda line: None)
    try:
        events = {}
        for name, asked in (
            ("text", EncodeText(job="t", model=model, text=PROMPTS[0])),
            ("sample", request(folder)),
            ("decode", Decode(job="d", model=model, latent=torch.zeros(SHAPE))),
        ):
            events[name] = list(sidecar.call(asked, interrupted=lambda: False))
    finally:
        sidecar.close()
    assert text_of(events["text"][-1].conditioning.embedding) == PROMPTS[0]
    assert any(
        isinstance(event, Notice) and "one rank through diffusers' own" in event.text for event in events["sample"]
    )
    assert torch.equal(events["sample"][-1].latent, pipeline.sample(request(folder), progress=ignore_progress))
    assert events["decode"][-1].images.shape == (2, 64, 48, 3)
