"""What predictions see, and that they are the same each time."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tvmfuse.decide import cost_model
from tvmfuse.decide.cost_model import AnalyticPrior, features, learn
from tvmfuse.decide.log import Conditions, Record
from tvmfuse.values import (
    AVX2,
    AVX512,
    Candidate,
    Conv2d,
    Elementwise,
    Epilogue,
    Host,
    Machine,
    Matmul,
    Measurement,
    Operand,
    Recurrent,
    Step,
    Workload,
)

MACHINE = Machine(AVX512, 32 << 10, 1 << 20, 32 << 20)
HERE = Conditions(Host("AuthenticAMD", 25, 17, 1, ("avx512f",), 32 << 10, 1 << 20, 32 << 20), 1, {}, "d1")
CHAIN = Epilogue((Step("add", ("%0", "$0")), Step("sigmoid", ("%1",))), (Operand((64,), (2,), constant=True),))
WORKLOAD = Workload(Matmul(1, 48, 64, 32), CHAIN)


def candidate(placement: str = "register", cut: int = 2, mr: int = 6, nr: int = 64) -> Candidate:
    return Candidate(placement, cut, (("mr", mr), ("nr", nr)))  # type: ignore[arg-type]


@pytest.mark.parametrize("anchor", [Matmul(1, 48, 64, 32), Conv2d(1, 8, 8, 16, 32, 3, 3), Recurrent("gru", 5, 1, 64), Elementwise((4, 4))])
def test_features_are_finite_and_named_alike_for_every_anchor(anchor) -> None:  # noqa: ANN001
    found = features(Workload(anchor), Candidate("register", 0), MACHINE)
    assert list(found) == list(features(WORKLOAD, candidate(), MACHINE))
    assert all(math.isfinite(x) for x in found.values())


def test_features_tell_cuts_and_placements_apart() -> None:
    whole, apart = features(WORKLOAD, candidate(), MACHINE), features(WORKLOAD, candidate("separate", 0), MACHINE)
    assert (whole["cost_in_loop"], whole["cost_apart"]) == (apart["cost_apart"], apart["cost_in_loop"]) != (0, 0)
    assert whole["placement_register"] == apart["placement_separate"] == 1.0


def test_registers_follow_the_vector_width() -> None:
    assert features(WORKLOAD, candidate(mr=6, nr=64), MACHINE)["registers"] == (24 + 4 + 1) / 32
    assert features(WORKLOAD, candidate(mr=6, nr=16), dataclasses.replace(MACHINE, isa=AVX2))["registers"] == (12 + 2 + 1) / 16


def test_prior_prefers_one_pass_and_full_registers() -> None:
    prior = AnalyticPrior(MACHINE)
    ordered = prior.rank(
        WORKLOAD, [candidate("separate", 0), candidate(mr=1, nr=16), candidate("tile"), candidate(mr=9, nr=64), candidate()]
    )
    assert ordered[0] == candidate()
    assert ordered.index(candidate("tile")) < ordered.index(candidate("separate", 0))
    assert prior.seconds(WORKLOAD, candidate(mr=9, nr=64)) > prior.seconds(WORKLOAD, candidate(mr=6, nr=64)), "39 of 32 registers spill"


def default_of(workload: Workload) -> Candidate:
    return candidate()


def records(sites: int) -> list[Record]:
    """Tiles are a fifth slower, second passes half, on any site."""
    factor = {"register": 1.0, "tile": 1.2, "separate": 1.5}
    found = []
    for site in range(1, sites + 1):
        workload = dataclasses.replace(WORKLOAD, anchor=Matmul(1, 6 * site, 64, 32))
        for placement, slower in factor.items():
            cut = 0 if placement == "separate" else 2
            found.append(
                Record.of(workload, Measurement(candidate(placement, cut), (site * 1e-6 * slower, site * 1e-6 * slower * 1.5)), HERE)
            )
    return found


def test_learned_ranker_predicts_log_ratios_to_the_default() -> None:
    ranker = learn(records(20), MACHINE, default_of)
    assert ranker is not None
    asked = [candidate("separate", 0), candidate("tile"), candidate()]
    assert ranker.log_ratios(WORKLOAD, asked) == pytest.approx([math.log(1.5), math.log(1.2), 0.0], abs=0.02)
    assert ranker.rank(WORKLOAD, asked) == asked[::-1]
    assert ranker.rank(WORKLOAD, []) == []


def test_learning_is_deterministic() -> None:
    one, two = learn(records(20), MACHINE, default_of), learn(records(20), MACHINE, default_of)
    assert one is not None and two is not None
    assert one.log_ratios(WORKLOAD, [candidate()]) == two.log_ratios(WORKLOAD, [candidate()])


def test_too_few_measurements_teach_nothing() -> None:
    assert learn(records(cost_model.MIN_MEASURED // 3), MACHINE, default_of) is None
    assert learn(records(cost_model.MIN_MEASURED // 3 + 1), MACHINE, default_of) is not None


def test_failures_and_sites_without_a_measured_default_teach_nothing() -> None:
    failed = [Record.of(r.workload, Measurement(r.candidate, error="SIGSEGV"), HERE) for r in records(20)]
    orphans = [r for r in records(40) if r.candidate != candidate()]
    assert learn(failed + orphans, MACHINE, default_of) is None
