"""numerics="relaxed" from end to end: what is offered, how it is labelled, and that no exact build ever sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmfuse
from tvmfuse import building, cache, kernel
from tvmfuse.choose import Chooser
from tvmfuse.decide.log import Log, Record
from tvmfuse.errors import UsageError
from tvmfuse.measure.host import host, toolchain
from tvmfuse.values import Candidate, Numerics, Verdict, Workload

X = np.random.default_rng(1).standard_normal((1, 32, 20, 20), np.float32)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """relu(conv 3x3), then a 3x3 of stride 2."""
    rng = np.random.default_rng(0)
    shapes = {"w": (48, 32, 3, 3), "b": (48,), "v": (16, 48, 3, 3)}
    weights = [onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 16, name) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["p"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["p"], ["r"]),
        helper.make_node("Conv", ["r", "v"], ["y"], name="second", pads=[1] * 4, strides=[2, 2]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 32, 20, 20])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 10, 10])
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])


def decided(workload: Workload, candidate: Candidate, plan: building.Plan, numerics: Numerics, ratio: float) -> Record:
    conditions = Chooser("measured", plan.machine, host=host(), toolchain=toolchain(), numerics=numerics).conditions(workload)
    return Record.of(workload, Verdict("wins", candidate, ratio, (ratio - 0.01, ratio + 0.01), 0.001, 15, "for this test"), conditions)


def relaxed_other(workload: Workload, plan: building.Plan) -> Candidate:
    return next(c for c in kernel.candidates(workload, plan.machine, "relaxed") if c.algorithm == "winograd2" and c.placement == "tile")


def test_untuned_relaxed_build_says_that_it_is_predicted(model: onnx.ModelProto, tmp_path: Path) -> None:
    exact = tvmfuse.build(model, threads=1, logs=tmp_path)
    relaxed = tvmfuse.build(model, threads=1, logs=tmp_path, numerics="relaxed")
    first, second = relaxed.sites
    assert (first.algorithm, first.source, first.relative_error, first.placement) == ("winograd4", "predicted", None, "register")
    assert (second.algorithm, second.source) == (None, "default")
    assert second.why_not_relaxed == "Winograd needs stride 1, this one is (2, 2)"
    assert all((site.algorithm, site.why_not_relaxed, site.source) == (None, None, "default") for site in exact.sites)
    (a,), (b,) = exact.run(None, {"x": X}), relaxed.run(None, {"x": X})
    assert a.tobytes() != b.tobytes()
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())
    path = tmp_path / "relaxed.tvmfuse"
    relaxed.save(path)
    assert tvmfuse.load(path).sites == relaxed.sites


def test_compiled_models_are_kept_apart(model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    for numerics, algorithm in (("relaxed", "winograd4"), ("exact", None), ("relaxed", "winograd4")):
        assert tvmfuse.build(model, threads=1, logs=tmp_path, numerics=numerics).sites[0].algorithm == algorithm  # type: ignore[arg-type]


def test_relaxed_bits_do_not_depend_on_how_it_is_fused(model: onnx.ModelProto, tmp_path: Path) -> None:
    results = [
        tvmfuse.build(model, threads=threads, logs=tmp_path, fuse=fuse, numerics="relaxed").run(None, {"x": X})[0].tobytes()
        for fuse, threads in (("always", 1), ("never", 1), ("measured", 2))
    ]
    assert len(set(results)) == 1


def test_unknown_numerics_is_wrong_use(model: onnx.ModelProto) -> None:
    with pytest.raises(UsageError, match="numerics='fast' is none of exact, relaxed"):
        tvmfuse.build(model, numerics="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("digest_of", ["exact", "relaxed"])
def test_relaxed_verdict_never_reaches_an_exact_build(
    digest_of: Numerics, model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path
) -> None:
    """Not even if a record carried the digest of the exact candidates."""
    Log([tmp_path]).append(decided(workload, relaxed_other(workload, plan), plan, digest_of, 0.3))
    exact = tvmfuse.explain(model, threads=1, logs=tmp_path)
    assert all((e.site.algorithm, e.site.source) == (None, "default") for e in exact.sites)


def test_relaxed_verdict_is_used_by_a_relaxed_build(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path
) -> None:
    Log([tmp_path]).append(decided(workload, relaxed_other(workload, plan), plan, "relaxed", 0.8))
    site = tvmfuse.explain(model, threads=1, logs=tmp_path, numerics="relaxed").sites[0].site
    assert (site.algorithm, site.placement, site.source, site.ratio) == ("winograd2", "tile", "measured", 0.8)


def test_exact_verdict_holds_in_a_relaxed_build_only_where_the_prior_likes_no_relaxed_candidate(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = next(c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile")
    Log([tmp_path]).append(decided(workload, tile, plan, "exact", 0.9))

    def first() -> tuple[object, ...]:
        site = tvmfuse.explain(model, threads=1, logs=tmp_path, numerics="relaxed").sites[0].site
        return site.algorithm, site.placement, site.source

    assert first() == ("winograd4", "register", "predicted")
    monkeypatch.setattr(kernel.conv2d, "cycles", lambda *_: 0.0)
    assert first() == (None, "tile", "measured")


def test_tuning_measures_errors_and_decides_for_relaxed_builds_alone(model: onnx.ModelProto, workload: Workload, tmp_path: Path) -> None:
    summary = tvmfuse.tune(model, threads=1, budget="20s", logs=tmp_path, numerics="relaxed")
    records = [record for record in Log([tmp_path]).records() if record.workload == workload]
    assert records and all(record.error is None for record in records), [r.error for r in records if r.error]
    measured = {r.candidate.algorithm: r.relative_error for r in records if r.times_s}
    assert measured["winograd4"] is not None and 1e-8 < measured["winograd4"] < 1e-5
    site = summary.sites[0]
    assert site.algorithm is None or (site.relative_error is not None and site.relative_error < 1e-5)
    assert tvmfuse.explain(model, threads=1, logs=tmp_path).sites[0].site.algorithm is None
