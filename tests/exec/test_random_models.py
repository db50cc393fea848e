"""Random models: right values, and the same bits wherever each epilogue is computed.

`make fuzz` runs many more of them, from a seed that it prints.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.exec.bounded import Bounded, Format, added, bilinear, monotone
from tests.exec.kernel_runner import count_differing
from tests.exec.random_models import Network, networks
from tvmfuse import kernel
from tvmfuse.building import Plan, compile_model, plan_for, prepare
from tvmfuse.choose import Chooser
from tvmfuse.kernel import grain
from tvmfuse.session import Session

GRAPHS = int(os.environ.get("FUZZ", 300))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
TOGETHER = 10  # graphs in one model: what a build costs before its first kernel is shared
SHARDS = 10
PHASES = (Phase.generate, Phase.shrink) if "FUZZ" in os.environ else (Phase.generate,)
SPECIALS = (np.nan, np.inf, -np.inf, -0.0, 1e-41, 3e38)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_values_are_right_and_every_choice_gives_the_same_bits(shard: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grain, "SPLIT_PAYS_S", -1.0)  # small kernels are shared by threads too

    @seed(FIRST_SEED + shard)
    @settings(
        max_examples=-(-GRAPHS // TOGETHER // SHARDS), database=None, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck)
    )
    @given(networks(TOGETHER))
    def agree(network: Network) -> None:
        check(network, tmp_path)

    agree()


def check(network: Network, logs: Path) -> None:
    model = network.model()
    prepared = prepare(model)
    sessions: dict[str, Session] = {}
    for name, threads in (("always", 1), ("never", 2), ("measured", 2), ("any", 1)):
        plan = plan_for(None, threads, "measured" if name == "any" else name, logs)
        chooser = any_candidate(plan, [site.workload for site in prepared.sites]) if name == "any" else plan.chooser
        sessions[name] = compile_model(prepared, plan, chooser)
    strange = {name: with_specials(array) for name, array in network.feeds.items()}
    results = {name: (session.run(None, network.feeds), session.run(None, strange)) for name, session in sessions.items()}
    always = results["always"]
    for output, computed in zip(network.outputs, always[0], strict=True):
        right = network.outputs[output].holds(computed)
        assert computed.shape == network.outputs[output].shape
        assert right.all(), f"{output}: {np.count_nonzero(~right)} of {right.size} elements are wrong"
    for name, (plain, special) in results.items():
        for inputs, got, wanted in (("plain", plain, always[0]), ("special", special, always[1])):
            for output, x, y in zip(network.outputs, got, wanted, strict=True):
                assert not count_differing(np.atleast_1d(x), np.atleast_1d(y)), f"{output} of {inputs} inputs: {name} differs from always"


def any_candidate(plan: Plan, workloads: list) -> Chooser:
    """Of every workload one candidate out of its whole space: a placement, a cut and a tile."""
    numbers = random.Random(len(workloads))
    return Chooser("measured", plan.machine, tried={w: numbers.choice(kernel.candidates(w, plan.machine)) for w in workloads})


def with_specials(array: np.ndarray) -> np.ndarray:
    """NaN, infinities, a negative zero, a denormal and a huge number among the others."""
    numbers = np.random.default_rng(array.size)
    changed = array.copy()
    at = numbers.choice(array.size, min(array.size, len(SPECIALS)), replace=False)
    with np.errstate(over="ignore"):
        changed.reshape(-1)[at] = np.array(SPECIALS[: len(at)]).astype(array.dtype)
    return changed


def test_the_bound_notices_a_wrong_value() -> None:
    """A thousandth off, or one term of the sum left out."""
    fmt, numbers = Format("float32"), np.random.default_rng(0)
    a, b = (numbers.standard_normal(shape).astype(np.float32) for shape in ((6, 16), (16, 5)))
    bounded = bilinear(np.matmul, Bounded.exact(a), Bounded.exact(b), 16, fmt)
    bounded = monotone(np.tanh, added(bounded, Bounded.exact(np.ones(5)), fmt), fmt)
    right = np.tanh(a @ b + np.float32(1))
    assert bounded.holds(right).all()
    assert not bounded.holds(right * np.float32(1.001)).any()
    assert not bounded.holds(np.tanh(a[:, 1:] @ b[1:] + np.float32(1))).all()
