"""What a person is told of a site: why it is placed so, what stays out of its loop, by the model's own names, and what could be done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvmfuse
from tvmfuse import building, explaining, kernel
from tvmfuse.decide.log import Log, Record
from tvmfuse.errors import UsageError
from tvmfuse.explaining import REMEDIES, cost
from tvmfuse.graph.hoist import Rule
from tvmfuse.measure.host import host
from tvmfuse.values import Candidate, Conv2d, Cost, Epilogue, Level, Matmul, Operand, Recurrent, Roofline, Step, Verdict, Workload


def model(*nodes: onnx.NodeProto, outputs: dict[str, list[int]]) -> onnx.ModelProto:
    """x (1, 4, 3, 3), w (8, 4, 1, 1), b (8, 1, 1)."""
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name)
        for name, shape in (("w", (8, 4, 1, 1)), ("b", (8, 1, 1)))
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 3, 3])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    graph = helper.make_graph(nodes, "g", [x], ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


CONV = helper.make_node("Conv", ["x", "w"], ["c"], name="conv")
FUSED = model(
    CONV,
    helper.make_node("Add", ["c", "b"], ["a"], name="bias"),
    helper.make_node("Relu", ["a"], ["y"], name="act"),
    outputs={"y": [1, 8, 3, 3]},
)
SHARED = model(
    CONV,
    helper.make_node("Relu", ["c"], ["y"], name="act"),
    helper.make_node("Softmax", ["c"], ["z"], name="probabilities"),
    outputs={"y": [1, 8, 3, 3], "z": [1, 8, 3, 3]},
)


def test_every_rule_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Rule.__args__)  # type: ignore[attr-defined]


def test_a_refused_op_names_the_onnx_node_that_blocks_it() -> None:
    (site,) = tvmfuse.explain(SHARED, threads=1).sites
    blocked = {b.op: b for b in site.blocked}
    assert (blocked["act"].rule, blocked["act"].node) == ("second user", "probabilities")
    assert "instead" in blocked["act"].remedy
    assert blocked["probabilities"].rule == "not an epilogue op"


def test_an_op_right_behind_its_anchor_is_refused_with_a_reason_too() -> None:
    gemm = helper.make_node("MatMul", ["x", "m"], ["c"], name="product")
    two = model(gemm, helper.make_node("Relu", ["c"], ["y"], name="act"), outputs={"y": [1, 4, 3, 5], "c": [1, 4, 3, 5]})
    two.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 5), np.float32), "m"))
    (site,) = tvmfuse.explain(two, threads=1).sites
    assert [(b.op, b.rule) for b in site.blocked] == [("act", "second user")]


def test_nothing_is_refused_where_all_is_fused() -> None:
    report = tvmfuse.explain(FUSED, threads=1)
    assert (report.refusals, report.sites[0].blocked, report.sites[0].bytes_saved) == ((), (), 2 * 4 * 8 * 9)


def test_before_and_after_hoisting() -> None:
    report = tvmfuse.explain(FUSED, threads=1)
    before, after = (text.splitlines() for text in report.before_after(report.sites[0].site.name))
    assert ["R.matmul" in before[0], "R.reshape" in before[1], "R.add" in before[2], "R.nn.relu" in before[3]] == [True] * 4
    assert ["R.matmul" in after[0], "bias: (9, 8) = R.add" in after[1], "R.nn.relu(bias)" in after[2]] == [True] * 3
    assert all("metadata" not in line for line in (*before, *after)) and "const(8" in after[1]


def test_a_site_is_found_by_a_part_of_its_name() -> None:
    report = tvmfuse.explain(FUSED, threads=1)
    name = report.sites[0].site.name
    assert report.site(name[:3]) is report.site(name)
    with pytest.raises(UsageError, match=f"no site is called 'nothing'; there are: {name}"):
        report.site("nothing")


def test_the_bound_needs_the_limits_of_the_machine() -> None:
    limits = Roofline(1e9, (Level("DRAM", float("inf"), 1e9),))
    assert tvmfuse.explain(FUSED, threads=1).sites[0].bound_s is None
    (site,) = tvmfuse.explain(FUSED, threads=1, roofline=lambda threads: limits).sites
    assert site.bound_s == max(2 * 9 * 4 * 8 / 1e9, site.site.workload.bytes_moved() / 1e9)


@pytest.fixture
def workload() -> Workload:
    return building.prepare(FUSED).sites[0].workload


def recorded(workload: Workload, plan: building.Plan, outcome: str, ratio: float, **changes: object) -> Record:
    tile = next(c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile")
    verdict = Verdict(outcome, tile, ratio, (ratio - 0.01, ratio + 0.01), 0.001, 15, "for this test")  # type: ignore[arg-type]
    conditions = plan.chooser.conditions(workload)
    return Record.of(workload, verdict, dataclasses.replace(conditions, **changes))  # type: ignore[arg-type]


def test_what_was_measured_here_is_the_reason(workload: Workload, tmp_path: Path) -> None:
    plan = building.plan_for(None, 1, "always", None)
    Log([tmp_path]).append(recorded(workload, plan, "wins", 0.9))
    (site,) = tvmfuse.explain(FUSED, threads=1, logs=tmp_path).sites
    assert (site.why, site.hint, site.site.ratio) == ("measured: for this test", None, 0.9)
    default, tile = site.options
    assert (default.verdict, default.predicted_ratio, tile.candidate.placement) == (None, 1.0, "tile")
    assert tile.verdict is not None and tile.verdict.ci == (0.89, 0.91)


def test_a_default_that_was_kept_says_what_lost(workload: Workload, tmp_path: Path) -> None:
    plan = building.plan_for(None, 1, "always", None)
    Log([tmp_path]).append(recorded(workload, plan, "keeps default", 1.1))
    (site,) = tvmfuse.explain(FUSED, threads=1, logs=tmp_path).sites
    assert site.why == "measured, default kept: tile for this test"


def test_a_site_whose_measuring_stayed_open_is_undecided(workload: Workload, tmp_path: Path) -> None:
    plan = building.plan_for(None, 1, "always", None)
    Log([tmp_path]).append(recorded(workload, plan, "undecided", 0.99))
    (site,) = tvmfuse.explain(FUSED, threads=1, logs=tmp_path).sites
    assert (site.undecided, site.why) == (True, "measured, undecided, default kept: tile for this test")


def test_a_record_of_another_cpu_is_a_hint(workload: Workload, tmp_path: Path) -> None:
    plan = building.plan_for(None, 1, "always", None)
    other = dataclasses.replace(host(), stepping=99, name="Another CPU")
    Log([tmp_path]).append(recorded(workload, plan, "wins", 0.9, host=other))
    (site,) = tvmfuse.explain(FUSED, threads=1, logs=tmp_path).sites
    assert site.site.source != "measured"
    assert site.hint is not None and "best on Another CPU" in site.hint and "0.900 [0.890, 0.910]; measure again here" in site.hint
    assert all(option.verdict is None for option in site.options)


def test_forced_and_unmeasured_say_so() -> None:
    forced, default = (tvmfuse.explain(FUSED, threads=1, fuse=fuse, logs=None).sites[0] for fuse in ("never", "measured"))
    assert forced.why == "forced by fuse"
    assert default.why in explaining.WHY.values()


@pytest.mark.parametrize(
    ("workload", "constants"),
    [
        (Workload(Matmul(1, 2, 3, 4)), 4 * 12),
        (Workload(Matmul(1, 2, 3, 4, constant_b=False)), 0),
        (Workload(Conv2d(1, 4, 4, 2, 3, 1, 1)), 4 * 6),
        (Workload(Recurrent("gru", 1, 1, 2)), 4 * (12 + 6)),
        (Workload(Matmul(1, 2, 3, 4), Epilogue((Step("add", ("%0", "$0")),), (Operand((3,), (1,), constant=True),))), 4 * (12 + 3)),
    ],
)
def test_weights_are_constants_and_states_are_not(workload: Workload, constants: int) -> None:
    found = cost(workload, Candidate("register", 0))
    assert found == Cost(workload.anchor.flop(), workload.bytes_moved() - constants, constants)


def test_bound_counts_what_the_algorithm_multiplies() -> None:
    workload = Workload(Conv2d(1, 8, 8, 4, 5, 3, 3, padding=(1, 1, 1, 1)))
    by_winograd = cost(workload, Candidate("register", 0, (("algorithm", "winograd4"),)))
    assert by_winograd.flop == 2 * 4 * 36 * 4 * 5 < workload.anchor.flop() / 2
