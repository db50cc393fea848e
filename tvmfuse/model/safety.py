"""Read an ONNX model without trusting it: whole, checked, and with no file outside its own folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import defs, external_data_helper, numpy_helper

from ..errors import ModelError, UnsupportedError
from . import examine, sandbox

LARGEST = 2**31 - 1  # bytes of a protobuf file
# From the oldest that the importer's converters know to the newest that package onnx knows. An operator whose meaning changed after the
# converters were written is refused on its own.
OLDEST_OPSET, NEWEST_OPSET = 7, defs.onnx_opset_version()


def read(source: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """The model with all its weights in memory.

    Raises  ModelError when the file is missing, empty, damaged or not ONNX, when external data is missing or lies outside
            the model's folder, or when onnx.checker refuses it; UnsupportedError for an operator set that isn't covered.
    Warns   (UserWarning) about weights that hold NaN.
    """
    if isinstance(source, onnx.ModelProto):
        model, where = source, "the model"
        for tensor in _external(model):
            raise ModelError(f"the weights of {tensor.name!r} are in another file; pass the model's path, or read it with onnx.load")
    else:
        path, where = Path(source), str(source)
        _require_readable(path)
        complaint = sandbox.examine(path)
        model = _parse(path)
        _read_external(model, path.parent)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), None)
    if opset is not None and not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise UnsupportedError(
            f"{where} uses ONNX operator set {opset}; {OLDEST_OPSET} to {NEWEST_OPSET} are supported. "
            "Export it again with another opset, or convert it with onnx.version_converter"
        )
    if isinstance(source, onnx.ModelProto):
        complaint = examine.complaint(source)
    if complaint is not None:
        raise ModelError(f"{where} is not a valid ONNX model: {' '.join(complaint.split())}")
    _warn_of_nan(model, where)
    return model


def array(tensor: onnx.TensorProto) -> np.ndarray:
    """Raises ModelError when the data doesn't fill the shape."""
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"the weights {tensor.name!r} are damaged: {error}") from error


def _require_readable(path: Path) -> None:
    if not path.exists():
        raise ModelError(f"{path} does not exist (looked in {Path.cwd()})")
    if not path.is_file():
        raise ModelError(f"{path} is not a file; name the .onnx file itself")
    if not (size := path.stat().st_size):
        raise ModelError(f"{path} is empty; copy or download it again")
    if size > LARGEST:
        raise ModelError(f"{path} has {size} bytes, more than the 2 GiB that such a file can hold; save the weights as external data")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error


def _parse(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.ParseFromString(path.read_bytes())
    if not model.ir_version or not model.HasField("graph"):
        raise ModelError(f"{path} holds no ONNX model (no IR version or no graph); is it another format?")
    values = (*model.graph.input, *model.graph.output, *model.graph.initializer)
    texts = [text for node in model.graph.node for text in (node.name, node.op_type, node.domain, *node.input, *node.output)]
    if not all(isinstance(text, str) for text in (*texts, *(value.name for value in values))):
        raise ModelError(f"{path} is damaged: a name in it is not UTF-8 text; copy or download it again")
    return model


def _read_external(model: onnx.ModelProto, folder: Path) -> None:
    for tensor in _external(model):
        info = external_data_helper.ExternalDataInfo(tensor)
        data = (folder / info.location).resolve()
        if not data.is_relative_to(folder.resolve()):
            raise ModelError(f"the weights of {tensor.name!r} point outside the model's folder: {info.location!r}; they must lie beside it")
        if not data.is_file():
            raise ModelError(f"the weights of {tensor.name!r} are missing: {data}; copy it beside the model")
        if data.stat().st_nlink > 1:
            raise ModelError(f"{data} is a hard link: it may be a file of elsewhere under another name; copy it beside the model")
        needed = (info.offset or 0) + (info.length or 0)
        if data.stat().st_size < needed:
            raise ModelError(f"{data} has {data.stat().st_size} bytes, but {tensor.name!r} needs {needed}; copy it again")
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (onnx.checker.ValidationError, OSError, ValueError) as error:
            raise ModelError(f"the weights of {tensor.name!r} can't be read from {data}: {error}") from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return (tensor for tensor in _tensors(model.graph) if external_data_helper.uses_external_data(tensor))


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _tensors(subgraph)


def _warn_of_nan(model: onnx.ModelProto, where: str) -> None:
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
    names = [t.name for t in model.graph.initializer if t.data_type in floats and np.isnan(array(t)).any()]
    if names:
        found = f"{where}: NaN in the weights {', '.join(map(repr, names))} (training diverged, or the export went wrong)"
        warnings.warn(f"{found}; outputs that use them are NaN: export it again", stacklevel=4)
