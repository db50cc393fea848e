"""The report's page: whole without anything else, right in what it shows, and alive in a browser where one is installed."""

from __future__ import annotations

import dataclasses
import html.parser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tvmfuse.report.axis import Axis
from tvmfuse.report.findings import Findings, KernelLine, SiteLine, Timing
from tvmfuse.report.page import number_text, render, time_text
from tvmfuse.values import Level, Roofline

HOSTILE = """"><script>document.title='owned'</script><img src=x onerror="document.title='owned'">'{{ 7 * 7 }}&amp;"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def site(name: str, **changes: object) -> SiteLine:
    plain = SiteLine(
        name=name,
        anchor="matmul 8x8x8",
        epilogue="add relu",
        crossed="reshape (8,8)->(1,8,8)",
        placement="register 2/2",
        state="fused",
        decided=False,
        why="default: not measured here yet",
        hint=None,
        ratio=None,
        ci=None,
        rivals=(),
        predicted_s=2e-6,
        bound_s=1e-6,
        bytes_saved=512,
        blocked=(),
    )
    return dataclasses.replace(plain, **changes)


FINDINGS = Findings(
    model="enc.onnx",
    timings=[
        Timing("tuned", (9e-4, 1e-3, 1.1e-3), (1.0, 1.0, 1.0)),
        Timing("always fused", (1.0e-3, 1.1e-3, 1.2e-3), (1.05, 1.1, 1.15)),
        Timing("never fused", (1.1e-3, 1.25e-3, 1.3e-3), (1.2, 1.25, 1.3)),
    ],
    noise=(0.99, 1.01),
    rounds=42,
    sites=[
        site("conv1", decided=True, ratio=0.9, ci=(0.88, 0.92), placement="tile 2/2", why="measured: at least 8.0% faster"),
        site("conv2", decided=True, rivals=(("separate@0 mr=6", 1.05, (1.01, 1.09)),), state="separate", placement="separate 0/2"),
        site("conv3", hint="tile@2 was best on another CPU", blocked=("add stays below reshape: `v` is a graph output",)),
        site(HOSTILE, state="bare", placement="–"),
    ],
    kernels=[
        KernelLine("fused_a", ("conv1",), 1, 3e-4, 10**7, 10**5, 2e-4),
        KernelLine("fused_b", (HOSTILE,), 2, 5e-4, 10**6, 10**6, 1e-4),
        KernelLine("copy", (), 1, 1e-4, 0, 10**5, 5e-5),
    ],
    roofline=Roofline(1e11, (Level("L1", 32 << 10, 2e11), Level("L2", 1 << 20, 1e11), Level("DRAM", float("inf"), 3e10)), 1),
    environment=[("CPU", "a CPU"), ("threads", "1 of 2")],
)


class Elements(html.parser.HTMLParser):
    """Start tags with their attributes, and the text of each element with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def of(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.found if t == tag and all(a.get(name.rstrip("_")) == value for name, value in wanted.items())]


PAGE = render(FINDINGS)
ELEMENTS = Elements(PAGE)


def test_limits_that_the_kernels_beat_are_disowned() -> None:
    beaten = [dataclasses.replace(kernel, bound_s=2 * kernel.time_s) for kernel in FINDINGS.kernels]
    said = "slowed the machine while its limits were measured"
    assert said not in render(FINDINGS)
    assert said in render(dataclasses.replace(FINDINGS, kernels=beaten))


def test_counts() -> None:
    assert FINDINGS.counts() == {"found": 4, "fused": 2, "separate": 1, "refused": 1, "undecided": 1}


def test_nothing_is_loaded_from_elsewhere() -> None:
    for _, attributes in ELEMENTS.found:
        for name in ("src", "href", "srcset", "action", "data"):
            assert (attributes.get(name) or "data:,").startswith("data:"), attributes
    assert not re.search(r"@import|url\(|https?://|//cdn", PAGE)
    policy = ELEMENTS.of("meta", **{"http-equiv": "Content-Security-Policy"})[0]["content"]
    assert policy is not None and policy.startswith("default-src 'none'")


def test_names_are_escaped() -> None:
    assert len(ELEMENTS.of("script")) == 1 and not ELEMENTS.of("img")
    assert all(not name.startswith("on") for _, attributes in ELEMENTS.found for name in attributes)
    assert "{{ 7 * 7 }}" in PAGE


def test_each_kernel_with_flop_is_a_point_and_each_kernel_a_line() -> None:
    points, lines = ELEMENTS.of("circle", class_="kernel"), [a for a in ELEMENTS.of("tr") if "data-kernel" in a]
    assert sorted(p["data-kernel"] or "" for p in points) == ["1", "2"]  # by time: fused_b, fused_a; the copy computes nothing
    assert [line["data-kernel"] for line in lines] == ["1", "2", "3"]


