// The expansion of spans over token runs into columns of copies.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "spans.hpp"
#include "threads.hpp"
#include "token_runs.hpp"

namespace disagg {

// Each thread of an expansion gets at least this many copies.
inline constexpr std::size_t kCopiesPerThread = std::size_t{1} << 20;

namespace detail {

// The copies of one layer as offsets from its bases, with adjacent copies joined.
struct Pattern {
    std::unique_ptr<std::uint64_t[]> memory;
    std::uint64_t* source = nullptr;
    std::uint64_t* destination = nullptr;
    std::uint64_t* nbytes = nullptr;
    std::size_t size = 0;

    explicit Pattern(std::size_t capacity) : memory(new std::uint64_t[3 * capacity + 1]) {
        source = memory.get();
        destination = source + capacity;
        nbytes = destination + capacity;
    }

    std::uint64_t source_end() const { return source[size - 1] + nbytes[size - 1]; }
    std::uint64_t destination_end() const { return destination[size - 1] + nbytes[size - 1]; }

    // Adds `inner.count` pieces of `length`; the first is at offsets `s` and `d`.
    void add(std::uint64_t s, std::uint64_t d, std::uint64_t length, const Dim& inner) {
        std::uint64_t first = 0;
        if (size > 0 && source_end() == s && destination_end() == d) {
            nbytes[size - 1] += length;
            first = 1;
        }
        if (size > 0 && first == inner.count) return;
        if (inner.source_stride == length && inner.destination_stride == length) {
            if (first == 0) append(s, d, 0);
            nbytes[size - 1] += (inner.count - first) * length;
            return;
        }
        std::uint64_t* const to_source = source + size;
        std::uint64_t* const to_destination = destination + size;
        std::uint64_t* const to_nbytes = nbytes + size;
        const std::size_t count = inner.count - first;
        s += first * inner.source_stride;
        d += first * inner.destination_stride;
        for (std::size_t i = 0; i < count; ++i) to_source[i] = s + i * inner.source_stride;
        for (std::size_t i = 0; i < count; ++i) to_destination[i] = d + i * inner.destination_stride;
        for (std::size_t i = 0; i < count; ++i) to_nbytes[i] = length;
        size += count;
    }

