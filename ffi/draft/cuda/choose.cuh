// From logits to trees: the candidates of every place, their log-probabilities, and the most probable continuations.
#pragma once

#include "ffi/decode/cuda/norms.cuh"
#include "ffi/draft/cuda/shared.cuh"

namespace muse {

// The largest of all keys that a warp has seen, falling, one a lane.
class DraftBest {
 public:
  static constexpr int kAtOnce = 16;  // keys of a lane that are offered together
  struct List {
    uint64_t found[32 * (kAtOnce + 1)], best[32];
  };
  __device__ explicit DraftBest(List& list) : list_(list) {}

  // Keys of each lane, 0 for none. Most are below the least of the best so far, or, the first time, of the `count`
  // largest of the lanes' largest; the others are put into their order together with the best so far.
  __device__ void offer(const uint64_t (&key)[kAtOnce], int count) {
    const int lane = threadIdx.x % 32;
    auto least = static_cast<uint32_t>(__shfl_sync(~0u, mine_, count - 1) >> 32);
    if (least == 0) {
      uint32_t largest = 0;
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) largest = max(largest, static_cast<uint32_t>(key[e] >> 32));
      int ahead = 0;
#pragma unroll 8
      for (int other = 0; other < 32; ++other) {
        const uint32_t theirs = __shfl_sync(~0u, largest, other);
        ahead += theirs > largest || (theirs == largest && other < lane);
      }
      least = __shfl_sync(~0u, largest, __ffs(static_cast<int>(__ballot_sync(~0u, ahead == count - 1))) - 1);
    }
    int found = 0;
    const auto keep = [&](uint64_t own, bool good) {
      const uint32_t all = __ballot_sync(~0u, good);
      if (good) list_.found[found + __popc(all & ((1u << lane) - 1))] = own;
      found += __popc(all);
    };
    keep(mine_, mine_ != 0);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) keep(key[e], key[e] != 0 && static_cast<uint32_t>(key[e] >> 32) >= least);
    list_.best[lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < found; i += 32) {
      const uint64_t own = list_.found[i];
      int place = 0;
#pragma unroll 4
      for (int other = 0; other < found; ++other) place += list_.found[other] > own;
      if (place < count) list_.best[place] = own;
    }
    __syncwarp();
    mine_ = list_.best[lane];
    __syncwarp();  // the list may be written again
  }
  __device__ uint64_t mine() const { return mine_; }

 private:
  List& list_;
  uint64_t mine_ = 0;
};

class DraftChoice : public DraftPhases {
 public:
  using DraftPhases::DraftPhases;

