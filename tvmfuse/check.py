"""What a model's build came to, as a file in a user's repository, and how a later build falls short of it.

    write once:  sites and placements, kernel count, the outputs' bits on seeded inputs, speed against a reference kernel
    then, in CI: a site that is no longer fused, other bits, more kernels or less speed is a difference

Speed is a ratio to a kernel that no change of ours touches, run in the same minute on the same machine: what the machine does to both
cancels. A slowdown counts only where a confidence interval lies beyond the tolerance and beyond twice the noise of an A/A control, in
each of several attempts, on the CPU that the file was written on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import compare
from .building import build
from .choose import Fuse
from .decide.verdict import MARGIN_PER_NOISE, MAX_NOISE
from .errors import UsageError
from .files import check_own, written
from .measure.host import host
from .session import Session
from .values import Numerics, Site

FORMAT = 1
SEED = 0
TOLERANCE = 0.1  # also the command's, which doesn't wait for TVM to show its help
ATTEMPTS = 3
ATTEMPT_S = 1.0
FFT_LENGTH = 1 << 15  # its data fit an L2 cache; about half a millisecond


@dataclass(frozen=True)
class SiteState:
    """The ops of a site's chain, in order, and how many of them its anchor's kernel computes: none where they are a pass apart."""

    epilogue: tuple[str, ...]
    placement: str | None
    fused: int


@dataclass(frozen=True)
class Speed:
    """The model's time over the reference kernel's: median and interval, and what the control says of the noise (0 is none)."""

    ratio: float
    interval: tuple[float, float]
    noise: float


@dataclass(frozen=True)
class Decisions:
    """What is recorded. bits: output name -> digest of shape, type and values. cpu and threads: where `speed` holds.

    inputs     name -> type and bound shape, under which all the rest holds; None in files of before these were recorded. So is numerics.
    """

    sites: Mapping[str, SiteState]
    kernels: int
    bits: Mapping[str, str]
    cpu: str
    threads: int
    speed: Speed | None = None
    inputs: Mapping[str, str] | None = None
    numerics: Numerics = "exact"

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @staticmethod
    def read(path: Path) -> Decisions:
        """Raises UsageError when the file is absent or isn't what `write` makes."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"it has format {data['format']}, this tvmfuse reads {FORMAT}")
            speed = data["speed"]
            return Decisions(
                {name: SiteState(tuple(s["epilogue"]), s["placement"], int(s["fused"])) for name, s in data["sites"].items()},
                int(data["kernels"]),
                dict(data["bits"]),
                str(data["cpu"]),
                int(data["threads"]),
                Speed(float(speed["ratio"]), tuple(map(float, speed["interval"])), float(speed["noise"])) if speed else None,  # type: ignore[arg-type]
                dict(data["inputs"]) if data.get("inputs") is not None else None,
                data.get("numerics", "exact"),
            )
        except FileNotFoundError as error:
            absent = f"there is no file {path} yet; the same with"
            raise UsageError(f"{absent} write=True writes it", f"{absent} --write writes it") from error
        except OSError as error:
            raise UsageError(f"can't read {path}: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} holds no decisions ({error}); write it again with --write") from error

    def write(self, path: Path) -> None:
        """The file appears whole or not at all. Raises UsageError when it can't be written."""
        with written(path) as part:
            part.write_text(json.dumps(self.to_json(), indent=1) + "\n")


@dataclass(frozen=True)
class Judgement:
    """differences: what got worse, a line each; none means that the check passes. notes: what else changed or could not be judged."""

    differences: tuple[str, ...]
    notes: tuple[str, ...] = ()


def inspect(session: Session, numerics: Numerics = "exact") -> Decisions:
    """All but the speed."""
    return Decisions(
        {site.name: state(site) for site in session.sites},
        session.kernel_count,
        {info.name: compare.digest(x) for info, x in zip(session.get_outputs(), session.run(None, seeded(session)), strict=True)},
        host().name,
        session.manifest.threads,
        inputs={info.name: f"{info.dtype} {'x'.join(map(str, info.shape)) or 'scalar'}" for info in session.get_inputs()},
        numerics=numerics,
    )


def state(site: Site) -> SiteState:
    return SiteState(site.epilogue, site.placement, site.cut if site.placement in ("register", "tile") else 0)


def seeded(session: Session) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return {info.name: compare.draw(rng, info.shape, info.dtype) for info in session.get_inputs()}


def reference_kernel() -> Callable[[], object]:
    """NumPy's FFT: one thread, in L2, and no code of ours."""
    x = np.random.default_rng(SEED).standard_normal(FFT_LENGTH)
    return lambda: np.fft.rfft(x)


def measure(model: Callable[[], object], reference: Callable[[], object], seconds: float, clock: compare.Clock) -> Speed:
    """The model, the model once more as control, and the reference, in rounds."""
    calls = {"model": model, "control": model, "reference": reference}
    times = compare.samples(calls, seconds, clock)
    ratio, control = compare.ratio(times["model"], times["reference"]), compare.ratio(times["model"], times["control"])
    return Speed(ratio.median, ratio.interval, abs(control.median - 1))


