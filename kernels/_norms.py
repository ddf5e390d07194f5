"""The arithmetic that norm kernels share: statistics of lines, results, gradients.

A tile is [lines, columns], and FP32 once it is loaded. Statistics are [lines, 1]: mean and rstd, or
rstd alone for a norm without CENTER (rms_norm).
"""

from tritonamp.kernels.device import tl, triton


@triton.jit
def load_sum(x_ptr, r_ptr, offs, mask, ADD: tl.constexpr, EVICT: tl.constexpr):
    """Return a tile of x, or with ADD of x + r, rounded to the dtype of x as torch rounds it."""
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT)
    if ADD:
        r = tl.load(r_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT)
        # rounded before the norm, so that the bits are those of an
        # addition and a norm of its result
        x = (x.to(tl.float32) + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def moments(x, mask, count, CENTER: tl.constexpr):
    """Return the mean of ``count`` columns (0 without CENTER), and the sum of squares around it."""
    # two passes over registers, because a mean of squares minus a squared mean loses
    # the variance if the mean is large
    mean = tl.sum(x, 1, keep_dims=True) / count if CENTER else 0.0
    # Masked once because masked distances are not 0, and again for the reason
    # that softmax_rest_kernel gives.
    d = tl.where(mask, x - mean, 0.0)
    return mean, tl.sum(tl.where(mask, d * d, 0.0), 1, keep_dims=True)


@triton.jit
def add_moments(x, mask, tile, mean, squares, count, CENTER: tl.constexpr):
    """Return mean and squares of ``count`` columns merged with those of a tile of x.

    The tile has ``tile`` columns.
    """
    tile_mean, tile_squares = moments(x, mask, tile, CENTER)
    if CENTER:
        return merge_moments(tile_mean, tile_squares, tile, mean, squares, count)
    else:
        return mean, squares + tile_squares


@triton.jit
def merge_moments(tile_mean, tile_squares, tile, mean, squares, count):
    """Return mean and squares of the union of ``count`` elements and ``tile`` others.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.
    """
    shift = tile_mean - mean
    share = tile * (1.0 / (count + tile))
    return mean + shift * share, squares + (tile_squares + shift * shift * (count * share))


@triton.jit
def reciprocal_std(squares, n, eps):
    """Return 1 / sqrt(squares / n + eps), with an error of 2**-22.9 on a GPU."""
    return tl.rsqrt(squares / n + eps)


@triton.jit
def affine(
    x, mean, rstd, w_ptr, b_ptr, columns, exist,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return the norm's result, in FP32."""
    y = (x - mean) * rstd if CENTER else x * rstd
    # missing columns load 0, and their results are not stored
    if WEIGHT:
        y *= tl.load(w_ptr + columns, mask=exist, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(b_ptr + columns, mask=exist, other=0.0).to(tl.float32)
    return y


@triton.jit
def store_stats(stats_ptr, numbers, count, valid, mean, rstd, CENTER: tl.constexpr):
    """Write the statistics of the lines with these numbers, of ``count`` lines."""
    if CENTER:
        tl.store(stats_ptr + numbers, mean, mask=valid)
        stats_ptr += count
    tl.store(stats_ptr + numbers, rstd, mask=valid)


@triton.jit
def load_stats(stats_ptr, numbers, count, valid, CENTER: tl.constexpr):
    """Return mean (without CENTER an arbitrary value) and rstd of the lines with these numbers.

    ``count`` is the number of all lines.
    """
    # 0 for missing lines, because an undefined rstd may be NaN, and 0 * NaN
    # would enter the sums over lines
    first = tl.load(stats_ptr + numbers, mask=valid, other=0.0)
    if CENTER:
        return first, tl.load(stats_ptr + count + numbers, mask=valid, other=0.0)
    else:
        return first, first


@triton.jit
def load_gradients(
    g_ptr, x_ptr, w_ptr, offs, columns, mask, mean, rstd,
    CENTER: tl.constexpr, WEIGHT: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Return grad, grad * weight, and the normalised x."""
    grad = tl.load(g_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    # recomputed from x, so that the forward keeps its half input instead of an FP32 copy
    h = (x - mean) * rstd if CENTER else x * rstd
    g = grad
    if WEIGHT:
        g *= tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return grad, g, h


@triton.jit
def gradient_sums(g, h, mask, CENTER: tl.constexpr):
    """Return for each line the sums of g * h and (without CENTER an arbitrary value) of g."""
    # products behind the mask, for the reason that softmax_rest_kernel gives
    along = tl.sum(tl.where(mask, g * h, 0.0), 1, keep_dims=True)
    return along, tl.sum(g, 1, keep_dims=True) if CENTER else along


@triton.jit
def input_gradient(
    g, h, rstd, along, level, a_ptr, offs, mask,
    CENTER: tl.constexpr, ADD: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Return dx from the means of g * h and of g, with ADD plus another gradient of x."""
    dx = rstd * (g - level - h * along) if CENTER else rstd * (g - h * along)
    # added before dx is rounded, which saves a rounding and a pass of autograd's addition
    if ADD:
        dx += tl.load(a_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return dx
