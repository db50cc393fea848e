"""A damaged, incomplete or hostile model file is refused with what is wrong, where, and what to do."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper, parser

from tvmfuse.errors import ModelError
from tvmfuse.model.load import load


@pytest.fixture
def model() -> onnx.ModelProto:
    return parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> g (float[1,4] x) => (float[1,4] y)
        <float[4] w = {1, 2, 3, 4}> { [scale] y = Mul(x, w) }"""
    )


def with_external_weights(model: onnx.ModelProto, folder: Path, location: str = "weights.bin") -> Path:
    """w is moved to `folder`/weights.bin and said to be at `location`."""
    (folder / "weights.bin").write_bytes(numpy_helper.to_array(model.graph.initializer[0]).tobytes())
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), "w"))
    external_data_helper.set_external_data(tensor, location, offset=0, length=16)
    tensor.ClearField("raw_data")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="absent.onnx does not exist"):
        load(tmp_path / "absent.onnx")


def test_a_folder(tmp_path):
    with pytest.raises(ModelError, match="is not a file"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00", b"Here is no model, only text.\n" * 50, b"\x89PNG\r\n\x1a\n" + bytes(64), b"\x08\x08"])
def test_what_is_no_model(tmp_path, content):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="model.onnx .*(is empty|truncated, damaged or not ONNX|holds no ONNX model)"):
        load(path)


def test_a_file_truncated_anywhere_never_loads(tmp_path, model):
    content = model.SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(0, len(content) - 1, 14):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError):
            load(path)


def test_a_damaged_byte_is_an_error_or_another_valid_model(tmp_path, model):
    content = bytearray(model.SerializeToString())
    path = tmp_path / "model.onnx"
    for position in range(0, len(content), 11):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            load(path)
        except Exception as error:
            assert type(error).__module__ == "tvmfuse.errors", f"byte {position}: {error!r}"


def test_the_checkers_reason_is_passed_on(model):
    model.graph.node[0].input[1] = "nowhere"
    with pytest.raises(ModelError, match="the model is not a valid ONNX model: .*nowhere"):
        load(model)


def test_external_weights_beside_the_model_are_read(tmp_path, model):
    assert load(with_external_weights(model, tmp_path)).outputs[0].shape == (1, 4)


def test_missing_external_weights(tmp_path, model):
    path = with_external_weights(model, tmp_path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match="'w' are missing: .*weights.bin; copy it beside the model"):
        load(path)


def test_short_external_weights(tmp_path, model):
    path = with_external_weights(model, tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(7))
    with pytest.raises(ModelError, match="has 7 bytes, but 'w' needs 16"):
        load(path)


@pytest.mark.parametrize("outside", ["../weights.bin", "{}/weights.bin", "sub/../../weights.bin"])
def test_external_weights_outside_of_the_models_folder(tmp_path, model, outside):
    folder = tmp_path / "inner"
    (folder / "sub").mkdir(parents=True)
    path = with_external_weights(model, folder, outside.format(tmp_path))
    (folder / "weights.bin").rename(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match="'w' point outside the model's folder: '.*weights.bin'"):
        load(path)


def test_external_weights_behind_a_link_that_leaves_the_folder(tmp_path, model):
    folder = tmp_path / "inner"
    folder.mkdir()
    path = with_external_weights(model, folder)
    (folder / "weights.bin").rename(tmp_path / "secret")
    (folder / "weights.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(path)


def test_a_proto_whose_weights_are_elsewhere(tmp_path, model):
    with_external_weights(model, tmp_path)
    with pytest.raises(ModelError, match="'w' are in another file; pass the model's path"):
        load(model)


def test_nan_in_weights_is_a_warning(model):
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([1, np.nan, 3, 4], np.float32), "w"))
    with pytest.warns(UserWarning, match="the model: NaN in the weights 'w'"):
        load(model)


def test_a_sound_model_warns_of_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model)