  // The best of the columns that this block has made, for each row of the head.
  __device__ void best_of_block() {
    const Range groups = part(s_.table[s_.jobs - 1].groups, blockIdx.x, gridDim.x);
    const int vocab = static_cast<int>(p_.vocab), k = static_cast<int>(p_.top_k);
    const int end = min(groups.end * 16, vocab);
    for (int row = threadIdx.x / 32; row < rows(); row += kWarps) {
      const float* logits = at<float>(s_.offsets.logits) + int64_t{row} * vocab;
      DraftBest best(list());
#pragma unroll 1
      for (int first = groups.begin * 16; first < end; first += 32 * kAtOnce) {
        float z[kAtOnce];
        uint64_t key[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) z[e] = __ldcg(logits + min(first + e * 32 + lane(), end - 1));
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const int v = first + e * 32 + lane();
          key[e] = v < end ? candidate_key(z[e], v) : 0;
        }
        best.offer(key, k);
      }
      if (lane() < k) at<uint64_t>(s_.offsets.best)[(int64_t{row} * blocks() + block()) * k + lane()] = best.mine();
    }
  }

  // The best of all blocks'; for DFlash also the sums over the whole vocabulary, an eighth of it for half a warp.
  __device__ void best_of_all() {
    const int k = static_cast<int>(p_.top_k), n = blocks() * k, w = static_cast<int>(threadIdx.x / 32);
    auto* of_warps = reinterpret_cast<uint64_t*>(s_.region);
    for (int row = block(); row < rows(); row += blocks()) {
      const uint64_t* keys = at<uint64_t>(s_.offsets.best) + int64_t{row} * n;
      const Range own = part(n, w, kWarps);
      DraftBest best(list());
#pragma unroll 1
      for (int first = own.begin; first < own.end; first += 32 * kAtOnce) {
        uint64_t key[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          key[e] = __ldcg(reinterpret_cast<const unsigned long long*>(keys) + min(first + e * 32 + lane(), n - 1));
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          if (first + e * 32 + lane() >= own.end) key[e] = 0;
        best.offer(key, k);
      }
      if (lane() < k) of_warps[w * k + lane()] = best.mine();
      sync_block();
      if (w == 0) {
        DraftBest all(list());
        uint64_t key[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) key[e] = e * 32 + lane() < kWarps * k ? of_warps[e * 32 + lane()] : 0;
        all.offer(key, k);
        if (lane() < k) {
          at<uint64_t>(s_.offsets.ids)[row * k + lane()] = all.mine();
          prefetch_selector(candidate_id(all.mine()));
        }
      }
      sync_block();
    }
    if (p_.is_v2()) return;
    const int length = static_cast<int>(p_.vocab) / kSegments, j = lane() % kLanes;
    for (int pair = warp(); pair < rows() * kSegments / 2; pair += warps()) {
      const int unit = pair * 2 + lane() / kLanes;
      const float* logits =
          at<float>(s_.offsets.logits) + int64_t{unit / kSegments} * p_.vocab + unit % kSegments * length;
      float sum = 0.0f;
#pragma unroll 4
      for (int v = j; v < length; v += kLanes) sum = sum + exp1(logit(__ldcg(logits + v)));
      sum = fold_warp(sum);
      if (j == 0) at<float>(s_.offsets.sums)[unit] = sum;
    }
  }

  // Log-probabilities of a place's candidates, one row of them or one for each candidate of the place before, as edges
  // in falling order. A warp a row, a lane a candidate.
  __device__ void edges() {
    const int k = static_cast<int>(p_.top_k), pair_rows = static_cast<int>(p_.pair_rows());
    for (int unit = warp(); unit < rows() * pair_rows; unit += warps()) {
      const int row = unit / pair_rows, before = unit - row * pair_rows, place = row % static_cast<int>(p_.places());
      if (place == 0 && before > 0) continue;  // before it comes the newest token only
      const uint64_t key = key_of(row, min(lane(), k - 1));
      const float own = logit(value_of(key));
      const float log_prob = p_.is_v2() ? pair_log_prob(row, place, before, own, k) : marginal_log_prob(row, own);
      const float edge = draft_edge(log_prob);
      const int id = candidate_id(key);
      int rank = 0;
      for (int c = 0; c < k; ++c) {
        const float other = __shfl_sync(~0u, edge, c);
        const int other_id = __shfl_sync(~0u, id, c);
        rank += other > edge || (other == edge && other_id < id);
      }
      if (lane() >= k) continue;
      at<float>(s_.offsets.edges)[unit * k + rank] = edge;
      at<uint8_t>(s_.offsets.ranks)[unit * k + rank] = static_cast<uint8_t>(lane());
    }
  }

  // A block a sequence, one warp of it. What it reads again and again, each time knowing only then where, is brought
  // into shared memory, where the weights were, if it fits.
  __device__ void trees() {
    const int k = static_cast<int>(p_.top_k), candidates = static_cast<int>(p_.places()) * k,
              edges = candidates * static_cast<int>(p_.pair_rows());
    const bool fits = candidates * sizeof(uint64_t) + edges * (sizeof(float) + 1) <= kDraftRingBytes;
    for (int b = block(); b < p_.batch; b += blocks()) {
      Given given{at<uint64_t>(s_.offsets.ids) + int64_t{b} * candidates,
                  at<float>(s_.offsets.edges) + int64_t{b} * edges, at<uint8_t>(s_.offsets.ranks) + int64_t{b} * edges};
      if (fits) {
        auto* keys = reinterpret_cast<uint64_t*>(s_.ring);
        auto* own_edges = reinterpret_cast<float*>(keys + candidates);
        auto* ranks = reinterpret_cast<uint8_t*>(own_edges + edges);
        for (int i = threadIdx.x; i < candidates; i += kThreads) keys[i] = given.keys[i];
#pragma unroll 8
        for (int i = threadIdx.x; i < edges; i += kThreads) own_edges[i] = given.edges[i], ranks[i] = given.ranks[i];
        given = {keys, own_edges, ranks};
        sync_block();
      }
      if (threadIdx.x < 32) tree(b, given);
      sync_block();
    }
  }

 private:
  static constexpr int kAtOnce = DraftBest::kAtOnce;
  static_assert(kWarps * kMaxCandidates <= 32 * kAtOnce, "the warps' best are offered together");

  // A warp's, where the weights were.
  __device__ DraftBest::List& list() const {
    static_assert(kWarps * sizeof(DraftBest::List) <= kDraftRingBytes, "the ring");
    return reinterpret_cast<DraftBest::List*>(s_.ring)[threadIdx.x / 32];
  }

  struct Nodes {
    uint64_t entry[kMaxNodes];  // candidate_key of score and draft_order: the larger comes first; 0: nothing
    float score[kMaxNodes];
    uint8_t depth[kMaxNodes], place[kMaxNodes];  // place: which candidate of its place it is
    uint64_t above[kMaxNodes];                   // the node and those above it
  };

  // Of a sequence, by place: candidates, and, by row of edges, these in falling order and whose each is. Other blocks
  // have written them, and all have met since.
  struct Given {
    const uint64_t* keys;
    const float* edges;
    const uint8_t* ranks;
  };

  // A node's first child, whose place its next sibling takes when it has come, is an entry.
  __device__ void tree(int b, const Given& given) {
    const int width = static_cast<int>(p_.width), k = static_cast<int>(p_.top_k),
              places = static_cast<int>(p_.places());
    Nodes& n = *reinterpret_cast<Nodes*>(s_.region);
    int32_t *token = c_.tree_token + b * width, *parent = c_.tree_parent + b * width,
            *depth = c_.tree_depth + b * width;
    for (int i = lane(); i < kMaxNodes; i += 32) n.entry[i] = 0;
    __syncwarp();
    if (lane() == 0) {
      n.score[0] = 0.0f, n.depth[0] = n.place[0] = 0, n.above[0] = 1;
      token[0] = c_.token[b], parent[0] = -1, depth[0] = 0;
      offer(n, given, 0, 0, 0, places, k);
    }
    for (int node = 1; node < width; ++node) {
      __syncwarp();
      const uint64_t low = n.entry[lane()], high = n.entry[lane() + 32];
      uint64_t best = high > low ? high : low;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_xor_sync(~0u, best, step);
        best = other > best ? other : best;
      }
      const uint32_t in_low = __ballot_sync(~0u, low == best), in_high = __ballot_sync(~0u, high == best);
      const int where = __ffs(static_cast<int>(in_low ? in_low : in_high)) - 1 + (in_low ? 0 : 32);
      const auto order = static_cast<uint32_t>(candidate_id(best));
      const int above = static_cast<int>(order >> 8 & 255u), rank = static_cast<int>(order & 255u);
      // The node's first child and its next sibling, at once.
      if (lane() == 0) {
        const int place = given.ranks[unit_of(n, above) * k + rank], level = n.depth[above];
        n.score[node] = value_of(best), n.depth[node] = level + 1, n.place[node] = static_cast<uint8_t>(place);
        n.above[node] = n.above[above] | uint64_t{1} << node;
        token[node] = candidate_id(given.keys[level * k + place]), parent[node] = above, depth[node] = level + 1;
      }
      __syncwarp();
      if (lane() < 2)
        offer(n, given, lane() == 0 ? where : node, lane() == 0 ? above : node, lane() == 0 ? rank + 1 : 0, places, k);
    }
    __syncwarp();
    for (int i = lane(); i < width * width; i += 32)
      c_.tree_ancestors[b * width * width + i] = n.above[i / width] >> (i % width) & 1u;
  }

  __device__ int rows() const { return static_cast<int>(p_.batch * p_.places()); }
  __device__ float logit(float z) const { return draft_logit(z, p_.multiplier, p_.cap); }
  __device__ uint64_t key_of(int row, int candidate) const {
    return __ldcg(at<unsigned long long>(s_.offsets.ids) + row * static_cast<int>(p_.top_k) + candidate);
  }
  __device__ static float value_of(uint64_t key) {
    const auto ordered = static_cast<uint32_t>(key >> 32);
    return bits32(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
  }

  __device__ float marginal_log_prob(int row, float own) const {
    float s[kSegments];
#pragma unroll
    for (int r = 0; r < kSegments; ++r) s[r] = __ldcg(at<float>(s_.offsets.sums) + row * kSegments + r);
    return log_prob_of(own, s);
  }

  // What pair_log_prob will read of a candidate: it lies anywhere in memory.
  __device__ void prefetch_selector(int id) const {
    for (int r = 0; r < p_.rank; r += 64) {
      ptx::prefetch_l2(c_.predecessor + id * p_.rank + r);
      ptx::prefetch_l2(c_.successor + id * p_.rank + r);
    }
  }

  // Of this lane's candidate, behind candidate `before` of the place before.
  __device__ float pair_log_prob(int row, int place, int before, float own, int k) const {
    const int rank = static_cast<int>(p_.rank), j = lane() % kLanes;
    const int64_t previous =
        place == 0 ? min(max(c_.token[row / static_cast<int>(p_.places())], 0), static_cast<int>(p_.vocab) - 1)
                   : candidate_id(key_of(row - 1, before));
    const uint16_t* a = c_.predecessor + previous * rank;
    const uint16_t* gate = at<uint16_t>(s_.offsets.gate) + row * rank;
    float score = 0.0f;
    for (int first = 0; first < k; first += 2) {  // half a warp each
      const int candidate = min(first + lane() / kLanes, k - 1);
      const uint16_t* b = c_.successor + int64_t{candidate_id(key_of(row, candidate))} * rank;
      float sum = 0.0f;
#pragma unroll 16
      for (int r = j; r < rank; r += kLanes)
        sum = fma1(from_bf16(__ldg(a + r)) * from_bf16(__ldcg(gate + r)), from_bf16(__ldg(b + r)), sum);
      sum = fold_warp(sum);
      const float even = __shfl_sync(~0u, sum, 0), odd = __shfl_sync(~0u, sum, kLanes);
      if (lane() == first) score = own + even;
      if (lane() == first + 1) score = own + odd;
    }
    float most = lane() < k ? larger(-inf32(), score) : -inf32(), total = 0.0f;
    for (int step = 1; step < 32; step *= 2) most = larger(most, __shfl_xor_sync(~0u, most, step));
    const float least = score - most, power = exp1(least);
    for (int c = 0; c < k; ++c) total = total + __shfl_sync(~0u, power, c);
    return least - log1(total);
  }

  // The row of edges below a node, of its sequence's.
  __device__ int unit_of(const Nodes& n, int node) const {
    const int pair_rows = static_cast<int>(p_.pair_rows()), level = n.depth[node];
    return level * pair_rows + (level == 0 || pair_rows == 1 ? 0 : n.place[node]);
  }
  __device__ void offer(Nodes& n, const Given& given, int where, int node, int rank, int places, int k) const {
    const bool exists = n.depth[node] < places && rank < k;
    const float edge = exists ? given.edges[unit_of(n, node) * k + rank] : 0.0f;
    const auto order = static_cast<int64_t>(draft_order(n.depth[node] + 1, node, rank));
    n.entry[where] = exists ? candidate_key(n.score[node] + edge, order) : 0;
  }
};

}  // namespace muse
