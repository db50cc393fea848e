"""The tuning log: one self-contained record a line, in `<host key>.jsonl` of one or more folders.

    {"aa_noise":0.004,"candidate":{"cut":2,"family":"matmul","knobs":{"mr":6,"nr":64},"placement":"register"},"ci":[0.91,0.94],"crc":1234,...}

A line is canonical JSON (sorted keys, no spaces); `crc` is the CRC-32 of the line without it. Writers append whole lines under a
file lock and fsync them, so that readers need no lock. A line that is torn, garbled, of another schema or refused (NaN, more than
1 MiB) is reported with file and line, counted and skipped: the records around it stay good.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import filelock
import platformdirs

from ..errors import UsageError
from ..values import Candidate, Host, Measurement, Outcome, Verdict, Workload

SCHEMA = 1
MAX_LINE_BYTES = 1 << 20
LOCK_TIMEOUT_S = 30.0
Kind = Literal["measurement", "verdict", "model_gate"]
DECIDED = ("wins", "keeps default", "undecided")  # "too noisy" and "failed" decide nothing


@dataclass(frozen=True)
class Conditions:
    """What a record holds for. `kernel_digest` is of the lowered IR of the workload's family."""

    host: Host
    threads: int
    toolchain: Mapping[str, str]
    kernel_digest: str


@dataclass(frozen=True)
class Record:
    """One line of the log.

    times_s  of a measurement, in the order taken. verdict, ci and aa_noise belong to a verdict or a model gate; error to a failure.
    A "model_gate" record is a verdict on a site's choice that the whole-model comparison overruled.
    """

    kind: Kind
    workload: Workload
    candidate: Candidate
    conditions: Conditions
    times_s: tuple[float, ...] = ()
    error: str | None = None
    verdict: Verdict | None = None

    @staticmethod
    def of(workload: Workload, found: Measurement | Verdict, conditions: Conditions, kind: Kind | None = None) -> Record:
        if isinstance(found, Verdict):
            error = found.why if found.outcome == "failed" else None
            return Record(kind or "verdict", workload, found.candidate, conditions, error=error, verdict=found)
        return Record("measurement", workload, found.candidate, conditions, found.times_s, found.error)

    def to_json(self) -> dict[str, Any]:
        host, verdict = self.conditions.host, self.verdict
        said = {"outcome": verdict.outcome, "ratio": verdict.ratio, "pairs": verdict.pairs, "why": verdict.why} if verdict else None
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "workload": str(self.workload),
            "workload_hash": self.workload.hash(),
            "structure": self.workload.to_json(),
            "host": asdict(host),
            "threads": self.conditions.threads,
            "toolchain": dict(self.conditions.toolchain),
            "kernel_digest": self.conditions.kernel_digest,
            "candidate": {"family": self.workload.family, **self.candidate.to_json()},
            "times_s": list(self.times_s),
            "aa_noise": verdict.aa_noise if verdict else None,
            "ci": list(verdict.ci) if verdict else None,
            "verdict": said,
            "error": self.error,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Record:
        """Raises KeyError, TypeError or ValueError when `data` is not a record of this schema."""
        if data["kind"] not in get_args(Kind):
            raise ValueError(f"unknown kind {data['kind']!r}")
        workload, candidate = Workload.from_json(data["structure"]), Candidate.from_json(data["candidate"])
        if workload.hash() != data["workload_hash"]:
            raise ValueError("workload_hash is not that of the structure")
        host = Host(**{**data["host"], "features": tuple(data["host"]["features"])})
        conditions = Conditions(host, int(data["threads"]), dict(data["toolchain"]), str(data["kernel_digest"]))
        verdict = None
        if said := data["verdict"]:
            if said["outcome"] not in get_args(Outcome):
                raise ValueError(f"unknown outcome {said['outcome']!r}")
            low, high = map(float, data["ci"])
            ratio, noise, pairs = float(said["ratio"]), float(data["aa_noise"]), int(said["pairs"])
            verdict = Verdict(said["outcome"], candidate, ratio, (low, high), noise, pairs, str(said["why"]))
        times = tuple(float(t) for t in data["times_s"])
        return Record(data["kind"], workload, candidate, conditions, times, data["error"], verdict)

    def to_line(self) -> bytes:
        """Raises ValueError for NaN or infinity and for a line over 1 MiB."""
        data = self.to_json()
        line = _canonical({**data, "crc": zlib.crc32(_canonical(data))}) + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a record of {len(line)} bytes is over 1 MiB")
        return line


