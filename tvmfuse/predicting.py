"""The model that a build asks where it has no verdict: trained on the records at hand when first asked, then kept in the user's cache.

The same records and the same release give the same model, and with it the same choices, whether it was trained or read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import math
from pathlib import Path

from . import cache
from .decide import cost_model
from .decide.cost_model import Examples, Learned
from .decide.log import Log
from .errors import UsageError
from .files import written
from .measure.host import isa_among
from .values import Machine

ERROR = "tvmfuse.error"  # the booster's attribute that holds `Learned.error`


def predictor(log: Log, machine: Machine) -> Learned | None:
    """Trained on the log's exact records of this instruction set; None when they are too few."""
    path = _path(log, machine)
    if path is not None and (kept := _read(path, machine)) is not None:
        return kept
    learned = cost_model.learn_with_error(measured(log, machine), machine)
    if learned is not None and path is not None:
        _keep(learned, path)
    return learned


def measured(log: Log, machine: Machine) -> list[Examples]:
    """What there is to learn from: a log's exact records of this instruction set, of any host."""
    exact = (record for record in log.records() if record.candidate.numerics == "exact")
    alike = (record for record in exact if isa_among(record.conditions.host.features) == machine.isa)
    return cost_model.examples(alike, machine)


def _path(log: Log, machine: Machine) -> Path | None:
    """None when the cache is switched off."""
    if (models := cache.folder()) is None:
        return None
    made_of = log.fingerprint(), machine.isa.name, importlib.metadata.version("xgboost"), Path(cost_model.__file__).read_text()
    return models.with_name("predictors") / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.ubj"


def _read(path: Path, machine: Machine) -> Learned | None:
    """What is damaged or can't be read counts as not being there."""
    if not path.exists():
        return None
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(path.read_bytes()))
        return Learned(machine, booster, float(booster.attr(ERROR) or math.inf))
    except (OSError, ValueError):  # xgboost's error is a ValueError
        return None


def _keep(learned: Learned, path: Path) -> None:
    """Whole or not at all; without a cache to write to the next build trains again."""
    learned.booster.set_attr(**{ERROR: repr(learned.error)})
    with contextlib.suppress(OSError, UsageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as partial:
            partial.write_bytes(learned.booster.save_raw("ubj"))
