"""The main job on real models: right values, the same bits whatever is decided, and epilogues that really are fused."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import tvmfuse
from bench import models

ACCEPTED = (
    *(f"dfn3_{part}_s{steps}" for steps in (1, 100) for part in ("enc", "erb_dec", "df_dec")),
    "mobilenetv2", "squeezenet", "resnet50", "inception_v1", "inception_v2", "shufflenet", "densenet121",
)  # fmt: skip
TOLERANCE = 1e-4  # of the output's own scale
WAYS = [("always", 1), ("never", 2), ("measured", 1), ("measured", 2)]  # a build of a large model is half a minute


@pytest.mark.parametrize("name", ACCEPTED)
def test_matches_onnxruntime_with_equal_bits_whatever_is_decided(name: str) -> None:
    model = models.load(name, logits=True)
    feeds = [models.inputs(name, seed) for seed in (0, 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for dimension, extent in models.shapes(name).items():
        options.add_free_dimension_override_by_name(dimension, extent)
    peer = onnxruntime.InferenceSession(model.SerializeToString(), options)
    expected = [peer.run(None, feed) for feed in feeds]
    assert any((a != b).any() for a, b in zip(*expected, strict=True))

    first = None
    built: set[tuple[object, ...]] = set()
    for fuse, threads in WAYS:
        sites = [explained.site for explained in tvmfuse.explain(model, models.shapes(name), threads=threads, fuse=fuse).sites]
        choices = threads, *((site.name, site.placement, site.cut, site.source == "measured") for site in sites)
        if choices in built:
            continue  # without a record, "measured" is the default throughout: the very same module
        built.add(choices)
        session = tvmfuse.build(model, models.shapes(name), fuse=fuse, threads=threads)
        outputs = [session.run(None, feed) for feed in feeds]
        if first is None:
            first = outputs
        for got, wanted, reference in zip(outputs, first, expected, strict=True):
            for info, x, same, y in zip(session.get_outputs(), got, wanted, reference, strict=True):
                assert x.tobytes() == same.tobytes(), f"{info.name}: {fuse} with {threads} threads has other bits"
                scale = float(np.abs(y).max()) or 1.0
                assert float(np.abs(x - y).max()) <= TOLERANCE * scale, f"{info.name}: {fuse} with {threads} threads"


@pytest.mark.parametrize("name", ["mobilenetv2", "squeezenet"])
def test_no_bias_or_activation_stands_alone_with_always(name: str) -> None:
    session = tvmfuse.build(models.load(name), fuse="always", threads=1)
    (ran,) = session.trace(models.inputs(name))
    kernels = [kernel for kernel, _ in ran]
    of_sites = [kernel for site in session.sites for kernel in session.manifest.kernels[site.name]]
    assert sorted(kernel for kernel in kernels if kernel in of_sites) == sorted(of_sites), "the manifest lists what runs"
    assert all(len(session.manifest.kernels[site.name]) == 1 for site in session.sites)
    assert len(kernels) == session.kernel_count
    standing = [k for k in kernels if k not in of_sites and any(op in k for op in ("add", "relu", "clip", "maximum", "minimum"))]
    assert not standing


@pytest.mark.parametrize("part", ["enc", "erb_dec", "df_dec"])
def test_deepfilternet_is_fused_across_its_reshapes(part: str) -> None:
    name = f"dfn3_{part}_s100"
    report = tvmfuse.explain(models.load(name), models.shapes(name), threads=1)
    sites = [explained.site for explained in report.sites]
    einsums = [site for site in sites if site.name.endswith("Einsum")]
    assert einsums
    for site in einsums:
        assert site.epilogue and site.placement == "register", site.name
        assert any(op.startswith("reshape") for op in site.crossed), site.name
    convolutions = [site for site in sites if "relu" in site.epilogue and site not in einsums]
    assert all(site.epilogue[:2] == ("add", "relu") for site in convolutions)
    assert sum("tanh" in site.epilogue for site in sites) == (part == "df_dec")
