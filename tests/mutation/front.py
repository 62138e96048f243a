"""Mutants of the Python front."""

T = "tests/python/"
FAST = "-knot(compile)and(not(ddp))and(not(process))and(not(export))and(not(transformers))"
MASKS = f"py:{T}test_weight.py {T}test_bad_inputs.py"
WEIGHT = f"py:{T}test_weight.py {T}test_pattern.py {T}test_watched_pattern.py {FAST}"
FILES = f"py:{T}test_serialization.py {T}test_serialization_errors.py {T}test_files.py {FAST}"
DERIVED = f"py:{T}test_derived.py {FAST}"
NETWORKS = f"py:{T}test_feed_forward.py {T}test_chain.py {FAST}"
OPS = f"py:{T}test_ops.py {T}test_ops_errors.py {T}test_implementations.py {T}test_ops_in_torch.py {FAST}"
WIDE = "py:" + " ".join(
    f"{T}test_{name}.py"
    for name in [
        "modules",
        "weight",
        "pattern",
        "watched_pattern",
        "pattern_change",
        "bad_inputs",
        "bad_requests",
        "serialization",
        "serialization_errors",
        "csr",
        "sparsify",
        "drop_in",
    ]
)
WIDE += f" {FAST}"

GROUPS = [
    (
        "python/rarefy/masks.py",
        (MASKS, WIDE),
        [
            (
                "return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])",
                "return shape[0] // block_shape[0], shape[1] // block_shape[1]",
            ),
            ("if pad_rows or pad_cols:", "if pad_rows:"),
            ("if pad_rows or pad_cols:", "if pad_cols:"),
            ("return dense[: shape[0], : shape[1]].contiguous()", "return dense[: shape[0]].contiguous()"),
            (
                "repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)",
                "repeat_interleave(block_shape[1], 0).repeat_interleave(block_shape[0], 1)",
            ),
            ("dense.double(), block_shape), dim=(2, 3))", "dense.double(), block_shape), ord=1, dim=(2, 3))"),
            ("return round(density * blocks)", "return int(density * blocks)"),
            ("return round(density * blocks)", "return int(density * blocks + 0.5)"),
            ("sort(descending=True, stable=True)", "sort(descending=False, stable=True)"),
            ("sort(descending=True, stable=True)", "flip(0).sort(descending=True, stable=True)"),
            (
                "order = torch.randperm(blocks, generator=generator, device=device)",
                "order = torch.arange(blocks, device=device)",
            ),
            (
                "order = torch.randperm(blocks, generator=generator, device=device)",
                "order = torch.randperm(blocks, device=device)",
            ),
            ("other = (mask != 0) & (mask != 1)", "other = mask > 1"),
            (
                "torn = expand_mask(kept, shape, block_shape) & ~mask",
                "torn = expand_mask(kept, shape, block_shape) & mask & ~mask",
            ),
            (".amax(dim=(2, 3))", ".amin(dim=(2, 3))"),
            ("if mask is not None and len(given) > 1:", "if mask is not None and len(given) > 2:"),
            ("if scores is not None and density is None:", "if False:"),
            (
                "if density is None:\n        return torch.ones",
                "if density is None:\n        return torch.zeros",
            ),
            ("if scores.is_complex():", "if False:"),
            ("if bool(scores.isnan().any()):", "if False:"),
            (".sum(dim=(2, 3))", ".amax(dim=(2, 3))"),
            ("if tuple(scores.shape) != grid:", "if False:"),
            ("crow[1:] = counts.cumsum(0)", "crow[:-1] = counts.cumsum(0)"),
            ("counts = block_mask.sum(dim=1)", "counts = block_mask.sum(dim=0)"),
        ],
    ),
    (
        "python/rarefy/checks.py",
        (MASKS, WIDE),
        [
            (
                "if not 0 <= density <= 1 or math.isnan(density):",
                "if not 0 <= density <= 1.5 or math.isnan(density):",
            ),
            (
                "if not 0 <= density <= 1 or math.isnan(density):",
                "if not 0 < density <= 1 or math.isnan(density):",
            ),
            (
                "if not isinstance(density, numbers.Real) or isinstance(density, bool):",
                "if not isinstance(density, numbers.Real):",
            ),
            (
                "if not isinstance(value, numbers.Integral) or isinstance(value, bool):",
                "if not isinstance(value, numbers.Integral):",
            ),
            ("if value < minimum:", "if value <= minimum:"),
            ("if value < minimum:", "if False:"),
            ("if value.layout != torch.strided:", "if False:"),
            (
                "most = tuple(256 * max(1, -(-size // 256)) for size in shape)",
                "most = tuple(512 * max(1, -(-size // 512)) for size in shape)",
            ),
            ("if block_shape[0] > most[0] or block_shape[1] > most[1]:", "if block_shape[0] > most[0]:"),
            ("if len(value) != 2:", "if len(value) < 2:"),
            ("if max(sizes) > _INT32_MAX:", "if False:"),
            ("if isinstance(index, torch.Tensor) and index.device != values.device:", "if False:"),
        ],
    ),
    (
        "python/rarefy/values.py",
        (WEIGHT, WIDE),
        [
            ("        widths[-1] = in_features % block_cols\n", "        pass\n"),
            (
                "stored.rsqrt(), torch.zeros_like(stored)",
                "stored.rsqrt(), torch.ones_like(stored)",
                {"alive": "a row without blocks has no values to draw"},
            ),
            (
                "stored = (block_mask * widths).sum(dim=1).double()",
                "stored = (block_mask * widths).sum(dim=1).double() + 1",
            ),
            ("    if rows:\n        first, end", "    if False:\n        first, end"),
            ("    if cols:\n        blocks", "    if False:\n        blocks"),
            (
                "for axis, inside in ((1, rows % values.shape[1]), (2, cols % values.shape[2])):",
                "for axis, inside in ((1, rows % values.shape[1]),):",
            ),
            (
                "for axis, inside in ((1, rows % values.shape[1]), (2, cols % values.shape[2])):",
                "for axis, inside in ((2, cols % values.shape[2]),):",
            ),
            ("            at[axis] += inside\n", ""),
            ("            at[0] = int(edge[at[0]])\n", ""),
            ("    if dense.is_meta:\n", "    if False:\n"),
            ("    if dense.ndim != 2:\n", "    if False:\n"),
        ],
    ),
    (
        "python/rarefy/sparse_weight.py",
        (WEIGHT, WIDE),
        [
            ("    parameter.grad = grad\n", ""),
            (
                "    torch.autograd.graph.increment_version(parameter)  # a pending backward must notice\n",
                "",
            ),
        ],
    ),
    (
        "python/rarefy/pattern.py",
        (WEIGHT, WIDE),
        [
            ("if value.dtype not in (torch.int32, torch.int64):", "if False:"),
            ("if value.ndim != 1:", "if False:"),
            ("(value > _INT32.max) | (value < _INT32.min)", "value > _INT32.max"),
            ("value.detach().to(torch.int32).contiguous()", "value.detach().to(torch.int32)"),
            (
                "return self.nnzb / blocks if blocks else 0.0",
                "return self.nnzb / max(1, blocks - 1) if blocks else 0.0",
            ),
            ("self.is_padded = any(size % block for", "self.is_padded = all(size % block for"),
            (
                "return self.block_rows() * self.grid[1] + self.indices()[1]",
                "return self.block_rows() * self.grid[0] + self.indices()[1]",
            ),
            ("self.indices()[1] == self.grid[1] - 1", "self.indices()[1] == self.grid[1]"),
            ("return self.indices()[0].clone()", "return self.indices()[0]"),
            ("return self.indices()[1].clone()", "return self.indices()[1]"),
            ("(int(self.indices()[0][-2]), self.nnzb)", "(0, self.nnzb)"),
            (
                "return mine == (other.shape, other.block_shape, other.nnzb)",
                "return mine[:2] == (other.shape, other.block_shape)",
            ),
            (
                "return all(torch.equal(a, b.to(a.device)) for a, b in pairs)",
                "return any(torch.equal(a, b.to(a.device)) for a, b in pairs)",
            ),
        ],
    ),
    (
        "python/rarefy/pattern_weight.py",
        (WEIGHT, WIDE),
        [
            ("if values.device != pattern.device:", "if False:"),
            ("if not values.is_contiguous():", "if False:"),
            ("        check_padding(op, values, pattern)\n\n    # -- what values", "\n    # -- what values"),
            (
                "        zero_padding(self.blocks(self.values), self._pattern)\n        return self\n",
                "        return self\n",
            ),
            ("draw_uniform_(self.values, 1, generator)", "draw_uniform_(self.values, 1, None)"),
            ("draw_uniform_(self.values, 1, generator)", "draw_uniform_(self.values, 2, generator)"),
            (
                "[:, None, None])\n        self.zero_padding_()",
                "[:, None, None])",
                {"alive": "block_row_indices looks at what was written and has zeroed it"},
            ),
            ("if other.shape != self.shape:", "if False:"),
            (
                "            self._settle()  # what is saved can be loaded: indices of one pattern, padding zero …\n",
                "            pass\n",
            ),
        ],
    ),
    (
        "python/rarefy/watched_pattern.py",
        (WEIGHT, WIDE),
        [
            (
                'return (\n            buffers["crow_indices"] is crow\n            and buffers["col_indices"] is col\n',
                'return (\n            buffers["crow_indices"] is crow\n',
            ),
            ("            and col._version == col_version\n        )\n", "        )\n"),
        ],
    ),
    (
        "python/rarefy/pattern_state.py",
        (WEIGHT, WIDE),
        [
            (
                "        if index.shape != mine.shape:\n            if weight.strict_pattern:\n",
                "        if index.shape != mine.shape:\n            if False:\n",
            ),
            (
                "            if weight.strict_pattern:\n                (at,)",
                "            if False:\n                (at,)",
            ),
            ("            if not bool(differs.any()):\n", "            if True:\n"),
            (
                "if (changed or not weight._pattern_known) and not crow.is_meta:",
                "if changed and not crow.is_meta:",
            ),
            ("        if tuple(values.shape) != expected:\n", "        if False:\n"),
            ("        if not brought.is_meta:\n", "        if False:\n"),
            ("    elif changed:\n", "    elif False:\n"),
        ],
    ),
    (
        "python/rarefy/foreign.py",
        (f"py:{T}test_weight.py", WIDE),
        [
            ("if padded != tuple(shape) and not pad:", "if padded != tuple(shape) and pad:"),
            ("if _round_up(shape, block_shape) != tuple(padded):", "if False:"),
            (
                "values = tensor.values().detach().clone(memory_format=torch.contiguous_format)",
                "values = tensor.values().detach()",
            ),
            ("    matrix.sort_indices()\n", ""),
            (
                "    matrix = matrix.copy()\n    matrix.sum_duplicates()\n    matrix.sort_indices()",
                "    matrix = matrix.copy()\n    matrix.sort_indices()",
            ),
            (
                "    matrix = matrix.copy()\n    matrix.sum_duplicates()\n    matrix.resize",
                "    matrix.sum_duplicates()\n    matrix.resize",
            ),
            ("if values.dtype in (torch.bfloat16, torch.float16):", "if False:"),
            (".detach().cpu().numpy().copy() for t", ".detach().cpu().numpy() for t"),
        ],
    ),
    (
        "python/rarefy/serialization.py",
        (FILES, WIDE),
        [
            ("        if tensor.is_meta:\n", "        if False:\n"),
            ("if key.endswith(reserved_endings()) and key not in pieces:", "if False:"),
            ("if not isinstance(key, str) or not isinstance(text, str):", "if not isinstance(key, str):"),
            ("        if key in state:\n", "        if False:\n"),
            ("        if text in state:\n", "        if False:\n"),
            ("    if KEY in metadata:\n", "    if False:\n"),
            ("if shared is None and tensor.numel() and view in seen:", "if shared is None and view in seen:"),
            ("if shared is None and tensor.numel() and view in seen:", "if False:"),
            ("tensor.detach().clone() if storage in storages else tensor.detach()", "tensor.detach()"),
            ("kept[name] = tensor.contiguous().cpu()", "kept[name] = tensor.cpu()"),
            (
                '        with replacing(path) as temporary, growing(temporary, total, f"writing {path.name}"):\n            save_tensors(tensors, temporary, metadata=metadata)',
                "        save_tensors(tensors, path, metadata=metadata)",
            ),
            (
                '    if missing:\n        fail(op, f"{name} must have',
                '    if False:\n        fail(op, f"{name} must have',
            ),
            (
                "view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)",
                "view = (storage, tensor.shape, tensor.stride(), tensor.dtype)",
            ),
        ],
    ),
    (
        "python/rarefy/files.py",
        (FILES, WIDE),
        [
            ("        _sync(temporary)\n", ""),
            ("            _sync(path.parent)\n", "            pass\n"),
            ("        temporary.chmod(mode)  # the writer may have put a file of its own there\n", ""),
            ("        temporary.unlink(missing_ok=True)\n", "        pass\n"),
            ("os.O_WRONLY | os.O_CREAT | os.O_EXCL", "os.O_WRONLY | os.O_CREAT"),
        ],
    ),
    (
        "python/rarefy/loading.py",
        (FILES, WIDE),
        [
            ("    if missing := expected - set(tensors):\n", "    if missing := set():\n"),
            ("    if unexpected := set(tensors) - expected:\n", "    if unexpected := set():\n"),
            ("if not _same_bits(tensor, tensors[twin]):", "if False:"),
            ("            parameter.data = parameter.data.clone()\n", "            pass\n"),
            ("    if target.shape != tensor.shape:\n", "    if False:\n"),
            ("    if mine != theirs:\n", "    if False:\n"),
            ("    if expanded and not target.is_meta:\n", "    if False:\n"),
            ("        weight.requires_grad_(old.requires_grad)\n", ""),
            ("        if mine != tuple(shape):\n", "        if False:\n"),
            ("    if id(target) not in fresh:\n", "    if True:\n"),
        ],
    ),
    (
        "python/rarefy/timing.py",
        (f"py:{T}test_timing.py {T}test_report.py",),
        [
            ("self.dense.median / self.sparse.median", "self.sparse.median / self.dense.median"),
            (
                "turns = ((dense, times[0]), (sparse, times[1]))",
                "turns = ((dense, times[1]), (sparse, times[0]))",
            ),
            ("if self.waited > MOST_WAITED:", "if self.waited > 10 * MOST_WAITED:"),
            ("if self.ratios and max(self.ratios) > _MOST_APART * min(self.ratios):", "if False:"),
            ("any(t.upper > _MOST_SPREAD * t.lower for", "all(t.upper > _MOST_SPREAD * t.lower for"),
            ("waited = max(in_queue, wall - cpu) / wall", "waited = in_queue / wall"),
            ("waited = max(in_queue, wall - cpu) / wall", "waited = (wall - cpu) / wall"),
            ("    for function in (dense, sparse):\n        function()\n", ""),
            ("key=lambda times: times.waited", "key=lambda times: -times.waited"),
            ('generator = torch.Generator("cpu").manual_seed(0)', "generator = torch.manual_seed(0)"),
            ("if len(times[0]) % 2 == 0 else reversed(turns)", ""),
        ],
    ),
    (
        "python/rarefy/ops.py",
        (OPS,),
        [
            ("return 8 + row_count + 1 + col_count + 1", "return 8 + row_count + col_count + 1"),
            ("cast(bias), out_features, in_features)", "bias, out_features, in_features)"),
        ],
    ),
    (
        "python/rarefy/op_rules.py",
        (OPS,),
        [
            ("or tensor.dtype == torch.float64:", "or tensor.dtype == torch.float16:"),
            ("if tensor.device.type != device_type:", "if tensor.device.type == device_type:"),
            (
                "return tensor.new_empty((*tensor.shape[:-1], new))",
                "return tensor.new_empty((tensor.shape[0], new))",
            ),
            ("if tensor.dim() == 0 or tensor.shape[-1] != columns:", "if False:"),
        ],
    ),
    (
        "python/rarefy/derived.py",
        (DERIVED,),
        [
            (
                "self.key, prepared_bytes, self.packed_bytes, self.gradient_bytes = sizes(*asked)",
                "self.key, _, self.packed_bytes, self.gradient_bytes = sizes(*asked)\n        prepared_bytes = 0",
            ),
            ("            if self.packed_bytes and not self._packs_in_calls:\n", "            if False:\n"),
            ("parameter.is_inference() or capturing(parameter):", "False:"),
            ("return parameter.data_ptr(), parameter._version", "return parameter.data_ptr(), 0"),
            ("return parameter.data_ptr(), parameter._version", "return 0, parameter._version"),
            ("        if seen != at:\n            packed = None\n", ""),
            ("(now or seen == at or not torch.is_grad_enabled())", "(now or seen == at)"),
            ("(now or seen == at or not torch.is_grad_enabled())", "True"),
            (
                "(now or seen == at or not torch.is_grad_enabled())",
                "(seen == at or not torch.is_grad_enabled())",
            ),
            ("if tracing or values is None:", "if values is None:"),
            ("self._packs_in_calls or not self.packed_bytes", "True"),
            (
                "self._multiplied(dtype_of_product(x) if in_autocast() else x.dtype)",
                "self._multiplied(x.dtype)",
            ),
            (
                "return sum(t.numel() for t in (self.prepared, self._packed[1]) if t is not None)",
                "return sum(t.numel() for t in (self.prepared,) if t is not None)",
            ),
            ("            if kept is not None and kept.packed_bytes:\n", "            if False:\n"),
        ],
    ),
    (
        "python/rarefy/feed_forward.py",
        (NETWORKS,),
        [
            ("hidden = activate(hidden, activation)\n", "pass\n"),
            (
                "activate(linear(x, gate_values, gate_plan, gate_bias, h, k), activation) * hidden",
                "linear(x, gate_values, gate_plan, gate_bias, h, k) * activate(hidden, activation)",
            ),
            ("if torch.is_grad_enabled():  # the gradient's own", "if False:  # the gradient's own"),
            (
                "aliases = {at: args[at].view_as(args[at]) for at in wanted}",
                "aliases = {at: args[at] for at in wanted}",
            ),
            ("hidden = active * up if gated else active", "hidden = active"),
            (
                "(d_hidden * active if gated else activation_gradient(d_hidden, up, activation), uv, up_plan, 1)",
                "(d_hidden if gated else activation_gradient(d_hidden, up, activation), uv, up_plan, 1)",
            ),
            (
                "activation_gradient(d_hidden * up, gate, activation)",
                "activation_gradient(d_hidden, gate, activation)",
            ),
            ("grads[0] = grads[0] + dx if 0 in grads else dx", "grads[0] = dx"),
            (
                "            grads[at + 2] = over_tokens(d)\n",
                "            grads[at + 2] = over_tokens(d) * 0\n",
            ),
            (
                "if all(dims[at] is None for at in _TENSORS[1:]):",
                "if all(dims[at] is None for at in _TENSORS[2:]):",
            ),
            ("if not recorded and not _torch_private.forward_mode():", "if not recorded:"),
        ],
    ),
    (
        "python/rarefy/chain.py",
        (NETWORKS,),
        [
            ("held = _copy(up, x) if x.is_inference() else x", "held = x"),
            (
                "        if self._given is not other._given or self._x_version != other._x_version:\n            return False\n",
                "",
            ),
            ("        if _version(self._x) != self._x_version:\n", "        if False:\n"),
            (" or len({derived[2:] for derived in held}) > 1:", ":"),
            (
                "if torch.is_grad_enabled() and any(t is not None",
                "if torch.is_grad_enabled() and all(t is not None",
            ),
            (
                "if not waits or input._gate is not None or input._activation != NONE:",
                "if not waits or input._gate is not None:",
            ),
            ("        if not inplace:\n", "        if True:\n"),
            ('{"none": "gelu", "tanh": "gelu_tanh"}', '{"none": "gelu", "tanh": "gelu"}'),
            ("not (training and p > 0)", "not training"),
            ("not (training and p > 0)", "p > 0"),
            ("gate, up = (a, b) if b._activation == NONE else (b, a)", "gate, up = (a, b)"),
            ("    if up._activation != NONE:\n        return None\n", ""),
            ("or a is b:", "or False:"),
            ("return bias is None or (bias.dtype == x.dtype and bias.is_contiguous())", "return True"),
            ("if self._value is not None or not runs(down, self._x):", "if not runs(down, self._x):"),
        ],
    ),
    (
        "python/rarefy/fusing.py",
        (NETWORKS,),
        [
            ('            vars(module).pop("waits", None)\n', "            pass\n"),
            (
                "next((layer for layer in after if layer.in_features == up.out_features), None)",
                "next(after, None)",
            ),
        ],
    ),
    (
        "python/rarefy/derivatives.py",
        (f"py:{T}test_derivatives.py", OPS),
        [
            (
                "ctx.save_for_backward(first if needs[1] else None, second if needs[0] else None)",
                "ctx.save_for_backward(first, second)",
            ),
            ("terms = [] if d_first is None else [product(d_first, second)]", "terms = []"),
            (
                "            terms.append(product(first, d_second))\n",
                "            terms = [product(first, d_second)]\n",
            ),
            ("            terms.append(d_bias.expand(*first.shape[:-1], -1))\n", "            pass\n"),
            ("several = dy.dim() > 1  # a single", "several = True  # a single"),
            ("return dy.sum(tuple(range(dy.dim() - 1))) if dy.dim() > 1 else dy", "return dy.sum(0)"),
            ("dvalues = grad_weight(dy, ddx, ctx.plan", "dvalues = grad_weight(ddx, dy, ctx.plan"),
            (
                "ddy = linear(ddx, values, ctx.plan, None, *rest)",
                "ddy = linear(ddx, values, ctx.plan, None, *rest) * 2",
            ),
            ("dx = grad_input(dy, ddvalues, ctx.plan, *ctx.sizes[2:4])", "dx = None"),
            ("ddvalues, needs = compact(ddvalues), ctx.needs_input_grad", "needs = ctx.needs_input_grad"),
        ],
    ),
]
