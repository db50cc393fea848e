"""The whole tuning loop on a simulated machine: milliseconds, no kernel, no clock."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tvmfuse.decide import search
from tvmfuse.decide.log import Conditions, Log, is_finished
from tvmfuse.decide.search import Demand, SiteResult, allot, spend, tune_site
from tvmfuse.errors import DeviceError
from tvmfuse.values import Candidate, Epilogue, Host, Matmul, Measurement, Step, Workload

WORKLOAD = Workload(Matmul(1, 8, 64, 32), Epilogue((Step("relu", ("%0",)),)))


def tile(placement: str, mr: int) -> Candidate:
    return Candidate(placement, int(placement != "separate"), (("mr", mr),))  # type: ignore[arg-type]


CANDIDATES = [tile(placement, mr) for mr in (6, 4, 8, 2) for placement in ("register", "tile", "separate")]
DEFAULT = CANDIDATES[0]
HERE = Conditions(Host("AuthenticAMD", 25, 17, 1, ("avx2",), 1, 2, 3), 1, {"tvm": "0.27", "llvm": "22"}, "d1", DEFAULT)


class SimulatedMachine:
    """True seconds for each candidate, seen through noise; counts what is asked of it, and its clock runs with what it measures."""

    def __init__(self, true_s: dict[Candidate, float], noise: float = 0.01, bias: float = 0.0) -> None:
        self.true_s, self.noise, self.bias = true_s, noise, bias
        self.wrong: dict[Candidate, str] = {}
        self.crash_after: dict[Candidate, int] = {}
        self.now = 0.0
        self.checked: list[Candidate] = []
        self.sampled: list[Candidate] = []
        self.processes: list[list[Candidate]] = []
        self.orders: list[tuple[int, int]] = []
        self.rng = random.Random(5)

    def clock(self) -> float:
        return self.now

    def check(self, workload: Workload, candidates: Sequence[Candidate]) -> list[str | None]:
        self.checked += candidates
        return [self.wrong.get(c) for c in candidates]

    def screen(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        self.sampled += candidates
        return [Measurement(c, (self.time(c),)) for c in candidates]

    @contextlib.contextmanager
    def open_process(self, workload: Workload, candidates: Sequence[Candidate]) -> Iterator[SimulatedMachine]:
        self.processes.append(list(candidates))
        yield self

    def pair(self, first: int, second: int) -> tuple[float, float]:
        self.orders.append((first, second))
        kernels = self.processes[-1]
        if self.crash_after.get(kernels[first or second], math.inf) < len(self.orders):
            raise DeviceError("worker died: SIGSEGV")
        biased = {1: math.exp(self.bias)}
        return self.time(kernels[first]) * biased.get(first, 1.0), self.time(kernels[second]) * biased.get(second, 1.0)

    def time(self, candidate: Candidate) -> float:
        seconds = self.true_s[candidate] * math.exp(self.rng.gauss(0, self.noise))
        self.now += seconds
        return seconds


def machine(noise: float = 0.01, bias: float = 0.0, **faster: float) -> SimulatedMachine:
    """All candidates take 1 s but those named, as in tile_8=0.8."""
    true_s = {c: 1.0 for c in CANDIDATES}
    return SimulatedMachine(true_s | {tile(*_named(name)): seconds for name, seconds in faster.items()}, noise, bias)


def _named(name: str) -> tuple[str, int]:
    placement, mr = name.split("_")
    return placement, int(mr)


def tune(simulated: SimulatedMachine, folder: Path, budget_s: float = math.inf, **options: object) -> SiteResult:
    log = Log([folder])
    return tune_site(WORKLOAD, CANDIDATES, simulated, log, HERE, budget_s=budget_s, clock=simulated.clock, **options)  # type: ignore[arg-type]


def test_faster_candidate_is_chosen_and_remembered(tmp_path: Path) -> None:
    found = tune(machine(tile_8=0.8, separate_4=0.9), tmp_path)
    assert found.choice == tile("tile", 8) and found.verdict is not None and found.verdict.outcome == "wins"
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, lambda _: "d1")
    assert match is not None and (match.kind, match.candidate) == ("use", tile("tile", 8))


def test_default_stays_among_equals(tmp_path: Path) -> None:
    found = tune(machine(), tmp_path)
    assert found.choice == DEFAULT and {v.outcome for v in found.verdicts} <= {"keeps default", "undecided"}
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, lambda _: "d1")
    assert match is not None and match.candidate is None


def test_biased_control_decides_nothing(tmp_path: Path) -> None:
    found = tune(machine(bias=0.2, tile_8=0.5), tmp_path)
    assert found.choice == DEFAULT and found.too_noisy
    assert Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, lambda _: "d1") is None


def test_wrong_bits_are_never_timed_and_never_tried_again(tmp_path: Path) -> None:
    quick_but_wrong = tile("tile", 8)
    first, second = machine(tile_8=0.1), machine(tile_8=0.1)
    first.wrong[quick_but_wrong] = "3 of 512 elements differ"
    found = tune(first, tmp_path)
    assert found.choice == DEFAULT and quick_but_wrong not in first.sampled
    assert found.failures == (Measurement(quick_but_wrong, error="3 of 512 elements differ"),)
    tune(second, tmp_path)
    assert quick_but_wrong not in second.checked and quick_but_wrong not in second.sampled


def test_candidate_that_crashes_while_timed_fails_alone(tmp_path: Path) -> None:
    simulated = machine(tile_4=0.5, register_4=0.8)
    simulated.crash_after[tile("tile", 4)] = 20
    found = tune(simulated, tmp_path)
    assert found.choice == tile("register", 4)
    assert [(m.candidate, m.error) for m in found.failures] == [(tile("tile", 4), "worker died: SIGSEGV")]
    assert Log([tmp_path]).failures(WORKLOAD, HERE) == {tile("tile", 4): "worker died: SIGSEGV"}


def test_failing_default_is_an_error_but_tried_again_next_time(tmp_path: Path) -> None:
    broken = machine()
    broken.wrong[DEFAULT] = "doesn't build"
    with pytest.raises(DeviceError, match="the default register@1 mr=6 failed: doesn't build"):
        tune(broken, tmp_path)
    assert tune(machine(), tmp_path).choice == DEFAULT


def test_finalists_are_the_best_of_each_placement_and_cut_and_those_near_the_quickest(tmp_path: Path) -> None:
    simulated = machine(noise=0.0, tile_2=0.7, tile_4=0.72, tile_8=0.75, tile_6=0.76, separate_6=0.79, separate_2=0.9)
    found = tune(simulated, tmp_path)
    confirmed = [v.candidate for v in found.verdicts]
    assert {c for c in confirmed if c.placement == "tile"} == {tile("tile", mr) for mr in (2, 4, 8)}
    assert {c for c in confirmed if c.placement == "separate"} == {tile("separate", 6)}
    assert sum(c.placement == "register" for c in confirmed) == 1
    assert all(c in simulated.sampled for c in CANDIDATES)


def test_what_is_far_behind_the_default_is_not_confirmed(tmp_path: Path) -> None:
    slow = {
        f"{placement}_{mr}": 1.1
        for placement in ("register", "tile", "separate")
        for mr in (2, 4, 6, 8)
        if (placement, mr) != ("register", 6)
    }
    found = tune(machine(**slow | {"tile_6": 0.8}), tmp_path / "one")
    assert [(v.candidate, v.outcome) for v in found.verdicts] == [(tile("tile", 6), "wins")] and found.finished
    found = tune(machine(**slow), tmp_path / "none")
    assert found.choice == DEFAULT and not found.verdicts and found.finished


def test_best_tile_is_tried_in_all_places_and_the_other_good_ones_where_it_was_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "TILES_KEPT", 1)
    simulated = machine(noise=0.0, register_8=0.7, tile_8=0.71, register_2=0.8)
    tune(simulated, tmp_path)
    assert {c for c in CANDIDATES if c.placement == "register"} <= set(simulated.sampled)
    elsewhere = {(c.placement, c["mr"]) for c in simulated.sampled if c.placement != "register"}
    assert elsewhere == {("tile", 8), ("separate", 8), ("tile", 6)}


def test_default_is_always_among_the_confirmed_even_if_slow(tmp_path: Path) -> None:
    simulated = machine(noise=0.0, register_6=9.0)
    tune(simulated, tmp_path)
    assert simulated.processes and all(kernels[:2] == [DEFAULT, DEFAULT] for kernels in simulated.processes)


def test_each_look_takes_three_fresh_processes_and_both_orders(tmp_path: Path) -> None:
    simulated = machine(tile_8=0.8)
    tune(simulated, tmp_path)
    assert len(simulated.processes) % search.PROCESSES_PER_LOOK == 0 and len(simulated.processes) >= 3
    first = [order for order in simulated.orders if 2 in order]
    assert {(0, 2), (2, 0)} <= set(first)
    controls = [i for i, order in enumerate(simulated.orders) if 1 in order]
    assert controls[0] < 8 and len(controls) >= 15, "the control is interleaved, not taken at the end"


def test_winners_of_different_processes_meet_in_the_same_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is quick in the processes of the first group alone, which flatters the winners of the others."""
    monkeypatch.setattr(search, "CONFIRMED_TOGETHER", 4)
    simulated = machine(noise=0.0, tile_8=0.80, tile_4=0.81, tile_2=0.82, register_4=0.83, separate_8=0.84)
    opened = simulated.open_process

    def moody(workload: Workload, candidates: Sequence[Candidate]) -> contextlib.AbstractContextManager[SimulatedMachine]:
        simulated.true_s[DEFAULT] = 1.0 if tile("tile", 8) in candidates and len(simulated.processes) < 3 else 2.0
        return opened(workload, candidates)

    monkeypatch.setattr(simulated, "open_process", moody)
    found = tune(simulated, tmp_path)
    assert found.choice == tile("tile", 8)
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, lambda _: "d1")
    assert match is not None and match.candidate == found.choice


