// Spans, which are copies of one shape, and the columns that hold the copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "convert.hpp"
#include "token_runs.hpp"

namespace disagg {

// `count` steps; strides in bytes.
struct Dim {
    std::uint64_t count = 1;
    std::uint64_t source_stride = 0;
    std::uint64_t destination_stride = 0;
};

// Copies of one shape: one run of bytes for each pair of bases, each run of tokens, and each step of `dims` (outermost first).
// A token run of `n` positions is one run of `n * nbytes` where `dense`; otherwise it is `n` runs, `token` strides apart.
// `nbytes` are those of the destination. With a `conversion` the source has as many elements of another size, and each layer
// has a scale.
struct Span {
    std::vector<std::int64_t> layers;
    std::vector<std::uint64_t> source_bases;
    std::vector<std::uint64_t> destination_bases;
    Dim row;
    Dim token;
    std::vector<Dim> dims;
    std::uint64_t nbytes = 0;
    bool dense = false;
    Conversion conversion = {};
    std::vector<float> scales = {};
};

// Three columns of one length in one growing, reusable allocation. Pointers into it stay mapped while `memory()` is held, but
// the next use overwrites its content.
class Columns {
  public:
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }
    const std::shared_ptr<std::uint64_t[]>& memory() const { return memory_; }
    std::uint64_t* source() const { return memory_.get(); }
    std::uint64_t* destination() const { return memory_.get() + capacity_; }
    std::uint64_t* nbytes() const { return memory_.get() + 2 * capacity_; }

    // Sets the size to `count`. The content is undefined afterwards.
    void resize(std::size_t count) {
        if (count > capacity_ || !memory_) {
            // From the second growth on, add 10%: the requests of one server have similar lengths, not equal ones.
            const std::size_t room = std::max<std::size_t>(memory_ ? count + count / 10 : count, 1);
            memory_ = std::shared_ptr<std::uint64_t[]>(new std::uint64_t[3 * room]);
            capacity_ = room;
        }
        size_ = count;
    }

  private:
    std::shared_ptr<std::uint64_t[]> memory_;
    std::size_t capacity_ = 0;
    std::size_t size_ = 0;
};

// The most copies of one batch: engines index them with 32 bits.
inline constexpr std::uint64_t kMaxCopies = std::uint64_t{1} << 31;

namespace detail {

inline std::uint64_t checked_count(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > kMaxCopies) {
        throw std::invalid_argument("copies: expected at most " + std::to_string(kMaxCopies) + " in one batch, found " +
                                    std::to_string(a) + " x " + std::to_string(b));
    }
    return product;
}

// The number of byte runs of one layer before adjacent ones are joined. Throws for empty token runs and for too many copies.
inline std::uint64_t num_pieces(const Span& span, std::span<const TokenRun> runs) {
    std::uint64_t positions = 0, steps = 1;
    for (const TokenRun& run : runs) {
        if (run.length < 1) {
            throw std::invalid_argument("runs: expected lengths of at least 1, found " + std::to_string(run.length));
        }
        const auto added = span.dense ? 1 : static_cast<std::uint64_t>(run.length);
        if (__builtin_add_overflow(positions, added, &positions)) positions = std::numeric_limits<std::uint64_t>::max();
    }
    for (const Dim& dim : span.dims) steps = checked_count(steps, dim.count);
    return checked_count(positions, steps);
}

// Checks that each span has runs, and each layer a pair of bases.
inline void check_spans(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs) {
    if (spans.size() != runs.size()) {
        throw std::invalid_argument("spans: expected runs for each span, found " + std::to_string(spans.size()) +
                                    " spans and " + std::to_string(runs.size()) + " runs");
    }
    for (const Span* const span : spans) {
        if (span->source_bases.size() != span->layers.size() || span->destination_bases.size() != span->layers.size()) {
            throw std::invalid_argument("span: expected a source base and a destination base for each layer");
        }
    }
}

// A set of layers: all of them if no list is given.
class ChosenLayers {
  public:
    explicit ChosenLayers(const std::optional<std::span<const std::int64_t>>& layers) : all_(!layers) {
        if (layers) sorted_.assign(layers->begin(), layers->end());
        std::sort(sorted_.begin(), sorted_.end());
    }
    bool has(std::int64_t layer) const { return all_ || std::binary_search(sorted_.begin(), sorted_.end(), layer); }

  private:
    bool all_;
    std::vector<std::int64_t> sorted_;
};

// Whether both are the same memory.
inline bool same_runs(std::span<const TokenRun> a, std::span<const TokenRun> b) {
    return a.data() == b.data() && a.size() == b.size();
}

inline bool same_shape(const Span& a, const Span& b) {
    const auto same = [](const Dim& x, const Dim& y) {
        return x.count == y.count && x.source_stride == y.source_stride && x.destination_stride == y.destination_stride;
    };
    return a.nbytes == b.nbytes && a.dense == b.dense && same(a.row, b.row) && same(a.token, b.token) &&
           std::equal(a.dims.begin(), a.dims.end(), b.dims.begin(), b.dims.end(), same);
}

}  // namespace detail

}  // namespace disagg
