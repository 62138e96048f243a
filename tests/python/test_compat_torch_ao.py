"""rarefy.compat.torch_ao_pruning: torch's numerics where they are right, a test for each mended defect."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.ao import pruning as ao
from torch.ao.pruning._experimental import data_sparsifier
from torch.nn.utils import parametrize

from rarefy.compat import torch_ao_pruning as compat
from rarefy.compat.torch_ao_pruning import (
    BaseDataScheduler,
    DataNormSparsifier,
    SaliencyPruner,
    WeightNormSparsifier,
)
from rarefy.compat.torch_ao_pruning.lightning import PostTrainingDataSparsity, TrainingAwareDataSparsity


def net(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(dtype)


def mask_of(model, name="0") -> torch.Tensor:
    return model.get_submodule(name).parametrizations.weight[0].mask


@pytest.mark.parametrize("norm", [None, 1, 2, torch.abs])
@pytest.mark.parametrize(
    ("level", "block", "zeros"),
    [(0.5, (1, 4), None), (0.5, (1, 4), 2), (1.0, (1, 4), 2), (0.0, (1, 4), 2), (1.0, (4, 4), None),
     (0.3, (4, 4), None), (0.7, (8, 8), 10), (0.5, (1, 1), None), (0.5, (1, 4), 0)],
)  # fmt: skip
def test_masks_are_torchs_where_nothing_is_tied(level, block, zeros, norm):
    models = [net(), net()]
    for model, kind in zip(models, (ao.WeightNormSparsifier, WeightNormSparsifier), strict=True):
        options = {} if norm is None else {"norm": norm}
        sparsifier = kind(level, block, zeros, **options)
        assert isinstance(sparsifier, ao.WeightNormSparsifier)
        sparsifier.prepare(model, None)
        for _ in range(2):
            sparsifier.step()
    for name in ("0", "2"):
        assert torch.equal(mask_of(models[0], name).bool(), mask_of(models[1], name).bool()), name
    sparsifier.squash_mask()
    assert torch.equal(models[1](torch.ones(2, 16)), models[0](torch.ones(2, 16)))


def test_torchs_schedulers_drive_it():
    levels = []
    for kind in (ao.WeightNormSparsifier, WeightNormSparsifier):
        model = net()
        sparsifier = kind(0.5, (1, 1))
        sparsifier.prepare(model, None)
        scheduler = compat.CubicSL(sparsifier, delta_t=1, total_t=4)
        seen = []
        for _ in range(5):
            sparsifier.step()
            scheduler.step()
            seen.append(float((mask_of(model) == 0).double().mean()))
        levels.append(seen)
    assert levels[0] == levels[1] and levels[1][-1] == 0.5


def test_defect_prepare_twice():
    """Groups were added again, and three parametrizations lay on two weights."""
    sparsifier, model = WeightNormSparsifier(), net()
    sparsifier.prepare(model, None)
    with pytest.raises(ValueError, match="prepared once"):
        sparsifier.prepare(model, None)
    assert len(sparsifier.groups) == 2 and len(model[0].parametrizations.weight) == 1
    with pytest.raises(ValueError, match="must not be parametrized"):
        WeightNormSparsifier().prepare(model, [{"tensor_fqn": "0.weight"}])


def test_defect_load_state_dict_took_masks_out_of_the_callers_dict():
    first, second = WeightNormSparsifier(0.7, (1, 1)), WeightNormSparsifier(0.2, (1, 1))
    models = net(), net()
    for sparsifier, model in zip((first, second), models, strict=True):
        sparsifier.prepare(model, None)
        sparsifier.step()
    saved = first.state_dict()
    before = copy.deepcopy(saved)
    second.load_state_dict(saved)
    assert all(torch.equal(saved["state"][k]["mask"], before["state"][k]["mask"]) for k in before["state"])
    assert torch.equal(mask_of(models[0]), mask_of(models[1]))
    assert second.state["0.weight"]["mask"] is mask_of(models[1])
    assert second.groups[0]["sparsity_level"] == 0.7 and second.groups[0]["module"] is models[1][0]


def test_defect_state_dict_had_no_defaults_and_was_alive():
    sparsifier, model = WeightNormSparsifier(0.7, (1, 1)), net()
    sparsifier.prepare(model, None)
    saved = sparsifier.state_dict()
    sparsifier.step()
    assert saved["state"]["0.weight"]["mask"].all() and saved["defaults"]["sparsity_level"] == 0.7
    other = WeightNormSparsifier(0.1)
    other.prepare(net(), None)
    other.load_state_dict(saved)
    assert other.defaults["sparsity_level"] == 0.7


def test_defect_load_state_dict_before_prepare_was_an_attribute_error():
    first = WeightNormSparsifier()
    first.prepare(net(), None)
    with pytest.raises(ValueError, match="prepare"):
        WeightNormSparsifier().load_state_dict(first.state_dict())
    other = WeightNormSparsifier()
    other.prepare(nn.Sequential(nn.Linear(4, 4)), None)
    with pytest.raises(ValueError, match="same tensors"):
        other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="must be of shape"):
        other.load_state_dict(first.state_dict(), strict=False)


def test_defect_blocks_that_do_not_fit():
    """RuntimeError for a 6×10 weight with 2:4."""
    model = nn.Sequential(nn.Linear(10, 6))
    sparsifier = WeightNormSparsifier(1.0, (1, 4), 2)
    sparsifier.prepare(model, None)
    sparsifier.step()
    mask = mask_of(model)
    assert torch.equal(mask[:, :4].sum(1), torch.full((6,), 2.0)) and torch.equal(
        mask[:, 8:].sum(1), torch.full((6,), 2.0)
    )


def test_defect_convolutions_and_half():
    """RuntimeError for 4-D weights, and for float16 on the CPU; bf16 masks became float32."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = nn.Sequential(nn.Conv2d(4, 6, 3)).to(dtype)
        sparsifier = WeightNormSparsifier(0.5, (1, 4), 2)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
        assert mask_of(model).dtype == dtype and int((mask_of(model) == 0).sum()) == 54
    with pytest.raises(ValueError, match="2 or more dimensions"):
        WeightNormSparsifier().prepare(nn.Sequential(nn.Linear(4, 4)), [{"tensor_fqn": "0.bias"}])