def test_points_lie_where_their_values_are() -> None:
    """fused_a does 33 GFLOP/s of 100 at 100 flop per byte: below the flat roof, right of every ridge."""
    point = next(p for p in ELEMENTS.of("circle", class_="kernel") if p["data-kernel"] == "2")
    flat = [a for a in ELEMENTS.of("line", class_="roof") if a.get("x2") == "100%"][0]
    assert float((point["cy"] or "").rstrip("%")) > float((flat["y1"] or "").rstrip("%"))
    assert float((point["cx"] or "").rstrip("%")) > float((flat["x1"] or "").rstrip("%"))


def test_ratios_have_their_intervals() -> None:
    chosen = ELEMENTS.of("circle", class_="dot")
    assert len(chosen) == 1 and len(ELEMENTS.of("g", class_="rival")) == 1
    (interval,) = ELEMENTS.of("line", class_="ci")
    low, ratio, high = (float((text or "").rstrip("%")) for text in (interval["x1"], chosen[0]["cx"], interval["x2"]))
    assert low < ratio < high


def test_a_site_that_stayed_open_is_called_undecided() -> None:
    (_, rival, *_) = FINDINGS.sites
    assert rival.rivals and rival.decided
    bare = dataclasses.replace(rival, state="bare", decided=False)
    assert dataclasses.replace(FINDINGS, sites=[bare]).counts()["undecided"] == 1
    kept, stayed_open = (render(dataclasses.replace(FINDINGS, sites=[dataclasses.replace(rival, decided=d)])) for d in (True, False))
    assert ">undecided, default kept<" in stayed_open and ">undecided, default kept<" not in kept and ">default kept<" in kept


def test_a_model_that_was_never_tuned_says_so() -> None:
    untuned = dataclasses.replace(FINDINGS, sites=[site("conv1")])
    assert "No site of this model was measured" in render(untuned)


def test_a_model_without_sites_or_flop_has_a_page() -> None:
    page = render(dataclasses.replace(FINDINGS, sites=[], kernels=FINDINGS.kernels[2:]))
    assert Elements(page).of("circle", class_="kernel") == []


def test_axes_put_values_in_order_and_ticks_on_round_numbers() -> None:
    linear, log = Axis.around([3.0, 7.3], always=[0.0]), Axis.around([0.02, 5000.0], log=True)
    assert linear.low == 0 and linear.at(0) == 0 and linear.at(7.3) < 100
    assert linear.ticks() == [0, 2, 4, 6]
    assert log.ticks(8) == [0.01, 0.1, 1, 10, 100, 1000, 10000]
    assert Axis.around([0.9, 1.1], log=True).ticks() == [0.9, 0.95, 1.0, 1.05, 1.1]
    assert [Axis(1, 100, True).at(x) for x in (0.5, 1, 10, 100, 1e9)] == [0, 0, 50, 100, 100]


def test_numbers_have_three_digits_and_no_exponent() -> None:
    assert [number_text(x) for x in (0, 0.1, 1.0, 1234.0, 5.678e-5)] == ["0", "0.1", "1", "1230", "0.0000568"]
    assert [time_text(x) for x in (1.5e-7, 5e-5, 7.1e-3, 2.0)] == ["0.150 µs", "50.0 µs", "7.10 ms", "2.00 s"]


TRIAL = """<script>
const said = [];
for (const id of ["site-table", "kernel-table"]) {
  const table = document.getElementById(id), heads = table.tHead.rows[0].cells;
  const ranks = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent.trim()).join("");
  const click = at => {
    heads[at].firstElementChild.focus();
    document.activeElement.click();
    return ranks() + heads[at].getAttribute("aria-sort");
  };
  said.push(click(0), click(0), click(4), click(1));
}
said.push(document.querySelectorAll("details").length, document.querySelectorAll("details[open]").length);
document.title = document.title + " sorted " + said.join(" ");
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize(("width", "unfolded"), [(1200, 1), (600, 0)])
def test_in_a_browser_it_opens_silently_sorts_and_folds(tmp_path: Path, width: int, unfolded: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(PAGE.replace("</body>", TRIAL), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options = ["--enable-logging=stderr", f"--window-size={width},800", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=90, check=True, env={**os.environ, "HOME": str(tmp_path)}
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    # Each table by number up and down, then by ratio or time, then by name.
    sites = "1234ascending 4321descending 1432ascending 4123ascending"
    kernels = "123ascending 321descending 321ascending 321ascending"
    assert title is not None and title[1] == f"enc.onnx · tvmfuse sorted {sites} {kernels} 1 {unfolded}"
