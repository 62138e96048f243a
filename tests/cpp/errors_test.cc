// Bad input, case by case: the code, the words with argument and position, and nothing changed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "rarefy/convert.h"
#include "rarefy/linear.h"

namespace rarefy::test {
namespace {

constexpr auto kBad = StatusCode::invalid_argument;
constexpr auto kType = StatusCode::type_mismatch;
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

// Valid arguments of everything, for a case to spoil: W is (6, 8) in 2×4 blocks, M is 3.
struct Call {
  BsrShape shape{6, 8, 2, 4, 4};
  std::vector<std::int32_t> crow{0, 2, 3, 4}, col{0, 1, 1, 0};
  Pattern pattern = *Pattern::create(shape, crow, col);
  std::vector<float> buffer = std::vector<float>(400, 1.5F);  // all that a call could write to
  float* const x = buffer.data();
  float* const dy = x + 24;
  float* const values = dy + 18;
  float* const bias = values + 32;
  float* const y = bias + 6;
  float* const dx = y + 18;
  float* const dvalues = dx + 24;
  float* const dense = dvalues + 32;
  std::vector<std::int32_t> plan = std::vector<std::int32_t>(static_cast<std::size_t>(plan_size(shape)), -7);
  MatrixView x_view{x, DType::f32, 3, 8, 8};
  MatrixView dy_view{dy, DType::f32, 3, 6, 6};
  MutableMatrixView y_view{y, DType::f32, 3, 6, 6};
  MutableMatrixView dx_view{dx, DType::f32, 3, 8, 8};
  MutableMatrixView dense_view{dense, DType::f32, 6, 8, 8};
  BsrView w{pattern.view(), values, DType::f32, Device::cpu};
  CsrMatrix csr{2, 3, {0, 2, 3}, {0, 2, 1}, DType::f32, std::vector<std::byte>(12)};
  CscMatrix csc{3, 2, {0, 2, 3}, {0, 2, 1}, DType::f32, std::vector<std::byte>(12)};
  CooMatrix coo{2, 3, {0, 0, 1}, {0, 2, 1}, DType::f32, std::vector<std::byte>(12)};

  Status create() { return Pattern::create(shape, crow, col).status(); }
  Status build() { return build_plan("build", shape, crow, col, plan); }
  Activation activation = Activation::none;

