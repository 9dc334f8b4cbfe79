"""Predicted beside measured: collectives and matrix products by size, of public tables.

    python -m benchmarks.microbenchmarks [--plot docs/microbenchmarks.svg] [--brief]

``benchmarks/data/`` holds the tables, with the source of every row. Times of collectives are NCCL's: those of nccl-tests
out of place, and on the H200 the payload over ``algbw`` of stas00's all-reduce benchmark. They are predicted for all ranks
of the machines' presets; so are single bus bandwidths of many machines. Times of products are cuBLAS's, again and again on
the same operands; each is predicted as one kernel of the device's preset.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.log_plot import COLORS, Panel, Series, write_panels
from cost_models.cluster import ClusterSpec
from cost_models.compute import kernel_seconds
from cost_models.conversion import COLLECTIVES, group_links

DATA = Path(__file__).parent / "data"
PER_MACHINE = 8


@dataclass(frozen=True)
class Point:
    """One row beside its prediction. ``size``: bytes of a collective, FLOPs of a product."""

    what: str
    size: float
    measured_seconds: float
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.measured_seconds


@dataclass(frozen=True)
class Curve:
    """The rows of one table, in its order."""

    name: str
    points: tuple[Point, ...]

    @property
    def median_error(self) -> float:
        return statistics.median(abs(point.ratio - 1) for point in self.points)

    @property
    def bias(self) -> float:
        return statistics.median(point.ratio - 1 for point in self.points)


def _rows(file: str) -> list[dict[str, str]]:
    with (DATA / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def _machines(name: str, ranks: int) -> ClusterSpec:
    """Return so many ranks of a machine; the DGX H200 is the H100's with other cards."""
    if name == "dgx-h200":
        return ClusterSpec.model_validate({"nodes": [{"preset": "dgx-h100", "device": "H200-141GB"}]})
    return ClusterSpec.preset(name, nodes=ranks // PER_MACHINE)


def collectives() -> list[Curve]:
    """Predict the collectives' rows."""
    found: dict[str, list[Point]] = {}
    for row in _rows("collectives.csv"):
        ranks, size = int(row["ranks"]), int(row["bytes"])
        kind = next(kind for kind in sorted(COLLECTIVES) if kind == row["collective"])
        links = group_links([range(ranks)], _machines(row["machine"], ranks))
        name = f"{kind} {row['machine']} x {ranks}"
        point = Point(_bytes(size), size, float(row["microseconds"]) * 1e-6, links.seconds(kind, size))
        found.setdefault(name, []).append(point)
    return [Curve(name, tuple(points)) for name, points in found.items()]


def bus_bandwidths() -> list[Curve]:
    """Predict published bus bandwidths of all-reduces: those that the presets of links are made from, and the others."""
    found: dict[str, list[Point]] = {"yes": [], "no": []}
    for row in _rows("bus_bandwidths.csv"):
        cluster, size = ClusterSpec.parse(row["cluster"]), int(row["bytes"])
        ranks = cluster.world_size
        moved = 2 * (ranks - 1) / ranks * size
        seconds = group_links([range(ranks)], cluster).seconds("all_reduce", size)
        name = f"{row['cluster']}, {_bytes(size)}"
        measured = moved / (float(row["gigabytes_per_second"]) * 1e9)
        found[row["in_presets"]].append(Point(name, size, measured, seconds))
    names = {"yes": "all_reduce, rows of the presets", "no": "all_reduce, other rows"}
    return [Curve(names[key], tuple(points)) for key, points in found.items()]


def products() -> list[Curve]:
    """Predict the products' rows."""
    found: dict[str, list[Point]] = {}
    for row in _rows("products.csv"):
        device = ClusterSpec.parse(row["device"]).devices[0]
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        flops, moved = 2 * m * n * k, 2 * (m * k + k * n + m * n)
        seconds = float(kernel_seconds(flops, moved, device, getattr(torch, row["dtype"]), "matmul"))
        measured = flops / (float(row["teraflops"]) * 1e12)
        point = Point(f"{m} x {n} x {k}", flops, measured, seconds + device.kernel_overhead_seconds)
        name = f"product {row['device']} {row['dtype']} {row['source'].split('/')[-2]}"
        found.setdefault(name, []).append(point)
    return [Curve(name, tuple(points)) for name, points in found.items()]


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def report(curves: Sequence[Curve], *, brief: bool = False) -> Iterator[str]:
    """Yield the lines of every table, then a line for each curve."""
    for curve in () if brief else curves:
        yield f"{curve.name:42} {'measured':>12} {'predicted':>12} {'ratio':>6}"
        for point in curve.points:
            measured, predicted = point.measured_seconds * 1e6, point.predicted_seconds * 1e6
            yield f"  {point.what:40} {measured:9.1f} us {predicted:9.1f} us {point.ratio:6.2f}"
        yield ""
    for curve in curves:
        yield (
            f"{curve.name:42} {len(curve.points):3} rows  median |error| {curve.median_error:5.1%}"
            f"  bias {curve.bias:+6.1%}"
        )


def _drawn(curves: Sequence[Curve]) -> tuple[Series, ...]:
    """Draw bytes of the whole tensor per second: measured in full, predicted dashed."""
    lines = []
    for curve, color in zip(curves, COLORS, strict=False):
        for dashed, word in ((False, "measured"), (True, "predicted")):
            points = [
                (
                    point.size,
                    point.size / (point.predicted_seconds if dashed else point.measured_seconds) / 1e9,
                )
                for point in curve.points
            ]
            lines.append(Series(f"{word}: {curve.name}", tuple(points), color, dashed))
    return tuple(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and draw the collectives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="only a line for each curve")
    parser.add_argument("--plot", type=Path, help="draw the collectives into this SVG file")
    options = parser.parse_args(arguments)
    sent, multiplied = collectives(), products()
    print("\n".join(report([*sent, *bus_bandwidths(), *multiplied], brief=options.brief)))
    if options.plot:
        one = [curve for curve in sent if curve.name.endswith(" x 8")]
        more = [curve for curve in sent if curve not in one]
        panels = [
            Panel(f"{where}: GB/s against bytes", "bytes of the whole tensor", _drawn(curves), (0.3, 500.0))
            for where, curves in (("one machine", one), ("several machines", more))
        ]
        write_panels(panels, options.plot)


if __name__ == "__main__":
    main()
