"""Jacobians of functions of rows, and their top singular triplets.

Input: a function f: (R, d) -> (R, d) that acts on each row separately. Output: its Jacobians J (R, d, d), and their top K
singular triplets, with residuals and a certificate of completeness.

- `jacobian`: Jacobians of row-wise functions.
- `svd`: the top K triplets of a matrix; the certificate.
- `eigenvectors`: the first eigenvectors of symmetric matrices.
- `orthonormal`: orthonormal rows, by Cholesky factorisation.
- `costs`: which method is expected to cost less, and how many matrices fit into memory.
- `cores`: one batch of matrices, spread over the cores.
- `products`: singular values of products of many matrices.
- `krylov`: block Golub-Kahan and block Lanczos iterations.
- `linear`: products with frozen weights, on CPUs by the faster library; with rows of an identity, without arithmetic.
- `precision`: switches of float32 products; rounding inside a block; the error of a residual function,
  and tolerances; norms of matrices.
- `transfer`: copies between the host and a device, with few waits.
"""
