// Requests as the kernel `move_spans` reads them: span classes by number, token runs, and where each part begins. The layout
// of every word is in `_kernels.cu`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"

namespace disagg {

// What of a span class decides how much a request moves: runs of bytes in one position (or in one token run where `dense`),
// their length, and pairs of bases.
struct SpanSize {
    std::uint64_t steps;
    std::uint64_t nbytes;
    std::uint64_t num_bases;
    bool dense;
};

// The bases `bases` (numbers; all of them where there are none given) of span class `span`, over token runs.
struct OrderPart {
    std::size_t span;
    std::optional<std::span<const std::int64_t>> bases;
    std::span<const TokenRun> runs;
};

namespace detail {

inline constexpr std::uint64_t kOrderHeaderWords = 4, kOrderPartWords = 7;
// Pieces of one base, and tiles of one order: the kernel counts them with 32 bits.
inline constexpr std::uint64_t kMostPieces = (std::uint64_t{1} << 31) - 1;
inline constexpr std::uint32_t kAllBases = 0xFFFFFFFF;

[[noreturn]] inline void too_long() { throw std::invalid_argument("order: its bytes are not below 2**64"); }
inline std::uint64_t times(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) too_long();
    return product;
}
inline std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
    std::uint64_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) too_long();
    return sum;
}

}  // namespace detail

// A request over span classes: a stream of bytes, in order of parts, bases, runs, positions and dims. Holds what it was made
// of by reference. `std::invalid_argument` for a span class that there is not, a run without a position, or 2**64 bytes.
class Order {
  public:
    Order(std::span<const SpanSize> sizes, std::vector<OrderPart> parts) : parts_(std::move(parts)) {
        for (const OrderPart& part : parts_) {
            if (part.span >= sizes.size()) throw std::invalid_argument("order: no span class " + std::to_string(part.span));
            const SpanSize& size = sizes[part.span];
            const std::uint64_t positions = positions_of(part.runs);
            const std::uint64_t bases = part.bases ? part.bases->size() : size.num_bases;
            const std::uint64_t pieces = detail::times(size.dense ? part.runs.size() : positions, size.steps);
            const std::uint64_t nbytes = detail::times(detail::times(positions, size.steps), size.nbytes);
            cuts_.push_back({total_, bases, pieces, nbytes, size.steps, 0, 0});
            num_pieces_ = detail::plus(num_pieces_, detail::times(bases, pieces));
            total_ = detail::plus(total_, detail::times(bases, nbytes));
        }
    }

    std::uint64_t num_pieces() const { return num_pieces_; }
    std::uint64_t total_nbytes() const { return total_; }

    // Words of 8 bytes that `encode` writes, at most.
    std::uint64_t num_words() const {
        std::uint64_t small = 4;  // of 4 bytes: up to the next multiple of 16
        for (const auto& [runs, positions] : known_) small += 5 * runs.size() + 1;
        for (const OrderPart& part : parts_) small += part.bases ? part.bases->size() : 0;
        return detail::kOrderHeaderWords + detail::kOrderPartWords * parts_.size() + (small + 1) / 2;
    }

