"""The tuning log: self-contained lines in `<host key>.jsonl` of one or more folders.

    {"aa_noise":0.004,"candidate":{"cut":2,"family":"matmul","knobs":{"mr":6,"nr":64},"placement":"register"},"ci":[0.91,0.94],"crc":1234,...}
    {"batch":[{"candidate":{...},"times_s":[1.2e-05]},...],"crc":5678,"host":{...},"kernel_digest":"...","kind":"batch",...}

A line holds one record, or a batch of records of one workload under the same conditions: those, two thirds of a record's bytes, are
then said once. It is canonical JSON (sorted keys, no spaces); `crc` is the CRC-32 of the line without it. Writers append whole lines
under a file lock and fsync them, so that readers need no lock. A line that is torn, garbled, of another schema or refused (NaN, more than
1 MiB) is reported with file and line, counted and skipped: the records around it stay good.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import os
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import filelock
import platformdirs

from ..errors import UsageError
from ..values import Candidate, Host, Measurement, Numerics, Outcome, Verdict, Workload

SCHEMA = 1
MAX_LINE_BYTES = 1 << 20
MAX_BATCH = 128  # records a line: failures, of 2000 characters each, stay below MAX_LINE_BYTES too
SIGNIFICANT = 4  # digits of a compacted time: clocks and machines are not better than that
COMPACT_ERROR = 200  # characters: the rest is TVM's stack trace
LOCK_TIMEOUT_S = 30.0
Kind = Literal["screening", "measurement", "verdict", "model_gate", "site"]
VARIABLE = "TVMFUSE_LOGS"
DECIDED = ("wins", "keeps default", "undecided")  # "too noisy" and "failed" decide nothing


@dataclass(frozen=True)
class Conditions:
    """What a record holds for.

    kernel_digest  of the lowered IR of the workload's family.
    default        the candidate that all others are compared with. None in what a release before this field wrote: never used, a hint.
    """

    host: Host
    threads: int
    toolchain: Mapping[str, str]
    kernel_digest: str
    default: Candidate | None = None


@dataclass(frozen=True)
class Record:
    """One line of the log.

    times_s    of a screening or a measurement, in the order taken; default_s: the default's beside them, see `Measurement`.
    relative_error  of a screening of a relaxed candidate.
    verdict    with ci and aa_noise, of a verdict or a model gate; error of a failure.
    Screenings are quick samples, measurements pairs in fresh processes. A "model_gate" record is a verdict on a site's choice that the
    whole-model comparison overruled; a "site" record, with the control as the verdict on the default itself, says that the site was
    tuned to its end.
    """

    kind: Kind
    workload: Workload
    candidate: Candidate
    conditions: Conditions
    times_s: tuple[float, ...] = ()
    error: str | None = None
    verdict: Verdict | None = None
    default_s: tuple[float, ...] = ()
    relative_error: float | None = None

    @staticmethod
    def of(workload: Workload, found: Measurement | Verdict, conditions: Conditions, kind: Kind | None = None) -> Record:
        if isinstance(found, Verdict):
            error = found.why if found.outcome == "failed" else None
            return Record(kind or "verdict", workload, found.candidate, conditions, error=error, verdict=found)
        return Record(
            kind or "measurement", workload, found.candidate, conditions, found.times_s, found.error,
            default_s=found.default_s, relative_error=found.relative_error,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        own = {"aa_noise": None, "ci": None, "verdict": None, "times_s": [], "error": None, **self.own_json()}
        candidate = {"family": self.workload.family, **self.candidate.to_json()}
        return {**_shared_json(self.workload, self.conditions), **own, "candidate": candidate, "kind": self.kind}

    def own_json(self) -> dict[str, Any]:
        """What this record says beyond its workload and conditions; what it has none of is left out."""
        verdict = self.verdict
        own: dict[str, Any] = {"candidate": self.candidate.to_json()}
        if self.kind != "measurement":
            own["kind"] = self.kind
        if self.times_s:
            own["times_s"] = list(self.times_s)
        if self.default_s:
            own["default_s"] = list(self.default_s)
        if self.error is not None:
            own["error"] = self.error
        if self.relative_error is not None:
            own["relative_error"] = self.relative_error
        if verdict:
            said = {"outcome": verdict.outcome, "ratio": verdict.ratio, "pairs": verdict.pairs, "why": verdict.why}
            own |= {"aa_noise": verdict.aa_noise, "ci": list(verdict.ci), "verdict": said}
        return own

    def to_line(self) -> bytes:
        """Raises ValueError for NaN or infinity and for a line over 1 MiB."""
        return _line(self.to_json())


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
    candidate  None when the default was measured and stays: the one of the record's conditions.
    record     the verdict that decided.
    skipped    winners that can't be replayed any more, each with the reason.
    """

    kind: Literal["use", "hint"]
    candidate: Candidate | None
    record: Record
    skipped: tuple[tuple[Candidate, str], ...] = ()


