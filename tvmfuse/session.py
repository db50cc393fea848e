"""A compiled model: call it, profile it, save it, load it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from .errors import ModelError, TargetMismatch, UsageError
from .measure.host import host, toolchain
from .measure.roofline import roofline as measured_roofline
from .model.load import TensorInfo
from .values import Cost, Roofline, Site, Workload

FORMAT = 1
LIBRARY, MANIFEST = "model.so", "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20  # some thousand sites take 2 MiB; as Python objects they take 30 times that


@dataclass(frozen=True)
class Manifest:
    """What has to be known of a compiled model to call it, and to judge whether this machine can run it.

    features   CPU features that its code uses, as LLVM names them; toolchain: versions of tvmfuse, tvm, tvm_ffi and llvm.
    kernels    site name -> its kernels, in the order in which they run.
    costs      (kernel, what it has to do at least) for every launch in one call of the model, in order.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    sites: tuple[Site, ...]
    kernels: Mapping[str, tuple[str, ...]]
    costs: tuple[tuple[str, Cost], ...]
    threads: int
    target: str
    features: tuple[str, ...]
    toolchain: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for site, plain in zip(self.sites, data["sites"], strict=True):
            plain["workload"] = site.workload.to_json()
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Raises KeyError, TypeError or ValueError when `data` is not a manifest."""

        def tensors(items: Sequence[Mapping[str, Any]]) -> tuple[TensorInfo, ...]:
            return tuple(TensorInfo(item["name"], tuple(item["shape"]), item["dtype"]) for item in items)

        def site(item: Mapping[str, Any]) -> Site:
            fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
            return Site(**{**fields, "workload": Workload.from_json(item["workload"])})

        return Manifest(
            inputs=tensors(data["inputs"]),
            outputs=tensors(data["outputs"]),
            sites=tuple(site(item) for item in data["sites"]),
            kernels={name: tuple(kernels) for name, kernels in data["kernels"].items()},
            costs=tuple((str(kernel), Cost(**cost)) for kernel, cost in data["costs"]),
            threads=int(data["threads"]),
            target=str(data["target"]),
            features=tuple(data["features"]),
            toolchain=dict(data["toolchain"]),
        )


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a call of the model, over all its launches.

    time_s   median over the calls watched; bound_s: least seconds by the roofline. sites: those that it computes.
    cost     of one launch of it; where a kernel is launched on several tensors, of the first.
    """

    kernel: str
    sites: tuple[str, ...]
    launches: int
    time_s: float
    cost: Cost
    bound_s: float


