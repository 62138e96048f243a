"""Bad requests for whole models, each by name: specs, patterns, scores; the model stays as it was."""

import pytest
import torch

import rarefy
from rarefy import BlockSparseLinear, BlockSparseModelPatcher
from refused import assert_refused
from tiny import Tiny, assert_unchanged, snapshot

NAN = float("nan")

# name: (what is done, the error, a part of its text)
CASES = {
    "spec_unreadable": (lambda: rarefy.BlockSpec.parse("16x16@0.5"), ValueError, "spec must look like"),
    "spec_density_text": (
        lambda: rarefy.BlockSpec.parse("block:4x4@half"),
        ValueError,
        "spec must look like",
    ),
    "spec_density_above_one": (
        lambda: rarefy.BlockSpec.parse("block:4x4@1.5"),
        ValueError,
        "density must be in [0, 1]",
    ),
    "spec_density_nan": (
        lambda: rarefy.BlockSpec.parse("block:4x4@nan"),
        ValueError,
        "density must be in [0, 1]",
    ),
    "spec_block_zero": (
        lambda: rarefy.BlockSpec.parse("block:0x4@0.5"),
        ValueError,
        "block_shape[0] must be at least 1",
    ),
    "spec_keys": (
        lambda: rarefy.BlockSpec.parse({"block": (4, 4)}),
        ValueError,
        "or block_shape and density or",
    ),
    "spec_number": (
        lambda: rarefy.BlockSpec.parse(0.5),
        TypeError,
        "spec must be a str or a mapping; got float",
    ),
    "pattern_not_a_regex": (
        lambda: BlockSparseModelPatcher().add_pattern("(", "block:4x4@0.5"),
        ValueError,
        "[add_pattern] pattern must be a regular expression; got '('",
    ),
    "pattern_number": (
        lambda: BlockSparseModelPatcher().add_pattern(3, "block:4x4@0.5"),
        TypeError,
        "pattern must be a str",
    ),
    "no_patterns": (
        lambda: BlockSparseModelPatcher().patch_model(Tiny()),
        ValueError,
        "at least one pattern",
    ),
    "sparsify_a_tensor": (
        lambda: rarefy.sparsify(torch.ones(2), {}),
        TypeError,
        "model must be an nn.Module",
    ),
    "sparsify_a_list": (lambda: rarefy.sparsify(Tiny(), ["once"]), TypeError, "patterns must be a mapping"),
    "desparsify_a_layer": (
        lambda: rarefy.desparsify(BlockSparseLinear(6, 4)),
        TypeError,
        "a layer has .to_dense()",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_request(name):
    assert_refused(*CASES[name])


# Errors that must leave a model as it was.
SPEC = "block:4x4@0.5"
MODEL_CASES = {
    "pattern_matches_nothing": (
        {"encoder.layer.0.output": SPEC},
        {},
        "near names: encoder.layer.0.output.dense",
    ),
    "pattern_is_no_prefix": ({"onc": SPEC}, {}, "near names: once"),
    "second_pattern_matches_nothing": ({"once": SPEC, "nowhere": SPEC}, {}, "'nowhere', which matches none"),
    "second_pattern_shadowed": ({"once|head": SPEC, "once": SPEC}, {}, "that no earlier pattern took"),
    "bad_spec_after_a_good_one": ({"once": SPEC, "head": "block:4x4"}, {}, "spec must look like"),
    "scores_for_unknown_layer": (
        {"once": SPEC},
        {"scores": {"twice": torch.ones(4, 4)}},
        "'twice'; near names: once",
    ),
    "scores_for_unmatched_layer": ({"once": SPEC}, {"scores": {"head": torch.ones(2, 4)}}, "'head'"),
    "scores_of_another_shape": ({".*": SPEC}, {"scores": {"once": torch.ones(3, 3)}}, "layer once"),
    "tokens_zero": ({"once": SPEC}, {"tokens": 0}, "tokens must be at least 1; got 0"),
}


@pytest.mark.parametrize("name", MODEL_CASES)
@pytest.mark.parametrize("dry_run", [False, True])
def test_bad_request_leaves_the_model_alone(name, dry_run):
    patterns, arguments, part = MODEL_CASES[name]
    model = Tiny()
    before = snapshot(model)
    assert_refused(
        lambda: rarefy.sparsify(model, patterns, dry_run=dry_run, measure=False, **arguments),
        ValueError,
        part,
    )
    assert_unchanged(model, before)
