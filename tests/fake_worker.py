"""A rank with a pipeline that only pretends, so that processes and transport are tested alone.

The model's name says how it behaves: `fake?step=0.05&raise=1&at=2` takes 0.05 s a step and fails on rank 1 in step 2.
"""

import errno
import os
import signal
import sys
import time
from urllib.parse import parse_qsl

import torch
import torch.distributed as dist

from runtime import worker
from runtime.errors import Refused
from runtime.progress import tell_failure
from runtime.protocol import Conditioning
from runtime.weighing import Bytes


def run_out_of_memory(how):
    """Of a device, or of the host: as torch's allocator says it, or as a file that cannot be mapped, which whoever reads it
    refuses.
    """
    match how:
        case "device":
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        case "allocator":
            torch.empty(1 << 50, dtype=torch.uint8)
        case "file":
            raise Refused("x.safetensors cannot be read") from OSError(errno.ENOMEM, "Cannot allocate memory")


class FakePipeline:
    def __init__(self, behaviour, mesh):
        self.behaviour, self.mesh, self.sampled = behaviour, mesh, 0

    @classmethod
    def load(cls, settings, *, mesh, progress, prompts, make_room):
        behaviour = dict(parse_qsl(settings.model.partition("?")[2]))
        make_room(Bytes(host=int(behaviour.get("bytes", 0))))
        for step in range(1, 3):
            time.sleep(float(behaviour.get("load", 0)))
            progress("loading", step, 2)
        if behaviour.get("file") in ("bad", str(mesh.rank)):
            raise Refused(f"{settings.model} is not a model: choose another")
        print("loaded in", os.getpid(), flush=True)
        return cls(behaviour, mesh)

    changed, parts = "", ()

    @property
    def held(self):
        return Bytes(host=int(self.behaviour.get("bytes", 0)))

    def encode_text(self, text, *, progress, loras=()):
        progress("encoding text", 1, 1)
        if self.first and self.behaviour.get("text") == "bad":
            raise Refused("the prompt is too long")
        return (
            Conditioning(embedding=torch.full((1, 4, 8), float(len(text)), dtype=torch.bfloat16))
            if self.first
            else None
        )

    def use_parts(self, settings):
        if settings.vae == "bad":
            raise Refused("bad: no such VAE")

    def use_loras(self, loras):
        return [f"{lora.path} at {lora.strength}" for lora in loras]

    def sample(self, request, *, progress):
        steps, self.sampled = request.settings.steps, self.sampled + 1
        for step in range(1, steps + 1):
            time.sleep(float(self.behaviour.get("step", 0)))
            self.misbehave(step)
            if self.mesh.world > 1:
                dist.all_reduce(torch.ones(1))
            if self.behaviour.get("unread") == str(self.mesh.rank) and (self.sampled, step) == (1, 2):
                tell_failure(progress, "sampling", step, steps, failure=Refused("the file has been changed"))
            preview = torch.full((4, 5, 3), step, dtype=torch.uint8) if request.preview != "none" else None
            progress("sampling", step, steps, preview=preview)
        return request.latent * 2

    def decode(self, latent, *, progress):
        progress("decoding", 1, 1)
        return latent.flatten(0, -1).clone() if self.first else None

    def encode(self, pixels, *, progress):
        progress("encoding", 1, 1)
        return pixels.flatten(0, -1).clone() if self.first else None

    def misbehave(self, step):
        if step != int(self.behaviour.get("at", 2)):
            return
        if self.behaviour.get("raise") in (str(self.mesh.rank), "all"):
            raise RuntimeError("this rank does not like the step")
        if self.behaviour.get("memory") == str(self.mesh.rank):
            run_out_of_memory(self.behaviour.get("how", "device"))
        if self.behaviour.get("exit") == str(self.mesh.rank):
            print("about to end", flush=True)
            os._exit(7)
        if self.behaviour.get("signal") == str(self.mesh.rank):
            os.kill(os.getpid(), signal.SIGBUS)
            time.sleep(60)

    @property
    def first(self):
        return self.mesh.rank == 0


if __name__ == "__main__":
    if os.environ.get("FAKE_WORKER_BREAKS"):
        print("ImportError: no such library", file=sys.stderr)
        sys.exit(3)
    worker.PATIENCE_SECONDS = float(os.environ.get("FAKE_PATIENCE_SECONDS", worker.PATIENCE_SECONDS))
    worker.run(load=FakePipeline.load)
