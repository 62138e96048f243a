"""What the report says: goals, plain sentences on where sparse is not better, and rows of its tables."""

from __future__ import annotations

QUALITY_HEADINGS = ("", "accuracy@1", "accuracy@10")
SPEED_HEADINGS = ("dtype", "batch", "tokens", "dense ms", "sparse ms", "speed-up")
SIZE_HEADINGS = ("MB on disk", "dense", "sparse", "smaller by")
MIN_SPEEDUP = 1.3  # f32, batch 32
MAX_ACC10_LOSS = 0.01
MIN_SAVED = 0.20  # of the linear layers' bytes


def saved(size: dict[str, int]) -> float:
    """Share of the linear layers' bytes that the sparse file does without."""
    return 1 - size["linear_sparse_bytes"] / size["linear_dense_bytes"]


def missed_goals(result: dict) -> list[str]:
    """One plain sentence for each goal of the demo that the result does not reach."""
    missed = []
    row = next(row for row in result["speed"] if (row["batch"], row["dtype"]) == (32, "f32"))
    if row["speedup"] is None:
        missed.append(f"Goal not measured: encoding at batch 32 in f32, for {row['noise']}.")
    elif row["speedup"] < MIN_SPEEDUP:
        missed.append(
            f"Goal missed: encoding at batch 32 in f32 is {row['speedup']:.2f}× dense, not {MIN_SPEEDUP}×."
        )
    dense, sparse = (result["quality"][name]["acc10"] for name in ("dense", "sparse"))
    if dense - sparse > MAX_ACC10_LOSS + 1e-9:
        missed.append(
            f"Goal missed: accuracy@10 is {sparse:.3f} against {dense:.3f} dense, "
            f"more than {MAX_ACC10_LOSS} below."
        )
    if saved(result["size"]) < MIN_SAVED - 1e-9:
        missed.append(
            f"Goal missed: the linear layers are {100 * saved(result['size']):.1f} % smaller, "
            f"not {100 * MIN_SAVED:g} %."
        )
    return missed


def slower_notes(rows: list[dict]) -> list[str]:
    """Plain sentences on where sparse is not faster: at the same dtype, and than dense in bf16."""
    same = [
        f"Batch {row['batch']}, {row['dtype']}: sparse is not faster than dense "
        f"({row['sparse_ms']:.2f} against {row['dense_ms']:.2f} ms)."
        for row in rows
        if row["speedup"] is not None and row["speedup"] <= 1
    ]
    return same + dense_bf16_notes(rows)


def dense_bf16_notes(rows: list[dict]) -> list[str]:
    """One sentence for each batch size at which the dense model in bf16 beats the sparse one in f32."""
    by = {(row["batch"], row["dtype"]): row for row in rows if row["speedup"] is not None}
    return [
        f"Batch {size}: dense bf16 ({by[size, 'bf16']['dense_ms']:.2f} ms) is faster than sparse f32 "
        f"({by[size, 'f32']['sparse_ms']:.2f} ms)."
        for size in sorted({row["batch"] for row in rows})
        if (size, "bf16") in by
        and (size, "f32") in by
        and by[size, "bf16"]["dense_ms"] < by[size, "f32"]["sparse_ms"]
    ]


def quality_rows(result: dict, details: dict) -> list[tuple[str, ...]]:
    """Rows of the table ("", accuracy@1, accuracy@10)."""
    found = result["quality"]
    rows = {
        "dense": found["dense"],
        "sparse, before distillation": details["one_shot"],
        "sparse": found["sparse"],
    }
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
