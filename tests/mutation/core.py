"""Mutants of src/core: checks, patterns, conversion, numbers, threads."""

BAD = "cpp:*BadInput*:*GoodInput*"
CONVERT = "cpp:Convert*:BlockMask*"
PRODUCTS = "cpp:*ProductsTest.EveryBlockShape*:*ProductsTest.EmptyFull*:ReferenceTest*"
ALL = ("cpp:*-*ProductsTest.Large*:*ProductsTest.ActivationAfter*:*ProductsTest.Weights*", "fuzz:*")

GROUPS = [
    (
        "src/core/validate.cc",
        (BAD, *ALL),
        [
            ("crow.size()) != rows + 1", "crow.size()) < rows + 1"),
            ("crow.size()) != rows + 1", "crow.size()) > rows + 1"),
            ("if (crow[0] != 0)", "if (crow[0] < 0)"),
            (
                "for (std::int64_t i = 0; i < rows; ++i) {\n    const auto begin",
                "for (std::int64_t i = 0; i + 1 < rows; ++i) {\n    const auto begin",
            ),
            ("if (end < begin) {", "if (end < 0) {"),
            ("if (end - begin > shape.col_count()) {", "if (end - begin > shape.col_count() + 1) {"),
            ("if (end - begin > shape.col_count()) {", "if (end - begin >= shape.col_count()) {"),
            (
                "static_cast<std::int64_t>(crow[rows]) != shape.nnzb",
                "static_cast<std::int64_t>(crow[rows]) > shape.nnzb",
            ),
            (
                "static_cast<std::int64_t>(crow[rows]) != shape.nnzb",
                "static_cast<std::int64_t>(crow[rows]) < shape.nnzb",
            ),
            (
                "static_cast<std::int64_t>(col.size()) != shape.nnzb",
                "static_cast<std::int64_t>(col.size()) < shape.nnzb",
            ),
            ("std::int64_t previous = -1;", "std::int64_t previous = 0;"),
            ("if (c < 0 || c >= cols) {", "if (c < 0 || c > cols) {"),
            ("if (c < 0 || c >= cols) {", "if (c >= cols) {"),
            ("if (c <= previous) {", "if (c < previous) {"),
            ("      previous = c;\n", ""),
            ("if (shape.rows < 0 || shape.cols < 0) {", "if (shape.rows < 0) {"),
            (
                "if (shape.block_rows < 1 || shape.block_cols < 1) {",
                "if (shape.block_rows < 1 || shape.block_cols < 0) {",
            ),
            (
                "if (shape.block_rows < 1 || shape.block_cols < 1) {",
                "if (shape.block_rows < 0 || shape.block_cols < 1) {",
            ),
            (
                "shape.nnzb > shape.row_count() * shape.col_count()",
                "shape.nnzb >= shape.row_count() * shape.col_count()",
            ),
            ("shape.nnzb > shape.row_count() * shape.col_count()", "shape.nnzb > shape.rows * shape.cols"),
            (
                "const auto bytes = checked_mul(shape.block_size(), 8);",
                "const auto bytes = checked_mul(shape.block_size(), 1);",
            ),
            ("if (!bytes || !checked_mul(*bytes, shape.nnzb)) {", "if (!bytes) {"),
        ],
    ),
    (
        "src/core/pattern.cc",
        (BAD, PRODUCTS, *ALL),
        [
            ("    return status;  // before memory is taken\n", "    ;\n"),
            ("words[0] == PlanHeader::kMagic && stored == shape", "stored == shape"),
            ("words[0] == PlanHeader::kMagic && stored == shape", "words[0] == PlanHeader::kMagic"),
            ("if (words != plan_size(shape)) {", "if (words < plan_size(shape)) {"),
            ("if (words != plan_size(shape)) {", "if (words > plan_size(shape)) {"),
            (
                "return blocks == 0 ? 0.0 : static_cast<double>(shape().nnzb) / blocks;",
                "return static_cast<double>(shape().nnzb) / blocks;",
            ),
            ("shape().row_count() + 1)};", "shape().row_count())};"),
        ],
    ),
    (
        "src/core/row_plan.cc",
        (BAD, PRODUCTS, *ALL),
        [
            ("return valid && falls == 0;", "return valid;"),
            (
                "valid &= to[e] >= 0 && to[stop - 1] < shape.col_count();",
                "valid &= to[stop - 1] < shape.col_count();",
            ),
        ],
    ),
    (
        "src/core/column_sort.h",
        (BAD, PRODUCTS, *ALL),
        [
            ("++crow[plan.col[e] + 1];", "++crow[plan.col[e]];"),
            ("word[at] = word_of(e);", "word[at] = word_of(at);"),
            ("row[at] = static_cast<std::int32_t>(i);", "row[at] = static_cast<std::int32_t>(e);"),
            ("std::copy_backward(crow, crow + columns, crow + columns + 1);", ""),
            ("  crow[0] = 0;\n", ""),
        ],
    ),
    (
        "src/core/arguments.cc",
        (BAD, *ALL),
        [
            ("if (m.row_stride < 0) {", "if (m.row_stride < -100) {"),
            ("if (m.rows < 0 || m.cols < 0)", "if (m.rows < 0)"),
            ("if (m.rows == 0 || m.cols == 0) return 0;", ""),
            ("checked_mul((by_token ? m.rows : m.cols) - 1", "checked_mul((by_token ? m.rows : m.cols)"),
            ("checked_mul((by_token ? m.rows : m.cols) - 1", "checked_mul(m.rows - 1"),
            ("checked_add(*last, by_token ? m.cols : m.rows)", "checked_add(*last, 0)"),
            ("if (m.row_stride != 1 && m.rows > 1) {", "if (false) {"),
            ("if (m.cols <= 1 || m.col_stride >= m.rows) return {};", "return {};"),
            ("    if (!any_layout) return", "    if (false) return"),
            (
                "checked_mul(*elements, static_cast<std::int64_t>(size_of(m.dtype)))",
                "std::optional(*elements)",
            ),
            ("if (m.data == nullptr && m.rows > 0 && m.cols > 0) {", "if (m.data == nullptr) {"),
            ("if (m.rows > 1 && m.row_stride < m.cols) {", "if (m.row_stride < m.cols) {"),
            ("if (m.rows > 1 && m.row_stride < m.cols) {", "if (m.rows > 1 && m.row_stride < m.cols - 1) {"),
            ("if (m.rows > 1 && m.row_stride < m.cols) {", "if (m.rows > 1 && m.row_stride <= m.cols) {"),
            ("if (m.device != device) {", "if (false) {"),
            (
                "begin + static_cast<std::uintptr_t>(out.bytes) <= other",
                "begin + static_cast<std::uintptr_t>(out.bytes) < other",
            ),
            ("begin + static_cast<std::uintptr_t>(out.bytes) <= other", "begin <= other"),
            ("other + static_cast<std::uintptr_t>(in.bytes) <= begin", "other <= begin"),
            ("out.bytes == 0 || in.bytes == 0 ||", ""),
            ("plan.crow != nullptr && (by_rows || plan.ccol != nullptr);", "plan.crow != nullptr;"),
            ("(plan.row != nullptr && plan.perm != nullptr)", "plan.row != nullptr"),
            ("if (values == nullptr && plan.shape.value_count() > 0) {", "if (values == nullptr) {"),
        ],
    ),
    (
        "src/core/convert.cc",
        (CONVERT, BAD, *ALL),
        [
            ("(*p == std::byte{0} && std::memcmp(p, p + 1, bytes - 1) == 0)", "(*p == std::byte{0})"),
            (
                "(*p == std::byte{0} && std::memcmp(p, p + 1, bytes - 1) == 0)",
                "std::memcmp(p, p + 1, bytes - 1) == 0",
            ),
            ("return std::min(s.block_rows, s.rows - i * s.block_rows);", "return s.block_rows;"),
            ("return std::min(s.block_cols, s.cols - j * s.block_cols);", "return s.block_cols;"),
            ("[](std::uint8_t byte) { return byte > 1; }", "[](std::uint8_t byte) { return byte > 2; }"),
            (
                "if (static_cast<std::int64_t>(mask.size()) != blocks) {",
                "if (static_cast<std::int64_t>(mask.size()) < blocks) {",
            ),
            ("block_mask[i * cols + j] == 1", "block_mask[j * rows + i] == 1"),
            ("if (dense.dtype != bsr.dtype) {", "if (false) {"),
            (
                "n < dense.rows && dense.cols > 0; ++n",
                "n < dense.rows; ++n",
                {"alive": "memset and memcpy of no bytes do nothing; only the address would be wrong"},
            ),
            ("std::memset(element(dense, n, 0), 0, static_cast<std::size_t>(dense.cols) * size);", ""),
            (
                "const std::int64_t from = e * shape.block_size() + n % shape.block_rows * shape.block_cols;\n      std::memcpy",
                "const std::int64_t from = e * shape.block_size() + n % shape.block_cols * shape.block_cols;\n      std::memcpy",
            ),
            ("if (nnz > kMaxIndex) {", "if (false) {"),
            ("static_cast<std::int32_t>(k0));", "static_cast<std::int32_t>(0));"),
            ("      std::sort(col.begin() + begin, col.end());\n", ""),
            ("      col.erase(std::unique(col.begin() + begin, col.end()), col.end());\n", ""),
            ("while (col[b] != j) ++b;", "if (col[b] != j) ++b;"),
            (
                "csr.col_indices[e] % shape.block_cols;\n        std::memcpy",
                "csr.col_indices[e] % shape.block_rows;\n        std::memcpy",
            ),
            (
                "for (const std::int32_t c : col) ++out.offsets[c + 1];",
                "for (const std::int32_t c : col) ++out.offsets[c];",
            ),
            ("next[col[e]]++", "next[col[e]]"),
            ("if (values.size() == expected) return {};", "if (values.size() >= expected) return {};"),
            ("if (values.size() == expected) return {};", "if (values.size() <= expected) return {};"),
            ("index < 0 || index >= limit", "index < 0 || index > limit"),
            ("index < 0 || index >= limit", "index >= limit"),
            (
                "std::pair(key(a), a) < std::pair(key(b), b)",
                "key(a) < key(b)",
                {"alive": "equal keys are refused; the order of others is the same"},
            ),
            ("if (repeat != order.end()) {", "if (false) {"),
            ("coo.values.data() + order[to] * size", "coo.values.data() + to * size"),
            ("if (coo.col_indices.size() != entries) {", "if (false) {"),
            (
                "static_cast<std::int32_t>(n));\n    }\n    return coo;",
                "static_cast<std::int32_t>(n + 1));\n    }\n    return coo;",
            ),
            (
                "const std::byte*>(m.data) + (row * m.row_stride + col) * size",
                "const std::byte*>(m.data) + (row * m.cols + col) * size",
            ),
        ],
    ),
    (
        "src/core/block_norm.cc",
        (CONVERT, BAD),
        [
            ("out[k / shape.block_cols] += x * x;", "out[k / shape.block_cols] += x;"),
            ("out[k / shape.block_cols] += x * x;", "out[k / shape.block_cols] = x * x;"),
            ("norms.data() + n / shape.block_rows * cols", "norms.data() + n / shape.block_cols * cols"),
            ("norm = std::numeric_limits<double>::infinity();", "norm = 0;"),
            (
                "norms[a] != norms[b] ? norms[a] > norms[b] : a < b",
                "norms[a] != norms[b] ? norms[a] > norms[b] : a > b",
            ),
            ("norms[a] != norms[b] ? norms[a] > norms[b] : a < b", "norms[a] < norms[b]"),
            ("std::nearbyint(density", "std::floor(density"),
            ("std::nearbyint(density", "std::round(density"),
            ("density >= 0 && density <= 1", "density >= 0 && density < 1"),
            ("density >= 0 && density <= 1", "density > 0 && density <= 1"),
            ("dense.row_stride;\n      double* out", "dense.cols;\n      double* out"),
        ],
    ),
    (
        "src/core/dtype.cc",
        ("cpp:DType*", "cpp:*ProductsTest.Special*:*ProductsTest.Nan*:Convert*"),
        [
            ("toward_zero | 1U", "toward_zero"),
            (
                "const std::uint32_t toward_zero = away ? bits - 1 : bits;",
                "const std::uint32_t toward_zero = bits;",
            ),
            (
                "|| std::isnan(x) || std::isinf(x)) return nearest;",
                ") return nearest;",
                {"alive": "infinities are equal to themselves; a NaN's lowest bit is lost in 16 bits"},
            ),
            ("exponent == 31 ? 255U : exponent + 112U", "exponent + 112U"),
            ("if (exponent == 31 && mantissa != 0) bits |= 0x400000U;", ""),
            ("return sign != 0 ? -magnitude : magnitude;", "return magnitude;"),
            ("0x7e00U | ((magnitude >> 13) & 0x3ffU)", "0x7c00U | ((magnitude >> 13) & 0x3ffU)"),
            (
                "if (magnitude >= 0x47800000U)",
                "if (magnitude > 0x47800000U)",
                {"alive": "2¹⁶ itself also overflows in the rounding below"},
            ),
            ("if (magnitude < 0x38800000U)", "if (magnitude < 0x38000000U)"),
            ("magnitude + 0xfffU + ((magnitude >> 13) & 1U)", "magnitude + 0x1000U"),
            ("magnitude + 0xfffU + ((magnitude >> 13) & 1U)", "magnitude + 0xfffU"),
            (
                "std::ldexp(static_cast<float>(mantissa), -24)",
                "std::ldexp(static_cast<float>(mantissa), -25)",
            ),
            ("if (text == name(dtype)) return dtype;", "if (text.starts_with(name(dtype))) return dtype;"),
        ],
    ),
    (
        "include/rarefy/dtype.h",
        ("cpp:DType*",),
        [
            ("(bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16", "(bits + 0x8000U) >> 16"),
            ("(bits >> 16) | 0x40U", "bits >> 16"),
        ],
    ),
    (
        "src/core/checked.h",
        (BAD, *ALL),
        [
            (
                "if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;",
                "product = static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));",
            ),
            (
                "if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;",
                "sum = static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));",
            ),
        ],
    ),
    (
        "src/core/executor.cc",
        ("cpp:ThreadPool*:Executor*", "cpp:*ProductsTest.GiveTheSame*"),
        [
            ("for (int i = 1; i < threads; ++i)", "for (int i = 2; i < threads; ++i)"),
            ("    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));\n", ""),
            ("std::rethrow_exception(std::exchange(failure_, nullptr))", "std::rethrow_exception(failure_)"),
            ("done_.wait(lock, [this] { return busy_ == 0; });", ""),
            ("threads > 0 ? threads :", "threads >= 0 ? threads :"),
            ("    const std::lock_guard one_job(jobs_);\n", ""),
        ],
    ),
    (
        "src/core/task_queue.h",
        ("cpp:ThreadPool*:Executor*", "cpp:*ProductsTest.GiveTheSame*"),
        [
            ("next(s).store(first(s), ", "next(s).store(first(s) + 1, "),
        ],
    ),
    (
        "src/core/select.cc",
        ("cpp:Select*:*ForcedImpl*:Registry*:AddAKernel*", PRODUCTS, *ALL),
        [
            ("if (!by_token && !kernel.any_layout) return", "if (false) return"),
            (
                "if (problem.derived == key_of(kernel, problem, configuration(kernel, problem, machine))) return {};",
                "return {};",
            ),
            ("kernel.derives_as.empty() ? kernel.name : kernel.derives_as", "kernel.name"),
            (
                "const std::int64_t variant = kernel.variant == nullptr ? 0 : kernel.variant(problem, config);",
                "const std::int64_t variant = 0;",
            ),
            ("if (!holds(problem, key)) own.derived = 0;", ""),
            ("!holds_prepared && choice.kernel->unheld", "choice.kernel->unheld"),
            ("ceil_div(bytes, 256) * 256", "bytes"),
            ("return {holds_prepared ? 0 : whole", "return {holds_packed ? 0 : whole"),
            ("slot.generation == generation && slot.problem == problem", "slot.problem == problem"),
            ("slot.generation == generation && slot.problem == problem", "slot.generation == generation"),
            ("    state.generation.fetch_add(1, std::memory_order_release);\n", ""),
            ("item.substr(0, colon) != name(device)) continue;", "false) continue;"),
            (
                "candidate.why_not.empty() && result.kernel.empty() && forced",
                "candidate.why_not.empty() && forced",
            ),
            ("choice = configured(*kernel, problem, *parse_config(*kernel, choice.config, text));", ""),
        ],
    ),
    (
        "src/core/linear.cc",
        ("cpp:Select*:AddAKernel*:BadInput*", BAD, PRODUCTS, *ALL),
        [
            ("  if (p.tokens < 0) return", "  if (p.tokens < -1) return"),
            ("  if (p.threads < 1) return", "  if (p.threads < 0) return"),
        ],
    ),
    (
        "src/core/products.cc",
        ("cpp:Select*:AddAKernel*:BadInput*:*PackedInTheCall*:*DerivedData*", BAD, PRODUCTS, *ALL),
        [
            ("  if (given.bytes >= bytes) return {};", ""),
            ("  if (given.bytes >= bytes) return {};", "  if (given.bytes > 0) return {};"),
            ("    if (got >= size) return {};", "    return {};"),
            ("derived.packed == nullptr) return status;", "derived.packed != nullptr) return status;"),
            ("    call.derived.prepared = memory;\n", ""),
            ("prepare(call, memory)", "prepare(call, memory + made.packed)"),
            ("pack(call, memory + made.prepared)", "pack(call, memory)"),
            ("    call.derived.packed = memory + made.prepared;\n", ""),
            ("  call.workspace = memory + made.bytes();\n", ""),
            ("choice->derived.key == call.derived.key;", "call.derived.key != 0;"),
            ("kernel.derives() && kernel.unheld == Unheld::refused", "kernel.unheld == Unheld::refused"),
            (
                "kernel.derives() && kernel.unheld == Unheld::refused",
                "false",
                {"alive": "no row of the CPU refuses; with a forced configuration CUDA's would"},
            ),
            ("    call.derived = {};\n    problem.derived = 0;\n", "    problem.derived = 0;\n"),
            (
                "    call.derived = {};\n    problem.derived = 0;\n",
                "    call.derived = {};\n",
                {"alive": "kernels of the CPU ask Call::derived alone; some of CUDA's ask the problem"},
            ),
            ("held, call.derived.packed != nullptr);", "held, held);"),
            ("bytes = made.bytes() + to_add + choice->workspace;", "bytes = to_add + choice->workspace;"),
        ],
    ),
    (
        "src/core/move_blocks.cc",
        ("cpp:MoveBlocks*",),
        [
            ("const std::int64_t step = s < 0 ? 0 : 1;", "const std::int64_t step = 1;"),
            (
                "if (source[i] <= last || source[i] >= blocks) {",
                "if (source[i] < last || source[i] >= blocks) {",
            ),
            (
                "if (source[i] <= last || source[i] >= blocks) {",
                "if (source[i] <= last || source[i] > blocks) {",
            ),
            ("    last = source[i];\n", ""),
            ("out[i] = s < 0 ? Block{} : blocks[s];", "out[i] = s <= 0 ? Block{} : blocks[s];"),
            ("for (std::int64_t i = count; i-- > 0;) {", "for (std::int64_t i = 0; i < count; ++i) {"),
            ("s > i) move(i, s);", "s >= count) move(i, s);"),
            ("(count + per_task - 1) / per_task", "count / per_task"),
            ("std::min(begin + per_task, count)", "begin + per_task"),
            ("if (source[i] == -1) continue;", "if (source[i] < 0) continue;"),
        ],
    ),
]
