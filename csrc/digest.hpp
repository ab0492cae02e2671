// A digest of state: a sum that depends on the global coordinates of each element, not on its address or the order of addition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "threads.hpp"
#include "token_runs.hpp"

namespace disagg {

// One inner axis of a box: `count` positions from global coordinate `start` on, `stride` bytes apart in memory. Its index in
// the list identifies the axis, so both sides list the axes in the same order, whatever their order in memory.
struct DigestAxis {
    std::uint64_t count = 1;
    std::uint64_t stride = 0;
    std::uint64_t start = 0;
};

// The tensors of one component and role, with elements of `itemsize` bytes. `bases[i]` is the address of the box in layer
// `layers[i]`. A run gives the source row, the offset in it, the first global position (`destination_offset`) and the length.
struct DigestBox {
    std::span<const std::int64_t> layers;
    std::span<const std::uint64_t> bases;
    std::uint64_t row_stride = 0;
    std::uint64_t token_stride = 0;
    std::span<const DigestAxis> axes;
    std::uint64_t itemsize = 1;
    std::uint64_t seed = 0;
};

// Arrays to which the parts of a sum are added, or empty: one entry for each entry of `layers`, and one for each possible
// `destination_row` of a run.
struct DigestParts {
    std::span<std::uint64_t> by_layer;
    std::span<std::uint64_t> by_row;
};

// Each thread of a digest gets at least this many bytes.
inline constexpr std::uint64_t kDigestBytesPerThread = std::uint64_t{1} << 20;

namespace detail {

// The finaliser of SplitMix64: each bit of the argument changes half of the bits of the result on average.
constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// An odd number for each coordinate of one axis.
class Weights {
  public:
    constexpr Weights(std::uint64_t seed, std::uint64_t axis) : key_(mix(seed + (axis + 1) * 0xD1B54A32D192ED03u)) {}
    constexpr std::uint64_t operator[](std::uint64_t coordinate) const {
        return mix(key_ + (coordinate + 1) * 0x9E3779B97F4A7C15u) | 1;
    }

  private:
    std::uint64_t key_;
};

inline constexpr std::uint64_t kLayerAxis = 0, kTokenAxis = 1, kHalfAxis = 2, kFirstInnerAxis = 3;
// The most weights of the innermost loop, so that they stay in the first-level cache.
inline constexpr std::uint64_t kLargestTable = 1024;
// The number of bytes to prefetch of a later token.
inline constexpr std::uint64_t kPrefetched = 512;

// The weights of consecutive elements in 32-bit halves: a 32-bit product is one vector instruction, a 64-bit one is several.
struct WeightTable {
    std::vector<std::uint32_t> low, high;

