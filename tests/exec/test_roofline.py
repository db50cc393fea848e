"""How this machine's limits are measured."""

from types import SimpleNamespace

import pytest

from tvmfuse.measure import roofline


def test_a_limit_is_the_fastest_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over several calls, most of them interrupted, once gave an L1 of 2 GB/s and kernels three times faster than the peak."""
    asked: list[dict[str, int]] = []

    def time_evaluator(name: str, device: object, **how: int) -> object:
        asked.append(how)
        batches = iter([(9.0, 5.0), (8.0, 2.0), (7.0, 6.0)])
        return lambda *_: SimpleNamespace(results=next(batches))

    clock = iter([0.0, 0.0, 0.0, 1.0])
    monkeypatch.setattr(roofline.tvm, "compile", lambda *_: SimpleNamespace(mod=SimpleNamespace(time_evaluator=time_evaluator)))
    monkeypatch.setattr(roofline.tvm, "IRModule", dict)
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert roofline._seconds(SimpleNamespace(attrs={"global_symbol": "read"}), [1]) == 2.0
    assert [(how["number"], how.get("min_repeat_ms", 0)) for how in asked] == [(1, 0)]
