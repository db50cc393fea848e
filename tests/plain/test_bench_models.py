"""The zoo: complete, deterministic, and with outputs that depend on the input."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from bench import models

# VGG-19, AlexNet and ZFNet draw hundreds of MB of weights and have no op that the others lack.
SMALL = [name for name in models.ZOO if name not in ("vgg19", "alexnet", "zfnet512")]
SEEDED = [name for name in SMALL if not name.startswith("dfn3")]


def run(name: str, seed: int) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for dimension, extent in models.shapes(name).items():
        options.add_free_dimension_override_by_name(dimension, extent)
    session = ort.InferenceSession(models.load(name, logits=True).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, models.inputs(name, seed))


@pytest.mark.parametrize("name", SMALL)
def test_only_data_is_an_input(name: str) -> None:
    graph = models.load(name).graph
    assert [value.name for value in graph.input] == list(models.inputs(name))
    assert {t.name for t in graph.initializer} <= {x for node in graph.node for x in node.input}
    assert not name.startswith("dfn3") or len(graph.input) in (2, 5)


@pytest.mark.parametrize("name", SEEDED)
def test_no_placeholder_is_left(name: str) -> None:
    graph = models.load(name).graph
    assert all(node.op_type != "ConstantOfShape" for node in graph.node)
    floats = [numpy_helper.to_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert all(value.std() > 0 for value in floats if value.size > 1)
    onnx.checker.check_model(models.load(name))


def test_weights_are_the_same_each_time() -> None:
    first = models.load("squeezenet").SerializeToString(deterministic=True)
    models._cached.cache_clear()
    assert models.load("squeezenet").SerializeToString(deterministic=True) == first


def test_caller_may_change_what_it_loaded() -> None:
    models.load("squeezenet").graph.ClearField("node")
    assert len(models.load("squeezenet").graph.node) > 0


def test_inputs_follow_the_seed() -> None:
    (a,), (again,), (other,) = (models.inputs("squeezenet", seed).values() for seed in (1, 1, 2))
    assert a.shape == (1, 3, 224, 224) and a.dtype == np.float32
    assert np.array_equal(a, again) and not np.array_equal(a, other)


def test_free_dimension_is_bound_in_inputs() -> None:
    assert {name: x.shape for name, x in models.inputs("dfn3_enc_s100").items()} == {
        "feat_erb": (1, 1, 100, 32),
        "feat_spec": (1, 2, 100, 96),
    }
    assert models.shapes("dfn3_enc_s100") == {"S": 100}


@pytest.mark.parametrize("name", [n for n in SMALL if "_s100" not in n])
def test_outputs_tell_two_inputs_apart(name: str) -> None:
    for a, b in zip(run(name, 1), run(name, 2), strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a).max() < 100
        assert np.abs(a - b).max() > 0.01 * np.abs(a).max()


def test_mobilenetv2_is_the_published_architecture() -> None:
    graph = models.load("mobilenetv2").graph
    weights = {t.name: tuple(t.dims) for t in graph.initializer}
    parameters = sum(int(np.prod(shape)) for name, shape in weights.items() if not name.endswith(("mean", "variance")) and shape)
    assert parameters == 3_504_872  # torchvision.models.mobilenet_v2
    assert sum(node.op_type == "Conv" for node in graph.node) == 52
    assert sum(node.op_type == "Clip" for node in graph.node) == 35
    assert sum(node.op_type == "Add" for node in graph.node) == 10


def test_logits_expose_the_softmax_s_input() -> None:
    outputs = [value.name for value in models.load("squeezenet", logits=True).graph.output]
    assert outputs == ["softmaxout_1", "r65"]
    assert len(models.load("densenet121", logits=True).graph.output) == 1
