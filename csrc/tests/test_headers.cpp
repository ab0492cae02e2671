// Tests of the headers alone, for the sanitizers (`make sanitize`): no Python, no test framework. Exit status 0 if all hold.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "copy.hpp"
#include "digest.hpp"
#include "group_runs.hpp"
#include "orders.hpp"
#include "pack.hpp"
#include "process_copy.hpp"
#include "regions.hpp"

namespace {

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

using Run = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

// The definition, one pair at a time.
template <typename S, typename D>
std::vector<Run> naive_runs(const std::vector<S>& source, const std::vector<D>& destination) {
    std::vector<Run> runs;
    bool open = false;
    for (std::size_t i = 0; i < source.size(); ++i) {
        const std::int64_t s = source[i], d = destination[i];
        if (s < 0 || d < 0) {
            open = false;
            continue;
        }
        if (open) {
            auto& [first_s, first_d, length] = runs.back();
            if (s - first_s == length && d - first_d == length) {
                ++length;
                continue;
            }
        }
        runs.emplace_back(s, d, 1);
        open = true;
    }
    return runs;
}

// Into columns of exactly as much room as is asked for, so that a write too far is seen.
template <typename S, typename D>
std::vector<Run> runs_of(const std::vector<S>& source, const std::vector<D>& destination) {
    using Groups = disagg::RunGroups<S, D>;
    const auto words = std::make_unique<std::uint64_t[]>(Groups::num_words(source.size()));
    const Groups groups(source, destination, words.get());
    const std::size_t count = groups.num_runs();
    const auto column = [count] { return std::make_unique<std::int64_t[]>(count); };
    const auto s = column(), d = column(), n = column();
    groups.write({s.get(), d.get(), n.get()});
    std::vector<Run> runs;
    for (std::size_t k = 0; k < count; ++k) runs.emplace_back(s[k], d[k], n[k]);
    return runs;
}

// Whatever this processor would choose: each scan that it can run finds the same.
template <typename S, typename D>
bool scans_agree(const std::vector<S>& source, const std::vector<D>& destination) {
    namespace detail = disagg::detail;
    const auto scanned = [&](auto scan) {
        std::vector<std::uint64_t> words(disagg::RunGroups<S, D>::num_words(source.size()));
        words.push_back(scan(source.data(), destination.data(), source.size(), words.data()));
        return words;
    };
    const auto expected = scanned(detail::scan_any<S, D>);
    bool agree = true;
#if defined(DISAGG_GROUP_AVX)
    if (__builtin_cpu_supports("avx2")) agree &= scanned(detail::scan_avx2<S, D>) == expected;
    if (detail::has_avx512()) agree &= scanned(detail::scan_avx512<S, D>) == expected;
#endif
    return agree;
}

template <typename S, typename D>
void test_random_runs(std::mt19937_64& random) {
    for (int round = 0; round < 3000; ++round) {
        const std::size_t size = random() % 200;
        const std::uint64_t step_chance = random() % 101;
        std::vector<S> source(size);
        std::vector<D> destination(size);
        std::int64_t s = 0, d = 0;
        for (std::size_t i = 0; i < size; ++i) {
            const bool steps = random() % 100 < step_chance;
            s = steps ? s + 1 : static_cast<std::int64_t>(random() % 1000) - 20;
            d = steps || random() % 4 == 0 ? d + 1 : static_cast<std::int64_t>(random() % 1000) - 20;
            source[i] = static_cast<S>(s);
            destination[i] = static_cast<D>(d);
        }
        CHECK(runs_of(source, destination) == naive_runs(source, destination));
        CHECK(scans_agree(source, destination));
    }
}

void test_edges_of_runs() {
    using Ids = std::vector<std::int64_t>;
    CHECK(runs_of(Ids{}, Ids{}).empty());
    CHECK(runs_of(Ids{}, Ids{1, 2}).empty());
    CHECK(runs_of(Ids{1, 2}, Ids{}).empty());
    CHECK(runs_of(Ids{-1, 0, 1}, Ids{-1, 0, 1}) == (std::vector<Run>{{0, 0, 2}}));
    CHECK(runs_of(Ids{-3, -2, -1}, Ids{4, 5, 6}).empty());
    CHECK(runs_of(Ids{kMax - 1, kMax, -kMax - 1}, Ids{7, 8, 9}) == (std::vector<Run>{{kMax - 1, 7, 2}}));
    CHECK(runs_of(Ids{5, 6, 8}, Ids{1, 2, 3}) == (std::vector<Run>{{5, 1, 2}, {8, 3, 1}}));
    for (const std::size_t size : {1u, 31u, 32u, 33u, 34u, 64u, 65u, 1000u}) {
        Ids ids(size);
        std::iota(ids.begin(), ids.end(), std::int64_t{3});
        CHECK(runs_of(ids, ids) == (std::vector<Run>{{3, 3, static_cast<std::int64_t>(size)}}));
        ids.back() = -1;
        CHECK(runs_of(ids, ids) == naive_runs(ids, ids));
    }
    const Ids three{1, 2, 3}, two{1, 2};
    bool thrown = false;
    try {
        runs_of(three, two);
    } catch (const std::invalid_argument& error) {
        thrown = std::strstr(error.what(), "3") && std::strstr(error.what(), "2");
    }
    CHECK(thrown);
}

// A stream of these pieces: bytes are its tokens, addresses its rows.
disagg::Stream stream_of(disagg::Side side, const std::vector<std::uint64_t>& addresses,
                         const std::vector<std::uint64_t>& nbytes) {
    const disagg::Span bytes{{0}, {0}, {0}, {1, 1, 1}, {1, 1, 1}, {}, 1, true};
    std::vector<disagg::TokenRun> runs;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        const auto at = static_cast<std::int64_t>(addresses[i]), length = static_cast<std::int64_t>(nbytes[i]);
        if (length > 0) runs.push_back({at, 0, at, 0, length});
    }
    const disagg::Span* const spans[]{&bytes};
    const std::span<const disagg::TokenRun> tables[]{runs};
    disagg::Stream stream(side);
    stream.append(spans, tables, std::nullopt);
    return stream;
}

