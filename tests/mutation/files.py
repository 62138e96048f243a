"""Mutants of src/io: headers, JSON, bsr-v1, files."""

FILES = "cpp:*Safetensors*:*Hostile*:*Header*:*UnreadableFile*:*OutputFile*"
BSR = "cpp:*BsrFile*:*HostileBsr*"
ALL = ("cpp:*File*:*Header*:*Safetensors*:*Cli*:-*Product*", "fuzz:*", "alloc:*File*:*Safetensors*:*Header*")

GROUPS = [
    (
        "src/io/header.cc",
        (FILES, *ALL),
        [
            (
                "if (!(elements = checked_mul(*elements, dim))) return std::nullopt;",
                "elements = checked_mul(*elements, dim).value_or(0);",
            ),
            ("bits && *bits % 8 == 0", "bits.has_value()"),
            (
                'if (value.object() == nullptr) return invalid(op, "__metadata__ must be an object", value.type_name());',
                "",
            ),
            ("if (text->string() == nullptr) {", "if (text->numbers() != nullptr) {"),
            ("if (tensor.size() != 3) {", "if (tensor.size() < 3) {"),
            ("if (!tensor.contains(key)) return", "if (false) return"),
            ("if (offsets->size() != 2) {", "if (offsets->size() < 2) {"),
            ("info.end < info.begin || info.bytes() != *bytes", "info.end < info.begin"),
            (
                "info.end < info.begin || info.bytes() != *bytes",
                "info.bytes() != *bytes",
                {"alive": "bytes are never negative, so the second test includes the first"},
            ),
            ("if (entry->second.begin != end) {", "if (entry->second.begin < end) {"),
            ("if (entry->second.begin != end) {", "if (entry->second.begin > end) {"),
            ("    end = entry->second.end;\n", "    end = std::max(end, entry->second.begin);\n"),
            ("if (end != stored) {", "if (end > stored) {"),
            ("if (end != stored) {", "if (end < stored) {"),
            ("if (header.file_bytes < kLengthBytes) {", "if (header.file_bytes < kLengthBytes - 1) {"),
            ("std::min(kMaxHeaderBytes, header.file_bytes - kLengthBytes)", "kMaxHeaderBytes"),
            (
                "std::min(kMaxHeaderBytes, header.file_bytes - kLengthBytes)",
                "header.file_bytes - kLengthBytes",
            ),
            ("number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())", "false"),
            (
                "a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name",
                "a.dtype != b.dtype ? a.dtype < b.dtype : a.name < b.name",
            ),
            ("a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name", "a.name < b.name"),
            ("if (tensor.name == kMetadataKey) {", "if (false) {"),
            ("if (name.empty() || content.empty())", "if (name.empty())"),
            ("text.resize((text.size() + 7) / 8 * 8, ' ');", ""),
            ("if (negative || !right) {", "if (!right) {"),
            ("if (negative || !right) {", "if (negative) {"),
            (
                'parse_strict_json(op, "the header", text, 3)',
                'parse_strict_json(op, "the header", text, 4)',
                {"alive": "a fourth level is refused by the checks of its parts"},
            ),
            (
                'if (!end) return invalid(op, "the tensors must have fewer than 2^63 bytes in all", "more");',
                "",
                {"alive": "only a file of 2⁶³ bytes could tell"},
            ),
        ],
    ),
    (
        "src/io/json.cc",
        (FILES, BSR, *ALL),
        [
            ('bool null() override { return refuse("null"); }', "bool null() override { return true; }"),
            (
                'bool boolean(bool) override { return refuse("a boolean"); }',
                "bool boolean(bool value) override { return add({std::uint64_t{value}}); }",
            ),
            ('return refuse("a negative number");', "return true;"),
            (
                'return array_ != nullptr ? refuse("a string in an array") : add({std::move(value)});',
                "return add({std::move(value)});",
            ),
            ("    array_ = nullptr;\n", ""),
            (
                'if (objects_.back()->contains(name)) return refuse(cat("the key ", quote(name), " twice"));',
                "",
            ),
            ("    objects_.pop_back();\n", ""),
            (
                '    if (array_ != nullptr) return refuse("an array of arrays or objects");\n    if (objects_.size() == max_depth_) return refuse(cat("more than ", max_depth_, " levels"));\n    objects_',
                '    if (array_ != nullptr) return refuse("an array of arrays or objects");\n    objects_',
            ),
            (
                'if (objects_.empty()) return refuse("an array at the top");',
                "if (objects_.empty()) return true;",
                {"alive": "the first character must be '{' already"},
            ),
            ("if (!text.starts_with('{')) {", "if (text.empty()) {"),
            (
                "if (const auto nul = text.find('\\0'); nul != std::string_view::npos) {",
                "if (const auto nul = text.find('\\0'); nul == 0) {",
            ),
            ("constexpr std::size_t kLongest = 96;", "constexpr std::size_t kLongest = 96'000;"),
            ("--length;  // whole UTF-8 only", "break;"),
            ("byte < 0x20 || byte == 0x7f", "byte == 0x7f"),
            ('(numbers()->size() > kShown ? ",…]" : "]")', '"]"'),
            ("if (out.size() > 1) out += ',';", ""),
        ],
    ),
    (
        "src/io/bsr_entry.cc",
        (BSR, *ALL),
        [
            (
                "for (const std::string_view suffix : {kCrow, kCol, kBitmap}) {",
                "for (const std::string_view suffix : {kCrow, kBitmap}) {",
            ),
            (
                "if (value.size() != keys.size() + optional_keys) {",
                "if (value.size() < keys.size() + optional_keys) {",
            ),
            ("numbers == nullptr || numbers->size() != 2 ||", "numbers == nullptr || numbers->size() < 2 ||"),
            ("(*numbers)[0] > INT64_MAX || (*numbers)[1] > INT64_MAX", "false"),
            ("*count.number() > INT64_MAX", "false"),
            (
                "if (Status status = check_shape(op, entry.shape); !status.ok()) return status;\n  return entry;",
                "return entry;",
            ),
            ("info.dtype) == dtypes.end() || info.shape != shape", "info.dtype) == dtypes.end()"),
            (
                "info.dtype) == dtypes.end() || info.shape != shape",
                "info.dtype) != dtypes.end() && info.shape != shape",
            ),
            ("if (header.tensors.contains(weight)) {", "if (false) {"),
            ("{i32, i64}, {shape.row_count() + 1});", "{i32}, {shape.row_count() + 1});"),
            ("{i32, i64}, {shape.nnzb});", "{i64}, {shape.nnzb});"),
            ("*format.string() != kFormat", '!format.string()->starts_with("bsr-")'),
            ("      columns += entry->shape.col_count();\n", "      columns = entry->shape.col_count();\n"),
            ("if (columns > most_columns) {", "if (false) {"),
            ("if (owner && !entries.contains(std::string(*owner))) {", "if (false) {"),
        ],
    ),
    (
        "src/io/bsr_file.cc",
        (BSR, *ALL),
        [
            ("const std::int64_t first = r < rows ? cols : 0;", "const std::int64_t first = cols;"),
            (
                "const std::int64_t first = r < rows ? cols : 0;",
                "const std::int64_t first = r < rows ? shape.block_cols : 0;",
            ),
            (
                "if (rows == shape.block_rows && cols == shape.block_cols) continue;",
                "if (rows == shape.block_rows) continue;",
            ),
            (
                "if (rows == shape.block_rows && cols == shape.block_cols) continue;",
                "if (cols == shape.block_cols) continue;",
            ),
            (
                "if (Status status = check_indices(op, entry.shape, *crow, *col); !status.ok()) return status;",
                "",
            ),
            (
                "if (Status status = check_padding(op, matrix); !status.ok()) return status;\n  FileWeight read(",
                "FileWeight read(",
            ),
            ("  file.metadata.erase(std::string(kMetadataKey));\n", ""),
            ("if (owner_of_index(tensor) || is_scales ||", "if (is_scales ||"),
            ("if (owner_of_index(tensor) || is_scales ||", "if (owner_of_index(tensor) ||"),
            (
                "piece(weight, kCrow), piece(weight, kCol),\n",
                "piece(weight, kCrow),\n",
            ),
            ("if (matrix.values.size() != bytes) {", "if (matrix.values.size() < bytes) {"),
            ("  return check_padding(op, matrix);\n", "  return {};\n"),
            ("if (file.metadata.contains(std::string(kMetadataKey))) {", "if (false) {"),
            (
                'if (label.empty()) return invalid(op, "the weights\' names must be UTF-8", "other bytes");',
                "",
            ),
            ("  if (modules.empty()) return parts;\n", ""),
            ("(dirty - row) / size, ']'", "dirty - row, ']'"),
            (
                "info.dtype == SafetensorsDType::i64) return as_numbers",
                "info.dtype != SafetensorsDType::i64) return as_numbers",
            ),
        ],
    ),
    (
        "src/io/output_file.cc",
        (FILES, *ALL),
        [
            ("if (!temporary_.empty()) ::unlink(temporary_.c_str());", ""),
            ("O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC", "O_WRONLY | O_CREAT | O_CLOEXEC"),
            ("if (written < 0) return failed(errno);", "if (written < 0) return {};"),
            (
                "bytes = bytes.subspan(static_cast<std::size_t>(written));",
                "bytes = {};",
                {
                    "alive": "write(2) writes all of a regular file, or fails; what it cuts at 2 GiB is too large for a test"
                },
            ),
            ("if (::fsync(descriptor_) != 0) return failed(errno);", ""),
            ("  temporary_.clear();\n", "", {"alive": "the name is gone, unlinking it again does nothing"}),
            ("    ::fsync(directory);\n", ""),
            (
                "closed != 0 || std::rename",
                "false || std::rename",
                {"alive": "only a network file system reports at close what fsync did not"},
            ),
        ],
    ),
    (
        "src/io/source.cc",
        (FILES, *ALL),
        [
            ("      offset += got;\n", ""),
            ("if (!S_ISREG(info.st_mode)) return", "if (false) return"),
            ("O_RDONLY | O_CLOEXEC | O_NONBLOCK", "O_RDONLY | O_CLOEXEC"),
            ("      if (got == 0) {", "      if (got == 1) {"),
            ("bytes_.data() + offset, out.size()", "bytes_.data(), out.size()"),
        ],
    ),
    (
        "src/io/safetensors_dtype.cc",
        (FILES, *ALL),
        [
            ('"F6_E2M3", 6}', '"F6_E2M3", 8}'),
            ('"C64", 64}', '"C64", 128}'),
            (
                "case DType::bf16: return SafetensorsDType::bf16;",
                "case DType::bf16: return SafetensorsDType::f16;",
            ),
        ],
    ),
]
