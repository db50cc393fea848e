"""Random models: right values, and the same bits wherever each epilogue is computed.

`make fuzz` runs many more of them, from a seed that it prints.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.exec.bounded import Bounded, Format, added, bilinear, monotone
from tests.exec.kernel_runner import count_differing
from tests.exec.random_images import ImageAuthor
from tests.exec.random_models import Author, Draw, Network
from tvmfuse import kernel
from tvmfuse.building import Plan, compile_model, plan_for, prepare
from tvmfuse.choose import Chooser
from tvmfuse.session import Session
from tvmfuse.values import WINOGRAD, Candidate, Workload

GRAPHS = int(os.environ.get("FUZZ", 300))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
TOGETHER = 10  # graphs in one model: what a build costs before its first kernel is shared
SHARDS = 10
PHASES = (Phase.generate, Phase.shrink) if "FUZZ" in os.environ else (Phase.generate,)
SPECIALS = (np.nan, np.inf, -np.inf, -0.0, 1e-41, 3e38)
RELAXED = 64.0  # times the largest bound of an exact result: Winograd's error is spread over its tile


@st.composite
def networks(draw: Draw, graphs: int) -> Network:
    """All around one anchor, or all of images."""
    network = Network(Format(draw(st.sampled_from(["float32"] * 8 + ["float64", "float16"]))))
    author = draw(st.sampled_from([Author, Author, Author, ImageAuthor]))
    for _ in range(graphs):
        with np.errstate(all="ignore"):
            author(draw, network).graph()
    return network


@pytest.mark.usefixtures("small_kernels_are_shared")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_values_are_right_and_every_choice_gives_the_same_bits(shard: int, tmp_path: Path) -> None:
    @seed(FIRST_SEED + shard)
    @settings(
        max_examples=-(-GRAPHS // TOGETHER // SHARDS), database=None, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck)
    )
    @given(networks(TOGETHER))
    def agree(network: Network) -> None:
        check(network, tmp_path)

    agree()


def check(network: Network, logs: Path) -> None:
    prepared = prepare(network.model())
    workloads = [site.workload for site in prepared.sites]
    sessions: dict[str, Session] = {}
    for name, threads in (("always", 1), ("never", 2), ("any", 2)):  # what is measured or predicted is any
        plan = plan_for(None, threads, "measured" if name == "any" else name, logs)
        sessions[name] = compile_model(prepared, plan, any_candidate(plan, workloads) if name == "any" else plan.chooser)
    for output, computed in results_of_all(network, sessions):
        right = network.outputs[output].holds(computed)
        assert computed.shape == network.outputs[output].shape
        assert right.all(), f"{output}: {np.count_nonzero(~right)} of {right.size} elements are wrong"
    if all(kernel.why_not_relaxed(workload) for workload in workloads):
        return
    algorithm = list(WINOGRAD)[len(workloads) % len(WINOGRAD)]
    plans = {f"{algorithm}, {threads} threads": plan_for(None, threads, "measured", logs, "relaxed") for threads in (1, 2)}
    relaxed = {name: compile_model(prepared, plan, any_candidate(plan, workloads, algorithm)) for name, plan in plans.items()}
    for output, computed in results_of_all(network, relaxed):
        bounded = network.outputs[output]
        known = np.isfinite(bounded.error)
        off = np.abs(computed.astype(np.float64) - bounded.value)[known].max(initial=0.0)
        assert off <= RELAXED * bounded.error[known].max(initial=0.0), f"{output} by {algorithm} is {off} off"


def results_of_all(network: Network, sessions: Mapping[str, Session]) -> Iterator[tuple[str, np.ndarray]]:
    """The outputs, which all sessions agree on to the bit, of inputs with special values too."""
    strange = {name: with_specials(array) for name, array in network.feeds.items()}
    first, *others = sessions
    for inputs, feeds in (("special", strange), ("plain", network.feeds)):
        results = {name: session.run(None, feeds) for name, session in sessions.items()}
        for name in others:
            for output, x, y in zip(network.outputs, results[name], results[first], strict=True):
                assert not count_differing(np.atleast_1d(x), np.atleast_1d(y)), f"{output} of {inputs} inputs: {name} differs from {first}"
    yield from zip(network.outputs, results[first], strict=True)


def any_candidate(plan: Plan, workloads: list[Workload], algorithm: str | None = None) -> Chooser:
    """Of every workload one candidate out of its whole space: a placement, a cut and a tile; of `algorithm` where it has such ones."""
    numbers = random.Random(len(workloads) + plan.machine.threads)

    def any_of(workload: Workload) -> Candidate:
        found = kernel.candidates(workload, plan.machine, "relaxed" if algorithm else "exact")
        return numbers.choice([c for c in found if c.algorithm == algorithm] or [c for c in found if not c.algorithm])

    return Chooser("measured", plan.machine, tried={workload: any_of(workload) for workload in workloads})


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