void test_copies(std::mt19937_64& random, std::size_t num_pieces, std::uint64_t largest, std::int64_t num_threads) {
    std::vector<std::uint64_t> nbytes(num_pieces), offsets(num_pieces), source(num_pieces), destination(num_pieces);
    for (auto& size : nbytes) size = random() % (largest + 1);
    std::exclusive_scan(nbytes.begin(), nbytes.end(), offsets.begin(), std::uint64_t{0});
    const std::uint64_t total = std::accumulate(nbytes.begin(), nbytes.end(), std::uint64_t{0});

    std::vector<unsigned char> from(total), to(total), expected(total);
    for (auto& byte : from) byte = static_cast<unsigned char>(random());
    std::vector<std::size_t> order(num_pieces);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    std::uint64_t place = 0;
    for (const std::size_t piece : order) {
        source[piece] = reinterpret_cast<std::uintptr_t>(from.data()) + offsets[piece];
        destination[piece] = reinterpret_cast<std::uintptr_t>(to.data()) + place;
        for (std::uint64_t byte = 0; byte < nbytes[piece]; ++byte) expected[place + byte] = from[offsets[piece] + byte];
        place += nbytes[piece];
    }
    CHECK(disagg::copy_batch({source, destination, nbytes}, num_threads) == total);
    CHECK(to == expected);

    // The same in two steps: into one stretch, which is `from` again, and out of it.
    std::vector<unsigned char> staging(total);
    const auto staged = reinterpret_cast<std::uintptr_t>(staging.data());
    stream_of(disagg::Side::kSource, source, nbytes).gather(0, total, staged, num_threads);
    CHECK(staging == from);
    std::fill(to.begin(), to.end(), static_cast<unsigned char>(0));
    stream_of(disagg::Side::kDestination, destination, nbytes).scatter(0, total, staged, num_threads);
    CHECK(to == expected);
}