class Session:
    """A model compiled for one CPU. Safe to call from several threads: each gets a virtual machine of its own, weights are shared."""

    def __init__(self, executable: relax.VMExecutable, manifest: Manifest, traced: Callable[[], relax.VMExecutable] | None = None) -> None:
        """traced  makes the same kernels with a virtual machine that can be watched: compiled code calls its kernels unseen."""
        self.manifest = manifest
        self._executable = executable
        self._traced = traced
        self._local = threading.local()

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.manifest.sites

    @property
    def kernel_count(self) -> int:
        """Kernels that one call launches."""
        return len(self.manifest.costs)

    def get_inputs(self) -> list[TensorInfo]:
        return list(self.manifest.inputs)

    def get_outputs(self) -> list[TensorInfo]:
        return list(self.manifest.outputs)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """ONNX Runtime's calling convention. Raises UsageError for a wrong name, shape or dtype, saying which and what was expected."""
        known = [info.name for info in self.manifest.outputs]
        wanted = known if output_names is None else [output_names] if isinstance(output_names, str) else list(output_names)
        _refuse_unknown(wanted, known, "output")
        arguments = self._arguments(feeds)
        arrays = {info.name: np.empty(info.shape, info.dtype) for info in self.manifest.outputs}
        self._main()(*arguments, *map(tvm_ffi.from_dlpack, arrays.values()))
        return [arrays[name] for name in wanted]

    def bind(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A call on the caller's own buffers: it reads `inputs` as they are at that time and writes `outputs`; nothing is copied.

        Outputs that aren't given go to a buffer that nobody reads. To be called from one thread at a time.
        Raises UsageError when a buffer can't be used in place: wrong name, shape or dtype, strided, byte-swapped or read-only.
        """
        _refuse_unknown(inputs, [info.name for info in self.manifest.inputs], "input")
        _refuse_unknown(outputs, [info.name for info in self.manifest.outputs], "output")
        buffers = [_named(inputs, info) for info in self.manifest.inputs]
        for info in self.manifest.outputs:
            buffers.append(_named(outputs, info) if info.name in outputs else np.empty(info.shape, info.dtype))
        for info, buffer in zip((*self.manifest.inputs, *self.manifest.outputs), buffers, strict=True):
            if not (buffer.flags.c_contiguous and buffer.flags.writeable and buffer.dtype.isnative):
                raise UsageError(f"{info.name!r} can't be bound: it is strided, read-only or in foreign byte order; pass a plain copy")
        main, tensors = self._main(), [tvm_ffi.from_dlpack(buffer) for buffer in buffers]

        def call() -> None:
            main(*tensors)

        return call

    def trace(self, feeds: Mapping[str, np.ndarray], repeats: int = 1) -> list[list[tuple[str, float]]]:
        """For each of `repeats` calls the kernels that really ran, in order, with the seconds of each.

        Raises UsageError for a loaded session: what is saved can't be watched.
        """
        if self._traced is None:
            raise UsageError("a loaded artifact can't be profiled; build the model in this process")
        calls: list[list[tuple[str, float]]] = []
        began = [0.0]

        def watch(_func: Any, name: str, before_run: bool, _result: Any, *_args: Any) -> None:
            if before_run:
                began[0] = time.perf_counter()
            elif not name.startswith("vm."):
                calls[-1].append((name, time.perf_counter() - began[0]))

        outputs = (np.empty(info.shape, info.dtype) for info in self.manifest.outputs)
        arguments = [*self._arguments(feeds), *map(tvm_ffi.from_dlpack, outputs)]
        vm = relax.VirtualMachine(self._traced(), tvm.cpu())
        vm["main"](*arguments)
        vm.set_instrument(watch)
        for _ in range(repeats):
            calls.append([])
            vm["main"](*arguments)
        return calls

    def profile(self, feeds: Mapping[str, np.ndarray], repeats: int = 20, roofline: Roofline | None = None) -> list[KernelTime]:
        """Where one call of the model spends its time, and what the machine would need at least; the longest first.

        roofline  limits of the machine; None measures them, which takes about a second, once a process.
        Raises    UsageError as `run` does, and for a loaded session: what is saved can't be watched.
        """
        limits = measured_roofline(self.manifest.threads) if roofline is None else roofline
        spent: dict[str, list[float]] = {}
        for call in self.trace(feeds, repeats):
            totals: dict[str, float] = {}
            for kernel, seconds in call:
                totals[kernel] = totals.get(kernel, 0.0) + seconds
            for kernel, total in totals.items():
                spent.setdefault(kernel, []).append(total)
        costs = self.manifest.costs
        touched = sum(cost.constant_bytes for _, cost in costs) + max((cost.activation_bytes for _, cost in costs), default=0)
        times = []
        for kernel, samples in spent.items():
            own = [cost for name, cost in costs if name == kernel]
            sites = tuple(site for site, kernels in self.manifest.kernels.items() if kernel in kernels)
            bound = sum(limits.bound_s(cost, touched) for cost in own)
            times.append(KernelTime(kernel, sites, len(own), float(np.median(samples)), own[0], bound))
        return sorted(times, key=lambda time: -time.time_s)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file that `tvmfuse.load` reads; it appears whole or not at all. Needs a C++ compiler that links for the target.

        Raises UsageError when that fails, when the file can't be written, and for a loaded session: copy its file instead.
        """
        if self._traced is None:
            raise UsageError("this session was loaded from a file: copy that file")
        target = Path(path)
        with tempfile.TemporaryDirectory(prefix="tvmfuse-") as folder:
            library = Path(folder) / LIBRARY
            try:
                with _without_chatter():
                    self._executable.export_library(str(library))
            except RuntimeError as error:
                last = str(error).strip().splitlines()[-1]
                raise UsageError(f"can't link a library for target {self.manifest.target}: {last}") from error
            code = library.read_bytes()
        stated = {"format": FORMAT, **self.manifest.to_json()}
        manifest = {**stated, "sha256": _digest(stated, code)}
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with zipfile.ZipFile(partial, "w") as archive:
                archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
                archive.writestr(LIBRARY, code)
            os.replace(partial, target)
        except OSError as error:
            raise UsageError(f"can't write {target}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _arguments(self, feeds: Mapping[str, np.ndarray]) -> list[Any]:
        _refuse_unknown(feeds, [info.name for info in self.manifest.inputs], "input")
        return [_tensor(_named(feeds, info)) for info in self.manifest.inputs]

    def _main(self) -> Callable[..., Any]:
        """The model's entry in this thread's virtual machine: main(*inputs, *outputs)."""
        if not hasattr(self._local, "main"):
            self._local.vm = relax.VirtualMachine(self._executable, tvm.cpu())
            self._local.main = self._local.vm["main"]
        return self._local.main


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file that `Session.save` wrote, whatever it is called."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {MANIFEST, LIBRARY} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def load(path: str | os.PathLike[str]) -> Session:
    """Open a saved model, after checking that it is whole and that this CPU and toolchain can run it.

    An artifact is machine code: loading one runs what its author wrote. The digest shows damage, not an ill intent.
    Raises   ModelError when the file is absent, damaged or no artifact; TargetMismatch when this machine can't run it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(_entry(archive, MANIFEST, MAX_MANIFEST_BYTES))
            code = _entry(archive, LIBRARY)
        if data["format"] != FORMAT:
            raise TargetMismatch(f"{path} has artifact format {data['format']}, this tvmfuse reads {FORMAT}; build it again")
        whole = data.pop("sha256") == _digest(data, code)
        manifest = Manifest.from_json(data)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a whole tvmfuse artifact ({error}); build it again with `tvmfuse build MODEL -o {path}`"
        ) from error
    if not whole:
        raise ModelError(f"{path} is damaged: it doesn't have the digest that its manifest states; build it again")
    missing = sorted(set(manifest.features) - set(host().features))
    if missing:
        lacks = f"{path} was built for a CPU with {', '.join(missing)}, which this one lacks; build it here or with "
        raise TargetMismatch(f"{lacks}target=", f"{lacks}--target")
    here = toolchain()
    for name in ("tvm", "tvm_ffi"):
        if manifest.toolchain.get(name) != here[name]:
            raise TargetMismatch(f"{path} was built with {name} {manifest.toolchain.get(name)}, here is {here[name]}; build it again")
    with tempfile.TemporaryDirectory(prefix="tvmfuse-") as folder:
        library = Path(folder) / LIBRARY
        library.write_bytes(code)
        with _without_chatter():
            executable = relax.VMExecutable(tvm.runtime.load_module(str(library)))
    return Session(executable, manifest)


def _entry(archive: zipfile.ZipFile, name: str, most: int | None = None) -> bytes:
    """As it was saved: not compressed, so that it takes no more memory than the file has bytes."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    if most is not None and entry.file_size > most:
        raise ValueError(f"{name} has {entry.file_size} bytes")
    return archive.read(entry)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """TVM warns on the process's stderr of the memory scope of each constant that it writes or reads; what fails raises."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _digest(stated: Mapping[str, Any], code: bytes) -> str:
    """Over the library and all that the manifest states."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode() + b"\0" + code).hexdigest()


def _refuse_unknown(names: Iterable[str], known: Sequence[str], kind: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no {kind} named {unknown[0]!r}; the model has {', '.join(known)}")


def _named(arrays: Mapping[str, np.ndarray], info: TensorInfo) -> np.ndarray:
    if info.name not in arrays:
        raise UsageError(f"input {info.name!r} of shape {info.shape} and dtype {info.dtype} is missing")
    array = np.asarray(arrays[info.name])
    if tuple(array.shape) != tuple(info.shape):
        raise UsageError(f"{info.name!r} has shape {tuple(array.shape)}, expected {tuple(info.shape)}")
    if array.dtype.newbyteorder("=") != np.dtype(info.dtype):
        found = f"{info.name!r} has dtype {array.dtype}, expected {info.dtype}; "
        raise UsageError(f"{found}pass array.astype({info.dtype!r})", f"{found}convert the file")
    return array


def _tensor(array: np.ndarray) -> Any:
    """Shared with the caller where it can be; read-only, strided and byte-swapped arrays are copied."""
    native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return tvm_ffi.from_dlpack(native if native.flags.writeable else native.copy())
