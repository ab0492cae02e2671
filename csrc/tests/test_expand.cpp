// The expansion of spans, and streams over them, against an expansion of one copy after the other.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "expand.hpp"
#include "pack.hpp"
#include "tests.hpp"

namespace {

using Copies = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;

// All copies, one after the other, each joined to the one before if they are adjacent on both sides.
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

// Streams of both sides hold the bytes of the copies in order, whole and in parts.
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

}  // namespace

void test_expand(std::mt19937_64& random) {
    disagg::Columns columns;  // reused in every round
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

        // Filling in parts, as several threads do, gives the same result.
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
}

void test_refused_expand() {
    disagg::Columns columns;
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