void test_refused_copies() {
    const std::vector<std::uint64_t> one{1}, two{1, 2}, none{};
    const auto refused = [](const disagg::CopyColumns& batch, std::int64_t num_threads) {
        try {
            disagg::copy_batch(batch, num_threads);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(refused({one, two, two}, 1));
    CHECK(refused({two, one, two}, 1));
    CHECK(refused({two, two, one}, 1));
    CHECK(refused({none, none, none}, 0));
    CHECK(!refused({none, none, none}, 4));
}

template <typename Function>
bool refuses(const Function& function) {
    try {
        function();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_refused_packs() {
    const std::vector<std::uint64_t> two{1, 2}, wraps{~std::uint64_t{0}, 2};
    CHECK(refuses([&] { disagg::copy_batch({two, two, wraps}, 4); }));
    const auto out_of_range = [](const disagg::Stream& stream, std::uint64_t offset, std::uint64_t nbytes) {
        try {
            stream.gather(offset, nbytes, 0, 1);
        } catch (const std::out_of_range&) {
            return true;
        }
        return false;
    };
    disagg::Stream empty(disagg::Side::kSource);
    empty.gather(0, 0, 0, 4);
    CHECK(empty.total() == 0 && empty.num_pieces() == 0 && out_of_range(empty, 0, 1) && out_of_range(empty, 1, 0));
    const disagg::Stream three = stream_of(disagg::Side::kSource, two, two);
    CHECK(three.total() == 3 && out_of_range(three, 2, 2) && out_of_range(three, 4, ~std::uint64_t{0}));
    CHECK(refuses([&] { three.gather(0, 0, 0, 0); }));
    // What wraps is refused, within a layer and over all of them.
    const std::int64_t most = std::numeric_limits<std::int64_t>::max();
    const std::vector<disagg::TokenRun> long_runs{{0, 0, 0, 0, most}, {0, 0, 0, 0, most}, {0, 0, 0, 0, most}};
    const disagg::Span dense{{0}, {0}, {0}, {}, {}, {}, 1, true};
    const disagg::Span many{{0, 1, 2}, {0, 0, 0}, {0, 0, 0}, {}, {}, {}, 1, true};
    const disagg::Span* const one_layer[]{&dense};
    const disagg::Span* const layers[]{&many};
    const std::span<const disagg::TokenRun> three_runs[]{long_runs}, one_run[]{std::span(long_runs).first(1)};
    CHECK(refuses([&] { empty.append(one_layer, three_runs, std::nullopt); }));
    CHECK(refuses([&] { empty.append(layers, one_run, std::nullopt); }));
    CHECK(refuses([&] { empty.append(layers, {}, std::nullopt); }));
    CHECK(empty.total() == 0);
}

// ------------------------------------------------------------------------------------------------------------- binding

using Ids = std::vector<std::int32_t>;
using Edges = std::vector<std::int64_t>;

struct Side {
    Ids ids;
    std::int64_t first_page, page_size, num_rows;
    Edges edges;
    std::int64_t period;
    disagg::PageList list() const { return {ids, first_page, page_size, num_rows, {edges, period}}; }

    // The definition: the local index of a token, or -1.
    std::int64_t locate(std::int64_t token) const {
        std::int64_t before = 0;
        if (period > 0) {
            const std::int64_t run = edges[1] - edges[0];
            const std::int64_t inside = token - edges[0];
            return inside >= 0 && inside % period < run ? inside / period * run + inside % period : -1;
        }
        for (std::size_t i = 0; i < edges.size(); i += 2) {
            if (edges[i] <= token && token < edges[i + 1]) return token - edges[i] + before;
            before += edges[i + 1] - edges[i];
        }
        return -1;
    }
};

// One position at a time; faults as (side, listed, token, row), by order of side, kind and token.
std::vector<std::vector<std::int64_t>> naive_token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule,
                                                        const Side& source, const Side& destination,
                                                        std::vector<std::int64_t>& fault) {
    std::vector<std::vector<std::int64_t>> places, faults;
    for (std::int64_t p = start / granule; p < stop / granule; ++p) {
        std::vector<std::int64_t> place;
        bool both = true;
        for (const Side* side : {&source, &destination}) both = both && side->locate(p * granule) >= 0;
        if (!both) continue;
        for (const Side* side : {&source, &destination}) {
            const std::int64_t local = side->locate(p * granule) / granule, per_page = side->page_size / granule;
            const std::int64_t index = local / per_page - side->first_page, number = side == &destination;
            const bool listed = index >= 0 && index < static_cast<std::int64_t>(side->ids.size());
            const std::int64_t row = listed ? side->ids[static_cast<std::size_t>(index)] : -1;
            if (!listed || row < 0 || row >= side->num_rows) faults.push_back({number, listed, p * granule, row});
            place.insert(place.end(), {row, local % per_page});
        }
        places.push_back(place);
    }
    if (!faults.empty()) {
        fault = *std::min_element(faults.begin(), faults.end());
        return {};
    }
    std::vector<std::vector<std::int64_t>> runs;
    for (const auto& place : places) {
        if (!runs.empty()) {
            auto& last = runs.back();
            if (last[0] == place[0] && last[1] + last[4] == place[1] && last[2] == place[2] && last[3] + last[4] == place[3]) {
                ++last[4];
                continue;
            }
        }
        runs.push_back({place[0], place[1], place[2], place[3], 1});
    }
    return runs;
}

Side random_side(std::mt19937_64& random, std::int64_t granule) {
    const auto below = [&](std::uint64_t bound) { return static_cast<std::int64_t>(random() % bound); };
    Side side{{}, below(3), granule * (1 + below(4)), 8, {}, 0};
    if (random() % 4 == 0) side.first_page = 0;
    side.ids.resize(random() % 30);
    for (auto& id : side.ids) id = static_cast<std::int32_t>(random() % 20 == 0 ? below(12) - 2 : below(8));
    if (random() % 2 == 0) {
        side.period = 1 + below(20);
        const std::int64_t offset = random() % 2 == 0 ? 0 : below(20);
        side.edges = {offset, offset + 1 + below(static_cast<std::uint64_t>(side.period))};
        if (random() % 3 == 0) side.period = side.edges[1] - side.edges[0];
    } else {
        std::vector<std::pair<std::int64_t, std::int64_t>> parts;
        for (std::int64_t at = below(5); at < 60; at += below(5)) {
            const std::int64_t stop = at + 1 + below(30);
            parts.emplace_back(at, stop);
            at = stop;
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (const auto& [start, stop] : parts) side.edges.insert(side.edges.end(), {start, stop});
    }
    return side;
}

void test_token_runs(std::mt19937_64& random) {
    int good = 0;
    for (int round = 0; round < 20000; ++round) {
        const std::int64_t granule = 1 + static_cast<std::int64_t>(random() % 4);
        const Side source = random_side(random, granule), destination = random_side(random, granule);
        const auto start = static_cast<std::int64_t>(random() % 40), stop = start + static_cast<std::int64_t>(random() % 40);
        std::vector<std::int64_t> fault;
        const auto expected = naive_token_runs(start, stop, granule, source, destination, fault);
        const auto found = disagg::token_runs(start, stop, granule, source.list(), destination.list());
        CHECK(found.fault.has_value() == !fault.empty());
        if (found.fault) {
            const auto& f = *found.fault;
            CHECK((std::vector<std::int64_t>{f.side, f.listed, f.token, f.row} == fault));
        }
        CHECK(found.runs.size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const auto& run = found.runs[i];
            CHECK((std::vector<std::int64_t>{run.source_row, run.source_offset, run.destination_row, run.destination_offset,
                                             run.length} == expected[i]));
        }
        good += !expected.empty();
    }
    CHECK(good > 1000);
}

void test_extreme_token_runs() {
    constexpr std::int64_t k62 = std::int64_t{1} << 62;
    const Side whole{{0}, 0, k62, 1, {0, 1}, 1};
    for (const std::int64_t start : {std::int64_t{0}, k62 - 1000}) {
        const auto found = disagg::token_runs(start, start + 999, 1, whole.list(), whole.list());
        CHECK(!found.fault && found.runs.size() == 1 && found.runs[0].length == 999);
    }
    for (const Edges& edges : {Edges{0, k62 - 1}, Edges{k62 - 1, k62 + 5}, Edges{k62 - 2, k62 - 1, 0, 9}}) {
        const Side side{{0}, 0, 4, 1, edges, 0};
        disagg::token_runs(k62 - 100, k62 - 1, 1, side.list(), whole.list());
    }
    const Side rare{{0}, 0, 4, 1, {k62 - 2, k62 - 1}, k62 - 1};
    disagg::token_runs(k62 - 100, k62 - 1, 3, Side{{0}, 0, 3, 1, rare.edges, rare.period}.list(),
                       Side{whole.ids, 0, 3, 1, {0, 1}, 1}.list());
    const auto refused = [&](const Side& side, std::int64_t start, std::int64_t stop, std::int64_t granule) {
        return refuses([&] { disagg::token_runs(start, stop, granule, side.list(), whole.list()); });
    };
    CHECK(refused(whole, 0, k62, 1) && refused(whole, 3, 2, 1) && refused(whole, -1, 2, 1) && refused(whole, 0, 2, 0));
    CHECK(refused({{0}, 0, 0, 1, {0, 1}, 1}, 0, 1, 1) && refused({{0}, 0, 5, 1, {0, 1}, 1}, 0, 1, 2));
    CHECK(refused({{0}, -1, 4, 1, {0, 1}, 1}, 0, 1, 1) && refused({{0}, 0, 4, 1, {0}, 1}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {5, 5}, 0}, 0, 1, 1) && refused({{0}, 0, 4, 1, {-3, 5}, 0}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {0, 9}, 8}, 0, 1, 1) && refused({{0}, 0, 4, 1, {0, 1}, -8}, 0, 1, 1));
    CHECK(refused({{0}, 0, 4, 1, {}, 8}, 0, 1, 1) && refused({{0}, 0, 4, 1, {kMax - 1, kMax}, 0}, 0, 1, 1));
}

using Copies = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;

// All copies, one at a time, each joined to the one before where both sides go on.
Copies naive_expand(const std::vector<disagg::Span>& spans, const std::vector<std::vector<disagg::TokenRun>>& runs,
                    const std::vector<std::int64_t>* layers) {
    Copies copies;
    const auto add = [&copies](std::uint64_t s, std::uint64_t d, std::uint64_t n) {
        if (!copies.empty()) {
            auto& [ls, ld, ln] = copies.back();
            if (ls + ln == s && ld + ln == d) {
                ln += n;
                return;
            }
        }
        copies.emplace_back(s, d, n);
    };
    for (std::size_t k = 0; k < spans.size(); ++k) {
        const disagg::Span& span = spans[k];
        for (std::size_t l = 0; l < span.layers.size(); ++l) {
            if (layers && std::find(layers->begin(), layers->end(), span.layers[l]) == layers->end()) continue;
            for (const auto& run : runs[k]) {
                const std::uint64_t length = static_cast<std::uint64_t>(run.length), times = span.dense ? 1 : length;
                for (std::uint64_t i = 0; i < times; ++i) {
                    const auto at = [&](std::uint64_t base, std::int64_t row, std::int64_t offset, std::uint64_t row_stride,
                                        std::uint64_t stride) {
                        return base + static_cast<std::uint64_t>(row) * row_stride +
                               (static_cast<std::uint64_t>(offset) + i) * stride;
                    };
                    Copies each{{at(span.source_bases[l], run.source_row, run.source_offset, span.row.source_stride,
                                    span.token.source_stride),
                                 at(span.destination_bases[l], run.destination_row, run.destination_offset,
                                    span.row.destination_stride, span.token.destination_stride),
                                 span.dense ? length * span.nbytes : span.nbytes}};
                    for (const disagg::Dim& dim : span.dims) {
                        Copies next;
                        for (const auto& [s, d, n] : each) {
                            for (std::uint64_t j = 0; j < dim.count; ++j) {
                                next.emplace_back(s + j * dim.source_stride, d + j * dim.destination_stride, n);
                            }
                        }
                        each = next;
                    }
                    for (const auto& [s, d, n] : each) add(s, d, n);
                }
            }
        }
    }
    return copies;
}

// Streams of both sides have the copies' bytes in their order, whole and cut.
void test_stream(std::mt19937_64& random, std::vector<disagg::Span> spans,
                 std::span<const std::span<const disagg::TokenRun>> runs,
                 const std::optional<std::span<const std::int64_t>>& layers, const Copies& expected) {
    std::vector<unsigned char> from(2048), to(2048), copied(2048), wanted(2048), content;
    for (auto& byte : from) byte = static_cast<unsigned char>(random());
    for (const auto& [s, d, n] : expected) {
        content.insert(content.end(), from.begin() + static_cast<std::ptrdiff_t>(s),
                       from.begin() + static_cast<std::ptrdiff_t>(s + n));
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(s), n, wanted.begin() + static_cast<std::ptrdiff_t>(d));
    }
    std::vector<const disagg::Span*> pointers;
    for (auto& span : spans) {
        for (auto& base : span.source_bases) base += reinterpret_cast<std::uintptr_t>(from.data());
        for (auto& base : span.destination_bases) base += reinterpret_cast<std::uintptr_t>(to.data());
        pointers.push_back(&span);
    }
    disagg::Stream source(disagg::Side::kSource), destination(disagg::Side::kDestination);
    source.append(pointers, runs, layers);
    destination.append(pointers, runs, layers);
    CHECK(source.total() == content.size() && destination.total() == content.size());
    std::vector<unsigned char> staging(content.size());
    for (std::uint64_t offset = 0; offset < content.size();) {
        const std::uint64_t nbytes = std::min<std::uint64_t>(1 + random() % 40, content.size() - offset);
        const auto staged = reinterpret_cast<std::uintptr_t>(staging.data()) + offset;
        source.gather(offset, nbytes, staged, 2);
        destination.scatter(offset, nbytes, staged, 2);
        disagg::Columns columns;
        source.copies(offset, nbytes, staged, columns);
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i < columns.size(); ++i) {
            CHECK(columns.destination()[i] == staged + seen);
            CHECK(std::memcmp(reinterpret_cast<const void*>(columns.source()[i]), content.data() + offset + seen,
                              columns.nbytes()[i]) == 0);
            seen += columns.nbytes()[i];
        }
        CHECK(seen == nbytes);
        destination.copies(offset, nbytes, staged, columns);
        for (std::size_t i = 0; i < columns.size(); ++i) {
            const auto place = columns.destination()[i] - reinterpret_cast<std::uintptr_t>(to.data());
            std::copy_n(reinterpret_cast<const unsigned char*>(columns.source()[i]), columns.nbytes()[i],
                        copied.begin() + static_cast<std::ptrdiff_t>(place));
        }
        offset += nbytes;
    }
    CHECK(staging == content);
    CHECK(to == wanted);
    CHECK(copied == wanted);
}

