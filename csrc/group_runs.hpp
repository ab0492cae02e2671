// Runs of indices that step by one on both sides of a copy.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace disagg {

// The output of runs: three arrays with room for all of them.
struct RunColumns {
    std::int64_t* source_starts;
    std::int64_t* destination_starts;
    std::int64_t* lengths;
};

namespace detail {

inline constexpr std::size_t kMaskBits = 64;

constexpr std::uint64_t bits(std::int64_t value) { return static_cast<std::uint64_t>(value); }

// One bit for each of up to 64 pairs: whether both ids are one more than in the pair before, and whether an id is negative.
struct PairMasks {
    std::uint64_t steps;
    std::uint64_t negative;
};

// The masks of pairs `[index, index + count)`, one at a time. Differences are unsigned, so they cannot overflow.
template <typename S, typename D>
PairMasks masks_any(const S* source, const D* destination, std::size_t index, std::size_t count) {
    PairMasks masks{0, 0};
    for (std::size_t k = 0; k < count; ++k) {
        const std::size_t i = index + k;
        const std::int64_t s = source[i], d = destination[i];
        masks.negative |= static_cast<std::uint64_t>((s | d) < 0) << k;
        if (i == 0) continue;
        const std::uint64_t others = (bits(s) - bits(source[i - 1]) - 1) | (bits(d) - bits(destination[i - 1]) - 1);
        masks.steps |= static_cast<std::uint64_t>(others == 0) << k;
    }
    return masks;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define DISAGG_GROUP_AVX 1
// The masks of 64 pairs from `index` on, which is not 0. A difference wraps only if an id is negative.

[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_four(const std::int64_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_four(const std::int32_t* from) {
    return _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <typename S, typename D>
[[gnu::target("avx2")]] PairMasks masks_avx2(const S* source, const D* destination, std::size_t index) {
    PairMasks masks{0, 0};
    const __m256i one = _mm256_set1_epi64x(1);
    for (std::size_t k = 0; k < kMaskBits; k += 4) {
        const std::size_t i = index + k;
        const __m256i s = load_four(source + i), d = load_four(destination + i);
        const __m256i steps = _mm256_and_si256(_mm256_cmpeq_epi64(_mm256_sub_epi64(s, load_four(source + i - 1)), one),
                                               _mm256_cmpeq_epi64(_mm256_sub_epi64(d, load_four(destination + i - 1)), one));
        masks.steps |= static_cast<std::uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(steps))) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_or_si256(s, d)))) << k;
    }
    return masks;
}

[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load(const std::int32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

[[gnu::target("avx2")]] inline PairMasks masks_avx2(const std::int32_t* source, const std::int32_t* destination,
                                                    std::size_t index) {
    PairMasks masks{0, 0};
    const __m256i one = _mm256_set1_epi32(1);
    for (std::size_t k = 0; k < kMaskBits; k += 8) {
        const std::size_t i = index + k;
        const __m256i s = load(source + i), d = load(destination + i);
        const __m256i steps = _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_sub_epi32(s, load(source + i - 1)), one),
                                               _mm256_cmpeq_epi32(_mm256_sub_epi32(d, load(destination + i - 1)), one));
        masks.steps |= static_cast<std::uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(steps))) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(s, d)))) << k;
    }
    return masks;
}

// The instruction sets that these scans use.
#define DISAGG_AVX512 "avx512f,avx512dq,popcnt"

