"""Find the sites of a canonical, hoisted module: each anchor with the epilogue that one value leaves.

A site also takes in the permutations around a matmul: where they only reorder whole b, m, n or k axes, the matmul reads or writes that
order itself. Nothing is rewritten here; `kernel.lower` replaces the sites that this finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call, GenericConst
from tvm.relax import Expr, Function, Var

from ..values import Anchor, Conv2d, Conv2dTranspose, Epilogue, Matmul, Operand, PlanarConv2d, Recurrent, Step, Workload
from .axes import LayoutOp, order_of
from .epilogue import Arg, steps_of
from .hoist import CROSSED_ATTR, EPILOGUE_OPS
from .region import Flow, is_output
from .rewrite import array_of, dtype_of, is_static, op_name, shape_of
from .simplify import permute_axes

RECURRENT_ATTR = "tvmfuse.recurrent"
REDUCED_IN = ("float32", "float64")


@dataclass(frozen=True, eq=False)
class FoundSite:
    """A site and the bindings that it stands for.

    inputs   the anchor's inputs, then the epilogue's operands; read in the workload's shapes, which may be a reshape away.
    result   the variable whose value the site computes; its shape may be a reshape away from the workload's output.
    ops      names of the epilogue's Relax ops, in order; crossed: the layout ops that they moved across.
    reason   why the chain ends before an elementwise op that follows, or None.
    members  names of the variables that it computes: the anchor's, then the epilogue's, as the model calls them.
    """

    name: str
    workload: Workload
    inputs: tuple[Expr, ...]
    result: Var
    ops: tuple[str, ...] = ()
    crossed: tuple[str, ...] = ()
    reason: str | None = None
    members: tuple[str, ...] = ()


def find_sites(func: Function, recurrences: dict[str, str] | None = None) -> list[FoundSite]:
    """Every site of a function that is one dataflow block, in program order.

    recurrences   global function name -> JSON of its Recurrent anchor, for functions that are marked as recurrent.
    """
    return _Finder(func, recurrences or {}).found()


def recurrences(mod: object) -> dict[str, str]:
    """The module's recurrent reference functions, by name."""
    return {
        var.name_hint: str(func.attrs[RECURRENT_ATTR])
        for var, func in mod.functions.items()  # type: ignore[attr-defined]
        if func.attrs and RECURRENT_ATTR in func.attrs
    }


@dataclass
class _Chain:
    """An epilogue while it grows: region values by variable, as step arguments."""

    values: dict[Var, str]
    steps: list[Step] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    inputs: list[Expr] = field(default_factory=list)
    members: list[Var] = field(default_factory=list)


@dataclass(frozen=True)
class _Stop:
    """Why a chain ends; `wanted` if the op that follows could have been part of it."""

    why: str
    wanted: bool


