// From a request's page ids and a plan's span classes to addresses: token runs, and their expansion into columns.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "threads.hpp"

namespace disagg {

// ------------------------------------------------------------------------------------------------------- token runs

// The tokens that one side owns. `edges` are `start, stop` of disjoint intervals, held one behind the other in the order
// given. With a `period` there is one pair, `[offset, offset + run)`, that comes again every `period` tokens, for ever.
struct Ownership {
    std::span<const std::int64_t> edges;
    std::int64_t period = 0;
};

// One side's pages: `ids[i]` is page `first_page + i` of the tokens it owns, `page_size` tokens each, in a pool of
// `num_rows` pages.
struct PageList {
    std::span<const std::int32_t> ids;
    std::int64_t first_page = 0;
    std::int64_t page_size = 1;
    std::int64_t num_rows = 0;
    Ownership owned;
};

// `length` positions that lie one behind the other in one page on each side; offsets in positions.
struct TokenRun {
    std::int64_t source_row;
    std::int64_t source_offset;
    std::int64_t destination_row;
    std::int64_t destination_offset;
    std::int64_t length;
};

// The first needed token of `side` (0: source) without a page, or in page `row`, which is outside the pool.
struct TokenFault {
    int side;
    bool listed;
    std::int64_t token;
    std::int64_t row;
};

struct TokenRuns {
    std::vector<TokenRun> runs;
    std::optional<TokenFault> fault;
};

inline constexpr std::int64_t kMaxToken = std::int64_t{1} << 62;
inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32;

namespace detail {

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - ((a % b != 0) & (a < 0) ? 1 : 0); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 && a > 0 ? 1 : 0); }

// Positions `start` to `stop` are all owned; position `p` has local index `p + shift`.
struct Stretch {
    std::int64_t start;
    std::int64_t stop;
    std::int64_t shift;
};

inline constexpr Stretch kNothing{kMaxToken, std::numeric_limits<std::int64_t>::max(), 0};

// Walks up the stretches of an ownership, in positions of `granule` tokens. A position is owned where its first token is.
class Cursor {
  public:
    Cursor(const Ownership& owned, std::int64_t granule) : period_(owned.period), granule_(granule) {
        const auto edges = owned.edges;
        if (edges.size() % 2 != 0 || period_ < 0 || period_ >= kMaxToken) {
            throw std::invalid_argument("ownership: expected pairs of edges and a period of at least 0");
        }
        if (period_ > 0 && edges.size() != 2)
            throw std::invalid_argument("ownership: expected one pair of edges with a period");
        std::int64_t before = 0;
        for (std::size_t i = 0; i < edges.size(); i += 2) {
            const std::int64_t start = edges[i], stop = edges[i + 1], length = stop - std::min(start, stop);
            if (start < 0 || start >= stop || start >= kMaxToken || length >= kMaxToken || before >= kMaxToken - length) {
                throw std::invalid_argument("ownership: expected 0 <= start < stop, found [" + std::to_string(start) + ", " +
                                            std::to_string(stop) + ")");
            }
            add(start, stop, before);
            before += length;
        }
        if (period_ > 0) {
            offset_ = edges[0];
            run_ = edges[1] - edges[0];
            if (run_ > period_) throw std::invalid_argument("ownership: expected a run of at most the period");
            // The whole axis is one stretch, not one for each token.
            if (run_ == period_) stretches_ = {{ceil_div(offset_, granule_), kNothing.stop, floor_div(-offset_, granule_)}};
            if (run_ == period_) period_ = 0;
        }
        std::sort(stretches_.begin(), stretches_.end(), [](const Stretch& a, const Stretch& b) { return a.start < b.start; });
    }

    // The first stretch that ends after `position`, which never goes down, if it begins before `end`.
    Stretch at(std::int64_t position, std::int64_t end) {
        if (period_ > 0) return turn_at(position, end);
        while (next_ < stretches_.size() && stretches_[next_].stop <= position) ++next_;
        return next_ < stretches_.size() ? stretches_[next_] : kNothing;
    }

