// Digests: independent of the layout in memory, and additive.
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "digest.hpp"
#include "side.hpp"
#include "tests.hpp"

namespace {

template <typename Unit>
void test_digest_of(std::mt19937_64& random, std::uint64_t num_heads, std::uint64_t width) {
    // The same content as [layer, page, token, head, width] and as [layer, page, head, token, width], in different pages.
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

}  // namespace

void test_digests(std::mt19937_64& random) {
    for (const std::uint64_t num_heads : {1u, 2u, 3u}) {
        test_digest_of<std::uint8_t>(random, num_heads, 33);
        test_digest_of<std::uint16_t>(random, num_heads, 128);
        test_digest_of<std::uint32_t>(random, num_heads, 5);
        test_digest_of<std::uint64_t>(random, num_heads, 16);
    }
    test_digest_of<std::uint16_t>(random, 2, 2000);
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
