"""What predictions see, and that they are the same each time."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tvmfuse.decide import cost_model
from tvmfuse.decide.cost_model import AnalyticPrior, Learned, examples, features, learn, learn_with_error
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
    Verdict,
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


FACTOR = {"register": 1.0, "tile": 1.2, "separate": 1.5}


def records(sites: int, factor: dict[str, float] = FACTOR, conditions: Conditions = HERE) -> list[Record]:
    """Tiles are a fifth slower, second passes half, on any site."""
    found = []
    for site in range(1, sites + 1):
        workload = dataclasses.replace(WORKLOAD, anchor=Matmul(1, 6 * site, 64, 32))
        for placement, slower in factor.items():
            place, unit = candidate(placement, 0 if placement == "separate" else 2), site * 1e-6
            taken = Measurement(place, (unit * slower, unit * slower * 1.1), default_s=(unit, unit * 1.1))
            found.append(Record.of(workload, taken, conditions))
        found.append(Record.of(workload, Measurement(candidate(), (unit,)), conditions, "screening"))
    return found


def learned(of: list[Record]) -> Learned | None:
    return learn_with_error(examples(of, MACHINE), MACHINE)


PLACES = [candidate(), candidate("tile"), candidate("separate", 0)]


def test_learned_model_predicts_log_ratios_to_the_default() -> None:
    model = learn(examples(records(20), MACHINE), MACHINE)
    assert model is not None
    assert model.log_ratios(WORKLOAD, PLACES) == pytest.approx([0.0, math.log(1.2), math.log(1.5)], abs=0.02)
    assert model.rank(WORKLOAD, PLACES[::-1]) == PLACES
    assert model.rank(WORKLOAD, []) == []


def test_learning_is_deterministic() -> None:
    one, two = learned(records(20)), learned(records(20))
    assert one is not None and two is not None
    assert (one.log_ratios(WORKLOAD, PLACES), one.error) == (two.log_ratios(WORKLOAD, PLACES), two.error)


def test_too_few_measurements_teach_nothing() -> None:
    assert learn(examples(records((cost_model.MIN_MEASURED - 1) // 3), MACHINE), MACHINE) is None
    assert learn(examples(records((cost_model.MIN_MEASURED + 2) // 3), MACHINE), MACHINE) is not None


def test_many_measurements_of_few_workloads_teach_nothing() -> None:
    sites = examples(records(20), MACHINE)
    again = [dataclasses.replace(site, workload=sites[i % 4].workload) for i, site in enumerate(sites)]
    assert learn(again, MACHINE) is None


def test_failures_teach_nothing() -> None:
    assert examples([Record.of(r.workload, Measurement(r.candidate, error="SIGSEGV"), HERE) for r in records(20)], MACHINE) == []


def test_what_was_the_default_counts_as_one() -> None:
    """Its samples stand alone; after compaction only the site's closing record names it."""
    default, other = candidate(mr=2), Record.of(WORKLOAD, Measurement(candidate("tile"), (1.0,), default_s=(2.0,)), HERE)
    closing = Verdict("keeps default", default, 1.0, (1.0, 1.0), 0.0, 15, "")
    for named in (Record.of(WORKLOAD, Measurement(default, (3.0,)), HERE, "screening"), Record.of(WORKLOAD, closing, HERE, "site")):
        (site,) = examples([named, other], MACHINE)
        assert list(site.log_ratios.items()) == [(default, 0.0), (candidate("tile"), math.log(0.5))]
    assert examples([other], MACHINE) == []


def test_sites_of_a_host_keep_its_caches_and_threads() -> None:
    small = dataclasses.replace(HERE, host=dataclasses.replace(HERE.host, l2=256 << 10), threads=2)
    (site,) = examples(records(1, conditions=small), MACHINE)
    assert (site.machine.l2, site.machine.threads) == (256 << 10, 2)


def test_pick_is_what_promises_more_than_the_error() -> None:
    model = learned(records(40, {"register": 1.0, "tile": 0.8, "separate": 1.5}))
    assert model is not None and model.error < 0.05
    picked = model.pick(WORKLOAD, PLACES)
    assert picked is not None and picked[0] == candidate("tile") and picked[1] == pytest.approx(0.8, abs=0.02)
    assert dataclasses.replace(model, error=0.5).pick(WORKLOAD, PLACES) is None


def test_default_that_looks_best_is_no_pick() -> None:
    model = learned(records(40))
    assert model is not None and model.pick(WORKLOAD, PLACES) is None


def test_error_of_what_cannot_be_learned_forbids_every_pick() -> None:
    """Which placement is best has nothing to do with the site."""
    rng, noise = random.Random(0), []
    for record in records(40):
        times = tuple(t * math.exp(rng.gauss(0, 0.3)) for t in record.default_s)
        noise.append(dataclasses.replace(record, times_s=times) if times else record)
    model = learned(noise)
    assert model is not None and model.error > 0.1
    assert model.pick(WORKLOAD, PLACES) is None


def test_too_few_workloads_predict_nothing() -> None:
    assert learned(records(cost_model.MIN_SITES - 1)) is None
    assert learned(records(cost_model.MIN_SITES)) is not None