void test_expand(std::mt19937_64& random) {
    disagg::Columns columns;  // used again and again
    for (int round = 0; round < 5000; ++round) {
        const auto below = [&](std::uint64_t bound) { return random() % bound; };
        std::vector<disagg::Span> spans(below(4));
        std::vector<std::vector<disagg::TokenRun>> runs(spans.size());
        for (std::size_t k = 0; k < spans.size(); ++k) {
            disagg::Span& span = spans[k];
            if (k > 0 && below(3) == 0) {
                span = spans[k - 1];
                runs[k] = runs[k - 1];
                continue;
            }
            span.nbytes = 1 + below(3);
            const auto stride = [&] { return below(2) == 0 ? span.nbytes : below(12); };
            span.row = {1, stride() * 2, stride() * 2};
            span.token = {1, stride(), stride()};
            span.dense = below(3) == 0;
            for (std::uint64_t i = below(4); i > 0; --i)
                span.dims.push_back({below(9) == 0 ? 0 : 1 + below(3), stride(), stride()});
            for (std::uint64_t i = below(5); i > 0; --i) {
                span.layers.push_back(static_cast<std::int64_t>(below(6)));
                span.source_bases.push_back(below(20));
                span.destination_bases.push_back(span.source_bases.back() + below(2));
            }
            for (std::uint64_t i = below(5); i > 0; --i) {
                const auto small = [&] { return static_cast<std::int64_t>(below(4)); };
                runs[k].push_back({small(), small(), small(), small(), 1 + small()});
            }
        }
        std::vector<std::int64_t> layers{1, 3, 4};
        const bool filtered = below(3) == 0;
        std::vector<const disagg::Span*> pointers;
        std::vector<std::span<const disagg::TokenRun>> tables(runs.begin(), runs.end());
        for (const auto& span : spans) pointers.push_back(&span);
        disagg::expand(pointers, tables, filtered ? std::optional(std::span<const std::int64_t>(layers)) : std::nullopt,
                       1 + static_cast<std::int64_t>(below(2)), columns);
        Copies found;
        for (std::size_t i = 0; i < columns.size(); ++i) {
            found.emplace_back(columns.source()[i], columns.destination()[i], columns.nbytes()[i]);
        }
        const Copies expected = naive_expand(spans, runs, filtered ? &layers : nullptr);
        CHECK(found == expected);
        const auto chosen = filtered ? std::optional(std::span<const std::int64_t>(layers)) : std::nullopt;
        CHECK(disagg::num_copies(pointers, tables, chosen) >= found.size());
        test_stream(random, spans, tables, chosen, expected);

        // Filled in parts, as several threads would, it is the same.
        if (spans.size() == 1 && !filtered && !found.empty()) {
            const auto pattern = disagg::detail::make_pattern(spans[0], runs[0]);
            std::vector<disagg::detail::Block> blocks;
            std::uint64_t count = 0;
            for (std::size_t i = 0; i < spans[0].layers.size(); ++i) {
                blocks.push_back({&pattern, spans[0].source_bases[i], spans[0].destination_bases[i], count, false});
                count += pattern.size;
            }
            disagg::Columns whole, parts;
            whole.resize(count);
            parts.resize(count);
            disagg::detail::fill_columns(blocks, 0, count, whole);
            for (std::size_t from = 0; from < count;) {
                const std::size_t to = std::min<std::size_t>(count, from + 1 + below(4));
                disagg::detail::fill_columns(blocks, from, to, parts);
                from = to;
            }
            CHECK(std::equal(whole.source(), whole.source() + count, parts.source()));
            CHECK(std::equal(whole.destination(), whole.destination() + count, parts.destination()));
            CHECK(std::equal(whole.nbytes(), whole.nbytes() + count, parts.nbytes()));
        }
    }
    const disagg::Span huge{{0}, {0}, {0}, {}, {}, {{1u << 20, 1, 2}, {1u << 20, 1, 2}}, 1, false};
    const disagg::Span uneven{{0, 1}, {0}, {0, 1}, {}, {}, {}, 1, false};
    const disagg::Span plain{{0}, {0}, {0}, {}, {}, {}, 1, false};
    const std::vector<disagg::TokenRun> run{{0, 0, 0, 0, 1}}, empty_run{{0, 0, 0, 0, 0}},
        long_run{{0, 0, 0, 0, kMax}, {0, 0, 0, 0, kMax}};
    const auto refused = [&](const disagg::Span& span, const std::vector<disagg::TokenRun>& table, std::int64_t num_threads) {
        const disagg::Span* const spans[] = {&span};
        const std::span<const disagg::TokenRun> tables[] = {table};
        return refuses([&] { disagg::expand(spans, tables, std::nullopt, num_threads, columns); });
    };
    CHECK(!refused(plain, run, 1));
    CHECK(refused(huge, run, 1) && refused(uneven, run, 1) && refused(plain, run, 0));
    CHECK(refused(plain, empty_run, 1) && refused(plain, long_run, 1));
    CHECK(refuses([&] { disagg::expand({}, std::vector<std::span<const disagg::TokenRun>>(1), std::nullopt, 1, columns); }));
}

