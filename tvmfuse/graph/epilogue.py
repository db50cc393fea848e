"""Relax elementwise ops in the terms of the epilogue's closed vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.ir import Call

from ..values import Step
from .rewrite import dtype_of, op_name

Arg = str | float
# (call, its arguments as step arguments, number of the step's first result) -> steps; the last one is the op's result
Rule = Callable[[Call, Sequence[Arg], int], list[Step] | None]

RENAMED = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "minimum": "min", "maximum": "max", "power": "pow",
    "less": "less", "greater": "greater", "equal": "equal", "where": "where", "isnan": "isnan", "astype": "cast", "abs": "abs",
    "negative": "neg", "exp": "exp", "log": "log", "sqrt": "sqrt", "erf": "erf", "floor": "floor", "sigmoid": "sigmoid", "tanh": "tanh",
    "nn.relu": "relu", "nn.prelu": "prelu",
}  # fmt: skip


def steps_of(call: Call, args: Sequence[Arg], first: int) -> list[Step] | None:
    """The steps that one Relax op comes to, the first of them numbered `first`; None for an op outside of the vocabulary.

    An op that Relax has in one piece but that is made of others (silu, gelu, selu) becomes those others, each rounded once.
    """
    name = op_name(call)
    if name in RENAMED:
        return [Step(RENAMED[name], tuple(args), dtype=dtype_of(call))]
    rule = COMPOSED.get(name)
    return rule(call, args, first) if rule else None


def _clip(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    low, high = (float(bound.value) for bound in call.args[1:])
    return [Step("clip", (args[0],), (low, high), dtype_of(call))]


def _leaky_relu(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    return [Step("leaky_relu", (args[0],), (float(call.attrs.alpha),), dtype_of(call))]


def _silu(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    dtype = dtype_of(call)
    return [Step("sigmoid", (args[0],), dtype=dtype), Step("mul", (args[0], f"%{first}"), dtype=dtype)]


def _gelu(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    """x * (0.5 + 0.5 * erf(x / sqrt 2)), in the order of TVM's own legalisation."""
    dtype = dtype_of(call)
    return [
        Step("mul", (args[0], math.sqrt(0.5)), dtype=dtype),
        Step("erf", (f"%{first}",), dtype=dtype),
        Step("mul", (f"%{first + 1}", 0.5), dtype=dtype),
        Step("add", (0.5, f"%{first + 2}"), dtype=dtype),
        Step("mul", (args[0], f"%{first + 3}"), dtype=dtype),
    ]


def _gelu_tanh(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    """0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x x))). Source: Hendrycks and Gimpel, arXiv 1606.08415, section 2."""
    dtype = dtype_of(call)
    texts: list[tuple[str, tuple[Arg, ...]]] = [
        ("mul", (args[0], args[0])),
        ("mul", (f"%{first}", 0.044715)),
        ("add", (f"%{first + 1}", 1.0)),
        ("mul", (args[0], math.sqrt(2 / math.pi))),
        ("mul", (f"%{first + 3}", f"%{first + 2}")),
        ("tanh", (f"%{first + 4}",)),
        ("add", (f"%{first + 5}", 1.0)),
        ("mul", (args[0], 0.5)),
        ("mul", (f"%{first + 7}", f"%{first + 6}")),
    ]
    return [Step(op, inputs, dtype=dtype) for op, inputs in texts]


def _selu(call: Call, args: Sequence[Arg], first: int) -> list[Step]:
    """gamma * (x > 0 ? x : alpha * (exp(x) - 1)). Source: Klambauer et al., arXiv 1706.02515."""
    dtype, alpha, gamma = dtype_of(call), 1.6732632423543772, 1.0507009873554805
    return [
        Step("exp", (args[0],), dtype=dtype),
        Step("sub", (f"%{first}", 1.0), dtype=dtype),
        Step("mul", (f"%{first + 1}", alpha), dtype=dtype),
        Step("greater", (args[0], 0.0), dtype="bool"),
        Step("where", (f"%{first + 3}", args[0], f"%{first + 2}"), dtype=dtype),
        Step("mul", (f"%{first + 4}", gamma), dtype=dtype),
    ]


def _softplus(call: Call, args: Sequence[Arg], first: int) -> list[Step] | None:
    if float(call.attrs.beta) != 1.0:
        return None
    return [Step("softplus", (args[0],), dtype=dtype_of(call))]


COMPOSED: dict[str, Rule] = {
    "clip": _clip,
    "nn.leakyrelu": _leaky_relu,
    "nn.silu": _silu,
    "nn.gelu": _gelu,
    "nn.gelu_tanh": _gelu_tanh,
    "nn.selu": _selu,
    "nn.softplus": _softplus,
}
