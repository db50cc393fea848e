"""Winograd kernels: within a bound of the transforms' own amplification, and the same bits in every form of one algorithm."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from tests.exec.kernel_runner import (
    HOST,
    RUNNABLE,
    after_chain,
    assert_same_bits,
    chained,
    each_isa,
    inputs_of,
    run,
    with_knobs,
)
from tests.exec.test_kernels_conv2d import reference
from tvmfuse import kernel
from tvmfuse.errors import ScheduleRefused
from tvmfuse.kernel import toom_cook, winograd
from tvmfuse.values import ISA, WINOGRAD, Anchor, Candidate, Conv2d, Conv2dTranspose, Elementwise, Machine, PlanarConv2d, Workload

SAME = (1, 1, 1, 1)
SHAPES = [
    Conv2d(1, 6, 7, 5, 20, 3, 3),
    Conv2d(2, 5, 6, 8, 12, 3, 3, padding=SAME),
    Conv2d(1, 9, 11, 3, 17, 3, 3, padding=(0, 2, 1, 0)),
    Conv2d(1, 7, 7, 33, 48, 3, 3, padding=SAME),
    Conv2d(1, 1, 1, 5, 7, 3, 3, padding=SAME),
    Conv2d(1, 3, 3, 4, 3, 3, 3),
]
TAILED = chained(Conv2d(2, 7, 10, 19, 37, 3, 3, padding=(1, 1, 0, 2)))

each_algorithm = pytest.mark.parametrize("algorithm", WINOGRAD)


def of(algorithm: str, workload: Workload, machine: Machine = HOST) -> tuple[Candidate, ...]:
    return winograd.candidates(workload, WINOGRAD[algorithm], machine)


def matrices(m: int) -> tuple[np.ndarray, np.ndarray]:
    """B' and A' in full, from what the kernel emits them from."""
    b, a = np.zeros((m + 2, m + 2)), np.zeros((m, m + 2))
    for half in toom_cook.input_halves(m):
        for sign, point in zip((1, -1), half.points, strict=False):
            scale = sign * float(half.scale) if half.even else 1.0
            for k, c in half.even.items():
                b[point, k] = float(c)
            for k, c in half.odd.items():
                b[point, k] = scale * float(c)
    for i, row in enumerate(toom_cook.output_rows(m)):
        for index, c in row.items():
            if index == 0 or index == len(toom_cook.PAIRS[m]) + 1:
                a[i, 0 if index == 0 else m + 1] = float(c)
            else:
                a[i, 2 * index - 1], a[i, 2 * index] = float(c), float(c) * (-1) ** i
    return b, a


def amplified(anchor: Conv2d, m: int, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """|A'| [ (|G| |W| |G'|) * (|B'| |X| |B|) ] |A|: what a rounding of each step can grow to, in float64."""
    b, a = (np.abs(matrix) for matrix in matrices(m))
    g = np.abs(toom_cook.weight_matrix(m))
    th, tw = -(-anchor.oh // m), -(-anchor.ow // m)
    top, left, _, _ = anchor.padding
    image = np.zeros((anchor.n, th * m + 2, tw * m + 2, anchor.ci))
    seen = np.abs(x)[:, : image.shape[1] - top, : image.shape[2] - left]
    image[:, top : top + seen.shape[1], left : left + seen.shape[2]] = seen
    u = np.einsum("pi,oijc,qj->pqco", g, np.abs(w), g)
    out = np.zeros((anchor.n, th * m, tw * m, anchor.co))
    for ty in range(th):
        for tx in range(tw):
            patch = image[:, ty * m : ty * m + m + 2, tx * m : tx * m + m + 2]
            products = np.einsum("npqc,pqco->npqo", np.einsum("pi,nijc,qj->npqc", b, patch, b), u)
            out[:, ty * m : ty * m + m, tx * m : tx * m + m] = np.einsum("ip,npqo,jq->nijo", a, products, a)
    return out[:, : anchor.oh, : anchor.ow]


def assert_right(anchor: Conv2d, algorithm: str, machine: Machine = HOST) -> None:
    """Higham's gamma (Accuracy and Stability, section 3.1) over the longest chain of roundings: each 1-d input transform of m + 2
    terms, the weights' one rounding, ci fused multiply-adds, each 1-d output transform, then the product and the sum of `chained`.
    """
    m, workload = WINOGRAD[algorithm], chained(anchor)
    inputs = inputs_of(workload)
    ((result,),) = run(workload, of(algorithm, workload, machine)[:1], machine, inputs)
    wide = [array.astype(np.float64) for array in inputs]
    x, w, factor, bias = wide
    roundings = 2 * (m + 2) + 1 + anchor.ci + 2 * (m + 2) + 2
    unit = roundings * np.finfo(np.float32).eps / 2
    bound = unit / (1 - unit) * after_chain(amplified(anchor, m, x, w), np.abs(factor), np.abs(bias))
    error = np.abs(result - reference(anchor)(*wide))
    assert (error <= bound).all(), f"error {error.max():.3g}, up to {(error / bound).max():.3g} times the bound"


@each_algorithm
@pytest.mark.parametrize("anchor", SHAPES, ids=str)
def test_result_is_within_the_bound_of_its_transforms(anchor: Conv2d, algorithm: str) -> None:
    assert_right(anchor, algorithm)


@each_algorithm
@each_isa
def test_tails_are_right_on_every_isa(isa: ISA, algorithm: str) -> None:
    assert_right(TAILED.anchor, algorithm, Machine(isa))  # type: ignore[arg-type]


@pytest.mark.parametrize("m", WINOGRAD.values())
def test_transforms_compute_the_convolution(m: int) -> None:
    b, a = matrices(m)
    x, w = np.random.default_rng(0).standard_normal((2, m + 2))
    np.testing.assert_allclose(a @ ((toom_cook.weight_matrix(m) @ w[:3]) * (b @ x)), np.correlate(x, w[:3]), rtol=1e-12)


def test_error_with_the_chosen_points_is_below_that_with_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = chained(Conv2d(1, 16, 16, 64, 16, 3, 3, padding=SAME))
    inputs = inputs_of(workload)
    precise = reference(workload.anchor)(*(array.astype(np.float64) for array in inputs))  # type: ignore[arg-type]

    def error() -> float:
        ((result,),) = run(workload, of("winograd4", workload)[:1], HOST, inputs)
        return float(np.abs(result - precise).max() / np.abs(precise).max())

    chosen = error()
    monkeypatch.setitem(toom_cook.PAIRS, 4, (Fraction(1), Fraction(2)))
    assert chosen < 0.6 * error()


def forms(algorithm: str) -> list[Candidate]:
    """Every placement and cut on one tile, then other register tiles, blocks and shares of the channels."""
    default, *others = of(algorithm, TAILED)
    lanes = HOST.isa.lanes()
    tile = with_knobs(default, mr=2, nr=lanes, tiles=4)
    return [
        default,
        *(c for c in others if c.knobs == default.knobs),
        tile,
        with_knobs(tile, tiles=5),
        with_knobs(tile, tiles=999),
        with_knobs(tile, channels=lanes),
        with_knobs(tile, channels=2 * lanes, nr=2 * lanes, mr=3),
        with_knobs(default, threads=2),
        with_knobs(tile, channels=lanes, threads=2),
    ]


@each_algorithm
def test_bits_are_the_same_in_every_placement_cut_tile_block_and_thread_count(algorithm: str) -> None:
    chosen = forms(algorithm)
    assert len({(c.placement, c.cut) for c in chosen}) == 7
    assert_same_bits([result for (result,) in run(TAILED, chosen, HOST, inputs_of(TAILED))], chosen)


@each_algorithm
def test_bits_are_the_same_on_every_isa(algorithm: str) -> None:
    inputs = inputs_of(TAILED)
    results = [run(TAILED, of(algorithm, TAILED, Machine(isa))[:1], Machine(isa), inputs)[0][0] for isa in RUNNABLE]
    assert_same_bits(results, RUNNABLE)


def test_fewer_blocks_than_threads_share_the_channels() -> None:
    workload = chained(Conv2d(1, 7, 7, 256, 512, 3, 3, padding=SAME))
    first = of("winograd4", workload, Machine(HOST.isa, threads=2))[0]
    assert first["threads"] == 2 and first["channels"] == 256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": (2, 2)}, r"stride 1, this one is \(2, 2\)"),
        ({"stride": (1, 2)}, r"stride 1, this one is \(1, 2\)"),
        ({"dilation": (2, 2)}, r"dilation 1, this one is \(2, 2\)"),
        ({"groups": 2}, "one group, there are 2"),
        ({"kh": 5, "kw": 5}, "3x3 kernel, this one is 5x5"),
        ({"kw": 1}, "3x3 kernel, this one is 3x1"),
        ({"dtype": "float64"}, "float32, this is float64"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, object], reason: str) -> None:
    good = Workload(Conv2d(1, 9, 9, 8, 8, 3, 3))
    workload = Workload(dataclasses.replace(good.anchor, **changes))  # type: ignore[arg-type]
    with pytest.raises(ScheduleRefused, match=reason):
        kernel.build_kernel(workload, of("winograd4", good)[0], HOST)
    assert kernel.candidates(workload, HOST, "relaxed") == kernel.candidates(workload, HOST)
    default = kernel.candidates(workload, HOST)[0]
    assert kernel.digest(workload, HOST, default, "relaxed") == kernel.digest(workload, HOST, default)


@pytest.mark.parametrize("anchor", [Elementwise((4, 4)), Conv2dTranspose(1, 5, 5, 4, 4, 3, 3), PlanarConv2d(1, 5, 5, 4, 4, 3, 3)], ids=str)
def test_other_anchors_have_exact_candidates_only(anchor: Anchor) -> None:
    assert kernel.why_not_relaxed(Workload(anchor)) == "Winograd is for convolutions in NHWC"


def test_refuses_a_tile_that_does_not_fit_the_registers() -> None:
    with pytest.raises(ScheduleRefused, match="registers"):
        kernel.build_kernel(TAILED, with_knobs(of("winograd2", TAILED)[0], mr=40), HOST)


def test_refuses_shares_of_channels_that_cut_a_panel() -> None:
    lanes = HOST.isa.lanes()
    with pytest.raises(ScheduleRefused, match=f"channels={lanes} is not a multiple of nr={2 * lanes}"):
        kernel.build_kernel(TAILED, with_knobs(of("winograd2", TAILED)[0], mr=2, nr=2 * lanes, channels=lanes), HOST)


def test_relaxed_candidates_stand_beside_the_exact_ones_and_the_prior_chooses_the_default() -> None:
    large, stem = chained(Conv2d(1, 56, 56, 128, 128, 3, 3, padding=SAME)), chained(Conv2d(1, 56, 56, 3, 8, 3, 3, padding=SAME))
    for workload, algorithm in ((large, "winograd4"), (stem, None)):
        exact, relaxed = kernel.candidates(workload, HOST), kernel.candidates(workload, HOST, "relaxed")
        assert relaxed[0].algorithm == algorithm and (relaxed[0].placement, relaxed[0].cut) == ("register", 3)
        assert [c for c in relaxed if c.numerics == "exact"] == list(exact)
        assert {c.algorithm for c in relaxed} == {None, *WINOGRAD}
        assert {c.algorithm for c in exact} == {None}
        assert kernel.digest(workload, HOST, exact[0], "relaxed") != kernel.digest(workload, HOST, exact[0])
