"""The command line: flags, files of flags, names of models, and plans without a weight or torch."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.__main__ import main
from runtime.commands import COMMANDS
from runtime.commands.config import words_of_config
from runtime.commands.flags import add_model_flags, add_output_flags, model_settings
from runtime.commands.models import TEXT_ENCODER_FOLDERS, find_model, find_part
from runtime.commands.sidecar import Asker
from runtime.errors import Refused
from runtime.protocol import Conditioning, Encoded, Notice
from runtime.settings import AXES, ModelSettings
from tests.lora_files import Draw, kohya
from tests.published_keys import read_keys, write_file
from tests.timing import least

ROOT = Path(__file__).resolve().parents[1]
PLAN = ["plan", "--model", "random:wan"]


def printed(capsys, *words: str) -> tuple[int, dict]:
    """Exit status and the one JSON object of a command."""
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    """What the parser says of flags that it does not take."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """Plans for a machine without a GPU, from a folder without models."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: python -m runtime" in text and " ".join((COMMANDS[name].__doc__ or "").split())[:40] in text


# Flags and files of flags


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ulyses", "2"], "did you mean --ulysses?"),
        (["--dtype", "bf17"], "did you mean bf16?"),
        (["--cfg", "2"], "unrecognized arguments: --cfg"),
        (["--ring", "two"], "--ring: invalid int value: 'two'\n"),
    ],
)
def test_an_unknown_flag_is_an_error_that_names_the_nearest(capsys, words, says):
    assert says in refused(capsys, *PLAN, *words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "model: random:wan\ndevices: cpu:4\ncfg_parallel: 2\nring: 2\njson: true\n"),
        ("c.json", '{"model": "random:wan", "devices": "cpu:4", "cfg-parallel": 2, "ring": 2, "json": true}'),
    ],
)
def test_flags_come_from_a_file_and_those_given_win(capsys, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert main(["plan", "--config", name]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["ring"] == 2
    assert main(["plan", f"--config={name}", "--ring", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == {"data": 1, "cfg": 2, "ring": 1, "ulysses": 2, "tensor": 1}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ulyses: 2", r"unknown key 'ulyses' (did you mean ulysses?)"),
        ("config: other.yaml", "unknown key 'config'"),
        ("ring: [1, 2]", "ring is a list of 2: give one"),
        ("ring: {a: 1}", "ring is {'a': 1}: give a text or a number"),
        ("ring:", "ring is None"),
        ("- ring", "is no table of flags"),
        ("ring: [", "cannot be read"),
        ("ring: !!python/object/apply:os.system ['true']", "cannot be read"),
        ("dtype: bf17", "did you mean bf16?"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        ("#" * ((1 << 20) + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(capsys, tmp_path, text, says):
    (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refused(capsys, *PLAN, "--config", "c.yaml")
    assert says in said and said.count("did you mean") <= 1


def test_a_file_that_is_not_there_is_refused(capsys):
    assert "none.yaml cannot be read: No such file" in refused(capsys, *PLAN, "--config", "none.yaml")


def test_a_file_without_an_end_is_refused_and_not_read_to_it(capsys):
    assert "/dev/zero has more than 1048576 bytes" in refused(capsys, *PLAN, "--config", "/dev/zero")


def test_a_flag_without_its_value_is_told_as_the_command_tells_the_others(capsys):
    assert "runtime plan: error: argument --config: expected one argument" in refused(capsys, *PLAN, "--config")


def test_a_fault_of_the_system_is_told_without_a_traceback(capsys):
    long = "a" * 300
    status, answer = printed(capsys, "plan", "--model", long)
    assert status == 1 and answer == {"ok": False, "reason": f"{long}: File name too long"}


# Names of models


def test_a_model_is_found_by_name_under_a_models_folder(monkeypatch, tmp_path):
    for name in ("comfy/models/diffusion_models/wan.safetensors", "models/checkpoints/sub/all.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "comfy"))
    assert find_model("wan.safetensors") == str(tmp_path / "comfy/models/diffusion_models/wan.safetensors")
    assert find_model("sub/all.safetensors") == str(tmp_path / "models/checkpoints/sub/all.safetensors")
    assert [find_model(name) for name in ("tiny-shapes", "random:wan")] == ["tiny-shapes", "random:wan"]
    with pytest.raises(Refused, match=r"Looked in .*comfy/models, .*; the nearest names are wan\.safetensors"):
        find_model("wam.safetensors")
    (tmp_path / "models/diffusion_models").mkdir()
    (tmp_path / "models/diffusion_models/wan.safetensors").write_bytes(b"")
    with pytest.raises(Refused, match="more than one folder: give the path, one of"):
        find_model("wan.safetensors")
    assert find_model("models/diffusion_models/wan.safetensors").startswith(str(tmp_path))


def test_the_older_names_of_two_folders_are_known_as_they_are_to_comfyui(tmp_path):
    for name in ("models/unet/flux.safetensors", "models/clip/t5xxl.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    assert find_model("flux.safetensors") == str(tmp_path / "models/unet/flux.safetensors")
    assert find_part("t5xxl.safetensors", TEXT_ENCODER_FOLDERS) == str(tmp_path / "models/clip/t5xxl.safetensors")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny-shape", "nearest names are tiny-shapes"),
        ("random-wan", "random:wan"),
        ("random:none", "there are: wan"),
        ("", "is empty: give a path or a name"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_the_way_out(capsys, name, says):
    status, answer = printed(capsys, "plan", "--model", name)
    assert status == 1 and not answer["ok"]
    assert says in answer["reason"] and answer["plan"] is answer["nearest"] is None


def test_loras_come_from_flags_or_a_list_in_a_file_with_their_strengths(tmp_path):
    for name in ("models/loras/style.safetensors", "odd:name.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    config = tmp_path / "flags.yaml"
    config.write_text("lora: [style.safetensors:0.5, odd:name.safetensors]")
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_output_flags(parser)

    def loras(*words: str) -> list[tuple[str, float]]:
        actions = {flag: action for action in parser._actions for flag in action.option_strings}
        words = ("--model", "random:wan", *words)
        chosen = parser.parse_args([*words_of_config(words, actions), *words])
        return [(Path(each.path).name, each.strength) for each in model_settings(chosen).loras]

    assert loras() == []
    assert loras("--lora", "style.safetensors:-1.3", "--lora", "odd:name.safetensors") == [
        ("style.safetensors", -1.3), ("odd:name.safetensors", 1.0),
    ]  # fmt: skip
    assert loras("--config", str(config)) == [("style.safetensors", 0.5), ("odd:name.safetensors", 1.0)]
    with pytest.raises(Refused, match=r"styles.safetensors: no such file.*nearest names are style\.safetensors"):
        loras("--lora", "styles.safetensors:1")
    with pytest.raises(Refused, match="strength is 101"):
        loras("--lora", "style.safetensors:101")
    chosen = parser.parse_args(
        ["--model", "random:wan", "--lora", "style.safetensors:0.5:high", "--lora", "odd:name.safetensors:low"]
    )
    assert [(each.strength, each.expert) for each in model_settings(chosen).loras] == [
        (0.5, "high noise"),
        (1.0, "low noise"),
    ]


@pytest.mark.parametrize(("lora", "says"), [(".", "is a folder: give a LoRA file"), ("", "is empty: give a path")])
def test_a_lora_that_is_no_file_is_refused_with_the_plan(capsys, lora, says):
    status, answer = printed(capsys, *PLAN, "--lora", lora)
    assert status == 1 and says in answer["reason"]


@pytest.mark.parametrize(
    ("layer", "shape", "expert", "says"),
    [
        ("double_blocks.0.img_attn.qkv", (384, 128), "", r"changes nothing of Wan.*it looks like a LoRA for .*Flux\.1"),
        ("blocks.0.self_attn.q", (256, 256), "", r"to_q\.weight as \(256, 256\), but in this model it is \(128, 128\)"),
        ("blocks.0.self_attn.q", (128, 128), ":high", "is for the expert of high noise, but the model has no two"),
        ("text_encoders.umt5xxl.transformer.shared", (8, 8), "", "changes a text encoder alone"),
    ],
)
def test_a_plan_with_a_lora_of_another_model_is_refused_as_the_sampler_would(capsys, layer, shape, expert, says):
    save_file(kohya({layer: shape}, Draw(0), name=str), "odd.safetensors")
    status, answer = printed(capsys, *PLAN, "--lora", f"odd.safetensors:1{expert}")
    assert (status, answer["ok"]) == (1, False) and re.search(says, answer["reason"]), answer["reason"]
    assert printed(capsys, *PLAN, "--lora", "odd.safetensors:0")[0] == 0  # off


def test_a_plan_with_a_lora_of_its_model_reads_no_weight_and_imports_no_torch(capsys):
    save_file(kohya({"blocks.0.self_attn.q": (128, 128)}, Draw(0)), "own.safetensors")
    assert printed(capsys, *PLAN, "--lora", "own.safetensors:-2")[0] == 0
    code = "import sys; sys.path.insert(0, sys.argv[1]); from runtime.__main__ import main; main(sys.argv[2:]); "
    words = [*PLAN, "--lora", "own.safetensors"]
    run = [sys.executable, "-c", f"{code}print('torch' in sys.modules)", str(ROOT), *words]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()[-1] == "False"


def test_a_command_tells_once_what_a_lora_did(caplog):
    class FakeSidecar:
        def call(self, request, *, interrupted):
            yield Notice(job=request.job, text="style.safetensors: 3 targets applied")
            yield Encoded(job=request.job, conditioning=Conditioning(embedding=torch.zeros(1, 1, 1)), seconds=0.0)

    with caplog.at_level("INFO", logger="outrigger"):
        asker = Asker(FakeSidecar())
        for text in ("a red circle", "a blue square"):
            asker.encode(ModelSettings(model="tiny-shapes"), text)
    assert caplog.messages == ["style.safetensors: 3 targets applied"]  # once, though both requests say so


# plan


def test_a_plan_says_degrees_devices_bytes_and_why(capsys):
    status, answer = printed(capsys, *PLAN, "--devices", "cpu:4", "--tensor", "2")
    assert status == 0 and answer["ok"]
    assert answer["plan"] == {"data": 1, "cfg": 2, "ring": 1, "ulysses": 1, "tensor": 2}
    assert answer["devices"] == ["cpu"] * 4 and answer["nearest"] is None
    assert "cfg 2 x tensor 2" in answer["reason"]
    assert answer["peak_bytes"] == answer["bytes_per_rank"] + answer["activation_bytes"] > answer["bytes_per_rank"]
    _, larger = printed(capsys, *PLAN, "--devices", "cpu:4", "--tensor", "2", "--width", "256", "--batch", "2")
    assert larger["latent"] == "2x16x1x16x32" and larger["activation_bytes"] > answer["activation_bytes"]
    _, whole = printed(capsys, *PLAN, "--devices", "cpu:4", "--tensor", "1")
    assert 0.5 < answer["bytes_per_rank"] / whole["bytes_per_rank"] < 0.6
    _, half = printed(capsys, *PLAN, "--devices", "cpu:4", "--tensor", "1", "--dtype", "bf16")
    assert 0.5 < half["bytes_per_rank"] / whole["bytes_per_rank"] < 0.52


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--devices", "cpu:3", "--ulysses", "2"], "cpu:3 is 3 devices, but ulysses 2, and 3 is no multiple of 2"),
        (["--devices", "cpu:2", "--ulysses", "2", "--ring", "2"], "ring 2 x ulysses 2 = 4"),
        (["--devices", "cuda:0,1"], "cuda:0, cuda:1 are not there"),
        (["--cfg-parallel", "4"], "set cfg to 1, 2 or 3"),
        (["--devices", "cpu:70"], "cpu:70 is more than 64 ranks"),
    ],
)
def test_a_plan_that_is_refused_names_one_that_is_not(capsys, words, says):
    status, answer = printed(capsys, *PLAN, *words)
    assert status == 1 and not answer["ok"] and says in answer["reason"]
    flags = [f"--{'cfg-parallel' if axis == 'cfg' else axis}={answer['nearest'][axis]}" for axis in AXES]
    status, nearest = printed(capsys, *PLAN, "--devices", answer["nearest_devices"], *flags)
    assert status == 0 and nearest["plan"] == answer["nearest"]


def test_settings_that_are_none_are_refused_in_the_users_words(capsys):
    for words, says in (
        (["--devices", "gpu"], "devices 'gpu' is not one of"),
        (["--ring", "-1"], "set it to 0 or more"),
        (["--batch", "-5"], "batch is -5: set it to 1 or more"),
        (["--width", "-16"], "set it to one, 8 or more"),
    ):
        status, answer = printed(capsys, *PLAN, *words)
        assert status == 1 and says in answer["reason"]


@pytest.mark.parametrize("model", ["random:wan", "random:flux", "tiny-shapes", "Wan 2.1 T2V 14B"])
def test_a_plan_takes_under_a_second_and_imports_no_torch(model, tmp_path):
    if model in (published := read_keys("original")):
        model = write_file(tmp_path / "published.safetensors", published[model])
    words = ["--model", model, "--devices", "cpu:4", "--offload", "none" if ":" in model else "disk", "--json"]
    program = (
        "import sys, time; from runtime.__main__ import main; "
        f"main(['plan', *{words!r}]); "
        "print('torch' in sys.modules, time.process_time())"
    )

    def seconds():
        run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        answer, measured = run.stdout.splitlines()
        torch_is_there, taken = measured.split()
        print(f"planning {model} took {taken} s of processor time")
        assert json.loads(answer)["bytes_per_rank"] > 1 << 20
        assert torch_is_there == "False"
        return float(taken)

    assert least(seconds, enough=1.0) < 1.0


# What is kept, and where


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--keep-host", "lots"], "OUTRIGGER_KEEP_HOST 'lots' is not one of: auto, a part such as 0.5"),
        (["--idle-minutes", "soon"], "OUTRIGGER_IDLE_MINUTES 'soon' is not a number of minutes such as 60"),
        (["--idle-minutes", "-1"], "OUTRIGGER_IDLE_MINUTES '-1' is not"),
        (["--keep-device", "1"], "OUTRIGGER_KEEP_DEVICE '1' is not one of"),
        (["--keep-host", ""], "OUTRIGGER_KEEP_HOST '' is not one of"),
    ],
)
def test_a_sidecar_that_would_keep_what_is_no_amount_does_not_start(capsys, words, says):
    assert main(["serve", *words]) == 1
    assert says in capsys.readouterr().err


def test_flags_of_the_sidecar_win_over_its_environment(monkeypatch):
    served = []
    monkeypatch.setattr("runtime.server.run_server", lambda server, stdin_guard: served.append(server) or 0)
    monkeypatch.setattr("runtime.server.Server", lambda endpoint, keep: keep)
    monkeypatch.setenv("OUTRIGGER_KEEP_DEVICE", "0.5")
    monkeypatch.setenv("OUTRIGGER_KEEP_HOST", "1GB")
    assert main(["serve", "--keep-host", "2GB", "--idle-minutes", "5"]) == 0
    (keep,) = served
    assert (keep.device, keep.host, keep.prompts, keep.idle_minutes) == ("0.5", "2GB", "256MB", 5.0)


def test_places_of_text_encoder_and_vae_come_from_flags():
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    words = ["--model", "random:wan", "--text-encoder-device", "cpu", "--vae-device", "on-demand"]
    memory = model_settings(parser.parse_args(words)).memory
    assert (memory.text_encoder_device, memory.vae_device) == ("cpu", "on-demand")
