"""Damaged, hostile and read-only logs: what is lost, and what must not be."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest

from tvmfuse.decide import log as log_module
from tvmfuse.decide.log import Conditions, Log, Record
from tvmfuse.errors import UsageError
from tvmfuse.values import Candidate, Host, Matmul, Measurement, Workload

HOST = Host("AuthenticAMD", 25, 17, 1, ("avx2", "fma"), 32 << 10, 1 << 20, 32 << 20)
HERE = Conditions(HOST, 1, {"tvm": "0.27.0", "llvm": "22.1.0"}, "d1")
WORKLOAD = Workload(Matmul(1, 8, 64, 32))


def record(time_s: float = 1.0) -> Record:
    return Record.of(WORKLOAD, Measurement(Candidate("register", 0), (time_s,)), HERE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / f"{HOST.key}.jsonl"


def relined(change: dict) -> bytes:
    """A record with fields changed and its CRC made right again."""
    data = {**record().to_json(), **change}
    return json.dumps({**data, "crc": zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())}).encode()


GOOD = record(1.0).to_line()
BAD = {
    "torn": GOOD[: len(GOOD) // 2],
    "flipped digit": GOOD.replace(b'"threads":1', b'"threads":2').rstrip(b"\n"),
    "no crc": json.dumps(record().to_json()).encode(),
    "NUL bytes": b"\0" * 100,
    "not UTF-8": b"\xff\xfe{}",
    "not an object": b"[1, 2]",
    "NaN": GOOD.replace(b'"times_s":[1.0]', b'"times_s":[NaN]').rstrip(b"\n"),
    "infinity by overflow": relined({"times_s": [1]}).replace(b'"times_s": [1]', b'"times_s": [1e999]'),
    "deep nesting": b"[" * 100_000,
    "over 1 MiB": b'{"schema":1,"pad":"' + b"x" * (1 << 20) + b'"}',
    "unknown schema": relined({"schema": 99}),
    "huge integer": b'{"schema":' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_line_is_reported_with_file_and_line_and_costs_only_itself(path: Path, name: str) -> None:
    path.write_bytes(record(1.0).to_line() + BAD[name] + b"\n" + record(2.0).to_line())
    log = Log([path.parent])
    assert [r.times_s for r in log.records()] == [(1.0,), (2.0,)]
    assert [(d.path, d.line) for d in log.damage] == [(path, 2)]
    assert str(log.damage[0]).startswith(f"{path}:2: skipped") and log.stats()["damaged"] == 1


@pytest.mark.parametrize("change", [{"kind": "rumour"}, {"structure": {}}, {"threads": None}, {"candidate": 3}, {"workload_hash": "00"}])
def test_line_of_the_right_schema_that_is_no_record_is_reported(path: Path, change: dict) -> None:
    path.write_bytes(relined(change) + b"\n" + GOOD)
    log = Log([path.parent])
    assert [r.times_s for r in log.records()] == [(1.0,)]
    assert [d.line for d in log.damage] == [1]


def test_blank_lines_are_no_damage(path: Path) -> None:
    path.write_bytes(b"\n  \n" + GOOD + b"\n\n")
    log = Log([path.parent])
    assert log.stats() == {"measurement": 1, "failed": 0, "damaged": 0}


def test_record_reformatted_by_hand_is_still_read(path: Path) -> None:
    path.write_bytes(json.dumps(dict(reversed(json.loads(GOOD).items()))).encode() + b"\n")
    assert list(Log([path.parent]).records()) == [record()]


def test_append_after_a_torn_line_starts_its_own_line(path: Path) -> None:
    path.write_bytes(GOOD + BAD["torn"])
    Log([path.parent]).append(record(3.0))
    log = Log([path.parent])
    assert [r.times_s for r in log.records()] == [(1.0,), (3.0,)]
    assert [d.line for d in log.damage] == [2]


def test_nan_is_refused_before_anything_is_written(path: Path) -> None:
    with pytest.raises(ValueError):
        Log([path.parent]).append(record(1.0), record(float("nan")))
    assert not path.exists()


def test_record_over_one_mebibyte_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="1 MiB"):
        Log([path.parent]).append(Record.of(WORKLOAD, Measurement(Candidate("tile", 0), error="x" * (1 << 20)), HERE))


def test_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(GOOD)
    write = os.write
    monkeypatch.setattr(log_module.os, "write", lambda fd, data: write(fd, data[:10]) if data.startswith(b"{") else write(fd, data))
    with pytest.raises(UsageError, match="No space left"):
        Log([path.parent]).append(record(2.0))
    assert path.read_bytes() == GOOD


def test_read_only_folder_is_read_and_append_says_what_to_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(GOOD)
    opened = os.open

    def refuse_writing(name: str, flags: int, *mode: int, **keywords: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return opened(name, flags, *mode, **keywords)

    monkeypatch.setattr(os, "open", refuse_writing)
    log = Log([path.parent])
    assert list(log.records()) == [record()]
    with pytest.raises(UsageError, match=r"can't be written: Read-only file system; pass a folder"):
        log.append(record(2.0))


def test_folder_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be written"):
        Log([tmp_path / "file"]).append(record())


def test_interrupted_compaction_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([path.parent])
    log.append(record(1.0), record(2.0))
    before = path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log_module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.compact()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir() if not p.name.endswith(".lock")] == [path.name]


def test_compaction_drops_damaged_lines(path: Path) -> None:
    path.write_bytes(GOOD + BAD["torn"] + b"\n")
    log = Log([path.parent])
    assert log.compact() == 1 and path.read_bytes() == GOOD and not log.damage
