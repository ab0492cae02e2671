// Copies within this process, directly and through streams, and copies between processes.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "copy.hpp"
#include "pack.hpp"
#include "process_copy.hpp"
#include "tests.hpp"

namespace {

// A stream of these pieces, with bytes as tokens and addresses as rows.
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

void test_copies_of(std::mt19937_64& random, std::size_t num_pieces, std::uint64_t largest, std::int64_t num_threads) {
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

    // The same in two steps: gather into a contiguous copy of `from`, and scatter from there.
    std::vector<unsigned char> staging(total);
    const auto staged = reinterpret_cast<std::uintptr_t>(staging.data());
    stream_of(disagg::Side::kSource, source, nbytes).gather(0, total, staged, num_threads);
    CHECK(staging == from);
    std::fill(to.begin(), to.end(), static_cast<unsigned char>(0));
    stream_of(disagg::Side::kDestination, destination, nbytes).scatter(0, total, staged, num_threads);
    CHECK(to == expected);
}

}  // namespace

void test_copies(std::mt19937_64& random) {
    for (const std::int64_t num_threads : {1, 2, 3, 8}) {
        test_copies_of(random, 500, 64, num_threads);
        test_copies_of(random, 300, 32768, num_threads);
        test_copies_of(random, 3, 3000000, num_threads);
    }
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
    // Sums that wrap are refused, within a layer and over all layers.
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

// The other process is this one. There are more pieces of 3 bytes than one call takes, and gaps between their destinations.
void test_process_copies(std::mt19937_64& random) {
    constexpr std::size_t kCount = 5000, kSize = 3;
    std::vector<unsigned char> from(kCount * kSize), to(2 * kCount * kSize, 7), back(kCount * kSize);
    for (auto& byte : from) byte = static_cast<unsigned char>(random());
    std::vector<std::uint64_t> local(kCount), remote(kCount), returned(kCount);
    const std::vector<std::uint64_t> sizes(kCount, kSize);
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
