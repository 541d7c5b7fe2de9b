"""On the processor a plan counts host memory, which all ranks share: it is what they take, and what is not there is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from runtime.__main__ import main
from runtime.degrees import Degrees
from runtime.forks import process_bytes
from runtime.host_memory import HostMemory
from runtime.inspection import inspect_model
from runtime.machine import CudaDevice, Machine
from runtime.needs import PROCESS, Needs
from runtime.plan import PlanRefused, make_plan, plan_model
from runtime.settings import MemorySettings, ModelSettings, ParallelSettings
from runtime.workload import Workload
from tests.live_bytes import bytes_of_ranks
from tests.ranks import Case, sample_request
from tests.test_arrows import ROOT
from tests.test_offload_matrix import KINDS, LATENTS, Models
from tests.test_offload_matrix import models as models  # a fixture

NEAR = 0.15
GIB = 1 << 30
WAYS = {
    "none": MemorySettings(),
    "layerwise": MemorySettings(offload="layerwise"),
    "layerwise, none resident": MemorySettings(offload="layerwise", resident_blocks="0"),
    "layerwise, one resident, prefetch 0": MemorySettings(offload="layerwise", resident_blocks="1", prefetch="0"),
    "disk": MemorySettings(offload="disk"),
    "disk, none resident": MemorySettings(offload="disk", resident_blocks="0"),
}
FACTS = inspect_model("random:wan")
LOAD = Workload((1, 16, 1, 64, 64), text=20, branches=2)


def machine_with(*, free: int, ranks: int = 0, **bounds: int) -> Machine:
    """One with so much free beside the processes of ranks."""
    return Machine(cores=4, host=HostMemory(free=free + process_bytes(("cpu",) * ranks), **bounds))


def needs_of(count: int, *, facts=FACTS, **fields) -> Needs:
    return Needs(facts, "fp32", devices=("cpu",) * count, workload=LOAD, host=HostMemory(free=64 * GIB), **fields)


def bytes_off_by(models: Models, way: str, kind: str, degrees: dict[str, int]) -> tuple[float, float]:
    """The relative errors of a plan's bytes of weights, and of its peak, on the rank that has most."""
    model = models.folder / "packed.safetensors" if kind == "packed" else models.folder
    quant = {"fp8": "fp8", "svdquant": "svdquant-int4"}.get(kind, "none")
    settings = ModelSettings(model=str(model), dtype="fp32", quant=quant, memory=WAYS[way])
    latent = (2, *LATENTS[models.family][1:-2], 40, 48)
    case = Case(model=str(model), family=models.family, latent=latent, prompts=(20, 20), steps=1, padded=False)
    held, work = bytes_of_ranks(settings, degrees, sample_request(case))
    parallel = ParallelSettings(devices=f"cpu:{Degrees(**degrees).product}", **degrees)
    machine = replace(Machine.here(), cuda=())
    plan = plan_model(settings.model_copy(update={"parallel": parallel}), machine, workload=Workload(latent, 20, 2))
    errors = plan.bytes_per_rank / held - 1, plan.peak_bytes / (held + work) - 1
    print(f"{models.family} {kind} {way} {degrees}: weights {errors[0]:+.1%}, peak {errors[1]:+.1%}")
    return errors


@pytest.mark.parametrize("way", WAYS)
def test_what_a_rank_has_in_host_memory_is_what_the_plan_says(models, way):
    if models.family == "wan":
        assert max(map(abs, bytes_off_by(models, way, "plain", {}))) < NEAR
    elif not way.startswith("disk"):
        assert max(map(abs, bytes_off_by(models, way, "fp8", {}))) < NEAR


@pytest.mark.full
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"ulysses": 2}], ids=str)
def test_also_in_every_number_format_and_over_ranks(models, degrees):
    models.pack()
    cells = [
        (way, kind) for way in WAYS for kind in (*KINDS, "packed") if kind in ("plain", "packed") or "disk" not in way
    ]
    errors = [bytes_off_by(models, *cell, degrees) for cell in cells]
    assert max(abs(error) for both in errors for error in both) < NEAR