void test_large_expand() {
    disagg::Span span{{}, {}, {}, {1, 4096, 8192}, {1, 64, 128}, {{2, 16, 16}}, 16, false};
    for (std::int64_t layer = 0; layer < 150; ++layer) {
        span.layers.push_back(layer);
        span.source_bases.push_back(static_cast<std::uint64_t>(layer) << 32);
        span.destination_bases.push_back(static_cast<std::uint64_t>(layer) << 40);
    }
    std::vector<disagg::TokenRun> runs;
    for (std::int64_t page = 0; page < 300; ++page) runs.push_back({page, 0, 300 - page, 0, 64});
    disagg::Columns one, many;
    const disagg::Span* const spans[] = {&span};
    const std::span<const disagg::TokenRun> tables[] = {runs};
    disagg::expand(spans, tables, std::nullopt, 1, one);
    disagg::expand(spans, tables, std::nullopt, 3, many);
    CHECK(one.size() == 150u * 300u * 64u && many.size() == one.size());
    CHECK(std::equal(one.source(), one.source() + one.size(), many.source()));
    CHECK(std::equal(one.destination(), one.destination() + one.size(), many.destination()));
    CHECK(std::equal(one.nbytes(), one.nbytes() + one.size(), many.nbytes()));
}

// ------------------------------------------------------------------------------------------------------------- digests