def slower(recorded: Speed, found: Speed, tolerance: float) -> str | None:
    """How much slower at least, or None: only what no noise explains. The recorded file's own noise counts too."""
    margin = max(tolerance, MARGIN_PER_NOISE * max(recorded.noise, found.noise))
    least, most = found.interval[0] / recorded.interval[1], found.ratio / recorded.ratio
    if found.noise > MAX_NOISE or least <= 1 + margin:
        return None
    return f"slower: {most:.2f} times the recorded time, surely more than {1 + margin:.2f} times (against the reference kernel)"


def regressions(recorded: Decisions, found: Decisions) -> Judgement:
    """What is worse in `found`, but for speed."""
    worse: list[str] = []
    notes: list[str] = []
    for name, before in recorded.sites.items():
        now = found.sites.get(name)
        if now is None:
            (worse if before.fused else notes).append(f"site {name}: gone; its anchor had {_ops(before)}")
        elif before.epilogue[: before.fused] != now.epilogue[: now.fused] and now.fused < max(before.fused, 1):
            worse.append(f"site {name}: no longer fused: {_ops(before)} -> {_ops(now)}")
        elif now.epilogue != before.epilogue and before.fused:
            worse.append(f"site {name}: other epilogue: {_ops(before)} -> {_ops(now)}")
        elif now != before:
            notes.append(f"site {name}: {_ops(before)} -> {_ops(now)}")
    notes += [f"site {name}: new, {_ops(now)}" for name, now in found.sites.items() if name not in recorded.sites]
    if found.kernels > recorded.kernels:
        worse.append(f"kernels: {recorded.kernels} -> {found.kernels}")
    elif found.kernels < recorded.kernels:
        notes.append(f"kernels: {recorded.kernels} -> {found.kernels}")
    for output in dict.fromkeys((*recorded.bits, *found.bits)):
        then, today = recorded.bits.get(output, "absent"), found.bits.get(output, "absent")
        if then != today:
            worse.append(f"bits of output {output}: {then[:12]} -> {today[:12]}")
    return Judgement(tuple(worse), tuple(notes))


def conditions(recorded: Decisions, found: Decisions) -> tuple[str, ...]:
    """What was built otherwise than for the file, a line each: where there is any, nothing else compares."""
    lines = []
    for name in dict.fromkeys((*(recorded.inputs or ()), *(found.inputs or ()))):
        then, now = ((inputs or {}).get(name, "absent") for inputs in (recorded.inputs, found.inputs))
        if recorded.inputs is not None and then != now:
            lines.append(f"input {name}: recorded as {then}, built as {now}: bind the recorded shapes; nothing else is compared")
    if recorded.numerics != found.numerics:
        lines.append(f"numerics: recorded as {recorded.numerics}, built as {found.numerics}; nothing else is compared")
    return tuple(lines)


def judge_speed(recorded: Decisions, here: Decisions, attempt: Callable[[], Speed], tolerance: float) -> Judgement:
    """Measures until one attempt shows no slowdown; ATTEMPTS that all show it are a difference. Notes where speed can't be judged."""
    if recorded.speed is None:
        return Judgement((), ("speed: none is recorded",))
    if (recorded.cpu, recorded.threads) != (here.cpu, here.threads):
        return Judgement((), (f"speed: recorded on {recorded.cpu} with {recorded.threads} threads, not compared with this machine",))
    said = None
    for _ in range(ATTEMPTS):
        found = attempt()
        said = slower(recorded.speed, found, tolerance)
        if said is None:
            noisy = (f"speed: too noisy to judge, the model differs from itself by {found.noise:.0%}",) if found.noise > MAX_NOISE else ()
            return Judgement((), noisy)
    return Judgement((said,) if said else ())


def check(
    model: Any,
    against: str | os.PathLike[str],
    *,
    shapes: Mapping[str, int | Sequence[int]] | None = None,
    threads: int | None = None,
    fuse: Fuse = "measured",
    logs: str | os.PathLike[str] | None = None,
    write: bool = False,
    speed: bool = True,
    tolerance: float = TOLERANCE,
    numerics: Numerics = "exact",
) -> Judgement:
    """Build the model and compare it with the file `against`, or write that file.

    speed      measure it too; without it, nothing depends on the machine. tolerance: how much slower is still well, 0.1 for a tenth.
    Raises     as `tvmfuse.build` does; UsageError for a file that can't be read or written.
    """
    path = Path(against)
    if write:
        check_own(path, b"{", "file of decisions")  # a model, for one
    recorded = None if write else Decisions.read(path)
    session = build(model, shapes=shapes, threads=threads, fuse=fuse, logs=logs, numerics=numerics)
    found = inspect(session, numerics)

    def attempt() -> Speed:
        # Buffers of its own each time: where they lie decides some kernels' speed.
        return measure(compare.bound(session, seeded(session)), reference_kernel(), ATTEMPT_S, time.perf_counter)

    if recorded is None:
        dataclasses.replace(found, speed=attempt() if speed else None).write(path)
        return Judgement(())
    if other := conditions(recorded, found):
        return Judgement(other)
    judgement = regressions(recorded, found)
    judged = judge_speed(recorded, found, attempt, tolerance) if speed else Judgement(())
    return Judgement(judgement.differences + judged.differences, judgement.notes + judged.notes)


def _ops(site: SiteState) -> str:
    inside, apart = " ".join(site.epilogue[: site.fused]), " ".join(site.epilogue[site.fused :])
    return f"{inside or 'nothing'} in {site.placement if site.fused else 'its loop'}" + (f", {apart} apart" if apart else "")