def test_every_measurement_is_in_the_log_before_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = machine()

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulated, "open_process", power_cut)
    with pytest.raises(KeyboardInterrupt):
        tune(simulated, tmp_path)
    assert {r.candidate for r in Log([tmp_path]).records()} == set(CANDIDATES)


def test_interrupted_process_keeps_its_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated, taken = machine(tile_8=0.8), 0
    pair = simulated.pair

    def interrupted(first: int, second: int) -> tuple[float, float]:
        nonlocal taken
        taken += 1
        if taken > 12:
            raise KeyboardInterrupt
        return pair(first, second)

    monkeypatch.setattr(simulated, "pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(simulated, tmp_path)
    kept = [r for r in Log([tmp_path]).history(WORKLOAD, HERE) if r.kind == "measurement"]
    assert sum(len(r.times_s) for r in kept) == 12 and all(len(r.times_s) == len(r.default_s) for r in kept)


def test_short_runs_go_on_where_the_last_one_ended_until_the_site_is_finished(tmp_path: Path) -> None:
    sampled: list[Candidate] = []
    pairs, runs = 0, 0
    while not is_finished(Log([tmp_path]).history(WORKLOAD, HERE)):
        simulated = machine(tile_8=0.8, separate_4=0.9)
        found = tune(simulated, tmp_path, budget_s=60.0)
        sampled += simulated.sampled
        pairs, runs = pairs + len(simulated.orders), runs + 1
        assert simulated.sampled or simulated.orders, "each run gets further"
        assert found.spent_s < 60 * 1.1 + 30
    whole = machine(tile_8=0.8, separate_4=0.9)
    assert tune(whole, tmp_path / "at once").choice == found.choice == tile("tile", 8)
    assert runs > 3 and pairs < 1.5 * len(whole.orders), "pairs aren't taken twice"
    assert len(sampled) < 1.5 * len(whole.sampled)


def test_finished_site_is_not_measured_again(tmp_path: Path) -> None:
    first, again = machine(tile_8=0.8), machine(tile_8=0.8)
    found = tune(first, tmp_path)
    assert found.finished and is_finished(Log([tmp_path]).history(WORKLOAD, HERE))
    assert tune(again, tmp_path).choice == found.choice
    assert not again.sampled and not again.orders


def test_too_noisy_site_stays_unfinished_and_is_measured_afresh(tmp_path: Path) -> None:
    assert not tune(machine(bias=0.2, tile_8=0.5), tmp_path).finished
    assert not is_finished(Log([tmp_path]).history(WORKLOAD, HERE))
    assert tune(machine(tile_8=0.5), tmp_path).choice == tile("tile", 8)


def test_pairs_of_other_conditions_do_not_count(tmp_path: Path) -> None:
    tune(machine(tile_8=0.8), tmp_path)
    simulated, log = machine(tile_8=0.8), Log([tmp_path])
    elsewhere = dataclasses.replace(HERE, kernel_digest="d2")
    tune_site(WORKLOAD, CANDIDATES, simulated, log, elsewhere, clock=simulated.clock)
    assert set(simulated.sampled) == set(CANDIDATES) and simulated.orders


def test_budget_ends_screening_and_confirming_and_says_how_many_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BATCH", 2)
    monkeypatch.setattr(search, "EXPLORED", 0)
    simulated = machine()
    found = tune(simulated, tmp_path, budget_s=8.0)
    assert set(simulated.sampled) < set(CANDIDATES)
    assert found.choice == DEFAULT and not found.verdicts
    assert found.unreached > 0 and not found.finished


def test_ranker_decides_what_a_short_budget_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BATCH", 2)
    monkeypatch.setattr(search, "EXPLORED", 0)
    simulated = machine()
    tune(simulated, tmp_path, budget_s=4.0, rank=lambda _, candidates: list(reversed(candidates)))
    assert simulated.sampled[:4] == [DEFAULT, tile("register", 2), tile("register", 8), DEFAULT]


def test_a_share_of_each_batch_is_what_the_ranking_dislikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Candidate("register", 1, (("mr", mr),)) for mr in range(60)]
    simulated = SimulatedMachine(dict.fromkeys(many, 1.0))
    budget_s, log = 40.0, Log([tmp_path])
    tune_site(WORKLOAD, many, simulated, log, HERE, budget_s=budget_s, clock=simulated.clock)
    batch = simulated.sampled[1 : 1 + search.BATCH]
    favoured = search.BATCH - search.EXPLORED
    assert batch[:favoured] == many[1 : 1 + favoured]
    assert all(c["mr"] > favoured for c in batch[favoured:]) and batch[favoured:] != many[1 + favoured : 1 + search.BATCH]


