"""What the layers that can't see each other have to agree on."""

from __future__ import annotations

from tvmfuse import kernel
from tvmfuse.decide import cost_model


def test_the_cost_model_knows_every_family_by_name() -> None:
    assert set(cost_model.FAMILIES) == set(kernel.FAMILIES)