    // Writes the request in tiles of `tile` bytes, `at[i]` being the word at which span class `i` begins; how many bytes were
    // written. `std::invalid_argument` where `out` is too short, `at` has no such class, or the kernel cannot count that far.
    std::uint64_t encode(std::span<const std::int64_t> at, std::uint64_t tile, std::span<std::uint64_t> out) {
        if (out.size() < num_words() || tile == 0) {
            throw std::invalid_argument("order: expected " + std::to_string(num_words()) + " words, found " +
                                        std::to_string(out.size()));
        }
        std::uint64_t tiles = 0, num_parts = 0;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            Cut& cut = cuts_[i];
            cut.first_tile = tiles;
            cut.base_tiles = cut.nbytes / tile + (cut.nbytes % tile != 0);
            if (cut.is_empty()) continue;
            if (parts_[i].span >= at.size()) throw std::invalid_argument("order: a span class that was not uploaded");
            ++num_parts;
            tiles = detail::plus(tiles, detail::times(cut.num_bases, cut.base_tiles));
            if (cut.pieces > detail::kMostPieces || tiles > detail::kMostPieces) {
                throw std::invalid_argument("kernel: expected at most " + std::to_string(detail::kMostPieces) +
                                            " pieces of a layer, found " + std::to_string(cut.pieces));
            }
        }
        auto* const small = reinterpret_cast<std::uint32_t*>(out.data());
        std::uint64_t end = 2 * (detail::kOrderHeaderWords + detail::kOrderPartWords * num_parts);
        end = (end + 3) / 4 * 4;
        // Rows first, as the kernel reads them 16 bytes at a time; then how many positions come before each.
        std::vector<std::uint64_t> rows_at, prefix_at;
        for (const auto& [runs, positions] : known_) {
            rows_at.push_back(end / 4);
            for (const TokenRun& run : runs) {
                for (const std::int64_t value :
                     {run.source_row, run.source_offset, run.destination_row, run.destination_offset}) {
                    small[end++] = static_cast<std::uint32_t>(value);
                }
            }
        }
        for (const auto& [runs, positions] : known_) {
            prefix_at.push_back(end);
            std::uint64_t before = 0;
            for (const TokenRun& run : runs) {
                small[end++] = static_cast<std::uint32_t>(before);
                before += static_cast<std::uint64_t>(run.length);
            }
            small[end++] = static_cast<std::uint32_t>(before);
        }
        std::uint64_t* word = out.data();
        for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{0}, num_parts, std::uint64_t{0}}) *word++ = value;
        const auto pair = [](std::uint64_t low, std::uint64_t high) { return (low & 0xFFFFFFFF) | high << 32; };
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            const OrderPart& part = parts_[i];
            const Cut& cut = cuts_[i];
            if (cut.is_empty()) continue;
            std::uint64_t bases_at = detail::kAllBases;
            if (part.bases) {
                bases_at = end;
                for (const std::int64_t base : *part.bases) small[end++] = static_cast<std::uint32_t>(base);
            }
            const std::size_t runs = find(part.runs);
            *word++ = cut.begin;
            *word++ = cut.nbytes;
            *word++ = pair(static_cast<std::uint64_t>(at[part.span]), part.runs.size());
            *word++ = pair(cut.first_tile, cut.base_tiles);
            *word++ = pair(cut.pieces, cut.steps);
            *word++ = pair(rows_at[runs], prefix_at[runs]);
            *word++ = pair(bases_at, 0);
        }
        tile_ = tile;
        return 4 * end;
    }

    // The tiles `[first, end)` that hold bytes `[low, high)` of the stream, as it was encoded. `std::invalid_argument` where
    // it was not, or does not have them.
    std::pair<std::uint64_t, std::uint64_t> tiles(std::uint64_t low, std::uint64_t high) const {
        if (tile_ == 0 || low >= high || high > total_) {
            throw std::invalid_argument("order of " + std::to_string(total_) + " bytes: expected a range of it, found [" +
                                        std::to_string(low) + ", " + std::to_string(high) + ")");
        }
        return {tile_of(low), tile_of(high - 1) + 1};
    }

  private:
    // Where a part's stream and tiles begin.
    struct Cut {
        std::uint64_t begin;
        std::uint64_t num_bases;
        std::uint64_t pieces;  // of one base
        std::uint64_t nbytes;  // of one base
        std::uint64_t steps;
        std::uint64_t first_tile;
        std::uint64_t base_tiles;

        bool is_empty() const { return num_bases == 0 || pieces == 0 || nbytes == 0; }
    };

    std::size_t find(std::span<const TokenRun> runs) const {
        const auto same = [&](const auto& other) {
            return other.first.data() == runs.data() && other.first.size() == runs.size();
        };
        return static_cast<std::size_t>(std::find_if(known_.begin(), known_.end(), same) - known_.begin());
    }

    // How many positions runs have; parts that share a table are counted once.
    std::uint64_t positions_of(std::span<const TokenRun> runs) {
        const std::size_t known = find(runs);
        if (known < known_.size()) return known_[known].second;
        std::uint64_t positions = 0;
        for (const TokenRun& run : runs) {
            if (run.length < 1) throw std::invalid_argument("order: expected runs of at least one position");
            positions = detail::plus(positions, static_cast<std::uint64_t>(run.length));
        }
        known_.emplace_back(runs, positions);
        return positions;
    }

    std::uint64_t tile_of(std::uint64_t position) const {
        std::size_t i = cuts_.size() - 1;
        while (cuts_[i].is_empty() || cuts_[i].begin > position) --i;
        const Cut& cut = cuts_[i];
        const std::uint64_t inside = position - cut.begin;
        return cut.first_tile + inside / cut.nbytes * cut.base_tiles + inside % cut.nbytes / tile_;
    }

    std::vector<OrderPart> parts_;
    std::vector<Cut> cuts_;
    std::vector<std::pair<std::span<const TokenRun>, std::uint64_t>> known_;
    std::uint64_t num_pieces_ = 0;
    std::uint64_t total_ = 0;
    std::uint64_t tile_ = 0;
};

}  // namespace disagg