def test_defect_ties_lost_whole_rows():
    model = nn.Sequential(nn.Linear(8, 8))
    nn.init.ones_(model[0].weight)
    sparsifier = WeightNormSparsifier(0.5, (1, 1))
    sparsifier.prepare(model, None)
    sparsifier.step()
    assert (mask_of(model) == 0).sum() == 32 and (mask_of(model).sum(1) > 0).all()
    assert (mask_of(model).sum(0) > 0).all()


def test_defect_nan_stayed():
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight[3, 3] = torch.nan
    sparsifier = WeightNormSparsifier(0.1, (1, 1))
    sparsifier.prepare(model, None)
    with pytest.warns(RuntimeWarning, match="NaN"):
        sparsifier.step()
    assert mask_of(model)[3, 3] == 0 and int((mask_of(model) == 0).sum()) == 6


def test_defect_tied_weights_had_two_masks():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    sparsifier = WeightNormSparsifier(0.5, (1, 1))
    sparsifier.prepare(model, None)
    sparsifier.step()
    assert mask_of(model, "a") is mask_of(model, "b")
    sparsifier.squash_mask()
    assert model["a"].weight is model["b"].weight and int((model["a"].weight == 0).sum()) == 32


def test_defect_masks_changed_their_dtype():
    model = net()
    sparsifier = WeightNormSparsifier(1.0, (1, 4), 2)
    sparsifier.prepare(model, None)
    sparsifier.step()
    assert mask_of(model).dtype == torch.float32 and int((mask_of(model) == 0).sum()) == 16 * 24 // 2


