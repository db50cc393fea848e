"""The whole tuning loop on a simulated machine: milliseconds, no kernel, no clock."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tvmfuse.decide import search
from tvmfuse.decide.log import Conditions, Log
from tvmfuse.decide.search import Demand, SiteResult, plan, tune_site
from tvmfuse.errors import DeviceError
from tvmfuse.values import Candidate, Epilogue, Host, Matmul, Measurement, Step, Workload

HERE = Conditions(Host("AuthenticAMD", 25, 17, 1, ("avx2",), 1, 2, 3), 1, {"tvm": "0.27", "llvm": "22"}, "d1")
WORKLOAD = Workload(Matmul(1, 8, 64, 32), Epilogue((Step("relu", ("%0",)),)))


def tile(placement: str, mr: int) -> Candidate:
    return Candidate(placement, int(placement != "separate"), (("mr", mr),))  # type: ignore[arg-type]


CANDIDATES = [tile(placement, mr) for mr in (6, 4, 8, 2, 1) for placement in ("register", "tile", "separate")]
DEFAULT = CANDIDATES[0]


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
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, "d1")
    assert match is not None and (match.kind, match.candidate) == ("use", tile("tile", 8))


def test_default_stays_among_equals(tmp_path: Path) -> None:
    found = tune(machine(), tmp_path)
    assert found.choice == DEFAULT and {v.outcome for v in found.verdicts} == {"keeps default"}
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, "d1")
    assert match is not None and match.candidate is None


def test_biased_control_decides_nothing(tmp_path: Path) -> None:
    found = tune(machine(bias=0.2, tile_8=0.5), tmp_path)
    assert found.choice == DEFAULT and found.too_noisy
    assert Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, "d1") is None


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
    simulated = machine(tile_8=0.5, register_4=0.8)
    simulated.crash_after[tile("tile", 8)] = 20
    found = tune(simulated, tmp_path)
    assert found.choice == tile("register", 4)
    assert [(m.candidate, m.error) for m in found.failures] == [(tile("tile", 8), "worker died: SIGSEGV")]
    assert Log([tmp_path]).failures(WORKLOAD, HERE) == {tile("tile", 8): "worker died: SIGSEGV"}


def test_failing_default_is_an_error_but_tried_again_next_time(tmp_path: Path) -> None:
    broken = machine()
    broken.wrong[DEFAULT] = "doesn't build"
    with pytest.raises(DeviceError, match="the default register@1 mr=6 failed: doesn't build"):
        tune(broken, tmp_path)
    assert tune(machine(), tmp_path).choice == DEFAULT


def test_finalists_are_three_of_each_placement_and_cut(tmp_path: Path) -> None:
    simulated = machine(noise=0.0, tile_1=0.7, tile_2=0.8, tile_4=0.9, tile_6=0.95)
    found = tune(simulated, tmp_path)
    confirmed = [v.candidate for v in found.verdicts]
    assert {c for c in confirmed if c.placement == "tile"} == {tile("tile", mr) for mr in (1, 2, 4)}
    assert [sum(c.placement == p for c in confirmed) for p in ("register", "tile", "separate")] in ([2, 3, 3], [3, 3, 3])
    assert all(c in simulated.sampled for c in CANDIDATES)


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
    match = Log([tmp_path]).best(WORKLOAD, HERE.host, 1, HERE.toolchain, "d1")
    assert match is not None and match.candidate == found.choice


def test_every_measurement_is_in_the_log_before_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = machine()

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulated, "open_process", power_cut)
    with pytest.raises(KeyboardInterrupt):
        tune(simulated, tmp_path)
    assert {r.candidate for r in Log([tmp_path]).records()} == set(CANDIDATES)


def test_budget_ends_screening_and_confirming_and_says_how_many_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BATCH", 4)
    simulated = machine()
    found = tune(simulated, tmp_path, budget_s=12.0)
    assert set(simulated.sampled) < set(CANDIDATES)
    assert found.choice == DEFAULT and not found.verdicts
    assert found.unreached + len(set(simulated.sampled) - {DEFAULT}) >= len(CANDIDATES) - 1


def test_ranker_decides_what_a_short_budget_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BATCH", 2)
    simulated = machine()
    tune(simulated, tmp_path, budget_s=4.0, rank=lambda _, candidates: list(reversed(candidates)))
    assert simulated.sampled[:3] == [DEFAULT, *CANDIDATES[:-3:-1]]


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


def test_plan_shares_by_gain_times_count() -> None:
    small, large = demand(1, 1e-6), demand(3, 1e-6)
    shared = plan([small, large], 56.0, least_s=8.0)
    assert [(d, pytest.approx(s)) for d, s in shared.shares] == [(large, 8 + 30.0), (small, 8 + 10.0)]


def test_plan_reports_sites_that_the_budget_does_not_reach() -> None:
    demands = [demand(1, 1e-6), demand(2, 1e-6), demand(3, 1e-6)]
    shared = plan(demands, 17.0, least_s=8.0)
    assert [d for d, _ in shared.shares] == [demands[2], demands[1]] and shared.unreached == (demands[0],)
    assert sum(s for _, s in shared.shares) == pytest.approx(17.0)
    assert plan(demands, 1.0).unreached == tuple(reversed(demands))


def test_plan_without_limit_reaches_all() -> None:
    shared = plan([demand(1, 0.0)], math.inf)
    assert shared.shares[0][1] == math.inf and not shared.unreached
