// Work lists: requests as the kernel `move_spans` reads them, with span classes by number, token runs, and the start of each
// part. `disagg/backends/cuda/kernels.cu` documents every word.
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

#include "token_runs.hpp"

namespace disagg {

// How much a span class moves: the number of byte runs in one position (or in one token run where `dense`), their length, and
// the number of pairs of bases.
struct SpanSize {
    std::uint64_t steps;
    std::uint64_t nbytes;
    std::uint64_t num_bases;
    bool dense;
};

// Token runs over the bases with indices `bases` (all if not given) of span class `span`.
struct WorkPart {
    std::size_t span;
    std::optional<std::span<const std::int64_t>> bases;
    std::span<const TokenRun> runs;
};

namespace detail {

inline constexpr std::uint64_t kHeaderWords = 4, kPartWords = 7;
// The limit for pieces of one base and for tiles of one list: the kernel counts them with 32 bits.
inline constexpr std::uint64_t kMaxPieces = (std::uint64_t{1} << 31) - 1;
inline constexpr std::uint32_t kAllBases = 0xFFFFFFFF;

[[noreturn]] inline void too_long() {
    throw std::invalid_argument("work list: expected fewer than 2**64 bytes, positions and pieces");
}
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

// A request over span classes: a stream of bytes, ordered by parts, bases, runs, positions and dims. The memory of runs and
// bases must outlive it. Throws `std::invalid_argument` for an unknown span class, a run without positions, or 2**64 bytes and
// more.
class WorkList {
  public:
    WorkList(std::span<const SpanSize> sizes, std::vector<WorkPart> parts) : parts_(std::move(parts)) {
        for (const WorkPart& part : parts_) {
            if (part.span >= sizes.size()) {
                throw std::invalid_argument("work list: no span class " + std::to_string(part.span) + " among " +
                                            std::to_string(sizes.size()));
            }
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

    // The most words of 8 bytes that `encode` writes.
    std::uint64_t num_words() const {
        std::uint64_t small = 4;  // in units of 4 bytes; these four align the rows to 16 bytes
        for (const auto& [runs, positions] : known_) small += 5 * runs.size() + 1;
        for (const WorkPart& part : parts_) small += part.bases ? part.bases->size() : 0;
        return detail::kHeaderWords + detail::kPartWords * parts_.size() + (small + 1) / 2;
    }

    // Writes the request in tiles of `tile` bytes; span class `i` begins at word `at[i]`. Returns the number of bytes written.
    // Throws `std::invalid_argument` if `out` is too short, `at` lacks a class, or there are more pieces or tiles than the
    // kernel can count.
    std::uint64_t encode(std::span<const std::int64_t> at, std::uint64_t tile, std::span<std::uint64_t> out) {
        if (tile == 0) throw std::invalid_argument("work list: expected tiles of at least 1 byte");
        if (out.size() < num_words()) {
            throw std::invalid_argument("work list: expected " + std::to_string(num_words()) + " words, found " +
                                        std::to_string(out.size()));
        }
        const std::uint64_t num_parts = cut_tiles(at, tile);
        auto* const small = reinterpret_cast<std::uint32_t*>(out.data());
        std::uint64_t end = 2 * (detail::kHeaderWords + detail::kPartWords * num_parts);
        end = (end + 3) / 4 * 4;
        // Rows first, because the kernel reads them 16 bytes at a time; then the number of positions before each run.
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
            const WorkPart& part = parts_[i];
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

    // The tiles `[first, end)` that hold bytes `[low, high)` of the encoded stream. Throws `std::invalid_argument` if the list
    // has not been encoded, or for an empty range or one outside the stream.
    std::pair<std::uint64_t, std::uint64_t> tiles(std::uint64_t low, std::uint64_t high) const {
        if (tile_ == 0 || low >= high || high > total_) {
            throw std::invalid_argument("work list of " + std::to_string(total_) + " bytes" + (tile_ ? "" : ", not encoded") +
                                        ": expected a range inside it, found [" + std::to_string(low) + ", " +
                                        std::to_string(high) + ")");
        }
        return {tile_of(low), tile_of(high - 1) + 1};
    }

  private:
    // The place of a part in the stream and among the tiles.
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

    // Numbers the tiles of all parts. Returns the number of parts that are not empty.
    std::uint64_t cut_tiles(std::span<const std::int64_t> at, std::uint64_t tile) {
        std::uint64_t tiles = 0, num_parts = 0;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            Cut& cut = cuts_[i];
            cut.first_tile = tiles;
            cut.base_tiles = cut.nbytes / tile + (cut.nbytes % tile != 0);
            if (cut.is_empty()) continue;
            if (parts_[i].span >= at.size()) {
                throw std::invalid_argument("work list: span class " + std::to_string(parts_[i].span) + " was not uploaded");
            }
            ++num_parts;
            tiles = detail::plus(tiles, detail::times(cut.num_bases, cut.base_tiles));
            if (cut.pieces > detail::kMaxPieces || tiles > detail::kMaxPieces) {
                throw std::invalid_argument("work list: expected at most " + std::to_string(detail::kMaxPieces) +
                                            " pieces of a layer and tiles, found " + std::to_string(cut.pieces) +
                                            " pieces and " + std::to_string(tiles) + " tiles");
            }
        }
        return num_parts;
    }

    std::size_t find(std::span<const TokenRun> runs) const {
        const auto same = [&](const auto& other) {
            return other.first.data() == runs.data() && other.first.size() == runs.size();
        };
        return static_cast<std::size_t>(std::find_if(known_.begin(), known_.end(), same) - known_.begin());
    }

    // The number of positions of runs. Counts a table that several parts share only once.
    std::uint64_t positions_of(std::span<const TokenRun> runs) {
        const std::size_t known = find(runs);
        if (known < known_.size()) return known_[known].second;
        std::uint64_t positions = 0;
        for (const TokenRun& run : runs) {
            if (run.length < 1)
                throw std::invalid_argument("work list: expected runs of at least one position, found " +
                                            std::to_string(run.length));
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

    std::vector<WorkPart> parts_;
    std::vector<Cut> cuts_;
    std::vector<std::pair<std::span<const TokenRun>, std::uint64_t>> known_;
    std::uint64_t num_pieces_ = 0;
    std::uint64_t total_ = 0;
    std::uint64_t tile_ = 0;
};

}  // namespace disagg