def test_defect_names_that_the_model_lacks():
    model = net()
    with pytest.raises(ValueError, match=r"near names: .*0\.weight"):
        WeightNormSparsifier().prepare(model, [{"tensor_fqn": "0.weigth"}])
    with pytest.raises(ValueError, match="with a tensor_fqn"):
        WeightNormSparsifier().prepare(model, [{"module": model[0]}])
    assert not parametrize.is_parametrized(model[0])


@pytest.mark.parametrize("zeros", [5, -1])
def test_zeros_outside_a_block_are_refused(zeros):
    sparsifier = WeightNormSparsifier(0.5, (1, 4), zeros)
    sparsifier.prepare(net(), None)
    with pytest.raises(ValueError, match="zeros_per_block"):
        sparsifier.step()


@pytest.mark.parametrize("norm", ["L1", "L2"])
def test_data_masks_are_torchs_between_the_ends(norm):
    masks = []
    options = {"sparsity_level": 0.5, "sparse_block_shape": (1, 4), "zeros_per_block": 2, "norm": norm}
    for kind in (data_sparsifier.DataNormSparsifier, DataNormSparsifier):
        torch.manual_seed(0)
        sparsifier = kind(data_list=[("x", torch.randn(16, 8))], **options)
        sparsifier.step()
        masks.append(sparsifier.get_mask("x").bool())
    assert torch.equal(*masks)


@pytest.mark.parametrize(("level", "kept"), [(0.0, 1.0), (1.0, 0.0)])
def test_defect_data_masks_of_the_ends_were_overwritten(level, kept):
    sparsifier = DataNormSparsifier(
        data_list=[("x", torch.randn(6, 10))],
        sparsity_level=level,
        sparse_block_shape=(1, 4),
        zeros_per_block=4,
    )
    sparsifier.step()
    assert float(sparsifier.get_mask("x").float().mean()) == kept
    assert sparsifier.get_mask("x").dtype == torch.float32


def pruned(model):
    sparsifier = SaliencyPruner({})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}])
    sparsifier.step()
    return sparsifier


def test_rows_leave_and_layers_shrink():
    model = net()
    norms = model[0].weight.detach().abs().sum(1)
    sparsifier = pruned(model)
    expected = model(torch.ones(2, 16)).detach()
    assert torch.equal(mask_of(model), norms >= norms.sort().values[12])
    small = sparsifier.prune()
    assert small.get_submodule("0").out_features == small.get_submodule("2").in_features == 12
    torch.testing.assert_close(small(torch.ones(2, 16)), expected)


def test_defect_prepared_models_of_rows_did_not_load():
    """FakeStructuredSparsity.state_dict() was empty, so that the mask was missing in the model's."""
    model, other = net(), net()
    pruned(model)
    sparsifier = SaliencyPruner({})
    sparsifier.prepare(other, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5}])
    assert other.load_state_dict(model.state_dict()).missing_keys == []
    assert torch.equal(mask_of(other), mask_of(model)) and not mask_of(other).all()


def test_the_whole_public_surface_is_there():
    public = {name for name in dir(ao) if not name.startswith("_")} - {"scheduler", "sparsifier"}
    assert public <= set(compat.__all__)
    assert all(getattr(compat, name).__module__.startswith(("rarefy", "torch.ao")) for name in compat.__all__)
    model = nn.Sequential(nn.Linear(8, 8))
    diagonal = compat.NearlyDiagonalSparsifier(nearliness=3)
    diagonal.prepare(model, None)
    diagonal.step()
    assert int((mask_of(model) != 0).sum()) == 22
    for kind in (compat.FPGMPruner, compat.LSTMSaliencyPruner):
        assert issubclass(kind, compat.BaseSparsifier) and kind.__doc__


