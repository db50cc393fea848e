"""`tvmfuse log` and `tvmfuse tune --dry-run`: results, exit codes, and that nothing is half written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.invoking import Invoke
from tvmfuse import tuning
from tvmfuse.decide.log import Conditions, Log, Record
from tvmfuse.decide.search import Allotment, Demand
from tvmfuse.values import Candidate, Host, Matmul, Measurement, Verdict, Workload

HOST = Host("AuthenticAMD", 25, 17, 1, ("avx2", "fma"), 32 << 10, 1 << 20, 32 << 20)
HERE = Conditions(HOST, 1, {"tvm": "0.27.0", "llvm": "22.1.0"}, "d1")
WORKLOAD, OTHER = Workload(Matmul(1, 8, 64, 32)), Workload(Matmul(1, 9, 64, 32))
DEFAULT, QUICK = Candidate("register", 0, (("mr", 8),)), Candidate("register", 0, (("mr", 4),))
WON = Record.of(WORKLOAD, Verdict("wins", QUICK, 0.9, (0.88, 0.92), 0.01, 30, "quicker"), HERE)
CLOSED = Record.of(WORKLOAD, Verdict("keeps default", DEFAULT, 1.0, (0.99, 1.01), 0.01, 30, "1 rival, 1 won"), HERE, "site")
BEGUN = Record.of(OTHER, Measurement(QUICK, (1e-6, 2e-6), default_s=(2e-6, 4e-6)), HERE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = Log([tmp_path / "log"])
    log.append(WON, CLOSED)
    log.append(BEGUN)
    log.append(BEGUN)
    return tmp_path / "log"


def file(folder: Path) -> Path:
    return folder / f"{HOST.key}.jsonl"


def test_stats_of_a_folder_and_of_a_file(invoke: Invoke, folder: Path) -> None:
    for source in (folder, file(folder)):
        code, out, _ = invoke("log", "stats", source, "--json")
        (row,) = json.loads(out)
        assert (code, row["log"]) == (0, str(file(folder)))
        assert {key: row[key] for key in ("records", "sites", "finished", "won", "failed", "damaged")} == {
            "records": 4, "sites": 2, "finished": 1, "won": 1, "failed": 0, "damaged": 0,
        }  # fmt: skip
    assert "finished" in invoke("log", "stats", folder)[1]


def test_sound_log_verifies(invoke: Invoke, folder: Path) -> None:
    assert invoke("log", "verify", folder) == (0, "", "4 records, none damaged\n")


def test_damaged_line_fails_verification_and_is_named(invoke: Invoke, folder: Path) -> None:
    with file(folder).open("ab") as log:
        log.write(b"{torn\n")
    code, out, err = invoke("log", "verify", folder)
    assert code == 8 and out.startswith(f"{file(folder)}:4: skipped") and "1 line damaged, 4 records sound" in err
    code, out, _ = invoke("log", "verify", folder, "--json")
    told = json.loads(out)
    assert (code, told["records"], told["damage"][0]["line"]) == (8, 4, 4)


def test_absent_log_is_wrong_usage(invoke: Invoke, tmp_path: Path) -> None:
    for command in ("stats", "verify", "merge"):
        code, _, err = invoke("log", command, tmp_path / "absent")
        assert code == 2 and "absent" in err and err.count("\n") == 1


def test_compaction_keeps_decisions_and_what_is_begun(invoke: Invoke, folder: Path) -> None:
    code, out, _ = invoke("log", "compact", "--into", folder, "--json")
    assert code == 0 and json.loads(out)["removed_bytes"] > 0
    assert list(Log([folder]).records()) == [WON, CLOSED, BEGUN]


def test_merge_adds_what_is_new_from_files_and_folders(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(HERE, host=dataclasses.replace(HOST, stepping=2))
    Log([tmp_path / "theirs"]).append(WON, dataclasses.replace(CLOSED, conditions=elsewhere))
    into = tmp_path / "into"
    code, out, _ = invoke("log", "merge", tmp_path / "theirs", file(folder), "--into", into, "--json")
    assert code == 0 and json.loads(out) == {"folder": str(into), "added": 4, "damaged": 0}
    assert len(list(into.glob("*.jsonl"))) == 2, "each host keeps its file"
    assert json.loads(invoke("log", "merge", folder, "--into", into, "--json")[1])["added"] == 0


def test_merge_into_what_cannot_be_written_says_so(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file")
    code, _, err = invoke("log", "merge", folder, "--into", tmp_path / "blocked" / "log")
    assert code == 2 and "can't be written" in err


def test_dry_run_prints_the_plan_and_measures_nothing(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(b"")
    asked: dict[str, object] = {}

    def dry_run(_model: object, **options: object) -> Allotment:
        asked.update(options)
        return Allotment(((Demand(WORKLOAD, 3, 2e-6, "/conv1"), 12.5),), (Demand(OTHER, 1, 1e-6, "/conv2"),))

    monkeypatch.setattr(tuning, "dry_run", dry_run)
    code, out, _ = invoke("tune", model, "--budget", "20s", "--dry-run")
    first, second = out.splitlines()[1:]
    assert code == 0 and asked["budget"] == "20s"
    assert first.split()[0] == "/conv1" and str(WORKLOAD) in first and "12.5" in first and " 6 " in first
    assert str(OTHER) in second and "not reached" in second
    rows = json.loads(invoke("tune", model, "--dry-run", "--json")[1])
    assert [(row["count"], row["seconds"], row["workload_hash"]) for row in rows] == [(3, 12.5, WORKLOAD.hash()), (1, 0.0, OTHER.hash())]
