// The bytes of a request on one side, as a stream whose order both sides know. The writer gathers it into contiguous memory,
// and the reader scatters it from there, so that the bytes travel in few large writes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "spans.hpp"
#include "threads.hpp"
#include "token_runs.hpp"

namespace disagg {

// From this total on, stores bypass the caches: no reader needs the pages soon, and whole lines need not be read before they
// are written.
inline constexpr std::uint64_t kStreamingBytes = std::uint64_t{1} << 17;
// Shorter pieces do not bypass the caches: they would evict half-filled lines from the processor's few write buffers.
inline constexpr std::uint64_t kStreamingPiece = 256;

enum class Side { kSource, kDestination };

namespace detail {

// The pieces of one layer on one side, as offsets from its base. Adjacent pieces are joined, whatever the other side has.
// Lengths are those in the stream. In memory an element may have another size.
struct Pieces {
    std::uint64_t in_memory = 1;  // sizes of an element
    std::uint64_t in_stream = 1;
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> nbytes;
    std::vector<std::uint64_t> ends;  // in the stream, from the start of the layer

    std::uint64_t total() const { return ends.empty() ? 0 : ends.back(); }

    std::uint64_t memory_nbytes(std::uint64_t length) const { return length / in_stream * in_memory; }

    void add(std::uint64_t offset, std::uint64_t length) {
        if (!offsets.empty() && offsets.back() + memory_nbytes(nbytes.back()) == offset) {
            nbytes.back() += length;
        } else {
            offsets.push_back(offset);
            nbytes.push_back(length);
        }
    }

    void finish() {
        ends.resize(nbytes.size());
        std::uint64_t end = 0;
        bool wraps = false;
        for (std::size_t i = 0; i < nbytes.size(); ++i) {
            wraps |= __builtin_add_overflow(end, nbytes[i], &end);
            ends[i] = end;
        }
        if (wraps) throw std::invalid_argument("nbytes: expected a sum below 2**64");
    }
};

// The strides of a span on one side.
struct Steps {
    std::uint64_t row;
    std::uint64_t token;
    std::vector<std::array<std::uint64_t, 2>> dims;  // count, stride
    std::uint64_t nbytes;
    bool dense;
    Conversion conversion;  // of the source only: the stream has the destination's elements

    Steps(const Span& span, Side side)
        : nbytes(span.nbytes), dense(span.dense), conversion(side == Side::kSource ? span.conversion : Conversion{}) {
        const auto stride = [side](const Dim& dim) {
            return side == Side::kSource ? dim.source_stride : dim.destination_stride;
        };
        row = stride(span.row);
        token = stride(span.token);
        for (const Dim& dim : span.dims) dims.push_back({dim.count, stride(dim)});
    }
    bool operator==(const Steps&) const = default;
};

inline Pieces make_pieces(const Span& span, const Steps& steps, std::span<const TokenRun> runs, Side side) {
    const std::uint64_t num_unjoined = num_pieces(span, runs);
    if (num_unjoined == 0) return {};
    // The offsets of all steps of all dims, outermost first.
    std::vector<std::uint64_t> inner{0};
    for (const auto& [count, stride] : steps.dims) {
        std::vector<std::uint64_t> next;
        next.reserve(inner.size() * count);
        for (const std::uint64_t offset : inner) {
            for (std::uint64_t i = 0; i < count; ++i) next.push_back(offset + i * stride);
        }
        inner = std::move(next);
    }
    // The pieces of one position, with adjacent ones joined. A `whole` position is one piece without a gap to the next.
    const Pieces empty{steps.conversion.source_itemsize, steps.conversion.destination_itemsize, {}, {}, {}};
    Pieces position = empty, pieces = empty;
    for (const std::uint64_t offset : inner) position.add(offset, steps.nbytes);
    const bool whole =
        position.offsets.size() == 1 && position.offsets[0] == 0 && position.memory_nbytes(position.nbytes[0]) == steps.token;

    const std::size_t most = steps.dense || whole ? runs.size() : num_unjoined / inner.size() * position.offsets.size();
    pieces.offsets.reserve(most);
    pieces.nbytes.reserve(most);
    for (const TokenRun& run : runs) {
        const auto length = static_cast<std::uint64_t>(run.length);
        const std::int64_t at_row = side == Side::kSource ? run.source_row : run.destination_row;
        const std::int64_t at = side == Side::kSource ? run.source_offset : run.destination_offset;
        const std::uint64_t start =
            static_cast<std::uint64_t>(at_row) * steps.row + static_cast<std::uint64_t>(at) * steps.token;
        if (steps.dense) {
            for (const std::uint64_t offset : inner) pieces.add(start + offset, length * steps.nbytes);
        } else if (whole) {
            pieces.add(start, length * position.nbytes[0]);
        } else {
            for (std::uint64_t i = 0; i < length; ++i) {
                for (std::size_t k = 0; k < position.offsets.size(); ++k) {
                    pieces.add(start + i * steps.token + position.offsets[k], position.nbytes[k]);
                }
            }
        }
    }
    pieces.finish();
    return pieces;
}

// The addresses of one layer's pieces.
struct ScatteredPlaces {
    const std::uint64_t* offsets;
    std::uint64_t base;
    std::uint64_t operator()(Place place) const { return base + offsets[place.index] + place.offset; }
};

// One layer of one span: its pieces begin at byte `start` of the stream, and at address `base` in memory.
struct StreamBlock {
    std::shared_ptr<const Pieces> pieces;
    std::uint64_t base;
    std::uint64_t start;
    ConvertRun convert;
    float scale;

