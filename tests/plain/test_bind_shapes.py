"""Free dimensions are bound by name or input by input; what doesn't fit is said with the call that would."""

from __future__ import annotations

import pytest

from tvmfuse.errors import ModelError, UsageError
from tvmfuse.model.shapes import bind

MODEL = '"enc.onnx"'
DECLARED = {"x": (1, 3, "S", 32), "y": ("S", None), "z": (None, 4)}


def test_a_name_binds_every_input_that_has_it():
    assert bind({"x": (1, "S"), "y": ("S",)}, {"S": 5}, MODEL) == {"x": (1, 5), "y": (5,)}


def test_a_whole_input_binds_its_names_elsewhere_too():
    assert bind({"x": (1, "S"), "y": ("S",)}, {"x": (1, 5)}, MODEL) == {"x": (1, 5), "y": (5,)}


def test_a_fixed_model_needs_nothing():
    assert bind({"x": (2, 3), "scalar": ()}, None, MODEL) == {"x": (2, 3), "scalar": ()}


def test_an_input_of_unknown_rank_is_bound_whole():
    assert bind({"x": None}, {"x": (2, 3)}, MODEL) == {"x": (2, 3)}


def test_unnamed_dimensions_are_different_ones():
    assert bind({"x": (None, None)}, {"x": (2, 3)}, MODEL) == {"x": (2, 3)}


def test_an_unbound_name_shows_input_dimension_and_call():
    with pytest.raises(ModelError) as error:
        bind({"feat": (1, "S")}, None, MODEL)
    assert str(error.value) == (
        "input 'feat' leaves dimension 1 ('S') of (1, S) open. Bind it with the extents you will run: "
        'tvmfuse.build("enc.onnx", shapes={"S": 1})'
    )


def test_the_call_binds_everything_at_once():
    with pytest.raises(ModelError, match=r'shapes=\{"S": 7, "y": \(7, 1\), "z": \(1, 4\)\}') as error:
        bind(DECLARED, {"S": 7}, MODEL)
    assert bind(DECLARED, {"S": 7, "y": (7, 1), "z": (1, 4)}, MODEL)
    assert "'x'" not in str(error.value)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"T": 1}, r"\{'T': 1\} binds nothing. Free dimensions \(a number each\): S. Inputs .*: x \(1, 3, S, 32\), y \(S, \?\)"),
        ({"w": (1, 2)}, "binds nothing"),
        ({"x": 3}, "binds nothing"),
        ({"S": (1, 2)}, "binds nothing"),
        ({"x": (3, 5, 32)}, "3 dimensions .* the model has 4"),
        ({"x": (2, 3, 5, 32)}, "dimension 0 of 'x' the extent 2, but 1 is 1"),
        ({"S": 4, "x": (1, 3, 5, 32)}, "dimension 2 of 'x' the extent 5, but 'S' is 4"),
        ({"x": (1, 3, 5, 32), "y": (6, 1)}, "dimension 0 of 'y' the extent 6, but 'S' is 5"),
        ({"S": 0}, "positive whole number"),
        ({"S": 2.0}, "positive whole number"),
        ({"S": True}, "positive whole number"),
    ],
)
def test_what_does_not_fit_is_a_usage_error(shapes, said):
    with pytest.raises(UsageError, match=said):
        bind(DECLARED, shapes, MODEL)