[[gnu::target(DISAGG_AVX512), gnu::always_inline]] inline __m512i load_eight(const std::int64_t* from) {
    return _mm512_loadu_si512(from);
}
[[gnu::target(DISAGG_AVX512), gnu::always_inline]] inline __m512i load_eight(const std::int32_t* from) {
    return _mm512_maskz_cvtepi32_epi64(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Takes the preceding ids from the preceding vector: a second load would cross cache lines and cost twice as much.
template <typename S, typename D>
[[gnu::target(DISAGG_AVX512)]] PairMasks masks_avx512(const S* source, const D* destination, std::size_t index) {
    PairMasks masks{0, 0};
    const __m512i one = _mm512_set1_epi64(1);
    __m512i s_before = _mm512_set1_epi64(source[index - 1]), d_before = _mm512_set1_epi64(destination[index - 1]);
    for (std::size_t k = 0; k < kMaskBits; k += 8) {
        const __m512i s = load_eight(source + index + k), d = load_eight(destination + index + k);
        const __m512i s_step = _mm512_sub_epi64(s, _mm512_maskz_alignr_epi64(0xff, s, s_before, 7));
        const __m512i d_step = _mm512_sub_epi64(d, _mm512_maskz_alignr_epi64(0xff, d, d_before, 7));
        const __mmask8 steps = _mm512_mask_cmpeq_epi64_mask(_mm512_cmpeq_epi64_mask(s_step, one), d_step, one);
        masks.steps |= static_cast<std::uint64_t>(steps) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm512_movepi64_mask(_mm512_or_si512(s, d))) << k;
        s_before = s;
        d_before = d;
    }
    return masks;
}

[[gnu::target(DISAGG_AVX512)]] inline PairMasks masks_avx512(const std::int32_t* source, const std::int32_t* destination,
                                                             std::size_t index) {
    PairMasks masks{0, 0};
    const __m512i one = _mm512_set1_epi32(1);
    __m512i s_before = _mm512_set1_epi32(source[index - 1]), d_before = _mm512_set1_epi32(destination[index - 1]);
    for (std::size_t k = 0; k < kMaskBits; k += 16) {
        const __m512i s = _mm512_loadu_si512(source + index + k), d = _mm512_loadu_si512(destination + index + k);
        const __m512i s_step = _mm512_sub_epi32(s, _mm512_maskz_alignr_epi32(0xffff, s, s_before, 15));
        const __m512i d_step = _mm512_sub_epi32(d, _mm512_maskz_alignr_epi32(0xffff, d, d_before, 15));
        const __mmask16 steps = _mm512_mask_cmpeq_epi32_mask(_mm512_cmpeq_epi32_mask(s_step, one), d_step, one);
        masks.steps |= static_cast<std::uint64_t>(steps) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm512_movepi32_mask(_mm512_or_si512(s, d))) << k;
        s_before = s;
        d_before = d;
    }
    return masks;
}
#endif

// Writes two words for every 64 pairs to `words`: the pairs that begin a run or have a negative id, and the pairs that have a
// negative id. Returns the number of runs. `whole(index)` returns the masks of 64 pairs from `index` on, which is not 0. Always
// inlined, so that it is compiled for the instruction set of `whole`.
template <typename S, typename D, typename Whole>
[[gnu::always_inline]] inline std::size_t scan(const S* source, const D* destination, std::size_t size, std::uint64_t* words,
                                               const Whole& whole) {
    std::size_t num_runs = 0;
    std::uint64_t before = 0;  // whether the last pair of the previous 64 has a negative id
    for (std::size_t index = 0; index < size; index += kMaskBits) {
        const std::size_t count = std::min(size - index, kMaskBits);
        const PairMasks masks = index > 0 && count == kMaskBits ? whole(index) : masks_any(source, destination, index, count);
        const std::uint64_t present = ~std::uint64_t{0} >> (kMaskBits - count);
        const std::uint64_t begins = (~masks.steps | masks.negative | masks.negative << 1 | before) & present;
        before = masks.negative >> (kMaskBits - 1);
        *words++ = begins;
        *words++ = masks.negative;
        num_runs += static_cast<std::size_t>(std::popcount(begins & ~masks.negative));
    }
    return num_runs;
}

#if defined(DISAGG_GROUP_AVX)
inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("popcnt");
}

template <typename S, typename D>
[[gnu::target(DISAGG_AVX512)]] std::size_t scan_avx512(const S* source, const D* destination, std::size_t size,
                                                       std::uint64_t* words) {
    struct Whole {
        const S* source;
        const D* destination;
        [[gnu::target(DISAGG_AVX512)]] PairMasks operator()(std::size_t index) const {
            return masks_avx512(source, destination, index);
        }
    };
    return scan(source, destination, size, words, Whole{source, destination});
}

