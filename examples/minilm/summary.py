"""What the report says: goals, plain sentences on where sparse is not better, and rows of its tables."""

from __future__ import annotations

from .measure import MAX_ACC10_LOSS

QUALITY_HEADINGS = ("", "accuracy@1", "accuracy@10")
SPEED_HEADINGS = ("dtype", "batch", "tokens", "dense ms", "sparse ms", "speed-up")
SIZE_HEADINGS = ("MB on disk", "dense", "sparse", "smaller by")
MODEL_HEADINGS = ("", "accuracy@1", "accuracy@10", "cosine", "ms", "× dense f32")
MIN_SPEEDUP = {"f32": 1.3, "bf16": 1.4}  # batch 32, over dense of the same dtype
MIN_BEST = 1.4  # the best sparse dtype over the best dense one
MIN_OVER_F32 = 2.4  # the best sparse dtype over dense f32
MIN_SAVED = 0.20  # of the linear layers' bytes


def saved(size: dict[str, int]) -> float:
    """Share of the linear layers' bytes that the sparse file does without."""
    return 1 - size["linear_sparse_bytes"] / size["linear_dense_bytes"]


def missed_goals(result: dict) -> list[str]:
    """One plain sentence for each goal of the demo that the result does not reach."""
    missed = []

    def want(speedup: float | None, least: float, what: str, than: str, noise: str | None) -> None:
        if speedup is None:
            missed.append(f"Goal not measured: {what}, for {noise}.")
        elif speedup < least:
            digits = 2 if round(speedup, 2) < least else 4  # not "2.40×, not 2.4×"
            missed.append(f"Goal missed: {what} is {speedup:.{digits}f}× {than}, not {least}×.")

    for dtype, least in MIN_SPEEDUP.items():
        row = next(row for row in result["speed"] if (row["batch"], row["dtype"]) == (32, dtype))
        want(row["speedup"], least, f"encoding at batch 32 in {dtype}", "dense", row["noise"])
    best, noise = result["best"], {row["name"]: row["noise"] for row in result["models"]}
    want(best["speedup"], MIN_BEST, f"the best sparse dtype ({best['sparse']})", best["dense"], best["noise"])
    want(best["over_dense_f32"], MIN_OVER_F32, best["sparse"], "dense f32", noise[best["sparse"]])
    dense = result["quality"]["dense"]["acc10"]
    missed += [
        f"Goal missed: accuracy@10 of {row['name']} is {row['acc10']:.3f} against {dense:.3f} of dense f32, "
        f"more than {MAX_ACC10_LOSS} below."
        for row in result["models"]
        if row["name"].startswith("sparse") and not row["good"]
    ]
    if saved(result["size"]) < MIN_SAVED - 1e-9:
        missed.append(
            f"Goal missed: the linear layers are {100 * saved(result['size']):.1f} % smaller, "
            f"not {100 * MIN_SAVED:g} %."
        )
    return missed


def best_sentence(best: dict) -> str:
    """The best sparse dtype against the best dense one."""
    times = f"{best['sparse']} {best['sparse_ms']:.2f} ms, {best['dense']} {best['dense_ms']:.2f} ms"
    found = best["noise"] if best["speedup"] is None else f"{best['speedup']:.2f}×"
    return f"Best against best at batch 32: {times}: {found}."


def outside_sentences(outside: dict[str, dict[str, float]]) -> list[str]:
    """For each dtype, what of the dense time is not in the layers that became sparse, and what follows."""
    return [
        f"{dtype}: {row['share']:.0%} of dense's time is not in the layers that became sparse; "
        f"if those took no time, the encoder would be {row['bound']:.1f}× as fast."
        for dtype, row in outside.items()
    ]


def slower_notes(rows: list[dict]) -> list[str]:
    """Plain sentences on where sparse is not faster than dense of the same dtype."""
    return [
        f"Batch {row['batch']}, {row['dtype']}: sparse is not faster than dense "
        f"({row['sparse_ms']:.2f} against {row['dense_ms']:.2f} ms)."
        for row in rows
        if row["speedup"] is not None and row["speedup"] <= 1
    ]


def model_rows(result: dict) -> list[tuple[str, ...]]:
    """Rows of the table (model, accuracy@1, accuracy@10, cosine, ms, × dense f32), at batch 32."""
    return [
        (
            row["name"] + ("" if row["good"] else " (not within 0.01)"),
            *(f"{row[key]:.3f}" for key in ("acc1", "acc10")),
            f"{row['mean_cosine']:.4f}",
            f"{row['ms']:.2f}",
            speedup_text(row),
        )
        for row in result["models"]
    ]


def quality_rows(result: dict, details: dict) -> list[tuple[str, ...]]:
    """Rows of the table ("", accuracy@1, accuracy@10)."""
    found = result["quality"]
    rows = {"dense": found["dense"]}
    if "one_shot" in details:  # not where only a saved encoder is measured
        rows["sparse, before distillation"] = details["one_shot"]
    rows["sparse"] = found["sparse"]
    return [(name, f"{row['acc1']:.3f}", f"{row['acc10']:.3f}") for name, row in rows.items()]


def speed_rows(result: dict) -> list[tuple[str, ...]]:
    """Rows of the table (dtype, batch, tokens, dense, sparse, speed-up), medians and quartiles in ms."""
    return [
        (
            row["dtype"],
            str(row["batch"]),
            str(row["tokens"]),
            *(
                "{:.2f} ({:.2f}–{:.2f})".format(row[f"{name}_ms"], *row[f"{name}_quartiles_ms"])
                for name in ("dense", "sparse")
            ),
            speedup_text(row),
        )
        for row in result["speed"]
    ]


def speedup_text(row: dict) -> str:
    """The speed-up of a row; "noise" where the machine was too busy to tell."""
    return "noise" if row["speedup"] is None else f"{row['speedup']:.2f}×"


def size_rows(result: dict) -> list[tuple[str, ...]]:
    """Rows of the table (MB on disk, dense, sparse, smaller by)."""
    rows = []
    for kind, label in (
        ("linear", "linear layers, index included"),
        ("file", "whole file, embeddings dense"),
    ):
        dense, sparse = (result["size"][f"{kind}_{name}_bytes"] for name in ("dense", "sparse"))
        rows.append(
            (label, f"{dense / 1e6:.1f}", f"{sparse / 1e6:.1f}", f"{100 * (1 - sparse / dense):.1f} %")
        )
    return rows
