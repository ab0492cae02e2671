// Pieces of memory into one contiguous stretch, and back: what travels as one large write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "copy.hpp"
#include "threads.hpp"

namespace disagg {

// Pieces of this total and more go past the caches: nobody reads pages that soon, and lines that are written as
// a whole need not be read first.
inline constexpr std::uint64_t kStreamingBytes = std::uint64_t{1} << 17;
// Shorter pieces leave the processor's few buffers for such lines too soon.
inline constexpr std::uint64_t kStreamingPiece = 1024;

namespace detail {

inline std::uint64_t check_pieces(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> nbytes,
                                  std::int64_t num_threads) {
    if (addresses.size() != nbytes.size()) {
        throw std::invalid_argument("addresses has " + std::to_string(addresses.size()) + " entries, nbytes has " +
                                    std::to_string(nbytes.size()));
    }
    check_num_threads(num_threads);
    return total_nbytes(nbytes);
}

// Calls `copy(from, staging offset, total)` for each share of the bytes.
template <typename Copy>
void share_pieces(std::span<const std::uint64_t> nbytes, std::uint64_t total, std::int64_t num_threads, const Copy& copy) {
    const std::size_t shares = num_shares(total, kBytesPerThread, num_threads);
    const std::uint64_t share = total / shares;
    const auto starts = share_starts(nbytes, share, shares);
    run_shares(shares,
               [&](std::size_t k) { copy(starts[k], share * k, k + 1 < shares ? share : total - share * (shares - 1)); });
}

// The place in contiguous memory of whatever piece is asked for; pieces are asked for in order.
class Contiguous {
  public:
    Contiguous(std::uint64_t address, std::span<const std::uint64_t> nbytes) : next_(address), nbytes_(nbytes) {}
    std::uint64_t operator()(Place place) {
        const std::uint64_t at = next_;
        next_ += nbytes_[place.index] - place.offset;
        return at;
    }

  private:
    std::uint64_t next_;
    std::span<const std::uint64_t> nbytes_;
};

}  // namespace detail

// `nbytes[i]` bytes from address `addresses[i]`, one behind the other, to `staging`; returns the bytes copied. On up to
// `num_threads` threads. The caller guarantees that all memory is mapped and that nothing overlaps the staging; throws as
// `copy_batch` does.
inline std::uint64_t gather(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> nbytes,
                            std::uint64_t staging, std::int64_t num_threads) {
    const std::uint64_t total = detail::check_pieces(addresses, nbytes, num_threads);
    detail::share_pieces(nbytes, total, num_threads, [&](detail::Place from, std::uint64_t offset, std::uint64_t count) {
        detail::copy_range<detail::Scattered::kSource, false>(
            nbytes, from, count, [&](detail::Place place) { return addresses[place.index] + place.offset; },
            detail::Contiguous(staging + offset, nbytes));
    });
    return total;
}

// The other way round: the bytes at `staging`, cut into pieces of `nbytes[i]`, to `addresses[i]`. Destinations are
// disjoint; large batches are written past the caches.
inline std::uint64_t scatter(std::span<const std::uint64_t> addresses, std::span<const std::uint64_t> nbytes,
                             std::uint64_t staging, std::int64_t num_threads) {
    const std::uint64_t total = detail::check_pieces(addresses, nbytes, num_threads);
    const bool streaming = total >= kStreamingBytes && total / nbytes.size() >= kStreamingPiece;
    detail::share_pieces(nbytes, total, num_threads, [&](detail::Place from, std::uint64_t offset, std::uint64_t count) {
        const auto to = [&](detail::Place place) { return addresses[place.index] + place.offset; };
        const detail::Contiguous at(staging + offset, nbytes);
        if (streaming) {
            detail::copy_range<detail::Scattered::kDestination, true>(nbytes, from, count, at, to);
        } else {
            detail::copy_range<detail::Scattered::kDestination, false>(nbytes, from, count, at, to);
        }
    });
    return total;
}

}  // namespace disagg