def test_the_peak_also_in_four_bits(models):
    assert abs(bytes_off_by(models, "none", "svdquant", {})[1]) < NEAR


def test_a_step_that_host_memory_cannot_hold_is_refused_before_a_weight_is_read_with_one_that_it_can(capsys):
    words = ["plan", "--model", "random:wan", "--devices", "cpu:1", "--json"]
    assert main([*words, "--batch", "100000"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert "TiB more, but that is" in answer["reason"] and "are free" in answer["reason"] and answer["nearest"] is None
    batch = int(answer["nearest_latent"].partition("x")[0])
    assert f"The nearest that fits: a batch of {batch} at 128 x 128 pixels" in answer["reason"]
    assert main([*words, "--batch", str(batch * 3 // 4)]) == 0  # others take memory meanwhile
    answer = json.loads(capsys.readouterr().out)
    assert answer["host_free"] / 2 < answer["host_bytes"] <= answer["host_free"]


def test_what_ranks_have_of_their_own_counts_for_each_and_weights_once():
    one, four = needs_of(1), needs_of(4)
    work = four.activation_bytes(Degrees(ulysses=4))
    assert one.host_bytes(Degrees()) == one.bytes_per_rank(1) + one.activation_bytes(Degrees())
    assert four.host_bytes(Degrees(ulysses=4)) == four.bytes_per_rank(1) + 4 * work
    need = four.host_bytes(Degrees(ulysses=4))
    for free, lacks in ((need - 1, True), (need, False)):
        assert bool(replace(four, host=HostMemory(free=free)).lack(Degrees(ulysses=4))) is lacks
    assert not replace(four, host=HostMemory()).lack(Degrees(ulysses=4))


def test_pages_of_a_file_need_no_room_and_what_is_made_of_them_does(models):
    facts = inspect_model(str(models.folder))
    as_stored, made = (Needs(facts, dtype, devices=("cpu",), host=HostMemory(free=0)) for dtype in ("fp32", "bf16"))
    assert as_stored.host_bytes(Degrees()) == 0 and not as_stored.lack(Degrees())
    kept = sum(4 * math.prod(shape) for name, shape in facts.shapes.items() if facts.spec.stays_float32(name))
    size = made.bytes_per_rank(1) - kept
    assert made.host_bytes(Degrees()) == size and made.lack(Degrees())
    with pytest.raises(PlanRefused, match=r"The nearest that fits: offload disk .*\(Configure Memory\)") as refusal:
        make_plan(ParallelSettings(), facts, machine_with(free=size - 1, ranks=1), dtype="bf16")
    assert refusal.value.smaller.offload.offload == "disk"


def test_a_bound_of_each_process_is_kept_by_more_ranks_that_share():
    one = needs_of(1)
    peak = one.bytes_per_rank(1) + one.activation_bytes(Degrees())
    for bound, words in (
        ("address_space", "may map .* at most .ulimit -v"),
        ("data", "of its own .* at most .ulimit -d"),
    ):
        itself = getattr(PROCESS, bound)
        enough = machine_with(free=64 * GIB, **{bound: itself + peak})
        assert make_plan(ParallelSettings(devices="cpu:1"), FACTS, enough, dtype="fp32", workload=LOAD).world == 1
        machine = machine_with(free=64 * GIB, **{bound: itself + peak - (1 << 20)})
        with pytest.raises(PlanRefused, match=words) as refusal:
            make_plan(ParallelSettings(devices="cpu:1"), FACTS, machine, dtype="fp32", workload=LOAD)
        nearest = make_plan(refusal.value.nearest, FACTS, machine, dtype="fp32", workload=LOAD)
        assert 1 < nearest.world <= machine.cores and "The nearest plan that works" in str(refusal.value)


def test_files_that_are_mapped_count_in_what_a_process_may_have_of_its_own(models):
    """They are mapped to be written to, in copies of the process."""
    facts = inspect_model(str(models.folder))
    needs = Needs(facts, "fp32", devices=("cpu",), host=HostMemory(data=PROCESS.data + 1))
    assert "ulimit -d" in needs.lack(Degrees()) and "ulimit -d" in needs.lack(Degrees(ulysses=2))
    assert not replace(needs, host=HostMemory(data=PROCESS.data + needs.peak_bytes(Degrees()))).lack(Degrees())


def test_no_plan_is_made_where_a_process_may_not_even_have_its_libraries():
    """A rank with nothing loaded had 1.1 GiB of its own and mapped 4.4; with 0.95 and 3.8 it did not start."""
    for bound, size in (("data", 1_000_000 << 10), ("address_space", 4_000_000 << 10)):
        with pytest.raises(PlanRefused, match="torch and diffusers") as refusal:
            make_plan(
                ParallelSettings(), FACTS, machine_with(free=64 * GIB, **{bound: size}), dtype="fp32", workload=LOAD
            )
        assert refusal.value.nearest is None and refusal.value.smaller.latent is None


def test_a_video_gets_fewer_frames_before_a_smaller_picture():
    video = replace(LOAD, latent=(2, 16, 9, 64, 64))
    needs = replace(needs_of(1), workload=replace(LOAD, latent=(1, 16, 3, 64, 64)))
    for free, words in (
        (needs.host_bytes(Degrees()), "a batch of 1 at 512 x 512 pixels and 9 frames"),
        (needs_of(1).bytes_per_rank(1) + (2 << 20), "a batch of 1 at"),
    ):
        with pytest.raises(PlanRefused, match=words) as refusal:
            make_plan(ParallelSettings(), FACTS, machine_with(free=free, ranks=1), dtype="fp32", workload=video)
        latent = refusal.value.smaller.latent
        assert make_plan(
            ParallelSettings(),
            FACTS,
            machine_with(free=free, ranks=1),
            dtype="fp32",
            workload=replace(video, latent=latent),
        )


def test_the_copy_that_blocks_come_from_has_to_fit_beside_a_gpu():
    free = process_bytes(("cuda:0",)) + (1 << 19)
    machine = Machine(cuda=(CudaDevice("GPU", 80 << 10),), host=HostMemory(free=free))
    layerwise = MemorySettings(offload="layerwise")
    with pytest.raises(PlanRefused, match=r"blocks that wait take [\d.]+ KiB of host memory in all, and 512\.0 KiB"):
        make_plan(ParallelSettings(), FACTS, machine, offload=layerwise)
    assert make_plan(ParallelSettings(), FACTS, machine).host_bytes == 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_processes_of_ranks_take_host_memory_before_they_hold_a_weight(ranks):
    parallel, needs = ParallelSettings(devices=f"cpu:{ranks}", ulysses=ranks), needs_of(ranks)
    size, fields = needs.host_bytes(Degrees(ulysses=ranks)), {"dtype": "fp32", "workload": LOAD}
    assert make_plan(parallel, FACTS, machine_with(free=size, ranks=ranks), **fields).host_bytes == size
    with pytest.raises(PlanRefused, match="are free beside the processes"):
        make_plan(parallel, FACTS, machine_with(free=size - 1, ranks=ranks), **fields)


def test_a_limit_of_the_system_is_seen():
    program = (
        "import resource; from runtime.host_memory import HostMemory\n"
        "for name in ('RLIMIT_AS', 'RLIMIT_DATA'): resource.setrlimit(getattr(resource, name), (1 << 32, 1 << 33))\n"
        "here = HostMemory.here(freed=1 << 50); print(here.address_space, here.data, here.free > 1 << 50)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(1 << 32), str(1 << 32), "True"]