@dataclass(frozen=True)
class Damage:
    """A line that was skipped."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


@dataclass(frozen=True)
class Match:
    """What the log knows of a workload.

    kind       "use": measured under these very conditions; "hint": on another CPU, toolchain or kernel, to be measured again.
    candidate  None when the default was measured and stays.
    record     the verdict that decided.
    """

    kind: Literal["use", "hint"]
    candidate: Candidate | None
    record: Record


class Log:
    """Records of one or more folders; the last folder is the one that is written.

    Lines are verified when the log is opened, and decoded when their workload is asked for. What other processes append
    afterwards is not seen.
    """

    def __init__(self, folders: Sequence[str | os.PathLike[str]]) -> None:
        if not folders:
            raise UsageError("a tuning log needs at least one folder")
        self.folders = tuple(Path(f) for f in folders)
        self._open()

    @staticmethod
    def shipped_and_own() -> Log:
        """The records in the package, then the user's own data folder."""
        return Log([Path(__file__).parent.parent / "tuning_logs", platformdirs.user_data_path("tvmfuse") / "tuning_logs"])

    def _open(self) -> None:
        self.damage: list[Damage] = []
        self._lines: dict[str, list[_Line]] = defaultdict(list)
        self._decoded: dict[str, list[Record]] = {}
        for folder in self.folders:
            for path in sorted(folder.glob("*.jsonl")):
                for line in _verified_lines(path, self.damage):
                    self._lines[line.workload_hash].append(line)

    def records(self) -> Iterator[Record]:
        """All records; those of one workload oldest first."""
        for workload_hash in list(self._lines):
            yield from self._of(workload_hash)

    def _of(self, workload_hash: str) -> list[Record]:
        if workload_hash not in self._decoded:
            self._decoded[workload_hash] = _decode(self._lines[workload_hash], self.damage)
        return self._decoded[workload_hash]

    def best(self, workload: Workload, host: Host, threads: int, toolchain: Mapping[str, str], kernel_digest: str) -> Match | None:
        """The decision recorded for a workload, or None.

        Used     same host key, threads, TVM, LLVM and kernel digest.
        Hint     the record's ISA features are a subset of this host's, but host, compiler or digest differ.
        Never    other threads, or a feature that this host lacks.
        """
        groups: dict[tuple[tuple[bool, bool, bool], str], list[Record]] = defaultdict(list)
        for record in self._of(workload.hash()):
            there = record.conditions
            if there.threads == threads and set(there.host.features) <= set(host.features):
                same = there.host.key == host.key, _compiler(there.toolchain) == _compiler(toolchain), there.kernel_digest == kernel_digest
                groups[same, there.host.key].append(record)
        for same, key in sorted(groups, reverse=True):
            if deciding := _deciding(groups[same, key]):
                return Match("use" if all(same) else "hint", deciding.candidate if _won(deciding) else None, deciding)
        return None

    def failures(self, workload: Workload, conditions: Conditions) -> dict[Candidate, str]:
        """Candidates that failed under these conditions, with their error: they are never tried again."""
        wanted = _key(conditions)
        return {r.candidate: r.error for r in self._of(workload.hash()) if r.error is not None and _key(r.conditions) == wanted}

    def check_writable(self, host: Host) -> None:
        """Raises UsageError when the records of `host` can't be written."""
        with _writable(self._path(host)):
            pass

    def _path(self, host: Host) -> Path:
        return self.folders[-1] / f"{host.key}.jsonl"

    def append(self, *records: Record) -> None:
        """Write records in one write under the file's lock, then fsync.

        Raises   UsageError when the folder can't be written, ValueError for a record that is not allowed in (NaN, over 1 MiB).
        """
        lines: dict[Path, bytes] = defaultdict(bytes)
        for record in records:
            lines[self._path(record.conditions.host)] += record.to_line()
        for path, data in lines.items():
            with _writable(path):
                _append_durably(path, data)
        for record in records:
            self._of(record.workload.hash()).append(record)

    def compact(self) -> int:
        """Keep, in the writable folder, the newest measurement, failure and verdict of each candidate under each set of conditions.

        Returns how many lines went, damaged ones among them. Failures stay: they keep a candidate from being tried again.
        """
        removed = 0
        for path in sorted(self.folders[-1].glob("*.jsonl")):
            with _writable(path):
                before = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
                newest: dict[tuple[object, ...], Record] = {}
                for record in _decode(_verified_lines(path, []), []):
                    of = record.workload.hash(), _key(record.conditions), record.candidate
                    key = record.kind == "measurement", record.error is None, of
                    newest.pop(key, None)  # so that the order stays that of writing
                    newest[key] = record
                _replace_durably(path, b"".join(record.to_line() for record in newest.values()))
                removed += before - len(newest)
        self._open()
        return removed

    def merge(self, other: Log) -> int:
        """Append the records of another log that are not here yet; returns how many."""
        known = {record.to_line() for record in self.records()}
        new = {line: record for record in other.records() if (line := record.to_line()) not in known}
        self.append(*new.values())
        return len(new)

    def stats(self) -> Counter[str]:
        """How many records of each kind, how many "failed" and how many "damaged" lines were skipped. Decodes everything."""
        counts: Counter[str] = Counter()
        for record in self.records():
            counts[record.kind] += 1
            counts["failed"] += record.error is not None
        counts["damaged"] = len(self.damage)
        return counts


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    workload_hash: str
    text: bytes


