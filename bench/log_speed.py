"""How long a log of 100,000 records takes to load and to match, and what it weighs before and after compaction.

python -m bench.log_speed [--records 100000] [--together 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from tvmfuse.decide.log import Conditions, Log, Record, to_lines
from tvmfuse.values import Candidate, Epilogue, Host, Matmul, Measurement, Operand, Step, Verdict, Workload

HOST = Host("AuthenticAMD", 25, 17, 1, tuple(f"feature{i}" for i in range(60)), 32 << 10, 1 << 20, 32 << 20, "AMD EPYC")
DEFAULT = Candidate("register", 2, (("ku", 2), ("mr", 1), ("nr", 64), ("threads", 1)))
HERE = Conditions(HOST, 1, {"tvmfuse": "0.1.0", "tvm": "0.27.0.post1", "tvm_ffi": "0.1.14.post1", "llvm": "22"}, "d1", DEFAULT)
EACH = 100  # records a workload, of which six are verdicts and one ends the site


def workload(i: int) -> Workload:
    chain = Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (Operand((64,), (1,), constant=True),))
    return Workload(Matmul(1, 8 + i, 64, 32, "mk", "kn", "mn"), chain)


def records_of(site: Workload) -> list[Record]:
    candidates = [Candidate("register", 2, (("ku", 2), ("mr", 1 + i), ("nr", 64), ("threads", 1))) for i in range(EACH)]
    times = [Record.of(site, Measurement(c, (1.2345678e-5,), default_s=(1.3456789e-5,)), HERE) for c in candidates[:-7]]
    said = [Verdict("wins", c, 0.9 - i / 100, (0.88, 0.92), 0.003, 30, "at least 8 % faster") for i, c in enumerate(candidates[-7:-1])]
    end = Record.of(site, Verdict("keeps default", candidates[0], 1.0, (0.99, 1.01), 0.003, 30, "6 confirmed"), HERE, "site")
    return times + [Record.of(site, verdict, HERE) for verdict in said] + [end]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.log_speed", description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--together", type=int, default=1, help="records written at once, which share a line (default: 1)")
    args = parser.parse_args()
    sites = [workload(i) for i in range(args.records // EACH)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{HOST.key}.jsonl"
        with path.open("wb") as file:  # appending durably, record by record, would take minutes
            for site in sites:
                found = records_of(site)
                for start in range(0, EACH, args.together):
                    file.write(to_lines(found[start : start + args.together]))
        size = path.stat().st_size
        began = time.perf_counter()
        log = Log([folder])
        loaded_s = time.perf_counter() - began
        matched_s = []
        for site in sites:
            began = time.perf_counter()
            match = log.best(site, HOST, 1, HERE.toolchain, lambda _: "d1")
            matched_s.append(time.perf_counter() - began)
            assert match is not None and match.kind == "use"
        began = time.perf_counter()
        log.compact()
        compacted_s = time.perf_counter() - began
        print(
            json.dumps(
                {
                    "records": len(sites) * EACH, "records a line": args.together, "bytes": size, "load_s": loaded_s,
                    "first_match_s": {"median": statistics.median(matched_s), "max": max(matched_s)},
                    "compact_s": compacted_s, "compacted_bytes": path.stat().st_size,
                }
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
