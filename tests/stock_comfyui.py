"""Run in a process of its own: what the real ComfyUI computes, for the tests to compare with.

usage: stock_comfyui.py REQUEST.json INPUTS.safetensors RESULTS.safetensors [OPTION OF COMFYUI ...]
with COMFYUI_PATH naming ComfyUI's folder. A process of its own, since ComfyUI's `nodes.py` and our `nodes/` have one name.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ANALYTIC = "analytic"
"""Name of the model that is a formula."""


def velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """A smooth flow model without weights: `timestep` is `(B,)`, sigma times 1000."""
    level = (timestep / 1000).view(-1, *(1,) * (x.ndim - 1))
    return 0.8 * x - 0.4 * torch.tanh(2 * x) + 0.3 * torch.cos(3 * level) * x.roll(1, dims=-1) - 0.1


class VelocityNet(torch.nn.Module):
    """`velocity` as ComfyUI calls a diffusion model."""

    dtype = torch.float32

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, x, timestep, **_):
        return velocity(x, timestep)


def analytic_model(family: str = "wan"):
    """ComfyUI's MODEL around `velocity`, with the latent format and shift of a family."""
    from comfy import model_base, model_management, model_patcher, supported_models

    kind, config = {
        "wan": (model_base.ModelType.FLOW, supported_models.WAN21_T2V({"image_model": "wan2.1", "model_type": "t2v"})),
        "flux": (model_base.ModelType.FLUX, supported_models.Flux({"image_model": "flux", "guidance_embed": True})),
        "flux-schnell": (
            model_base.ModelType.FLOW,
            supported_models.FluxSchnell({"image_model": "flux", "guidance_embed": False}),
        ),
        "qwen": (model_base.ModelType.FLUX, supported_models.QwenImage({"image_model": "qwen_image"})),
    }[family]
    config.set_inference_dtype(torch.float32, None)
    model = model_base.BaseModel(config, kind, unet_model=VelocityNet)
    device = model_management.get_torch_device()
    return model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def small_model(path: Path):
    """A MODEL of one of ComfyUI's classes in a size that its loaders do not know, as a JSON file describes it. `remade` are
    modules that take sizes of their own, of which the class gives them others than when it is large.

    Its random weights are written beside the file, under the names of the class.
    """
    from comfy import model_management, model_patcher, supported_models

    described = json.loads(path.read_text())
    config = getattr(supported_models, described["class"])(with_newer_options(described["unet_config"]))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    for name, sizes in described.get("remade", {}).items():
        module = type(model.diffusion_model.get_submodule(name))
        model.diffusion_model.set_submodule(name, module(**sizes, operations=torch.nn))
    weights = dict(random_weights(model.diffusion_model.state_dict(), seed=described.get("seed", 0)))
    model.diffusion_model.load_state_dict(weights)
    save_file(weights, path.with_suffix(".safetensors"), metadata=described.get("metadata"))
    device = model_management.get_torch_device()
    return model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def with_newer_options(config: dict) -> dict:
    """A configuration with what the classes of this version want to know beside."""
    from comfy.ldm.chroma.model import ChromaParams
    from comfy.ldm.flux.model import FluxParams
    from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

    kind = config.get("image_model")
    params = {"flux": FluxParams, "flux2": FluxParams, "chroma": ChromaParams, "hunyuan_video": HunyuanVideoParams}
    newer = {"meanflow_sum": False, "txt_ids_dims": [3] if kind == "flux2" else [], "vec_in_dim": None}
    asked = getattr(params.get(kind), "__dataclass_fields__", {})
    return {**{name: value for name, value in newer.items() if name in asked}, **config}


def random_weights(tensors: dict[str, torch.Tensor], *, seed: int):
    """Weights of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        drawn = torch.randn(tensor.shape, generator=generator)
        if drawn.ndim > 1:
            yield name, drawn / drawn[0].numel() ** 0.5
        else:
            yield name, drawn * 0.1 + ("norm" in name and not name.endswith("bias"))


def load_model(name: str):
    """The model of a sample: the formula, a class in a small size, or a checkpoint through UNETLoader."""
    if name == ANALYTIC:
        return analytic_model()
    if name.endswith(".json"):
        return small_model(Path(name))
    import nodes

    folder_of("diffusion_models", name)
    return nodes.UNETLoader().load_unet(Path(name).name, "default")[0]


def folder_of(kind: str, path: str) -> None:
    """Have ComfyUI find a file among its models."""
    import folder_paths

    folder_paths.add_model_folder_path(kind, str(Path(path).parent))


def sigmas(case: dict) -> torch.Tensor:
    """KSampler's own sigmas."""
    from comfy import model_sampling, samplers

    class Model:
        model_options: dict = {}

        def get_model_object(self, name: str):
            table = model_sampling.ModelSamplingDiscreteFlow()
            table.set_parameters(shift=case["shift"])
            return table

    names = {"sampler": case["sampler_name"], "scheduler": case["scheduler"]}
    return samplers.KSampler(Model(), case["steps"], torch.device("cpu"), denoise=case["denoise"], **names).sigmas