template <typename S, typename D>
[[gnu::target("avx2,popcnt")]] std::size_t scan_avx2(const S* source, const D* destination, std::size_t size,
                                                     std::uint64_t* words) {
    struct Whole {
        const S* source;
        const D* destination;
        [[gnu::target("avx2,popcnt")]] PairMasks operator()(std::size_t index) const {
            return masks_avx2(source, destination, index);
        }
    };
    return scan(source, destination, size, words, Whole{source, destination});
}
#endif

template <typename S, typename D>
std::size_t scan_any(const S* source, const D* destination, std::size_t size, std::uint64_t* words) {
    return scan(source, destination, size, words,
                [&](std::size_t index) { return masks_any(source, destination, index, kMaskBits); });
}

}  // namespace detail

// The runs of two lists. The caller provides `num_words(size)` words of memory, which must outlive it.
//
// A run is a maximal stretch in which `source` and `destination` both step by one; a pair with a negative id belongs to no run.
// If either side is empty there are no runs. Otherwise different lengths throw `std::invalid_argument`.
template <typename S, typename D>
class RunGroups {
  public:
    // Words of scratch memory for lists of `size`: two bits for each pair.
    static constexpr std::size_t num_words(std::size_t size) {
        return 2 * ((size + detail::kMaskBits - 1) / detail::kMaskBits);
    }

    RunGroups(std::span<const S> source, std::span<const D> destination, std::uint64_t* words)
        : source_(source.data()), destination_(destination.data()), words_(words) {
        if (source.empty() || destination.empty()) return;
        if (source.size() != destination.size()) {
            throw std::invalid_argument("source has " + std::to_string(source.size()) + " indices, destination has " +
                                        std::to_string(destination.size()));
        }
        size_ = source.size();
        num_runs_ = scanner()(source_, destination_, size_, words_);
    }

    std::size_t num_runs() const { return num_runs_; }

    // Writes all runs, in order.
    void write(const RunColumns& out) const {
        std::size_t count = 0, last = 0;  // `last`: the start of the newest run, if it is still open
        bool open = false;
        for (std::size_t index = 0; index < size_; index += detail::kMaskBits) {
            const std::size_t word = index / detail::kMaskBits * 2;
            const std::uint64_t negative = words_[word + 1];
            std::uint64_t begins = words_[word];
            if (negative == 0 && open) {
                if (begins == ~std::uint64_t{0}) {  // no ids are consecutive: only runs of length one
                    out.lengths[count - 1] = static_cast<std::int64_t>(index - last);
                    for (std::size_t k = 0; k < detail::kMaskBits; ++k) {
                        out.source_starts[count + k] = source_[index + k];
                        out.destination_starts[count + k] = destination_[index + k];
                        out.lengths[count + k] = 1;
                    }
                    count += detail::kMaskBits;
                    last = index + detail::kMaskBits - 1;
                    continue;
                }
                for (; begins != 0; begins &= begins - 1) {
                    const std::size_t at = index + static_cast<std::size_t>(std::countr_zero(begins));
                    out.source_starts[count] = source_[at];
                    out.destination_starts[count] = destination_[at];
                    out.lengths[count - 1] = static_cast<std::int64_t>(at - last);
                    last = at;
                    ++count;
                }
                continue;
            }
            for (; begins != 0; begins &= begins - 1) {
                const auto bit = static_cast<std::size_t>(std::countr_zero(begins));
                const std::size_t at = index + bit;
                if (open) out.lengths[count - 1] = static_cast<std::int64_t>(at - last);
                open = ((negative >> bit) & 1) == 0;
                if (!open) continue;
                out.source_starts[count] = source_[at];
                out.destination_starts[count] = destination_[at];
                last = at;
                ++count;
            }
        }
        if (open) out.lengths[count - 1] = static_cast<std::int64_t>(size_ - last);
    }

  private:
    // The fastest scan that this processor supports.
    static auto scanner() {
#if defined(DISAGG_GROUP_AVX)
        if (detail::has_avx512()) return detail::scan_avx512<S, D>;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt")) return detail::scan_avx2<S, D>;
#endif
        return detail::scan_any<S, D>;
    }

    const S* source_;
    const D* destination_;
    std::uint64_t* words_;
    std::size_t size_ = 0;
    std::size_t num_runs_ = 0;
};

}  // namespace disagg
