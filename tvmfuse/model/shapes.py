"""Every free dimension of a model's inputs becomes a number, or an error that shows how to bind it. Pure: no ONNX, no TVM."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Mapping, Sequence

from ..errors import ModelError, UsageError

Dim = int | str | None  # a number, a name shared by all inputs, or a dimension that is like no other
Shapes = Mapping[str, int | Sequence[int]]


def bind(declared: Mapping[str, tuple[Dim, ...] | None], shapes: Shapes | None, model: str) -> dict[str, tuple[int, ...]]:
    """The static shape of each input.

    declared  input name -> its dimensions, or None when the model leaves even the rank open.
    shapes    what the caller binds: {"S": 1} a dimension by name, {"x": (1, 3, 224, 224)} a whole input.
    model     how the caller wrote the model in `tvmfuse.build(...)`, for messages.
    Raises    UsageError when `shapes` names what doesn't exist or contradicts the model or itself;
              ModelError when a dimension stays free.
    """
    values: dict[str, int] = {}
    whole: dict[str, tuple[int, ...]] = {}
    names = {dim for dims in declared.values() for dim in dims or () if isinstance(dim, str)}
    if not isinstance(shapes or {}, Mapping):
        raise UsageError(f"shapes={shapes!r} is no mapping; write it like shapes={{'S': 1}} or shapes={{'x': (1, 3, 224, 224)}}")
    for key, value in (shapes or {}).items():
        if key in names and not isinstance(value, Sequence):
            values[key] = _extent(key, value)
        elif key in declared and isinstance(value, Sequence) and not isinstance(value, str):
            whole[key] = tuple(_extent(key, extent) for extent in value)
        else:
            nothing = f"binds nothing. {_listing(declared, names)}"
            raise UsageError(f"shapes={{{key!r}: {value!r}}} {nothing}", f"{_option(key, value)} {nothing}")

    for name, extents in whole.items():
        dims = declared[name]
        if dims is None:
            continue
        if len(dims) != len(extents):
            raise _contradiction(f"{name!r} {len(extents)} dimensions {extents}; the model has {len(dims)}: {_written(dims)}")
        for axis, (dim, extent) in enumerate(zip(dims, extents, strict=True)):
            known = values.setdefault(dim, extent) if isinstance(dim, str) else extent if dim is None else dim
            if known != extent:
                raise _contradiction(f"dimension {axis} of {name!r} the extent {extent}, but {dim!r} is {known}")

    bound: dict[str, tuple[int, ...]] = {}
    free: list[tuple[str, int]] = []
    for name, dims in declared.items():
        if name in whole:
            bound[name] = whole[name]
        elif dims is None:
            free.append((name, -1))
        else:
            found = [values.get(dim) if isinstance(dim, str) else dim for dim in dims]
            free += [(name, axis) for axis, extent in enumerate(found) if extent is None]
            bound[name] = tuple(extent for extent in found if extent is not None)
    if free:
        raise _unbound(declared, shapes or {}, free, model)
    return bound


def _extent(key: str, value: object) -> int:
    try:
        extent = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        extent = 0
    if extent < 1 or isinstance(value, bool):
        wanted = "an extent is a positive whole number"
        raise UsageError(f"shapes[{key!r}] holds {value!r}; {wanted}", f"--shape gives {key!r} the extent {value!r}; {wanted}")
    return extent


def _contradiction(what: str) -> UsageError:
    return UsageError(f"shapes gives {what}", f"--shape gives {what}")


def _option(key: str, value: object) -> str:
    """As the command line takes it; the comma marks a whole input of rank one."""
    extents = ",".join(map(str, value)) + "," * (len(value) == 1) if isinstance(value, tuple | list) else str(value).strip("()")
    return f"--shape {shlex.quote(f'{key}={extents}'.replace(', ', ','))}"


def _written(dims: tuple[Dim, ...] | None) -> str:
    return "of unknown rank" if dims is None else f"({', '.join('?' if dim is None else str(dim) for dim in dims)})"


def _listing(declared: Mapping[str, tuple[Dim, ...] | None], names: set[str]) -> str:
    inputs = ", ".join(f"{name} {_written(dims)}" for name, dims in declared.items()) or "none"
    return f"Free dimensions (a number each): {', '.join(sorted(names)) or 'none'}. Inputs (a tuple each): {inputs}."


def _unbound(declared: Mapping[str, tuple[Dim, ...] | None], given: Shapes, free: list[tuple[str, int]], model: str) -> ModelError:
    wanted: dict[str, object] = dict(given)
    said = []
    for name, axis in free:
        dims = declared[name]
        if dims is None:
            said.append(f"input {name!r} leaves its rank open")
            wanted[name] = "(1, ...)"
        elif (dim := dims[axis]) is None:
            said.append(f"input {name!r} leaves dimension {axis} of {_written(dims)} open")
            wanted[name] = tuple(1 if extent is None else given.get(extent, 1) if isinstance(extent, str) else extent for extent in dims)
        else:
            said.append(f"input {name!r} leaves dimension {axis} ({dim!r}) of {_written(dims)} open")
            wanted[str(dim)] = 1
    binding = ", ".join(f'"{key}": {value}' for key, value in wanted.items())
    problem = f"{'; '.join(said)}. Bind it with the extents you will run: "
    options = " ".join(_option(key, value) for key, value in wanted.items())
    return ModelError(f"{problem}tvmfuse.build({model}, shapes={{{binding}}})", f"{problem}{options}")
