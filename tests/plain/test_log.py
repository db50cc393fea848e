"""What the tuning log remembers, and for whom a record counts."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest

from tvmfuse.decide import log as log_module
from tvmfuse.decide.log import Conditions, Log, Record
from tvmfuse.values import Candidate, Epilogue, Host, Matmul, Measurement, Operand, Step, Verdict, Workload

HOST = Host("AuthenticAMD", 25, 17, 1, ("avx2", "avx512f", "fma"), 32 << 10, 1 << 20, 32 << 20)
TOOLCHAIN = {"tvmfuse": "0.1", "tvm": "0.27.0", "tvm_ffi": "0.1.14", "llvm": "22.1.0"}
BIAS_RELU = Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (Operand((64,), (2,), constant=True),))
WORKLOAD = Workload(Matmul(1, 8, 64, 32), BIAS_RELU)
DEFAULT = Candidate("register", 2, (("mr", 6), ("nr", 64)))
HERE = Conditions(HOST, 1, TOOLCHAIN, "d1", DEFAULT)
TILE, APART = Candidate("tile", 2, (("mr", 6), ("nr", 64))), Candidate("separate", 0, (("mr", 6), ("nr", 64)))


def verdict(candidate: Candidate = TILE, outcome: str = "wins", ratio: float = 0.9) -> Verdict:
    return Verdict(outcome, candidate, ratio, (ratio - 0.01, ratio + 0.01), 0.004, 15, "because")  # type: ignore[arg-type]


def best(log: Log, host: Host = HOST, threads: int = 1, toolchain: dict[str, str] = TOOLCHAIN, digest: str = "d1"):  # noqa: ANN201
    return log.best(WORKLOAD, host, threads, toolchain, lambda _: digest)


def test_records_come_back_as_written(tmp_path: Path) -> None:
    records = [
        Record.of(WORKLOAD, Measurement(TILE, (1e-6, 2e-6)), HERE),
        Record.of(WORKLOAD, Measurement(APART, error="SIGSEGV"), HERE),
        Record.of(WORKLOAD, verdict(), HERE),
        Record.of(WORKLOAD, verdict(outcome="keeps default"), HERE, "model_gate"),
    ]
    Log([tmp_path]).append(*records)
    again = Log([tmp_path])
    assert list(again.records()) == records
    assert again.stats() == {"measurement": 2, "verdict": 1, "model_gate": 1, "failed": 1, "damaged": 0}


def test_file_is_named_after_the_host_and_has_the_promised_fields(tmp_path: Path) -> None:
    Log([tmp_path]).append(Record.of(WORKLOAD, verdict(), HERE))
    line = json.loads((tmp_path / f"{HOST.key}.jsonl").read_text())
    promised = "schema kind workload workload_hash host threads toolchain kernel_digest candidate times_s aa_noise ci verdict error crc"
    assert set(promised.split()) <= set(line)
    assert set(line["candidate"]) == {"family", "placement", "cut", "knobs"}


def test_same_conditions_are_used(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    for known in (log, Log([tmp_path])):
        match = best(known)
        assert match is not None and (match.kind, match.candidate) == ("use", TILE)


def test_hosts_that_were_measured(tmp_path: Path) -> None:
    log = Log([tmp_path])
    assert log.hosts() == {}
    other = dataclasses.replace(HOST, vendor="Other", name='quoted "},\\"kernel_digest":')
    log.append(
        *(Record.of(WORKLOAD, verdict(), dataclasses.replace(HERE, host=h, threads=n)) for h, n in ((HOST, 1), (HOST, 4), (other, 2)))
    )
    assert log.hosts() == Log([tmp_path]).hosts() == {HOST: {1, 4}, other: {2}}


def test_newest_of_a_hosts_descriptions_comes_first(tmp_path: Path) -> None:
    renamed = dataclasses.replace(HOST, name="renamed", l3=1)
    assert renamed.key == HOST.key
    log = Log([tmp_path])
    for there in (renamed, HOST, renamed):
        log.append(Record.of(WORKLOAD, verdict(), dataclasses.replace(HERE, host=there)))
    assert list(log.hosts()) == list(Log([tmp_path]).hosts()) == [renamed, HOST]


def test_lowest_ratio_wins_among_winners(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(APART, ratio=0.8), HERE), Record.of(WORKLOAD, verdict(TILE, ratio=0.9), HERE))
    assert best(log).candidate == APART


def test_default_that_was_measured_to_stay_is_a_match_without_candidate(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(outcome="undecided"), HERE))
    match = best(log)
    assert match.kind == "use" and match.candidate is None


RELAXED = Candidate("register", 2, (("algorithm", "winograd4"), ("mr", 6)))


def test_relaxed_verdict_is_never_used_nor_hinted_at_where_exact_is_asked_for(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(RELAXED, ratio=0.4), HERE), Record.of(WORKLOAD, verdict(TILE, ratio=0.9), HERE))
    assert best(log).candidate == TILE
    relaxed = log.best(WORKLOAD, HOST, 1, TOOLCHAIN, lambda _: "d1", "relaxed")
    assert relaxed is not None and relaxed.candidate == RELAXED
    alone = Log([tmp_path / "alone"])
    alone.append(Record.of(WORKLOAD, verdict(RELAXED, ratio=0.4), HERE))
    assert best(alone) is None and best(alone, digest="d2") is None


def test_relative_error_is_kept_with_the_measurement_and_found_by_algorithm(tmp_path: Path) -> None:
    log = Log([tmp_path])
    assert log.relative_error(WORKLOAD, "winograd4") is None
    log.append(Record.of(WORKLOAD, Measurement(RELAXED, (1e-6,), relative_error=2e-6), HERE), Record.of(WORKLOAD, verdict(RELAXED), HERE))
    log.compact()
    assert Log([tmp_path]).relative_error(WORKLOAD, "winograd4") == 2e-6
    assert Log([tmp_path]).relative_error(WORKLOAD, "winograd2") is None


def test_lines_of_exact_candidates_have_no_relative_error(tmp_path: Path) -> None:
    Log([tmp_path]).append(Record.of(WORKLOAD, Measurement(TILE, (1e-6,)), HERE))
    assert b"relative_error" not in (tmp_path / f"{HOST.key}.jsonl").read_bytes()


def test_too_noisy_is_no_match(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(outcome="too noisy"), HERE))
    assert best(log) is None


def test_newer_verdict_or_model_gate_overrules_a_win(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    log.append(Record.of(WORKLOAD, verdict(outcome="keeps default"), HERE, "model_gate"))
    assert best(log).candidate is None


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": dataclasses.replace(HOST, stepping=2)},
        {"toolchain": {**TOOLCHAIN, "tvm": "0.28.0"}},
        {"toolchain": {**TOOLCHAIN, "llvm": "23.1.0"}},
        {"digest": "d2"},
    ],
)
def test_other_cpu_compiler_or_kernel_is_a_hint(tmp_path: Path, elsewhere: dict) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    match = best(log, **elsewhere)
    assert match is not None and (match.kind, match.candidate) == ("hint", TILE)


def test_release_of_tvmfuse_alone_keeps_records(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    assert best(log, toolchain={**TOOLCHAIN, "tvmfuse": "9.9", "tvm_ffi": "0.1.15"}).kind == "use"


def test_record_that_needs_a_missing_feature_never_matches(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    assert best(log, host=dataclasses.replace(HOST, features=("avx2", "fma"))) is None


def test_other_thread_count_or_workload_never_matches(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    assert best(log, threads=2) is None
    assert log.best(Workload(Matmul(1, 8, 64, 33)), HOST, 1, TOOLCHAIN, lambda _: "d1") is None


def today(default: Candidate) -> str | None:
    """A digest that follows the default, as kernels do; APART is no candidate any more."""
    return None if default == APART else f"of {default}"


def against(default: Candidate | None) -> Conditions:
    return dataclasses.replace(HERE, kernel_digest=f"of {default}", default=default)


def test_record_counts_by_the_digest_of_the_default_that_it_names(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(outcome="keeps default"), against(DEFAULT)))
    match = log.best(WORKLOAD, HOST, 1, TOOLCHAIN, today)
    assert match is not None and (match.kind, match.candidate, match.record.conditions.default) == ("use", None, DEFAULT)
    assert log.default(WORKLOAD, HOST, 1, TOOLCHAIN, today) == DEFAULT


@pytest.mark.parametrize("default", [None, APART], ids=["not named", "no candidate any more"])
def test_record_whose_default_is_unknown_is_a_hint(tmp_path: Path, default: Candidate | None) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(), against(default)))
    match = log.best(WORKLOAD, HOST, 1, TOOLCHAIN, today)
    assert match is not None and (match.kind, match.candidate) == ("hint", TILE)
    assert log.default(WORKLOAD, HOST, 1, TOOLCHAIN, today) is None


def test_ratios_to_different_defaults_are_not_compared_and_the_newer_holds(tmp_path: Path) -> None:
    log, other = Log([tmp_path]), Candidate("register", 2, (("mr", 4), ("nr", 64)))
    log.append(Record.of(WORKLOAD, verdict(TILE, ratio=0.5), against(DEFAULT)))
    log.append(Record.of(WORKLOAD, verdict(APART, ratio=0.9), against(other)))
    assert log.best(WORKLOAD, HOST, 1, TOOLCHAIN, today).candidate == APART  # type: ignore[union-attr]
    assert log.default(WORKLOAD, HOST, 1, TOOLCHAIN, today) == other
    log.append(Record.of(WORKLOAD, verdict(TILE, ratio=0.95), against(DEFAULT)))
    assert log.best(WORKLOAD, HOST, 1, TOOLCHAIN, today).candidate == TILE  # type: ignore[union-attr]


def test_winner_that_cannot_be_replayed_leaves_it_to_the_next_best_and_at_last_to_the_default(tmp_path: Path) -> None:
    log, gone = Log([tmp_path]), {TILE: "too large"}

    def found() -> tuple[Candidate | None, tuple[tuple[Candidate, str], ...]]:
        match = log.best(WORKLOAD, HOST, 1, TOOLCHAIN, lambda _: "d1", why_not=gone.get)
        assert match is not None and match.kind == "use"
        return match.candidate, match.skipped

    log.append(Record.of(WORKLOAD, verdict(TILE, ratio=0.8), HERE))
    assert found() == (None, ((TILE, "too large"),))
    log.append(Record.of(WORKLOAD, verdict(APART, ratio=0.9), HERE))
    assert found() == (APART, ((TILE, "too large"),))


def test_use_is_preferred_to_a_better_hint(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, verdict(TILE, ratio=0.5), dataclasses.replace(HERE, kernel_digest="d0")))
    log.append(Record.of(WORKLOAD, verdict(APART, ratio=0.9), HERE))
    assert (best(log).kind, best(log).candidate) == ("use", APART)


def test_failures_hold_for_their_conditions_only(tmp_path: Path) -> None:
    log = Log([tmp_path])
    log.append(Record.of(WORKLOAD, Measurement(TILE, error="SIGSEGV"), HERE))
    assert log.failures(WORKLOAD, HERE) == {TILE: "SIGSEGV"}
    assert log.failures(WORKLOAD, dataclasses.replace(HERE, kernel_digest="d2")) == {}


def finished(default: Candidate = DEFAULT) -> Record:
    said = Verdict("keeps default", default, 1.0, (0.99, 1.01), 0.004, 15, "2 rivals, 1 won")
    return Record.of(WORKLOAD, said, HERE, "site")


def test_compaction_keeps_the_newest_verdict_every_failure_and_one_time_of_a_finished_site(tmp_path: Path) -> None:
    log = Log([tmp_path])
    failure = Record.of(WORKLOAD, Measurement(APART, error="wrong bits"), HERE)
    log.append(failure)
    for i in range(1, 6):
        measured = Measurement(TILE, (8e-6 + i * 1e-6, 1e-5), default_s=(2e-5, 2e-5))
        log.append(Record.of(WORKLOAD, measured, HERE), Record.of(WORKLOAD, verdict(ratio=1 - i / 8), HERE))
    log.append(Record.of(WORKLOAD, Measurement(DEFAULT, (2e-5, 4e-5)), HERE, "screening"))
    log.append(finished())
    assert log.compact() > 0
    for known in (log, Log([tmp_path])):
        measured, default = (r for r in known.records() if r.times_s)
        assert (default.candidate, default.times_s, default.default_s) == (DEFAULT, (3e-5,), ())
        assert (measured.candidate, measured.times_s, measured.default_s) == (TILE, (1e-5,), (2e-5,))
        assert [r.verdict.ratio for r in known.records() if r.kind == "verdict"] == [1 - 5 / 8]
        assert failure in list(known.records()) and finished() in list(known.records())
        assert best(known).candidate == TILE
    assert log.compact() == 0
    assert len((tmp_path / f"{HOST.key}.jsonl").read_bytes().splitlines()) == 1, "a site is one line"


def test_compaction_leaves_an_unfinished_site_as_it_is(tmp_path: Path) -> None:
    log = Log([tmp_path])
    measured = [Record.of(WORKLOAD, Measurement(TILE, (i * 1e-6,), default_s=(1e-6,)), HERE) for i in (1, 2, 3)]
    log.append(*measured)
    log.append(measured[0])
    assert log.compact() > 0 and log.history(WORKLOAD, HERE) == measured


def test_records_written_together_share_a_line_and_come_back_alike(tmp_path: Path) -> None:
    log, elsewhere = Log([tmp_path]), dataclasses.replace(HERE, threads=2)
    together = [
        Record.of(WORKLOAD, Measurement(TILE, (1e-6, 2e-6), default_s=(3e-6, 4e-6)), HERE),
        Record.of(WORKLOAD, Measurement(APART, error='says "outcome":,"crc":1'), HERE),
        Record.of(WORKLOAD, verdict(), HERE, "model_gate"),
        finished(),
    ]
    apart = Record.of(WORKLOAD, verdict(), elsewhere)
    log.append(*together, apart)
    for known in (log, Log([tmp_path])):
        assert list(known.records()) == [*together, apart] and not known.damage
        assert known.history(WORKLOAD, HERE) == together
    assert len((tmp_path / f"{HOST.key}.jsonl").read_bytes().splitlines()) == 2


def test_batch_too_long_for_a_line_takes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_BATCH", 2)
    records = [Record.of(WORKLOAD, Measurement(TILE, (float(i),)), HERE) for i in range(5)]
    Log([tmp_path]).append(*records)
    assert list(Log([tmp_path]).records()) == records
    assert len((tmp_path / f"{HOST.key}.jsonl").read_bytes().splitlines()) == 3


def test_fingerprint_follows_the_lines(tmp_path: Path) -> None:
    log = Log([tmp_path])
    empty = log.fingerprint()
    log.append(Record.of(WORKLOAD, verdict(), HERE))
    assert log.fingerprint() == Log([tmp_path]).fingerprint() != empty


def test_merge_takes_what_is_new_and_a_second_merge_nothing(tmp_path: Path) -> None:
    here, there = Log([tmp_path / "here"]), Log([tmp_path / "there"])
    shared, new = Record.of(WORKLOAD, verdict(), HERE), Record.of(WORKLOAD, verdict(APART), HERE)
    here.append(shared)
    there.append(shared, new)
    assert (here.merge(there), here.merge(there)) == (1, 0)
    assert list(Log([tmp_path / "here"]).records()) == [shared, new]


def test_first_folder_is_only_read(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    Log([shipped]).append(Record.of(WORKLOAD, verdict(), HERE))
    before = (shipped / f"{HOST.key}.jsonl").read_bytes()
    log = Log([shipped, own])
    log.append(Record.of(WORKLOAD, verdict(outcome="keeps default"), HERE))
    assert (shipped / f"{HOST.key}.jsonl").read_bytes() == before
    assert best(Log([shipped, own])).candidate is None


def write_many(folder: Path, writer: int) -> None:
    log = Log([folder])
    for i in range(20):
        log.append(Record.of(WORKLOAD, Measurement(TILE, (writer + i / 100,)), HERE))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=write_many, args=(tmp_path, w)) for w in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    log = Log([tmp_path])
    assert len({r.times_s for r in log.records()}) == 40 and not log.damage


def test_a_folder_can_take_the_place_of_the_shipped_records_and_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMFUSE_LOGS", str(tmp_path))
    assert Log.shipped_and_own().folders == (tmp_path,)
    monkeypatch.delenv("TVMFUSE_LOGS")
    shipped, own = Log.shipped_and_own().folders
    assert shipped.name == own.name == "tuning_logs" and shipped.parent.name == "tvmfuse"


def test_shipped_records_are_whole() -> None:
    log = Log([Path(log_module.__file__).parent.parent / "tuning_logs"])
    decided = [record for record in log.records() if record.verdict is not None]
    assert not log.damage
    assert all(record.conditions.kernel_digest and record.workload.family for record in decided)
