"""Sparsifier: criterion, pattern, scope and schedule on a model, its optimizer and its checkpoints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.ao.pruning import BaseSparsifier
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..checks import fail
from ..log import progress
from ..report import Report
from . import checkpoint
from .choice import choose_alone, choose_masks
from .conversion import swap, to_sparse
from .criteria import check_sparsity, parse_criterion
from .groups import Config, FilterFn, batches_of, find_groups, observing, run_through
from .masked import Masked
from .masks import Mask
from .patterns import matrix_shape, parse_pattern
from .schedules import parse_schedule
from .scopes import Global, Uniform, parse_allocation, parse_scope
from .table import Table


class Sparsifier(BaseSparsifier):
    """Prunes the weights of a model, at once or while it trains; a torch.ao.pruning.BaseSparsifier.

    sparsifier = Sparsifier(0.9, "magnitude", "block:4x4", schedule="cubic:100:2000:50")
    sparsifier.prepare(model)
    sparsifier.attach(optimizer)
    for batch in data: loss.backward(); optimizer.step(); sparsifier.step()
    sparsifier.squash_mask()

    Args:
        sparsity: the part of the units that leaves in the end, in [0, 1]; None: what the pattern allows
            at most ("2:4": 0.5), else 0.5. Exactly round(sparsity · units) leave each layer, or with other
            scopes all layers together or each row.
        criterion: how much a weight matters; see parse_criterion.
        pattern: what leaves as one; see parse_pattern.
        scope: "local", "per_row", "global" or a Scope; None: "per_row" for Wanda, else "local".
        allocation: how the layers share the sparsity: "uniform", "er", "erk", "owl", "lamp" or an Allocation.
        schedule: when, and how much by then; see parse_schedule. A step that is not due costs nothing.
        in_place: True: weights are zeroed. False: originals are kept under a parametrization (Masked),
            as torch.ao does, until squash_mask().
        ste: with in_place=False, how gradients pass the mask: None, "ste" or "sr-ste"; see Masked.
        regrow: whether masks are made anew from all weights each time; False: what has left stays away.
        seed: of the generator that Random uses.

    `groups` has a dict for each weight, tied ones together, as in torch.ao; "sparsity_level" in it may be
    written by torch.ao's schedulers. `state[fqn]` holds the mask ("mask", a Mask) and what was observed.

    Raises:
        ValueError: names that are not known (near ones are listed), sparsities outside [0, 1] or more than
            the pattern allows, arguments that exclude each other.
        TypeError: arguments of the wrong kind.
    """

    def __init__(
        self,
        sparsity: float | None = None,
        criterion: Any = "magnitude",
        pattern: Any = "unstructured",
        *,
        scope: Any = None,
        allocation: Any = "uniform",
        schedule: Any = "one_shot",
        in_place: bool = False,
        ste: str | None = None,
        regrow: bool = False,
        seed: int = 0,
    ) -> None:
        op = "Sparsifier"
        self.pattern = parse_pattern(pattern, op)
        if sparsity is None:
            sparsity = self.pattern.most if self.pattern.most < 1 else 0.5
        sparsity = check_sparsity(op, "sparsity", sparsity)
        self.pattern.check_sparsity(op, sparsity)
        super().__init__({"sparsity_level": sparsity})
        self.criterion = parse_criterion(criterion, op)
        self.scope = parse_scope(
            ("per_row" if self.criterion.by_row else "local") if scope is None else scope, op
        )
        self.allocation = parse_allocation(allocation, op)
        self.schedule = parse_schedule(schedule, op)
        if isinstance(self.scope, Global) and not isinstance(self.allocation, Uniform):
            fail(op, "a global scope allocates by itself: allocation must be uniform", self.allocation)
        if ste not in (None, "ste", "sr-ste"):
            fail(op, 'ste must be None, "ste" or "sr-ste"', repr(ste))
        if ste is not None and in_place:
            fail(op, "ste needs the originals: in_place must be False", "in_place=True")
        self.in_place, self.ste, self.regrow = in_place, ste, regrow
        self.clock = 0  # steps so far
        self.random = torch.Generator().manual_seed(seed)
        self._model: nn.Module | None = None
        self._levels: dict[str, float] = {}  # of sparsity, when masks were last made
        self._optimizers: list[tuple[Optimizer, list[Any]]] = []
        self._squashed = self._observed = False
        self._targets: dict[str, float] = {}  # the groups' sparsity_level then

    # -- before ---------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, config: Config = None, *, filter_fn: FilterFn | None = None) -> None:
        """Finds the weights and gives them masks that keep everything.

        Args:
            model: changed in place; with in_place=False its weights get a parametrization.
            config: None: every nn.Linear, nn.Conv2d and nn.MultiheadAttention, those in it too. A list of
                dicts with "tensor_fqn", as in torch.ao, or a mapping of regular expressions for whole names
                of layers; the other keys, "sparsity_level" (or "sparsity") and "pattern", hold for those.
            filter_fn: called with name and module; False leaves it out.

        Weights that share a Parameter are one group, under all their names.

        Raises:
            ValueError: prepare was called before; names that the model lacks; a pattern that does not fit.
        """
        op = "prepare"
        if not isinstance(model, nn.Module):
            fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
        if self._model is not None:
            fail(op, "a sparsifier must be prepared once (make another one)", "a second call")
        groups = find_groups(op, model, config, filter_fn)
        for group in groups:
            group["pattern"] = parse_pattern(group.get("pattern", self.pattern), op)
            level = group.pop("sparsity", self.defaults["sparsity_level"])
            group["sparsity_level"] = check_sparsity(op, "sparsity_level", group.get("sparsity_level", level))
            group["pattern"].check_sparsity(op, group["sparsity_level"])
            weight = self._original(group)
            group["pattern"].check_shape(op, group["tensor_fqn"], weight.shape)
            if isinstance(self.scope, Global) and group["pattern"].each_row:
                fail(op, "a global scope needs units of whole layers", group["pattern"])
        self.groups, self._model = groups, model
        for group in groups:
            weight = self._original(group)
            rows, cols = matrix_shape(weight.shape)
            ones = torch.ones(rows, cols, dtype=torch.bool)
            self.state[group["tensor_fqn"]]["mask"] = Mask.pack(ones)
            if not self.in_place:
                masked = Masked(ones.view(weight.shape).to(weight.device), self.ste)
                for _, module, tensor in group["places"]:
                    parametrize.register_parametrization(module, tensor, masked)

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """While it is open, the inputs of the layers are observed, for Wanda, Activation, Hessian and OWL."""
        self._check_prepared("calibration")
        gram = self.criterion.needs == "gram"
        before = {fqn: state.get("tokens", 0) for fqn, state in self.state.items()}
        with torch.no_grad(), observing(self.groups, self.state, gram):
            yield
        if all(state.get("tokens", 0) == before[fqn] for fqn, state in self.state.items()):
            fail("calibration", "data must run through the model", "none")

    def calibrate(self, data: Iterable[Any], forward: Callable[[Any], Any] | None = None) -> None:
        """Runs `data` through the model inside calibration(), with a progress bar on a terminal.

        Args:
            data: batches: a tensor, a tuple of arguments or a dict of them.
            forward: what to do with a batch instead of calling the model.

        Raises ValueError for data that is empty, or not finite or of the wrong width where a layer sees it.
        """
        with self.calibration():
            run_through(self._model, progress(batches_of(data), "calibration", "batch"), forward)

    @torch.no_grad()
    def observe(self) -> None:
        """Adds the present gradients to what the criterion knows; after backward(), before the step.

        attach(optimizer) does it; step() does if nobody did since the last one.
        """
        self._check_prepared("observe")
        self._observed = True
        if self.criterion.needs != "gradient" or self._squashed:
            return
        for group in self.groups:
            original = self._original(group)
            if original.grad is not None:
                shape, state = matrix_shape(original.shape), self.state[group["tensor_fqn"]]
                weight, gradient = original.detach().reshape(shape), original.grad.reshape(shape)
                self.criterion.observe(weight, gradient, state)

    def attach(self, optimizer: Optimizer, *, step: bool = False) -> None:
        """Keeps an optimizer from reviving what has left: gradients, state and (in place) weights stay zero.

        Args:
            optimizer: any torch.optim.Optimizer, also one over other parameters besides.
            step: also call self.step() after each of its steps.

        detach() undoes it.
        """
        self._check_prepared("attach")
        if not isinstance(optimizer, Optimizer):
            fail("attach", "optimizer must be a torch.optim.Optimizer", type(optimizer).__name__, TypeError)

        def before(*_: Any) -> None:
            self.observe()
            self._mask_gradients()

        def after(*_: Any) -> None:
            if self.in_place:
                self._apply()
            if step:
                self.step()

        hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        self._optimizers.append((optimizer, hooks))
        self._mask_state(optimizer)

    def detach(self) -> None:
        """Leaves all optimizers alone again."""
        for _, hooks in self._optimizers:
            for hook in hooks:
                hook.remove()
        self._optimizers.clear()

    # -- steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, use_path: bool = True) -> None:
        """One step of the schedule: makes masks if they are due or a group's "sparsity_level" was changed."""
        self._check_prepared("step")
        if not self._observed:
            self.observe()
        self._observed = False
        now, self.clock = self.clock, self.clock + 1
        if self._squashed:
            return
        levels = {g["tensor_fqn"]: self.schedule.sparsity(now, g["sparsity_level"]) for g in self.groups}
        targets = {g["tensor_fqn"]: g["sparsity_level"] for g in self.groups}
        changed = bool(self._levels) and targets != self._targets
        if self.enable_mask_update and (self.schedule.due(now) or changed):
            self._update(levels)
            self._levels, self._targets = levels, targets
        elif self.in_place:
            self._apply()

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Makes the mask of one weight at its final sparsity now, by itself."""
        group = next(g for g in self.groups if (module, tensor_name) in [(m, t) for _, m, t in g["places"]])
        choose_alone(self, group, group["sparsity_level"])

    def _update(self, levels: dict[str, float]) -> None:
        choose_masks(self, levels)
        for optimizer, _ in self._optimizers:
            self._mask_state(optimizer)

    def _set(self, group: dict[str, Any], mask: Mask) -> None:
        fqn = group["tensor_fqn"]
        if mask.nan:
            text = f"[step] {fqn} has {mask.nan} scores that are NaN; they count as lowest"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        self.state[fqn]["mask"] = mask
        self._show(group)

    def _show(self, group: dict[str, Any]) -> None:
        """Puts a group's mask where the model sees it."""
        mask = self.state[group["tensor_fqn"]]["mask"]
        if self.in_place:
            mask.apply_(self._original(group).data)
            torch.autograd.graph.increment_version(self._original(group))
        else:
            mask.copy_into(self._masked(group).mask)

    def _apply(self) -> None:
        for group in self.groups:
            self.state[group["tensor_fqn"]]["mask"].apply_(self._original(group).data)

    def _mask_gradients(self) -> None:
        if self.ste is not None and not self.in_place:
            return
        for group in self.groups:
            gradient = self._original(group).grad
            if gradient is not None:
                self.state[group["tensor_fqn"]]["mask"].apply_(gradient)

    def _mask_state(self, optimizer: Optimizer) -> None:
        if self.ste is not None and not self.in_place:
            return
        for group in self.groups:
            original = self._original(group)
            for value in optimizer.state.get(original, {}).values():
                if isinstance(value, torch.Tensor) and value.shape == original.shape:
                    self.state[group["tensor_fqn"]]["mask"].apply_(value)

    # -- what the groups mean -------------------------------------------------------------------------

    def _check_prepared(self, op: str) -> None:
        if self._model is None:
            fail(op, "prepare(model) must be called first", "a sparsifier without a model")

    def _masked(self, group: dict[str, Any]) -> Masked:
        return group["module"].parametrizations[group["tensor_name"]][0]

    def _original(self, group: dict[str, Any]) -> torch.Tensor:
        """The Parameter that an optimizer has."""
        module, tensor = group["module"], group["tensor_name"]
        if parametrize.is_parametrized(module, tensor):
            return module.parametrizations[tensor].original
        return getattr(module, tensor)

    def masks(self) -> dict[str, torch.Tensor]:
        """By the name of each weight, a bool tensor of its shape: True stays."""
        shapes = {g["tensor_fqn"]: self._original(g).shape for g in self.groups}
        return {fqn: self.state[fqn]["mask"].unpack().view(shape) for fqn, shape in shapes.items()}

    def report(self) -> Table:
        """What each weight has lost so far, against what was asked."""
        self._check_prepared("report")
        names = [g["tensor_fqn"] for g in self.groups]
        shapes = [tuple(self._original(g).shape) for g in self.groups]
        targets = [self._levels.get(fqn, 0.0) for fqn in names]
        masks = [self.state[fqn]["mask"] for fqn in names]
        return Table.of(names, shapes, [str(g["pattern"]) for g in self.groups], targets, masks)

    # -- after ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def squash_mask(
        self,
        params_to_keep: tuple[str, ...] | None = None,
        params_to_keep_per_layer: Mapping[str, tuple[str, ...]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the masks part of the weights, afterwards plain Parameters with zeros, the same ones.

        Optimizers that are attached go on keeping the zeros. As in torch.ao, `params_to_keep` names keys of
        the groups that are stored as module.sparse_params, `params_to_keep_per_layer` by module name.
        """
        self._check_prepared("squash_mask")
        if self._squashed:
            return
        for group in self.groups:
            of_layer = (params_to_keep_per_layer or {}).get(group["module_fqn"], ())
            keep = (*(params_to_keep or ()), *of_layer)
            for key in keep:
                if key not in group:
                    fail("squash_mask", f"params_to_keep must be of {sorted(group)}", repr(key))
            if keep:
                group["module"].sparse_params = {key: group[key] for key in keep}
        for group in self.groups:
            original = self._original(group)
            if not self.in_place:
                for _, module, tensor in group["places"]:
                    parametrize.remove_parametrizations(module, tensor, leave_parametrized=False)
                    if getattr(module, tensor) is not original:
                        setattr(module, tensor, original)
            self.state[group["tensor_fqn"]]["mask"].apply_(original.data)
        self.in_place, self._squashed = True, True
        for optimizer, _ in self._optimizers:
            self._mask_state(optimizer)

    def convert(
        self,
        module: nn.Module,
        mapping: Mapping[type, Any] | None = None,
        inplace: bool = False,
        parameterization: type = Masked,
        *,
        format: str | None = None,  # noqa: A002
        **options: Any,
    ) -> nn.Module:
        """A model whose pruned layers are sparse ones, by rarefy.sparsify, after squash_mask().

        Args:
            module: the prepared model.
            mapping: as in torch.ao, {nn.Linear: cls} with cls.from_dense(linear) instead of Rarefy's layers.
            inplace: whether `module` itself changes, or a copy.
            parameterization: unused, as torch.ao has it.
            format: what to store, "block:16x16", "csr", "bitmap", "2:4"; None: what the pattern is made of:
                of N:M a bit for each weight, which is for few tokens. Blocks are stored that have a weight
                that stays.
            options: of rarefy.sparsify: measure, tokens, fuse.

        Layers that cannot change, or whose pattern has no format (rows, columns, heads), stay dense with
        their zeros; `self.conversion`, a rarefy.Report, says which and why. Convolutions change where the
        pattern is blocks of one column, or any blocks for 1 × 1, and where `format` says blocks.

        Raises ValueError unless squash_mask() was called (with a `mapping`, it need not be).
        """
        self._check_prepared("convert")
        model = module if inplace else copy.deepcopy(module)
        if mapping is not None:
            swap(model, self.groups, mapping)
            return model
        if not self._squashed:
            fail("convert", "squash_mask() must be called first", "masks that are not part of the weights")
        masks = {fqn: state["mask"] for fqn, state in self.state.items()}
        self.conversion: Report = to_sparse(model, self.groups, masks, format, options)
        return model

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit: copies, ready for torch.save with weights_only loading.

        Bit-packed masks, the clock, targets, what the criterion observed, the generator. Model and optimizer
        are saved by themselves.
        """
        self._check_prepared("state_dict")
        return checkpoint.save(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on where another sparsifier's state_dict() was taken; `state_dict` is not changed.

        Call prepare() with the same model first, and load the model's and the optimizer's state.

        Args:
            state_dict: what state_dict() gave.
            strict: whether the settings (criterion, pattern, scope …) must be the same, too.

        Raises ValueError, before anything changes, for one of another model, of other settings, or no such
        dict.
        """
        self._check_prepared("load_state_dict")
        checkpoint.load(self, state_dict, strict)

    def settings(self) -> dict[str, str]:
        """What it was made with, as text: what a checkpoint must agree in."""
        names = ("criterion", "pattern", "scope", "allocation", "schedule", "ste", "regrow")
        return {name: str(getattr(self, name)) for name in names}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: everything but the hooks of optimizers, which stay with the original."""
        return {**self.__dict__, "_optimizers": [], "random": self.random.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:  # noqa: D105
        self.__dict__.update(state)
        self.random = torch.Generator()
        self.random.set_state(state["random"])

    def __repr__(self) -> str:  # noqa: D105
        settings = {
            "sparsity": self.defaults["sparsity_level"],
            **self.settings(),
            "groups": len(self.groups),
        }
        return f"Sparsifier({', '.join(f'{k}={v}' for k, v in settings.items())})"
