/* The C interface against loops, and its errors. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rarefy/c.h"

int write_test_file(const char* path);

static int failures = 0;

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      ++failures;                                                                                  \
      printf("%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, rarefy_last_error()); \
    }                                                                                              \
  } while (0)

/* Fails with this status and a sentence that has this text. */
#define CHECK_FAILS(call, status, text)                   \
  do {                                                    \
    CHECK((call) == (status));                            \
    CHECK(strstr(rarefy_last_error(), text) != NULL);     \
    CHECK(strstr(rarefy_last_error(), "; got ") != NULL); \
  } while (0)

enum { N = 13, K = 11, M = 7 };

static float noise(unsigned* state) {
  *state = *state * 1664525U + 1013904223U;
  return (float)(*state >> 16) / 65536.0F - 0.5F;
}

static rarefy_matrix in(const float* data, int64_t rows, int64_t cols) {
  const rarefy_matrix matrix = {data, RAREFY_F32, rows, cols, cols};
  return matrix;
}

static rarefy_output out(float* data, int64_t rows, int64_t cols) {
  const rarefy_output matrix = {data, RAREFY_F32, rows, cols, cols};
  return matrix;
}

static void check_products(rarefy_pool* pool) {
  float dense[N * K], x[M * K], dy[M * N], bias[N], y[M * N], dx[M * K], stored[N * K];
  unsigned state = 1;
  for (int i = 0; i < N * K; ++i) dense[i] = noise(&state);
  for (int i = 0; i < M * K; ++i) x[i] = noise(&state);
  for (int i = 0; i < M * N; ++i) dy[i] = noise(&state);
  for (int i = 0; i < N; ++i) bias[i] = noise(&state);
  const rarefy_matrix w_in = in(dense, N, K), x_in = in(x, M, K), dy_in = in(dy, M, N);
  const rarefy_output y_out = out(y, M, N), dx_out = out(dx, M, K), w_out = out(stored, N, K);

  rarefy_weight* weight = NULL;
  CHECK(rarefy_weight_from_dense(&w_in, 4, 2, 0.5, &weight) == RAREFY_OK);
  rarefy_weight_info info;
  CHECK(rarefy_weight_get_info(weight, &info) == RAREFY_OK);
  CHECK(info.rows == N && info.cols == K && info.block_rows == 4 && info.block_cols == 2);
  CHECK(info.nnzb == 12 && info.dtype == RAREFY_F32 && info.scales == NULL); /* of 4 × 6 blocks */
  CHECK(rarefy_weight_to_dense(weight, &w_out) == RAREFY_OK);
  int kept = 0;
  for (int i = 0; i < N * K; ++i) {
    kept += stored[i] != 0;
    CHECK(stored[i] == 0 || stored[i] == dense[i]);
  }
  CHECK(kept > 0 && kept < N * K);

  CHECK(rarefy_linear(&x_in, weight, bias, RAREFY_RELU, &y_out, pool) == RAREFY_OK);
  CHECK(rarefy_grad_input(&dy_in, weight, &dx_out, pool) == RAREFY_OK);
  float* dvalues = malloc((size_t)info.nnzb * 8 * sizeof *dvalues);
  CHECK(rarefy_grad_weight(&dy_in, &x_in, weight, dvalues, RAREFY_F32, pool) == RAREFY_OK);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float sum = bias[n];
      for (int k = 0; k < K; ++k) sum += x[m * K + k] * stored[n * K + k];
      CHECK(fabsf(y[m * N + n] - (sum > 0 ? sum : 0)) < 1e-5F);
    }
    for (int k = 0; k < K; ++k) {
      float sum = 0;
      for (int n = 0; n < N; ++n) sum += dy[m * N + n] * stored[n * K + k];
      CHECK(fabsf(dx[m * K + k] - sum) < 1e-5F);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    for (int32_t e = info.crow_indices[i]; e < info.crow_indices[i + 1]; ++e) {
      for (int64_t r = 0; r < 4; ++r) {
        for (int64_t c = 0; c < 2; ++c) {
          const int64_t n = i * 4 + r, k = (int64_t)info.col_indices[e] * 2 + c;
          float sum = 0;
          for (int m = 0; m < M && n < N && k < K; ++m) sum += dy[m * N + n] * x[m * K + k];
          CHECK(fabsf(dvalues[(e * 4 + r) * 2 + c] - sum) < 1e-5F);
        }
      }
    }
  }
  free(dvalues);

  /* What is prepared changes no bit. */
  float again[M * N];
  const rarefy_output again_out = out(again, M, N);
  CHECK(rarefy_weight_prepare(weight, RAREFY_F32, pool) == RAREFY_OK);
  CHECK(rarefy_linear(&x_in, weight, bias, RAREFY_RELU, &again_out, pool) == RAREFY_OK);
  CHECK(memcmp(y, again, sizeof y) == 0);
  rarefy_weight_free(weight);
}