class Log:
    """Records of one or more folders, or single files to read; the last folder is the one that is written.

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
        """The records in the package, then the user's own data folder; TVMFUSE_LOGS names a folder that takes the place of both."""
        if chosen := os.environ.get(VARIABLE):
            return Log([chosen])
        return Log([Path(__file__).parent.parent / "tuning_logs", platformdirs.user_data_path("tvmfuse") / "tuning_logs"])

    def _open(self) -> None:
        self.damage: list[Damage] = []
        self._in_order: list[_Line] = []  # oldest first
        self._lines: dict[str, list[_Line]] = defaultdict(list)
        self._decoded: dict[tuple[str, bool], list[Record]] = {}
        for folder in self.folders:
            for path in [folder] if folder.is_file() else sorted(folder.glob("*.jsonl")):
                for line in _verified_lines(path, self.damage):
                    self._add(line)

    def _add(self, line: _Line) -> None:
        self._in_order.append(line)
        self._lines[line.workload_hash].append(line)

    def records(self) -> Iterator[Record]:
        """All records; those of one workload oldest first."""
        for workload_hash in list(self._lines):
            yield from self._of(workload_hash)

    def hosts(self) -> dict[Host, set[int]]:
        """Every host that was measured, newest first, with the numbers of threads that were. Decodes nothing else."""
        found: dict[Host, set[int]] = defaultdict(set)
        for host, threads in dict.fromkeys(m.groups() for line in reversed(self._in_order) if (m := _HOST.search(line.text))):
            with suppress(ValueError, TypeError, KeyError):  # reported when its records are decoded
                found[_host(json.loads(host))].add(int(threads))
        return dict(found)

    def sites(self) -> list[list[Record]]:
        """All records, those of one workload under the same conditions together."""
        return _sites(self.records())

    def fingerprint(self) -> str:
        """Changes with every line."""
        digest = hashlib.sha256()
        for workload_hash in sorted(self._lines):
            for line in self._lines[workload_hash]:
                digest.update(zlib.crc32(line.text).to_bytes(4, "little"))
        return digest.hexdigest()[:16]

    def _of(self, workload_hash: str, decisions_only: bool = False) -> list[Record]:
        key = workload_hash, decisions_only
        if key not in self._decoded:
            lines = [line for line in self._lines.get(workload_hash, ()) if line.decides or not decisions_only]
            self._decoded[key] = _decode(lines, self.damage)
        return self._decoded[key]

    def best(
        self,
        workload: Workload,
        host: Host,
        threads: int,
        toolchain: Mapping[str, str],
        digest: Callable[[Candidate], str | None],
        numerics: Numerics = "exact",
        why_not: Callable[[Candidate], str | None] = lambda candidate: None,
    ) -> Match | None:
        """The decision recorded for a workload, or None.

        digest   what a record's kernel digest would be today, if it was measured against this default; None if that can't be replayed.
        why_not  why a winner can't be replayed, or None: then the next best holds, or the default that it was measured against.

        Used     same host key, threads, TVM, LLVM and kernel digest.
        Hint     the record's ISA features are a subset of this host's, but host, compiler or digest differ.
        Never    other threads, a feature that this host lacks, or a relaxed candidate where exact ones are asked for.
        """
        groups: dict[tuple[tuple[bool, bool, bool], str, str], list[Record]] = {}
        digest = functools.cache(digest)
        for record in self._of(workload.hash(), decisions_only=True):
            there = record.conditions
            allowed = numerics == "relaxed" or record.candidate.numerics == "exact"
            if allowed and there.threads == threads and set(there.host.features) <= set(host.features):
                here, compiler = there.host.key == host.key, _compiler(there.toolchain) == _compiler(toolchain)
                same = here, compiler, here and compiler and _is_of(there, digest)
                group = same, there.host.key, there.kernel_digest
                groups[group] = groups.pop(group, [])  # so that the newest is last
                groups[group].append(record)
        for group in sorted(reversed(groups), key=lambda group: group[:2], reverse=True):
            if match := _replayed(groups[group], why_not) if all(group[0]) else _hinted(groups[group]):
                return match
        return None

    def default(
        self, workload: Workload, host: Host, threads: int, toolchain: Mapping[str, str], digest: Callable[[Candidate], str | None]
    ) -> Candidate | None:
        """The one that rivals were measured against last under these very conditions; arguments as for `best`."""
        wanted, digest = (host.key, threads, _compiler(toolchain)), functools.cache(digest)
        newest_first = (record.conditions for record in reversed(self._of(workload.hash())))
        alike = (there for there in newest_first if (there.host.key, there.threads, _compiler(there.toolchain)) == wanted)
        return next((there.default for there in alike if _is_of(there, digest)), None)

    def relative_error(self, workload: Workload, algorithm: str) -> float | None:
        """The newest that was measured of an algorithm's candidates; their bits are equal, on every host."""
        found = (r.relative_error for r in reversed(self._of(workload.hash())) if r.candidate.algorithm == algorithm)
        return next((error for error in found if error is not None), None)

    def history(self, workload: Workload, conditions: Conditions) -> list[Record]:
        """What was found out about a workload under these conditions, oldest first."""
        wanted = _key(conditions)
        return [record for record in self._of(workload.hash()) if _key(record.conditions) == wanted]

    def failures(self, workload: Workload, conditions: Conditions) -> dict[Candidate, str]:
        """Candidates that failed under these conditions, with their error: they are never tried again."""
        return {r.candidate: r.error for r in self.history(workload, conditions) if r.error is not None}

    def check_writable(self, host: Host) -> None:
        """Raises UsageError when the records of `host` can't be written."""
        with _writable(self._path(host)):
            pass

    def _path(self, host: Host) -> Path:
        return self.folders[-1] / f"{host.key}.jsonl"

    def append(self, *records: Record) -> None:
        """Write records in one write under the file's lock, then fsync; those of one workload and conditions share a line.

        Raises   UsageError when the folder can't be written, ValueError for a record that is not allowed in (NaN, over 1 MiB).
        """
        written: dict[Path, list[tuple[str, bytes]]] = defaultdict(list)
        for batch in _batches(records):
            written[self._path(batch[0].conditions.host)].append((batch[0].workload.hash(), _batch_line(batch)))
        for path, lines in written.items():
            with _writable(path):
                _append_durably(path, b"".join(line for _, line in lines))
            for workload_hash, line in lines:
                self._add(_Line(path, 0, workload_hash, line.rstrip(b"\n")))
                for decisions_only in (False, True):
                    self._decoded.pop((workload_hash, decisions_only), None)

    def compact(self) -> int:
        """Rewrite the writable folder to what builds, rankers and predictions read, a line or two a site; returns how many bytes went.

        Of each finished site it keeps, for every candidate, the newest verdict, the failure, and one time with the default's beside it,
        the medians of all. What an unfinished site has is kept as it is: the next run takes it up there. Damaged lines go.
        """
        removed = 0
        for path in sorted(self.folders[-1].glob("*.jsonl")):
            with _writable(path):
                before = path.stat().st_size
                sites = _sites(_decode(_verified_lines(path, []), []))
                kept = [_compacted(found) if is_finished(found) else _once_each(found) for found in sites]
                content = b"".join(map(to_lines, kept))
                _replace_durably(path, content)
                removed += before - len(content)
        self._open()
        return removed

    def merge(self, other: Log) -> int:
        """Append the records of another log that are not here yet; returns how many."""
        known = {record.to_line() for record in self.records()}
        new = [record for record in _once_each(other.records()) if record.to_line() not in known]
        self.append(*new)
        return len(new)

    def stats(self) -> Counter[str]:
        """How many records of each kind, how many "failed" and how many "damaged" lines were skipped. Decodes everything."""
        counts: Counter[str] = Counter()
        for record in self.records():
            counts[record.kind] += 1
            counts["failed"] += record.error is not None
        counts["damaged"] = len(self.damage)
        return counts


