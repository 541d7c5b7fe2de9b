"""The doctor says what there is, what is missing, and what to do."""

from __future__ import annotations

import json

import pytest

from runtime import diagnosis
from runtime.__main__ import main
from runtime.machine import CudaDevice, Machine


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpus, package=version ...)` is the machine; a package whose version is None is not there."""

    def set_up(gpus: int = 0, why: str = "", **versions: str | None) -> None:
        devices = (CudaDevice("GPU", 24 << 10),) * gpus
        installed = diagnosis._version
        monkeypatch.setattr(diagnosis.Machine, "here", lambda: Machine(cuda=devices, cores=4, why=why))
        monkeypatch.setattr(diagnosis, "_version", lambda name: versions.get(name, installed(name)))
        monkeypatch.setattr(diagnosis, "_peer_access", lambda count: [[True, False], [True, True]] if count else [])

    return set_up


def test_this_machine_has_all_that_is_needed(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {"torch", "diffusers", "pyzmq"} <= set(found["packages"])
    assert set(found["kernels"]) == {"flash-attn", "triton", "nunchaku"}
    assert found["shared_memory"]["limit"] <= found["shared_memory"]["bytes"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "diffusers      0." in text
    if not found["devices"]:
        assert "cpu, nvfp4: 4-bit Linears run in plain torch: without CUDA" in text


@pytest.mark.parametrize(("package", "version"), [("msgpack", None), ("diffusers", "0.20.0"), ("torch", "2.1.0")])
def test_a_package_that_is_missing_or_of_another_version_is_named_with_what_to_run(capsys, machine, package, version):
    machine(**{package: version})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"{package:14} {version or 'missing'}  but needed: {package}" in text
    assert "-m pip install -r" in text


def test_gpus_are_listed_with_the_pairs_that_cannot_reach_each_other(capsys, machine):
    machine(gpus=2)
    main(["doctor"])
    text = capsys.readouterr().out
    assert "cuda:1 GPU, 24.0 GiB" in text and "reach each other's memory: 0-1" in text


def test_a_package_of_the_kernels_name_that_is_none_is_told_apart(monkeypatch, machine, tmp_path):
    machine()
    (tmp_path / "nunchaku").mkdir()
    (tmp_path / "nunchaku" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert any("pip uninstall nunchaku" in line for line in diagnosis.examine()["advice"])
    (tmp_path / "nunchaku" / "ops").mkdir()
    (tmp_path / "nunchaku" / "ops" / "gemm.py").touch()
    assert not any("nunchaku" in line for line in diagnosis.examine()["advice"])


def test_a_small_shared_memory_and_a_torch_without_cuda_get_advice(monkeypatch, machine):
    machine(why="torch 2.7.0+cpu is not built for CUDA")
    monkeypatch.setattr(diagnosis, "_shared_memory", lambda: {"bytes": 64 << 20, "limit": 32 << 20})
    advice = " ".join(diagnosis.examine()["advice"])
    assert "--shm-size=8g" in advice and "is not built for CUDA" in advice