  private:
    void add(std::int64_t start, std::int64_t stop, std::int64_t before) {
        const Stretch stretch = make(start, stop, before);
        if (stretch.start < stretch.stop) stretches_.push_back(stretch);
    }

    // `(p * granule - start + before) / granule`, rounded down, is `p + shift`, whether or not granules are cut.
    Stretch make(std::int64_t start, std::int64_t stop, std::int64_t before) const {
        return {ceil_div(start, granule_), ceil_div(stop, granule_), floor_div(before - start, granule_)};
    }

    Stretch turn_at(std::int64_t position, std::int64_t end) const {
        const std::int64_t token = position * granule_;
        for (std::int64_t turn = token <= offset_ ? 0 : (token - offset_) / period_;; ++turn) {
            const std::int64_t start = offset_ + turn * period_;
            if (start >= end * granule_) return kNothing;  // turns may be narrower than granules, and none hold one
            const Stretch stretch = make(start, start + run_, turn * run_);
            if (stretch.start < stretch.stop && stretch.stop > position) return stretch;
        }
    }

    std::int64_t period_;
    std::int64_t granule_;
    std::int64_t offset_ = 0;
    std::int64_t run_ = 0;
    std::vector<Stretch> stretches_;
    std::size_t next_ = 0;
};

// Where one side stands in its pages.
class PageCursor {
  public:
    PageCursor(const PageList& pages, std::int64_t granule, int side) : pages_(pages), side_(side) {
        if (pages.page_size < 1 || pages.page_size % granule != 0) {
            throw std::invalid_argument("page_size: expected a positive multiple of " + std::to_string(granule) + ", found " +
                                        std::to_string(pages.page_size));
        }
        if (pages.first_page < 0 || pages.first_page > kMaxToken) {
            throw std::invalid_argument("first_page: expected 0 to 2**62, found " + std::to_string(pages.first_page));
        }
        per_page_ = pages.page_size / granule;
    }

    void move_to(std::int64_t local) {
        index = local / per_page_ - pages_.first_page;
        offset = local % per_page_;
    }
    std::int64_t left_in_page() const { return per_page_ - offset; }
    void step(std::int64_t count) {
        offset += count;
        if (offset < per_page_) return;
        offset = 0;
        ++index;
    }
    // The page where it stands; keeps the first fault of each kind.
    std::int64_t row(std::int64_t token) {
        if (index < 0 || static_cast<std::uint64_t>(index) >= pages_.ids.size()) {
            if (!unlisted) unlisted = TokenFault{side_, false, token, -1};
            return -1;
        }
        const std::int64_t found = pages_.ids[static_cast<std::size_t>(index)];
        if ((found < 0 || found >= pages_.num_rows) && !outside) outside = TokenFault{side_, true, token, found};
        return found;
    }
    std::optional<TokenFault> fault() const { return unlisted ? unlisted : outside; }

    std::int64_t index = 0;
    std::int64_t offset = 0;
    std::optional<TokenFault> unlisted;
    std::optional<TokenFault> outside;

  private:
    const PageList& pages_;
    std::int64_t per_page_ = 1;
    int side_;
};

}  // namespace detail