template <typename Unit>
void test_digest(std::mt19937_64& random, std::uint64_t num_heads, std::uint64_t width) {
    // [layer, page, token, head, width] and, of the same content, [layer, page, head, token, width], other pages.
    constexpr std::uint64_t kLayers = 2, kPage = 4, kPages = 5, kSize = sizeof(Unit);
    const std::uint64_t per_layer = kPages * kPage * num_heads * width;
    std::vector<Unit> nhd(kLayers * per_layer + 1), hnd(kLayers * per_layer + 1);
    const Ids ours{3, 1, 4}, theirs{0, 2, 1};
    const auto at = [&](std::uint64_t layer, std::uint64_t page, std::uint64_t a, std::uint64_t num_a, std::uint64_t b,
                        std::uint64_t num_b) { return layer * per_layer + ((page * num_a + a) * num_b + b) * width; };
    for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
        for (std::uint64_t token = 0; token < 12; ++token) {
            for (std::uint64_t head = 0; head < num_heads; ++head) {
                const auto p = static_cast<std::uint64_t>(ours[token / kPage]),
                           q = static_cast<std::uint64_t>(theirs[token / kPage]);
                for (std::uint64_t i = 0; i < width; ++i) {
                    const auto value = static_cast<Unit>(random());
                    nhd[at(layer, p, token % kPage, kPage, head, num_heads) + i] = value;
                    hnd[at(layer, q, head, num_heads, token % kPage, kPage) + i] = value;
                }
            }
        }
    }
    const std::vector<std::int64_t> layers{7, 2};
    const auto runs_of_pages = [](const Ids& ids, std::int64_t from, std::int64_t to) {
        const Side pages{ids, 0, 4, 5, {0, 1}, 1}, global{{0}, 0, std::int64_t{1} << 62, 1, {0, 1}, 1};
        return disagg::token_runs(from, to, 1, pages.list(), global.list()).runs;
    };
    const auto bases = [&](const std::vector<Unit>& memory, std::uint64_t offset) {
        const auto base = reinterpret_cast<std::uintptr_t>(memory.data()) + offset;
        return std::vector<std::uint64_t>{base, base + per_layer * kSize};
    };
    const auto of_nhd = [&](std::uint64_t head, std::uint64_t count, std::int64_t from, std::int64_t to, std::int64_t threads) {
        const std::vector<disagg::DigestAxis> axes{{count, width * kSize, head}, {width, kSize, 0}};
        const auto b = bases(nhd, head * width * kSize);
        const std::uint64_t row = num_heads * width * kSize;
        return disagg::digest({layers, b, kPage * row, row, axes, kSize, 99}, runs_of_pages(ours, from, to), threads);
    };
    const auto of_hnd = [&] {
        const std::vector<disagg::DigestAxis> axes{{num_heads, kPage * width * kSize, 0}, {width, kSize, 0}};
        const auto b = bases(hnd, 0);
        return disagg::digest({layers, b, kPage * num_heads * width * kSize, width * kSize, axes, kSize, 99},
                              runs_of_pages(theirs, 0, 12), 1);
    };
    const std::uint64_t whole = of_nhd(0, num_heads, 0, 12, 1);
    CHECK(whole == of_hnd());
    CHECK(whole == of_nhd(0, num_heads, 0, 12, 3));
    CHECK(whole == of_nhd(0, num_heads, 0, 5, 1) + of_nhd(0, num_heads, 5, 12, 1));
    CHECK(whole == of_nhd(0, 1, 0, 12, 1) + of_nhd(1, num_heads - 1, 0, 12, 1));
    std::swap(hnd[0], hnd[1]);
    CHECK(hnd[0] == hnd[1] || whole != of_hnd());
}

void test_refused_digests() {
    const std::vector<std::int64_t> layers{0};
    const std::vector<std::uint64_t> bases{0}, none{};
    const std::vector<disagg::TokenRun> run{{0, 0, 0, 0, 1}}, empty_run{{0, 0, 0, 0, 0}}, no_runs{};
    const std::vector<disagg::DigestAxis> huge(4, {1u << 20, 1, 0}), nothing{{0, 1, 0}};
    CHECK(refuses([&] { disagg::digest({layers, none, 0, 0, {}, 1, 0}, run, 1); }));
    CHECK(refuses([&] { disagg::digest({layers, bases, 0, 0, {}, 3, 0}, run, 1); }));
    CHECK(refuses([&] { disagg::digest({layers, bases, 0, 0, {}, 1, 0}, empty_run, 1); }));
    CHECK(refuses([&] { disagg::digest({layers, bases, 0, 0, {}, 1, 0}, run, 0); }));
    CHECK(refuses([&] { disagg::digest({layers, bases, 0, 0, huge, 1, 0}, run, 1); }));
    CHECK(disagg::digest({layers, bases, 0, 0, nothing, 1, 0}, run, 1) == 0);
    CHECK(disagg::digest({layers, bases, 0, 0, {}, 1, 0}, no_runs, 1) == 0);
}