def is_finished(history: Iterable[Record]) -> bool:
    """Whether a site was tuned to its end; else the next run takes it up where this history ends."""
    return any(record.kind == "site" for record in history)


@dataclass(frozen=True)
class _Line:
    path: Path
    number: int
    workload_hash: str
    text: bytes

    @property
    def decides(self) -> bool:
        """Whether it may hold a verdict. Quotes inside of JSON strings are escaped."""
        return b'"outcome":' in self.text


_CRC = re.compile(rb',"crc":(\d+)')
_HOST = re.compile(rb'"host":({.*?}),"kernel_digest":.*,"threads":(\d+),')  # quotes inside of JSON strings are escaped
_WORKLOAD_HASH = re.compile(rb'"workload_hash":"([0-9a-f]+)"}$')


def _shared_json(workload: Workload, conditions: Conditions) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "workload": str(workload),
        "workload_hash": workload.hash(),
        "structure": workload.to_json(),
        "host": asdict(conditions.host),
        "threads": conditions.threads,
        "toolchain": dict(conditions.toolchain),
        "kernel_digest": conditions.kernel_digest,
        **({"default": conditions.default.to_json()} if conditions.default else {}),
    }


def _line(data: Mapping[str, Any]) -> bytes:
    line = _canonical({**data, "crc": zlib.crc32(_canonical(data))}) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a line of {len(line)} bytes is over 1 MiB")
    return line


