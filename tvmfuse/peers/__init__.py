"""Other runtimes beside ours: which there are, whether they are here, and how they become so."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER_TIMEOUT_S = 300.0
TRIALS, TUNING_TIMEOUT_S = 1200, 3 * 3600.0  # 25 minutes for MobileNetV2 on two cores


@dataclass(frozen=True)
class Peer:
    """A runtime to compare with. `modules` have to be importable; `install` says how they become so.

    threaded    it can use several threads in one call.
    patience_s  how long it may take to load a model.
    usual       it is entered unless somebody says which.
    """

    modules: tuple[str, ...]
    install: str
    threaded: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    patience_s: float = ANSWER_TIMEOUT_S
    usual: bool = True

    def version(self) -> str | None:
        """Of the installed package, None where there is none."""
        from importlib import metadata  # takes as long as the rest of `tvmfuse --help`

        try:
            return metadata.version(self.install.split()[0])
        except metadata.PackageNotFoundError:
            return None

    def absent(self) -> str | None:
        """Why it can't be used, or None."""
        missing = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return f"not installed: pip install {self.install}" if missing else None


PEERS: dict[str, Peer] = {
    "onnxruntime": Peer(("onnxruntime",), "onnxruntime"),
    "openvino": Peer(("openvino",), "openvino"),
    "mnn": Peer(("MNN", "_tools"), "MNN"),
    "tract": Peer(("tract",), "tract", threaded=False),
    "iree": Peer(("iree",), "iree-base-compiler iree-base-runtime"),
    "tvm": Peer(("tvm",), "apache-tvm", threaded=False, options={"pipeline": "default"}),
    "tvm_target": Peer(("tvm",), "apache-tvm", threaded=False, options={"pipeline": "target"}, runtime="tvm"),
    "tvm_tuned": Peer(
        ("tvm",),
        "apache-tvm",
        threaded=False,
        options={"pipeline": "tuned", "trials": TRIALS},
        runtime="tvm",
        patience_s=TUNING_TIMEOUT_S,
        usual=False,
    ),
}
USUAL = tuple(name for name, peer in PEERS.items() if peer.usual)