// Where the positions `start / granule` to `stop / granule` that both sides own lie, as maximal runs in ascending order.
// Costs what there are pages, stretches of ownership and runs. A needed position without a page inside its pool is a
// fault, and then there are no runs: of the source before the destination, not listed before outside, the first of its
// kind. Throws `std::invalid_argument` for what is no ownership, page size or range.
inline TokenRuns token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule, const PageList& source,
                            const PageList& destination) {
    if (granule < 1 || start < 0 || stop < start || stop >= kMaxToken || stop - start > kMaxTokens) {
        throw std::invalid_argument("tokens: expected at most 2**32 tokens and a granule of at least 1, found [" +
                                    std::to_string(start) + ", " + std::to_string(stop) + ") by " + std::to_string(granule));
    }
    detail::Cursor ours(source.owned, granule), theirs(destination.owned, granule);
    detail::PageCursor from(source, granule, 0), to(destination, granule, 1);
    TokenRuns found;
    auto& runs = found.runs;
    runs.reserve(std::min<std::size_t>(source.ids.size() + destination.ids.size() + 1, 1024));
    std::int64_t position = start / granule;
    const std::int64_t end = stop / granule;
    while (position < end) {
        const detail::Stretch a = ours.at(position, end), b = theirs.at(position, end);
        position = std::max({position, a.start, b.start});
        const std::int64_t until = std::min({end, a.stop, b.stop});
        if (position >= until) continue;
        from.move_to(position + a.shift);
        to.move_to(position + b.shift);
        while (position < until) {
            const std::int64_t length = std::min({until - position, from.left_in_page(), to.left_in_page()});
            const TokenRun run{from.row(position * granule), from.offset, to.row(position * granule), to.offset, length};
            TokenRun* const last = runs.empty() ? nullptr : &runs.back();
            if (last && last->source_row == run.source_row && last->source_offset + last->length == run.source_offset &&
                last->destination_row == run.destination_row &&
                last->destination_offset + last->length == run.destination_offset) {
                last->length += length;
            } else {
                runs.push_back(run);
            }
            position += length;
            from.step(length);
            to.step(length);
        }
        if (from.unlisted) break;  // nothing comes before it
    }
    found.fault = from.fault() ? from.fault() : to.fault();
    if (found.fault) runs.clear();
    return found;
}

// -------------------------------------------------------------------------------------------------------- expansion

// `count` steps, so many bytes apart on each side.
struct Dim {
    std::uint64_t count = 1;
    std::uint64_t source_stride = 0;
    std::uint64_t destination_stride = 0;
};

// Copies of one shape: for each pair of bases, each run of tokens, and each step of `dims` (outermost first), one run of
// bytes. A token run of `n` positions is one run of `n * nbytes` where `dense`, else `n` runs, `token` strides apart.
struct Span {
    std::vector<std::int64_t> layers;
    std::vector<std::uint64_t> source_bases;
    std::vector<std::uint64_t> destination_bases;
    Dim row;
    Dim token;
    std::vector<Dim> dims;
    std::uint64_t nbytes = 0;
    bool dense = false;
};

