"""A compiled model, and the one file that holds it: a manifest, a library, and the weights, which are mapped where they lie."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import mmap
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from .errors import ModelError, TargetMismatch
from .files import written
from .measure import cpu
from .runtime import load_module, versions
from .values import ALIGNMENT, Cost, Site, TensorInfo, View, Workload, aligned

FORMAT = 2
MANIFEST, LIBRARY, WEIGHTS = "manifest.json", "model.so", "weights.bin"
MAX_MANIFEST_BYTES = 16 << 20  # some thousand sites take 2 MiB; as Python objects they take 30 times that
PADDING_ID = 0xD935  # of a zip entry's extra field that aligns its data, as Android's zipalign writes it
LOCAL_HEADER, ZIP64_EXTRA, PADDING_HEADER = 30, 20, 4  # bytes


@dataclass(frozen=True)
class Manifest:
    """What has to be known of a compiled model to call it, and to judge whether this machine can run it.

    features   CPU features that its code uses, as LLVM names them; toolchain: versions of tvmfuse, tvm, tvm_ffi and llvm.
    kernels    site name -> its kernels, in the order in which they run.
    costs      (kernel, what it has to do at least) for every launch in one call of the model, in order.
    views      main's parameters behind the model's inputs and outputs: tensors in its weights, or in its workspace.
    weights    bytes of each; they lie one behind the other, each at the next multiple of 64. workspace: its bytes.
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
    views: tuple[View, ...]
    weights: tuple[int, ...]
    workspace: int

    @property
    def cpu(self) -> str:
        """The target in a few words: its CPU, and its triple where that was given."""
        try:
            stated = json.loads(self.target)
            return " ".join(filter(None, (stated["mcpu"], stated.get("mtriple"))))
        except (ValueError, TypeError, KeyError):
            return self.target

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
            views=tuple(View(**{**item, "shape": tuple(item["shape"])}) for item in data["views"]),
            weights=tuple(int(size) for size in data["weights"]),
            workspace=int(data["workspace"]),
        )


@dataclass(frozen=True)
class Program:
    """A compiled model. file: the artifact that it was loaded from, mapped; None when it was compiled in this process.

    module  has main(*inputs, *outputs, *views) and traced, the same as code for a virtual machine that can be watched: compiled code
            calls its kernels unseen.
    """

    manifest: Manifest
    module: tvm_ffi.Module
    weights: tuple[np.ndarray, ...]
    file: mmap.mmap | None = None


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Write one file that `load` reads; it appears whole or not at all. Needs a C++ compiler that links for the target.

    Raises UsageError when that fails or the file can't be written.
    """
    with written(Path(path)) as partial:
        if program.file is not None:
            partial.write_bytes(program.file)
        else:
            from .linking import linked  # the compiler, which is there: it has made the program

            _write(program, partial, linked(program))


def _write(program: Program, path: Path, code: bytes) -> None:
    stated = {"format": FORMAT, **program.manifest.to_json()}
    manifest = {**stated, "sha256": _digest(stated, code, _padded(program.weights))}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        archive.writestr(LIBRARY, code)
        entry = zipfile.ZipInfo(WEIGHTS)
        data = archive.start_dir + LOCAL_HEADER + len(WEIGHTS) + PADDING_HEADER + ZIP64_EXTRA
        entry.extra = struct.pack("<HH", PADDING_ID, padding := aligned(data) - data) + bytes(padding)
        with archive.open(entry, "w", force_zip64=True) as file:
            for part in _padded(program.weights):
                file.write(part)


def _padded(weights: Iterable[np.ndarray]) -> Iterator[memoryview | bytes]:
    for array in weights:
        yield array.reshape(-1).view(np.uint8).data
        yield bytes(aligned(array.nbytes) - array.nbytes)


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file that `save` wrote, whatever it is called."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {MANIFEST, LIBRARY, WEIGHTS} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def load(path: str | os.PathLike[str]) -> Program:
    """Open a saved model, after checking that it is whole and that this CPU and toolchain can run it.

    An artifact is machine code: loading one runs what its author wrote. The digest shows damage, not an ill intent. So its manifest is
    parsed here and not in a child: nothing is compressed, at most MAX_MANIFEST_BYTES are parsed, as JSON, which take some seconds and
    half a GiB at the very worst, and nesting too deep is an error.
    Raises   ModelError when the file is absent, damaged or no artifact; TargetMismatch when this machine can't run it.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            data = json.loads(_entry(archive, MANIFEST, MAX_MANIFEST_BYTES))
            code = _entry(archive, LIBRARY)
            if data["format"] != FORMAT:
                raise TargetMismatch(f"{path} has artifact format {data['format']}, this tvmfuse reads {FORMAT}; build it again")
            stated = data.pop("sha256")
            manifest = Manifest.from_json(data)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            entry = archive.getinfo(WEIGHTS)
        names = mapped[entry.header_offset + LOCAL_HEADER - 4 : entry.header_offset + LOCAL_HEADER]
        start = entry.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", names))
        if entry.compress_type != zipfile.ZIP_STORED or start % ALIGNMENT:
            raise ValueError("its weights can't be mapped")
        stored = np.frombuffer(mapped, np.uint8, entry.file_size, start)
        whole = stated == _digest(data, code, [stored.data])
        ends = list(itertools.accumulate(map(aligned, manifest.weights), initial=0))
        weights = tuple(stored[begin : begin + size] for begin, size in zip(ends, manifest.weights, strict=False))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ModelError(f"there is no file {path}") from error
    except (OSError, zipfile.BadZipFile, struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is not a whole tvmfuse artifact ({error}); build it again with `tvmfuse build MODEL -o {path}`"
        ) from error
    if not whole:
        raise ModelError(f"{path} is damaged: it doesn't have the digest that its manifest states; build it again")
    if missing := _missing(manifest.features):
        lacks = f"{path} was built for a CPU with {', '.join(missing)}, which this one lacks; build it here or with "
        raise TargetMismatch(f"{lacks}target=", f"{lacks}--target")
    for name, here in versions().items():
        if manifest.toolchain.get(name) != here:
            raise TargetMismatch(f"{path} was built with {name} {manifest.toolchain.get(name)}, here is {here}; build it again")
    with tempfile.TemporaryDirectory(prefix="tvmfuse-") as folder:
        library = Path(folder) / LIBRARY
        library.write_bytes(code)
        module = load_module(library)
    return Program(manifest, module, weights, mapped)


def _missing(features: Iterable[str]) -> list[str]:
    """Those that this CPU lacks. Where it and its system don't confirm one, LLVM is asked, which takes the compiler."""
    unconfirmed = set(features) - cpu.confirmed()
    if not unconfirmed:
        return []
    from .measure.host import host

    return sorted(unconfirmed - set(host().features))


def _entry(archive: zipfile.ZipFile, name: str, most: int | None = None) -> bytes:
    """As it was saved: not compressed, so that it takes no more memory than the file has bytes."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    if most is not None and entry.file_size > most:
        raise ValueError(f"{name} has {entry.file_size} bytes")
    return archive.read(entry)


def _digest(stated: Mapping[str, Any], code: bytes, weights: Iterable[memoryview | bytes]) -> str:
    """Over the library, the weights and all that the manifest states."""
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode() + b"\0")
    for part in (code, *weights):
        digest.update(part)
    return digest.hexdigest()