    void append(std::uint64_t s, std::uint64_t d, std::uint64_t length) {
        source[size] = s;
        destination[size] = d;
        nbytes[size] = length;
        ++size;
    }
};

inline Pattern make_pattern(const Span& span, std::span<const TokenRun> runs) {
    const std::uint64_t count = num_pieces(span, runs);
    Pattern pattern(count);
    if (count == 0) return pattern;

    // The offsets of all steps of all dims except the innermost, which `Pattern::add` steps through.
    std::vector<std::array<std::uint64_t, 2>> outer{{0, 0}};
    for (std::size_t k = 0; k + 1 < span.dims.size(); ++k) {
        std::vector<std::array<std::uint64_t, 2>> next;
        next.reserve(outer.size() * span.dims[k].count);
        for (const auto& [s, d] : outer) {
            for (std::uint64_t i = 0; i < span.dims[k].count; ++i) {
                next.push_back({s + i * span.dims[k].source_stride, d + i * span.dims[k].destination_stride});
            }
        }
        outer = std::move(next);
    }
    for (const TokenRun& run : runs) {
        const auto length = static_cast<std::uint64_t>(run.length);
        const std::uint64_t s = static_cast<std::uint64_t>(run.source_row) * span.row.source_stride +
                                static_cast<std::uint64_t>(run.source_offset) * span.token.source_stride;
        const std::uint64_t d = static_cast<std::uint64_t>(run.destination_row) * span.row.destination_stride +
                                static_cast<std::uint64_t>(run.destination_offset) * span.token.destination_stride;
        const std::uint64_t nbytes = span.dense ? length * span.nbytes : span.nbytes;
        if (span.dims.empty()) {
            const Dim inner = span.dense ? Dim{} : Dim{length, span.token.source_stride, span.token.destination_stride};
            pattern.add(s, d, nbytes, inner);
            continue;
        }
        for (std::uint64_t i = 0; i < (span.dense ? 1 : length); ++i) {
            const std::uint64_t si = s + i * span.token.source_stride, di = d + i * span.token.destination_stride;
            for (const auto& [so, dof] : outer) pattern.add(si + so, di + dof, nbytes, span.dims.back());
        }
    }
    return pattern;
}

// One layer's part of a batch: entry `i` of the pattern goes to `first + i`. If `joined`, entry 0 extends the entry that is
// already there.
struct Block {
    const Pattern* pattern;
    std::uint64_t source_base;
    std::uint64_t destination_base;
    std::size_t first;
    bool joined;
};

// Writes the entries `[start, stop)` of the batch, without the extensions by joined entries.
inline void fill_columns(std::span<const Block> blocks, std::size_t start, std::size_t stop, const Columns& out) {
    // Only the last block that begins before `start` can reach beyond it.
    auto block =
        std::lower_bound(blocks.begin(), blocks.end(), start, [](const Block& b, std::size_t at) { return b.first < at; });
    if (block != blocks.begin()) --block;
    for (; block != blocks.end() && block->first < stop; ++block) {
        const Pattern& p = *block->pattern;
        const std::size_t first = block->first + (block->joined ? 1 : 0);
        const std::size_t from = std::max(start, first), to = std::min(stop, block->first + p.size);
        if (from >= to) continue;
        const std::size_t skip = from - block->first, count = to - from;
        std::uint64_t* __restrict const source = out.source() + from;
        std::uint64_t* __restrict const destination = out.destination() + from;
        std::uint64_t* __restrict const nbytes = out.nbytes() + from;
        const std::uint64_t* __restrict const s = p.source + skip;
        const std::uint64_t* __restrict const d = p.destination + skip;
        const std::uint64_t* __restrict const n = p.nbytes + skip;
        for (std::size_t i = 0; i < count; ++i) source[i] = block->source_base + s[i];
        for (std::size_t i = 0; i < count; ++i) destination[i] = block->destination_base + d[i];
        std::copy_n(n, count, nbytes);
    }
}

}  // namespace detail

// Writes the copies of `spans[i]` over `runs[i]` to `out`, ordered by bases, then runs, then dims. Copies that are adjacent on
// both sides are joined, also across layers and spans. If `layers` is given, includes only these. Large batches use up to
// `num_threads` threads. Throws `std::invalid_argument` for lists of different lengths, a layer without a pair of bases, empty
// runs, a span with a conversion, or too many copies; `out` is then unchanged.
inline void expand(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs,
                   const std::optional<std::span<const std::int64_t>>& layers, std::int64_t num_threads, Columns& out) {
    detail::check_spans(spans, runs);
    check_num_threads(num_threads);
    const detail::ChosenLayers chosen(layers);

    std::vector<detail::Pattern> patterns;  // reserved, because blocks point into it
    patterns.reserve(spans.size());
    std::vector<detail::Block> blocks;
    std::uint64_t count = 0;
    std::size_t pattern_of = 0;  // the span of the newest pattern
    for (std::size_t k = 0; k < spans.size(); ++k) {
        const Span& span = *spans[k];
        if (span.conversion.run != nullptr) throw std::invalid_argument("span: expected one without a conversion");
        const bool is_same = k > 0 && !patterns.empty() && detail::same_runs(runs[k], runs[pattern_of]) &&
                             detail::same_shape(span, *spans[pattern_of]);
        if (!is_same) {
            patterns.push_back(detail::make_pattern(span, runs[k]));
            pattern_of = k;
        }
        const detail::Pattern& pattern = patterns.back();
        if (pattern.size == 0) continue;
        for (std::size_t i = 0; i < span.layers.size(); ++i) {
            if (!chosen.has(span.layers[i])) continue;
            const std::uint64_t source = span.source_bases[i], destination = span.destination_bases[i];
            bool joined = false;
            if (!blocks.empty()) {
                const detail::Block& last = blocks.back();
                joined = last.source_base + last.pattern->source_end() == source + pattern.source[0] &&
                         last.destination_base + last.pattern->destination_end() == destination + pattern.destination[0];
            }
            blocks.push_back({&pattern, source, destination, count - (joined ? 1 : 0), joined});
            count += pattern.size - (joined ? 1 : 0);
            detail::checked_count(count, 1);
        }
    }

    out.resize(count);
    share_out(count, kCopiesPerThread, num_threads,
              [&](std::size_t start, std::size_t stop) { detail::fill_columns(blocks, start, stop, out); });
    for (const detail::Block& block : blocks) {
        if (block.joined) out.nbytes()[block.first] += block.pattern->nbytes[0];
    }
}

// The number of copies that `expand` would give if it did not join copies of different layers or spans. Throws like `expand`.
inline std::uint64_t num_copies(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs,
                                const std::optional<std::span<const std::int64_t>>& layers) {
    detail::check_spans(spans, runs);
    const detail::ChosenLayers chosen(layers);
    std::uint64_t count = 0;
    std::uint64_t in_layer = 0;
    for (std::size_t k = 0; k < spans.size(); ++k) {
        const bool is_same = k > 0 && detail::same_runs(runs[k], runs[k - 1]) && detail::same_shape(*spans[k], *spans[k - 1]);
        if (!is_same) in_layer = detail::make_pattern(*spans[k], runs[k]).size;
        for (const std::int64_t layer : spans[k]->layers) count += chosen.has(layer) ? in_layer : 0;
        detail::checked_count(count, 1);
    }
    return count;
}

}  // namespace disagg