// Three columns of one length in one piece of memory, which grows and is used again. What was handed out of it stays
// mapped as long as someone holds `memory()`, but its content changes with the next use.
class Columns {
  public:
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }
    const std::shared_ptr<std::uint64_t[]>& memory() const { return memory_; }
    std::uint64_t* source() const { return memory_.get(); }
    std::uint64_t* destination() const { return memory_.get() + capacity_; }
    std::uint64_t* nbytes() const { return memory_.get() + 2 * capacity_; }

    // Room for `count` entries, whose content is not defined.
    void resize(std::size_t count) {
        if (count > capacity_ || !memory_) {
            // A tenth more where it grows a second time: requests of one server are of similar, not of equal length.
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

// More copies than this in one batch are refused: engines index them with 32 bits.
inline constexpr std::uint64_t kMaxCopies = std::uint64_t{1} << 31;
// Fewer than this are not worth a thread of their own.
inline constexpr std::size_t kCopiesPerThread = std::size_t{1} << 20;

namespace detail {

inline std::uint64_t checked_count(std::uint64_t a, std::uint64_t b) {
    std::uint64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > kMaxCopies) {
        throw std::invalid_argument("copies: expected at most " + std::to_string(kMaxCopies) + " in one batch, found " +
                                    std::to_string(a) + " x " + std::to_string(b));
    }
    return product;
}

// The copies of one layer, as offsets from its bases, neighbours joined.
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

    // Adds `inner.count` pieces of `length`, from `s` and `d` on.
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

// Runs of bytes of one layer before neighbours are joined. Refuses empty runs, and too many copies.
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

inline Pattern make_pattern(const Span& span, std::span<const TokenRun> runs) {
    const std::uint64_t count = num_pieces(span, runs);
    Pattern pattern(count);
    if (count == 0) return pattern;

    // Offsets of every step of all dims but the innermost one, which is a loop of its own.
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

// One layer's part of a batch: entry `i` of the pattern goes to `first + i`; entry 0 is added to what lies there if `joined`.
struct Block {
    const Pattern* pattern;
    std::uint64_t source_base;
    std::uint64_t destination_base;
    std::size_t first;
    bool joined;
};

// Writes the entries `[start, stop)` of the batch, but for what joined entries add.
inline void fill_columns(std::span<const Block> blocks, std::size_t start, std::size_t stop, const Columns& out) {
    // The last block that begins before `start` may reach beyond it; an earlier one cannot.
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

// Runs for every span, and a pair of bases for every layer.
inline void check_spans(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs) {
    if (spans.size() != runs.size()) {
        throw std::invalid_argument("expected runs for each span, found " + std::to_string(spans.size()) + " spans and " +
                                    std::to_string(runs.size()) + " runs");
    }
    for (const Span* const span : spans) {
        if (span->source_bases.size() != span->layers.size() || span->destination_bases.size() != span->layers.size()) {
            throw std::invalid_argument("span: expected a source base and a destination base for each layer");
        }
    }
}

// Which layers are wanted: all of them where no list is given.
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

// The copies of `spans[i]` over `runs[i]`, in order: bases, then runs, then dims; neighbours are joined where both sides go
// on without a gap, also from one layer or span to the next. Only layers of `layers`, where it is given. `out` is
// overwritten; on up to `num_threads` threads where the batch is large. `std::invalid_argument` for lists of different
// lengths, bases that are not one pair a layer, runs that are empty, too many copies: `out` is then unchanged.
inline void expand(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs,
                   const std::optional<std::span<const std::int64_t>>& layers, std::int64_t num_threads, Columns& out) {
    detail::check_spans(spans, runs);
    check_num_threads(num_threads);
    const detail::ChosenLayers chosen(layers);

    std::vector<detail::Pattern> patterns;  // reserved: blocks point into it
    patterns.reserve(spans.size());
    std::vector<detail::Block> blocks;
    std::uint64_t count = 0;
    std::size_t pattern_of = 0;  // the span that the newest pattern is of
    for (std::size_t k = 0; k < spans.size(); ++k) {
        const Span& span = *spans[k];
        const bool again = k > 0 && !patterns.empty() && detail::same_runs(runs[k], runs[pattern_of]) &&
                           detail::same_shape(span, *spans[pattern_of]);
        if (!again) {
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

// How many copies `expand` would give, but for neighbours in different layers or spans, which it joins. Throws as it does.
inline std::uint64_t num_copies(std::span<const Span* const> spans, std::span<const std::span<const TokenRun>> runs,
                                const std::optional<std::span<const std::int64_t>>& layers) {
    detail::check_spans(spans, runs);
    const detail::ChosenLayers chosen(layers);
    std::uint64_t count = 0;
    std::uint64_t in_layer = 0;
    for (std::size_t k = 0; k < spans.size(); ++k) {
        const bool again = k > 0 && detail::same_runs(runs[k], runs[k - 1]) && detail::same_shape(*spans[k], *spans[k - 1]);
        if (!again) in_layer = detail::make_pattern(*spans[k], runs[k]).size;
        for (const std::int64_t layer : spans[k]->layers) count += chosen.has(layer) ? in_layer : 0;
        detail::checked_count(count, 1);
    }
    return count;
}

}  // namespace disagg
