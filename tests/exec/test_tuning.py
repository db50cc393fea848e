"""Tuning end to end on a small model, what a build makes of its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx
import pytest

import tvmfuse
from tests import small_models
from tvmfuse import building, kernel, tuning
from tvmfuse.choose import Chooser
from tvmfuse.decide import cost_model
from tvmfuse.decide.log import Log, Record, is_finished
from tvmfuse.decide.search import SiteResult
from tvmfuse.errors import UsageError
from tvmfuse.gate import Comparison
from tvmfuse.measure.host import host, toolchain
from tvmfuse.values import Candidate, Host, Matmul, Site, Verdict, Workload


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return small_models.two_layers()


def decided(workload: Workload, candidate: Candidate, plan: building.Plan, **changes: object) -> Record:
    conditions = plan.chooser.conditions(workload)
    verdict = Verdict("wins", candidate, 0.9, (0.88, 0.93), 0.001, 15, "for this test")
    return Record.of(workload, verdict, dataclasses.replace(conditions, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5m", 90), (45, 45), ("7", 7)])
def test_budget(text: str | float, seconds: float) -> None:
    assert tuning.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "-5s", "soon", "", "nan", "10 weeks"])
def test_budget_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="write it like '90s', '10m' or '2h'"):
        tuning.parse_budget(text)


def test_tuned_model_is_replayed_by_build_with_the_same_bits(model: onnx.ModelProto, tmp_path: Path) -> None:
    seen: list[float] = []
    summary = tvmfuse.tune(model, threads=1, budget="15s", logs=tmp_path, progress=lambda done, doing: seen.append(done))
    assert len(summary.sites) == 2 and len(summary.results) + len(summary.unreached) == 2 and summary.matched == 0
    assert summary.results and seen and all(0 <= done <= 1 for done in seen)
    assert {summary.outcome(w) for w in summary.unreached} <= {"not reached"}
    session = tvmfuse.build(model, threads=1, logs=tmp_path)
    assert session.sites == summary.sites
    x = np.random.default_rng(1).standard_normal((40, 64), np.float32)
    always = tvmfuse.build(model, threads=1, fuse="always")
    assert session.run(None, {"x": x})[0].tobytes() == always.run(None, {"x": x})[0].tobytes()
    log, plan = Log([tmp_path]), building.plan_for(None, 1, "measured", tmp_path)
    workloads = {site.workload for site in summary.sites}
    finished = [w for w in workloads if is_finished(log.history(w, plan.chooser.conditions(w)))]
    ahead = tuning.dry_run(model, threads=1, budget="9s", logs=tmp_path)
    left = {demand.workload for demand in (*(d for d, _ in ahead.shares), *ahead.unreached)}
    assert left == workloads - set(finished), "what is finished isn't measured again"


def test_summary_counts_what_became_of_each_workload(workload: Workload) -> None:
    other, third = (Workload(Matmul(1, m, 8, 8), workload.epilogue) for m in (1, 2))
    site = Site("s", "matmul", (), (), None, 0, "default", None, workload)
    sites = tuple(dataclasses.replace(site, workload=w) for w in (workload, workload, other, third))
    begun = SiteResult(other, Candidate("register", 0), Candidate("register", 0), (), (), 3, 1.0, finished=False)
    summary = tuning.Summary(sites, 0, (begun,), (workload,), None, (), 20.4)
    assert str(summary) == "sites: 4 (3 different ones, each measured once): 1 begun, 1 not reached, 1 without a choice; in 20 s"
    whole = Comparison("never", 0.97, (0.96, 0.98), 0.001, 60)
    assert str(dataclasses.replace(summary, gate=whole)).endswith("; in 20 s; whole model against never: 0.970 [0.960, 0.980]")
    lost = dataclasses.replace(summary, gate_failure="unplugged")
    assert str(lost).endswith("; in 20 s; the whole model could not be compared: unplugged")
    assert summary.left == 2


def test_budget_that_reaches_no_site_is_refused(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a budget of 5 s reaches no site; give at least 6 s"):
        tvmfuse.tune(model, threads=1, budget="5s", logs=tmp_path)


def test_log_that_cannot_be_written_is_told_before_anything_is_measured(model: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UsageError, match="can't be written"):
        tvmfuse.tune(model, threads=1, budget="1h", logs=tmp_path / "file")


def test_damaged_lines_of_the_log_are_told(workload: Workload, plan: building.Plan, model: onnx.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{\n")
    with pytest.warns(UserWarning, match=r"1 damaged lines of the tuning log are skipped, the first at .*x\.jsonl:1"):
        building.plan_for(None, 1, "measured", tmp_path)


def test_ranking_learns_from_records_of_this_instruction_set_alone(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def learn(records: Iterable[Record], *_: object) -> None:
        assert [record.conditions.host.vendor for record in records] == [host().vendor]
        raise Stop

    tile = kernel.candidates(workload, plan.machine)[1]
    other = dataclasses.replace(host(), vendor="Narrow", features=("sse2",))
    Log([tmp_path]).append(decided(workload, tile, plan), decided(workload, tile, plan, host=other))
    monkeypatch.setattr(cost_model, "examples", learn)
    with pytest.raises(Stop):
        tvmfuse.tune(model, threads=1, budget="10s", logs=tmp_path)


def test_build_takes_the_recorded_winner(model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path) -> None:
    tile = next(c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile" and c.cut == 1)
    Log([tmp_path]).append(decided(workload, tile, plan))
    first, second = tvmfuse.build(model, threads=1, logs=tmp_path).sites
    assert (first.placement, first.cut, first.source, first.ratio, first.ci) == ("tile", 1, "measured", 0.9, (0.88, 0.93))
    assert (second.placement, second.source) == ("register", "default")


def liking_the_last(tiles: Callable[..., list[dict[str, int | str]]]) -> Callable[..., list[dict[str, int | str]]]:
    return lambda workload, machine: tiles(workload, machine)[::-1]


def test_kept_default_is_the_one_that_was_measured_whatever_is_first_today(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, tile = (next(c for c in kernel.candidates(workload, plan.machine) if c.placement == p) for p in ("register", "tile"))
    kept = decided(workload, tile, plan)
    assert kept.verdict is not None and kept.conditions.default == default
    Log([tmp_path]).append(dataclasses.replace(kept, verdict=dataclasses.replace(kept.verdict, outcome="keeps default")))
    monkeypatch.setattr(kernel.matmul, "tiles", liking_the_last(kernel.matmul.tiles))
    again = building.plan_for(None, 1, "measured", tmp_path).chooser
    choice = again.choice(workload)
    assert again.candidates(workload)[0] != default
    assert (choice.candidate, choice.source) == (default, "measured")
    candidates, conditions = again.contest(workload)
    assert candidates[0] == default and conditions == kept.conditions, "tuning goes on against the same default"


def test_winner_is_replayed_although_it_is_listed_no_more(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = [c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile"][-1]
    Log([tmp_path]).append(decided(workload, last, plan))
    monkeypatch.setattr(kernel.space, "TILES", 1)
    chooser = building.plan_for(None, 1, "measured", tmp_path).chooser
    assert last not in chooser.candidates(workload) and chooser.choice(workload).candidate == last
    site, _ = tvmfuse.build(model, threads=1, logs=tmp_path).sites
    assert (site.placement, site.source) == ("tile", "measured")


def test_winner_that_is_no_candidate_any_more_is_skipped_with_its_reason(
    model: onnx.ModelProto, workload: Workload, plan: building.Plan, tmp_path: Path
) -> None:
    default, second = (next(c for c in kernel.candidates(workload, plan.machine) if c.placement == p) for p in ("register", "separate"))
    gone = Candidate("tile", default.cut, tuple((name, 99 if name == "mr" else value) for name, value in default.knobs))
    Log([tmp_path]).append(decided(workload, gone, plan))
    (site, _), (said, _) = tvmfuse.build(model, threads=1, logs=tmp_path).sites, tvmfuse.explain(model, threads=1, logs=tmp_path).sites
    assert (site.placement, site.cut, site.source) == ("register", default.cut, "measured")
    assert "mr=99" in said.why and "won but can't be replayed: a 99x" in said.why and "registers" in said.why
    next_best = decided(workload, second, plan)
    assert next_best.verdict is not None
    Log([tmp_path]).append(dataclasses.replace(next_best, verdict=dataclasses.replace(next_best.verdict, ratio=0.95)))
    site, _ = tvmfuse.build(model, threads=1, logs=tmp_path).sites
    assert (site.placement, site.ratio) == ("separate", 0.95)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": Host("Other", 1, 2, 3, ("fma",), 1, 2, 3)},
        {"threads": 7},
        {"toolchain": {"tvm": "0.1", "llvm": "1"}},
        {"kernel_digest": "of another release"},
    ],
    ids=["host", "threads", "toolchain", "kernel"],
)
def test_build_does_not_take_a_record_made_under_other_conditions(
    changes: dict[str, object], workload: Workload, plan: building.Plan, tmp_path: Path
) -> None:
    tile = next(c for c in kernel.candidates(workload, plan.machine) if c.placement == "tile")
    Log([tmp_path]).append(decided(workload, tile, plan, **changes))
    chooser = Chooser("measured", plan.machine, Log([tmp_path]), host(), toolchain())
    assert chooser.choice(workload).source == "default"
