"""What ``paceline eval`` found, as a table for people: on a terminal, in a page, in the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """A table and what there is to say about it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def report_of(document: Mapping[str, Any]) -> Report:
    """The table of an evaluation; the reference, where there is one, is its first row."""
    reference, windows = document["reference"], document["windows"]
    header = ["model", "weights", "bits", "perplexity", "± 95 %"]
    if reference is not None:
        header += ["change", "mean KL", "± 95 %", "median", "99 %", "99.9 %", "top-1"]
    rows = [_row(model, compared=reference is not None) for model in document["models"]]
    if reference is not None:
        own = _row(reference, compared=False)
        rows.insert(0, own + [""] * (len(header) - len(own)))
    if has_speed := "decode_tokens_per_s" in document["models"][0]:
        header += ["decode", "prefill"]
        for row, model in zip(rows, [*([] if reference is None else [reference]), *document["models"]], strict=True):
            row += [f"{model['decode_tokens_per_s']:,.0f}", f"{model['prefill_tokens_per_s']:,.0f}"]
    stride = f", stride {windows['stride']}" if windows["kind"] == "sliding" else ", of each the second half"
    tokens, number = document["models"][0]["tokens"], windows["number"]
    notes = [
        f"{tokens:,} tokens of {document['text']}, in {number} {windows['kind']} window{'s' * (number != 1)} of "
        f"{windows['context']}{stride}"
    ]
    if reference is not None:
        notes.append(f"reference: the first row, {reference['path']['kv_dtype']} KV; KL(reference || model) in nats")
    if has_speed:
        notes.append("decode and prefill: tokens a second of one stream, medians of rounds in which all took turns")
    return Report(header, rows, notes)


def _row(model: Mapping[str, Any], *, compared: bool) -> list[str]:
    row = [
        model["model"],
        f"{model['bytes'] / 1e6:,.1f} MB",
        f"{model['bits_per_weight']:.2f}",
        f"{model['perplexity']:.3f}",
        _half_width(model["perplexity_ci"], 2),
    ]
    if not compared:
        return row
    return [
        *row,
        f"{100 * (model['perplexity_ratio'] - 1):+.2f} %",
        f"{model['kl_mean']:.5f}",
        _half_width(model["kl_mean_ci"], 5),
        f"{model['kl_median']:.5f}",
        f"{model['kl_p99']:.4f}",
        f"{model['kl_p999']:.4f}",
        f"{100 * model['top1_agreement']:.2f} %",
    ]


def _half_width(interval: Sequence[float] | None, digits: int) -> str:
    """Of an interval, empty where there is none."""
    return "" if interval is None else f"{(interval[1] - interval[0]) / 2:.{digits}f}"
