"""Mutants of the CPU kernels and the reference: what each instruction set compiles."""

ALL = "cpp:*Product*:*Reference*:*Families*"
P = "*ProductsTest."
ISA = "cpp:*ProductsTest.*{isa}:SelectTest.*Configuration*:SelectTest.Skewed*"
ACTIVATIONS = f"cpp:{P}Activations*{{isa}}"
FEW = f"cpp:{P}FewTokens*{{isa}}:{P}Activations*{{isa}}"
SHAPES = f"cpp:{P}EveryBlockShape*{{isa}}:{P}EveryNumberOfTokens*{{isa}}"
SPECIAL = f"{ACTIVATIONS}:{P}Nan*{{isa}}:{P}Subnormal*{{isa}}:{P}SumsStart*{{isa}}"

GROUPS = [
    (
        "src/ref/sum.h",
        ("cpp:ReferenceTest.*:*ProductsTest.EveryBlockShape*", ALL),
        [
            (
                "next_ = (next_ + 1) % parts_.size();",
                "next_ = (next_ + 1) % (parts_.size() - 1);",
                {"alive": "seven parts are as good as eight"},
            ),
            ("    next_ = (next_ + 1) % parts_.size();\n", ""),
            ("(parts_[6] + parts_[7])", "(parts_[6] + parts_[6])"),
            ("parts_[next_] += term;", "parts_[next_] = term;"),
        ],
    ),
    (
        "src/ref/linear.cc",
        ("cpp:ReferenceTest.*:ProductsOfInt8Test.*:*ProductsTest.EveryBlockShape*", ALL),
        [
            (
                "        double sum = terms.total();\n        if (bias != nullptr) sum += load(bias + n);\n",
                "        double sum = terms.total();\n",
            ),
            (
                "        double sum = terms.total();\n        if (bias != nullptr) sum += load(bias + n);",
                "        double sum = terms.total();\n        if (bias != nullptr) sum -= load(bias + n);",
            ),
            (
                "const W* w = values + e * shape.block_size() + (n % shape.block_rows) * shape.block_cols;",
                "const W* w = values + e * shape.block_size() + (n % shape.block_rows) * shape.block_rows;",
            ),
            (
                "Out* y = static_cast<Out*>(call.out.data) + m * call.out.row_stride;\n      for (std::int64_t n = 0; n < shape.rows; ++n) {\n        const std::int64_t i = n / shape.block_rows;",
                "Out* y = static_cast<Out*>(call.out.data) + m * call.out.row_stride;\n      for (std::int64_t n = 0; n < shape.rows; ++n) {\n        const std::int64_t i = n / shape.block_cols;",
            ),
            ("const std::int64_t j = k / shape.block_cols;", "const std::int64_t j = k / shape.block_rows;"),
            (
                "c < std::min(shape.block_cols, shape.cols - k0); ++c) {\n            terms.add(load(x",
                "c < shape.block_cols; ++c) {\n            terms.add(load(x",
            ),
            ("r < std::min(shape.block_rows, shape.rows - n0)", "r < shape.block_rows"),
            ("plan.perm[e] * shape.block_size() + k", "e * shape.block_size() + k"),
            ("if (n < shape.rows && k < shape.cols) {", "if (n < shape.rows) {"),
            ("if (n < shape.rows && k < shape.cols) {", "if (k < shape.cols) {"),
            (
                "        double sum = terms.total();\n        if (bias != nullptr) sum += load(bias + n);\n        store(y + n * call.out.col_stride, ref::activate(call.activation, sum));",
                "        double sum = terms.total();\n        if (bias != nullptr) sum += load(bias + n);\n        store(y + n * call.out.col_stride, sum);",
            ),
            ("load(x + (k0 + c) * call.x.col_stride)", "load(x + k0 + c)"),
            ("load(dy + (n0 + r) * call.dy.col_stride)", "load(dy + n0 + r)"),
            (
                "m * call.x.row_stride;\n      Out* y",
                "m * call.x.cols;\n      Out* y",
            ),
            (
                "Out* dx = static_cast<Out*>(call.out.data) + m * call.out.row_stride;",
                "Out* dx = static_cast<Out*>(call.out.data) + m * call.out.cols;",
            ),
            ("visit_float(p.out, [&]<class Out>(Out) { f(In{}, W{}, Out{}); });", "f(In{}, W{}, float{});"),
        ],
    ),
    (
        "src/ref/activation.h",
        ("cpp:*ProductsTest.Activations*", ALL),
        [
            ("0.044715", "0.0447"),
            ("x > 0 || std::isnan(x) ? x : 0.0", "x > 0 ? x : 0.0"),
            ("std::erfc(-x / std::numbers::sqrt2)", "(1 + std::erf(x / std::numbers::sqrt2))"),
            ("return x / (1 + std::exp(-x));", "return x / (1 + std::exp(-1.702 * x));"),
            ("std::exp(-2 * inner)", "std::exp(2 * inner)"),
        ],
    ),
    (
        "src/cpu/activation.h",
        (ACTIVATIONS, ISA),
        [
            ("I::set1(-87.0F)", "I::set1(-30.0F)"),
            ("I::set1(89.0F)", "I::set1(30.0F)"),
            ("I::set1(89.0F)", "I::set1(88.0F)"),
            (
                "I::max(I::set1(-87.0F), I::min(x, I::set1(89.0F)))",
                "I::max(I::set1(-87.0F), I::min(I::set1(89.0F), x))",
                {"alive": "a NaN passes on to a conversion, but x is a factor of every result"},
            ),
            (
                "set1(1.44269504F)",
                "set1(1.4426F)",
                {"alive": "n may be off by one near a half: r grows by 10⁻⁵, and the series bears it"},
            ),
            ("r = I::fma(n, I::set1(-1.42860677e-6F), r);", ""),
            ("1.0F / 720, 1.0F / 5040}", "0.0F, 0.0F}"),
            ("0.044715F", "0.0447F"),
            ("1.59576912F", "1.5958F"),
            (
                "case Activation::relu: return I::max(I::zero(), x);",
                "case Activation::relu: return I::max(x, I::zero());",
            ),
            ("const Vec<I> rest = I::fma(tail, I::set1(-1.0F), one);", "const Vec<I> rest = one;"),
            ("I::select_negative(x, tail, rest)", "I::select_negative(x, rest, tail)"),
            ("-0.014587868F", "-0.0145F"),
            ("for (int i = N - 2; i >= 0; --i)", "for (int i = N - 2; i > 0; --i)"),
            (
                "case Activation::silu: return times_sigmoid<I>(x, x);",
                "case Activation::silu: return times_sigmoid<I>(x, I::mul(x, I::set1(1.702F)));",
            ),
            ("I::set1(0.707106781F)", "I::set1(0.7071F)"),
        ],
    ),
    (
        "src/cpu/gather.h",
        (SHAPES, SPECIAL, ISA),
        [
            ("later < stop - index ? later : 0", "later <= stop - index ? later : 0"),
            ("sum[r][v] = I::set1(start[r]);", "sum[r][v] = I::zero();"),
            (
                "each([&](int r, int v) { sum[r][v] = I::load(y + r * lanes + v * I::kWidth); });",
                "each([&](int r, int v) { sum[r][v] = I::zero(); });",
            ),
            ("I::set1(w[r * stride])", "I::set1(w[r])"),
            ("w += row.block_size - row.red_block, next", "w += row.block_size, next"),
            (
                "w = values + *perm * reload(row.block_size);",
                "w = values + (perm - row.perm) * reload(row.block_size);",
            ),
            ("values += kLayout == Layout::row_major ? Rows * row.stride : Rows;", "values += Rows;"),
            ("if (start != nullptr) start += Rows;", ""),
            ("if (out_block == 1) step.template operator()<1>();", ""),
            (
                "row.stride = kLayout == Layout::row_major ? w.out_stride : w.red_stride;",
                "row.stride = w.out_stride;",
            ),
            (
                "task.x - task.x_first * w.red_block * lanes, lanes, task.row[task.end]",
                "task.x, lanes, task.row[task.end]",
            ),
            ("if (start != nullptr) start += w.out_block;", ""),
            (
                "if (w.perm != nullptr) row.perm = w.perm + e;",
                "if (w.perm != nullptr) row.perm = w.perm;",
            ),
            (
                "w.perm != nullptr ? values : values + e * w.block_size",
                "w.perm != nullptr ? values : values + e",
            ),
            ("if (row.count > chunk) row.count = static_cast<std::int32_t>(chunk);", ""),
            ("      from = nullptr;\n", ""),
            ("      row.index = w.index + e;\n", "      row.index = w.index + first;\n"),
            ("if (e == end && e != first) continue;", ""),
            ("full += (e - first - 1) / part * part;", "full += (e - first) / part * part;"),
            ("if (full != first + part) add_total", "if (false) add_total"),
            ("        clear<I>(y, size);\n", ""),
            ("several && full == first + part ? total : y", "y"),
            ("if (several && e == task.row[o + 1]) add_total", "if (several && e == end) add_total"),
            ("    } while (e < end);", "    } while (false);"),
            ("if (w.red_block % kUnroll == 0) return", "if (w.red_block > kUnroll) return"),
            (
                "if (w.red_block == 1 && w.out_stride == 1)",
                "if (w.red_block == 1)",
                {"alive": "by rows the output's stride is red_block: the second test says the same"},
            ),
            (
                "kUnpacked / w.block_size : 1;\n  const std::int64_t size",
                "2 * kUnpacked / w.block_size : 1;\n  const std::int64_t size",
            ),
        ],
    ),
    (
        "src/cpu/panel.h",
        (SHAPES, SPECIAL, ISA),
        [
            ("    case 3: return f.template operator()<3>();\n", ""),
        ],
    ),
    (
        "src/cpu/scatter.h",
        (SHAPES, SPECIAL, ISA),
        [
            ("e < count - kEntriesAhead; ++e", "e <= count - kEntriesAhead; ++e"),
            ("panel + index[e] * outputs * lanes;", "panel + index[e] * lanes;"),
            ("task.y - task.y_first * outputs * lanes", "task.y"),
            ("block += out_stride", "block += stride"),
            ("I::set1(block[t][i * stride])", "I::set1(block[t][i])"),
            (
                "end_part<I, kFlat ? Vectors : 0>(task.total + at, task.y + at, size, task.parts[p].first != 0);",
                "",
            ),
            ("task.parts[p].first != 0", "true"),
            ("< task.part + least_entries(task.part)) continue;", "< task.part) continue;"),
            ("        perm = nullptr;\n", ""),
            ("        values += e * w.block_size;\n", ""),
            ("values += Inputs * w.red_stride;", "values += Inputs;"),
            ("xi += Inputs * lanes;", ""),
            ("if (left == 1) step.template operator()<1>();", ""),
            (
                "const std::int32_t* perm = w.perm != nullptr ? w.perm + e : nullptr;",
                "const std::int32_t* perm = w.perm;",
            ),
            ("count = count < chunk ? count : static_cast<std::int32_t>(chunk);", ""),
            (
                "scatter_tile<I, Inputs, Vectors, kFlat>(task, values, w.index + e, perm",
                "scatter_tile<I, Inputs, Vectors, kFlat>(task, values, w.index, perm",
            ),
            (
                "for (; e < count; ++e) update(e, values + perm[e] * block_size);",
                "for (; e + 1 < count; ++e) update(e, values + perm[e] * block_size);",
            ),
        ],
    ),
    (
        "src/cpu/few.h",
        (FEW, SPECIAL, ISA),
        [
            ("row.values + first * slice * kBytes;", "row.values;"),
            ("row.count - row.count % entries;", "row.count - entries;"),
            (
                "I::store(total[s][m], I::add(I::load(total[s][m]), all_sets(s, m)));",
                "I::store(total[s][m], all_sets(s, m));",
            ),
            (
                "row.x + static_cast<std::int64_t>(row.index[e]) * elements;",
                "row.x + static_cast<std::int64_t>(row.index[e]);",
            ),
            ("load_part<I>(kStorage, values, 0, rest * Size)", "load_as<I>(kStorage, values, 0)"),
            (
                "row.index[e + i / Size] * std::int64_t{N} + i % N",
                "row.index[e + i / Size] * std::int64_t{N}",
            ),
            ("if (rest > 0) {", "if (rest > 1) {"),
            ("y[i % Size / N] += lane[i];", "y[i / N] += lane[i];"),
            ("y[first + s] += four[0];", "y[s] += four[0];"),
            ("xv[m] = I::load(x + m * row.x_stride + c);", "xv[m] = I::load(x + c);"),
            ("float* y = row.y + m * row.y_stride;", "float* y = row.y;"),
            ("s + Slices <= slices;", "s + Slices < slices;"),
            ("++o, row.y += w.out_block)", "++o, row.y += w.red_block)"),
            ("row.index = w.index + e;", "row.index = w.index + task.entry_begin[o];"),
            ("case 2: return few_tokens<I, kStorage, 2>(task);", ""),
            ("if (size < w) return w % size == 0;", "if (size < w) return true;"),
            ("size % w == 0 && (block_cols % w == 0", "(block_cols % w == 0"),
            ("(block_cols % w == 0 || w % block_cols == 0)", "block_cols % w == 0"),
        ],
    ),
    (
        "src/cpu/dot.h",
        (f"cpp:{P}EveryBlockShape*{{isa}}:{P}SeveralChunks*{{isa}}", SPECIAL, ISA),
        [
            ("m < lanes; m += I::kWidth", "m + I::kWidth < lanes; m += I::kWidth"),
            ("I::load(dy + r * lanes + m)", "I::load(dy + m)"),
            (
                "task.accumulate ? *to + sums[i * kLength + j] : sums[i * kLength + j]",
                "sums[i * kLength + j]",
            ),
            (
                "task.accumulate ? *to + sums[i * kLength + j] : sums[i * kLength + j]",
                "*to + sums[i * kLength + j]",
            ),
            ("std::int64_t c = q % task.block_cols;", "std::int64_t c = 0;"),
            ("for (; q + Cols <= columns; q += Cols) {", "for (; q + Cols < columns; q += Cols) {"),
            ("if constexpr (Cols > 1) dot_columns", "if constexpr (Cols > 2) dot_columns"),
            ("task.dy + r * task.lanes, x", "task.dy + first * task.lanes, x"),
            ("task.block_rows - task.block_rows % 4", "task.block_rows - task.block_rows % 8"),
            ("if (task.block_rows - r >= 2) {", "if (task.block_rows - r > 2) {"),
            ("    r += 2;\n", ""),
            ("whole - r < kRowGroup ? whole : r + kRowGroup", "r + kRowGroup"),
            (
                "task.col[task.begin + b] * std::int64_t{task.block_cols} + c",
                "task.col[b] * std::int64_t{task.block_cols} + c",
            ),
        ],
    ),
    (
        "src/cpu/panel.h",
        (SHAPES, SPECIAL, ISA),
        [
            ("m + i < from.rows ? load_part", "m + i <= from.rows ? load_part"),
            ("from.cols - k < w ? from.cols - k : w;", "w;"),
            ("if (m + w <= from.rows) {", "if (m < from.rows) {"),
            ("for (; k + w <= from.cols; k += w) {", "for (; k < from.cols; k += w) {"),
            ("if (activation == Activation::none) return;", "return;"),
            (
                "activate_all<I>(task.activation, task.panel, static_cast<std::int64_t>(task.cols) * task.lanes);",
                "activate_all<I>(task.activation, task.panel, task.cols);",
            ),
            (
                "tile[i] = done + i < cols ? I::load(from) : I::zero();",
                "tile[i] = I::load(from);",
                {"alive": "features past the edge are never stored; the panel has room for whole blocks"},
            ),
            ("const int rows = task.rows - m < w ? task.rows - m : w;", "const int rows = w;"),
            ("const int whole = cols - cols % w;", "const int whole = cols;"),
            (
                "if (!pages && m + I::kWidth <= task.rows && cols % I::kWidth == 0) {",
                "if (!pages && cols % I::kWidth == 0) {",
            ),
            (
                "if (!pages && m + I::kWidth <= task.rows && cols % I::kWidth == 0) {",
                "if (!pages && m + I::kWidth <= task.rows) {",
            ),
            (
                "std::int64_t at = m * task.row_stride + n + done;",
                "std::int64_t at = m * task.cols + n + done;",
            ),
            (
                "const std::int64_t at = (m + i) * task.row_stride + n;",
                "const std::int64_t at = m * task.row_stride + n;",
            ),
            (
                "  if (i < count) {\n    store_part<I>(Storage::f32, to, i",
                "  if (i + 1 < count) {\n    store_part<I>(Storage::f32, to, i",
            ),
            (
                "    const int rest = static_cast<int>(count - i);\n    store_part",
                "    const int rest = I::kWidth;\n    store_part",
            ),
            (
                "case Storage::f16: return I::load_f16(static_cast<const std::uint16_t*>(data) + at);",
                "case Storage::f16: return I::load_bf16(static_cast<const std::uint16_t*>(data) + at);",
            ),
            ("return storage == Storage::f32 ? 4 : 2;", "return 4;"),
            (
                "static_cast<const char*>(data) + at * bytes_of(storage),",
                "static_cast<const char*>(data) + at,",
            ),
        ],
    ),
    (
        "src/cpu/simd/avx512.h",
        ("cpp:*Products*avx512*", "cpp:*KernelTable*"),
        [
            (
                "_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), otherwise, if_negative",
                "_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), if_negative, otherwise",
            ),
            (
                "_mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))",
                "_mm512_add_epi32(odd, _mm512_set1_epi32(0x8000))",
            ),
            ("_mm512_mask_blend_epi32(nan, rounded, quiet)", "rounded"),
            ("_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)", "_mm512_cvtps_ph(v, _MM_FROUND_TO_ZERO)"),
            (
                "lanes = repeat<N>(lanes, to, x + std::int64_t{index[i]} * N);",
                "lanes = repeat<N>(lanes, to, x + std::int64_t{index[1]} * N);",
            ),
            ("m[1] = _mm512_shuffle_f32x4(a, c, 0xdd);", "m[1] = _mm512_shuffle_f32x4(a, c, 0x88);"),
            ("_mm512_extractf32x8_ps(abcd, 1)", "_mm512_extractf32x8_ps(abcd, 0)"),
            ("return _mm512_scalef_ps(v, n);", "return v;"),
            (
                "_mm512_broadcastsd_pd(_mm_castsi128_pd(_mm_loadu_si64(p)))",
                "_mm512_castps_pd(_mm512_set1_ps(*p))",
            ),
        ],
    ),
    (
        "src/cpu/simd/avx2.h",
        ("cpp:*Products*avx2*", "cpp:*KernelTable*"),
        [
            ("_mm256_blendv_ps(otherwise, if_negative,", "_mm256_blendv_ps(if_negative, otherwise,"),
            ("_mm256_set1_epi32(127)", "_mm256_set1_epi32(126)"),
            ("_mm256_blendv_epi8(rounded, quiet, nan)", "rounded"),
            ("_mm256_set1_epi32(0x7fff)", "_mm256_set1_epi32(0x7ffe)"),
            ("_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)", "_mm256_cvtps_ph(v, _MM_FROUND_TO_POS_INF)"),
            ("_mm256_blend_ps(from(0), from(1), 0xf0)", "_mm256_blend_ps(from(1), from(0), 0xf0)"),
            (
                "return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));",
                "return _mm_cvtss_f32(quarter);",
            ),
            (
                "m[1] = _mm256_permute2f128_ps(a, m[1], 0x31);",
                "m[1] = _mm256_permute2f128_ps(a, m[1], 0x20);",
            ),
        ],
    ),
    (
        "src/cpu/simd/scalar.h",
        ("cpp:*Products*scalar*", "cpp:*KernelTable*"),
        [
            (
                "a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]",
                "a.lane[i] >= b.lane[i] ? a.lane[i] : b.lane[i]",
                {"alive": "max(0, −0) decides it, and no sum is −0"},
            ),
            (
                "a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]",
                "b.lane[i] < a.lane[i] ? b.lane[i] : a.lane[i]",
            ),
            ("x.lane[i] < 0 ? if_negative.lane[i]", "x.lane[i] > 0 ? if_negative.lane[i]"),
            ("12582912.0F;\n      return", "12582913.0F;\n      return"),
            (
                "(v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3])",
                "(v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[1])",
            ),
            ("nan ? (bits >> 16) | 0x40U", "false ? (bits >> 16) | 0x40U"),
            ("(bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16", "(bits + 0x8000U) >> 16"),
            ("if (magnitude >= 0x7c00U)", "if (magnitude > 0x7c00U)"),
            ("* 0x1p112F", "* 0x1p111F"),
            ("} else if (magnitude >= 0x47800000U) {", "} else if (magnitude > 0x7f7fffffU) {"),
            (
                "(magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13",
                "(magnitude + 0xfffU - 0x38000000U) >> 13",
            ),
            ("half = 0x7e00U;", "half = 0x7c00U;"),
            ("magnitude < 0x38800000U", "magnitude < 0x38000000U"),
            ("((bits >> 16) & 0x8000U) | half", "half"),
        ],
    ),
]
