// The kernels of one instruction set and their table; included once by each csrc/isa/*.cpp.
#include "kernels/table.h"

#include "simd/vec.h"

#include "simd/vec_i16.h"

#include "kernels/quantise-inl.h"

#include "kernels/norm-inl.h"

#include "kernels/glu-inl.h"

#include "kernels/dot-inl.h"

#include "kernels/product-inl.h"

#include "kernels/channel-inl.h"

#include "kernels/linear-inl.h"

#include "kernels/experts-inl.h"

#include "kernels/embed-inl.h"

#include "kernels/kv_page-inl.h"

#include "kernels/attention_products-inl.h"

#include "kernels/attention-inl.h"

#include "kernels/sample-inl.h"

#include "kernels/distribution-inl.h"

#include "kernels/peak-inl.h"

#define PL_NAME_OF(x) #x
#define PL_NAME(x) PL_NAME_OF(x)

namespace paceline::PL_ISA {
namespace {

constexpr Kernels table = {PL_NAME(PL_ISA), embed,           norm,
                           quantise,        linear,          gate_up,
                           gated,           route,           combine,
                           rotate_query,    key_value_write, attention,
                           attention_merge, sample_row,      distribution_row,
                           int8_peak};

}  // namespace
}  // namespace paceline::PL_ISA
