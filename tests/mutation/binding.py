"""Mutants of the PyTorch binding: tensors and schemas on the way to the core."""

T = "tests/python/"
FAST = "-knot(compile)and(not(ddp))and(not(process))and(not(export))and(not(transformers))"
OPS = f"py:{T}test_ops.py {T}test_ops_errors.py {T}test_implementations.py {T}test_ops_in_torch.py {FAST}"
DERIVED = f"py:{T}test_derived.py {FAST}"
NETWORKS = f"py:{T}test_feed_forward.py {T}test_chain.py {FAST}"
ALLOCATIONS = f"py:{T}test_allocations.py"
CHANGE = f"py:{T}test_pattern_change.py"

GROUPS = [
    (
        "bindings/torch/adapt.cc",
        (OPS,),
        [
            ("if (tensor.size(i) == 1) continue;", ""),
            ("even = even && tensor.stride(i) == rows * row_stride;", ""),
            ("if (rows > 0 && !(even && col_stride == 1)) {", "if (rows > 0 && !even) {"),
            ("product != nullptr && even && row_stride == 1", "product != nullptr && row_stride == 1"),
            ("copied->kernel == in_place->kernel", "true"),
            ("if (rows == 1) row_stride = tensor.stride(i);", "row_stride = tensor.stride(i);"),
            ("if (!values.is_contiguous()) raise", "if (false) raise"),
            ("if (values.dim() != 3) {", "if (values.dim() < 3) {"),
            ("|| bias->size(0) != out_features ||", "||"),
            ("|| !bias->is_contiguous()) {", ") {"),
            ("tensor.dim() != 1 || !tensor.is_contiguous()", "tensor.dim() != 1"),
            (
                "const auto workers = static_cast<int>(std::min<std::int64_t>(tasks, torch::stable::get_num_threads()));",
                "const int workers = 1;",
            ),
            ("if (leading < 0 || tensor.size(leading) != columns) {", "if (leading < 0) {"),
            ("if (float_dtype(argument, tensor) == dtype) return;", "return;"),
            (
                "case StatusCode::type_mismatch: throw TypeMismatch(text);",
                "case StatusCode::type_mismatch: throw std::invalid_argument(text);",
            ),
        ],
    ),
    (
        "bindings/torch/adapt.cc",
        (ALLOCATIONS, OPS),
        [
            ("if (keep && kept && kept->numel() >= bytes) return kept->data_ptr();", ""),
            ("if (keep && kept && kept->numel() >= bytes) return", "if (keep && kept) return"),
            ("const bool narrow = dtype != DType::f64 &&", "const bool narrow ="),
            (
                "shape.nnzb = std::max<std::int64_t>(std::ssize(all) - empty, 0) / step;",
                "shape.nnzb = std::max<std::int64_t>(std::ssize(all) - empty, 0) / (step + 1);",
            ),
            ("data == nullptr && tensor.numel() > 0", "false"),
            ('  check(op_, check_size(op_, "x", "rows, like grad_output", grad_output.rows, x.rows));\n', ""),
            ("values.dim() != 3 || values.size(0) != shape.nnzb ||", "values.dim() != 3 ||"),
            (
                "    if (known == name) return activation;",
                "    if (known.starts_with(name)) return activation;",
            ),
        ],
    ),
    (
        "bindings/torch/tensors.cc",
        (ALLOCATIONS, OPS),
        [
            ("sizes[static_cast<std::size_t>(dimensions - 1)] = columns;", "sizes[0] = columns;"),
            (
                "if (device_ == Device::cuda || matrix.rows * matrix.cols > kFew) {",
                "if (false) {",
                {
                    "alive": "the same sum, slower; on CUDA it reads the GPU's memory, which a GPU's tests notice"
                },
            ),
            ("i * matrix.row_stride + j);", "i * matrix.cols + j);"),
        ],
    ),
    (
        "bindings/torch/ops.cc",
        (OPS,),
        [
            ('  call.check_stored(weight.dtype, "x", in.dtype);\n  weight.derived', "  weight.derived"),
            ('  call.check_stored(weight.dtype, "grad_output", dy.dtype);\n  weight', "  weight"),
            ('  call.check_dtype("x", x, "grad_output", dy.dtype);\n  call.check_rows', "  call.check_rows"),
            (
                "Tensor dx = call.empty_rows(grad_output, in_features);\n  check",
                "Tensor dx = call.empty_rows(grad_output, out_features);\n  check",
            ),
            (
                ": bias ? call.sum_rows(grad_output, dy)\n                 : call.nothing(grad_output)};",
                ": call.sum_rows(grad_output, dy)};",
            ),
            (
                "{values ? input_gradient() : call.nothing(grad_output),",
                "{x && values ? input_gradient() : call.nothing(grad_output),",
            ),
            ('  call.check_device("col_indices", col_indices);\n', ""),
            (
                'const Call call(caller, "crow_indices", crow_indices);',
                'const Call call("bsr_plan", "crow_indices", crow_indices);',
            ),
            (
                "linear(in, weight, bias_data, fused, call.output",
                "linear(in, weight, bias_data, Activation::none, call.output",
            ),
        ],
    ),
    (
        "bindings/torch/derived.cc",
        (DERIVED,),
        [
            ("if (samples > 0 && !samples_agree(*weight, bytes)) return {};", ""),
            ("if (tensors.packed->numel() < samples) {", "if (false) {"),
            (
                "tensor.scalar_type() == ScalarType::Byte && tensor.dim() == 1 &&",
                "tensor.scalar_type() == ScalarType::Byte &&",
            ),
            ("tensor.scalar_type() == ScalarType::Byte && tensor.dim() == 1 &&", "tensor.dim() == 1 &&"),
            ("    derived.packed = bytes + samples;", "    derived.packed = bytes;"),
            (
                "derived.packed_bytes = tensors.packed->numel() - samples;",
                "derived.packed_bytes = tensors.packed->numel();",
            ),
            ("  if (given < wanted) {", "  if (false) {"),
            ("if (samples > 0) take_samples(weight, bytes);", ""),
            ("agree = agree && std::memcmp(", "agree = std::memcmp("),
            ("problem.weight.dtype = w.stored;", ""),
            ("if (op == Op::linear) return value_of(call.op(), sizes);", ""),
        ],
    ),
    (
        "bindings/torch/feed_forward.cc",
        (NETWORKS,),
        [
            ('      call.check_device("values", values);\n', ""),
            ('      call.check_stored(weight.dtype, "x", x.dtype);\n', ""),
            ("if (a.gate_values.has_value() != a.gate_plan.has_value()) {", "if (false) {"),
            (
                "saved.gate = call.output(gate, x, a.hidden_features);",
                "saved.gate = call.output(up, x, a.hidden_features);",
            ),
            ("throw TypeMismatch(named(error));", "throw std::invalid_argument(named(error));"),
            ("{down_prepared, down_packed, derived},", "{up_prepared, up_packed, derived},"),
            ("      call.activation(a.activation),", "      Activation::relu,"),
        ],
    ),
    (
        "bindings/torch/move.cc",
        (CHANGE,),
        [
            ("if (on_host) check(op, check_sources(op, positions(source), count));", ""),
            ("  if (source.numel() != blocks.size(0)) {", "  if (false) {"),
            ("  check(op, check_sources(op, positions(source), blocks.size(0)));", ""),
            ("blocks.dim() != 2 || !blocks.is_contiguous() ||", "blocks.dim() != 2 ||"),
            (
                "!source.is_contiguous() || source.scalar_type() != ScalarType::Long",
                "source.scalar_type() != ScalarType::Long",
            ),
        ],
    ),
]