/* bf16 in tall blocks, which some processors multiply from a packed copy. */
static void check_prepared_bf16(void) {
  enum { rows = 64, cols = 64, tokens = 33 };
  uint16_t dense[rows * cols], x[tokens * cols], y[tokens * rows], again[tokens * rows];
  unsigned state = 2;
  for (int i = 0; i < rows * cols; ++i) dense[i] = (uint16_t)(0x3F00U + (unsigned)(64 * noise(&state) + 32));
  for (int i = 0; i < tokens * cols; ++i) x[i] = (uint16_t)(0x3F00U + (unsigned)(64 * noise(&state) + 32));
  const rarefy_matrix w_in = {dense, RAREFY_BF16, rows, cols, cols},
                      x_in = {x, RAREFY_BF16, tokens, cols, cols};
  const rarefy_output y_out = {y, RAREFY_BF16, tokens, rows, rows};
  const rarefy_output again_out = {again, RAREFY_BF16, tokens, rows, rows};
  rarefy_weight* weight = NULL;
  CHECK(rarefy_weight_from_dense(&w_in, 32, 1, 0.5, &weight) == RAREFY_OK);
  CHECK(rarefy_linear(&x_in, weight, NULL, RAREFY_NONE, &y_out, NULL) == RAREFY_OK);
  CHECK(rarefy_weight_prepare(weight, RAREFY_BF16, NULL) == RAREFY_OK);
  CHECK(rarefy_linear(&x_in, weight, NULL, RAREFY_NONE, &again_out, NULL) == RAREFY_OK);
  CHECK(memcmp(y, again, sizeof y) == 0);
  rarefy_weight_free(weight);
}

/* Single elements: up to four tokens read what is held of them, which may add in another order: whole
 * numbers. */
static void check_prepared_elements(void) {
  enum { rows = 40, cols = 100, most = 6 };
  float dense[rows * cols], x[most * cols], y[most * rows], again[most * rows];
  unsigned state = 3;
  for (int i = 0; i < rows * cols; ++i) dense[i] = (float)(int)(100 * noise(&state));
  for (int i = 0; i < most * cols; ++i) x[i] = (float)(int)(100 * noise(&state));
  const rarefy_matrix w_in = in(dense, rows, cols);
  rarefy_weight *weight = NULL, *plain = NULL;
  CHECK(rarefy_weight_from_dense(&w_in, 1, 1, 0.3, &weight) == RAREFY_OK);
  CHECK(rarefy_weight_from_dense(&w_in, 1, 1, 0.3, &plain) == RAREFY_OK);
  CHECK(rarefy_weight_prepare(weight, RAREFY_F32, NULL) == RAREFY_OK);
  for (int tokens = 1; tokens <= most; ++tokens) {
    const rarefy_matrix x_in = in(x, tokens, cols);
    const rarefy_output y_out = out(y, tokens, rows), again_out = out(again, tokens, rows);
    CHECK(rarefy_linear(&x_in, plain, NULL, RAREFY_NONE, &y_out, NULL) == RAREFY_OK);
    CHECK(rarefy_linear(&x_in, weight, NULL, RAREFY_NONE, &again_out, NULL) == RAREFY_OK);
    CHECK(memcmp(y, again, sizeof *y * (size_t)(tokens * rows)) == 0);
  }
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) { /* the indices are not read again */
    rarefy_weight_info info;
    CHECK(rarefy_weight_get_info(weight, &info) == RAREFY_OK);
    memset((void*)(uintptr_t)info.col_indices, 0, (size_t)info.nnzb * sizeof *info.col_indices);
    const rarefy_matrix x_in = in(x, 1, cols);
    const rarefy_output y_out = out(y, 1, rows), again_out = out(again, 1, rows);
    CHECK(rarefy_linear(&x_in, plain, NULL, RAREFY_NONE, &y_out, NULL) == RAREFY_OK);
    CHECK(rarefy_linear(&x_in, weight, NULL, RAREFY_NONE, &again_out, NULL) == RAREFY_OK);
    CHECK(memcmp(y, again, sizeof *y * rows) == 0);
  }
