// Copies between addresses of this process.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace disagg {

// `nbytes[i]` bytes go from address `source[i]` to address `destination[i]`; three columns of one length.
struct CopyColumns {
    std::span<const std::uint64_t> source;
    std::span<const std::uint64_t> destination;
    std::span<const std::uint64_t> nbytes;
};

// Each thread of a copy gets at least this many bytes.
inline constexpr std::uint64_t kBytesPerThread = std::uint64_t{1} << 20;

namespace detail {

inline void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

// A place in a batch: `offset` bytes into copy `index`.
struct Place {
    std::size_t index = 0;
    std::uint64_t offset = 0;
};

inline constexpr std::uint64_t kLine = 64;
// `copy_lines` copies pieces of whole lines up to this size: the library's `memcpy` first spends time on choosing a method.
inline constexpr std::uint64_t kLargestByLines = 4096;
// How far to prefetch ahead of the copy, in bytes and in (short) pieces. The processor cannot predict where the next piece
// lies, and its own prefetch inside a piece stops at the end of every page.
inline constexpr std::uint64_t kAhead = 4096;
inline constexpr std::size_t kPiecesAhead = 8;
// Pieces longer than this are left to the library's `memcpy`.
inline constexpr std::uint64_t kLargestAhead = std::uint64_t{1} << 15;

#if defined(__SSE2__)
// Copies `nbytes`, a multiple of `kLine`. `Streaming` bypasses the caches and needs `to` to be a multiple of 16.
template <bool Streaming>
inline void copy_lines(void* to, const void* from, std::uint64_t nbytes) {
    auto* t = static_cast<__m128i*>(to);
    const auto* f = static_cast<const __m128i*>(from);
    for (const auto* const end = f + nbytes / 16; f != end; f += 4, t += 4) {
        const __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);
        const __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
        if constexpr (Streaming) {
            _mm_stream_si128(t, a);
            _mm_stream_si128(t + 1, b);
            _mm_stream_si128(t + 2, c);
            _mm_stream_si128(t + 3, d);
        } else {
            _mm_storeu_si128(t, a);
            _mm_storeu_si128(t + 1, b);
            _mm_storeu_si128(t + 2, c);
            _mm_storeu_si128(t + 3, d);
        }
    }
}
// Makes streaming stores visible to other threads. Call it before the copy is reported as done.
inline void finish_streaming() { _mm_sfence(); }
#else
template <bool Streaming>
inline void copy_lines(void* to, const void* from, std::uint64_t nbytes) {
    std::memcpy(to, from, nbytes);
}
inline void finish_streaming() {}
#endif

// Which sides of a batch have pieces in no particular order.
enum class Scattered { kSource, kDestination, kBoth };

template <bool ForWriting>
inline void prefetch(std::uint64_t address, std::uint64_t nbytes) {
    for (std::uint64_t line = 0; line < std::min(nbytes, kAhead); line += kLine) {
        __builtin_prefetch(pointer(address + line), ForWriting ? 1 : 0);
    }
}

// The number of pieces of this size in `kAhead` bytes, at most `kPiecesAhead`.
inline std::size_t pieces_ahead(std::uint64_t nbytes) {
    std::size_t pieces = kPiecesAhead;
    while (pieces > 1 && nbytes * pieces > kAhead) pieces /= 2;
    return pieces;
}

// Copies a piece of more than `kAhead` bytes. Prefetches `kAhead` bytes ahead, at its end from the next piece, at `next`.
inline void copy_long_piece(std::uint64_t to, std::uint64_t from, std::uint64_t nbytes, std::uint64_t next) {
    constexpr std::uint64_t kStep = 4 * kLine;
    std::uint64_t done = 0;
    for (; done + kStep <= nbytes; done += kStep) {
        const std::uint64_t at = done + kAhead < nbytes ? from + done + kAhead : next + (done + kAhead - nbytes);
        for (std::uint64_t line = 0; line < kStep; line += kLine) __builtin_prefetch(pointer(at + line), 0);
        copy_lines<false>(pointer(to + done), pointer(from + done), kStep);
    }
    if (done < nbytes) std::memcpy(pointer(to + done), pointer(from + done), nbytes - done);
}

