"""The whole-model gate: what it decides, and where it times: in this process, or in a fresh one with all models side by side."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import tvmfuse
from tests import small_models
from tvmfuse import building, gate, kernel
from tvmfuse.choose import Chooser, Fuse
from tvmfuse.decide.log import Log, Record
from tvmfuse.decide.search import SiteResult
from tvmfuse.errors import DeviceError, DeviceLost, UsageError, WrongBits
from tvmfuse.measure import whole
from tvmfuse.measure.device import Place, Runner
from tvmfuse.measure.forkserver import ForkServer
from tvmfuse.measure.host import host, toolchain
from tvmfuse.measure.pool import Pool
from tvmfuse.measure.worker import Bench
from tvmfuse.values import Candidate, Verdict

FOUND = gate.Comparison("always", 1.0, (0.9, 1.1), 0.001, 15)
DEFAULT = Candidate("register", 0)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return small_models.two_layers()


@pytest.fixture(scope="module")
def prepared(model: onnx.ModelProto) -> building.Prepared:
    return building.prepare(model)


@pytest.fixture(scope="module")
def plan() -> building.Plan:
    return building.plan_for(None, 1, "always", None)


def compiled(prepared: building.Prepared, plan: building.Plan, fuse: Fuse) -> tvmfuse.Session:
    return building.compile_model(prepared, plan, Chooser(fuse, plan.machine))


@pytest.fixture(scope="module")
def sessions(prepared: building.Prepared, plan: building.Plan) -> list[tvmfuse.Session]:
    always, never = (compiled(prepared, plan, fuse) for fuse in gate.RIVALS)
    return gate.side_by_side(always, [always, never])


def results(prepared: building.Prepared, plan: building.Plan, log: Log) -> list[SiteResult]:
    """Both sites were won by another candidate than the default, the first by more."""
    found = []
    for site, ratio in zip(prepared.sites, (0.8, 0.97), strict=True):
        default, *others = kernel.candidates(site.workload, plan.machine)
        won = Verdict("wins", others[0], ratio, (ratio - 0.01, ratio + 0.01), 0.001, 15, "for this test")
        log.append(Record.of(site.workload, won, plan.chooser.conditions(site.workload)))
        found.append(SiteResult(site.workload, default, others[0], (won,), (), 0, 1.0))
    return found


@pytest.mark.parametrize(
    ("ratio", "ci", "noise", "slower"),
    [
        (1.033, (1.006, 1.047), 0.008, True),
        (1.033, (0.995, 1.060), 0.008, False),
        (1.009, (1.004, 1.012), 0.001, False),
        (1.033, (1.006, 1.047), 0.02, False),
    ],
    ids=["no tie", "a tie is within the interval", "within the margin", "within what equal models differ by"],
)
def test_a_model_is_slower_where_its_interval_leaves_out_a_tie(ratio: float, ci: tuple[float, float], noise: float, slower: bool) -> None:
    assert gate.is_slower(dataclasses.replace(FOUND, ratio=ratio, ci=ci, aa_noise=noise)) == slower


def measured_sites(session: tvmfuse.Session) -> int:
    return sum(site.source == "measured" for site in session.sites)


@pytest.mark.parametrize("deadline", [math.inf, 0.0])
def test_gate_turns_back_the_weakest_site_until_the_model_is_not_slower_and_all_when_time_is_over(
    prepared: building.Prepared, plan: building.Plan, tmp_path: Path, deadline: float
) -> None:
    log, tuned = Log([tmp_path]), list[int]()

    def compare(sessions: Sequence[tvmfuse.Session], judge: gate.Judge) -> gate.Comparison:
        assert [measured_sites(session) for session in sessions[1:]] == [0, 0, 0] and sessions[1] is sessions[2]
        assert {site.placement for site in sessions[3].sites} == {"separate"}
        tuned.append(measured_sites(sessions[0]))
        ratio = 1.2 if tuned[-1] == 2 else 0.95
        return dataclasses.replace(FOUND, ratio=ratio, ci=(ratio - 0.02, ratio + 0.02))

    found = gate.revert_while_slower(prepared, plan, log, results(prepared, plan, log), compare, lambda done, doing: None, deadline)
    assert tuned == [2, 1] if deadline else [2]
    assert found.comparison is not None and found.comparison.ratio == (0.95 if deadline else 1.2) and found.failure is None
    assert list(found.reverted) == [site.workload for site in reversed(prepared.sites)][: 1 if deadline else 2]
    assert {r.workload for r in Log([tmp_path]).records() if r.kind == "model_gate"} == set(found.reverted)
    again = Chooser("measured", plan.machine, Log([tmp_path]), host(), toolchain())
    assert [again.choice(site.workload).candidate.placement for site in prepared.sites] == ["tile" if deadline else "register", "register"]


@pytest.mark.parametrize("error", [DeviceError, DeviceLost, UsageError])
def test_gate_that_loses_its_device_keeps_what_it_has_decided(
    error: type[Exception], prepared: building.Prepared, plan: building.Plan, tmp_path: Path
) -> None:
    log, slower = Log([tmp_path]), dataclasses.replace(FOUND, ratio=1.2, ci=(1.18, 1.22))
    said = [slower]

    def compare(*_: object) -> gate.Comparison:
        if not said:
            raise error("unplugged")
        return said.pop()

    found = gate.revert_while_slower(prepared, plan, log, results(prepared, plan, log), compare, lambda done, doing: None, math.inf)
    assert (found.comparison, found.reverted, found.failure) == (slower, (prepared.sites[1].workload,), "unplugged")
    assert [r.workload for r in Log([tmp_path]).records() if r.kind == "model_gate"] == [prepared.sites[1].workload]


def test_all_sites_of_a_run_go_back_when_the_model_computes_other_bits(
    prepared: building.Prepared, plan: building.Plan, tmp_path: Path
) -> None:
    def compare(*_: object) -> gate.Comparison:
        raise WrongBits("3 elements")

    won = results(prepared, plan, Log([tmp_path]))
    with pytest.raises(WrongBits, match="3 elements"):
        gate.revert_while_slower(prepared, plan, Log([tmp_path]), won, compare, lambda done, doing: None, math.inf)
    again = Chooser("measured", plan.machine, Log([tmp_path]), host(), toolchain())
    assert [again.choice(site.workload).candidate for site in prepared.sites] == [result.default for result in won]


def test_nothing_is_compiled_or_compared_when_no_site_changed(prepared: building.Prepared, plan: building.Plan, tmp_path: Path) -> None:
    kept = [SiteResult(site.workload, DEFAULT, DEFAULT, (), (), 0, 1.0) for site in prepared.sites]
    found = gate.revert_while_slower(
        prepared, plan, Log([tmp_path]), kept, lambda *_: pytest.fail("compared"), lambda done, doing: None, math.inf
    )
    assert found == gate.Passage()


def test_whole_model_is_compared_with_the_rival_that_is_hardest_on_it() -> None:
    cost = 1.0, 0.9, 0.9, 1.25
    found = gate.against_hardest(lambda slot, repeats, tries: cost[slot], ("always", "never"), 0.0)
    assert found.ratio == pytest.approx(1 / 0.9) and found.why == "whole model against always" and found.aa_noise == 0
    assert found.pairs == 15, "without time it is the fewest that a look allows"


def test_a_rival_that_is_clearly_quicker_counts_for_more_than_one_that_may_be() -> None:
    """The first is 4 % quicker in the median, but slower in every third round; the other one 3 % quicker in all of them."""
    times = [itertools.cycle(of_slot) for of_slot in ([1.0], [0.96, 0.96, 1.04], [0.96, 0.96, 1.04], [0.97])]
    found = gate.against_hardest(lambda slot, repeats, tries: next(times[slot]), ("always", "never"), 0.0)
    assert (found.rival, gate.is_slower(found)) == ("never", True)


def every_slot(sample: whole.Sample) -> gate.Comparison:
    times = [sample(slot, 2, 2) for slot in range(4)]
    assert all(0 < seconds < 0.1 for seconds in times)
    return FOUND


def test_models_are_timed_in_this_process(sessions: list[tvmfuse.Session]) -> None:
    assert gate.in_this_process(sessions, every_slot) is FOUND


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def test_models_are_timed_in_a_fresh_process_that_ends(
    sessions: list[tvmfuse.Session], plan: building.Plan, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Runner] = []
    start = Place.start
    monkeypatch.setattr(Place, "start", lambda place, threads: started.append(start(place, threads)) or started[-1])
    compare = gate.OnDevice(Pool([Place(server)]), plan, tmp_path)
    assert compare(sessions, every_slot) is FOUND
    written = sorted(tmp_path.iterdir())
    assert compare(sessions, every_slot) is FOUND and sorted(tmp_path.iterdir()) == written, "what is there isn't written again"
    assert len([path for path in written if path.suffix == ".so"]) == 2
    assert len(started) == 2 and not any(runner.alive for runner in started)


def test_comparison_begins_anew_elsewhere_when_its_device_is_lost(
    sessions: list[tvmfuse.Session], plan: building.Plan, server: ForkServer, tmp_path: Path
) -> None:
    pool, tried = Pool([Place(server), Place(server)]), []

    def dies_at_first(sample: whole.Sample) -> gate.Comparison:
        tried.append(sample(0, 1, 1))
        if len(tried) == 1:
            raise DeviceLost("unplugged")
        return every_slot(sample)

    assert gate.OnDevice(pool, plan, tmp_path)(sessions, dies_at_first) is FOUND
    assert len(tried) == 2 and len(pool) == 1


def test_models_with_other_bits_are_not_timed(
    sessions: list[tvmfuse.Session], plan: building.Plan, server: ForkServer, tmp_path: Path
) -> None:
    program = sessions[0].program
    other = dataclasses.replace(program, weights=tuple(np.zeros_like(weight) for weight in program.weights))
    differing = [tvmfuse.Session(other), *sessions]
    for compare in (gate.OnDevice(Pool([Place(server)]), plan, tmp_path), gate.in_this_process):
        with pytest.raises(WrongBits, match="wrong bits: [0-9]{3} elements of the whole model's outputs"):
            compare(differing, lambda sample: pytest.fail("timed"))
    relaxed = dataclasses.replace(plan, chooser=Chooser("always", plan.machine, numerics="relaxed"))
    assert gate.OnDevice(Pool([Place(server)]), relaxed, tmp_path)(differing, every_slot) is FOUND
    assert gate.in_this_process(differing, every_slot, same_bits=False) is FOUND


def test_device_has_longer_to_load_what_is_large(server: ForkServer, tmp_path: Path) -> None:
    asked: dict[str, float] = {}

    class Slow(Place):
        def start(self, threads: int) -> Slow:
            return self

        def ask(self, do: str, timeout_s: float, **arguments: object) -> int:
            asked[do] = timeout_s
            return 0

        def close(self) -> None: ...

    weight = whole.stored_bytes(np.zeros(1_000_000, np.float32), tmp_path)
    with whole.opened(Slow(server), [whole.Model(tmp_path, (), (), (weight,), (), 0)], 1, True):
        assert asked["load_model"] >= whole.LOAD_TIMEOUT_S + 4 > asked["open"]


def test_model_in_a_measuring_process_computes_what_a_session_does(
    sessions: list[tvmfuse.Session], plan: building.Plan, tmp_path: Path
) -> None:
    class Here(Place):
        """This process as a runner."""

        bench = Bench()
        alive = True

        def start(self, threads: int) -> Here:
            return self

        def ask(self, do: str, timeout_s: float, **arguments: object) -> object:
            return getattr(self.bench, do)(**arguments)

        def close(self) -> None: ...

    with ForkServer() as server:
        gate.OnDevice(Pool([Here(server)]), plan, tmp_path)(sessions, every_slot)
    slots = Here.bench.slots
    assert len({id(slots[slot].buffers[0]) for slot in slots}) == 4, "each has buffers of its own"
    for slot, session in enumerate(sessions):
        x, y = (memory.array for memory in slots[slot].buffers[:2])
        assert session.run(None, {"x": x})[0].tobytes() == y.tobytes() and np.ptp(y) > 0
