"""The device of the stand-in for libnrt: runs host programs over memory that it shares.

    python device.py FOLDER

FOLDER holds one file per storage, named by its number. Requests come as lines of JSON on stdin,
answers go to stdout: `{"answer": ...}` or `{"error": text}`.
"""

import json
import math
import mmap
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import torch

from tests.stand_ins.device_neff import as_host_neff
from vllm_neuron._core import Neff
from vllm_neuron.compiler.host_program import HostManifest
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.runtime.host_tensor import DTYPES, HostTensor


class Device:
    """Storages, and the tensors over them that programs have used.

    A tensor that a program updated in place lives in XLA's memory until it is flushed; any other
    is a view of the shared memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = HostRuntime()
        self.models = {}
        self.maps: dict[int, mmap.mmap] = {}
        self.tensors: dict[int, dict[tuple, HostTensor]] = {}

    def load(self, model: int, path: str) -> None:
        data = as_host_neff(Path(path).read_bytes())
        manifest = HostManifest.from_json(Neff.parse(data).member("host/manifest.json"))
        self.models[model] = self.runtime.load(data, aliases=manifest.aliases, bucket="device")
        Path(path).unlink()

    def unload(self, model: int) -> None:
        del self.models[model]

    def execute(self, model: int, inputs: list, outputs: list) -> None:
        loaded = self.models[model]
        tensors = [self.tensor(*place) for place in inputs]
        for output, source in loaded.aliases.items():
            if outputs[output][:2] != inputs[source][:2]:
                raise ValueError(f"output {output} is not the memory of input {source}")
        results = loaded.execute(tensors)
        for index, (place, result) in enumerate(zip(outputs, results, strict=True)):
            if index not in loaded.aliases:
                storage, offset, dtype, shape = place
                self.flush(storage)
                self.view(storage, offset, dtype, shape).copy_(result.read())

    def tensor(self, storage: int, offset: int, dtype: str, shape: list) -> HostTensor:
        key = (offset, dtype, tuple(shape))
        known = self.tensors.setdefault(storage, {})
        if key not in known:
            self.flush(storage)
            known = self.tensors[storage] = {}
            known[key] = self.runtime.upload(self.view(storage, offset, dtype, shape))
        return known[key]

    def view(self, storage: int, offset: int, dtype: str, shape: list) -> torch.Tensor:
        if storage not in self.maps:
            with (self.folder / str(storage)).open("r+b") as file:
                self.maps[storage] = mmap.mmap(file.fileno(), 0)
        kind = DTYPES[dtype]
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=kind)
        flat = torch.frombuffer(self.maps[storage], dtype=kind, count=count, offset=offset)
        return flat.view(shape)

    def flush(self, storage: int) -> None:
        """Write back what is newer than the shared memory, and forget the tensors."""
        for (offset, dtype, shape), tensor in self.tensors.pop(storage, {}).items():
            if not tensor.shares_torch_memory and tensor.nbytes:
                self.view(storage, offset, dtype, list(shape)).copy_(tensor.memory())

    def forget(self, storage: int) -> None:
        self.tensors.pop(storage, None)
        # Its pages go when the last tensor over it does.
        self.maps.pop(storage, None)


def main() -> None:
    # A signal to the process group is for the process that owns the device.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    device = Device(Path(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    # What a library prints must not get between the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        call = getattr(device, request.pop("call"))
        try:
            answer = {"answer": call(**request)}
        except Exception as error:  # noqa: BLE001  the other side reports it as a status
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    # The process that owns the device is gone, with or without nrt_close.
    shutil.rmtree(device.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