def test_screening_ends_at_a_batch_that_brings_no_new_best(tmp_path: Path) -> None:
    many = [Candidate("register", 1, (("mr", mr),)) for mr in range(100)]
    simulated = SimulatedMachine({c: 1.0 if c["mr"] < 10 else 1.5 for c in many})
    found = tune_site(WORKLOAD, many, simulated, Log([tmp_path]), HERE, clock=simulated.clock)
    assert len(set(simulated.sampled)) == 1 + 2 * search.BATCH
    assert found.finished and not found.unreached


def test_screening_goes_on_after_a_batch_that_failed_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXPLORED", 0)
    many = [Candidate("register", 1, (("mr", mr),)) for mr in range(3 * search.BATCH)]
    simulated = SimulatedMachine({c: 1.0 if c["mr"] <= search.BATCH else 0.5 for c in many})
    simulated.wrong = {c: "no answer within 60 s" for c in many[1 : 1 + search.BATCH]}
    found = tune_site(WORKLOAD, many, simulated, Log([tmp_path]), HERE, clock=simulated.clock)
    assert found.choice["mr"] > search.BATCH


def test_screening_goes_on_while_batches_bring_a_new_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXPLORED", 0)
    many = [Candidate("register", 1, (("mr", mr),)) for mr in range(100)]
    simulated = SimulatedMachine({c: 2.0 - c["mr"] / 100 for c in many}, noise=1e-4)
    tune_site(WORKLOAD, many, simulated, Log([tmp_path]), HERE, clock=simulated.clock)
    assert set(simulated.sampled) == set(many)