#endif
  rarefy_weight_free(weight);
  rarefy_weight_free(plain);
}

static void check_blocks(void) {
  /* 3×3 in blocks of 2×2; what lies outside of the matrix is not stored. */
  const int32_t crow[] = {0, 1, 2}, col[] = {1, 0};
  const float values[] = {1, 9, 2, 9, 3, 4, 9, 9};
  const rarefy_weight_info info = {.rows = 3,
                                   .cols = 3,
                                   .block_rows = 2,
                                   .block_cols = 2,
                                   .nnzb = 2,
                                   .dtype = RAREFY_F32,
                                   .values = values,
                                   .crow_indices = crow,
                                   .col_indices = col};
  rarefy_weight* weight = NULL;
  CHECK(rarefy_weight_from_blocks(&info, &weight) == RAREFY_OK);
  rarefy_weight_info found;
  CHECK(rarefy_weight_get_info(weight, &found) == RAREFY_OK);
  const float kept[] = {1, 0, 2, 0, 3, 4, 0, 0};
  CHECK(memcmp(found.values, kept, sizeof kept) == 0);
  CHECK(memcmp(found.crow_indices, crow, sizeof crow) == 0 &&
        memcmp(found.col_indices, col, sizeof col) == 0);
  rarefy_weight_free(weight);

  weight = NULL;
  rarefy_weight_info bad = info;
  const int32_t outside[] = {1, 7};
  bad.col_indices = outside;
  CHECK_FAILS(rarefy_weight_from_blocks(&bad, &weight), RAREFY_INVALID_ARGUMENT, "col_indices[1]=7");
  bad = info;
  bad.dtype = (rarefy_dtype)9;
  CHECK_FAILS(rarefy_weight_from_blocks(&bad, &weight), RAREFY_TYPE_MISMATCH,
              "[rarefy_weight_from_blocks] dtype");
  bad = info;
  bad.rows = -1;
  CHECK_FAILS(rarefy_weight_from_blocks(&bad, &weight), RAREFY_INVALID_ARGUMENT, "-1");
  bad = info;
  bad.values = NULL;
  CHECK_FAILS(rarefy_weight_from_blocks(&bad, &weight), RAREFY_INVALID_ARGUMENT, "must not be null");
  CHECK_FAILS(rarefy_weight_from_blocks(NULL, &weight), RAREFY_INVALID_ARGUMENT, "must not be null");
  CHECK(weight == NULL);
}

