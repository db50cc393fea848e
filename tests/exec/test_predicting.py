"""Builds of models that nobody has tuned, from records of others; and that a build with a log is a replay."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmfuse
from tvmfuse import building, kernel, predicting
from tvmfuse.choose import PREDICTED_TILES, first_tiles
from tvmfuse.decide import cost_model
from tvmfuse.decide.log import Conditions, Log, Record
from tvmfuse.kernel.generic import lower_generic
from tvmfuse.kernel.lower import lower_sites
from tvmfuse.measure import device
from tvmfuse.measure.host import host, toolchain
from tvmfuse.values import Candidate, Matmul, Measurement, Verdict, Workload


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVMFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """relu(x @ w + b)."""
    rng = np.random.default_rng(0)
    weights = [onnx.numpy_helper.from_array(rng.standard_normal(s, np.float32), n) for n, s in (("w", (64, 48)), ("b", (48,)))]
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [40, extent]) for name, extent in (("x", 64), ("y", 48)))
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])


def others(model: onnx.ModelProto, plan: building.Plan, sites: int = 30, apart: float = 0.7, noise: float = 0.0) -> list[Record]:
    """Records of matmuls with this model's epilogue, on another CPU of this instruction set: a second pass is quicker there."""
    chain = building.prepare(model).sites[0].workload.epilogue
    elsewhere = dataclasses.replace(host(), stepping=host().stepping + 1)
    rng, found = np.random.default_rng(0), []
    for site in range(sites):
        workload = Workload(Matmul(1, 16 + 8 * site, 48, 32 + 8 * site, "mk", "kn", "mn"), chain)
        default, *rivals = first_tiles(kernel.candidates(workload, plan.machine))[:40]
        taken = [Measurement(default, (1e-5,))]
        for rival in rivals:
            ratio = (apart if rival.placement == "separate" else 1.0) * math.exp(rng.normal(0, noise))
            taken.append(Measurement(rival, (1e-5 * ratio,), default_s=(1e-5,)))
        found += [Record.of(workload, measured, Conditions(elsewhere, 1, toolchain(), "d"), "screening") for measured in taken]
    return found


def test_model_that_nobody_tuned_is_predicted_and_says_so(model: onnx.ModelProto, plan: building.Plan, tmp_path: Path) -> None:
    Log([tmp_path / "log"]).append(*others(model, plan))
    (site,) = tvmfuse.build(model, threads=1, logs=tmp_path / "log").sites
    assert (site.source, site.placement, site.ci) == ("predicted", "separate", None)
    assert site.ratio == pytest.approx(0.7, abs=0.05)
    (explained,) = tvmfuse.explain(model, threads=1, logs=tmp_path / "log").sites
    assert explained.site == site
    (default,) = tvmfuse.build(model, threads=1, logs=tmp_path / "empty").sites
    assert (default.source, default.placement) == ("default", "register")


def test_prediction_has_the_defaults_bits(model: onnx.ModelProto, plan: building.Plan, tmp_path: Path) -> None:
    Log([tmp_path / "log"]).append(*others(model, plan))
    x = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    predicted, always = (tvmfuse.build(model, threads=1, fuse=fuse, logs=tmp_path / "log") for fuse in ("measured", "always"))
    assert predicted.sites[0].source == "predicted"
    assert predicted.run(None, {"x": x})[0].tobytes() == always.run(None, {"x": x})[0].tobytes()


def test_verdict_outranks_a_prediction(model: onnx.ModelProto, plan: building.Plan, tmp_path: Path) -> None:
    log, workload = Log([tmp_path / "log"]), building.prepare(model).sites[0].workload
    here = plan.chooser.conditions(workload)
    kept = Verdict("keeps default", Candidate("separate", 0), 1.1, (1.05, 1.2), 0.001, 15, "slower here")
    log.append(*others(model, plan), Record.of(workload, kept, here))
    (site,) = tvmfuse.build(model, threads=1, logs=tmp_path / "log").sites
    assert (site.source, site.placement) == ("measured", "register")


