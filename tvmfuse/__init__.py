"""Compile ONNX models for one CPU, with every epilogue's place measured on it."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .processors import default_threads as _default_threads

# TVM reads both when its thread pool first starts. Bound workers leave the main thread to roam over their cores, so that every other
# process is twice as slow for life; unset, x86 gets half of the logical processors. A kernel itself says how many threads it uses.
os.environ.setdefault("TVM_BIND_THREADS", "0")
os.environ.setdefault("TVM_NUM_THREADS", str(_default_threads()))

if TYPE_CHECKING:
    from .building import build, pipeline
    from .explaining import explain
    from .graph.hoist import HoistEpilogue
    from .session import Session, load
    from .tuning import tune
    from .values import Site

# Resolved on first use, so that what needs no TVM (values, decisions, the command line's --help) doesn't wait for it. No module has a
# function's name: importing it would put the module in the function's place.
_HOMES = {
    "build": "building",
    "explain": "explaining",
    "HoistEpilogue": "graph.hoist",
    "Session": "session",
    "load": "session",
    "pipeline": "building",
    "tune": "tuning",
    "Site": "values",
}
__all__ = ["HoistEpilogue", "Session", "Site", "build", "explain", "load", "pipeline", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
