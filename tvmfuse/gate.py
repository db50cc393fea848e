"""The whole-model gate: a tuned model has to be no slower than with every default, and than never fused; else sites go back.

Where the models are timed is an argument: in this process, or in a fresh one on a device, with all of them side by side.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .artifact import Program
from .building import Plan, Prepared, compile_model
from .choose import Chooser, Fuse
from .compare import draw
from .decide import verdict
from .decide.log import Log, Record
from .decide.search import SiteResult
from .errors import DeviceError, DeviceLost, UsageError, WrongBits
from .linking import link
from .measure import whole
from .measure.device import Place
from .measure.host import is_foreign
from .measure.pool import Pool
from .measure.whole import Sample, refuse_differing
from .measure.worker import count_differing
from .session import Session
from .values import Verdict, Workload

SLOW_MODEL_S = 20e-3  # a model this slow is timed once a round: an interruption is small beside it
RIVALS: tuple[Fuse, ...] = ("always", "never")


@dataclass(frozen=True)
class Comparison:
    """The whole tuned model against a rival: the median of its time over the rival's, with an interval; what equal models differ by."""

    rival: str
    ratio: float
    ci: tuple[float, float]
    aa_noise: float
    pairs: int

    @property
    def why(self) -> str:
        return f"whole model against {self.rival}"


Judge = Callable[[Sample], Comparison]
Trial = Callable[[Sequence[Session], Judge], Comparison]
"""Puts sessions side by side, in slots 0, 1, ..., and returns what the judge says of their times."""


@dataclass(frozen=True)
class Passage:
    """What came of a run of the gate.

    comparison  the last one, with the rival that is hardest on the tuned model; None when no site was to be compared.
    reverted    sites that it turned back. failure: why it ended before it was through.
    """

    comparison: Comparison | None = None
    reverted: tuple[Workload, ...] = ()
    failure: str | None = None


def revert_while_slower(
    prepared: Prepared,
    plan: Plan,
    log: Log,
    results: Sequence[SiteResult],
    trial: Trial,
    progress: Callable[[float, str], None],
    deadline: float,
) -> Passage:
    """The whole model, tuned against always (every default) and never: while tuned is slower, the site that gained least goes back.

    Sites that were decided before count with what they were decided to be; only this run's go back. After `deadline`, by the monotonic
    clock, all of them do at once. What a device that fails leaves open stays as its site was decided.
    Raises WrongBits, after all of this run's went back, when the models' outputs differ.
    """
    numerics, chooser = plan.chooser.numerics, plan.chooser
    before = Chooser("measured", plan.machine, log, chooser.host, chooser.toolchain, numerics=numerics)
    won = {result.workload: result.verdict for result in results if result.verdict}
    chosen = {site.workload: before(site.workload) for site in prepared.sites if before.choice(site.workload).source == "measured"}
    said: Comparison | None = None
    reverted: list[Workload] = []
    rivals: list[Session] = []
    while won:
        progress(1.0, f"whole model, {len(won)} sites tuned")
        rivals = rivals or [compile_model(prepared, plan, Chooser(fuse, plan.machine, numerics=numerics)) for fuse in RIVALS]
        tuned = compile_model(prepared, plan, Chooser("always", plan.machine, tried=chosen, numerics=numerics))
        try:
            said = trial(side_by_side(tuned, rivals), functools.partial(against_hardest, rivals=RIVALS, deadline=deadline))
        except WrongBits:
            for workload, winner in won.items():
                overruled = replace(winner, outcome="keeps default", why="the whole model's output bits changed")
                log.append(Record.of(workload, overruled, chooser.conditions(workload), kind="model_gate"))
            raise
        except (DeviceError, DeviceLost, UsageError) as error:  # the last: what there is to link with can't link a model
            return Passage(said, tuple(reverted), str(error))
        if not is_slower(said):
            break
        weakest_first = sorted(won, key=lambda w: won[w].ratio, reverse=True)
        for workload in weakest_first[:1] if time.monotonic() < deadline else weakest_first:
            why = "the whole model got slower"
            overruled = Verdict("keeps default", won[workload].candidate, said.ratio, said.ci, said.aa_noise, said.pairs, why)
            log.append(Record.of(workload, overruled, chooser.conditions(workload), kind="model_gate"))
            reverted.append(workload)
            del won[workload], chosen[workload]
    return Passage(said, tuple(reverted))