_CRC = re.compile(rb',"crc":(\d+)')
_WORKLOAD_HASH = re.compile(rb'"workload_hash":"([0-9a-f]+)"}$')


def _canonical(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _verified_lines(path: Path, damage: list[Damage]) -> list[_Line]:
    try:
        content = path.read_bytes()
    except OSError as error:
        damage.append(Damage(path, 0, f"can't be read: {error.strerror}"))
        return []
    lines = []
    for number, text in enumerate(content.split(b"\n"), 1):
        if text.strip():
            try:
                lines.append(_Line(path, number, *_verified(text)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                damage.append(Damage(path, number, f"skipped: {error}"))
    return lines


def _verified(text: bytes) -> tuple[str, bytes]:
    """The workload's hash and the canonical line. Raises ValueError, saying why, KeyError, TypeError or RecursionError."""
    if len(text) > MAX_LINE_BYTES:
        raise ValueError("over 1 MiB")
    # Our own lines are canonical: their CRC is checked without decoding, 100,000 lines in well under a second.
    crc, workload_hash = _CRC.search(text), _WORKLOAD_HASH.search(text)
    if crc and workload_hash and b',"schema":%d,' % SCHEMA in text:
        if int(crc[1]) == zlib.crc32(text[crc.end() :], zlib.crc32(text[: crc.start()])):
            return workload_hash[1].decode(), text
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r} is unknown to this version, which reads {SCHEMA}")
    claimed = data.pop("crc")
    if claimed != zlib.crc32(_canonical(data)):
        raise ValueError("the CRC does not match: the line was cut or edited")
    return str(data["workload_hash"]), _canonical({**data, "crc": claimed})


def _decode(lines: Sequence[_Line], damage: list[Damage]) -> list[Record]:
    records = []
    for line in lines:
        try:
            records.append(Record.from_json(json.loads(line.text)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            damage.append(Damage(line.path, line.number, f"skipped: not a record: {error!r}"))
    return records


def _compiler(toolchain: Mapping[str, str]) -> tuple[str | None, str | None]:
    return toolchain.get("tvm"), toolchain.get("llvm")


def _key(conditions: Conditions) -> tuple[object, ...]:
    return conditions.host.key, conditions.threads, _compiler(conditions.toolchain), conditions.kernel_digest


def _won(record: Record) -> bool:
    return record.verdict is not None and record.verdict.outcome == "wins"


def _deciding(records: Sequence[Record]) -> Record | None:
    """Of each candidate's newest decision the winner with the lowest ratio, else the newest decision of all."""
    newest: dict[Candidate, Record] = {}
    for record in records:
        if record.verdict and record.verdict.outcome in DECIDED:
            newest.pop(record.candidate, None)
            newest[record.candidate] = record
    ratios = {candidate: record.verdict.ratio for candidate, record in newest.items() if record.verdict and _won(record)}
    if ratios:
        return newest[min(ratios, key=ratios.__getitem__)]
    return list(newest.values())[-1] if newest else None


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Hold the file's lock. Raises UsageError, naming the folder, when it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout:
        raise UsageError(f"tuning log {path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise UsageError(f"tuning log {path} can't be written: {error.strerror}; pass a folder of your own as logs") from error


def _append_durably(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data  # a writer died in the middle of its line: only that line is lost
        if os.write(fd, data) != len(data):
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace_durably(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, path.stat().st_mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
