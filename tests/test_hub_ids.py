"""A model named by its id on the Hugging Face Hub: from the local cache, or an error at once, and never a network."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from runtime.commands.models import find_model
from runtime.errors import Refused

HUB_ID, REVISION = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "0" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no network."""

    def no_network(*arguments: object, **options: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_id_that_is_not_in_the_cache_is_an_error_at_once_that_says_where_to_put_the_file(cache):
    find_model("tiny-shapes")
    started = time.monotonic()
    with pytest.raises(
        Refused, match=r"not in its cache.*nothing is downloaded.*models/diffusers.*models/diffusion_models"
    ):
        find_model(HUB_ID)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("file", ["model_index.json", "model-Q8_0.gguf"])
def test_an_id_in_the_cache_is_the_folder_of_its_newest_snapshot(cache, file):
    model = cache / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    (snapshot / file).write_text("{}")
    assert find_model(HUB_ID) == str(snapshot)


@pytest.mark.parametrize("name", ["sub/other.safetensors", "sub/packed.gguf", "plain", "a/b/c"])
def test_other_names_are_no_ids(cache, name):
    with pytest.raises(Refused) as refusal:
        find_model(name)
    assert "Hugging Face" not in str(refusal.value)