static void check_file(const char* path) {
  rarefy_file* file = NULL;
  CHECK_FAILS(rarefy_file_read("/nowhere/at/all", &file), RAREFY_IO_ERROR, "[rarefy_file_read]");
  CHECK(file == NULL);
  CHECK(write_test_file(path) == 0);
  CHECK(rarefy_file_read(path, &file) == RAREFY_OK);
  if (file == NULL) return;
  CHECK(strcmp(rarefy_file_weight_name(file, 0), "a.weight") == 0);
  CHECK(strcmp(rarefy_file_weight_name(file, 1), "b.weight") == 0);
  CHECK(rarefy_file_weight_name(file, 2) == NULL && rarefy_file_weight_name(file, -1) == NULL);
  CHECK(strcmp(rarefy_file_tensor_name(file, 0), "a.bias") == 0);

  rarefy_weight* weight = NULL;
  rarefy_matrix bias = {0};
  CHECK(rarefy_file_weight(file, "a.weight", &weight) == RAREFY_OK);
  CHECK(rarefy_file_tensor(file, "a.bias", &bias) == RAREFY_OK);
  CHECK(bias.rows == 1 && bias.cols == 4 && bias.dtype == RAREFY_F32);
  const float x[] = {1, 10, 100, 1000};
  float y[4];
  const rarefy_matrix x_in = in(x, 1, 4);
  const rarefy_output y_out = out(y, 1, 4);
  CHECK(rarefy_linear(&x_in, weight, bias.data, RAREFY_NONE, &y_out, NULL) == RAREFY_OK);
  const float wanted[] = {2101, 4301, 66, 88};
  CHECK(memcmp(y, wanted, sizeof y) == 0);

  CHECK(rarefy_file_weight(file, "b.weight", &weight) == RAREFY_OK);
  rarefy_weight_info info;
  CHECK(rarefy_weight_get_info(weight, &info) == RAREFY_OK);
  CHECK(info.dtype == RAREFY_I8 && info.scales != NULL && info.scales[3] == 2.0F);
  CHECK(rarefy_linear(&x_in, weight, NULL, RAREFY_NONE, &y_out, NULL) == RAREFY_OK);
  const float scaled[] = {1050, 2150, 130, 174};
  for (int i = 0; i < 4; ++i) CHECK(fabsf(y[i] - scaled[i]) < 1e-3F);

  CHECK_FAILS(rarefy_file_weight(file, "c.weight", &weight), RAREFY_INVALID_ARGUMENT, "got c.weight");
  CHECK_FAILS(rarefy_file_tensor(file, "c.bias", &bias), RAREFY_INVALID_ARGUMENT, "got c.bias");
  CHECK_FAILS(rarefy_file_tensor(file, "steps", &bias), RAREFY_TYPE_MISMATCH, "got I64");

  /* Wrong sizes, types and pointers; nothing is written. */
  float same[4];
  memcpy(same, y, sizeof y);
  rarefy_matrix bad = x_in;
  bad.cols = 3;
  CHECK_FAILS(rarefy_linear(&bad, weight, NULL, RAREFY_NONE, &y_out, NULL), RAREFY_INVALID_ARGUMENT,
              "[rarefy_linear]");
  bad = x_in;
  bad.dtype = RAREFY_F16;
  CHECK_FAILS(rarefy_linear(&bad, weight, NULL, RAREFY_NONE, &y_out, NULL), RAREFY_TYPE_MISMATCH,
              "y must be f16");
  CHECK_FAILS(rarefy_linear(&x_in, weight, NULL, (rarefy_activation)7, &y_out, NULL), RAREFY_INVALID_ARGUMENT,
              "rarefy_activation; got 7");
  CHECK_FAILS(rarefy_linear(&x_in, NULL, NULL, RAREFY_NONE, &y_out, NULL), RAREFY_INVALID_ARGUMENT, "null");
  CHECK_FAILS(rarefy_linear(NULL, weight, NULL, RAREFY_NONE, &y_out, NULL), RAREFY_INVALID_ARGUMENT, "null");
  CHECK(memcmp(same, y, sizeof y) == 0);
  rarefy_file_free(file);
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  CHECK(strcmp(rarefy_version(), "") != 0 && strcmp(rarefy_last_error(), "") == 0);
  rarefy_pool* pool = NULL;
  CHECK(rarefy_pool_create(3, &pool) == RAREFY_OK);
  check_products(NULL);
  check_products(pool);
  CHECK(rarefy_force_impl("cpu:scalar") == RAREFY_OK);
  check_products(pool);
  CHECK_FAILS(rarefy_force_impl("cpu:none"), RAREFY_UNSUPPORTED, "none");
  CHECK(rarefy_force_impl(NULL) == RAREFY_OK);
  check_prepared_bf16();
  check_prepared_elements();
  check_blocks();
  check_file(argv[1]);
  rarefy_pool_free(pool);
  rarefy_pool_free(NULL);
  rarefy_weight_free(NULL);
  rarefy_file_free(NULL);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