def is_slower(found: Comparison) -> bool:
    """With confidence, and by more than the margin: neither a win nor a tie.

    A site has to prove a whole margin to win; the model it belongs to loses already where the interval leaves out a tie. Some of what
    speaks against tuned sites is seen there alone: on several threads a tile that is quicker by itself may want rows that lie with another.
    """
    return found.ci[0] > 1 and found.ratio > 1 + verdict.margin(found.aa_noise)


def side_by_side(tuned: Session, rivals: Sequence[Session]) -> list[Session]:
    """As `against_hardest` wants them: the first rival twice, to be compared with itself."""
    return [tuned, rivals[0], *rivals]


def against_hardest(sample: Sample, rivals: Sequence[str], deadline: float) -> Comparison:
    """The tuned model against the rival that is hardest on it: randomised rounds with an A/A control of the first.

    sample    times what is `side_by_side`.
    deadline  by the monotonic clock, after which no more rounds are taken than the next look needs.
    """
    slots = range(len(rivals) + 2)
    once_s = min(sample(slot, 1, 1) for slot in slots)
    repeats, tries = max(1, round(2e-3 / once_s)), 2 if once_s < SLOW_MODEL_S else 1
    order = random.Random(0)
    rounds: list[list[float]] = []
    while len(rounds) < verdict.LOOKS[-1] and not (len(rounds) in verdict.LOOKS and time.monotonic() > deadline):
        taken = {slot: math.log(sample(slot, repeats, tries)) for slot in order.sample(slots, len(slots))}
        rounds.append([taken[slot] for slot in slots])
    log_s = np.array(rounds)
    noise = abs(float(np.median(log_s[:, 2] - log_s[:, 1])))
    found = []
    for slot, name in zip((1, *slots[3:]), rivals, strict=True):
        ratios = sorted(log_s[:, 0] - log_s[:, slot])
        low, high = (ratios[rank - 1] for rank in verdict.RANKS[len(ratios)])
        found.append(Comparison(name, math.exp(float(np.median(ratios))), (math.exp(low), math.exp(high)), noise, len(ratios)))
    return max(found, key=lambda said: (is_slower(said), said.ratio))


def in_this_process(sessions: Sequence[Session], judge: Judge, same_bits: bool = True) -> Comparison:
    """A `Trial`. Raises WrongBits where outputs that are to be equal differ."""
    rng = np.random.default_rng(0)
    feeds = {i.name: draw(rng, i.shape, i.dtype) for i in sessions[0].get_inputs()}
    outputs = [{o.name: np.empty(o.shape, o.dtype) for o in session.get_outputs()} for session in sessions]
    calls = [session.bind(feeds, results) for session, results in zip(sessions, outputs, strict=True)]
    for call in calls:
        call()
    if same_bits:
        for results in outputs[1:]:
            refuse_differing(sum(count_differing(results[name], want) for name, want in outputs[0].items()))
    return judge(lambda slot, repeats, tries: min(_seconds(calls[slot], repeats) for _ in range(tries)))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


class OnDevice:
    """A `Trial`: in a fresh process on one device of a pool, or all over on another one when that is lost.

    folder  for what is sent there; it belongs to one gate.
    Raises  WrongBits where outputs that are to be equal differ, DeviceError when a model can't run there, DeviceLost when no device is
            left, UsageError when a model can't be linked.
    """

    def __init__(self, pool: Pool[Place], plan: Plan, folder: Path) -> None:
        self._pool, self._plan, self._folder = pool, plan, folder
        self._written: dict[int, tuple[Program, whole.Model]] = {}

    def __call__(self, sessions: Sequence[Session], judge: Judge) -> Comparison:
        models = [self._model(session.program) for session in sessions]

        def compared(place: Place, models: Sequence[whole.Model]) -> Comparison:
            with whole.opened(place, models, self._plan.machine.threads, self._plan.chooser.numerics == "exact") as sample:
                return judge(sample)

        (said,) = self._pool.map(compared, [models])
        return said

    def _model(self, program: Program) -> whole.Model:
        if id(program) not in self._written:
            # Objects are linked on the device where there may be no linker for it here
            library = self._folder / f"model{len(self._written)}.{'tar' if is_foreign(self._plan.target) else 'so'}"
            link(program, library)
            manifest = program.manifest
            inputs, outputs = (tuple((info.shape, info.dtype) for info in infos) for infos in (manifest.inputs, manifest.outputs))
            weights = tuple(whole.stored_bytes(weight, self._folder) for weight in program.weights)
            model = whole.Model(library, inputs, outputs, weights, manifest.views, manifest.workspace)
            self._written[id(program)] = program, model  # a program that is kept keeps its id
        return self._written[id(program)][1]