def shifts(case: dict) -> torch.Tensor:
    """KSampler's sigmas behind a node that sets the shift, then the sigmas of some percentages."""
    from comfy import samplers
    from comfy_extras import nodes_model_advanced

    model = analytic_model(case["family"])
    if case["node"]:
        node = getattr(nodes_model_advanced, case["node"])
        model = getattr(node(), node.FUNCTION)(model, **case["widgets"])[0]
    sampler = samplers.KSampler(model, case["steps"], torch.device("cpu"), sampler="euler", scheduler=case["scheduler"])
    percents = [model.get_model_object("model_sampling").percent_to_sigma(percent) for percent in case["percents"]]
    return torch.cat([sampler.sigmas, torch.tensor(percents)])


def noise(case: dict) -> torch.Tensor:
    """What prepare_noise draws."""
    from comfy import sample

    return sample.prepare_noise(torch.zeros(case["shape"]), case["seed"], case["batch_index"])


def conditioning(entries: str | list, inputs: dict[str, torch.Tensor]) -> list:
    """A CONDITIONING: the name of an input, or `[name, options]` pairs, where options of tensors name others."""
    if isinstance(entries, str):
        return [[inputs[entries], {}]]
    tensors = (
        "mask",
        "pooled_output",
        "attention_mask",
        "concat_latent_image",
        "concat_mask",
        "conditioning_byt5small",
    )
    made = {key: lambda name: None if name is None else inputs[name] for key in tensors}
    made |= {"clip_vision_output": lambda name: clip_vision(inputs[name])}
    made |= {"area": tuple, "reference_latents": lambda names: [inputs[name] for name in names]}
    return [
        [inputs[name], {key: made.get(key, lambda value: value)(value) for key, value in options.items()}]
        for name, options in entries
    ]


def clip_vision(states: torch.Tensor):
    """What CLIP Vision Encode hands on, of which the video models read these states, the one or the other."""
    from comfy.clip_vision import Output

    output = Output()
    output.penultimate_hidden_states = output.last_hidden_state = states
    return output


class PooledVae:
    """A VAE without weights: means of pixels, in as many channels as are asked for."""

    def __init__(self, channels: int, scale: int) -> None:
        self.latent_channels, self._scale = channels, scale
        self._mixing = torch.randn(channels, 3, generator=torch.Generator().manual_seed(0))

    def spacial_compression_encode(self) -> int:
        return self._scale

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """`(N, H, W, 3)` -> `(1, C, 1 + (N - 1) / 4, H / scale, W / scale)`."""
        pooled = torch.nn.functional.avg_pool2d(pixels[::4].movedim(-1, 1), self._scale)
        return torch.einsum("cp,fphw->cfhw", self._mixing, pooled).unsqueeze(0)