// ------------------------------------------------------------------------------------------------------------- regions

using Words = std::vector<std::uint64_t>;

void test_located_ranges(std::mt19937_64& random) {
    constexpr std::uint64_t kTop = std::numeric_limits<std::uint64_t>::max();
    for (int round = 0; round < 5000; ++round) {
        Words starts, stops, devices;
        // Regions may touch; the last ones may end where addresses do.
        std::uint64_t at = random() % 2 == 0 ? random() % 20 : kTop - 300;
        for (std::size_t k = random() % 6; k > 0; --k) {
            at += random() % 3 * (random() % 10);
            starts.push_back(at);
            at += 1 + random() % 30;
            stops.push_back(at);
            devices.push_back(random() % 8);
        }
        const std::size_t count = random() % 20;
        Words addresses(count), nbytes(count);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t k = starts.empty() ? 0 : random() % starts.size();
            const bool inside = !starts.empty() && random() % 12 != 0;
            addresses[i] = inside ? starts[k] + random() % (stops[k] - starts[k]) : random();
            nbytes[i] = inside ? random() % (stops[k] - addresses[i] + 1) : random() % 9 == 0 ? random() : random() % 40;
        }
        const auto holds = [&](std::size_t k, std::size_t i) {  // no sum that could wrap
            return starts[k] <= addresses[i] && addresses[i] <= stops[k] && stops[k] - addresses[i] >= nbytes[i];
        };
        const auto held = [&](std::size_t i) {
            for (std::size_t k = 0; k < starts.size(); ++k) {
                if (holds(k, i)) return true;
            }
            return false;
        };
        std::size_t expected = 0;
        while (expected < count && held(expected)) ++expected;

        const disagg::RegionColumns regions{starts, stops, devices};
        const disagg::RangeColumns ranges{addresses, nbytes};
        // Exactly as much room as is asked for, so that a write too far is seen; none behind the first that is outside.
        std::vector<std::int64_t> where(count, -7);
        std::vector<disagg::Descriptor> rows(count, {7, 7, 7});
        CHECK(disagg::locate(regions, ranges, where) == expected);
        CHECK(disagg::describe(regions, ranges, rows) == expected);
        CHECK(disagg::count_held(regions, ranges) == expected);
        for (std::size_t i = 0; i < count; ++i) {
            if (i >= expected) {
                CHECK(where[i] == -7 && rows[i].address == 7 && rows[i].nbytes == 7 && rows[i].device == 7);
                continue;
            }
            const auto k = static_cast<std::size_t>(where[i]);
            CHECK(where[i] >= 0 && k < starts.size() && holds(k, i));
            CHECK(rows[i].address == addresses[i] && rows[i].nbytes == nbytes[i] && rows[i].device == devices[k]);
        }

        // As blocks of a few bytes, in lists of a few blocks: counted one by one.
        const std::uint64_t size = 1 + random() % 4, per_list = 1 + random() % 9;
        Words firsts;
        std::uint64_t num_blocks = 0;
        for (std::size_t k = 0; k < starts.size(); ++k) {
            firsts.push_back(num_blocks);
            num_blocks += (stops[k] - starts[k]) / size;
        }
        const auto number = [&](std::size_t i) {
            for (std::size_t k = 0; k < starts.size(); ++k) {
                for (std::uint64_t nth = 0; nth < (stops[k] - starts[k]) / size; ++nth) {
                    if (addresses[i] == starts[k] + nth * size && nbytes[i] == size) return firsts[k] + nth;
                }
            }
            return kTop;
        };
        if (random() % 2 == 0 && !starts.empty()) {  // blocks all of them, but for regions that are too short
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t k = random() % starts.size();
                const std::uint64_t most = (stops[k] - starts[k]) / size;
                addresses[i] = starts[k] + (most == 0 ? 0 : random() % most * size);
                nbytes[i] = size;
            }
        }
        std::vector<std::int32_t> lists(count), indices(count);
        std::int32_t highest = 0;
        for (std::size_t i = 0; i < count; ++i) {
            if (number(i) == kTop) highest = -1;
            if (highest >= 0) highest = std::max(highest, static_cast<std::int32_t>(number(i) / per_list));
        }
        CHECK(disagg::place_blocks(regions, ranges, {size, per_list, firsts}, {lists, indices}) == highest);
        for (std::size_t i = 0; i < count && highest >= 0; ++i) {
            const auto list = static_cast<std::uint64_t>(lists[i]), index = static_cast<std::uint64_t>(indices[i]);
            CHECK(list * per_list + index == number(i) && index < per_list);
        }
    }
}

void test_refused_ranges() {
    const Words one{1}, two{1, 2};
    std::vector<std::int64_t> room(1);
    const auto refused = [&](const disagg::RegionColumns& regions, const disagg::RangeColumns& ranges) {
        return refuses([&] { disagg::locate(regions, ranges, room); });
    };
    CHECK(refused({one, two, one}, {one, one}));
    CHECK(refused({one, one, two}, {one, one}));
    CHECK(refused({one, one, one}, {one, two}));
    CHECK(refused({one, one, one}, {two, two}));
    CHECK(!refused({two, two, two}, {one, one}));
}

// ------------------------------------------------------------------------------------------- copies between processes

