"""`python -m bench.verdicts` in pieces: the tries of earlier runs of the same kind count."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import verdicts


def test_tries_of_earlier_runs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def two_pieces(tries: int, gain: bool, begin: int, seconds: float) -> Iterator[Counter[str]]:
        assert (tries, seconds) == (200, 60)
        assert begin in (0, 16)
        for _ in range(2):
            yield Counter({"keeps default": 7, "wins" if gain else "undecided": 1})

    def tried(*options: str) -> dict[str, object]:
        record = ["--record", str(tmp_path / "tries.jsonl"), "--seconds", "60"]
        monkeypatch.setattr(sys, "argv", ["verdicts", *record, *options])
        verdicts.main()
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(verdicts, "outcomes", two_pieces)
    plain = {"gain": False, "burn": False}
    assert tried() == {"tries": 16, **plain, "keeps default": 14, "undecided": 2}
    assert tried("--gain") == {"tries": 16, "gain": True, "burn": False, "keeps default": 14, "wins": 2}
    assert tried() == {"tries": 32, **plain, "keeps default": 28, "undecided": 4}
