"""TVM's runtime library, without the compiler: a quarter of its memory, and a tenth of its time to load.

What runs a compiled model is in a library of its own, which the package `tvm` loads before that of the compiler. Here it is loaded alone.
Both orders work: whoever imports `tvm` later, to compile, finds this library there already, and after `import tvm` this finds that one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

CPU = 1  # DLPack's number of the kind of device
POOLED = 2  # TVM's number of the allocator that keeps what was freed


def _library() -> str:
    """Where the installed TVM has it, as its own module says, which is read alone: importing it would import the package."""
    package = importlib.util.find_spec("tvm")
    if package is None or package.origin is None:
        raise ImportError("TVM is not installed: pip install apache-tvm", name="tvm")
    spec = importlib.util.spec_from_file_location("tvm_libinfo", Path(package.origin).with_name("libinfo.py"))
    assert spec is not None and spec.loader is not None
    libinfo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(libinfo)
    return libinfo.find_libtvm_runtime()


ctypes.CDLL(_library(), ctypes.RTLD_GLOBAL)  # models' libraries take its functions from the process


def versions() -> dict[str, str]:
    """Of TVM, whose package needn't be imported for that, and of its FFI."""
    return {"tvm": importlib.metadata.version("apache-tvm"), "tvm_ffi": tvm_ffi.__version__}


def load_module(library: str | os.PathLike[str]) -> tvm_ffi.Module:
    """A model's code, from a shared library."""
    return tvm_ffi.load_module(library)


def virtual_machine(module: tvm_ffi.Module) -> tvm_ffi.Module:
    """One that runs a model's code, for one thread at a time: what relax.VirtualMachine of the module is, without importing Relax."""
    vm = module["vm_load_executable"]()
    vm["vm_initialization"](CPU, 0, POOLED)
    return vm


def tensor_in(memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: str) -> Any:
    """A tensor that lies in memory, an array of bytes."""
    end = offset + math.prod(shape) * np.dtype(dtype).itemsize
    return tvm_ffi.from_dlpack(memory[offset:end].view(dtype).reshape(shape))