    ScatteredPlaces places() const { return {pieces->offsets.data(), base}; }
};

// Converts `count` bytes of a block's part of the stream, from `from` on, to the memory at `at`. Both ends of the range may lie
// inside an element.
inline void convert_range(const StreamBlock& block, Place from, std::uint64_t count, std::uint64_t at) {
    const Pieces& pieces = *block.pieces;
    const std::uint64_t size = pieces.in_stream;
    while (count > 0) {
        const std::uint64_t length = std::min(pieces.nbytes[from.index] - from.offset, count);
        const std::uint64_t base = block.base + pieces.offsets[from.index], stop = from.offset + length;
        const auto source = [&](std::uint64_t offset) {
            return static_cast<const std::byte*>(pointer(base + pieces.memory_nbytes(offset)));
        };
        for (std::uint64_t offset = from.offset; offset < stop;) {
            const std::uint64_t inside = offset % size, whole = (stop - offset) / size;
            std::uint64_t done = whole * size;
            if (inside == 0 && whole > 0) {
                block.convert(source(offset), static_cast<std::byte*>(pointer(at)), whole, block.scale);
            } else {
                std::array<std::byte, 8> element{};
                done = std::min(size - inside, stop - offset);
                block.convert(source(offset), element.data(), 1, block.scale);
                std::memcpy(pointer(at), element.data() + inside, done);
            }
            offset += done;
            at += done;
        }
        from = {from.index + 1, 0};
        count -= length;
    }
}

// The addresses of pieces in contiguous memory. Must be called for one piece after the other.
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

// Spans over their token runs, concatenated in the order of `expand`: spans, layers, runs, dims. Holds the pieces of one layer
// for all layers and spans of one shape. Several threads may call `gather` and `scatter` at once; `append` needs exclusive
// access. The caller guarantees that all memory is mapped and that nothing overlaps the staging.
class Stream {
  public:
    explicit Stream(Side side) : side_(side) {}

    std::uint64_t total() const { return blocks_.empty() ? 0 : blocks_.back().start + blocks_.back().pieces->total(); }

    // The number of copies of one pass over the whole stream. Passes over parts of it make more.
    std::uint64_t num_pieces() const {
        std::uint64_t count = 0;
        for (const detail::StreamBlock& block : blocks_) count += block.pieces->offsets.size();
        return count;
    }

    // Adds the spans. If `layers` is given, adds only these layers. Throws like `expand`, with nothing added.
    void append(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs,
                const std::optional<std::span<const std::int64_t>>& layers) {
        detail::check_spans(spans, runs);
        const detail::ChosenLayers chosen(layers);
        std::vector<detail::StreamBlock> added;
        std::uint64_t end = total();
        std::shared_ptr<const detail::Pieces> pieces;
        std::optional<detail::Steps> shape;
        std::span<const TokenRun> of;
        for (std::size_t k = 0; k < spans.size(); ++k) {
            const Span& span = *spans[k];
            detail::Steps steps(span, side_);
            if (!shape || !(*shape == steps) || !detail::same_runs(of, runs[k])) {
                pieces = std::make_shared<const detail::Pieces>(detail::make_pieces(span, steps, runs[k], side_));
                shape = std::move(steps);
                of = runs[k];
            }
            if (pieces->total() == 0) continue;
            const auto& bases = side_ == Side::kSource ? span.source_bases : span.destination_bases;
            for (std::size_t i = 0; i < span.layers.size(); ++i) {
                if (!chosen.has(span.layers[i])) continue;
                const detail::ConvertRun convert = side_ == Side::kSource ? span.conversion.run : nullptr;
                added.push_back({pieces, bases[i], end, convert, convert != nullptr ? span.scales[i] : 1});
                if (__builtin_add_overflow(end, pieces->total(), &end)) {
                    throw std::invalid_argument("nbytes: expected a sum below 2**64");
                }
            }
        }
        blocks_.insert(blocks_.end(), added.begin(), added.end());
    }

