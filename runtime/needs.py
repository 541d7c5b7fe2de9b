"""Which degrees a model can be run with: plain arithmetic on heads and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from .activations import activation_bytes
from .degrees import Degrees, factored
from .footprint import ON_DEVICE, Held, held_by_rank, streamed_blocks
from .host_memory import UNKNOWN, HostMemory
from .inspection import ModelFacts
from .kernels import has_triton
from .lora.size import Added, LoraBytes, WorkedOut, lora_bytes, worked_out
from .parallel.lengths import grained_lengths
from .settings import MemorySettings, formula
from .stored import IN_TORCH, IN_TRITON, shared_features
from .units import in_units
from .workload import Workload

USUAL_BRANCHES, MOST_BRANCHES = 2, 3
"""Of guidance: the positive and the negative prompt, and one between them where the Sampler (Advanced) is given one."""
PROCESS = HostMemory(address_space=9 << 29, data=9 << 27)
"""What a rank with nothing loaded takes of what bounds it, with torch and diffusers: seen on Linux with two cores."""
WEIGHTS_SHARE = 0.8
"""So much of a GPU's memory may be weights; the rest is for what a step works with."""


@dataclass(frozen=True)
class Needs:
    """What a model asks of the degrees; `memory` is bytes of the smallest device, 0 where that is not known, `offload`
    says which weights are on it, `added` what LoRAs do to each expert, and `workload` what is sampled, where that is known.
    `devices` has one for each rank, and `host` is what there is of the memory that those on the processor share. `known` is
    what was added up already, for this model on any devices.
    """

    facts: ModelFacts
    dtype: str = "bf16"
    memory: int = 0
    offload: MemorySettings = ON_DEVICE
    workload: Workload | None = None
    added: tuple[tuple[Added, ...], ...] = ()
    devices: tuple[str, ...] = ()
    host: HostMemory = UNKNOWN
    known: dict[tuple, Any] = field(default_factory=dict, compare=False, repr=False)

    def problem(self, degrees: Mapping[str, int]) -> str:
        """What is wrong with degrees, of which some may be missing; empty when nothing is."""
        name, heads = self.facts.name, self.facts.heads
        if degrees.get("cfg", 1) > MOST_BRANCHES:
            return (
                f"cfg {degrees['cfg']} is more than the {MOST_BRANCHES} branches that guidance can have, a positive, a middle "
                f"and a negative prompt: set cfg to 1, 2 or 3"
            )
        sharing = {axis: degrees[axis] for axis in ("ulysses", "tensor") if degrees.get(axis, 1) > 1}
        ranks = math.prod(sharing.values())
        if heads < ranks:
            product = f" = {ranks}" if len(sharing) > 1 else ""
            return f"{formula(sharing)}{product} is more than the {heads} attention heads of {name}: {ranks} ranks for {heads} heads"
        tensor, groups = degrees.get("tensor", 1), heads // self.facts.spec.tensor.together
        if tensor > groups:
            return f"tensor {tensor} is more than the {groups} heads of keys and values of {name}"
        return self._idle(degrees) or ("" if tensor == 1 else self._cut_group(tensor))

    @property
    def limits(self) -> str:
        """What degrees that are left open can be, in words."""
        load = self.workload
        within = [f"ring x ulysses at most {load.tokens(self.facts.spec.patch)} tokens"] if load else []
        within += [f"data at most a batch of {load.batch}"] if load else []
        heads = f"ulysses x tensor at most {self.facts.heads} heads"
        return ", ".join((heads, *within, f"cfg 1 or {USUAL_BRANCHES}"))

    def _idle(self, degrees: Mapping[str, int]) -> str:
        """Which ranks would have nothing to do; empty when all have."""
        load, cfg = self.workload, degrees.get("cfg", 1)
        if load is None:
            return ""
        if 1 < load.branches < cfg:
            return (
                f"cfg {cfg} computes {cfg} prompts at the same time, but guidance evaluates {load.branches} here: the third is "
                f"middle or empty_conditioning of the Sampler (Advanced)"
            )
        if degrees.get("data", 1) > load.batch:
            return f"data {degrees['data']} shares the items of a batch out, but this latent has {load.batch}"
        axes = ("cfg", "ring", "ulysses") if load.branches == 1 else ("ring", "ulysses")
        sharing = {axis: degrees[axis] for axis in axes if degrees.get(axis, 1) > 1}
        ranks, tokens = math.prod(sharing.values()), load.tokens(self.facts.spec.patch)
        if ranks > tokens:
            return f"{formula(sharing)}: {ranks} ranks share the tokens, but this latent has {tokens}"
        return ""

    def _cut_group(self, tensor: int) -> str:
        """Why the inputs of the quantised Linears cannot be dealt out; empty when they can."""
        for name, stored in self.facts.stored.items():
            group, shape = shared_features(stored.kind), self.facts.shapes[f"{name}.weight"]
            if group == 1:
                continue
            shard = next((shard for shard in self.facts.spec.tensor.linears if re.fullmatch(shard.pattern, name)), None)
            if shard is None or shard.mode != "row":
                continue
            unit = shape[1] // sum(shard.blocks)
            cuts = (grained_lengths(block * unit, tensor, shard.grain(self.facts.head_dim)) for block in shard.blocks)
            *ends, _ = accumulate(chain.from_iterable(cuts))
            if any(end % group for end in ends):
                return (
                    f"tensor {tensor} deals the {shape[1]} inputs of {name} out within a group of {group}, which {stored.kind} "
                    f"rounds together"
                )
        return ""

    def bytes_per_rank(self, tensor: int) -> int:
        """What the weights of a rank take on its device, and LoRAs beside them; 0 where that is not known. A GPU has at least
        so much, as what is free there when they are loaded is not known; on the processor that is host memory.
        """
        weights, (loras, _) = self._on_device(tensor), self._loras(tensor)
        beside = loras.beside + loras.files + loras.folded if self.on_host else loras.beside
        return weights + beside if weights else 0

    @property
    def on_host(self) -> bool:
        """Whether the ranks run on the processor."""
        return "cpu" in self.devices

    def _on_device(self, tensor: int) -> int:
        return self._held(tensor).on_host if self.on_host else self._held(tensor).on_gpu

    def _held(self, tensor: int) -> Held:
        held = self._holding(tensor)
        key = tuple(held.values())
        if key not in self.known:
            self.known[key] = sum((held_by_rank(each, **held) for each in self.facts.experts), Held())
        return self.known[key]

    def _holding(self, tensor: int) -> dict[str, Any]:
        free = (self.host.free or 0) // len(self.devices) if self.on_host else 0
        return {"dtype": self.dtype, "tensor": tensor, "offload": self.offload, "free": free}

    def _loras(self, tensor: int) -> tuple[LoraBytes, list[WorkedOut]]:
        """What LoRAs take of a rank, and what each expert that they change works out in its calls."""
        held = self._holding(tensor)
        key = (self.added, self.on_host, *held.values())
        if key not in self.known:
            experts = zip(self.facts.experts, self.added, strict=False)
            changed = [(facts, added, streamed_blocks(facts, **held)) for facts, added in experts if added]
            kinds = {"dtype": self.dtype, "tensor": tensor, "on_host": self.on_host}
            taken = sum((lora_bytes(*each, **kinds) for each in changed), LoraBytes())
            self.known[key] = taken, [worked_out(*each) for each in changed]
        return self.known[key]

    def fits(self, tensor: int) -> bool:
        """Whether the weights leave enough of the memory free, as far as that is known. LoRAs do not count: degrees that
        changed with them would have the model loaded again.
        """
        return not self.memory or self._on_device(tensor) <= WEIGHTS_SHARE * self.memory

    def crowded(self, tensor: int) -> int:
        """How little room the weights leave: 0 where they fit, 1 where the memory just holds them, 2 where it does not."""
        return 0 if self.fits(tensor) else 1 + (self._on_device(tensor) > self.memory)

    def activation_bytes(self, degrees: Degrees) -> int:
        """What a rank works with in a step beside the weights; 0 where that is not known."""
        if not self.workload:
            return 0
        kinds = {"dtype": self.dtype, "on_host": self.on_host, "kernels": self._kernels}
        _, changes = self._loras(degrees.tensor)
        return max(
            activation_bytes(self.facts, degrees, self.workload, changes=each, **kinds) for each in changes or [{}]
        )

    @property
    def _kernels(self) -> str:
        """What will multiply with weights in 4 bits. Which GPU it is is not known here: that Triton takes it is likely."""
        return IN_TORCH if self.on_host or not has_triton() else IN_TRITON

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens a picture or video has, where that is known."""
        return {"tokens": self.workload.tokens(self.facts.spec.patch)} if self.workload else {}

    def peak_bytes(self, degrees: Degrees) -> int:
        """The most that a rank has on its device, as far as that is known."""
        return self.bytes_per_rank(degrees.tensor) + self.activation_bytes(degrees)

    def host_bytes(self, degrees: Degrees) -> int:
        """What all ranks together take of host memory, without pages of files, which the system can take back. Weights are
        there once for the ranks that hold the same.
        """
        held, (loras, _) = self._held(degrees.tensor), self._loras(degrees.tensor)
        if not self.on_host:
            return (held.streamed + loras.folded) * degrees.tensor + loras.files * degrees.product
        own = held.slots + loras.beside + loras.files + self.activation_bytes(degrees)
        return (held.made + loras.folded) * degrees.tensor + own * degrees.product

    def _waiting(self, tensor: int) -> str:
        """What is in host memory beside a GPU, in words."""
        taken, _ = self._loras(tensor)
        kinds = {"blocks that wait": self._held(tensor).streamed, "LoRAs": taken.files}
        return " and ".join(name for name, nbytes in kinds.items() if nbytes)

    def lack(self, degrees: Degrees) -> str:
        """Which memory is too small, in words, as far as that is known; empty when there is enough."""
        peak, host, there = self.peak_bytes(degrees), self.host_bytes(degrees), self.host
        if 0 < self.memory < peak:
            return f"{', '.join(self.devices)} {'have' if self.devices[1:] else 'has'} {in_units(self.memory)}"
        if there.free is not None and there.free < host:
            what = "that is" if self.on_host else f"{self._waiting(degrees.tensor)} take"
            return f"{what} {in_units(host)} of host memory in all, and {in_units(there.free)} are free beside the processes"
        if self.on_host and there.address_space is not None and there.address_space < PROCESS.address_space + peak:
            return f"a process may map {_of_which(there.address_space, 'v', PROCESS.address_space)}"
        own = peak if degrees.product == 1 else self._held(degrees.tensor).mapped + self.activation_bytes(degrees)
        if self.on_host and there.data is not None and there.data < PROCESS.data + own:
            return f"a process may have of its own {_of_which(there.data, 'd', PROCESS.data)}"
        return ""

    def choices(self, count: int, fixed: Mapping[str, int], *, branches: int = USUAL_BRANCHES) -> list[Degrees]:
        """The legal degrees for `count` ranks with some degrees given; the best one first.

        Guidance needs the least exchange, so it comes first (an open cfg is at most `branches`), then Ulysses where the
        ranks have equally many heads, then the ring; weights are cut where they do not fit otherwise, and replicas come
        last: they are of use for a batch only.
        """
        listed = (Degrees(*sizes) for sizes in factored(count, [fixed.get(axis, 0) for axis in vars(Degrees())]))
        found = [degrees for degrees in listed if "cfg" in fixed or degrees.cfg <= branches]
        crowded = {tensor: self.crowded(tensor) for tensor in {degrees.tensor for degrees in found}}

        def cost(degrees: Degrees) -> tuple:
            uneven = self.facts.heads % (degrees.ulysses * degrees.tensor) > 0
            weights = crowded[degrees.tensor], degrees.data, degrees.tensor
            return *weights, -degrees.cfg, uneven, -degrees.ulysses

        return sorted((degrees for degrees in found if not self.problem(vars(degrees))), key=cost)


def _of_which(bound: int, letter: str, itself: int) -> str:
    """A bound of a process, and what is taken of it before anything is loaded, in words."""
    return f"{in_units(bound)} at most (ulimit -{letter}), of which torch and diffusers take about {in_units(itself)}"
