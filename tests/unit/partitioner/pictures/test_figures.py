"""Still figures: what they say without colour, that they are well formed, and what cannot be written."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cost_models.errors import UsageError
from partitioner import Plan
from partitioner.pictures.figures import FIGURES, LONGEST_PNG, MOST_COLUMNS, _columns, _write_png
from partitioner.pictures.svg import PALETTE, document, hatch, tint, words
from tests.support.two_layers import two_layers

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return two_layers((64, 256, 64), batch_size=8, microbatches=4, pins={"0": 0, "2": 1})


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_timeline_says_what_its_looks_mean(plan: Plan) -> None:
    svg = plan.figure("timeline")
    assert {"rank 0", "rank 1", "F: forward", "waiting"} <= set(texts(svg))
    assert any(": backward" in text for text in texts(svg))
    assert svg.count(tint(0, 0.4)) >= 8, "four forwards on each rank"


def test_memory_says_the_peak_of_each_lane_in_words(plan: Plan) -> None:
    found = [text for text in texts(plan.figure("memory")) if text.startswith("peak ")]
    assert len(found) == 2
    assert all("parameters" in text for text in found)


def test_the_placement_is_the_drawing_of_the_graph(plan: Plan) -> None:
    assert {"stage 0", "stage 1"} <= set(texts(plan.figure("placement")))


def test_a_figure_is_written(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "figure.svg"
    for kind in FIGURES:
        assert plan.figure(kind, file) == file.read_text("utf-8")  # type: ignore[arg-type]


def test_what_cannot_be_written_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no figure 'flame'"):
        plan.figure("flame")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"neither in \.svg nor in \.png"):
        plan.figure("memory", tmp_path / "figure.gif")


def test_without_cairosvg_the_error_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(UsageError, match=r"pip install 'partitioner\[png"):
        plan.figure("memory", tmp_path / "figure.png")


@pytest.mark.parametrize("kind", FIGURES)
def test_a_png_has_the_figure_in_it(plan: Plan, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("cairosvg", exc_type=Exception)  # an OSError where its library is missing
    file = tmp_path / "figure.png"
    svg = ElementTree.fromstring(plan.figure(kind, file))  # type: ignore[arg-type]
    width, height, pixels = png(file)
    assert (width, height) == (2 * int(svg.attrib["width"]), 2 * int(svg.attrib["height"]))
    assert len(set(pixels)) > 20, "colours and the grey edges of letters"


def test_a_very_long_png_is_made_smaller(tmp_path: Path) -> None:
    pytest.importorskip("cairosvg", exc_type=Exception)
    file = tmp_path / "figure.png"
    _write_png(document(20, 40_000, "long", []), file)
    width, height, _ = png(file)
    assert (width, height) == (16, LONGEST_PNG)


def png(file: Path) -> tuple[int, int, list[bytes]]:
    """Read a PNG's width, height, and the bytes of its lines; the lines are as they were filtered."""
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    parts, place = b"", 8
    while place < len(data):
        size, name = struct.unpack(">I4s", data[place : place + 8])
        parts += data[place + 8 : place + 8 + size] if name == b"IDAT" else b""
        place += size + 12
    width, height = struct.unpack(">II", data[16:24])
    lines = zlib.decompress(parts)
    return width, height, [lines[start : start + 4] for start in range(0, len(lines), 4)]


def test_equal_colours_differ_by_their_hatch() -> None:
    assert tint(0) == tint(len(PALETTE))
    assert hatch(0) is None
    assert hatch(1) != hatch(2)


def test_a_long_chart_keeps_its_peak() -> None:
    stack = [n % 7 for n in range(5000)]
    stack[3333] = 99
    kept = _columns({"seconds": [n / 100 for n in range(5000)], "stacks": [stack]})
    assert 3333 in kept
    assert len(kept) <= MOST_COLUMNS + 1


def test_text_is_escaped() -> None:
    root = ElementTree.fromstring(words(0, 0, "<b>&\"'\x1b[31m\ud800"))
    assert root.text == "<b>&\"'?[31m?"