    // Copies bytes `[offset, offset + nbytes)` of the stream to `staging`, and converts the spans that have a conversion. Large
    // copies use up to `num_threads` threads. Throws
    // `std::out_of_range`, with nothing copied, if the stream is too short.
    void gather(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging, std::int64_t num_threads) const {
        share(offset, nbytes, staging, num_threads,
              [](const detail::StreamBlock& block, detail::Place from, std::uint64_t count, std::uint64_t at) {
                  if (block.convert != nullptr) {
                      detail::convert_range(block, from, count, at);
                      return;
                  }
                  const detail::Pieces& pieces = *block.pieces;
                  detail::copy_range<detail::Scattered::kSource, false>(pieces.nbytes, from, count, block.places(),
                                                                        detail::Contiguous(at, pieces.nbytes));
              });
    }

    // The reverse of `gather`. Stores of long pieces bypass the caches.
    void scatter(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging, std::int64_t num_threads) const {
        const bool many = nbytes >= kStreamingBytes;
        share(offset, nbytes, staging, num_threads,
              [many](const detail::StreamBlock& block, detail::Place from, std::uint64_t count, std::uint64_t at) {
                  const detail::Pieces& pieces = *block.pieces;
                  const detail::Contiguous source(at, pieces.nbytes);
                  if (many && pieces.total() / pieces.offsets.size() >= kStreamingPiece) {
                      detail::copy_range<detail::Scattered::kDestination, true>(pieces.nbytes, from, count, source,
                                                                                block.places());
                  } else {
                      detail::copy_range<detail::Scattered::kDestination, false>(pieces.nbytes, from, count, source,
                                                                                 block.places());
                  }
              });
    }

    // Whether any span of the source is converted: then packing takes more than copies.
    bool converts() const {
        return std::any_of(blocks_.begin(), blocks_.end(), [](const auto& block) { return block.convert != nullptr; });
    }

    // Writes to `out` the copies that `gather` or `scatter` would make of that range, one for each piece or part of a piece.
    // Throws like them, with `out` unchanged, and `std::invalid_argument` if the stream converts.
    void copies(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging, Columns& out) const {
        check(offset, nbytes);
        if (converts()) throw std::invalid_argument("stream: expected one without conversions");
        std::vector<std::array<std::uint64_t, 3>> found;  // address, at, length
        if (nbytes > 0) {
            walk(offset, nbytes, staging,
                 [&](const detail::StreamBlock& block, detail::Place from, std::uint64_t count, std::uint64_t at) {
                     const detail::ScatteredPlaces places = block.places();
                     while (count > 0) {
                         const std::uint64_t length = std::min(block.pieces->nbytes[from.index] - from.offset, count);
                         found.push_back({places(from), at, length});
                         from = {from.index + 1, 0};
                         at += length;
                         count -= length;
                     }
                 });
        }
        out.resize(found.size());
        const bool source = side_ == Side::kSource;
        for (std::size_t i = 0; i < found.size(); ++i) {
            (source ? out.source() : out.destination())[i] = found[i][0];
            (source ? out.destination() : out.source())[i] = found[i][1];
            out.nbytes()[i] = found[i][2];
        }
    }

  private:
    void check(std::uint64_t offset, std::uint64_t nbytes) const {
        if (offset > total() || nbytes > total() - offset) {
            throw std::out_of_range("stream of " + std::to_string(total()) + " bytes: expected a range inside it, found [" +
                                    std::to_string(offset) + ", +" + std::to_string(nbytes) + ")");
        }
    }

    template <typename Copy>
    void share(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging, std::int64_t num_threads,
               const Copy& copy) const {
        check_num_threads(num_threads);
        check(offset, nbytes);
        if (nbytes == 0) return;
        const std::size_t shares = num_shares(nbytes, kBytesPerThread, num_threads);
        const std::uint64_t each = nbytes / shares;
        run_shares(shares, [&](std::size_t k) {
            const std::uint64_t skipped = each * k;
            walk(offset + skipped, k + 1 < shares ? each : nbytes - skipped, staging + skipped, copy);
        });
    }

    template <typename Copy>
    void walk(std::uint64_t offset, std::uint64_t left, std::uint64_t staging, const Copy& copy) const {
        auto block = std::upper_bound(blocks_.begin(), blocks_.end(), offset,
                                      [](std::uint64_t at, const detail::StreamBlock& b) { return at < b.start; });
        for (--block; left > 0; ++block) {
            const detail::Pieces& pieces = *block->pieces;
            const std::uint64_t within = offset - block->start, count = std::min(left, pieces.total() - within);
            const auto first = std::upper_bound(pieces.ends.begin(), pieces.ends.end(), within);
            const auto index = static_cast<std::size_t>(first - pieces.ends.begin());
            copy(*block, detail::Place{index, within - (*first - pieces.nbytes[index])}, count, staging);
            offset += count;
            staging += count;
            left -= count;
        }
    }

    Side side_;
    std::vector<detail::StreamBlock> blocks_;
};

}  // namespace disagg
