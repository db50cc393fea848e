"""The values every layer shares: what they accept, how a chain is cut, and that a record's text brings them back."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmfuse.values import (
    AVX2,
    AVX512,
    NEON,
    Candidate,
    Conv2d,
    Conv2dTranspose,
    Elementwise,
    Epilogue,
    Host,
    Matmul,
    Operand,
    Recurrent,
    Step,
    Workload,
)

BIAS = Operand((64,), (1,), constant=True)
RESIDUAL = Operand((32, 64), (0, 1))
# x -> x + bias -> sigmoid -> (x + bias) * sigmoid, so the value of step 1 outlives step 2.
SILU = Epilogue((Step("add", ("%0", "$0")), Step("sigmoid", ("%1",)), Step("mul", ("%1", "%2"))), (BIAS,))
CHAIN = Epilogue((Step("add", ("%0", "$1")), Step("relu", ("%1",)), Step("sub", ("$0", "%2"))), (RESIDUAL, BIAS))
SITE = Workload(Matmul(1, 32, 64, 16), CHAIN)


@st.composite
def epilogues(draw: st.DrawFn) -> Epilogue:
    """Programs of up to six steps, each reading any earlier value, an operand or a literal."""
    operands = (BIAS, RESIDUAL)
    steps = []
    for index in range(draw(st.integers(0, 6))):
        values = st.sampled_from([f"%{i}" for i in range(index + 1)])
        others = st.one_of(values, st.sampled_from(["$0", "$1"]), st.floats(-2, 2))
        steps.append(
            draw(
                st.one_of(
                    st.builds(lambda a: Step("relu", (a,)), values),
                    st.builds(lambda a, b: Step("mul", (a, b)), values, others),
                    st.builds(lambda a, low: Step("clip", (a,), (low, low + 1)), values, st.floats(-2, 2)),
                )
            )
        )
    return Epilogue(tuple(steps), operands)


OPS = {"relu": lambda a: max(a, 0.0), "mul": lambda a, b: a * b}


def evaluate(program: Epilogue, x: float, operands: list[float]) -> float:
    values = [x]
    for step in program.steps:
        read = [a if not isinstance(a, str) else (values if a[0] == "%" else operands)[int(a[1:])] for a in step.args]
        values.append(min(max(read[0], step.params[0]), step.params[1]) if step.op == "clip" else OPS[step.op](*read))
    return values[-1]


def test_chain_can_be_cut_everywhere() -> None:
    assert CHAIN.legal_cuts() == (0, 1, 2, 3)


def test_cut_is_illegal_where_two_values_are_live() -> None:
    assert SILU.legal_cuts() == (0, 1, 3)
    with pytest.raises(ValueError, match=r"cut 2 .* legal: \(0, 1, 3\)"):
        SILU.split(2)


def test_split_renames_values_and_keeps_only_the_operands_read() -> None:
    before, after = CHAIN.split(2)
    assert before == Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (BIAS,))
    assert after == Epilogue((Step("sub", ("$0", "%0")),), (RESIDUAL,))


def test_operand_order_is_the_order_of_reading() -> None:
    assert CHAIN.operand_order(3) == ((1, 0), ())
    assert CHAIN.operand_order(1) == ((1,), (0,))


@given(epilogues(), st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_both_parts_of_every_legal_cut_compute_the_whole(program: Epilogue, x: float, a: float, b: float) -> None:
    operands = [a, b]
    for cut in program.legal_cuts():
        before, after = program.split(cut)
        first, second = program.operand_order(cut)
        middle = evaluate(before, x, [operands[i] for i in first])
        assert evaluate(after, middle, [operands[i] for i in second]) == evaluate(program, x, operands)


@given(epilogues())
def test_workload_survives_its_text(program: Epilogue) -> None:
    workload = Workload(Conv2d(1, 14, 14, 8, 16, 3, 3, padding=(1, 1, 1, 1)), program)
    again = Workload.from_json(json.loads(json.dumps(workload.to_json())))
    assert again == workload
    assert again.hash() == workload.hash()


@pytest.mark.parametrize(
    "anchor",
    [
        Matmul(2, 3, 4, 5, a="mbk", c="mbn"),
        Conv2d(1, 7, 7, 4, 4, 3, 3, groups=4),
        Conv2dTranspose(1, 7, 7, 4, 8, 3, 3, stride=(2, 2)),
        Recurrent("gru", 10, 1, 256),
        Elementwise((2, 3)),
    ],
    ids=lambda anchor: type(anchor).__name__,
)
def test_every_anchor_survives_its_text(anchor) -> None:
    workload = Workload(anchor)
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


def test_candidate_survives_its_text() -> None:
    candidate = Candidate("tile", 2, (("mr", 6), ("nr", 64), ("pad", "copy")))
    assert Candidate.from_json(json.loads(json.dumps(candidate.to_json()))) == candidate
    assert candidate["nr"] == 64


def test_hash_is_pinned() -> None:
    """Committed records name workloads by this hash: a change of it loses them all."""
    assert Workload(Matmul(1, 32, 64, 16)).hash() == "ec069d11731f0709"


def test_hash_depends_on_the_epilogue_and_the_anchor() -> None:
    others = [
        Workload(SITE.anchor),
        Workload(SITE.anchor, SILU),
        Workload(dataclasses.replace(SITE.anchor, m=33), CHAIN),
        Workload(dataclasses.replace(SITE.anchor, constant_b=False), CHAIN),
        Workload(SITE.anchor, dataclasses.replace(CHAIN, operands=(RESIDUAL, dataclasses.replace(BIAS, constant=False)))),
    ]
    assert len({w.hash() for w in [SITE, *others]}) == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step("softmax", ("%0",)), "'softmax' is not an epilogue op"),
        (lambda: Step("add", ("%0",)), "add takes 2 arguments"),
        (lambda: Step("clip", ("%0",), (0.0,)), r"clip takes 1 arguments and parameters \('low', 'high'\)"),
        (lambda: Operand((64, 1), (1,)), "operand has 2 axes but names 1"),
        (lambda: Operand((64,), (None,)), "leaves an axis unmapped whose extent is not 1"),
    ],
)
def test_malformed_values_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "damage", [{}, {"anchor": {"type": "Fft"}, "epilogue": {}}, {"anchor": {"type": "Matmul", "m": 1}, "epilogue": {"steps": []}}]
)
def test_text_that_is_no_workload_is_refused(damage: dict) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Workload.from_json(damage)


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (Conv2d(1, 224, 224, 3, 64, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3)), (112, 112)),  # ResNet's stem
        (Conv2d(1, 224, 224, 3, 96, 7, 7, stride=(2, 2)), (109, 109)),
        (Conv2d(1, 14, 14, 8, 8, 1, 1), (14, 14)),
        (Conv2d(1, 13, 17, 8, 8, 3, 3, dilation=(2, 2)), (9, 13)),
        (Conv2d(1, 5, 6, 8, 8, 2, 3, padding=(1, 1, 0, 1)), (5, 6)),
        (Conv2dTranspose(1, 4, 4, 8, 8, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1), output_padding=(1, 1)), (8, 8)),
        (Conv2dTranspose(1, 1, 8, 8, 8, 1, 3, stride=(1, 2), padding=(0, 1, 0, 1), output_padding=(0, 1)), (1, 16)),
        (Conv2dTranspose(1, 5, 5, 8, 8, 3, 3, dilation=(2, 2)), (9, 9)),
    ],
    ids=str,
)
def test_output_size(conv: Conv2d | Conv2dTranspose, size: tuple[int, int]) -> None:
    assert (conv.oh, conv.ow) == size
    assert conv.output_shape() == (1, *size, conv.co)


def test_depthwise_is_a_family_of_its_own() -> None:
    assert Conv2d(1, 7, 7, 32, 32, 3, 3, groups=32).family == "depthwise"
    assert Conv2d(1, 7, 7, 32, 64, 3, 3, groups=32).family == "conv2d"
    assert Conv2d(1, 7, 7, 1, 1, 3, 3, groups=1).family == "conv2d"


def test_flop_counts_multiply_and_add() -> None:
    assert Matmul(2, 3, 4, 5).flop() == 2 * 2 * 3 * 4 * 5
    assert Conv2d(1, 4, 4, 8, 16, 1, 1).flop() == 2 * 16 * 8 * 16
    assert Conv2d(1, 4, 4, 8, 8, 1, 1, groups=8).flop() == 2 * 16 * 8


def test_matmul_shapes_follow_the_axis_order() -> None:
    matmul = Matmul(2, 3, 4, 5, a="mbk", b="kn", c="mbn")
    assert matmul.input_shapes() == ((3, 2, 5), (5, 4))
    assert matmul.output_shape() == (3, 2, 4)


def test_workload_reads_as_one_line() -> None:
    assert str(SITE) == "matmul 32x64x16 bmk,bkn->bmn | add(%0, $1) relu(%1) sub($0, %2)"
    assert str(Workload(Conv2d(1, 7, 7, 8, 8, 3, 3, padding=(1, 1, 1, 1), groups=8))) == "depthwise 1x7x7x8->8 k3x3 p(1,1,1,1) g8"


def test_output_dtype_is_the_last_step_s() -> None:
    assert Workload(Matmul(1, 2, 3, 4)).output_dtype == "float32"
    assert Workload(Matmul(1, 2, 3, 4), Epilogue((Step("cast", ("%0",), dtype="float16"),))).output_dtype == "float16"


@pytest.mark.parametrize(("isa", "lanes"), [(AVX512, 16), (AVX2, 8), (NEON, 4)])
def test_lanes_of_float32(isa, lanes: int) -> None:
    assert isa.lanes() == lanes
    assert isa.lanes("float16") == 2 * lanes


def test_host_key_changes_with_a_feature() -> None:
    host = Host("AuthenticAMD", 25, 17, 1, ("avx2", "fma"), 32768, 1 << 20, 32 << 20)
    assert host.key.startswith("authenticamd-19-11-1-")
    assert dataclasses.replace(host, features=("avx2",)).key != host.key
    assert dataclasses.replace(host, name="another label").key == host.key