def test_same_seed_measures_in_the_same_order(tmp_path: Path) -> None:
    one, two, other = machine(), machine(), machine()
    tune(one, tmp_path / "1")
    tune(two, tmp_path / "2")
    tune(other, tmp_path / "3", seed=1)
    assert one.orders == two.orders != other.orders


def test_site_without_alternatives_keeps_its_default(tmp_path: Path) -> None:
    simulated = machine()
    found = tune_site(WORKLOAD, [DEFAULT], simulated, Log([tmp_path]), HERE, clock=simulated.clock)
    assert found.choice == DEFAULT and not found.verdicts and not simulated.processes


def demand(count: int, gain_s: float) -> Demand:
    return Demand(Workload(Matmul(1, count, 16, 16)), count, gain_s)


def test_allotment_shares_by_gain_times_count() -> None:
    small, large = demand(1, 1e-6), demand(3, 1e-6)
    shared = allot([small, large], 56.0, site_s=8.0)
    assert [(d, pytest.approx(s)) for d, s in shared.shares] == [(large, 8 + 30.0), (small, 8 + 10.0)]


def test_allotment_reports_sites_that_the_budget_does_not_reach() -> None:
    demands = [demand(1, 1e-6), demand(2, 1e-6), demand(3, 1e-6)]
    shared = allot(demands, 17.0, site_s=8.0)
    assert [d for d, _ in shared.shares] == [demands[2], demands[1]] and shared.unreached == (demands[0],)
    assert sum(s for _, s in shared.shares) == pytest.approx(17.0)
    assert allot(demands, 1.0).unreached == tuple(reversed(demands))


