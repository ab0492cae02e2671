// Runs of indices that step by one on both sides of a copy.
#pragma once

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

// Where runs are written: three arrays with room for all of them.
struct RunColumns {
    std::int64_t* source_starts;
    std::int64_t* destination_starts;
    std::int64_t* lengths;
};

namespace detail {

inline constexpr std::size_t kMaskBits = 64;

constexpr std::uint64_t bits(std::int64_t value) { return static_cast<std::uint64_t>(value); }

// About up to 64 pairs: where something begins (a run, or a pair with a negative id, which is alone), and where an id is
// negative.
struct PairMasks {
    std::uint64_t begins;
    std::uint64_t negative;
};

// Of the pairs `[index, index + count)`, one at a time. Differences are unsigned: no overflow to be undefined.
template <typename S, typename D>
PairMasks masks_any(const S* source, const D* destination, std::size_t index, std::size_t count) {
    PairMasks masks{0, 0};
    for (std::size_t k = 0; k < count; ++k) {
        const std::size_t i = index + k;
        const std::int64_t s1 = source[i], d1 = destination[i];
        const std::int64_t s0 = i > 0 ? std::int64_t{source[i - 1]} : -1, d0 = i > 0 ? std::int64_t{destination[i - 1]} : -1;
        const std::uint64_t steps = (bits(s1) - bits(s0) - 1) | (bits(d1) - bits(d0) - 1);
        masks.begins |= static_cast<std::uint64_t>((steps != 0) | ((s0 | s1 | d0 | d1) < 0)) << k;
        masks.negative |= static_cast<std::uint64_t>((s1 | d1) < 0) << k;
    }
    return masks;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define DISAGG_GROUP_AVX2 1
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_four(const std::int64_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_four(const std::int32_t* from) {
    return _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

[[gnu::target("avx2"), gnu::always_inline]] inline __m256i load_eight(const std::int32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Of 64 pairs from `index`, which is not 0.
template <typename S, typename D>
[[gnu::target("avx2")]] PairMasks masks_avx2(const S* source, const D* destination, std::size_t index) {
    PairMasks masks{0, 0};
    const __m256i one = _mm256_set1_epi64x(1);
    for (std::size_t k = 0; k < kMaskBits; k += 4) {
        const __m256i s0 = load_four(source + index + k - 1), s1 = load_four(source + index + k);
        const __m256i d0 = load_four(destination + index + k - 1), d1 = load_four(destination + index + k);
        const __m256i steps = _mm256_and_si256(_mm256_cmpeq_epi64(_mm256_sub_epi64(s1, s0), one),
                                               _mm256_cmpeq_epi64(_mm256_sub_epi64(d1, d0), one));
        const __m256i signs = _mm256_or_si256(s1, d1), before = _mm256_or_si256(s0, d0);
        const auto joins = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_andnot_si256(_mm256_or_si256(signs, before), steps)));
        masks.begins |= static_cast<std::uint64_t>(joins ^ 15) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm256_movemask_pd(_mm256_castsi256_pd(signs))) << k;
    }
    return masks;
}

// Of 64 pairs of 32-bit ids; a wrap of the difference needs a negative id.
[[gnu::target("avx2")]] inline PairMasks masks_avx2(const std::int32_t* source, const std::int32_t* destination,
                                                    std::size_t index) {
    PairMasks masks{0, 0};
    const __m256i one = _mm256_set1_epi32(1);
    for (std::size_t k = 0; k < kMaskBits; k += 8) {
        const __m256i s0 = load_eight(source + index + k - 1), s1 = load_eight(source + index + k);
        const __m256i d0 = load_eight(destination + index + k - 1), d1 = load_eight(destination + index + k);
        const __m256i steps = _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_sub_epi32(s1, s0), one),
                                               _mm256_cmpeq_epi32(_mm256_sub_epi32(d1, d0), one));
        const __m256i signs = _mm256_or_si256(s1, d1), before = _mm256_or_si256(s0, d0);
        const auto joins = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_andnot_si256(_mm256_or_si256(signs, before), steps)));
        masks.begins |= static_cast<std::uint64_t>(joins ^ 255) << k;
        masks.negative |= static_cast<std::uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(signs))) << k;
    }
    return masks;
}
#endif

}  // namespace detail

// Pairs of two lists, looked at once: which of them begin a run. `num_words(size)` words of memory are the caller's.
//
// A run is a maximal stretch in which `source` and `destination` both step by one; a pair with a negative id is in no run.
// If either side is empty there are none; otherwise lengths that differ throw `std::invalid_argument`.
template <typename S, typename D>
class RunGroups {
  public:
    // Words of scratch for lists of `size`: two bits a pair.
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
#if defined(DISAGG_GROUP_AVX2)
        const bool wide = __builtin_cpu_supports("avx2");
#endif
        for (std::size_t index = 0; index < size_; index += detail::kMaskBits) {
            const std::size_t count = size_ - index < detail::kMaskBits ? size_ - index : detail::kMaskBits;
            detail::PairMasks masks;
#if defined(DISAGG_GROUP_AVX2)
            if (wide && index > 0 && count == detail::kMaskBits) {
                masks = detail::masks_avx2(source_, destination_, index);
            } else
#endif
            {
                masks = detail::masks_any(source_, destination_, index, count);
            }
            const std::size_t word = index / detail::kMaskBits * 2;
            words_[word] = masks.begins;
            words_[word + 1] = masks.negative;
            num_runs_ += static_cast<std::size_t>(std::popcount(masks.begins & ~masks.negative));
        }
    }

    // How many runs there are.
    std::size_t num_runs() const { return num_runs_; }

    // Writes all runs, in order.
    void write(const RunColumns& out) const {
        std::size_t count = 0, last = 0;  // `last`: where the newest run began, if it is still open
        bool open = false;
        for (std::size_t index = 0; index < size_; index += detail::kMaskBits) {
            const std::size_t word = index / detail::kMaskBits * 2;
            const std::uint64_t negative = words_[word + 1];
            std::uint64_t begins = words_[word];
            if (negative == 0 && open) {
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
    const S* source_;
    const D* destination_;
    std::uint64_t* words_;
    std::size_t size_ = 0;
    std::size_t num_runs_ = 0;
};

}  // namespace disagg