@pytest.mark.parametrize(
    "records",
    [{"sites": cost_model.MIN_SITES - 1}, {"apart": 1.5}, {"apart": 1.0, "noise": 0.5}],
    ids=["too few", "default is best", "can't be learned"],
)
def test_default_stays_without_a_prediction_worth_its_name(
    records: dict[str, float], model: onnx.ModelProto, plan: building.Plan, tmp_path: Path
) -> None:
    Log([tmp_path / "log"]).append(*others(model, plan, **records))  # type: ignore[arg-type]
    chooser = building.plan_for(None, 1, "measured", tmp_path / "log").chooser
    assert chooser.choice(building.prepare(model).sites[0].workload).source == "default"


def test_records_of_another_instruction_set_predict_nothing(model: onnx.ModelProto, plan: building.Plan, tmp_path: Path) -> None:
    narrow = dataclasses.replace(host(), features=("sse2",))
    foreign = [dataclasses.replace(r, conditions=dataclasses.replace(r.conditions, host=narrow)) for r in others(model, plan)]
    Log([tmp_path / "log"]).append(*foreign)
    assert predicting.predictor(Log([tmp_path / "log"]), plan.machine) is None


def test_trained_model_is_kept_and_gives_the_same_choices(
    model: onnx.ModelProto, plan: building.Plan, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Log([tmp_path / "log"]).append(*others(model, plan))
    candidates = kernel.candidates(building.prepare(model).sites[0].workload, plan.machine)[:50]
    workload = building.prepare(model).sites[0].workload
    trained = predicting.predictor(Log([tmp_path / "log"]), plan.machine)
    (kept,) = (cache / "predictors").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(cost_model, "learn_with_error", lambda *_: pytest.fail("it was trained again"))
        read = predicting.predictor(Log([tmp_path / "log"]), plan.machine)
    assert trained is not None and read is not None
    assert (read.error, read.log_ratios(workload, candidates)) == (trained.error, trained.log_ratios(workload, candidates))
    kept.write_bytes(b"damaged")
    again = predicting.predictor(Log([tmp_path / "log"]), plan.machine)
    assert again is not None and again.error == trained.error
    Log([tmp_path / "log"]).append(others(model, plan)[1])
    predicting.predictor(Log([tmp_path / "log"]), plan.machine)
    assert len(list((cache / "predictors").iterdir())) == 2, "other records, another model"


def test_cache_that_cannot_be_written_costs_nothing_but_time(
    model: onnx.ModelProto, plan: building.Plan, tmp_path: Path, cache: Path
) -> None:
    cache.write_text("not a folder")
    Log([tmp_path / "log"]).append(*others(model, plan))
    assert predicting.predictor(Log([tmp_path / "log"]), plan.machine) is not None


def test_cache_that_is_switched_off_keeps_nothing(
    model: onnx.ModelProto, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVMFUSE_CACHE", "off")
    monkeypatch.setattr(predicting, "_keep", lambda *_: pytest.fail("it is kept"))
    Log([tmp_path / "log"]).append(*others(model, plan))
    assert predicting.predictor(Log([tmp_path / "log"]), plan.machine) is not None


def test_only_the_first_tiles_are_predicted() -> None:
    many = [Candidate(placement, 1, (("mr", mr),)) for mr in range(100) for placement in ("register", "tile")]  # type: ignore[arg-type]
    assert first_tiles(many) == many[: 2 * PREDICTED_TILES]


def test_build_with_a_log_is_a_replay(model: onnx.ModelProto, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions in, the same kernels out, and nothing is measured."""
    workload = building.prepare(model).sites[0].workload
    tile = next(c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile")
    here = plan.chooser.conditions(workload)
    Log([tmp_path / "log"]).append(Record.of(workload, Verdict("wins", tile, 0.9, (0.88, 0.93), 0.001, 30, "quicker"), here))
    for used in ("ForkServer", "LocalDevice"):
        if hasattr(device, used):
            monkeypatch.setattr(device, used, lambda *_, **__: pytest.fail("something is measured"))

    def kernels(logs: Path) -> tuple[list[Candidate], str]:
        prepared, replayed = building.prepare(model), building.plan_for(None, 1, "measured", logs)
        lowered = lower_sites(prepared.mod, prepared.sites, replayed.chooser, replayed.machine)
        return [replayed.chooser(site.workload) for site in prepared.sites], lower_generic(lowered.mod, replayed.machine).script()

    first, again = kernels(tmp_path / "log"), kernels(tmp_path / "log")
    assert first == again and first[0] == [tile]
    assert kernels(tmp_path / "empty")[1] != first[1]
    tvmfuse.build(model, threads=1, logs=tmp_path / "log")