def test_what_is_left_of_a_budget_begins_one_more_site() -> None:
    demands = [demand(1, 1e-6), demand(2, 1e-6)]
    assert allot(demands, 6.0, site_s=12.0).shares == ((demands[1], 6.0),)
    assert not allot(demands, 4.9, site_s=12.0).shares


def test_allotment_without_limit_reaches_all() -> None:
    shared = allot([demand(1, 0.0)], math.inf)
    assert shared.shares[0][1] == math.inf and not shared.unreached


@pytest.mark.parametrize("budget_s", [30.0, 120.0, 600.0])
def test_budget_of_a_run_is_kept_to_within_a_tenth(tmp_path: Path, budget_s: float) -> None:
    """Sites of different speed; a pair takes a tenth of a second at most and a process one to start."""
    now = 0.0

    def tune_one(demand: Demand, share: float) -> SiteResult:
        nonlocal now
        simulated = machine(tile_8=0.8)
        simulated.true_s = {c: s * demand.count / 100 for c, s in simulated.true_s.items()}
        opened = simulated.open_process

        def slowly(workload: Workload, candidates: Sequence[Candidate]) -> contextlib.AbstractContextManager[SimulatedMachine]:
            simulated.now += 1.0
            return opened(workload, candidates)

        simulated.open_process = slowly  # type: ignore[method-assign]
        found = tune_site(demand.workload, CANDIDATES, simulated, Log([tmp_path]), HERE, budget_s=share, clock=simulated.clock)
        now += simulated.now
        return found

    demands = [demand(count, 1e-6) for count in range(1, 9)]
    results, left = spend(demands, budget_s, tune_one, lambda: now)
    assert now <= 1.1 * budget_s
    assert len(results) + len(left) == len(demands)
    assert [r.workload for r in results] == [d.workload for d in reversed(demands)][: len(results)]
    assert not left or now >= 0.8 * budget_s, "time that is there is used"


def test_after_a_site_that_its_share_did_not_finish_others_get_more() -> None:
    now, shares = 0.0, []

    def tune_one(demand: Demand, share: float) -> SiteResult:
        nonlocal now
        shares.append(share)
        now += min(share, 30.0)
        return SiteResult(demand.workload, DEFAULT, DEFAULT, (), (), 0, share, finished=share >= 30.0)

    results, left = spend([demand(1, 1e-6) for _ in range(20)], 240.0, tune_one, lambda: now)
    assert shares[0] == pytest.approx(search.SITE_S) and shares[1] == pytest.approx(1.5 * search.SITE_S, rel=0.1)
    assert sum(result.finished for result in results) >= 5 and left
