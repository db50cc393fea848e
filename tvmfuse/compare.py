"""Whole models in several runtimes, timed in one interleaved run.

A round takes one sample of every runner, in random order; a ratio is formed within a round, where both sides met the same
machine. The first runner is also entered a second time: its ratio to itself (A/A) is the noise of the run.
Source: duet benchmarking, arXiv 2001.05811.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from onnx import ModelProto

if TYPE_CHECKING:
    from .session import Session

Feeds = Mapping[str, np.ndarray]
Clock = Callable[[], float]
SAMPLE_S = 5e-3


@dataclass(frozen=True)
class Runner:
    """A model that is ready to run: `call` computes `outputs` in place, from inputs bound before."""

    call: Callable[[], object]
    outputs: Mapping[str, np.ndarray]


class Peer(Protocol):
    """Another runtime: compiles `model` with its free dimensions bound to `shapes`, and binds buffers for `feeds`."""

    def __call__(self, model: ModelProto, shapes: Mapping[str, int], feeds: Feeds, threads: int) -> Runner: ...


def bound(session: Session, feeds: Feeds) -> Runner:
    """The session as a runner, over buffers of its own for the outputs."""
    outputs = {info.name: np.empty(info.shape, info.dtype) for info in session.get_outputs()}
    return Runner(session.bind(feeds, outputs), outputs)


def onnxruntime(model: ModelProto, shapes: Mapping[str, int], feeds: Feeds, threads: int) -> Runner:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    for dimension, extent in shapes.items():
        options.add_free_dimension_override_by_name(dimension, extent)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    results = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in zip(names, session.run(None, feeds), strict=True)}
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_cpu_input(name, x)
    for name, result in results.items():
        binding.bind_ortvalue_output(name, result)
    outputs = {name: np.from_dlpack(result) for name, result in results.items()}
    return Runner(lambda: session.run_with_iobinding(binding), outputs)


def openvino(model: ModelProto, shapes: Mapping[str, int], feeds: Feeds, threads: int) -> Runner:
    import openvino as ov

    core = ov.Core()
    network = core.read_model(model.SerializeToString())
    network.reshape({name: list(x.shape) for name, x in feeds.items()})
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(network, "CPU", options).create_infer_request()
    for name, x in feeds.items():
        request.set_tensor(name, ov.Tensor(x, shared_memory=True))
    # By the model's own names: OpenVINO's ports carry several.
    outputs = {value.name: request.get_tensor(value.name).data for value in model.graph.output}
    return Runner(request.infer, outputs)


PEERS: dict[str, Peer] = {"onnxruntime": onnxruntime, "openvino": openvino}


@dataclass(frozen=True)
class Row:
    """One runner of one model. `ratio` has the first runner's time over this one's: lower quartile, median, upper quartile.

    difference  largest |difference| to the first runner's outputs, over the largest |output|.
    """

    model: str
    runner: str
    median_s: float
    ratio: tuple[float, float, float]
    difference: float
    rounds: int


def samples(calls: Mapping[str, Callable[[], object]], seconds: float, clock: Clock, seed: int = 0) -> dict[str, list[float]]:
    """Seconds per call of each, one a round, all of a round in random order; at least five rounds, more while time is left.

    Each sample starts with a call that is not timed: it brings back what the others drove out of the caches.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, round(SAMPLE_S / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(seed).shuffle
    end = clock() + seconds
    while clock() < end or len(times[order[0]]) < 5:
        shuffle(order)
        for name in order:
            call, repeat = calls[name], repeats[name]
            call()
            start = clock()
            for _ in range(repeat):
                call()
            times[name].append((clock() - start) / repeat)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def difference(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Largest |a - b| over largest |a|, the worst output's."""
    return max(float(np.abs(x - b[name]).max() / max(np.abs(x).max(), 1e-30)) for name, x in a.items())


def compare(model: str, runners: Mapping[str, Runner], seconds: float, clock: Clock) -> list[Row]:
    """The first runner against each of the others and, first of all, against itself."""
    first, subject = next(iter(runners.items()))
    everyone = {first: subject, f"{first} (A/A)": subject, **runners}
    times = samples({name: runner.call for name, runner in everyone.items()}, seconds, clock)
    return [
        Row(
            model,
            name,
            statistics.median(times[name]),
            quartiles([own / other for own, other in zip(times[first], times[name], strict=True)]),
            difference(subject.outputs, runner.outputs),
            len(times[name]),
        )
        for name, runner in everyone.items()
    ]


HEADER = ("model", "runner", "median ms", "first / this", "quartiles", "difference", "rounds")


def table(rows: Sequence[Row]) -> str:
    """As GitHub's Markdown."""
    lines = [HEADER, ("---", "---", *["---:"] * 5)]
    for row in rows:
        low, median, high = row.ratio
        cells = (row.model, row.runner, f"{row.median_s * 1e3:.4g}", f"{median:.3f}", f"{low:.3f} .. {high:.3f}")
        lines.append((*cells, f"{row.difference:.1e}", str(row.rounds)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
