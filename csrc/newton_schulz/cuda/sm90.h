// The products of products.h on compute capability 9.0 (H100, H200): persistent, warp-specialised
// kernels with TMA and wgmma, from CUTLASS. MEGATRON_EXT_SM90 is defined where sm90.cu is part of
// the build. On any other device both return cudaErrorNotSupported.
#pragma once

#include "products.h"

namespace megatron_ext {

// Each product is a launch of its own. Depths are at least 1. Of a symmetric d, blocks of 128 x 128
// or 256 x 256 are computed: those on the diagonal in full, which reads all of theirs of c, those
// below it once for both sides.
cudaError_t symmetric_products_sm90(const Product* products, int count, cudaStream_t stream);
cudaError_t general_products_sm90(const Product* products, int count, cudaStream_t stream);

}  // namespace megatron_ext