def video(case: dict, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a node that makes a video of pictures adds to a CONDITIONING, and its LATENT, by their keys."""
    import importlib

    node = getattr(importlib.import_module(case.get("module", "comfy_extras.nodes_wan")), case["node"])
    made = {name: inputs[given] for name, given in case.get("images", {}).items()}
    made |= {name: clip_vision(inputs[given]) for name, given in case.get("vision", {}).items()}
    sides = () if case["node"].endswith("Latent") else ("positive", "negative")
    prompts = {side: [[torch.zeros(1), {}]] for side in sides}
    outputs = node.execute(**prompts, vae=PooledVae(*case["vae"]), **case["widgets"], **made).result
    added = outputs[0][0][1] if prompts else {}
    added = {key: getattr(value, "penultimate_hidden_states", value) for key, value in added.items()}
    return {key: value for key, value in {**added, **outputs[-1]}.items() if isinstance(value, torch.Tensor)}


def sampled(case: dict, inputs: dict[str, torch.Tensor], models: dict) -> torch.Tensor:
    """What KSampler returns, or KSamplerAdvanced or SamplerCustomAdvanced where the case names their inputs.

    `latent`, `positive`, `negative` and `noise_mask` name inputs, or results so far ("samples.2").
    """
    import nodes

    if case["sampler_name"] not in nodes.KSampler.INPUT_TYPES()["required"]["sampler_name"][0]:
        raise ValueError("this ComfyUI does not have it")  # KSampler would run another
    model = models.setdefault(case["model"], None) or load_model(case["model"])
    models[case["model"]] = model
    latent = {"samples": inputs[case["latent"]].clone()}
    if case.get("batch_index") is not None:
        latent["batch_index"] = case["batch_index"]
    if case.get("noise_mask"):
        latent["noise_mask"] = inputs[case["noise_mask"]]
    for path, strength in case.get("loras", ()):
        folder_of("loras", path)
        model = nodes.LoraLoaderModelOnly().load_lora_model_only(model, Path(path).name, strength)[0]
    if case.get("shift"):
        model = shifted(model, case["shift"], case.get("shift_node", "SD3"))
    positive, negative = (conditioning(case[side], inputs) for side in ("positive", "negative"))
    if case.get("sigmas"):
        guider = guider_of(case, model, positive, negative, inputs)
        return sampled_along(case, guider, latent)
    widgets = [case[name] for name in ("seed", "steps", "cfg", "sampler_name", "scheduler")]
    if case.get("advanced"):
        add_noise, *steps = case["advanced"]
        node = nodes.KSamplerAdvanced()
        return node.sample(model, add_noise, *widgets, positive, negative, latent, *steps)[0]["samples"]
    return nodes.KSampler().sample(model, *widgets, positive, negative, latent, case["denoise"])[0]["samples"]


def shifted(model, shift: float, node: str):
    """The MODEL behind ModelSamplingSD3, or ModelSamplingAuraFlow."""
    from comfy_extras import nodes_model_advanced

    made = getattr(nodes_model_advanced, f"ModelSampling{node}")()
    return getattr(made, made.FUNCTION)(model, shift)[0]


def guider_of(case: dict, model, positive: list, negative: list, inputs: dict[str, torch.Tensor]):
    """The GUIDER of CFGGuider, or of DualCFGGuider or PerpNegGuider for a case with a middle prompt."""
    from comfy import samplers
    from comfy_extras.nodes_custom_sampler import DualCFGGuider
    from comfy_extras.nodes_perpneg import PerpNegGuider

    if "neg_scale" in case:
        empty, scales = conditioning(case["middle"], inputs), (case["cfg"], case["neg_scale"])
        return PerpNegGuider.execute(model, positive, negative, empty, *scales)[0]
    if "middle" in case:
        middle, scales = conditioning(case["middle"], inputs), (case["cfg"], case["cfg_middle"])
        return DualCFGGuider.execute(model, positive, middle, negative, *scales, case["style"])[0]
    guider = samplers.CFGGuider(model)
    guider.set_conds(positive, negative)
    guider.set_cfg(case["cfg"])
    return guider


def sampled_along(case: dict, guider, latent: dict) -> torch.Tensor:
    """What SamplerCustomAdvanced returns for sigmas and a noise node."""
    from comfy import samplers
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise, SamplerCustomAdvanced

    sampler, sigmas = samplers.sampler_object(case["sampler_name"]), torch.tensor(case["sigmas"])
    return SamplerCustomAdvanced.execute(Noise_RandomNoise(case["seed"]), guider, sampler, sigmas, latent)[0]["samples"]


def regions(case: dict, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where each entry of both sides counts, and how much: `(entries, *dims)`, after what process_conds does to areas."""
    from comfy import samplers

    x, sides = inputs[case["latent"]], [conditioning(case[side], inputs) for side in ("positive", "negative")]
    sides = [[{**options, "model_conds": {}, "uuid": None} for _, options in side] for side in sides]
    for side in sides:
        samplers.resolve_areas_and_cond_masks_multidim(side, x.shape[2:], "cpu")
    for given, other in (sides, sides[::-1]):
        for options in given:
            samplers.create_cond_with_same_area_if_none(other, options)
    return torch.stack([weights(samplers.get_area_and_mult(options, x, x), x) for side in sides for options in side])


def preview(case: dict, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The picture of ComfyUI's own previewer, `(H, W, 3)` uint8, with `folder` as vae_approx."""
    import folder_paths
    import numpy
    from comfy import latent_formats
    from comfy.cli_args import LatentPreviewMethod, args
    from latent_preview import get_previewer

    folder_paths.add_model_folder_path("vae_approx", case["folder"])
    args.preview_method = LatentPreviewMethod(case["method"])
    previewer = get_previewer(torch.device("cpu"), getattr(latent_formats, case["latent_format"])())
    return torch.from_numpy(numpy.array(previewer.decode_latent_to_preview_image("JPEG", inputs[case["latent"]])[1]))


def autoencoder(case: dict, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one of ComfyUI's classes of a VAE, in a small size, makes of a latent and of pixels; its random weights are
    written to a file under the names of the class.
    """
    import importlib

    model = getattr(importlib.import_module(case["module"]), case["class"])(**case["arguments"]).float().eval()
    weights = dict(random_weights(model.state_dict(), seed=0))
    weights |= {name: tensor.abs() + 0.5 for name, tensor in weights.items() if name.endswith("running_var")}
    model.load_state_dict(weights)
    save_file(weights, case["file"])
    with torch.no_grad():
        return {"decoded": model.decode(inputs[case["latent"]]), "encoded": model.encode(inputs[case["pixels"]])}


def weights(found, x: torch.Tensor) -> torch.Tensor:
    """The multiplier of an entry in its place in the latent."""
    whole, dims = torch.zeros_like(x), x.ndim - 2
    part = whole
    for dim in range(dims if found.area is not None else 0):
        part = part.narrow(dim + 2, found.area[dims + dim], found.area[dim])
    part.copy_(found.mult)
    return whole


def widened(case: dict, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The input "codes", 8 bits, as a weight scaled by the input "scale"."""
    from comfy.quant_ops import QuantizedTensor, TensorCoreFP8Layout

    dtype = getattr(torch, case["dtype"])
    if hasattr(TensorCoreFP8Layout, "Params"):  # ComfyUI 0.29
        parameters = TensorCoreFP8Layout.Params(
            scale=inputs["scale"], orig_dtype=dtype, orig_shape=inputs["codes"].shape
        )
        return QuantizedTensor(inputs["codes"], "TensorCoreFP8E4M3Layout", parameters).dequantize()
    return TensorCoreFP8Layout.dequantize(inputs["codes"], scale=inputs["scale"], orig_dtype=dtype)


def step_seed_offset() -> torch.Tensor:
    """What this version adds to the seed of the noise between steps on a CPU."""
    from comfy.k_diffusion.sampling import default_noise_sampler

    drawn = default_noise_sampler(torch.zeros(4), seed=0)(None, None)
    return torch.tensor(int(not torch.equal(drawn, torch.randn(4, generator=torch.Generator().manual_seed(0)))))


def layers(case: dict) -> torch.Tensor:
    """ComfyUI's own table of a family: for diffusers' name of a tensor the original one, the rows, and whether they swap."""
    from comfy import utils

    table = getattr(utils, case["table"])(case["config"])
    rows = {name: (to, None, False) if isinstance(to, str) else (*to[:2], len(to) > 2) for name, to in table.items()}
    return as_bytes(json.dumps(rows))


OTHER_NAMES = "original prefix, other names"
"""As Z-Image's LoRAs have diffusers' names behind it, and USO's of Flux a part of a fused layer."""
STYLES = (
    ("original", r"diffusion_model\.", "lora_down.weight", "lora_up.weight", True),
    ("kohya", r"lora_unet_", "lora_down.weight", "lora_up.weight", True),
    ("PEFT", r"transformer\.", "lora_A.weight", "lora_B.weight", False),
    ("diffusers", r"base_model\.model\.", "lora_A.weight", "lora_B.weight", False),
    ("SimpleTuner", r"lycoris_", "lora_down.weight", "lora_up.weight", True),
    ("OneTrainer", r"lora_transformer_", "lora_down.weight", "lora_up.weight", True),
    ("bare", r"(single_)?transformer_blocks\.", "lora_down.weight", "lora_up.weight", True),
)
"""What files of a layout are called here, how the names of their layers begin, the roles, and whether there are alphas."""


def lora_files(case: dict, models: dict) -> torch.Tensor:
    """Write a random LoRA of each layout for every matrix that ComfyUI's own table of a model has; those that there are."""
    from comfy import lora

    model = models.setdefault(case["model"], None) or load_model(case["model"])
    models[case["model"]] = model
    table, weights = lora.model_lora_keys_unet(model.model, {}), model.model.state_dict()
    table = {key: to for key, to in table.items() if (to if isinstance(to, str) else to[0]).endswith(".weight")}
    names = []
    for style, prefix, down, up, has_alpha in STYLES:
        layers = {key: to for key, to in table.items() if re.match(prefix, key)}
        own = {key: to for key, to in layers.items() if style != "original" or f"{key}.weight" in weights}
        others = {key: layers[key] for key in layers.keys() - own.keys()}
        for name, chosen in ((style, own), (OTHER_NAMES, others)):
            if written(Path(f"{case['files']} {name}.safetensors"), chosen, weights, down, up, has_alpha=has_alpha):
                names.append(name)
    return as_bytes(json.dumps(names))


def written(path: Path, layers: dict, weights: dict, down: str, up: str, *, has_alpha: bool) -> bool:
    """Whether there were layers to write."""
    generator, tensors = torch.Generator().manual_seed(len(layers)), {}
    for key, to in sorted(layers.items()):
        name, offset = (to, None) if isinstance(to, str) else to[:2]
        shape = list(weights[name].shape) if name in weights else []
        if len(shape) == 2:
            if offset is not None:
                shape[offset[0]] = offset[2]
            tensors[f"{key}.{down}"] = torch.randn(4, shape[1], generator=generator) * 0.3 / shape[1] ** 0.5
            tensors[f"{key}.{up}"] = torch.randn(shape[0], 4, generator=generator) * 0.5
            if has_alpha:
                tensors[f"{key}.alpha"] = torch.tensor(3.0)
    if tensors:
        save_file(tensors, path)
    return bool(tensors)


def texts(case: dict, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a CLIP of ComfyUI's makes of each prompt, and how LoRAs name its layers; its random weights are written to files.

    `sizes` are those that its encoders have in the place of the published ones.
    """
    import importlib

    from comfy import lora

    def named(name: str):
        module, attribute = name.split(":")
        return getattr(importlib.import_module(f"comfy.text_encoders.{module}"), attribute)

    pieces = {name: inputs[name] for name in case.get("pieces", ())}
    options = {f"{kind}_model_config": sizes for kind, sizes in case["sizes"].items()}
    model = named(case["clip"])(**case.get("arguments", {}))(device="cpu", dtype=torch.float32, model_options=options)
    drawn = {name: tensor for name, tensor in model.state_dict().items() if ".visual." not in name}
    weights = dict(random_weights(drawn, seed=0))
    model.load_state_dict(weights, strict=False)
    for kind in case["sizes"]:
        prefix = f"{kind}.transformer."
        own = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        save_file(own | pieces, f"{case['files']}{kind}.safetensors")
    tokenizer, results = named(case["tokenizer"])(tokenizer_data=pieces), {}
    for number, prompt in enumerate(case["prompts"]):
        with torch.inference_mode():
            tokens, pooled, *extra = model.encode_token_weights(tokenizer.tokenize_with_weights(prompt))
        found = {"tokens": tokens, "pooled": pooled, "mask": (extra or [{}])[0].get("attention_mask")}
        results |= {f"{number}.{key}": each for key, each in found.items() if each is not None}
    return results | {"layers": as_bytes(json.dumps(lora.model_lora_keys_clip(model, {})))}


def as_bytes(text: str) -> torch.Tensor:
    """A text as safetensors takes it."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def main(request_path: str, inputs_path: str, results_path: str, *options: str) -> None:
    sys.path[0] = os.environ["COMFYUI_PATH"]
    import comfy.options

    sys.argv[1:] = ["--cpu", *options]
    comfy.options.enable_args_parsing()
    request, inputs, models = json.loads(Path(request_path).read_text()), load_file(inputs_path), {}
    results = {"step_seed_offset": step_seed_offset()}
    kinds = {
        "sigmas": sigmas,
        "layers": layers,
        "shifts": shifts,
        "noise": noise,
        "regions": lambda case: regions(case, inputs),
        "widened": lambda case: widened(case, inputs),
        "previews": lambda case: preview(case, inputs),
        "lora_files": lambda case: lora_files(case, models),
    }
    for number, case in enumerate(request.get("videos", [])):
        results |= {f"videos.{number}.{key}": tensor for key, tensor in video(case, inputs).items()}
    for number, case in enumerate(request.get("autoencoders", [])):
        results |= {f"autoencoders.{number}.{key}": tensor for key, tensor in autoencoder(case, inputs).items()}
    for number, case in enumerate(request.get("texts", [])):
        results |= {f"texts.{number}.{key}": tensor for key, tensor in texts(case, inputs).items()}
    for kind, compute in kinds.items():
        results |= {f"{kind}.{number}": compute(case) for number, case in enumerate(request.get(kind, []))}
    for number, case in enumerate(request.get("samples", [])):
        try:
            results[f"samples.{number}"] = sampled(case, inputs | results, models)
        except Exception as error:
            results[f"errors.{number}"] = as_bytes(f"{type(error).__name__}: {error}")
    save_file({name: tensor.clone().contiguous() for name, tensor in results.items()}, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
