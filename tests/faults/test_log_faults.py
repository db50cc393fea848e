"""Damaged, hostile and read-only logs: what is lost, and what must not be."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import filelock
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
BATCH = log_module._batch_line([record(7.0), record(8.0)])
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
    "over 1 MiB": relined({"pad": "x" * (1 << 20)}),
    "unknown schema": relined({"schema": 99}),
    "torn batch": BATCH[: len(BATCH) // 2],
    "batch that is no list": relined({"kind": "batch", "batch": 3}),
    "fewer times of the default": relined({"times_s": [1.0, 2.0], "default_s": [1.0]}),
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


@pytest.mark.parametrize("write", [lambda log: log.append(record()), Log.compact], ids=["append", "compact"])
def test_nobody_writes_while_another_process_does(path: Path, write: Callable[[Log], object], monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(GOOD + GOOD)
    monkeypatch.setattr(log_module, "LOCK_TIMEOUT_S", 0.1)
    with filelock.FileLock(f"{path}.lock"), pytest.raises(UsageError, match="locked by another process"):
        write(Log([path.parent]))
    assert path.read_bytes() == GOOD + GOOD


def test_folder_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be written"):
        Log([tmp_path / "file"]).append(record())


def test_interrupted_compaction_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([path.parent])
    log.append(record(1.0), record(2.0))
    log.append(record(1.0))  # goes in a compaction
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
    assert log.compact() == len(BAD["torn"]) + 1 and path.read_bytes() == GOOD and not log.damage


def test_append_that_is_killed_at_any_byte_loses_only_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed write leaves is a prefix of it: every prefix, then another writer."""
    monkeypatch.setattr(log_module.os, "fsync", lambda _: None)  # a thousand files
    batch = log_module._batch_line([record(2.0), record(3.0)])
    for written in range(0, len(batch) + 1):
        path.write_bytes(GOOD + batch[:written])
        Log([path.parent]).append(record(4.0))
        log = Log([path.parent])
        whole = [(2.0,), (3.0,)] if written >= len(batch) - 1 else []  # only the newline is missing: the next writer adds it
        assert [r.times_s for r in log.records()] == [(1.0,), *whole, (4.0,)], written
        assert len(log.damage) == (0 < written < len(batch) - 1)


def append_for_ever(folder: Path, started: Connection) -> None:
    log = Log([folder])
    for i in itertools.count():
        log.append(*(record(i + j / 100) for j in range(30)))
        started.send(i)


def test_killed_writer_leaves_a_log_and_a_lock_that_others_use(path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for _ in range(3):
        reader, started = fork.Pipe()
        writer = fork.Process(target=append_for_ever, args=(path.parent, started))
        writer.start()
        acknowledged = reader.recv()
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        log = Log([path.parent])
        log.append(record(-1.0))
        assert {(i + j / 100,) for i in range(acknowledged + 1) for j in range(30)} <= {r.times_s for r in log.records()}
    assert {d.why.split(":")[0] for d in log.damage} <= {"skipped"}


def test_full_file_system_loses_nothing_that_was_there(tmp_path: Path) -> None:
    """A real one of 64 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        log, written = Log([small]), 0
        with pytest.raises(UsageError, match="No space left on device"):
            for i in range(1000):
                log.append(*(record(i + j / 100) for j in range(20)))
                written += 20
        again = Log([small])
        assert len(list(again.records())) == written > 0 and not again.damage
        with pytest.raises(UsageError, match="No space left on device"):
            log.compact()
        assert len(list(Log([small]).records())) == written
    finally:
        subprocess.run(["umount", small], check=True)
