"""Messages say what they are, and nothing else passes for one."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from runtime.message import TensorRef
from runtime.protocol import (
    Conditioning,
    Decode,
    EncodeText,
    Sample,
    event_from,
    request_from,
)
from runtime.rank_settings import RankSettings
from runtime.settings import ModelSettings, ParallelSettings, SampleSettings

MODEL = ModelSettings(model="m")


def sample(**changed):
    fields = {
        "job": "j",
        "model": MODEL,
        "settings": SampleSettings(),
        "positive": (Conditioning(embedding=torch.zeros(1, 2, 3)),),
        "latent": torch.zeros(1, 4, 2, 2),
    }
    return Sample(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "complex64"}, "not one of"),
        ({"nbytes": 25}, "has 24 bytes, not 25"),
        ({"shape": (2, 3, 4)}, "has 96 bytes, not 24"),
        ({"shape": (-2, -3)}, "greater than or equal to 0"),
        ({"shape": (1,) * 9, "nbytes": 4}, "at most 8"),
        ({"nbytes": 1 << 37}, "less than or equal to"),
        ({"frame": None}, "either in a frame or in a segment"),
        ({"segment": "client-1"}, "either in a frame or in a segment"),
        ({"frame": 0}, "greater than or equal to 1"),
        ({"frame": None, "segment": "../../etc/passwd"}, "match pattern"),
        ({"frame": None, "segment": "a/b"}, "match pattern"),
        ({"offset": 3}, "not permitted"),
    ],
)
def test_a_reference_that_lies_is_refused(changed, said):
    honest = {"dtype": "float32", "shape": (2, 3), "nbytes": 24, "frame": 1}
    assert TensorRef(**honest).frame == 1
    with pytest.raises(ValidationError, match=said):
        TensorRef(**{**honest, **changed})


@pytest.mark.parametrize("value", [1, "x", None, [1.0], {"dtype": "float32"}])
def test_only_a_tensor_or_a_reference_stands_for_a_tensor(value):
    with pytest.raises(ValidationError):
        Decode(job="j", model=MODEL, latent=value)


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "samples"},
        {"extra": 1},
        {"job": "Ünsafe/../job"},
        {"job": "x" * 65},
        {"positive": ()},
        {"batch_index": (1, -1)},
        {"preview": 1},
        {"settings": {"steps": "20"}},
        {"settings": {"steps": 0}},
        {"settings": {"cfg": float("nan")}},
        {"settings": {"sampler_name": "eular"}},
        {"model": {"model": ""}},
        {"model": {"model": "m", "parallel": {"devices": "cuda:0,0"}}},
    ],
)
def test_a_request_with_a_wrong_field_is_refused(changed):
    ref = {"dtype": "float32", "shape": (1,), "nbytes": 4, "frame": 1}
    fields = {**sample().model_dump(), "latent": ref, "positive": ({"embedding": {**ref, "frame": 2}},)}
    assert request_from(fields).job == "j"
    with pytest.raises(ValidationError):
        request_from({**fields, **changed})


def test_requests_and_events_are_not_taken_for_each_other():
    with pytest.raises(ValidationError):
        event_from({"kind": "status"})
    with pytest.raises(ValidationError):
        request_from({"kind": "welcome", "pid": 1})


def test_a_prompt_is_not_in_a_requests_text():
    request = EncodeText(job="j", model=MODEL, text="a secret garden")
    assert "secret" not in repr(request) and "secret" not in str(request)


def test_messages_are_immutable():
    with pytest.raises(ValidationError):
        sample().job = "other"


def test_what_a_rank_is_told_survives_json():
    settings = RankSettings(
        rank=1,
        devices=("cpu", "cpu"),
        parallel=ParallelSettings(cfg=2),
        endpoint="ipc:///x",
        identity="a-1",
        token="t",
        store="/s",
        pool="p",
    )
    assert RankSettings.model_validate_json(settings.model_dump_json()) == settings
    assert (settings.world, settings.device) == (2, "cpu")