    void assign(std::span<const std::uint64_t> weights) {
        low.resize(weights.size());
        high.resize(weights.size());
        for (std::size_t i = 0; i < weights.size(); ++i) {
            low[i] = static_cast<std::uint32_t>(weights[i]);
            high[i] = static_cast<std::uint32_t>(weights[i] >> 32);
        }
    }
};

template <typename Unit>
[[gnu::always_inline]] inline std::uint64_t dot_body(const unsigned char* at, const std::uint32_t* low,
                                                     const std::uint32_t* high, std::size_t count) {
    std::uint64_t sum_low = 0, sum_high = 0;
    for (std::size_t i = 0; i < count; ++i) {
        Unit unit;
        std::memcpy(&unit, at + i * sizeof(Unit), sizeof(Unit));
        const std::uint32_t value = unit;
        sum_low += std::uint64_t{value} * low[i];
        sum_high += std::uint64_t{value} * high[i];
    }
    return sum_low + (sum_high << 32);
}

template <typename Unit>
std::uint64_t dot_any(const unsigned char* at, const std::uint32_t* low, const std::uint32_t* high, std::size_t count) {
    return dot_body<Unit>(at, low, high, count);
}

#if defined(__x86_64__) && defined(__GNUC__)
#define DISAGG_DISPATCH 1
template <typename Unit>
[[gnu::target("avx2")]] std::uint64_t dot_avx2(const unsigned char* at, const std::uint32_t* low, const std::uint32_t* high,
                                               std::size_t count) {
    return dot_body<Unit>(at, low, high, count);
}
#endif

template <typename Unit>
using Dot = std::uint64_t (*)(const unsigned char*, const std::uint32_t*, const std::uint32_t*, std::size_t);

template <typename Unit>
Dot<Unit> choose_dot() {
#if defined(DISAGG_DISPATCH)
    if (__builtin_cpu_supports("avx2")) return dot_avx2<Unit>;
#endif
    return dot_any<Unit>;
}

// An axis with its weights. The axes of a nest are ordered by stride, the largest outermost.
struct WeightedAxis {
    std::uint64_t stride;
    std::vector<std::uint64_t> weights;
};

// The nest of loops over one token: axes from the outermost to the innermost, whose elements are contiguous.
template <typename Unit>
class Nest {
  public:
    explicit Nest(const DigestBox& box) {
        std::vector<WeightedAxis> axes;
        for (std::size_t k = 0; k < box.axes.size(); ++k) {
            const DigestAxis& axis = box.axes[k];
            std::vector<std::uint64_t> weights(axis.count);
            const Weights of_axis(box.seed, kFirstInnerAxis + k);
            for (std::uint64_t i = 0; i < axis.count; ++i) weights[i] = of_axis[axis.start + i];
            axes.push_back({axis.stride, std::move(weights)});
        }
        std::stable_sort(axes.begin(), axes.end(),
                         [](const WeightedAxis& a, const WeightedAxis& b) { return a.stride > b.stride; });
        // The halves of 8-byte elements form an axis of their own: with one odd weight, two changes of a top bit would cancel.
        WeightedAxis inner{sizeof(Unit), {1}};
        const Weights of_half(box.seed, kHalfAxis);
        if (box.itemsize == 8) inner.weights = {of_half[0], of_half[1]};
        while (!axes.empty()) {
            const WeightedAxis& next = axes.back();
            const bool follows = next.stride == inner.weights.size() * sizeof(Unit) || next.weights.size() == 1;
            if (!follows) break;
            if (next.weights.size() > 1 && next.weights.size() * inner.weights.size() > kLargestTable) break;
            std::vector<std::uint64_t> product;
            product.reserve(next.weights.size() * inner.weights.size());
            for (const std::uint64_t a : next.weights) {
                for (const std::uint64_t b : inner.weights) product.push_back(a * b);
            }
            inner.weights = std::move(product);
            axes.pop_back();
        }
        table_.assign(inner.weights);
        axes_ = std::move(axes);
        dot_ = choose_dot<Unit>();
    }

    std::uint64_t sum(std::uint64_t address) const { return sum(address, 0); }

  private:
    std::uint64_t sum(std::uint64_t address, std::size_t depth) const {
        if (depth == axes_.size()) {
            return dot_(reinterpret_cast<const unsigned char*>(address), table_.low.data(), table_.high.data(),
                        table_.low.size());
        }
        const WeightedAxis& axis = axes_[depth];
        std::uint64_t total = 0;
        for (const std::uint64_t each : axis.weights) {
            total += each * sum(address, depth + 1);
            address += axis.stride;
        }
        return total;
    }