class _Lightning:
    """What a callback sees of a LightningModule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 4))


def test_lightning_callback_after_the_training():
    module = _Lightning()
    before = copy.deepcopy(module.model.state_dict())
    options = {"sparsity_level": 0.5, "sparse_block_shape": (1, 1), "zeros_per_block": 1}
    callback = PostTrainingDataSparsity(DataNormSparsifier, options)
    callback.on_fit_end(None, module)
    assert all(torch.equal(before[k], v) for k, v in module.model.state_dict().items())
    made = callback.sparsified
    assert int((made[2].weight == 0).sum()) == 48 and int((made[3].weight == 0).sum()) == 16
    kept = made[2].weight != 0
    assert torch.equal(made[2].weight[kept], module.model[2].weight[kept])
    assert torch.equal(made[0].weight, module.model[0].weight)  # of four dimensions
    with pytest.raises(TypeError, match=r"\[PostTrainingDataSparsity\] .* BaseDataSparsifier; got Linear"):
        PostTrainingDataSparsity(nn.Linear, {})


def test_lightning_callback_along_a_schedule():
    class Rising(BaseDataScheduler):
        def get_schedule_param(self):
            return {
                name: min(0.75, 0.25 * (self.last_epoch + 1)) for name in self.data_sparsifier.data_groups
            }

    module = _Lightning()
    options = {"sparsity_level": 0.25, "sparse_block_shape": (1, 1), "zeros_per_block": 1}
    callback = TrainingAwareDataSparsity(
        DataNormSparsifier, options, Rising, {"schedule_param": "sparsity_level"}
    )
    callback.on_train_start(None, module)
    gone = []
    for _ in range(4):
        with torch.no_grad():
            module.model[2].weight.add_(0.01)
        callback.on_train_epoch_end(None, module)
        gone.append(int((callback.sparsified[2].weight == 0).sum()))
        left = callback.sparsified[2].weight != 0
        assert torch.equal(callback.sparsified[2].weight[left], module.model[2].weight[left])
    assert gone == [24, 48, 72, 72] and not (module.model[2].weight == 0).any()
    callback.on_train_end(None, module)
    with pytest.raises(TypeError, match="data_scheduler_class must be a BaseDataScheduler; got Linear"):
        TrainingAwareDataSparsity(DataNormSparsifier, options, nn.Linear, {})


@pytest.mark.parametrize("first", [True, False])
def test_embeddings_sparse_and_quantized(first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)).eval()
    dense = model[0].weight.detach().clone()
    compat.post_training_sparse_quantize(
        model, DataNormSparsifier, first, sparsity_level=0.5, sparse_block_shape=(1, 4), zeros_per_block=4
    )
    got = torch.dequantize(model[0].weight())
    step = float((dense.amax(1) - dense.amin(1)).max()) / 255  # zero is between two levels
    gone = (got.abs() <= step).view(20, 4, 4).all(2)
    assert int(gone.sum()) == 40
    kept = ~gone.repeat_interleave(4, 1)
    assert float((got - dense)[kept].abs().max()) <= 1.01 * step
    norms = dense.abs().view(20, 4, 4).sum(2)
    assert float(norms[gone].max()) <= 1.02 * float(norms[~gone].min())


@pytest.mark.parametrize("level", [-0.1, 2.0, math.nan])
@pytest.mark.parametrize("kind", [WeightNormSparsifier, SaliencyPruner])
def test_levels_that_are_no_part_of_a_whole_are_refused(kind, level):
    """Torch's takes 2.0 for 1.0 and -0.1 for 0."""
    model = nn.Sequential(nn.Linear(8, 4))
    sparsifier = kind() if kind is WeightNormSparsifier else kind({})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": level}])
    with pytest.raises(ValueError, match=r"^\[update_mask\] sparsity_level must be in \[0, 1\]; got"):
        sparsifier.step()
    assert model[0].parametrizations.weight[0].mask.all()


@pytest.mark.parametrize("level", [-0.1, 2.0, math.nan])
def test_levels_of_data_are_refused_too(level):
    sparsifier = DataNormSparsifier(sparsity_level=level)
    sparsifier.add_data("x", torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"^\[update_mask\] sparsity_level must be in \[0, 1\]; got"):
        sparsifier.step()
