/* cublasGemmEx as its manual has it: matrices in column-major order,
 * C (m, n) = alpha op(A) op(B) + beta C. Inputs widen to float32, sums are
 * float32. As cuBLAS picks its algorithm by the shape, the number of columns
 * (rksc's rows) decides where sums are cut: k falls into 1 + n mod 11 slices,
 * each is summed in order, then the slices are. Equal calls give equal bits,
 * a row in another batch other ones. tests/test_cuda_host.py compares it with
 * SciPy's gemm. */
#include "host.h"
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

struct cublasContext {
    cudaStream_t stream = nullptr;
    bool has_workspace = false;
    cublasMath_t math = CUBLAS_DEFAULT_MATH;
};

namespace
{

float read(const void *data, cudaDataType_t type, size_t i)
{
    switch (type) {
    case CUDA_R_16F:
        return __half2float(static_cast<const __half *>(data)[i]);
    case CUDA_R_16BF:
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[i]);
    default:
        return static_cast<const float *>(data)[i];
    }
}

void write(void *data, cudaDataType_t type, size_t i, float x)
{
    switch (type) {
    case CUDA_R_16F:
        static_cast<__half *>(data)[i] = __float2half_rn(x);
        break;
    case CUDA_R_16BF:
        static_cast<__nv_bfloat16 *>(data)[i] = __float2bfloat16_rn(x);
        break;
    default:
        static_cast<float *>(data)[i] = x;
    }
}

float dot(const float *x, const float *y, size_t k, size_t slices)
{
    float sum = 0.0f;
    for (size_t s = 0; s < slices; s++) {
        float part = 0.0f;
        for (size_t l = s * k / slices; l < (s + 1) * k / slices; l++) {
            part += x[l] * y[l];
        }
        sum += part;
    }
    return sum;
}

struct gemm {
    cublasOperation_t op_a, op_b;
    size_t m, n, k;
    float alpha, beta;
    const void *a, *b;
    void *c;
    cudaDataType_t a_type, b_type, c_type;
    size_t lda, ldb, ldc;

    bool run() const
    {
        std::vector<float> left(m * k), right(k * n); /* (m, k), (n, k) */
        for (size_t i = 0; i < m; i++) {
            for (size_t l = 0; l < k; l++) {
                left[i * k + l] = read(
                    a, a_type, op_a == CUBLAS_OP_N ? i + l * lda : l + i * lda);
            }
        }
        for (size_t j = 0; j < n; j++) {
            for (size_t l = 0; l < k; l++) {
                right[j * k + l] = read(
                    b, b_type, op_b == CUBLAS_OP_N ? l + j * ldb : j + l * ldb);
            }
        }
        for (size_t j = 0; j < n; j++) {
            for (size_t i = 0; i < m; i++) {
                float sum = dot(&left[i * k], &right[j * k], k, 1 + n % 11);
                float old =
                    beta != 0.0f ? beta * read(c, c_type, i + j * ldc) : 0.0f;
                write(c, c_type, i + j * ldc, alpha * sum + old);
            }
        }
        return true;
    }
};

size_t bytes_of(cudaDataType_t type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

/* Bytes from the first to the last element of a (rows, cols) matrix. */
size_t span(size_t rows, size_t cols, size_t ld, cudaDataType_t type)
{
    return ((cols - 1) * ld + rows) * bytes_of(type);
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle)
{
    *handle = new cublasContext;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    handle->has_workspace = false; /* as the manual says */
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace,
                                     size_t bytes)
{
    if (!host::in_piece(workspace, bytes) ||
        reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    handle->has_workspace = true;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode)
{
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t
cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a,
             cublasOperation_t op_b, int m, int n, int k, const void *alpha,
             const void *a, cudaDataType_t a_type, int lda, const void *b,
             cudaDataType_t b_type, int ldb, const void *beta, void *c,
             cudaDataType_t c_type, int ldc, cublasComputeType_t compute,
             cublasGemmAlgo_t)
{
    std::lock_guard<std::recursive_mutex> held(host::mutex);
    if (m < 0 || n < 0 || k < 0 || lda < std::max(1, op_a == CUBLAS_OP_N ? m : k) ||
        ldb < std::max(1, op_b == CUBLAS_OP_N ? k : n) || ldc < std::max(1, m) ||
        a_type != b_type) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (compute != CUBLAS_COMPUTE_32F ||
        (handle->math & 15) == CUBLAS_TF32_TENSOR_OP_MATH) {
        return CUBLAS_STATUS_NOT_SUPPORTED; /* rksc has no use for others */
    }
    if (!handle->has_workspace) {
        std::fprintf(stderr, "cuda-host: cublasGemmEx without a workspace\n");
        return CUBLAS_STATUS_NOT_INITIALIZED;
    }
    if (m == 0 || n == 0) {
        return CUBLAS_STATUS_SUCCESS;
    }
    gemm g = {op_a,
              op_b,
              size_t(m),
              size_t(n),
              size_t(k),
              *static_cast<const float *>(alpha),
              *static_cast<const float *>(beta),
              a,
              b,
              c,
              a_type,
              b_type,
              c_type,
              size_t(lda),
              size_t(ldb),
              size_t(ldc)};
    bool a_plain = op_a == CUBLAS_OP_N, b_plain = op_b == CUBLAS_OP_N;
    if (!host::in_piece(a, span(a_plain ? g.m : g.k, a_plain ? g.k : g.m, g.lda,
                                a_type)) ||
        !host::in_piece(b, span(b_plain ? g.k : g.n, b_plain ? g.n : g.k, g.ldb,
                                b_type)) ||
        !host::in_piece(c, span(g.m, g.n, g.ldc, c_type))) {
        std::fprintf(stderr, "cuda-host: cublasGemmEx: a matrix is not in one "
                             "piece of device memory\n");
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    return host::enqueue(handle->stream, "cublasGemmEx",
                         [g] { return g.run(); }) == cudaSuccess
               ? CUBLAS_STATUS_SUCCESS
               : CUBLAS_STATUS_EXECUTION_FAILED;
}

const char *cublasGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    }
}

const char *cublasGetStatusString(cublasStatus_t status)
{
    return cublasGetStatusName(status);
}

} // extern "C"