    std::vector<WeightedAxis> axes_;
    WeightTable table_;
    Dot<Unit> dot_;
};

template <typename Unit>
std::uint64_t digest_units(const DigestBox& box, std::span<const TokenRun> runs, std::uint64_t nbytes, std::int64_t num_threads,
                           const DigestParts& parts) {
    const Nest<Unit> nest(box);
    const Weights of_layer(box.seed, kLayerAxis), of_token(box.seed, kTokenAxis);
    const std::size_t total = box.layers.size() * runs.size();
    std::uint64_t per_token = box.itemsize;
    for (const DigestAxis& axis : box.axes) per_token *= axis.count;
    const std::size_t shares = std::min(num_shares(nbytes, kDigestBytesPerThread, num_threads), total);
    // The sums of each share: one for each layer, then one for each row.
    const std::size_t num_rows = parts.by_row.size(), width = box.layers.size() + num_rows;
    std::vector<std::uint64_t> sums(shares * width);
    run_shares(shares, [&](std::size_t share) {
        std::uint64_t* const by_layer = sums.data() + share * width;
        std::uint64_t* const by_row = by_layer + box.layers.size();
        for (std::size_t item = total * share / shares; item < total * (share + 1) / shares; ++item) {
            const std::size_t layer = item / runs.size();
            const TokenRun& run = runs[item % runs.size()];
            std::uint64_t address = box.bases[layer] + static_cast<std::uint64_t>(run.source_row) * box.row_stride +
                                    static_cast<std::uint64_t>(run.source_offset) * box.token_stride;
            std::uint64_t of_run = 0;
            for (std::int64_t i = 0; i < run.length; ++i) {
                const auto position = static_cast<std::uint64_t>(run.destination_offset) + static_cast<std::uint64_t>(i);
                // A box of few heads skips most of a token, so the processor cannot predict where its next part lies.
                for (std::uint64_t line = 0; line < std::min(per_token, kPrefetched); line += 64) {
                    __builtin_prefetch(reinterpret_cast<const void*>(address + 4 * box.token_stride + line));
                }
                of_run += of_token[position] * nest.sum(address);
                address += box.token_stride;
            }
            of_run *= of_layer[static_cast<std::uint64_t>(box.layers[layer])];
            by_layer[layer] += of_run;
            if (num_rows != 0) by_row[static_cast<std::size_t>(run.destination_row)] += of_run;
        }
    });
    std::uint64_t sum = 0;
    for (std::size_t share = 0; share < shares; ++share) {
        const std::uint64_t* const of_share = sums.data() + share * width;
        for (std::size_t layer = 0; layer < box.layers.size(); ++layer) sum += of_share[layer];
        for (std::size_t i = 0; i < parts.by_layer.size(); ++i) parts.by_layer[i] += of_share[i];
        for (std::size_t i = 0; i < num_rows; ++i) parts.by_row[i] += of_share[box.layers.size() + i];
    }
    return sum;
}

}  // namespace detail

// The sum, modulo 2^64, of every element of the box (its bytes as a little-endian integer; 8 bytes as two) times one odd weight
// for each of its global coordinates: layer, position, and every inner axis. Equal content has equal sums, whatever its layout
// in memory. The sums of disjoint boxes add up to the sum of their union. Adds the part of each layer and each
// `destination_row` to `parts`. Uses up to `num_threads` threads. The caller guarantees that the memory is mapped. Throws
// `std::invalid_argument`, with nothing added, for an item size other than 1, 2, 4 or 8, a number of bases other than one for
// each layer, `parts` without an entry for a layer or for a run's row, empty runs, or more than 2^48 bytes.
inline std::uint64_t digest(const DigestBox& box, std::span<const TokenRun> runs, std::int64_t num_threads,
                            const DigestParts& parts = {}) {
    if (box.bases.size() != box.layers.size()) throw std::invalid_argument("digest: expected a base for each layer");
    if (!parts.by_layer.empty() && parts.by_layer.size() != box.layers.size()) {
        throw std::invalid_argument("digest: expected an entry of by_layer for each layer");
    }
    check_num_threads(num_threads);
    std::uint64_t positions = 0;
    for (const TokenRun& run : runs) {
        if (run.length < 1)
            throw std::invalid_argument("runs: expected lengths of at least 1, found " + std::to_string(run.length));
        const auto row = static_cast<std::uint64_t>(run.destination_row);
        if (!parts.by_row.empty() && row >= parts.by_row.size()) {
            throw std::invalid_argument("runs: expected destination rows below " + std::to_string(parts.by_row.size()) +
                                        ", the length of by_row, found " + std::to_string(run.destination_row));
        }
        positions += std::min<std::uint64_t>(static_cast<std::uint64_t>(run.length), std::uint64_t{1} << 48);
        positions = std::min<std::uint64_t>(positions, std::uint64_t{1} << 48);
    }
    std::uint64_t nbytes = box.itemsize;
    const auto grow = [&nbytes](std::uint64_t by) {
        if (__builtin_mul_overflow(nbytes, by, &nbytes) || nbytes > std::uint64_t{1} << 48) {
            throw std::invalid_argument("digest: expected at most 2**48 bytes");
        }
    };
    for (const DigestAxis& axis : box.axes) grow(axis.count);
    grow(positions);
    grow(box.layers.size());
    const bool known = box.itemsize == 1 || box.itemsize == 2 || box.itemsize == 4 || box.itemsize == 8;
    if (!known) throw std::invalid_argument("itemsize: expected 1, 2, 4 or 8, found " + std::to_string(box.itemsize));
    if (nbytes == 0) return 0;
    switch (box.itemsize) {
        case 1:
            return detail::digest_units<std::uint8_t>(box, runs, nbytes, num_threads, parts);
        case 2:
            return detail::digest_units<std::uint16_t>(box, runs, nbytes, num_threads, parts);
        default:
            return detail::digest_units<std::uint32_t>(box, runs, nbytes, num_threads, parts);
    }
}

}  // namespace disagg