template <bool Streaming>
inline void copy_piece(std::uint64_t to, std::uint64_t from, std::uint64_t nbytes) {
    if (nbytes == 0) return;
    if constexpr (Streaming) {
        // Stream whole lines only: to write part of a line costs a read and a write of memory.
        const std::uint64_t head = std::min((kLine - to % kLine) % kLine, nbytes);
        const std::uint64_t body = (nbytes - head) / kLine * kLine, tail = nbytes - head - body;
        if (head > 0) std::memcpy(pointer(to), pointer(from), head);
        copy_lines<true>(pointer(to + head), pointer(from + head), body);
        if (tail > 0) std::memcpy(pointer(to + head + body), pointer(from + head + body), tail);
    } else if (nbytes % kLine == 0 && nbytes <= kLargestByLines) {
        copy_lines<false>(pointer(to), pointer(from), nbytes);
    } else {
        std::memcpy(pointer(to), pointer(from), nbytes);
    }
}

// Copies `total` bytes of a batch, beginning at `from`. `source` and `destination` return the address of a place. The one whose
// side is not scattered is called once for each place, in order.
template <Scattered Where, bool Streaming, typename Source, typename Destination>
inline void copy_range(std::span<const std::uint64_t> nbytes, Place from, std::uint64_t total, Source source,
                       Destination destination) {
    while (total > 0) {
        const std::uint64_t size = std::min(nbytes[from.index] - from.offset, total);
        const std::size_t ahead = from.index + pieces_ahead(size);
        const bool more = ahead < nbytes.size();
        if constexpr (Where != Scattered::kSource && !Streaming) {
            if (more) prefetch<true>(destination({ahead, 0}), nbytes[ahead]);
        }
        const bool is_long = Where != Scattered::kDestination && !Streaming && size > kAhead && size <= kLargestAhead;
        if (is_long) {
            const std::uint64_t at = source(from);
            copy_long_piece(destination(from), at, size, more ? source({ahead, 0}) : at);
        } else {
            if constexpr (Where != Scattered::kDestination) {
                if (more) prefetch<false>(source({ahead, 0}), nbytes[ahead]);
            }
            copy_piece<Streaming>(destination(from), source(from), size);
        }
        total -= size;
        ++from.index;
        from.offset = 0;
    }
    if constexpr (Streaming) finish_streaming();
}

// The sum. Throws `std::invalid_argument` if it wraps, because the division of work between threads depends on it.
inline std::uint64_t total_nbytes(std::span<const std::uint64_t> nbytes) {
    std::uint64_t total = 0;
    bool wraps = false;
    for (const std::uint64_t size : nbytes) wraps |= __builtin_add_overflow(total, size, &total);
    if (wraps) throw std::invalid_argument("nbytes: expected a sum below 2**64");
    return total;
}

// The start of each of `shares` equal shares of the bytes.
inline std::vector<Place> share_starts(std::span<const std::uint64_t> nbytes, std::uint64_t share, std::size_t shares) {
    std::vector<Place> starts(shares);
    Place place;
    for (std::size_t k = 1; k < shares; ++k) {
        std::uint64_t skip = share;
        while (skip >= nbytes[place.index] - place.offset) {
            skip -= nbytes[place.index] - place.offset;
            ++place.index;
            place.offset = 0;
        }
        place.offset += skip;
        starts[k] = place;
    }
    return starts;
}

}  // namespace detail

// Copies the whole batch on up to `num_threads` threads, the calling one included. Each thread takes an equal share of the
// bytes, at least `kBytesPerThread`; large copies are divided. Returns the number of bytes copied once all are. The caller
// guarantees that every range is mapped, that no source range overlaps a destination range, and that destination ranges are
// disjoint. Throws `std::invalid_argument`, with nothing copied, for columns of different lengths, a sum of 2**64 bytes and
// more, or `num_threads` below 1.
inline std::uint64_t copy_batch(const CopyColumns& batch, std::int64_t num_threads) {
    const std::size_t size = batch.nbytes.size();
    if (batch.source.size() != size || batch.destination.size() != size) {
        throw std::invalid_argument("source has " + std::to_string(batch.source.size()) + " addresses, destination has " +
                                    std::to_string(batch.destination.size()) + ", nbytes has " + std::to_string(size));
    }
    check_num_threads(num_threads);
    const std::uint64_t total = detail::total_nbytes(batch.nbytes);
    const std::size_t shares = num_shares(total, kBytesPerThread, num_threads);
    const std::uint64_t share = total / shares;
    const auto starts = detail::share_starts(batch.nbytes, share, shares);
    run_shares(shares, [&](std::size_t k) {
        detail::copy_range<detail::Scattered::kBoth, false>(
            batch.nbytes, starts[k], k + 1 < shares ? share : total - share * (shares - 1),
            [&](detail::Place place) { return batch.source[place.index] + place.offset; },
            [&](detail::Place place) { return batch.destination[place.index] + place.offset; });
    });
    return total;
}

}  // namespace disagg
