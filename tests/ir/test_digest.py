"""Records hold as long as a family emits the same code, whatever its analytic prior likes best."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tvmfuse import kernel
from tvmfuse.kernel import conv2d, conv2d_transpose, depthwise, emit, matmul, placement, planar_conv2d, recurrent, space, window, winograd
from tvmfuse.values import AVX2, Candidate, Conv2d, Conv2dTranspose, Epilogue, Machine, Matmul, PlanarConv2d, Recurrent, Step, Workload

HERE = Machine(AVX2)
RELU = Epilogue((Step("relu", ("%0",)),))
SAME = (1, 1, 1, 1)
MATMUL = Workload(Matmul(1, 49, 96, 160), RELU)
CONV = Workload(Conv2d(1, 28, 28, 32, 64, 3, 3, padding=SAME), RELU)
DEPTHWISE = Workload(Conv2d(1, 28, 28, 96, 96, 3, 3, padding=SAME, groups=96), RELU)
TRANSPOSE = Workload(Conv2dTranspose(1, 14, 14, 32, 32, 4, 4, stride=(2, 2), padding=SAME), RELU)
PLANAR = Workload(PlanarConv2d(1, 28, 28, 3, 4, 3, 1, padding=(1, 0, 1, 0)), RELU)
GRU = Workload(Recurrent("gru", 3, 1, 96))
FAMILIES = [MATMUL, CONV, DEPTHWISE, TRANSPOSE, PLANAR, GRU]


def first(workload: Workload, numerics: Any = "exact") -> Candidate:
    return kernel.candidates(workload, HERE, numerics)[0]


@pytest.fixture(autouse=True)
def no_digest_is_remembered() -> Any:
    kernel.digest.cache_clear()
    yield
    kernel.digest.cache_clear()


def contrary(cycles: Callable[..., float]) -> Callable[..., float]:
    return lambda *args: -cycles(*args)


@pytest.mark.parametrize(
    ("workload", "numerics"), [*((w, "exact") for w in FAMILIES), (CONV, "relaxed")], ids=[*(w.family for w in FAMILIES), "relaxed"]
)
def test_other_prior_leaves_the_digest_alone(workload: Workload, numerics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    default = first(workload, numerics)
    before = kernel.digest(workload, HERE, default, numerics)
    listed = kernel.FAMILIES[workload.family].tiles(workload, HERE)
    if workload is DEPTHWISE:  # its prior stands in the module itself
        monkeypatch.setattr(depthwise, "tiles", lambda *_: listed[::-1])
    for family in (matmul, conv2d, conv2d_transpose, planar_conv2d, recurrent, winograd):
        monkeypatch.setattr(family, "tile_cycles", contrary(space.tile_cycles))
    kernel.digest.cache_clear()
    assert first(workload, numerics) != default
    assert kernel.digest(workload, HERE, default, numerics) == before is not None


def swapped(accumulate: Callable[..., None]) -> Callable[..., None]:
    return lambda tile, row, vector, x, y: accumulate(tile, row, vector, y, x)


@pytest.mark.parametrize("workload", FAMILIES, ids=lambda w: w.family)
def test_other_code_has_another_digest(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    default = first(workload)
    before = kernel.digest(workload, HERE, default)
    monkeypatch.setattr(emit.RegisterTile, "accumulate", swapped(emit.RegisterTile.accumulate))
    kernel.digest.cache_clear()
    assert kernel.digest(workload, HERE, default) != before


def with_two_ops(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda epilogue, value, reads, bind: evaluate(epilogue, evaluate(epilogue, value, reads, bind=bind), reads, bind=bind)


@pytest.mark.parametrize("workload", FAMILIES[:-1], ids=lambda w: w.family)
def test_other_code_of_the_epilogue_has_another_digest(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    default = first(workload)
    before = kernel.digest(workload, HERE, default)
    monkeypatch.setattr(placement, "evaluate", with_two_ops(placement.evaluate))
    kernel.digest.cache_clear()
    assert kernel.digest(workload, HERE, default) != before


def test_code_of_the_tile_placement_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    default = first(MATMUL)
    before = kernel.digest(MATMUL, HERE, default)
    assert default.placement == "register"
    monkeypatch.setattr(placement.emit, "scratch", lambda size, dtype: emit_scratch(size + 16, dtype))
    kernel.digest.cache_clear()
    assert kernel.digest(MATMUL, HERE, default) != before


emit_scratch = emit.scratch


@pytest.mark.parametrize("mode", ["inline", "copy"])
@pytest.mark.parametrize("workload", [CONV, PLANAR, TRANSPOSE], ids=lambda w: w.family)
def test_code_of_the_mode_that_the_default_does_not_have_counts(workload: Workload, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way of padding the default has, a change of the copy is a change of the family."""
    default = next(c for c in kernel.candidates(workload, HERE) if c["pad"] == mode)
    before = kernel.digest(workload, HERE, default)
    pad = window.pad
    monkeypatch.setattr(window, "pad", lambda image, padding, lanes, threads: pad(image, tuple(2 * p for p in padding), lanes, threads))
    kernel.digest.cache_clear()
    assert kernel.digest(workload, HERE, default) not in (before, None)


