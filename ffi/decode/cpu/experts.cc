#include "ffi/decode/cpu/experts.h"

#include "ffi/comm/pool.h"
#include "ffi/decode/cpu/dense.h"

namespace muse {
namespace {

// The (row, slot) pairs of one expert, as indices row * K + slot.
struct Work {
  int64_t expert;
  std::vector<int32_t> pairs, rows;
};

std::vector<Work> group_by_expert(const Plan& plan, int64_t rows, const int32_t* experts) {
  std::vector<Work> by_expert(plan.experts);
  for (int64_t i = 0; i < rows * plan.top_k; ++i) {
    by_expert[experts[i]].pairs.push_back(static_cast<int32_t>(i));
    by_expert[experts[i]].rows.push_back(static_cast<int32_t>(i / plan.top_k));
  }
  std::vector<Work> used;
  for (int64_t e = 0; e < plan.experts; ++e)
    if (!by_expert[e].pairs.empty()) {
      by_expert[e].expert = e;
      used.push_back(std::move(by_expert[e]));
    }
  return used;
}

MUSE_CLONES void quantize_rows(const uint16_t* x, int64_t blocks, float input_scale, CodeRow* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t codes[kBlock];
    out[b].scale = from_e4m3(quantize_block(x + b * kBlock, input_scale, codes));
    for (int k = 0; k < kBlock; ++k) out[b].value[k] = from_e2m1(codes[k]);
  }
}

// Both forms of a GEMM's row operand; one of them is filled.
struct Rows {
  Operand16 bf16;
  std::vector<CodeRow> codes;

  void load(const uint16_t* x, int64_t count, int64_t inner, bool quantize, float input_scale) {
    if (!quantize) return bf16.load(x, count, inner);
    codes.resize(count * inner / kBlock);
    quantize_rows(x, count * inner / kBlock, input_scale, codes.data());
  }
};

// One 16-column group of an expert GEMM, whatever the layer's formats.
struct ExpertGemm {
  bool nvfp4, quantize;
  const uint16_t* bf16;
  const uint8_t* fp4;
  int64_t k;

  // `first` is the group's offset in the array of the layer's format.
  void group(int64_t first, const Rows& x, const int32_t* rows, int64_t n, float* out) const {
    const int64_t blocks = k / kSegments / kBlock, segment_bytes = Plan::panels(k) * kPanelBytes;
    if (!nvfp4)
      bf16_group(bf16 + first, kSegments, blocks, x.bf16, 0, rows, n, out);
    else if (quantize)
      w4a4_group(fp4 + first, segment_bytes, blocks, x.codes.data(), rows, n, out);
    else
      w4a16_group(fp4 + first, segment_bytes, blocks, x.bf16, rows, n, out);
  }
};

MUSE_CLONES void swiglu_group(const float* gate, const float* up, int64_t n, float gate_scale, float up_scale,
                              const int32_t* pairs, int64_t width, uint16_t* m) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kLanes; ++c) {
      const float g = group_sum(gate, n, i, c) * gate_scale, u = group_sum(up, n, i, c) * up_scale;
      m[pairs[i] * width + c] = to_bf16(silu(g) * u);
    }
}

MUSE_CLONES void store_group(const float* sums, int64_t n, float scale, const int32_t* pairs, int64_t width,
                             uint16_t* f) {
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < kLanes; ++c) f[pairs[i] * width + c] = to_bf16(group_sum(sums, n, i, c) * scale);
}

}  // namespace

void run_experts(const StepCall& call, int64_t layer, int64_t rows, const uint16_t* x, const int32_t* experts,
                 uint16_t* f) {
  const Plan& plan = call.plan;
  const bool nvfp4 = plan.kind[layer].nvfp4, quantize = nvfp4 && plan.quantize_activations;
  const std::vector<Work> work = group_by_expert(plan, rows, experts);
  const float* input_scales = call.shared.input_scales + 2 * layer;
  // A bf16 expert has no scales; multiplying by 1 changes no bit.
  const auto scale = [&](int64_t expert, int which) {
    if (!nvfp4) return 1.0f;
    const float weight = call.shared.scale_2[(layer * plan.experts + expert) * 3 + which];
    return quantize ? weight * input_scales[which == 2] : weight;
  };

  Rows input;
  input.load(x, rows, plan.moe_hidden, quantize, input_scales[0]);
  std::vector<uint16_t> m(rows * plan.top_k * plan.moe_inner);
  const int64_t inner_groups = plan.inner_columns() / kLanes;
  parallel_for(static_cast<int64_t>(work.size()) * kRanks * inner_groups, [&](int64_t item) {
    const Work& w = work[item / (kRanks * inner_groups)];
    const int64_t rank = item / inner_groups % kRanks, group = item % inner_groups;
    const int64_t n = static_cast<int64_t>(w.pairs.size());
    const RankPointers& p = call.rank[rank];
    const ExpertGemm gemm{nvfp4, quantize, p.w13_bf16, p.w13_fp4, plan.moe_hidden};
    const auto first = [&](int64_t g) {
      return nvfp4 ? plan.w13_fp4(layer, w.expert, g)
                   : (plan.w13_tile(layer, w.expert) + g * (plan.moe_hidden / 16)) * kTile;
    };
    std::vector<float> gate(kSegments * n * kLanes), up(kSegments * n * kLanes);
    gemm.group(first(2 * group), input, w.rows.data(), n, gate.data());
    gemm.group(first(2 * group + 1), input, w.rows.data(), n, up.data());
    swiglu_group(gate.data(), up.data(), n, scale(w.expert, 0), scale(w.expert, 1), w.pairs.data(), plan.moe_inner,
                 m.data() + rank * plan.inner_columns() + group * kLanes);
  });

  Rows hidden;
  hidden.load(m.data(), rows * plan.top_k, plan.moe_inner, quantize, input_scales[1]);
  const int64_t moe_groups = plan.moe_columns() / kLanes;
  parallel_for(static_cast<int64_t>(work.size()) * kRanks * moe_groups, [&](int64_t item) {
    const Work& w = work[item / (kRanks * moe_groups)];
    const int64_t rank = item / moe_groups % kRanks, group = item % moe_groups;
    const int64_t n = static_cast<int64_t>(w.pairs.size());
    const RankPointers& p = call.rank[rank];
    const ExpertGemm gemm{nvfp4, quantize, p.w2_bf16, p.w2_fp4, plan.moe_inner};
    const int64_t first = nvfp4 ? plan.w2_fp4(layer, w.expert, group)
                                : (plan.w2_tile(layer, w.expert) + group * (plan.moe_inner / 16)) * kTile;
    std::vector<float> sums(kSegments * n * kLanes);
    gemm.group(first, hidden, w.pairs.data(), n, sums.data());
    store_group(sums.data(), n, scale(w.expert, 2), w.pairs.data(), plan.moe_hidden,
                f + rank * plan.moe_columns() + group * kLanes);
  });
}

}  // namespace muse