def to_lines(records: Iterable[Record]) -> bytes:
    """As `Log.append` writes them."""
    return b"".join(map(_batch_line, _batches(records)))


def _batch_line(batch: Sequence[Record]) -> bytes:
    if len(batch) == 1:
        return batch[0].to_line()
    shared = _shared_json(batch[0].workload, batch[0].conditions)
    return _line({**shared, "kind": "batch", "batch": [record.own_json() for record in batch]})


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Neighbours of one workload under the same conditions."""
    for _, alike in itertools.groupby(records, key=lambda r: (r.workload, r.conditions)):
        found = list(alike)
        for start in range(0, len(found), MAX_BATCH):
            yield found[start : start + MAX_BATCH]


def _once_each(records: Iterable[Record]) -> list[Record]:
    return list({record.to_line(): record for record in records}.values())


def _sites(records: Iterable[Record]) -> list[list[Record]]:
    sites: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        sites[record.workload, _key(record.conditions)].append(record)
    return list(sites.values())


def _compacted(site: Sequence[Record]) -> list[Record]:
    """The newest verdict, the failure and one time of each candidate; what is said once for good, last."""
    newest: dict[object, Record] = {}
    times: dict[Candidate, list[Record]] = defaultdict(list)
    for record in site:
        if record.times_s:
            times[record.candidate].append(record)
        else:
            key = record.kind == "site", record.error is None, record.candidate
            newest.pop(key, None)  # so that the order stays that of writing
            newest[key] = replace(record, error=record.error[:COMPACT_ERROR]) if record.error else record
    return [_median_of(found) for found in times.values()] + list(newest.values())


def _median_of(measurements: Sequence[Record]) -> Record:
    """One time of a candidate, and one of the default such that their ratio is the median of all ratios."""

    def rounded(seconds: float) -> tuple[float, ...]:
        return (float(f"{seconds:.{SIGNIFICANT}g}"),)

    seconds = median(t for record in measurements for t in record.times_s)
    beside = [record for record in measurements if record.default_s]
    ratios = [t / d for record in beside for t, d in zip(record.times_s, record.default_s, strict=True)]
    default_s = rounded(seconds / median(ratios)) if ratios else ()
    off = next((record.relative_error for record in measurements if record.relative_error is not None), None)
    return replace(measurements[-1], kind="measurement", times_s=rounded(seconds), default_s=default_s, relative_error=off)


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
    records: list[Record] = []
    known = _Known()
    for line in lines:
        try:
            records += _records_of(json.loads(line.text), known)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = Damage(line.path, line.number, f"skipped: not a record: {error!r}")
            damage += [found] if found not in damage else []  # decisions are decoded before the rest, and again with it
    return records


@dataclass
class _Known:
    """The last workload and conditions that were decoded: neighbouring lines repeat them."""

    structure: Any = None
    workload: Workload | None = None
    conditions_data: Any = None
    conditions: Conditions | None = None


def _records_of(data: Mapping[str, Any], known: _Known) -> list[Record]:
    """Raises KeyError, TypeError, AttributeError or ValueError when `data` is not a line of this schema."""
    structure = data["structure"], data["workload_hash"]
    if known.workload is None or known.structure != structure:
        workload = Workload.from_json(data["structure"])
        if workload.hash() != data["workload_hash"]:
            raise ValueError("workload_hash is not that of the structure")
        known.structure, known.workload = structure, workload
    conditions_data = [data[name] for name in ("host", "threads", "toolchain", "kernel_digest")] + [data.get("default")]
    if known.conditions is None or known.conditions_data != conditions_data:
        default = Candidate.from_json(data["default"]) if data.get("default") else None
        toolchain, digest = dict(data["toolchain"]), str(data["kernel_digest"])
        known.conditions = Conditions(_host(data["host"]), int(data["threads"]), toolchain, digest, default)
        known.conditions_data = conditions_data
    own = data["batch"] if data["kind"] == "batch" else [data]
    return [_record_of(record, known.workload, known.conditions) for record in own]


def _host(data: Mapping[str, Any]) -> Host:
    return Host(**{**data, "features": tuple(data["features"])})


def _record_of(data: Mapping[str, Any], workload: Workload, conditions: Conditions) -> Record:
    kind = data.get("kind", "measurement")
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}")
    candidate, verdict = Candidate.from_json(data["candidate"]), None
    if said := data.get("verdict"):
        if said["outcome"] not in get_args(Outcome):
            raise ValueError(f"unknown outcome {said['outcome']!r}")
        low, high = map(float, data["ci"])
        ratio, noise, pairs = float(said["ratio"]), float(data["aa_noise"]), int(said["pairs"])
        verdict = Verdict(said["outcome"], candidate, ratio, (low, high), noise, pairs, str(said["why"]))
    times_s, default_s = (tuple(map(float, data.get(name) or ())) for name in ("times_s", "default_s"))
    if default_s and len(default_s) != len(times_s):
        raise ValueError(f"{len(times_s)} times beside {len(default_s)} of the default")
    off = None if data.get("relative_error") is None else float(data["relative_error"])
    return Record(kind, workload, candidate, conditions, times_s, data.get("error"), verdict, default_s, off)


def _compiler(toolchain: Mapping[str, str]) -> tuple[str | None, str | None]:
    return toolchain.get("tvm"), toolchain.get("llvm")


def _key(conditions: Conditions) -> tuple[object, ...]:
    return conditions.host.key, conditions.threads, _compiler(conditions.toolchain), conditions.kernel_digest


def _won(record: Record) -> bool:
    return record.verdict is not None and record.verdict.outcome == "wins"


def _is_of(there: Conditions, digest: Callable[[Candidate], str | None]) -> bool:
    """Whether today's kernels are those that were measured."""
    return there.default is not None and there.kernel_digest == digest(there.default)


def _hinted(records: Sequence[Record]) -> Match | None:
    if (deciding := _deciding(records)) is None:
        return None
    return Match("hint", deciding.candidate if _won(deciding) else None, deciding)


def _replayed(records: Sequence[Record], why_not: Callable[[Candidate], str | None]) -> Match | None:
    """What records of the same conditions have decided; a winner that can't be replayed leaves it to the others, at last to the default."""
    skipped: dict[Candidate, str] = {}
    found = deciding = _deciding(records)
    while deciding and _won(deciding) and (reason := why_not(deciding.candidate)):
        skipped[deciding.candidate] = reason
        deciding = _deciding([record for record in records if record.candidate not in skipped])
    if (found := deciding or found) is None:
        return None
    return Match("use", deciding.candidate if deciding and _won(deciding) else None, found, tuple(skipped.items()))


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
        raise UsageError(f"tuning log {path} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s; let that end first") from None
    except OSError as error:
        problem = f"tuning log {path} can't be written: {error.strerror}"
        raise UsageError(f"{problem}; pass a folder of your own as logs", f"{problem}; name a folder of your own with --logs") from error


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