// The other process is this one. Pieces of 3 bytes, more than one call takes; every second byte of the destination is
// another's.
void test_process_copies(std::mt19937_64& random) {
    constexpr std::size_t kCount = 5000, kSize = 3;
    std::vector<unsigned char> from(kCount * kSize), to(2 * kCount * kSize, 7), back(kCount * kSize);
    for (auto& byte : from) byte = static_cast<unsigned char>(random());
    Words local(kCount), remote(kCount), returned(kCount);
    const Words sizes(kCount, kSize);
    for (std::size_t i = 0; i < kCount; ++i) {
        local[i] = reinterpret_cast<std::uintptr_t>(from.data()) + i * kSize;
        remote[i] = reinterpret_cast<std::uintptr_t>(to.data()) + 2 * ((i * 7) % kCount) * kSize;
        returned[i] = reinterpret_cast<std::uintptr_t>(back.data()) + i * kSize;
    }
    CHECK(disagg::copy_between_processes(getpid(), {local, remote, sizes}, true, 2) == 0);
    for (std::size_t i = 0; i < kCount; ++i) {
        const std::size_t at = 2 * ((i * 7) % kCount) * kSize;
        CHECK(std::memcmp(&to[at], &from[i * kSize], kSize) == 0 && to[at + kSize] == 7);
    }
    CHECK(disagg::copy_between_processes(getpid(), {returned, remote, sizes}, false, 2) == 0);
    CHECK(back == from);
    remote[kCount - 1] = 16;
    CHECK(disagg::copy_between_processes(getpid(), {local, remote, sizes}, true, 1) == EFAULT);
    const auto refused = [&](const disagg::ProcessCopies& pieces) {
        return refuses([&] { disagg::copy_between_processes(getpid(), pieces, true, 1); });
    };
    CHECK(refused({std::span(local).first(1), remote, sizes}));
    CHECK(refused({local, std::span(remote).first(1), sizes}));
    CHECK(refused({local, remote, std::span(sizes).first(1)}));
}

}  // namespace

// -------------------------------------------------------------------------------------------------------------- orders

void test_orders(std::mt19937_64& random) {
    for (int round = 0; round < 300; ++round) {
        std::vector<disagg::SpanSize> sizes;
        std::vector<std::int64_t> at;
        for (std::uint64_t i = 0; i < 1 + random() % 4; ++i) {
            sizes.push_back({1 + random() % 3, 1 + random() % 40, 1 + random() % 5, random() % 2 == 0});
            at.push_back(static_cast<std::int64_t>(random() % 1000));
        }
        std::vector<std::vector<disagg::TokenRun>> tables(1 + random() % 3);
        for (auto& table : tables) {
            for (std::uint64_t i = 0; i < random() % 7; ++i) {
                const auto value = [&] { return static_cast<std::int64_t>(random() % 50); };
                table.push_back({value(), value(), value(), value(), 1 + value()});
            }
        }
        const std::vector<std::int64_t> chosen{0, 2, 1};
        std::vector<disagg::OrderPart> parts;
        std::uint64_t total = 0;
        for (std::uint64_t i = 0; i < random() % 6; ++i) {
            parts.push_back({random() % sizes.size(), std::nullopt, tables[random() % tables.size()]});
            const std::uint64_t some = random() % (chosen.size() + 1);
            if (random() % 2) parts.back().bases = std::span(chosen).first(some);
            std::uint64_t positions = 0;
            for (const auto& run : parts.back().runs) positions += static_cast<std::uint64_t>(run.length);
            const disagg::SpanSize& size = sizes[parts.back().span];
            total += (parts.back().bases ? some : size.num_bases) * positions * size.steps * size.nbytes;
        }
        disagg::Order order(sizes, parts);
        CHECK(order.total_nbytes() == total);
        std::vector<std::uint64_t> words(order.num_words());
        const std::uint64_t tile = 1 + random() % 100;
        CHECK(order.encode(at, tile, words) <= 8 * words.size());
        if (total == 0) continue;
        std::uint64_t end = order.tiles(0, 1).second;
        CHECK(order.tiles(0, 1).first == 0);
        for (std::uint64_t low = 0; low < total; low += 1 + random() % 50) {
            const std::uint64_t first = order.tiles(low, low + 1).first;
            CHECK(first < order.tiles(low, total).second && first + 1 >= end);
            end = first + 1;
        }
    }
}

int main() {
    std::mt19937_64 random(20240607);
    test_orders(random);
    test_edges_of_runs();
    test_random_runs<std::int64_t, std::int64_t>(random);
    test_random_runs<std::int32_t, std::int32_t>(random);
    test_random_runs<std::int32_t, std::int64_t>(random);
    test_random_runs<std::int64_t, std::int32_t>(random);
    test_located_ranges(random);
    test_refused_ranges();
    test_process_copies(random);
    test_refused_copies();
    test_refused_packs();
    test_token_runs(random);
    test_extreme_token_runs();
    test_expand(random);
    test_large_expand();
    for (const std::uint64_t num_heads : {1u, 2u, 3u}) {
        test_digest<std::uint8_t>(random, num_heads, 33);
        test_digest<std::uint16_t>(random, num_heads, 128);
        test_digest<std::uint32_t>(random, num_heads, 5);
        test_digest<std::uint64_t>(random, num_heads, 16);
    }
    test_digest<std::uint16_t>(random, 2, 2000);
    test_refused_digests();
    for (const std::int64_t num_threads : {1, 2, 3, 8}) {
        test_copies(random, 500, 64, num_threads);
        test_copies(random, 300, 32768, num_threads);
        test_copies(random, 3, 3000000, num_threads);
    }
    std::puts("csrc: all tests passed");
}
