"""What ``benchmarks.dataset`` and ``benchmarks.store`` found: rows of a table, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.measure import MIB

Row = list[str]


def rows_of_dataset(content: dict[str, Any]) -> list[Row]:
    """What was measured, what came out, what was aimed at."""
    samples, epoch = f"{content['samples']:,} samples", content["epoch"]
    peaks = content["peak_bytes"]
    return [
        [
            f"`Variance`, `DiagGGNMC`, `KFAC` of {samples} of 3 x 32 x 32, over an epoch of plain training",
            f"{epoch['compute_over_epoch']['median']:.2f}",
            "2.2",
        ],
        [
            "the same with a checkpoint, over without",
            f"{epoch['checkpoint_over_without']['median']:.2f}",
            "1.02",
        ],
        [
            "samples a second, two processes over one",
            f"{content['ranks']['two_over_one']['median']:.2f}",
            "1.7",
        ],
        *(
            [
                "the same of two processes that know nothing of each other: what the machine gives",
                f"{apart['median']:.2f}",
                "",
            ]
            for apart in [content["ranks"].get("apart_over_one")]
            if apart is not None
        ),
        [
            "peak of live tensors, a tenth of the samples and all",
            f"{peaks['a tenth'] / MIB:.0f} and {peaks['all'] / MIB:.0f} MiB",
            "the same",
        ],
    ]


def rows_of_store(content: dict[str, Any]) -> list[Row]:
    """What was measured, what came out, what was aimed at."""
    search = content["searching"]
    return [
        *(
            [
                f"rate of passes with writing over without, {each['samples']:,} x {each['dimension']:,} in "
                f"half precision, {each['model']}",
                f"{each['rate_with_over_without']:.2f}",
                "0.95",
            ]
            for each in content["writing"]
        ),
        [
            f"exact top {search['k']} of {search['queries']} queries among {search['samples']:,} rows",
            f"{search['seconds']['median']:.2f} s",
            "2 s",
        ],
        *(
            [
                f"projected gradients of the language model, {each['what']}, over plain (processor time)",
                f"{each['over_plain']['median']:.2f} ({each['over_plain']['low']:.2f} to "
                f"{each['over_plain']['high']:.2f})",
                "1.25",
            ]
            for each in content["projecting"]
            if each["what"] != "plain"
        ),
    ]


def draw_course(content: dict[str, Any], path: Path) -> None:
    """Draw throughput and memory of a run from its first batch to its last."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    step = content["samples_of_a_point"]
    for world, rates in content["samples_per_second"].items():
        ranks = int(world)
        samples = [ranks * step * number for number in range(1, len(rates) + 1)]
        label = "one process" if ranks == 1 else f"{ranks} processes"
        left.plot(samples, rates, marker="o", markersize=4, label=label)
    left.set_ylabel("samples a second")
    left.legend(frameon=False)
    peaks = [peak / MIB for peak in content["peak_bytes"]]
    right.plot([step * number for number in range(1, len(peaks) + 1)], peaks, marker="o", markersize=4)
    right.set_ylabel("peak of live tensors, MiB")
    for axes in (left, right):
        axes.set_xlabel("samples so far")
        axes.set_xlim(0, content["samples"])
        axes.set_ylim(0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