def test_code_of_the_other_loop_order_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = emit.shared_tiles

    def shared_in_one_order(axes: Any, threads: int, *rest: Any, **named: Any) -> None:
        shared(axes, 1 + (axes[1].extent == 96), *rest, **named)

    for order in ("rows", "panels"):
        default = next(c for c in kernel.candidates(MATMUL, HERE) if c["order"] == order)
        before = kernel.digest(MATMUL, HERE, default)
        with monkeypatch.context() as patch:
            patch.setattr(emit, "shared_tiles", shared_in_one_order)
            kernel.digest.cache_clear()
            assert kernel.digest(MATMUL, HERE, default) != before


def test_code_of_relaxed_candidates_counts_in_relaxed_digests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    default = first(CONV)
    exact, relaxed = kernel.digest(CONV, HERE, default), kernel.digest(CONV, HERE, default, "relaxed")
    transform = winograd._Body._row
    monkeypatch.setattr(winograd._Body, "_row", lambda self, channels: transform(self, channels) + 16)
    kernel.digest.cache_clear()
    assert kernel.digest(CONV, HERE, default) == exact
    assert kernel.digest(CONV, HERE, default, "relaxed") != relaxed


def test_constant_inside_a_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    default = next(c for c in kernel.candidates(CONV, HERE) if c["pad"] == "inline")
    before = kernel.digest(CONV, HERE, default)
    constant = emit.constant
    monkeypatch.setattr(emit, "constant", lambda value, dtype, lanes=1: constant(value + 1e-7, dtype, lanes))
    kernel.digest.cache_clear()
    assert kernel.digest(CONV, HERE, default) != before


def test_digest_of_another_process_is_the_same() -> None:
    code = "from tests.ir.test_digest import *; print(*(kernel.digest(w, HERE, first(w)) for w in FAMILIES))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert there == [kernel.digest(workload, HERE, first(workload)) for workload in FAMILIES]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (Candidate("register", 1, (("mr", 40), ("nr", 16), ("ku", 2), ("order", "rows"), ("threads", 1))), "registers"),
        (Candidate("register", 1, (("mr", 4), ("nr", 16))), "knows no such knobs"),
        (Candidate("register", 1, (("mr", 4), ("nr", 16), ("ku", 2), ("order", "zigzag"), ("threads", 1))), "knows no such knobs"),
        (Candidate("register", 1, (("mr", 0), ("nr", 16), ("ku", 2), ("order", "rows"), ("threads", 1))), "mr is not between 1 and"),
        (Candidate("register", 1, (("mr", 4), ("nr", 16), ("ku", 1000), ("order", "rows"), ("threads", 1))), "ku is not between 1 and 16"),
        (Candidate("separate", 1, (("mr", 4), ("nr", 16), ("ku", 2), ("order", "rows"), ("threads", 1))), "doesn't go with cut"),
    ],
)
def test_candidate_that_is_none_any_more_says_why(candidate: Candidate, reason: str) -> None:
    sorted_knobs = Candidate(candidate.placement, candidate.cut, tuple(sorted(candidate.knobs)))
    assert reason in str(kernel.why_not(MATMUL, sorted_knobs, HERE))
    assert kernel.digest(MATMUL, HERE, sorted_knobs) is None


def test_candidate_that_the_prior_no_longer_lists_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = kernel.candidates(MATMUL, HERE)
    monkeypatch.setattr(space, "TILES", 1)
    assert last not in kernel.candidates(MATMUL, HERE) and kernel.why_not(MATMUL, last, HERE) is None
