// From the page ids of a request to token runs: where the positions that both sides own lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace disagg {

// The tokens that one side owns. `edges` are pairs `start, stop` of disjoint intervals, which the side holds in the order
// given. With a `period` there is one pair, `[offset, offset + run)`, which repeats every `period` tokens without end.
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

// `length` consecutive positions inside one page on each side; offsets in positions.
struct TokenRun {
    std::int64_t source_row;
    std::int64_t source_offset;
    std::int64_t destination_row;
    std::int64_t destination_offset;
    std::int64_t length;
};

// The first needed token of `side` (0: source, 1: destination) that has no page in the list, or, where `listed`, whose page
// `row` is outside the pool.
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

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (((a % b != 0) & (a < 0)) ? 1 : 0); }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 && a > 0 ? 1 : 0); }

// Owned positions `[start, stop)`; position `p` has local index `p + shift`.
struct Stretch {
    std::int64_t start;
    std::int64_t stop;
    std::int64_t shift;
};

inline constexpr Stretch kNoStretch{kMaxToken, std::numeric_limits<std::int64_t>::max(), 0};

// Visits the stretches of an ownership in ascending order, in positions of `granule` tokens. A side owns a position if it owns
// the position's first token.
class OwnershipCursor {
  public:
    OwnershipCursor(const Ownership& owned, std::int64_t granule) : period_(owned.period), granule_(granule) {
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
            if (run_ > period_) throw std::invalid_argument("ownership: expected a run no longer than the period");
            // The whole axis is one stretch, not one stretch for each token.
            if (run_ == period_) stretches_ = {{ceil_div(offset_, granule_), kNoStretch.stop, floor_div(-offset_, granule_)}};
            if (run_ == period_) period_ = 0;
        }
        std::sort(stretches_.begin(), stretches_.end(), [](const Stretch& a, const Stretch& b) { return a.start < b.start; });
    }

    // The first stretch that ends after `position`, or any stretch from `end` on if that one begins there. Positions must not
    // decrease from call to call.
    Stretch at(std::int64_t position, std::int64_t end) {
        if (period_ > 0) return periodic_at(position, end);
        while (next_ < stretches_.size() && stretches_[next_].stop <= position) ++next_;
        return next_ < stretches_.size() ? stretches_[next_] : kNoStretch;
    }

  private:
    void add(std::int64_t start, std::int64_t stop, std::int64_t before) {
        const Stretch stretch = make(start, stop, before);
        if (stretch.start < stretch.stop) stretches_.push_back(stretch);
    }

    // `(p * granule - start + before) / granule`, rounded down, is `p + shift`, even if the interval cuts granules.
    Stretch make(std::int64_t start, std::int64_t stop, std::int64_t before) const {
        return {ceil_div(start, granule_), ceil_div(stop, granule_), floor_div(before - start, granule_)};
    }

    Stretch periodic_at(std::int64_t position, std::int64_t end) const {
        const std::int64_t token = position * granule_;
        for (std::int64_t turn = token <= offset_ ? 0 : (token - offset_) / period_;; ++turn) {
            const std::int64_t start = offset_ + turn * period_;
            if (start >= end * granule_) return kNoStretch;  // intervals narrower than a granule may contain no position
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

// A position in one side's pages.
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
    // The id of the current page. Keeps the first fault of each kind.
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

// The positions `start / granule` to `stop / granule` that both sides own, as maximal runs in ascending order. Takes time in
// proportion to the number of pages, stretches of ownership and runs. If a needed position has no page inside its pool, the
// result is a fault without runs: source faults come before destination faults, then unlisted pages before pages outside the
// pool, then the lowest token. Throws `std::invalid_argument` for an invalid ownership, page size or range.
inline TokenRuns token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule, const PageList& source,
                            const PageList& destination) {
    if (granule < 1 || start < 0 || stop < start || stop >= kMaxToken || stop - start > kMaxTokens) {
        throw std::invalid_argument("tokens: expected at most 2**32 tokens and a granule of at least 1, found [" +
                                    std::to_string(start) + ", " + std::to_string(stop) + ") by " + std::to_string(granule));
    }
    detail::OwnershipCursor source_owned(source.owned, granule), destination_owned(destination.owned, granule);
    detail::PageCursor from(source, granule, 0), to(destination, granule, 1);
    TokenRuns found;
    auto& runs = found.runs;
    runs.reserve(std::min<std::size_t>(source.ids.size() + destination.ids.size() + 1, 1024));
    std::int64_t position = start / granule;
    const std::int64_t end = stop / granule;
    while (position < end) {
        const detail::Stretch a = source_owned.at(position, end), b = destination_owned.at(position, end);
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
        if (from.unlisted) break;  // no other fault precedes it
    }
    found.fault = from.fault() ? from.fault() : to.fault();
    if (found.fault) runs.clear();
    return found;
}

}  // namespace disagg
