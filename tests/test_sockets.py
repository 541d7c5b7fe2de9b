"""Anything on any socket: a node takes it or says in a `ValueError` what is wrong, and nothing else comes out of it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

LATENT = torch.zeros(1, 16, 1, 4, 4)
EMBEDDING = torch.zeros(1, 4, 8)
THINGS = {
    "nothing": None,
    "number": 5,
    "negative": -5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "huge": 10**400,
    "true": True,
    "text": "x",
    "bytes": b"x",
    "list": [1],
    "list in a list": [[1]],
    "list of nothing": [None],
    "tuple": (),
    "dict": {},
    "dict of numbers": {1: 2},
    "latent of text": {"samples": "zeros"},
    "latent of a list": {"samples": [1, 2]},
    "object": object(),
    "class": int,
    "function": len,
    "scalar": torch.tensor(3.0),
    "numbers": torch.zeros(3),
    "embedding": EMBEDDING,
    "not numbers": torch.full((1, 4, 8), float("nan")),
    "integers": torch.zeros(1, 16, 4, 4, dtype=torch.int64),
    "complex": torch.zeros(1, 16, 4, 4, dtype=torch.complex64),
    "sparse": torch.zeros(1, 16, 4, 4).to_sparse(),
    "meta": torch.zeros(1, 16, 4, 4, device="meta"),
}
OPTIONS = (
    "pooled_output", "attention_mask", "mask", "guidance", "strength", "mask_strength", "start_percent", "end_percent",
    "area", "set_area_to_bounds", "clip_start_percent", "clip_end_percent", "default", "control", "width", "unknown",
)  # fmt: skip
KEYS = ("samples", "noise_mask", "batch_index", "downscale_ratio_spacial", "downscale_ratio_temporal", "type")


@pytest.fixture
def nodes(pack, tmp_path, monkeypatch):
    """Every node, and values that it takes; whatever is asked of the sidecar is answered."""
    (tmp_path / "style.safetensors").write_bytes(b"x")
    pack.fake.folders = {"loras": [tmp_path]}
    result = SimpleNamespace(
        latent=LATENT,
        images=torch.zeros(1, 8, 8, 3),
        conditioning=pack.runtime_protocol.Conditioning(embedding=EMBEDDING),
        plan="one rank",
        tolerance=1e-5,
    )
    monkeypatch.setattr(pack.session, "run", lambda request, display: result)
    monkeypatch.setattr(pack.session.Sidecar, "start", None)  # nothing is left to ask of a real one
    (model,) = pack.model.OutriggerLoadModel.execute(model="tiny-shapes")
    good = {
        "model": model,
        "positive": [[EMBEDDING, {}]],
        "negative": [[EMBEDDING, {}]],
        "latent_image": {"samples": LATENT},
        "samples": {"samples": LATENT},
        "pixels": torch.zeros(1, 8, 8, 3),
        "text": "red",
        "lora_name": "style.safetensors",
    }
    classes = pack.root.comfy_entrypoint.__globals__["NODES"]
    given = {
        each: {name: good[name] for name in inspect.signature(each.execute).parameters if name in good}
        for each in classes
    }
    given[pack.model.OutriggerLoadModel]["model"] = "tiny-shapes"
    for each, values in given.items():
        each.execute(**values)  # they are taken
    return given


def wrong_answers(attempts):
    """What came out of the attempts that is neither a result nor a `ValueError`."""
    wrong = []
    for name, attempt in attempts:
        try:
            attempt()
        except ValueError as refusal:
            if "pydantic" in str(refusal) or len(str(refusal)) > 1500:
                wrong.append((name, str(refusal)))
        except Exception as error:
            wrong.append((name, repr(error)))
    return wrong


@pytest.mark.parametrize("thing", THINGS)
def test_anything_on_any_input_is_taken_or_refused_with_a_sentence(nodes, thing):
    attempts = [
        (
            f"{node.__name__}.{name}",
            lambda node=node, name=name, values=values: node.execute(**(values | {name: THINGS[thing]})),
        )
        for node, values in nodes.items()
        for name in inspect.signature(node.execute).parameters
    ]
    assert len(attempts) > 50 and not wrong_answers(attempts)


@pytest.mark.parametrize("thing", THINGS)
def test_anything_inside_a_conditioning_or_latent_is_taken_or_refused_with_a_sentence(pack, nodes, thing):
    node, value = pack.sampler.OutriggerSampler, THINGS[thing]
    period = {"clip_start_percent": 0.1, "mask": torch.ones(1, 4, 4)}
    conditionings = {
        **{f"{key} of an entry": [[EMBEDDING, {key: value}]] for key in OPTIONS},
        **{f"{key} beside others": [[EMBEDDING, period | {key: value}]] for key in OPTIONS},
        "part of an area": [[EMBEDDING, {"area": (1, value, 0, 0)}]],
        "part of an area in percent": [[EMBEDDING, {"area": ("percentage", 1.0, value, 0.0, 0.0)}]],
        "embedding": [[value, {}]],
        "options": [[EMBEDDING, value]],
        "entry": [value],
    }
    latents = {
        **{f"{key} of a latent": {"samples": LATENT, key: value} for key in KEYS},
        "part of batch_index": {"samples": LATENT, "batch_index": [value]},
    }
    noise = SimpleNamespace(seed=1, generate_noise=lambda latent: value)
    given = [(name, "positive", each) for name, each in conditionings.items()]
    given += [(name, "latent_image", each) for name, each in latents.items()]
    attempts = [
        (name, lambda socket=socket, each=each: node.execute(**(nodes[node] | {socket: each})))
        for name, socket, each in given
    ]
    advanced = pack.sampler_advanced.OutriggerSamplerAdvanced
    attempts.append(("what a noise draws", lambda: advanced.execute(**nodes[advanced], noise=noise)))
    assert not wrong_answers(attempts)