  Status linear() { return rarefy::linear(x_view, w, bias, activation, y_view); }
  Status grad_input() { return rarefy::grad_input(dy_view, w, dx_view); }
  Status grad_weight(void* to, DType dtype = DType::f32) {
    return rarefy::grad_weight(dy_view, x_view, w.plan, to, dtype);
  }
};

struct Case {
  const char* name;
  StatusCode code;
  const char* text;
  Status (*run)(Call&);
};

// gtest prints parameters; bytes would be no help.
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const Case kPatternCases[] = {
    {"NegativeShape", kBad, "[Pattern] shape must not be negative; got (-6, 8)",
     [](Call& c) { return c.shape.rows = -6, c.create(); }},
    {"BlockOfZeroRows", kBad, "block_shape must be at least 1 in each dimension; got (0, 4)",
     [](Call& c) { return c.shape.block_rows = 0, c.create(); }},
    {"NegativeBlock", kBad, "got (2, -4)", [](Call& c) { return c.shape.block_cols = -4, c.create(); }},
    {"ShapeBeyondInt32", kBad, "shape and block_shape must be at most 2147483647",
     [](Call& c) { return c.shape.cols = kHuge, c.create(); }},
    {"ValuesOverflow", kBad, "[op] the values must fit in memory; got 1 blocks of (2147483647, 2147483647)",
     [](Call&) {
       return check_shape("op", {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, 1});
     }},
    {"BlockBeyondTheRows", kBad,
     "[op] block_shape must be at most (512, 256), the shape rounded up to multiples of 256; got (513, 1) "
     "for "
     "shape (257, 0)",
     [](Call&) {
       return check_shape("op", {257, 0, 513, 1, 0});
     }},
    {"BlockBeyondTheColumns", kBad, "[op] block_shape must be at most (256, 256)",
     [](Call&) {
       return check_shape("op", {4, 256, 256, 257, 1});
     }},
    {"ValuesOfAllBlocksOverflow", kBad, "[op] the values must fit in memory; got 4194304 blocks",
     [](Call&) {
       return check_shape("op", {INT32_MAX, INT32_MAX, 1 << 20, 1 << 20, 1 << 22});
     }},
    {"ColLongerThanTheShapeSays", kBad, "[op] col_indices must have 3 elements; got 4",
     [](Call& c) {
       return check_indices("op", {6, 8, 2, 4, 3}, std::vector<std::int32_t>{0, 1, 2, 3}, c.col);
     }},
    {"MoreBlocksThanPlaces", kBad, "[op] the number of stored blocks must be in [0, 6]; got 7",
     [](Call&) {
       return check_shape("op", {6, 8, 2, 4, 7});
     }},
    {"NegativeNnzb", kBad, "must be in [0, 6]; got -1",
     [](Call&) {
       return check_shape("op", {6, 8, 2, 4, -1});
     }},
    {"CrowTooShort", kBad, "crow_indices must have 4 elements for 3 block rows; got 3",
     [](Call& c) {
       return c.crow = {0, 2, 4}, c.create();
     }},
    {"CrowEmpty", kBad, "crow_indices must have 4 elements for 3 block rows; got 0",
     [](Call& c) { return c.crow.clear(), c.create(); }},
    {"CrowFirst", kBad, "crow_indices[0] must be 0; got 1",
     [](Call& c) { return c.crow[0] = 1, c.create(); }},
    {"CrowLast", kBad, "crow_indices[3] must be the length of col_indices, 4; got 3",
     [](Call& c) { return c.crow[3] = 3, c.create(); }},
    {"CrowDecreases", kBad, "crow_indices must not decrease; got crow_indices[2]=1 after crow_indices[1]=2",
     [](Call& c) { return c.crow[2] = 1, c.create(); }},
    {"CrowNegative", kBad, "got crow_indices[1]=-2 after crow_indices[0]=0",
     [](Call& c) { return c.crow[1] = -2, c.create(); }},
    {"CrowBeyondARow", kBad, "a block row must have at most 2 entries; got crow_indices[1]-crow_indices[0]=4",
     [](Call& c) {
       return c.crow = {0, 4, 4, 4}, c.create();
     }},
    {"ColOutOfRange", kBad, "col_indices[2]=2 out of range for 2 block columns",
     [](Call& c) { return c.col[2] = 2, c.create(); }},
    {"ColNegative", kBad, "col_indices[3]=-1 out of range",
     [](Call& c) { return c.col[3] = -1, c.create(); }},
    {"ColUnsorted", kBad,
     "sorted and distinct in each block row; got col_indices[1]=0 after 1 in block row 0",
     [](Call& c) {
       return c.col = {1, 0, 1, 0}, c.create();
     }},
    {"ColDuplicate", kBad, "got col_indices[1]=1 after 1 in block row 0",
     [](Call& c) {
       return c.col = {1, 1, 1, 0}, c.create();
     }},
    {"Int64ColBeyondInt32", kBad, "col_indices[0]=4294967296 out of range",
     [](Call&) {
       const std::vector<std::int64_t> crow{0, 1}, col{std::int64_t{1} << 32};
       return check_indices("op", {1, 1, 1, 1, 1}, crow, col);
     }},
    {"Int64CrowOverflow", kBad, "crow_indices[1]-crow_indices[0]=9223372036854775807",
     [](Call&) {
       const std::vector<std::int64_t> crow{0, kHuge}, col{0};
       return check_indices("op", {1, 1, 1, 1, 1}, crow, col);
     }},
    {"PlanTooShort", kBad, "[build] plan must have ",
     [](Call& c) { return build_plan("build", c.shape, c.crow, c.col, std::span(c.plan).first(9)); }},
    {"PlanTooLong", kBad, "[build] plan must have ",
     [](Call& c) {
       std::vector<std::int32_t> longer(c.plan.size() + 1);
       return build_plan("build", c.shape, c.crow, c.col, longer);
     }},
    {"PlanWithAWordMore", kBad, "[op] plan must have ",
     [](Call& c) {
       std::vector<std::int32_t> longer(c.pattern.plan().begin(), c.pattern.plan().end());
       return longer.push_back(0), view_plan("op", c.shape, longer).status();
     }},
    {"PlanOfBadPattern", kBad, "[build] col_indices must be in [0, 2)",
     [](Call& c) { return c.col[0] = 9, c.build(); }},
    {"PlanOfAnotherLength", kBad, "[op] plan must have ",
     [](Call& c) { return view_plan("op", c.shape, c.pattern.plan().first(12)).status(); }},
    {"PlanOfAnotherShape", kBad, "got a plan for shape (6, 8), block_shape (2, 4), 4 blocks",
     [](Call& c) {
       return view_plan("op", {5, 7, 2, 4, 4}, c.pattern.plan()).status();
     }},
    {"PlanOfGarbage", kBad, "plan must be made by bsr_plan",
     [](Call& c) { return view_plan("op", c.shape, c.plan).status(); }},
    {"PlanOfAnotherLayout", kBad,
     "plan must be made by bsr_plan for shape (6, 8), block_shape (2, 4), 4 blocks; "
     "got something else",
     [](Call& c) {  // a header that agrees in all but its first word
       c.plan.assign(c.pattern.plan().begin(), c.pattern.plan().end());
       ++c.plan[0];
       const Status status = view_plan("op", c.shape, c.plan).status();
       return c.plan.assign(c.plan.size(), -7), status;
     }},
    {"DevicePlanOfAnotherLength", kBad, "[op] plan must have ",
     [](Call& c) { return view_device_plan("op", c.shape, c.plan.data(), 3).status(); }},
};

const Case kProductCases[] = {
    {"LinearNegativeRows", kBad, "[linear] x's shape must not be negative; got (-3, 8)",
     [](Call& c) { return c.x_view.rows = -3, c.linear(); }},
    {"LinearNegativeColumns", kBad, "[linear] x's shape must not be negative; got (3, -8)",
     [](Call& c) { return c.x_view.cols = -8, c.linear(); }},
    {"LinearK", kBad, "[linear] x must have 8 columns (in_features); got 7",
     [](Call& c) { return c.x_view.cols = 7, c.linear(); }},
    {"LinearN", kBad, "[linear] y must have 6 columns (out_features); got 5",
     [](Call& c) { return c.y_view.cols = 5, c.linear(); }},
    {"LinearM", kBad, "[linear] y must have 3 rows, like x; got 2",
     [](Call& c) { return c.y_view.rows = 2, c.linear(); }},
    {"LinearNullX", kBad, "[linear] x must point to its elements; got a null pointer",
     [](Call& c) { return c.x_view.data = nullptr, c.linear(); }},
    {"LinearNullY", kBad, "[linear] y must point",
     [](Call& c) { return c.y_view.data = nullptr, c.linear(); }},
    {"LinearNullValues", kBad, "[linear] values must point",
     [](Call& c) { return c.w.values = nullptr, c.linear(); }},
    {"LinearNullCrow", kBad, "[linear] plan must point to its index arrays",
     [](Call& c) { return c.w.plan.crow = nullptr, c.linear(); }},
    {"LinearNullCcol", kBad, "[linear] plan must point to its index arrays",
     [](Call& c) { return c.w.plan.ccol = nullptr, c.linear(); }},
    {"LinearNullRow", kBad, "[linear] plan must point to its index arrays",
     [](Call& c) { return c.w.plan.row = nullptr, c.linear(); }},
    {"LinearNullPerm", kBad, "[linear] plan must point to its index arrays",
     [](Call& c) { return c.w.plan.perm = nullptr, c.linear(); }},
    {"LinearNullCol", kBad, "[linear] plan must point to its index arrays",
     [](Call& c) { return c.w.plan.col = nullptr, c.linear(); }},
    {"LinearNegativeStride", kBad, "[linear] x's row stride must not be negative; got -8",
     [](Call& c) { return c.x_view.row_stride = -8, c.linear(); }},
    {"LinearOverlappingRows", kBad, "[linear] y's rows must not overlap: row stride ≥ 6; got 5",
     [](Call& c) { return c.y_view.row_stride = 5, c.linear(); }},
    {"LinearBroadcastOutput", kBad, "row stride ≥ 6; got 0",
     [](Call& c) { return c.y_view.row_stride = 0, c.linear(); }},
    {"LinearExtentOverflows", kBad, "[linear] x must fit in memory; got shape (3, 8), row stride",
     [](Call& c) { return c.x_view.row_stride = kHuge / 2, c.linear(); }},
    {"LinearBytesOverflow", kBad, "[linear] x must fit in memory",
     [](Call& c) { return c.x_view.row_stride = kHuge / 4, c.linear(); }},
    {"LinearBothStrides", kBad, "[linear] x's row or column stride must be 1; got 8 and 3",
     [](Call& c) { return c.x_view.col_stride = 3, c.linear(); }},
    {"LinearNegativeColumnStride", kBad, "[linear] x's column stride must not be negative; got -3",
     [](Call& c) { return c.x_view.row_stride = 1, c.x_view.col_stride = -3, c.linear(); }},
    {"LinearOverlappingColumns", kBad, "[linear] y's columns must not overlap: column stride ≥ 3; got 2",
     [](Call& c) { return c.y_view.row_stride = 1, c.y_view.col_stride = 2, c.linear(); }},
    {"LinearColumnsOverflow", kBad, "[linear] x must fit in memory; got shape (3, 8), column stride",
     [](Call& c) { return c.x_view.row_stride = 1, c.x_view.col_stride = kHuge / 2, c.linear(); }},
    {"ToDenseByFeature", kBad, "dense's column stride must be 1; got 6",
     [](Call& c) {
       c.dense_view.row_stride = 1;
       c.dense_view.col_stride = 6;
       return bsr_to_dense(c.w, c.dense_view);
     }},
    {"LinearInPlace", kBad, "[linear] y must not share memory with the inputs; got an overlap with x",
     [](Call& c) { return c.y_view.data = c.x + 8, c.linear(); }},
    {"LinearIntoValues", kBad, "got an overlap with values",
     [](Call& c) { return c.y_view.data = c.values, c.linear(); }},
    {"LinearIntoBias", kBad, "got an overlap with bias",
     [](Call& c) { return c.y_view.data = c.bias + 5, c.linear(); }},
    {"LinearInputDType", kType, "[linear] y must be f16 for f16 x; got f32",
     [](Call& c) { return c.x_view.dtype = DType::f16, c.linear(); }},
    {"LinearActivation", kBad, "[linear] activation must be one of the 5 of rarefy/activation.h; got 5",
     [](Call& c) { return c.activation = static_cast<Activation>(5), c.linear(); }},
    {"LinearOutputDType", kType, "[linear] y must be f32 for f32 x; got bf16",
     [](Call& c) { return c.y_view.dtype = DType::bf16, c.linear(); }},
    {"LinearInt8Output", kType, "[linear] y must be f32 or f64 for i8 x; got i8",
     [](Call& c) {
       c.x_view.dtype = c.w.dtype = c.y_view.dtype = DType::i8;
       return c.linear();
     }},
    {"LinearDevice", kType, "[linear] x must be on device cpu; got cuda",
     [](Call& c) { return c.x_view.device = Device::cuda, c.linear(); }},
    {"GradInputN", kBad, "[grad_input] dy must have 6 columns (out_features); got 8",
     [](Call& c) { return c.dy_view.cols = 8, c.grad_input(); }},
    {"GradInputK", kBad, "[grad_input] dx must have 8 columns (in_features); got 9",
     [](Call& c) { return c.dx_view.cols = 9, c.dx_view.row_stride = 9, c.grad_input(); }},
    {"GradInputM", kBad, "[grad_input] dx must have 3 rows, like dy; got 1",
     [](Call& c) { return c.dx_view.rows = 1, c.grad_input(); }},
    {"GradInputInPlace", kBad,
     "[grad_input] dx must not share memory with the inputs; got an overlap with dy",
     [](Call& c) { return c.dx_view.data = c.dy, c.grad_input(); }},
    {"GradInputDTypes", kType, "[grad_input] dx must be f64 for f64 dy; got f32",
     [](Call& c) { return c.dy_view.dtype = DType::f64, c.grad_input(); }},
    {"GradWeightN", kBad, "[grad_weight] dy must have 6 columns (out_features); got 5",
     [](Call& c) { return c.dy_view.cols = 5, c.grad_weight(c.dvalues); }},
    {"GradWeightK", kBad, "[grad_weight] x must have 8 columns (in_features); got 5",
     [](Call& c) { return c.x_view.cols = 5, c.grad_weight(c.dvalues); }},
    {"GradWeightM", kBad, "[grad_weight] x must have 3 rows, like dy; got 2",
     [](Call& c) { return c.x_view.rows = 2, c.grad_weight(c.dvalues); }},
    {"GradWeightNull", kBad, "[grad_weight] dvalues must point to its elements",
     [](Call& c) { return c.grad_weight(nullptr); }},
    {"GradWeightInPlace", kBad, "[grad_weight] dvalues must not share memory with the inputs",
     [](Call& c) { return c.grad_weight(c.x); }},
    {"GradWeightIntoDy", kBad,
     "[grad_weight] dvalues must not share memory with the inputs; got an overlap with dy",
     [](Call& c) { return c.grad_weight(c.dy); }},
    {"GradWeightIntoTheEndOfDy", kBad, "got an overlap with dy",
     [](Call& c) {  // its last element alone; x lies before it
       return c.x_view.data = c.dense, c.grad_weight(c.dy + 17);
     }},
    {"GradInputIntoValues", kBad,
     "[grad_input] dx must not share memory with the inputs; got an overlap with values",
     [](Call& c) { return c.dx_view.data = c.values + 31, c.grad_input(); }},
    {"GradWeightDType", kType, "[grad_weight] dvalues must be f64, f32, bf16 or f16; got i8",
     [](Call& c) { return c.grad_weight(c.dvalues, DType::i8); }},
    {"GradWeightInputs", kType, "[grad_weight] dy and x must have one dtype; got f32 and bf16",
     [](Call& c) { return c.x_view.dtype = DType::bf16, c.grad_weight(c.dvalues); }},
    {"GradWeightDevices", kType, "[grad_weight] dy must be on device cpu; got cuda",
     [](Call& c) { return c.dy_view.device = Device::cuda, c.grad_weight(c.dvalues); }},
};

template <std::size_t kLength>
Status mask_case(Call& c, const std::uint8_t (&mask)[kLength]) {
  return dense_to_bsr(c.dense_view, {2, 4}, mask).status();
}

const Case kConvertCases[] = {
    {"DenseBlock", kBad, "[dense_to_bsr] block_shape must be at least 1",
     [](Call& c) {
       return dense_to_bsr(c.dense_view, {0, 4}).status();
     }},
    {"DenseNull", kBad, "[dense_to_bsr] dense must point to its elements",
     [](Call& c) {
       return c.dense_view.data = nullptr, dense_to_bsr(c.dense_view, {2, 4}).status();
     }},
    {"DenseOnGpu", kType, "[dense_to_bsr] dense must be on device cpu; got cuda",
     [](Call& c) {
       return c.dense_view.device = Device::cuda, dense_to_bsr(c.dense_view, {2, 4}).status();
     }},
    {"MaskLength", kBad, "[dense_to_bsr] block_mask must have 6 elements, one a block; got 5",
     [](Call& c) {
       return mask_case(c, {1, 1, 1, 1, 1});
     }},
    {"MaskTooLong", kBad, "[dense_to_bsr] block_mask must have 6 elements, one a block; got 7",
     [](Call& c) {
       return mask_case(c, {1, 1, 1, 1, 1, 1, 1});
     }},
    {"MaskValue", kBad, "got block_mask[4]=2",
     [](Call& c) {
       return mask_case(c, {1, 0, 1, 1, 2, 1});
     }},
    {"ToDenseShape", kBad, "[bsr_to_dense] dense must have shape (6, 8); got (6, 7)",
     [](Call& c) { return c.dense_view.cols = 7, bsr_to_dense(c.w, c.dense_view); }},
    {"ToDenseDType", kType, "[bsr_to_dense] dense must be f32",
     [](Call& c) { return c.dense_view.dtype = DType::bf16, bsr_to_dense(c.w, c.dense_view); }},
    {"ToDenseStride", kBad, "dense's rows must not overlap: row stride ≥ 8; got 7",
     [](Call& c) { return c.dense_view.row_stride = 7, bsr_to_dense(c.w, c.dense_view); }},
    {"ToDenseInPlace", kBad, "[bsr_to_dense] dense must not share memory with the inputs",
     [](Call& c) { return c.dense_view.data = c.values, bsr_to_dense(c.w, c.dense_view); }},
    {"ToDenseFromGpu", kType, "[bsr_to_dense]",
     [](Call& c) { return c.w.device = Device::cuda, bsr_to_dense(c.w, c.dense_view); }},
    {"DensityNan", kBad, "[block_mask_by_norm] density must be in [0, 1]; got nan",
     [](Call& c) {
       return block_mask_by_norm(c.dense_view, {2, 4}, std::nan("")).status();
     }},
    {"DensityNegative", kBad, "density must be in [0, 1]; got -0.1",
     [](Call& c) {
       return block_mask_by_norm(c.dense_view, {2, 4}, -0.1).status();
     }},
    {"DensityAboveOne", kBad, "density must be in [0, 1]; got 1.5",
     [](Call& c) {
       return block_mask_by_norm(c.dense_view, {2, 4}, 1.5).status();
     }},
    {"TooManyElementsForCsr", kBad, "[bsr_to_csr] the number of stored elements must be at most 2147483647",
     [](Call& c) {
       const std::vector<std::int32_t> crow{0, 1}, col{0};
       const Pattern one = *Pattern::create({65536, 65536, 65536, 65536, 0}, crow, col);
       return bsr_to_csr({one.view(), c.values, DType::f32}).status();  // fails before reading a value
     }},
    {"CsrCrow", kBad,
     "[csr_to_bsr] crow_indices must not decrease; got crow_indices[2]=1 after crow_indices[1]=2",
     [](Call& c) {
       return c.csr.crow_indices[2] = 1, csr_to_bsr(c.csr, {2, 2}).status();
     }},
    {"CsrCol", kBad,
     "[csr_to_csc] col_indices must be in [0, 3); got col_indices[1]=3 out of range for 3 columns",
     [](Call& c) { return c.csr.col_indices[1] = 3, csr_to_csc(c.csr).status(); }},
    {"CsrValues", kBad, "[csr_to_coo] values must have 12 bytes for 3 f32 elements; got 11",
     [](Call& c) { return c.csr.values.pop_back(), csr_to_coo(c.csr).status(); }},
    {"CsrMoreValues", kBad, "[csr_to_coo] values must have 12 bytes for 3 f32 elements; got 13",
     [](Call& c) { return c.csr.values.push_back({}), csr_to_coo(c.csr).status(); }},
    {"CsrBlock", kBad, "[csr_to_bsr] block_shape must be at least 1 in each dimension; got (2, 0)",
     [](Call& c) {
       return csr_to_bsr(c.csr, {2, 0}).status();
     }},
    {"CscIndices", kBad,
     "[csc_to_csr] row_indices must be sorted and distinct in each column; "
     "got row_indices[1]=0 after 0 in column 0",
     [](Call& c) { return c.csc.row_indices[1] = 0, csc_to_csr(c.csc).status(); }},
    {"CscOffsets", kBad, "[csc_to_csr] ccol_indices[0] must be 0; got 1",
     [](Call& c) { return c.csc.ccol_indices[0] = 1, csc_to_csr(c.csc).status(); }},
    {"CooLengths", kBad, "[coo_to_csr] col_indices must have 3 elements, like row_indices; got 2",
     [](Call& c) { return c.coo.col_indices.pop_back(), coo_to_csr(c.coo).status(); }},
    {"CooRow", kBad, "[coo_to_csr] row_indices must be in [0, 2); got row_indices[1]=2",
     [](Call& c) { return c.coo.row_indices[1] = 2, coo_to_csr(c.coo).status(); }},
    {"CooCol", kBad, "got col_indices[2]=-1",
     [](Call& c) { return c.coo.col_indices[2] = -1, coo_to_csr(c.coo).status(); }},
    {"CooDuplicate", kBad, "entries must be distinct; got (row_indices[1], col_indices[1])=(0, 0), as at 0",
     [](Call& c) { return c.coo.col_indices[1] = 0, coo_to_csr(c.coo).status(); }},
};

class BadInputTest : public ::testing::TestWithParam<Case> {};

const auto case_name = [](const auto& tested) { return tested.param.name; };
INSTANTIATE_TEST_SUITE_P(Pattern, BadInputTest, ::testing::ValuesIn(kPatternCases), case_name);
INSTANTIATE_TEST_SUITE_P(Product, BadInputTest, ::testing::ValuesIn(kProductCases), case_name);
INSTANTIATE_TEST_SUITE_P(Convert, BadInputTest, ::testing::ValuesIn(kConvertCases), case_name);

TEST_P(BadInputTest, IsNamedAndChangesNothing) {
  Call call;
  const std::vector<float> buffer = call.buffer;
  const Status status = GetParam().run(call);
  EXPECT_EQ(name(status.code()), name(GetParam().code)) << status.message();
  EXPECT_NE(status.message().find(GetParam().text), std::string::npos) << status.message();
  EXPECT_EQ(status.message().front(), '[');
  EXPECT_EQ(call.buffer, buffer);
  // Indices are checked in the plan; without its header it is none.
  EXPECT_EQ(call.plan.front(), -7);
  EXPECT_FALSE(view_plan("op", call.shape, call.plan).ok());
}

// The same calls unspoiled, so that each case above fails for its own reason.
TEST(GoodInputTest, IsAccepted) {
  Call call;
  for (const Status& status :
       {call.create(), call.build(), call.linear(), call.grad_input(), call.grad_weight(call.dvalues),
        dense_to_bsr(call.dense_view, {2, 4}).status(), bsr_to_dense(call.w, call.dense_view),
        bsr_to_csr(call.w).status(), csr_to_bsr(call.csr, {2, 2}).status(), csr_to_csc(call.csr).status(),
        csc_to_csr(call.csc).status(), csr_to_coo(call.csr).status(), coo_to_csr(call.coo).status()}) {
    EXPECT_TRUE(status.ok()) << status.message();
  }
  EXPECT_TRUE(view_plan("op", call.shape, call.plan).ok());
  // One row has no next one to overlap with; no rows have no extent, whatever their stride.
  call.x_view.rows = call.y_view.rows = 1;
  call.y_view.row_stride = 0;
  EXPECT_TRUE(call.linear().ok()) << call.linear().message();
  call.x_view.rows = call.y_view.rows = 0;
  call.x_view.row_stride = call.y_view.row_stride = kHuge;
  EXPECT_TRUE(call.linear().ok()) << call.linear().message();
}

// An output may end where an input begins, and begin where one ends.
TEST(GoodInputTest, NeighboursDoNotOverlap) {
  Call call;
  call.x_view.data = call.y + 18;
  EXPECT_TRUE(call.linear().ok()) << call.linear().message();
  call.x_view.data = call.y - 24;
  call.w.values = call.dvalues;
  EXPECT_TRUE(rarefy::linear(call.x_view, call.w, nullptr, Activation::none, call.y_view).ok());
}

// What is empty shares memory with nothing, wherever it points to.
TEST(GoodInputTest, EmptyValuesOverlapNothing) {
  Call call;
  call.crow.assign(4, 0);
  call.col.clear();
  const Pattern none = *Pattern::create(call.shape, call.crow, call.col);
  call.w = {none.view(), call.y + 2, DType::f32, Device::cpu};
  EXPECT_TRUE(call.linear().ok()) << call.linear().message();
  EXPECT_TRUE(call.grad_weight(call.dy + 3).ok()) << call.grad_weight(call.dy + 3).message();
}

TEST(BlockShapeTest, MayReachPastTheMatrixToTheNextMultipleOf256) {
  EXPECT_TRUE(check_shape("op", {1, 257, 256, 512, 1}).ok());
  EXPECT_TRUE(check_shape("op", {0, 0, 256, 256, 0}).ok());
  EXPECT_TRUE(check_shape("op", {512, 1, 512, 1, 1}).ok());
}

}  // namespace
}  // namespace rarefy::test