class _Finder:
    def __init__(self, func: Function, recurrences: dict[str, str]) -> None:
        blocks = func.body.blocks  # none where nothing is computed
        self._flow = Flow.of(blocks[0]) if blocks else Flow({}, {})
        self._value, self._users = self._flow.values, self._flow.users
        self._recurrences = recurrences
        self._crossed = {str(name): [str(op) for op in ops] for name, ops in (func.attrs or {}).get(CROSSED_ATTR, {}).items()}
        self._claimed: set[Var] = set()

    def found(self) -> list[FoundSite]:
        # The anchor that is computed last takes an op that joins two: the other's result is then an operand like any other.
        sites = [site for var in reversed(list(self._value)) if (site := self._site(var)) is not None]
        return sites[::-1]

    def _site(self, var: Var) -> FoundSite | None:
        call = self._value[var]
        matched = self._anchor(call) if isinstance(call, Call) else None
        if matched is None:
            return None
        anchor, inputs = matched
        if isinstance(anchor, Recurrent):
            return FoundSite(var.name, Workload(anchor), tuple(inputs), var, members=(var.name,))
        chain, reason = self._grow(var)
        exit_ = chain.members[-1] if chain.members else var
        self._claimed.update(chain.members)
        epilogue = Epilogue(tuple(chain.steps), tuple(chain.operands))
        if isinstance(anchor, Matmul):
            anchor, epilogue, exit_ = self._absorb_output(anchor, epilogue, exit_)
        exit_ = self._past_reshapes(exit_)
        crossed = dict.fromkeys(text for member in chain.members for text in self._crossed.get(member.name, ()))
        return FoundSite(
            name=_name([var, *chain.members]),
            workload=Workload(anchor, epilogue),
            inputs=(*inputs, *chain.inputs),
            result=exit_,
            ops=tuple(op_name(self._value[m]).removeprefix("nn.") for m in chain.members),
            crossed=tuple(crossed),
            reason=reason,
            members=tuple(member.name for member in (var, *chain.members)),
        )

    # The anchor ----------------------------------------------------------------------------------------------------------------------

    def _anchor(self, call: Call) -> tuple[Anchor, list[Expr]] | None:
        name = op_name(call)
        if name == "call_tir" and call.args[0].name_hint in self._recurrences:
            fields = json.loads(self._recurrences[call.args[0].name_hint])
            inputs = list(call.args[1].fields)
            return (Recurrent(**fields), inputs) if array_of(inputs[1]) is not None else None
        if name not in ("matmul", "nn.conv2d", "nn.conv2d_transpose") or not all(is_static(arg) for arg in call.args[:2]):
            return None
        if dtype_of(call) not in REDUCED_IN or any(dtype_of(arg) != dtype_of(call) for arg in call.args[:2]):
            return None
        if 0 in shape_of(call) or any(0 in shape_of(arg) for arg in call.args[:2]):
            return None
        if name == "matmul":
            return self._matmul(call)
        return self._convolution(call)

    def _matmul(self, call: Call) -> tuple[Anchor, list[Expr]] | None:
        a, b = call.args
        if len(shape_of(a)) != len(shape_of(b)) or len(shape_of(a)) not in (2, 3):
            return None
        batched = len(shape_of(a)) == 3
        *batch, m, k = shape_of(a)
        n = shape_of(b)[-1]
        if batched and shape_of(a)[0] != shape_of(b)[0]:
            return None
        labels_a, labels_b = ("bmk", "bkn") if batched else ("mk", "kn")
        a, order_a = self._absorb_input(a, labels_a)
        constant_b = isinstance(b, GenericConst)
        order_b = labels_b
        if not constant_b:
            b, order_b = self._absorb_input(b, labels_b)
        anchor = Matmul(batch[0] if batched else 1, m, n, k, order_a, order_b, labels_a.replace("k", "n"), constant_b, dtype_of(call))
        return anchor, [a, b]

    def _convolution(self, call: Call) -> tuple[Anchor, list[Expr]] | None:
        """Convolutions with constant weights; the canonical weight layouts are OHWI and, transposed, IHWO."""
        x, weight = call.args
        attrs = call.attrs
        if array_of(weight) is None:
            return None
        top, left, bottom, right = (int(p) for p in attrs.padding)
        stride, dilation = tuple(map(int, attrs.strides)), tuple(map(int, attrs.dilation))
        common: dict[str, Any] = dict(
            stride=stride, padding=(top, left, bottom, right), dilation=dilation, groups=int(attrs.groups), dtype=dtype_of(call)
        )
        if (op_name(call), attrs.data_layout, attrs.kernel_layout, attrs.out_layout) == ("nn.conv2d", "NCHW", "OHWI", "NCHW"):
            if stride[1] != 1:
                return None
            n, ci, h, w = shape_of(x)
            co, kh, kw, _ = shape_of(weight)
            return PlanarConv2d(n, h, w, ci, co, kh, kw, **common), [x, weight]
        if attrs.data_layout != "NHWC" or attrs.out_layout != "NHWC":
            return None
        n, h, w, ci = shape_of(x)
        if op_name(call) == "nn.conv2d" and attrs.kernel_layout == "OHWI":
            co, kh, kw, _ = shape_of(weight)
            return Conv2d(n, h, w, ci, co, kh, kw, **common), [x, weight]
        if op_name(call) == "nn.conv2d_transpose" and attrs.kernel_layout == "IHWO":
            _, kh, kw, per_group = shape_of(weight)
            extra_h, extra_w = map(int, attrs.output_padding)
            return Conv2dTranspose(n, h, w, ci, per_group * int(attrs.groups), kh, kw, output_padding=(extra_h, extra_w), **common), [
                x,
                weight,
            ]
        return None

    # Permutations around a matmul ----------------------------------------------------------------------------------------------------

    def _layout_op(self, var: Expr) -> tuple[Expr, LayoutOp, LayoutOp] | None:
        """(source, the op, its inverse) of a variable that is bound to a layout op."""
        call = self._value.get(var) if isinstance(var, Var) else None
        if call is None or op_name(call) not in ("reshape", "permute_dims") or not is_static(call) or not is_static(call.args[0]):
            return None
        source = call.args[0]
        if op_name(call) == "reshape":
            return source, ("reshape", shape_of(call)), ("reshape", shape_of(source))
        axes = permute_axes(call)
        return source, ("permute", tuple(axes)), ("permute", tuple(int(i) for i in np.argsort(axes)))

    def _absorb_input(self, value: Expr, labels: str) -> tuple[Expr, str]:
        """Look up through layout ops to a tensor that stores the labelled axes in another order; (tensor, order).

        One with several readers stays: they share what its own producer stores.
        """
        extents, best, current = shape_of(value), (value, labels), value
        ops: list[LayoutOp] = []
        through: list[Expr] = []
        while self._read_once(current) and (step := self._layout_op(current)) is not None:
            through.append(current)
            current, _, inverse = step
            ops.append(inverse)
            order = order_of(labels, extents, ops)
            if order is None:
                break
            if inverse[0] == "permute":
                best = current, "".join(order)
                self._claimed.update(through)  # its source has to exist as it is: nobody else may compute it in another order
        return best

    def _read_once(self, value: Expr) -> bool:
        return isinstance(value, Var) and self._flow.readers(value) == 1 and not is_output(value)

    def _past_reshapes(self, exit_: Var) -> Var:
        """Look down through reshapes that alone read the site's result: it is stored in their shape at once."""
        while self._read_once(exit_) and op_name(self._value[user := self._users[exit_][0]]) == "reshape" and is_static(user):
            if user in self._claimed:
                break
            self._claimed.add(user)
            exit_ = user
        return exit_

    def _absorb_output(self, anchor: Matmul, epilogue: Epilogue, exit_: Var) -> tuple[Matmul, Epilogue, Var]:
        """Look down through layout ops as long as they amount to another order with n last."""
        labels = anchor.c
        extents = [anchor.extent(label) for label in labels]
        ops: list[LayoutOp] = []
        best, current = (labels, exit_), exit_
        while self._read_once(current):
            (user,) = self._users[current]
            step = self._layout_op(user)
            if step is None or user in self._claimed:
                break
            ops.append(step[1])
            order = order_of(labels, extents, ops)
            if order is None:
                break
            current = user
            if step[1][0] == "permute" and order[-1] == "n":
                best = "".join(order), current
        stored, exit_ = best
        if stored == labels:
            return anchor, epilogue, exit_
        moved = {labels.index(label): position for position, label in enumerate(stored)}
        operands = tuple(replace(o, axes=tuple(None if axis is None else moved[axis] for axis in o.axes)) for o in epilogue.operands)
        return replace(anchor, c=stored), Epilogue(epilogue.steps, operands), exit_

    # The epilogue --------------------------------------------------------------------------------------------------------------------

    def _grow(self, entry: Var) -> tuple[_Chain, str | None]:
        """The largest epilogue over the anchor's result that one value leaves, and why an op that follows isn't part of it."""
        shape, chain = shape_of(entry), _Chain({entry: "%0"})
        stops: list[_Stop] = []

        def admits(var: Var, _region: set[Var]) -> bool:
            stop = self._extend(chain, var, shape)
            stops.extend([stop] if stop else [])
            return stop is None

        members, beyond = self._flow.grow(entry, admits)
        if beyond:
            chain = _Chain({entry: "%0"})
            for var in members:
                self._extend(chain, var, shape)
        return chain, next((stop.why for stop in stops if stop.wanted), None)

    def _extend(self, chain: _Chain, var: Var, shape: tuple[int, ...]) -> _Stop | None:
        """Add the op bound to `var` to the chain; or say why it can't be."""
        call = self._value[var]
        name = op_name(call)
        if var in self._claimed:
            return _Stop(f"{name} ({var.name}) belongs to another site", wanted=False)
        if name not in EPILOGUE_OPS or not is_static(call):
            return _Stop(f"{name or 'a call'} is not an epilogue op", wanted=False)
        if shape_of(call) != shape:
            return _Stop(f"{name} ({var.name}) changes the shape", wanted=False)
        inputs = [arg for arg in call.args if isinstance(arg, Var | GenericConst) and isinstance(arg.ty, relax.TensorType)]
        operands, values, args = list(chain.operands), list(chain.inputs), []
        for position, value in enumerate(inputs):
            arg = self._argument(chain, call, position, value, shape, operands, values)
            if arg is None:
                return _Stop(f"operand {position} of {name} ({var.name}) can't be read at the anchor's index", wanted=True)
            args.append(arg)
        steps = steps_of(call, args, len(chain.steps) + 1)
        if steps is None:
            return _Stop(f"{name} is not an epilogue op", wanted=False)
        chain.steps += steps
        chain.operands, chain.inputs = operands, values
        chain.values[var] = f"%{len(chain.steps)}"
        chain.members.append(var)
        return None

    def _argument(
        self, chain: _Chain, call: Call, position: int, value: Expr, shape: tuple[int, ...], operands: list[Operand], values: list[Expr]
    ) -> Arg | None:
        if isinstance(value, Var) and value in chain.values:
            return chain.values[value]
        array = array_of(value)
        if array is not None and array.size == 1:
            return float(array.reshape(())[()])
        extents, source, order = shape_of(value), value, None
        if op_name(call) == "nn.prelu" and position == 1:
            axis = int(call.attrs.axis) % len(shape)
            axes: list[int | None] = [axis]
        else:
            first = len(shape) - len(extents)
            axes = [None if extent == 1 else first + i for i, extent in enumerate(extents)]
        if first_mismatch(extents, axes, shape):
            return None
        if array is None:
            labels = "abcdefgh"[: len(extents)]
            source, order = self._absorb_input(value, labels)
            extents, axes = tuple(extents[labels.index(x)] for x in order), [axes[labels.index(x)] for x in order]
        operands.append(Operand(tuple(extents), tuple(axes), dtype_of(value), array is not None))
        values.append(source)
        return f"${len(operands) - 1}"


def _name(members: Sequence[Var]) -> str:
    """The first name that comes from the model; TVM's importer leaves a convolution with a bias to be named by the bias."""
    return next((var.name for var in members if not re.fullmatch(r"(lv|gv)\d*", var.name)), members[0].name)


def first_mismatch(extents: Sequence[int], axes: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Whether an operand has an axis of another extent than the output axis that it follows."""
    return any(axis is not None and (axis < 0 or extent != shape[axis]) for extent, axis in zip(extents, axes, strict=True))
