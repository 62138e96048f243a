/* The C interface: what a program in C, or in any language that calls C, needs to load sparse weights and to
 * multiply by them on the CPU. C11; beside the C++ headers, whose checks and kernels it calls.
 *
 * Functions that can fail return a rarefy_status; rarefy_last_error() is then the sentence, for the calling
 * thread, until its next call that fails. Nothing is written and nothing is made before all checks.
 * Handles are freed by their own function, which takes NULL. All functions may be called from any thread;
 * a handle is only read by those that take it as const. docs/c.md has a program. */
#ifndef RAREFY_C_H_
#define RAREFY_C_H_

/* NOLINTBEGIN(modernize-use-using, modernize-deprecated-headers): C. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RAREFY_C_API __attribute__((visibility("default")))

/* Numbers of enumerations never change; new ones come at the end. …_ANY is none of them: with it every int is
   a value in C++, too, so that a wrong one can be refused. */
typedef enum rarefy_status {
  RAREFY_OK = 0,
  RAREFY_INVALID_ARGUMENT = 1, /* a shape, an index, a range; what a file must not hold */
  RAREFY_TYPE_MISMATCH = 2,    /* a dtype */
  RAREFY_UNSUPPORTED = 3,      /* valid, but there is no kernel for it */
  RAREFY_OUT_OF_MEMORY = 4,
  RAREFY_IO_ERROR = 5,
  RAREFY_INTERNAL = 6
} rarefy_status;

typedef enum rarefy_dtype {
  RAREFY_F64 = 0,
  RAREFY_F32 = 1,
  RAREFY_BF16 = 2,
  RAREFY_F16 = 3,
  RAREFY_I8 = 4,
  RAREFY_DTYPE_ANY = 0x7FFFFFFF
} rarefy_dtype;

typedef enum rarefy_activation {
  RAREFY_NONE = 0,
  RAREFY_RELU = 1,
  RAREFY_GELU_ERF = 2,
  RAREFY_GELU_TANH = 3,
  RAREFY_SILU = 4,
  RAREFY_ACTIVATION_ANY = 0x7FFFFFFF
} rarefy_activation;

RAREFY_C_API const char* rarefy_version(void); /* "0.1.0" */

/* "[op] requirement; got value" of this thread's last failure; "" before the first. */
RAREFY_C_API const char* rarefy_last_error(void);

/* Kernels of these families alone, "cpu:avx2"; "" or NULL lifts it. For the whole process: before other
 * calls. */
RAREFY_C_API rarefy_status rarefy_force_impl(const char* forced);

/* rows × cols elements; consecutive rows are row_stride elements apart. */
typedef struct rarefy_matrix {
  const void* data;
  rarefy_dtype dtype;
  int64_t rows, cols, row_stride;
} rarefy_matrix;

/* The same, written to; row_stride is at least cols. */
typedef struct rarefy_output {
  void* data;
  rarefy_dtype dtype;
  int64_t rows, cols, row_stride;
} rarefy_output;

/* Threads that calls may share; calls from several threads queue up. NULL instead of one: the calling thread.
 */
typedef struct rarefy_pool rarefy_pool;
RAREFY_C_API rarefy_status rarefy_pool_create(int threads /* 0: one for each core */, rarefy_pool** pool);
RAREFY_C_API void rarefy_pool_free(rarefy_pool* pool); /* no call may be using it */

/* Weights ---------------------------------------------------------------------------------------- */

/* A weight (rows, cols) = (out_features, in_features) of which blocks are stored. It owns what it has. */
typedef struct rarefy_weight rarefy_weight;

/* What a weight is; the pointers are into it. Values are (nnzb, block_rows, block_cols), row-major. */
typedef struct rarefy_weight_info {
  int64_t rows, cols, block_rows, block_cols, nnzb;
  rarefy_dtype dtype;
  const void* values;
  const int32_t* crow_indices; /* block rows + 1 */
  const int32_t* col_indices;  /* nnzb */
  const float* scales;         /* of int8 values, one for each row; else NULL */
} rarefy_weight_info;

/* The round(density · blocks) blocks of largest norm of a dense matrix. */
RAREFY_C_API rarefy_status rarefy_weight_from_dense(const rarefy_matrix* dense, int64_t block_rows,
                                                    int64_t block_cols, double density,
                                                    rarefy_weight** weight);

/* Blocks as they are: of `info` all but scales is read, and copied. Padding must be zero. */
RAREFY_C_API rarefy_status rarefy_weight_from_blocks(const rarefy_weight_info* info, rarefy_weight** weight);

RAREFY_C_API void rarefy_weight_free(rarefy_weight* weight);
RAREFY_C_API rarefy_status rarefy_weight_get_info(const rarefy_weight* weight, rarefy_weight_info* info);
RAREFY_C_API rarefy_status rarefy_weight_to_dense(const rarefy_weight* weight, const rarefy_output* dense);

/* Keeps with the weight what the best kernel for inputs of this dtype derives from it, which calls of
 * rarefy_linear then need not make each time: in bf16 and int8 a second copy of the values; of single
 * elements also their columns in two bytes, for up to four tokens. It changes no result. No other call may be
 * using the weight. */
RAREFY_C_API rarefy_status rarefy_weight_prepare(rarefy_weight* weight, rarefy_dtype x, rarefy_pool* pool);

/* Files ------------------------------------------------------------------------------------------ */

/* A bsr-v1 safetensors file in memory: what rarefy.save_file, save_pretrained and `rarefy convert` write. */
typedef struct rarefy_file rarefy_file;

RAREFY_C_API rarefy_status rarefy_file_read(const char* path, rarefy_file** file);
RAREFY_C_API void rarefy_file_free(rarefy_file* file); /* with all of its weights */

/* Names of sparse weights, and of the other tensors, in order; NULL past the end. */
RAREFY_C_API const char* rarefy_file_weight_name(const rarefy_file* file, int64_t i);
RAREFY_C_API const char* rarefy_file_tensor_name(const rarefy_file* file, int64_t i);

/* A weight of the file, which the file owns. */
RAREFY_C_API rarefy_status rarefy_file_weight(rarefy_file* file, const char* name, rarefy_weight** weight);

/* A dense tensor of one dimension, as one row (a bias), or of two. */
RAREFY_C_API rarefy_status rarefy_file_tensor(const rarefy_file* file, const char* name,
                                              rarefy_matrix* tensor);

/* Products --------------------------------------------------------------------------------------- */

/* y = activation(x Wᵀ + bias): x (tokens, cols), y (tokens, rows). bias: rows elements of y's dtype, or NULL.
 */
RAREFY_C_API rarefy_status rarefy_linear(const rarefy_matrix* x, const rarefy_weight* weight,
                                         const void* bias, rarefy_activation activation,
                                         const rarefy_output* y, rarefy_pool* pool);

/* dx = dy W. */
RAREFY_C_API rarefy_status rarefy_grad_input(const rarefy_matrix* dy, const rarefy_weight* weight,
                                             const rarefy_output* dx, rarefy_pool* pool);

/* dW = dyᵀ x on the stored blocks alone: `dvalues` is as large as the values, of dtype `dtype`. */
RAREFY_C_API rarefy_status rarefy_grad_weight(const rarefy_matrix* dy, const rarefy_matrix* x,
                                              const rarefy_weight* weight, void* dvalues, rarefy_dtype dtype,
                                              rarefy_pool* pool);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-use-using, modernize-deprecated-headers) */

#endif /* RAREFY_C_H_ */
